"""A real daemon in its own process, and a client of a few lines that shows every answer."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from colibri.protocol import Answer, ClientProtocol, ConnectionFailed, Done, Failure, Token
from colibri.protocol import messages as wire
from colibri.protocol.errors import ConnectionLost

# Far more than anything here takes, far less than a stuck test may.
TIMEOUT_S = 60.0
# The likeliest token, but never an end token of the tiny models: a reply ends when the test wants it to.
GREEDY = wire.Sampling(temperature=0.0, logit_bias={0: -1000.0, 2: -1000.0})


class DaemonProcess:
    """colibrid on a model, with socket and data in `folder`. Small pools: the models are tiny."""

    def __init__(self, model: Path, folder: Path, *options: str, umask: int = -1) -> None:
        self.model = model
        self.folder = folder
        self.options = options
        self.socket = folder / "c.sock"
        self.data = folder / "data"
        self._umask = umask
        self._process: subprocess.Popen[str] | None = None
        self.log: deque[str] = deque(maxlen=1000)
        self._reader: threading.Thread | None = None

    def start(self) -> Self:
        """Returns when it is ready. Raises RuntimeError with its words if it does not get there."""
        command = [sys.executable, "-m", "colibri.daemon.main", "--model", str(self.model)]
        command += ["--socket", str(self.socket), "--data-dir", str(self.data), "--kv-ram", "32MiB"]
        self._process = subprocess.Popen(
            [*command, *self.options],
            stderr=subprocess.PIPE,
            text=True,
            umask=self._umask,
        )
        assert self._process.stderr is not None
        self.log.clear()
        for line in self._process.stderr:
            self.log.append(line)
            if line.startswith("colibrid is ready"):
                break
        else:
            code = self._process.wait(TIMEOUT_S)
            raise RuntimeError(f"exit code {code}: {''.join(self.log)}")
        self._reader = threading.Thread(target=self.log.extend, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        assert self._process is not None
        code = self._process.wait(TIMEOUT_S)
        if self._reader is not None:
            self._reader.join(TIMEOUT_S)
        return code

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def connect(self) -> WireClient:
        return WireClient(self.socket)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.kill()


class Reply:
    """All answers to one request, put together."""

    def __init__(self, answers: list[Answer]) -> None:
        assert isinstance(answers[-1].body, Done | Failure)
        self.last = answers[-1].body
        tokens = [answer.body for answer in answers if isinstance(answer.body, Token)]
        self.text = "".join(token.text for token in tokens)
        self.ids = [id for token in tokens for id in token.ids]
        self.logprobs = [logprob for token in tokens for logprob in token.logprobs or ()]
        self.pieces = [token.text for token in tokens]

    @property
    def result(self) -> Any:
        """What `done` held. Raises what `error` held."""
        if isinstance(self.last, Failure):
            raise self.last.error
        return self.last.result


class WireClient:
    """One connection. Requests may be sent before earlier ones are answered."""

    def __init__(self, path: Path) -> None:
        self.protocol = ClientProtocol()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(str(path))
        self._answers: dict[int, list[Answer]] = {}
        self._failure: Exception | None = None
        self._socket.sendall(self.protocol.send_hello("tests"))
        while self.protocol.server is None:
            self._receive()

    @property
    def server(self) -> wire.ServerInfo:
        assert self.protocol.server is not None
        return self.protocol.server

    def send(self, request: wire.Request) -> int:
        """The id of the request."""
        id, data = self.protocol.send_request(request)
        self._answers[id] = []
        with contextlib.suppress(BrokenPipeError):  # reading will say why
            self._socket.sendall(data)
        return id

    def answers(self, id: int) -> Iterator[Answer]:
        """Answers as they come, the last one included. Raises ConnectionLost and the like."""
        while True:
            while not self._answers[id]:
                self._receive()
            answer = self._answers[id].pop(0)
            yield answer
            if answer.final:
                return

    def wait_for(self, id: int, kind: type[Any]) -> Any:
        """The next answer's body of this kind."""
        return next(answer.body for answer in self.answers(id) if isinstance(answer.body, kind))

    def finish(self, id: int) -> Reply:
        """Waits for the rest of the answers."""
        return Reply(list(self.answers(id)))

    def ask(self, request: wire.Request) -> Reply:
        """Sends and waits for all answers."""
        return self.finish(self.send(request))

    def chat(self, text: str, **fields: Any) -> Reply:
        return self.ask(chat(text, **fields))

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.ask(wire.Stats()).result
        return stats

    def wait_until(self, condition: Any) -> dict[str, Any]:
        """Asks for stats until they are as wanted; gives them."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            stats = self.stats()
            if condition(stats):
                return stats
            select.select([], [], [], 0.01)
        raise TimeoutError(f"never so: {stats}")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        events = self.protocol.receive_data(data) if data else self.protocol.receive_eof()
        for event in events:
            if isinstance(event, ConnectionFailed):
                self._failure = event.error
            else:
                self._answers.setdefault(event.id, []).append(event)
        if not data and self._failure is None:
            self._failure = ConnectionLost("the daemon closed the connection")


def chat(text: str, **fields: Any) -> wire.Chat:
    return wire.Chat(messages=[wire.Message(role="user", content=text)], **fields)
