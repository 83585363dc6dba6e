"""Every error that crosses the wire, once, for daemon and client.

    ColibriError
    ├── InvalidRequest            invalid_request      a field is missing, of the wrong type or out of range
    │   ├── UnknownOperation      unknown_operation
    │   └── PromptTooLong         prompt_too_long      prompt and reply exceed the context
    ├── ProtocolError             protocol_error       the bytes are not this protocol; the connection is closed
    │   ├── FrameTooLarge         frame_too_large
    │   └── UnsupportedVersion    unsupported_version
    ├── SessionError
    │   ├── SessionNotFound       session_not_found
    │   ├── SessionExists         session_exists
    │   ├── SessionBusy           session_busy
    │   ├── SessionCorrupt        session_corrupt      names the damaged turns
    │   └── SessionMismatch       session_mismatch     made with another tokenizer
    ├── Overloaded                overloaded           the queue is full; carries retry_after_s
    ├── CapacityExceeded          capacity_exceeded    the sequence cannot fit the KV budget
    ├── Cancelled                 cancelled
    ├── DeadlineExceeded          deadline_exceeded
    ├── StorageError              storage_error
    │   └── StorageFull           storage_full
    ├── NumericError              numeric_error        a row of the model is not finite
    ├── ModelLost                 model_lost           the model file was cut, or its disk failed, under the daemon
    ├── TemplateError             template_error       the chat template raised, or there is none
    ├── ShuttingDown              shutting_down
    ├── InternalError             internal_error       a bug of ours; the log has the traceback
    ├── DaemonUnavailable         daemon_unavailable   nobody answers at the socket (client side)
    └── ConnectionLost            connection_lost      the daemon went away in mid-request (client side)

`message` says what is wrong, `where` names the field, file or session, `hint` says what to do.
"""

from __future__ import annotations

import builtins
from typing import Any, ClassVar


class ColibriError(Exception):
    """Base of all errors; `type` is the name on the wire, `extra` holds figures a program may want."""

    type: ClassVar[str] = "error"
    _by_type: ClassVar[dict[str, builtins.type[ColibriError]]] = {}

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        self.extra = extra

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "type" in cls.__dict__:
            ColibriError._by_type[cls.type] = cls

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text

    def to_wire(self) -> dict[str, Any]:
        """The map sent under `error`."""
        wire: dict[str, Any] = self.extra | {"type": self.type, "message": self.message}
        if self.where is not None:
            wire["where"] = self.where
        if self.hint is not None:
            wire["hint"] = self.hint
        return wire

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> ColibriError:
        """The exception for a received map; an unknown type becomes a plain ColibriError that keeps its words."""
        fields = dict(wire)
        cls = ColibriError._by_type.get(str(fields.pop("type", "error")), ColibriError)
        where, hint = (None if fields.get(key) is None else str(fields[key]) for key in ("where", "hint"))
        error = cls(str(fields.pop("message", "")), where=where, hint=hint)
        error.extra = {key: value for key, value in fields.items() if key not in ("where", "hint")}
        return error


class InvalidRequest(ColibriError):
    type = "invalid_request"


class UnknownOperation(InvalidRequest):
    type = "unknown_operation"


class PromptTooLong(InvalidRequest):
    type = "prompt_too_long"


class ProtocolError(ColibriError):
    type = "protocol_error"


class FrameTooLarge(ProtocolError):
    type = "frame_too_large"


class UnsupportedVersion(ProtocolError):
    type = "unsupported_version"


class SessionError(ColibriError):
    """What went wrong concerns one session; `where` is its name."""


class SessionNotFound(SessionError):
    type = "session_not_found"


class SessionExists(SessionError):
    type = "session_exists"


class SessionBusy(SessionError):
    type = "session_busy"


class SessionCorrupt(SessionError):
    type = "session_corrupt"


class SessionMismatch(SessionError):
    type = "session_mismatch"


class Overloaded(ColibriError):
    type = "overloaded"


class CapacityExceeded(ColibriError):
    type = "capacity_exceeded"


class Cancelled(ColibriError):
    type = "cancelled"


class DeadlineExceeded(ColibriError):
    type = "deadline_exceeded"


class StorageError(ColibriError):
    type = "storage_error"


class StorageFull(StorageError):
    type = "storage_full"


class NumericError(ColibriError):
    type = "numeric_error"


class ModelLost(ColibriError):
    type = "model_lost"


class TemplateError(ColibriError):
    type = "template_error"


class ShuttingDown(ColibriError):
    type = "shutting_down"


class InternalError(ColibriError):
    type = "internal_error"


class DaemonUnavailable(ColibriError):
    type = "daemon_unavailable"


class ConnectionLost(ColibriError):
    type = "connection_lost"
