"""`colibrictl demo`: a conversation in a named session survives `kill -9`, and the figures show it.

The demo owns a folder of its own (socket and data) and a daemon that it starts as anybody would, so nothing of the
user's is touched. What it claims, it compares: a second daemon, with data of its own, holds the same conversation
undisturbed, and every reply must be the same tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import colibri

from .command import EXIT_ERROR, carried_model, fail, offline

# A tiny model on a slow, busy machine is ready within this; beyond it something is wrong.
START_TIMEOUT_S = 60.0
# How long the store may take to write behind what the conversation left; the demo goes on without it after that.
WRITE_TIMEOUT_S = 10.0

CONVERSATION = ["Hi, my name is Ada.", "My favourite colour is green.", "Tell me a story about a fox.", "Thank you!"]
QUESTION = "What is my name?"
QUESTION_IN_FORK = "What is my favourite colour?"


@dataclasses.dataclass
class Figures:
    """What the demo proves, in the order it is printed."""

    model: str = ""
    tokens_before_kill: int = 0
    restart_s: float = 0.0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    first_token_s: float = 0.0
    fork_prefilled_tokens: int = 0
    same_replies: bool = False


class DemoFailed(Exception):
    """The daemon did not do its part; the words say which."""


class DemoDaemon:
    """`colibrid` on the given model, with socket and data in `folder`."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model = model
        self.socket = str(folder / "colibri.sock")
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Starts it and returns the seconds until it answered."""
        command = [sys.executable, "-m", "colibri.daemon.main", "--model", self.model]
        command += ["--socket", self.socket, "--data-dir", str(self.folder / "data")]
        begin = time.monotonic()
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while time.monotonic() - begin < START_TIMEOUT_S:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(colibri.DaemonUnavailable):
                colibri.connect(self.socket).close()
                return time.monotonic() - begin
            time.sleep(0.02)
        raise DemoFailed(f"the daemon did not start:\n{(self.folder / 'daemon.log').read_text(errors='replace')}")

    def kill(self) -> None:
        """SIGKILL: no handler of the daemon runs."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ends it however far it came."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def demo_daemon(model: str) -> Iterator[DemoDaemon]:
    # A socket path may have about 100 bytes, so not in a deep folder of the user's.
    with tempfile.TemporaryDirectory(prefix="colibri-demo-") as folder:
        daemon = DemoDaemon(model, Path(folder))
        try:
            yield daemon
        finally:
            daemon.stop()


def run_demo(model: str, say: Callable[[str], None]) -> Figures:
    """Holds the conversation, kills, goes on; `say` gets the lines to show. Raises DemoFailed, ColibriError."""
    figures = Figures()
    with demo_daemon(model) as daemon:
        say(f"starting colibrid on {model} …")
        say(f"  it answers after {daemon.start():.2f} s")
        replies = _first_life(daemon, figures, say)
        say(f"\nkill -9 {daemon.process.pid if daemon.process else ''}")
        daemon.kill()
        figures.restart_s = daemon.start()
        say(f"started again, and it answers after {figures.restart_s:.2f} s\n")
        replies += _second_life(daemon, figures, say)
    figures.same_replies = [reply.tokens for reply in replies] == _undisturbed(model)
    return figures


def _first_life(daemon: DemoDaemon, figures: Figures, say: Callable[[str], None]) -> list[colibri.Reply]:
    with colibri.connect(daemon.socket) as client:
        figures.model = client.server.model.name
        session = client.session("demo")
        say(f"  {session}\n")
        replies = [_turn(session, text, say) for text in CONVERSATION]
        figures.tokens_before_kill = session.n_tokens
        _wait_until_written(client)
        return replies


def _second_life(daemon: DemoDaemon, figures: Figures, say: Callable[[str], None]) -> list[colibri.Reply]:
    with colibri.connect(daemon.socket) as client:
        session = client.session("demo", resume=True)
        say(f"  {session}\n")
        reply = _turn(session, QUESTION, say)
        figures.cached_tokens = reply.usage.cached_tokens
        figures.prefilled_tokens = reply.usage.prompt_tokens - reply.usage.cached_tokens
        figures.first_token_s = reply.timings.queue_s + reply.timings.load_s + reply.timings.prefill_s
        fork = session.fork("demo-fork")
        say(f"\n  a fork of it: {fork}\n")
        forked = _turn(fork, QUESTION_IN_FORK, say)
        figures.fork_prefilled_tokens = forked.usage.prompt_tokens - forked.usage.cached_tokens
        return [reply, forked]


def _undisturbed(model: str) -> list[list[int]]:
    """The tokens of every reply where nothing is killed, stored or forked in between."""
    with demo_daemon(model) as daemon:
        daemon.start()
        with colibri.connect(daemon.socket) as client:
            session = client.session("undisturbed")
            texts = [*CONVERSATION, QUESTION, QUESTION_IN_FORK]
            return [_turn(session, text, _silent).tokens for text in texts]


def _turn(session: colibri.Session, text: str, say: Callable[[str], None]) -> colibri.Reply:
    reply = session.chat(text, temperature=0, max_tokens=160)
    say(f"  you      {text}\n  colibri  {reply.text.strip()}")
    return reply


def _wait_until_written(client: colibri.Client) -> None:
    """Until pages and tails are behind us on disk: an idle daemon writes them by itself."""
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while time.monotonic() < deadline:
        pages: dict[str, Any] = client.stats()["pages"]
        if pages["unsaved"] == 0 and pages["write_queue"] == 0:
            return
        time.sleep(0.05)


def default_model() -> str:
    """Path of the model that the package carries."""
    path = carried_model()
    if path is None:
        raise DemoFailed("this installation carries no default model; name one with --model")
    return path


def report(figures: Figures) -> list[str]:
    """The figures as lines."""
    kept = figures.cached_tokens / max(1, figures.tokens_before_kill)
    same = "the same tokens" if figures.same_replies else "DIFFERENT TOKENS"
    return [
        "",
        f"conversation before the kill   {figures.tokens_before_kill} tokens",
        f"KV found on disk after it      {figures.cached_tokens} tokens ({kept:.0%})",
        f"prefilled to go on             {figures.prefilled_tokens} tokens, the new question among them",
        f"time to its first token        {figures.first_token_s * 1000:.1f} ms",
        f"prefilled in the fork          {figures.fork_prefilled_tokens} tokens, its question",
        f"against an undisturbed daemon  {same} in every reply",
    ]


@click.command()
@click.option("--model", metavar="M.colibri", help="Another model than the one that is carried along.")
@offline
def demo(model: str | None, as_json: bool) -> None:
    """A conversation that survives kill -9, with the figures that show it."""
    try:
        figures = run_demo(model or default_model(), _silent if as_json else click.echo)
    except DemoFailed as error:
        fail({"type": "demo_failed", "message": str(error)}, str(error), as_json, EXIT_ERROR)
    click.echo(json.dumps(dataclasses.asdict(figures)) if as_json else "\n".join(report(figures)))
    if not figures.same_replies:
        raise SystemExit(EXIT_ERROR)


def _silent(_line: str) -> None:
    """Where only the figures are wanted."""
