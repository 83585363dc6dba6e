"""A daemon from start to end: start-up, the life in between, shut-down.

    take the socket that was passed, or claim a path → open the model → lock the data directory → lay out the KV pool
    → start the engine thread → listen → ready
    SIGTERM or SIGINT → stop accepting → let requests finish for a while → cancel the rest, which saves their turns
    → save KV pages → close the databases → remove the socket, if it is ours → exit 0
    a second signal → exit at once; what was acknowledged is on disk

Whatever stands in the way of a start is said in one sentence, with exit code 1, before anything was changed.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import IO, Any

import click

from colibri.daemon.completion import Completer, Defaults, StepEvents
from colibri.daemon.config import Config, format_size
from colibri.daemon.connection import Connection
from colibri.daemon.dispatcher import Dispatcher
from colibri.daemon.engine import EngineThread
from colibri.daemon.model_file import ModelFile
from colibri.daemon.pages import PageTable, numerics_key
from colibri.daemon.scheduler import Limits, Scheduler
from colibri.daemon.server import Server
from colibri.daemon.sessions import Sessions
from colibri.daemon.socket_activation import BadPassedSocket, PassedSocket, take_passed_socket
from colibri.daemon.socket_path import SocketInUse, SocketPath
from colibri.daemon.template import ChatEncoder
from colibri.daemon.text import Tokenizer
from colibri.kvstore import DataDir, StoreError
from colibri.native import NUMERICS_VERSION, PAGE_TOKENS, Context, Model, NativeError, OutOfMemory
from colibri.protocol import MAX_FRAME_BYTES, PROTOCOL_VERSION
from colibri.protocol import messages as wire
from colibri.protocol.connection import MAX_REQUESTS_PER_CONNECTION
from colibri.protocol.errors import ShuttingDown, TemplateError

log = logging.getLogger("colibri.daemon")

_ELEMENT_BYTES = {"f16": 2, "f32": 4}
# What blocks on the disk is short, and so is reading most texts; more threads would only take turns with the engine's.
_EXECUTOR_THREADS = 4
# Pages are numbered in 32 bits, with a sign.
_MAX_PAGES = (1 << 31) - 1
_MEMORY_HINT = "lower --kv-ram, or raise the limit: ulimit -v, or LimitAS= of its unit"
# After cancelling, for turns to be saved, and for the engine to end its step and save pages.
_SAVE_TIMEOUT_S = 20.0
# In every reply where routing is static.
_APPROXIMATE = "approximate: experts are chosen by a static table, not by the model's router"


class CannotStart(click.ClickException):
    """What stands in the way, in one line; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """As colibrictl says its errors."""
        click.echo(f"colibrid: {self.format_message()}", file=file, err=file is None)


