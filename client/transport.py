"""One socket and many requests in flight: owns the connection, shared by all threads of a Client.

There is no thread of its own. Whoever waits for an answer reads the socket, one at a time, and puts what is for others
into their inboxes; so replies may be consumed in any order and by any thread. A reply that nobody wants any more is
cancelled and *abandoned*: its answers are thrown away as they come, and the next request waits until it has ended, so
that the daemon is done with it (its session is free again).

Ctrl-C may strike anywhere. While waiting it does no harm. Between taking bytes from the socket and understanding them,
or between the parts of a frame being sent, the stream of bytes would be torn: the connection is then given up, with
a sentence that says so, rather than misread.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock

from .protocol import Answer, ClientProtocol, ConnectionFailed, Done, Failure
from .protocol.errors import ColibriError, ConnectionLost, DeadlineExceeded
from .protocol.messages import Body, Cancel, Request, ServerInfo
from .requests import unavailable

# What the kernel hands over at once; a step's tokens are far smaller.
_READ_BYTES = 64 << 10
# The daemon stops within a layer, and a layer of a large model's prefill may take seconds on a small machine.
CANCEL_TIMEOUT_S = 30.0


class Transport:
    """Sends requests and gives out the bodies of their answers. All methods may be called by any thread."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes a connected socket over."""
        sock.setblocking(False)
        self._socket = sock
        self._protocol = ClientProtocol()
        self._sending = Lock()  # held while a frame is sent: keeps frames whole and ids in order
        self._changed = Condition(Lock())  # guards what follows
        self._inboxes: dict[int, deque[Body]] = {}
        self._abandoned: set[int] = set()  # in flight, answers unwanted
        self._reading = False  # some thread reads the socket
        self._error: ColibriError | None = None  # why the connection is of no further use
        self._dropped: deque[int] = deque()  # to be cancelled; filled by drop() without a lock

    def greet(self, client: str, timeout_s: float | None) -> ServerInfo:
        """Says hello. Raises what the daemon answers, or DeadlineExceeded."""
        self._inboxes[1] = deque()
        self._write(self._protocol.send_hello(client))
        body = self.receive(1, timeout_s)
        if isinstance(body, Failure):
            raise body.error
        assert self._protocol.server is not None
        return self._protocol.server

    def send(self, request: Request) -> int:
        """Sends a request and gives its id, by which its answers are to be received to the last one."""
        self._settle()
        return self._send(request)

    def receive(self, id: int, timeout_s: float | None = None) -> Body:
        """The next answer to a request. Raises ConnectionLost, ProtocolError, or DeadlineExceeded after timeout_s."""
        inbox = self._inboxes[id]
        self._read_until(lambda: bool(inbox), timeout_s)
        body = inbox.popleft()
        if isinstance(body, Done | Failure):
            with self._changed:
                self._inboxes.pop(id, None)
        return body

    def call(self, request: Request, timeout_s: float | None = None) -> Done:
        """Sends a request that is answered once, and gives its answer. Raises the error that it is answered with."""
        id = self.send(request)
        try:
            body = self.receive(id, timeout_s)
        except BaseException:
            self.drop(id)
            raise
        if isinstance(body, Failure):
            raise body.error
        assert isinstance(body, Done)
        return body

    def cancel(self, id: int) -> None:
        """Asks the daemon to end a request; its last answers are still to be received."""
        cancel_id = self._send(Cancel(target=id))
        with self._changed:
            self._abandon(cancel_id)

    def drop(self, id: int) -> None:
        """Cancels a request whose answers nobody will receive.

        Safe in __del__, which may interrupt any code, even this object's own while it holds a lock: if a lock is
        taken, the cancellation is left to the next request.
        """
        self._dropped.append(id)
        if self._sending.locked() or not self._changed.acquire(blocking=False):
            return
        self._changed.release()
        with contextlib.suppress(ColibriError):  # the next request will say it
            self._cancel_dropped()

    def close(self) -> None:
        """Closes the connection; the daemon ends what is in flight. May be called twice."""
        self.fail(ConnectionLost("the connection was closed by this program"))
        self._socket.close()

    @property
    def failed(self) -> bool:
        """Whether the connection is of no further use."""
        return self._error is not None

    def fail(self, error: ColibriError) -> None:
        """Gives the connection up: everybody who waits or comes later gets this error, unless there was one before."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who polls

    # Sending.

    def _send(self, request: Request) -> int:
        with self._sending:
            with self._changed:
                self._raise_if_failed()
                id, data = self._protocol.send_request(request)
                self._inboxes[id] = deque()
            try:
                self._write(data)
            except BaseException:  # the caller does not learn the id
                self._dropped.append(id)
                raise
        return id

    def _write(self, data: bytes) -> None:
        """Sends all of a frame; reads meanwhile, lest both ends wait for the other to read."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    self._wait(select.POLLIN | select.POLLOUT, None)
                    self._read_if_nobody_does()
        except OSError as error:
            self._read_if_nobody_does()  # it may have said why before it closed
            self.fail(ConnectionLost(f"the daemon went away: {error.strerror or error}", hint="connect again"))
            self._raise_if_failed()
        except BaseException:
            if left:
                self.fail(ConnectionLost("interrupted in the middle of a request", hint="connect again"))
            raise

    def _settle(self) -> None:
        """Waits until what was abandoned has ended."""
        self._cancel_dropped()
        if self._abandoned:
            self._read_until(lambda: not self._abandoned, CANCEL_TIMEOUT_S)

    def _cancel_dropped(self) -> None:
        while True:
            try:
                id = self._dropped.popleft()
            except IndexError:
                return
            with self._changed:
                if self._error is not None or id not in self._inboxes:
                    continue
                self._abandon(id)
                over = id not in self._abandoned
            if not over:
                self.cancel(id)

    def _abandon(self, id: int) -> None:
        """Throws away what came for a request, and what will. The lock is held."""
        inbox = self._inboxes.pop(id, ())
        if not any(isinstance(body, Done | Failure) for body in inbox):
            self._abandoned.add(id)

    # Receiving.

    def _read_until(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Reads, or lets another thread read, until `ready`, which is called under the lock."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            mine = False
            try:
                with self._changed:
                    if ready():
                        return
                    self._raise_if_failed()
                    left = _time_left(deadline)
                    if self._reading:
                        in_time = self._changed.wait(left)
                    else:
                        self._reading = mine = True
                if mine and (in_time := self._wait(select.POLLIN, left)):
                    self._read()
                if not in_time:
                    raise DeadlineExceeded(f"no answer for {timeout_s:g} s", hint="is the daemon overloaded?")
            finally:
                if mine:
                    self._stop_reading()

    def _read_if_nobody_does(self) -> None:
        with self._changed:
            if self._reading:
                return
            self._reading = True
        try:
            self._read()
        finally:
            self._stop_reading()

    def _stop_reading(self) -> None:
        with self._changed:
            self._reading = False
            self._changed.notify_all()

    def _wait(self, events: int, timeout_s: float | None) -> bool:
        """Waits until the socket can be read (or written); False after the time."""
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError:  # closed meanwhile: the read that follows says so
            return True
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def _read(self) -> None:
        """Takes what there is from the socket, and puts the answers into their inboxes."""
        try:
            data = self._socket.recv(_READ_BYTES)
            with self._changed:
                self._dispatch(data)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(ConnectionLost(f"the daemon went away: {error.strerror or error}", hint="connect again"))
        except BaseException:
            self.fail(ConnectionLost("interrupted in the middle of an answer", hint="connect again"))
            raise

    def _dispatch(self, data: bytes) -> None:
        for event in self._protocol.receive_data(data) if data else self._protocol.receive_eof():
            if isinstance(event, ConnectionFailed):
                self._error = self._error or event.error
            elif event.id in self._abandoned:
                if event.final:
                    self._abandoned.discard(event.id)
            else:
                self._deliver(event)
        if not data:
            self._error = self._error or ConnectionLost("the daemon closed the connection", hint="connect again")

    def _deliver(self, answer: Answer) -> None:
        self._inboxes[answer.id].append(answer.body)

    def _raise_if_failed(self) -> None:
        """Raises a fresh copy: several threads may each get one, and each gets a traceback of its own."""
        if (error := self._error) is not None:
            raise type(error)(error.message, where=error.where, hint=error.hint, **error.extra)


def open_socket(path: str, timeout_s: float | None) -> socket.socket:
    """A socket connected to the daemon. Raises DaemonUnavailable that says what was tried and what to do."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise unavailable(path, error) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _time_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
