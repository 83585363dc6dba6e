"""Sessions: named conversations whose token ids and messages are the truth about them.

A session is an append-only log of records in the truth store, and everything it is follows from them by a fold:

    create                                 turn 0
    begin     keep, tokens, messages       a turn's accepted prompt: history = history[:keep] + tokens     synced
    tokens    tokens                       generated so far, in batches; replaced by `end`                 not synced
    end       tokens, reason, message      the reply as it stands                                          synced
    truncate  n_tokens                     history = history[:n_tokens]                                    synced

A turn without `end` was cut off (a crash, a full disk): the session reopens as interrupted, with its prompt and all
batches that reached the disk. KV pages are derived from the tokens and are not mentioned here.

Calls block on the disk; the daemon makes them from an executor. Errors are those of colibri.protocol.
"""

from __future__ import annotations

import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from colibri.kvstore import NotFound, Record, RecordCorrupt, StoreError, StoreFull, TruthStore
from colibri.kvstore.records import pack_tokens, unpack_tokens
from colibri.protocol.errors import (
    InvalidRequest,
    SessionBusy,
    SessionCorrupt,
    SessionExists,
    SessionMismatch,
    SessionNotFound,
    StorageError,
    StorageFull,
)

Message = dict[str, Any]
Position = tuple[int, int]  # turn, part

MAX_NAME_BYTES = 200

# Parts of a turn, in the order of the log: begin, batches of tokens from 1 on, the end, truncations.
_BEGIN, _END, _TRUNCATE = 0, 1 << 31, (1 << 31) + 1

# A batch is written again as it grows, up to this many tokens: few records, and none held back in memory.
_BATCH_TOKENS = 64

# Sessions kept folded in memory when nobody uses them. A token costs up to 36 bytes.
_RECENT_SESSIONS = 32


@dataclass(frozen=True)
class SessionSummary:
    name: str
    created: float
    updated: float
    n_turns: int
    n_tokens: int
    state: str  # idle, active, interrupted, corrupt


@dataclass(frozen=True)
class TurnSummary:
    start: int  # index of its first token in the history
    reply_start: int
    sampling: dict[str, Any]
    reason: str | None = None  # None: not finished


