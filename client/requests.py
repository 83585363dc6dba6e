"""What the methods of both clients take, and the requests that they make of it."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from .protocol import default_socket_path
from .protocol.errors import DaemonUnavailable, InvalidRequest
from .protocol.messages import Chat, Detokenize, Generate, Message, Sampling, Score

Prompt = str | Iterable[int]
# One text of the user, or messages as maps with role, content and what else docs/protocol.md names.
Messages = str | Sequence[Mapping[str, Any] | Message]

_MESSAGE_HINT = "a message is {'role': 'user', 'content': '…'}"

CONNECT_TIMEOUT_S = 10.0
# Of session.list: few round trips, and far from the limit of a frame.
PAGE_SESSIONS = 1000


class Options(TypedDict, total=False):
    """What generate and chat take besides their input; docs/protocol.md says what each means."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    stop: Sequence[str] | str
    logprobs: int
    deadline_s: float


class ChatOptions(Options, total=False):
    """What chat takes besides: for the chat template."""

    tools: Sequence[Mapping[str, Any]]
    template_args: Mapping[str, Any]


_SAMPLING = frozenset(Sampling.__dataclass_fields__)


def generate_request(prompt: Prompt, options: Options, *, parse_special: bool = False) -> Generate:
    """Raises TypeError for an unknown option; values are checked when it is sent."""
    source = {"prompt": prompt} if isinstance(prompt, str) else {"tokens": _ids(prompt, "prompt", "text or token ids")}
    return Generate(**source, parse_special=parse_special, **_common(options))


def chat_request(messages: Messages, options: ChatOptions) -> Chat:
    """Raises TypeError for an unknown option, InvalidRequest for a wrong message."""
    return Chat(messages=_messages(messages), **_common(options, ChatOptions))


def score_request(tokens: Prompt, deadline_s: float | None) -> Score:
    """Of text or token ids."""
    source = {"text": tokens} if isinstance(tokens, str) else {"tokens": _ids(tokens, "tokens", "text or token ids")}
    return Score(**source, deadline_s=deadline_s)


def detokenize_request(tokens: Iterable[int]) -> Detokenize:
    return Detokenize(tokens=_ids(tokens, "tokens", "token ids"))


def _common(options: Options, known: type[Options] = Options) -> dict[str, Any]:
    """Options as the fields of a request: those of sampling apart, those that are None left out."""
    given = {name: value for name, value in options.items() if value is not None}
    names = known.__annotations__
    if unknown := given.keys() - names.keys():
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; known are {', '.join(sorted(names))}")
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = [stop]
    elif stop is not None:
        given["stop"] = list(stop)  # type: ignore[call-overload]
    return given | {"sampling": Sampling(**sampling)}  # type: ignore[arg-type]


def _messages(messages: Messages) -> list[Message]:
    if isinstance(messages, str):
        return [Message(role="user", content=messages)]
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f"must be text or a list of messages, not {_shown(messages)}", where="messages", hint=_MESSAGE_HINT
        )
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, str] | Message, where: str) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"must be a message, not {_shown(message)}", where=where, hint=_MESSAGE_HINT)
    return Message.from_wire(dict(message), where)


def _ids(tokens: Iterable[int], where: str, what: str) -> list[int]:
    """Token ids as plain integers: numpy's are welcome. Bytes are no ids, though each of them is an integer."""
    if isinstance(tokens, str | bytes | bytearray) or not isinstance(tokens, Iterable):
        raise InvalidRequest(f"must be {what}, not {_shown(tokens)}", where=where)
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise InvalidRequest(f"must be {what}: {error}", where=where) from None


def _shown(value: object) -> str:
    """A wrong value for an error: enough of it to know it again."""
    words = repr(value)
    return words if len(words) <= 40 else f"{words[:37]}…"


def socket_path(path: str | os.PathLike[str] | None) -> str:
    """Where connect() looks. Raises TypeError for what is no path."""
    return default_socket_path() if path is None else os.fsdecode(path)


def unavailable(path: str, error: OSError) -> DaemonUnavailable:
    """Why nobody could be reached at `path`, and what to do."""
    start = "start it with: colibrid --model default"
    if isinstance(error, FileNotFoundError):
        words, hint = "no daemon listens here", start
    elif isinstance(error, ConnectionRefusedError):
        words, hint = "the socket is there, but no daemon answers", start
    elif isinstance(error, PermissionError):
        words, hint = "this user may not connect", "run as the daemon's user"
    elif isinstance(error, TimeoutError):
        words, hint = "the daemon does not accept connections", "is it overloaded or stopped?"
    else:
        words, hint = f"cannot connect: {error.strerror or error}", "set COLIBRI_SOCKET to the daemon's socket"
    return DaemonUnavailable(words, where=path, hint=hint)


def not_greeted(path: str, timeout_s: float | None) -> DaemonUnavailable:
    """Somebody accepted, and said nothing."""
    return DaemonUnavailable(
        f"no greeting within {timeout_s or 0:g} s", where=path, hint="is this colibrid's socket, and is it overloaded?"
    )