@dataclass
class Daemon:
    """The parts of a running daemon, in the order in which they were opened."""

    config: Config
    socket: SocketPath | PassedSocket
    model: Model
    data: DataDir
    engine: EngineThread
    executor: ThreadPoolExecutor
    dispatcher: Dispatcher
    server: Server

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then shuts down."""
        self.engine.start()
        await self.server.start(self.socket.listen())
        log.info("serving %s at %s", self.dispatcher.server_info.model.name, self.socket.path)
        click.echo(f"colibrid is ready at {self.socket.path}", err=True)
        await stop.wait()
        await self._shut_down()

    async def _shut_down(self) -> None:
        log.info("shutting down")
        self.server.stop_accepting()
        await self._wait_for_calls(self.config.grace_s)
        for connection in self.server.connections:
            for call in connection.calls:
                call.cancel(ShuttingDown("the daemon is shutting down", hint="what was sent is saved"))
        await self._wait_for_calls(_SAVE_TIMEOUT_S)
        self.server.close()
        await asyncio.to_thread(self.engine.stop, drain=False, timeout_s=_SAVE_TIMEOUT_S)

    async def _wait_for_calls(self, timeout_s: float) -> None:
        tasks = {call.task for connection in self.server.connections for call in connection.calls if call.task}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)


def _open_model(config: Config) -> Model:
    path = config.model
    if (path / "config.json").is_file():
        raise CannotStart(
            f"{path} is a Hugging Face checkpoint; convert it first: "
            f"colibrictl convert {shlex.quote(str(path))} {shlex.quote(path.resolve().name)}.colibri"
        )
    weights = "read-trunk" if config.weights == "read" and config.expert_ram_bytes else config.weights
    return Model(path, weights=weights)


def open_daemon(config: Config, loop: asyncio.AbstractEventLoop, stack: ExitStack) -> Daemon:
    """Opens everything; `stack` closes it. Raises CannotStart."""
    try:
        socket = take_passed_socket() or SocketPath(config.socket)
        stack.callback(socket.close)
        model = stack.enter_context(_open_model(config))
        model_file = ModelFile(config.model, model.shards)
        tokenizer = Tokenizer.from_model(model.json)
        data = stack.enter_context(DataDir(config.data_dir, budget_bytes=config.kv_disk_bytes))
        context = _open_context(config, model)
        stack.callback(context.close)
    except (OutOfMemory, MemoryError) as error:
        raise CannotStart(f"{str(error) or 'no memory'} ({_MEMORY_HINT})") from error
    except (BadPassedSocket, SocketInUse, NativeError, StoreError, OSError, ValueError) as error:
        raise CannotStart(str(error).replace("expert_ram_bytes", "--expert-ram")) from error
    routing = f"static {context.table_checksum:016x}" if config.routing == "static" else "exact"
    key = numerics_key(model.info.fingerprint, kv_format=config.kv_format, routing=routing, version=NUMERICS_VERSION)
    pages = PageTable(context, n_pages=_n_pages(config, model), key=key, store=data.pages)
    limits = Limits(
        vocabulary=model.info.vocabulary,
        max_context=config.context or model.info.max_positions,
        max_batch_size=config.max_batch_size,
        max_step_rows=config.max_step_rows,
        max_logits=config.max_batch_size,
        max_queue=config.max_queue,
    )
    scheduler = Scheduler(context, pages, limits)
    events = StepEvents(loop)
    engine = EngineThread(context, pages, scheduler, on_step_end=events.step_ended)
    sessions = Sessions(
        data.truth,
        model_fingerprint=model.info.fingerprint,
        tokenizer_fingerprint=bytes.fromhex(model.json["tokenizer_fingerprint"]),
    )
    executor = ThreadPoolExecutor(_EXECUTOR_THREADS, thread_name_prefix="colibri-blocking")
    stack.callback(executor.shutdown)
    text_executor = ThreadPoolExecutor(_EXECUTOR_THREADS, thread_name_prefix="colibri-text")
    stack.callback(text_executor.shutdown, cancel_futures=True)
    completer = Completer(
        engine=engine,
        events=events,
        tokenizer=tokenizer,
        chat=_chat_encoder(model, tokenizer, limits.max_context),
        end_tokens=frozenset(model.info.end_tokens),
        defaults=Defaults.from_generation_config(model.json.get("generation_config")),
        sessions=sessions,
        numerics={"kv_format": config.kv_format, "numerics_version": NUMERICS_VERSION, "routing": routing},
        approximation=None if config.routing == "exact" else _APPROXIMATE,
        executor=executor,
        text_executor=text_executor,
    )
    server: Server
    dispatcher = Dispatcher(
        server_info=_server_info(config, model, limits, key),
        completer=completer,
        engine=engine,
        events=events,
        sessions=sessions,
        tokenizer=tokenizer,
        executor=executor,
        model_file=model_file,
        text_executor=text_executor,
        figures={
            "scheduler": scheduler.stats,
            "pages": pages.stats,
            "store": data.pages.stats,
            "engine": lambda: {
                "isa": context.isa,
                "routing": config.routing,
                "memory_bytes": context.memory_bytes,
                "kv_overflows": context.kv_overflows,
            },
            "experts": lambda: _expert_figures(context),
            "server": lambda: {"connections": len(server.connections), "max_connections": config.max_connections},
        },
        problems=lambda: _storage_problems(data),
    )
    server = Server(
        lambda: Connection(dispatcher, max_output_bytes=config.max_output_bytes),
        max_connections=config.max_connections,
    )
    return Daemon(config, socket, model, data, engine, executor, dispatcher, server)


def _expert_figures(context: Context) -> dict[str, Any]:
    """Nothing where experts are used from the mapping, of which the system decides what is in memory."""
    stats = context.expert_stats()
    return asdict(stats) | {"budget_bytes": stats.slots * stats.slot_bytes} if stats.slots else {}


def _storage_problems(data: DataDir) -> list[str]:
    """Sentences for `health`."""
    found = {"sessions cannot be saved": data.truth.problem(), "KV pages are not kept on disk": data.pages.problem()}
    return [f"{what}: {why}" for what, why in found.items() if why is not None]


def _page_bytes(config: Config, model: Model) -> int:
    """K and V of every layer for the tokens of one page (docs/numerics.md)."""
    info = model.info
    return 2 * info.n_layers * info.n_kv_heads * info.head_dim * PAGE_TOKENS * _ELEMENT_BYTES[config.kv_format]


def _n_pages(config: Config, model: Model) -> int:
    return config.kv_ram_bytes // _page_bytes(config, model)


def _open_context(config: Config, model: Model) -> Context:
    """Lays out the KV pool within --kv-ram. Raises CannotStart if it holds nothing, NativeError."""
    n_pages = _n_pages(config, model)
    if n_pages < 2:
        needed = format_size(2 * _page_bytes(config, model))
        raise CannotStart(f"--kv-ram {format_size(config.kv_ram_bytes)} is too small: two KV pages take {needed}")
    if n_pages > _MAX_PAGES:
        most = format_size(_MAX_PAGES * _page_bytes(config, model))
        raise CannotStart(f"--kv-ram {format_size(config.kv_ram_bytes)} is too large: KV pages take at most {most}")
    if config.context > model.info.max_positions:
        raise CannotStart(f"--context {config.context} is more than the {model.info.max_positions} of the model")
    return Context(
        model,
        n_pages=n_pages,
        kv_format=config.kv_format,
        max_rows=config.max_step_rows,
        max_logits=config.max_batch_size,
        max_context=config.context,
        prefill_threads=config.prefill_threads,
        decode_threads=config.decode_threads,
        expert_ram_bytes=config.expert_ram_bytes,
        static_table=config.static_table,
        routing=config.routing,
    )


def _chat_encoder(model: Model, tokenizer: Tokenizer, max_tokens: int) -> ChatEncoder:
    """A template that does not compile costs chat, not the daemon."""
    end_tokens = frozenset(model.info.end_tokens)
    try:
        return ChatEncoder.from_model(model.json, tokenizer, end_tokens, max_tokens)
    except TemplateError as error:
        log.warning("chat is not available: %s", error)
        return ChatEncoder(None, tokenizer, end_tokens)


def _server_info(config: Config, model: Model, limits: Limits, key: bytes) -> wire.ServerInfo:
    info = model.info
    return wire.ServerInfo(
        version=PROTOCOL_VERSION,
        server=f"colibrid {importlib.metadata.version('colibri-moe')}",
        model=wire.ModelInfo(
            name=config.model.stem,
            family=str(model.json.get("family", "unknown")),
            fingerprint=info.fingerprint.hex(),
            vocabulary=info.vocabulary,
            context=limits.max_context,
            layers=info.n_layers,
            experts=info.n_experts,
            top_k=info.top_k,
            numerics_key=key.hex(),
        ),
        limits=wire.Limits(
            frame_bytes=MAX_FRAME_BYTES, requests_per_connection=MAX_REQUESTS_PER_CONNECTION, queue=limits.max_queue
        ),
    )


async def serve(config: Config) -> None:
    """Runs a daemon from start to end. Raises CannotStart."""
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        daemon = open_daemon(config, loop, stack)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, stop, number)
        log.info("opened %s in %.2f s", config.model, time.monotonic() - started)
        await daemon.run(stop)
    log.info("stopped")


def _on_signal(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        log.warning("forced to stop")
        os._exit(128 + number)
    stop.set()