@dataclass
class History:
    """The fold. `apply` is its only way to change, so that a live session and a reopened one cannot differ."""

    tokens: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[TurnSummary] = field(default_factory=list)
    created: float = 0.0
    updated: float = 0.0
    model: bytes = b""
    tokenizer: bytes = b""
    open: bool = False  # the last turn has no end
    interrupted: bool = False
    reply_message_start: int | None = None  # of the running chat turn; None: a raw prompt, whose reply is no message
    last: Position = (0, 0)  # of the last record

    def apply(self, record: Record) -> None:
        fields = record.fields
        self.last = record.position
        # A clock may be set back; a session is never older than its beginning.
        self.updated = max(self.updated, fields.get("at", self.updated))
        getattr(self, f"_apply_{fields['kind']}")(fields)

    def _apply_create(self, fields: Mapping[str, Any]) -> None:
        self.created = fields["at"]
        self.model, self.tokenizer = fields["model"], fields["tokenizer"]

    def _apply_begin(self, fields: Mapping[str, Any]) -> None:
        self.close_cut_off_turn()
        keep = fields["keep"]
        self.tokens[keep:] = unpack_tokens(fields["tokens"])
        self.messages = [message for message in self.messages if message["end"] <= keep]
        self.reply_message_start = None
        if fields["messages"]:
            self.messages += [{"end": len(self.tokens), **message} for message in fields["messages"]]
            self.reply_message_start = len(self.tokens)
        elif len(self.tokens) == keep and self.messages and self.messages[-1]["end"] == keep:
            # No new tokens: the turn continues this reply, and its end brings the words of the whole. Or it begins the
            # reply to this prompt, whose own turn was cut off before the first token.
            is_reply = "start" in self.messages[-1]
            self.reply_message_start = self.messages.pop()["start"] if is_reply else keep
        self.turns = [turn for turn in self.turns if turn.start < keep]
        self.turns.append(TurnSummary(keep, len(self.tokens), fields["sampling"]))
        self.model, self.tokenizer = fields["model"], fields["tokenizer"]
        self.open, self.interrupted = True, False

    def _apply_tokens(self, fields: Mapping[str, Any]) -> None:
        self.tokens[self.turns[-1].reply_start + fields["offset"] :] = unpack_tokens(fields["tokens"])

    def _apply_end(self, fields: Mapping[str, Any]) -> None:
        turn = self.turns[-1]
        self.tokens[turn.reply_start :] = unpack_tokens(fields["tokens"])
        self._add_reply(fields["message"])
        self.turns[-1] = TurnSummary(turn.start, turn.reply_start, turn.sampling, fields["reason"])
        self.open = False

    def _apply_truncate(self, fields: Mapping[str, Any]) -> None:
        self.close_cut_off_turn()
        n_tokens = fields["n_tokens"]
        del self.tokens[n_tokens:]
        self.messages = [cut for message in self.messages if (cut := _cut(message, n_tokens))]
        self.turns = [turn for turn in self.turns if turn.start < n_tokens]
        self.interrupted = False

    def close_cut_off_turn(self) -> None:
        """What was generated of an unfinished reply stays, as a message whose words only the tokens know."""
        if not self.open:
            return
        self.open, self.interrupted = False, True
        self._add_reply(None)

    def _add_reply(self, message: Message | None) -> None:
        start, end = self.reply_message_start, len(self.tokens)
        if message is not None:
            start = self.turns[-1].reply_start if start is None else start
            self.messages.append({**message, "start": start, "end": end})
        elif start is not None and start < end:
            self.messages.append({"role": "assistant", "content": None, "start": start, "end": end})

    def head(self) -> dict[str, Any]:
        """What a listing shows, kept beside the log."""
        return {
            "created": self.created,
            "updated": self.updated,
            "n_turns": len(self.turns),
            "n_tokens": len(self.tokens),
            "open": self.open or self.interrupted,
        }


def _cut(message: Message, n_tokens: int) -> Message | None:
    """A message after truncation: whole, gone, or a reply's beginning, whose words only the tokens know."""
    if message["end"] <= n_tokens:
        return message
    if message.get("start", n_tokens) < n_tokens:
        return {**message, "content": None, "end": n_tokens}
    return None


def fold(records: Sequence[Record]) -> History:
    history = History()
    for record in records:
        history.apply(record)
    history.close_cut_off_turn()
    return history


class Session:
    """One conversation. `tokens` is what its KV is a cache of; read it, do not change it.

    `messages` are dicts of role, content and `end`, the number of tokens up to where it ends; a reply has `start`
    too. The content of a reply that was cut, by a crash or by `truncate`, is None: decode tokens[start:end].
    """

    def __init__(self, owner: Sessions, name: str, history: History, *, is_new: bool = False) -> None:
        self.name = name
        self.is_new = is_new
        self._owner = owner
        self._history: History | None = history  # None: to be read again, after a failed write
        self._lock = threading.RLock()
        self._turn: Turn | None = None
        self._deleted = False

    @property
    def history(self) -> History:
        with self._lock:
            if self._deleted:
                raise _not_found(self.name)
            if self._history is None:
                self._history = self._owner._fold(self.name)
            return self._history

    @property
    def tokens(self) -> list[int]:
        return self.history.tokens

    @property
    def messages(self) -> list[Message]:
        return self.history.messages

    @property
    def turns(self) -> list[TurnSummary]:
        return self.history.turns

    @property
    def created(self) -> float:
        return self.history.created

    @property
    def updated(self) -> float:
        return self.history.updated

    @property
    def interrupted(self) -> bool:
        """The last turn was cut off; continue it, answer again from an earlier token, or truncate."""
        return self.history.interrupted

    @property
    def active(self) -> bool:
        return self._turn is not None

    @property
    def model_fingerprint(self) -> bytes:
        return self.history.model

    @property
    def tokenizer_fingerprint(self) -> bytes:
        return self.history.tokenizer

    @property
    def note(self) -> str | None:
        """What a user of the session should know about it."""
        if self.history.tokens and self.history.model != self._owner.model_fingerprint:
            was, now = _short(self.history.model), _short(self._owner.model_fingerprint)
            return f"model changed ({was} to {now}): cached pages are not used, the history is prefilled again"
        return None

    def begin_turn(
        self, *, keep: int, new_tokens: Sequence[int], messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> Turn:
        """Accepts a prompt: the history becomes tokens[:keep] + new_tokens, on disk when this returns.

        Messages that end within the kept tokens stay, `messages` follow them; one without an `end` of its own ends
        with the prompt. Without new tokens and messages the turn continues the last reply: the message given to
        `finish` is then that of the whole. Raises SessionBusy while another turn runs, StorageFull, StorageError.
        """
        with self._lock:
            self._refuse_if_busy()
            history = self.history
            if not 0 <= keep <= len(history.tokens):
                raise ValueError(f"keep is {keep}, the history has {len(history.tokens)} tokens")
            number = history.last[0] + 1
            fields = {
                "kind": "begin",
                "at": self._owner.clock(),
                "keep": keep,
                "tokens": pack_tokens(new_tokens),
                "messages": [dict(message) for message in messages],
                "sampling": dict(sampling),
                "model": self._owner.model_fingerprint,
                "tokenizer": self._owner.tokenizer_fingerprint,
            }
            self._log(Record(number, _BEGIN, fields), previous=history.last)
            self._turn = Turn(self, number)
            return self._turn

    def _truncate(self, n_tokens: int) -> None:
        with self._lock:
            self._refuse_if_busy()
            history = self.history
            _check_n_tokens(n_tokens, history)
            self._log(_truncation(history, n_tokens, self._owner.clock()), previous=history.last)

    def _log(self, record: Record, *, previous: Position, remove: Sequence[Position] = ()) -> None:
        """Applies a record and commits it. After a failure memory is ahead of the disk and is read again."""
        history = self.history
        history.apply(record)
        try:
            self._owner._commit(self.name, record, history, previous=previous, remove=remove, sync=True)
        except BaseException:
            self._history = None
            raise

    def _refuse_if_busy(self) -> None:
        if self._turn is not None:
            raise SessionBusy("another turn is running", where=self.name, hint="wait for its end, or cancel it")


class Turn:
    """A turn in progress: tokens are appended as they are generated, until it is finished, exactly once."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        self._generated: list[int] = []
        self._batch_start = 0  # index in `_generated`; what lies before it is on disk in full batches
        self._batch = 1  # part number

    def append(self, tokens: Sequence[int]) -> None:
        """Adds generated tokens: in the system's hands when this returns, so that only a crash of the machine loses
        them. Raises StorageFull, StorageError; the tokens are kept in memory, and written with the next ones."""
        session = self.session
        with session._lock:
            self._refuse_if_finished()
            self._generated += tokens
            batch = self._generated[self._batch_start :]
            fields = {"kind": "tokens", "offset": self._batch_start, "tokens": pack_tokens(batch)}
            record = Record(self.number, self._batch, fields)
            history = session.history
            history.apply(record)
            previous = (self.number, self._batch - 1)
            session._owner._commit(session.name, record, history, previous=previous, sync=False)
            if len(batch) >= _BATCH_TOKENS:
                self._batch_start = len(self._generated)
                self._batch += 1

    def finish(self, *, reason: str, n_tokens: int, message: Message | None) -> None:
        """Ends the turn with the first `n_tokens` generated ones and the reply's message, on disk when this returns.

        Raises StorageFull, StorageError: the turn is over all the same, and the session is interrupted.
        """
        session = self.session
        with session._lock:
            self._refuse_if_finished()
            if not 0 <= n_tokens <= len(self._generated):
                raise ValueError(f"n_tokens is {n_tokens}, {len(self._generated)} were generated")
            fields = {
                "kind": "end",
                "at": session._owner.clock(),
                "tokens": pack_tokens(self._generated[:n_tokens]),
                "reason": reason,
                "message": None if message is None else dict(message),
            }
            batches = [(self.number, part) for part in range(1, self._batch + 1)]
            session._turn = None
            session._log(Record(self.number, _END, fields), previous=(self.number, _BEGIN), remove=batches)

    def _refuse_if_finished(self) -> None:
        if self.session._turn is not self:
            raise ValueError("the turn is finished")


class Sessions:
    """All sessions of a data directory, for one model and its tokenizer. Threads may share it."""

    def __init__(
        self,
        truth: TruthStore,
        *,
        model_fingerprint: bytes,
        tokenizer_fingerprint: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model_fingerprint = model_fingerprint
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.clock = clock
        self._truth = truth
        self._lock = threading.RLock()
        # One object per name while anybody holds it, so that two users cannot run two turns at once.
        self._open: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._recent: OrderedDict[str, Session] = OrderedDict()

    def get(self, name: str) -> Session:
        """Raises SessionNotFound, SessionCorrupt naming the damaged turns, SessionMismatch, InvalidRequest."""
        _check_name(name)
        session = self._load(name)
        if session.tokenizer_fingerprint != self.tokenizer_fingerprint:
            was, now = _short(session.tokenizer_fingerprint), _short(self.tokenizer_fingerprint)
            raise SessionMismatch(
                f"made with tokenizer {was}, this model has tokenizer {now}",
                where=name,
                hint="start the daemon with the session's own model, or begin a new session",
            )
        return session

    def get_or_create(self, name: str) -> Session:
        """As `get`, but makes an empty session, on disk, where there is none; its `is_new` is true."""
        with self._lock:
            try:
                return self.get(name)
            except SessionNotFound:
                created = self._created()
                history = fold([created])
                self._commit(name, created, history, previous=None, sync=True)
                return self._remember(Session(self, name, history, is_new=True))

    def list(self, after: str | None = None, limit: int = 100) -> list[SessionSummary]:
        """Up to `limit` sessions behind the name `after`, in the order of their names' bytes."""
        if limit < 1:
            raise InvalidRequest(f"limit is {limit}, at least 1 is needed", where="limit")
        with _wire_errors(after or ""):
            return [self._summary(name, head) for name, head in self._truth.heads(after, limit)]

    def fork(self, source: str, target: str, n_tokens: int | None = None) -> Session:
        """Makes `target` a copy of `source`, or of its first `n_tokens` tokens. Raises SessionExists, …"""
        _check_name(source)
        _check_name(target)
        with self._lock:
            original = self._load(source)
            with original._lock, _wire_errors(source):
                original._refuse_if_busy()
                _refuse_if_exists(self._truth, target)
                records = [self._created(forked_from=source), *self._truth.records(source)[1:]]
            history = fold(records)
            if n_tokens is not None:
                _check_n_tokens(n_tokens, history)
                records.append(_truncation(history, n_tokens, self.clock()))
                history = fold(records)
            with _wire_errors(target):
                self._truth.commit(target, records, previous=None, head=history.head(), sync=True)
            return self._remember(Session(self, target, history, is_new=True))

    def truncate(self, name: str, n_tokens: int) -> Session:
        """Cuts the history to its first `n_tokens` tokens."""
        _check_name(name)
        session = self._load(name)
        session._truncate(n_tokens)
        return session

    def delete(self, name: str) -> None:
        """Forgets the session, damaged or not. Raises SessionBusy while a turn runs."""
        _check_name(name)
        with self._lock:
            session = self._open.get(name)
            with session._lock if session else nullcontext(), _wire_errors(name):
                if session:
                    session._refuse_if_busy()
                self._truth.delete(name)
                if session:
                    session._deleted = True
            self._open.pop(name, None)
            self._recent.pop(name, None)

    def _load(self, name: str) -> Session:
        with self._lock:
            session = self._open.get(name)
            if session is None:
                session = Session(self, name, self._fold(name))
            return self._remember(session)

    def _remember(self, session: Session) -> Session:
        self._open[session.name] = session
        self._recent[session.name] = session
        self._recent.move_to_end(session.name)
        while len(self._recent) > _RECENT_SESSIONS:
            self._recent.popitem(last=False)
        return session

    def _fold(self, name: str) -> History:
        with _wire_errors(name):
            return fold(self._truth.records(name))

    def _commit(
        self,
        name: str,
        record: Record,
        history: History,
        *,
        previous: Position | None,
        remove: Sequence[Position] = (),
        sync: bool,
    ) -> None:
        with _wire_errors(name):
            self._truth.commit(name, [record], previous=previous, head=history.head(), remove=remove, sync=sync)

    def _created(self, forked_from: str | None = None) -> Record:
        fields = {
            "kind": "create",
            "at": self.clock(),
            "model": self.model_fingerprint,
            "tokenizer": self.tokenizer_fingerprint,
            "forked_from": forked_from,
        }
        return Record(0, _BEGIN, fields)

    def _summary(self, name: str, head: Mapping[str, Any] | None) -> SessionSummary:
        if head is None:
            return SessionSummary(name, 0.0, 0.0, 0, 0, "corrupt")
        session = self._open.get(name)
        state = "interrupted" if head["open"] else "idle"
        if session is not None and session.active:
            state = "active"
        return SessionSummary(name, head["created"], head["updated"], head["n_turns"], head["n_tokens"], state)


@contextmanager
def _wire_errors(name: str) -> Iterator[None]:
    """The store's errors as those that a client sees."""
    try:
        yield
    except NotFound:
        raise _not_found(name) from None
    except RecordCorrupt as error:
        raise SessionCorrupt(
            str(error),
            where=name,
            hint="delete the session, or restore the data directory from a backup",
            turns=error.turns,
        ) from error
    except StoreFull as error:
        raise StorageFull(str(error), where=name, hint="free some space on the data directory's volume") from error
    except StoreError as error:
        raise StorageError(str(error), where=name) from error


def _refuse_if_exists(truth: TruthStore, name: str) -> None:
    try:
        exists = truth.head(name) is not None
    except RecordCorrupt:
        exists = True
    if exists:
        raise SessionExists("a session of this name exists", where=name)


def _truncation(history: History, n_tokens: int, at: float) -> Record:
    turn, part = history.last
    return Record(turn, max(part + 1, _TRUNCATE), {"kind": "truncate", "at": at, "n_tokens": n_tokens})


def _check_name(name: str) -> None:
    """Names are keys, never paths; still, nothing that could be taken for one."""
    problem = None
    if not isinstance(name, str) or not name:
        problem = "is empty"
    elif len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        problem = f"is longer than {MAX_NAME_BYTES} bytes"
    elif any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        problem = "has a control character"
    elif "/" in name or name in (".", ".."):
        problem = "looks like a path"
    if problem:
        raise InvalidRequest(f"the session name {str(name)[:60]!r} {problem}", where="session")


def _check_n_tokens(n_tokens: int, history: History) -> None:
    if not 0 <= n_tokens <= len(history.tokens):
        raise InvalidRequest(f"n_tokens is {n_tokens}, the session has {len(history.tokens)} tokens", where="n_tokens")


def _not_found(name: str) -> SessionNotFound:
    return SessionNotFound("no such session", where=name)


def _short(fingerprint: bytes) -> str:
    return fingerprint.hex()[:12] or "none"
