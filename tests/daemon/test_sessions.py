"""Sessions: what a conversation is after every kind of turn, cut, crash and damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colibri.daemon.sessions import Session, Sessions, SessionSummary
from colibri.kvstore import TruthStore
from colibri.protocol import errors

MODEL, TOKENIZER = b"m" * 32, b"t" * 32
USER, REPLY = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}

Opener = Callable[..., Sessions]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store again and again, as restarts of the daemon do."""
    stores: list[TruthStore] = []

    def opener(model: bytes = MODEL, tokenizer: bytes = TOKENIZER) -> Sessions:
        if stores:
            stores.pop().close()
        stores.append(TruthStore(tmp_path / "truth"))
        ticks = iter(range(1000, 10**6))
        return Sessions(
            stores[-1], model_fingerprint=model, tokenizer_fingerprint=tokenizer, clock=lambda: float(next(ticks))
        )

    yield opener
    stores.pop().close()


def say(session: Session, prompt: list[int], reply: list[int], *, keep: int | None = None) -> None:
    """One chat turn, from beginning to end."""
    keep = len(session.tokens) if keep is None else keep
    turn = session.begin_turn(keep=keep, new_tokens=prompt, messages=[USER], sampling={"seed": 7})
    turn.append(reply)
    turn.finish(reason="stop", n_tokens=len(reply), message=REPLY)


def state_of(session: Session) -> tuple[object, ...]:
    history = session.history
    return (history.tokens, history.messages, history.turns, history.created, history.updated, history.interrupted)


def test_an_empty_session_round_trips(reopen: Opener) -> None:
    assert reopen().get_or_create("new").is_new
    again = reopen().get_or_create("new")
    assert (again.is_new, again.tokens, again.messages) == (False, [], [])


def test_an_unknown_name_is_not_found_and_the_live_session_is_untouched(reopen: Opener) -> None:
    sessions = reopen()
    turn = sessions.get_or_create("live").begin_turn(keep=0, new_tokens=[1], messages=[USER], sampling={})
    with pytest.raises(errors.SessionNotFound, match="nobody"):
        sessions.get("nobody")
    turn.append([2])
    turn.finish(reason="stop", n_tokens=1, message=REPLY)
    assert sessions.get("live").tokens == [1, 2]


def test_a_session_is_the_same_after_a_restart(reopen: Opener) -> None:
    session = reopen().get_or_create("alice")
    say(session, [1, 2, 3], list(range(200)))
    say(session, [4], [5, 6])
    before = state_of(session)
    assert state_of(reopen().get("alice")) == before
    assert session.tokens == [1, 2, 3, *range(200), 4, 5, 6]
    assert session.messages == [
        {**USER, "end": 3},
        {**REPLY, "start": 3, "end": 203},
        {**USER, "end": 204},
        {**REPLY, "start": 204, "end": 206},
    ]


def test_finish_keeps_the_first_generated_tokens_only(reopen: Opener) -> None:
    session = reopen().get_or_create("alice")
    turn = session.begin_turn(keep=0, new_tokens=[1], messages=[], sampling={})
    turn.append(list(range(100)))
    turn.finish(reason="stop_string", n_tokens=70, message=None)
    assert session.tokens == [1, *range(70)]
    assert reopen().get("alice").tokens == [1, *range(70)]


def test_a_turn_without_an_end_reopens_as_interrupted_with_all_its_tokens(reopen: Opener) -> None:
    sessions = reopen()
    turn = sessions.get_or_create("alice").begin_turn(keep=0, new_tokens=[1, 2], messages=[USER], sampling={})
    for token in range(150):
        turn.append([token])
    sessions = reopen()
    assert [summary.state for summary in sessions.list()] == ["interrupted"]
    session = sessions.get("alice")
    assert session.interrupted
    assert session.tokens == [1, 2, *range(150)]
    assert session.messages[-1] == {"role": "assistant", "content": None, "start": 2, "end": 152}
    assert session.turns[-1].reason is None


def test_an_interrupted_reply_can_be_continued_to_one_message(reopen: Opener) -> None:
    reopen().get_or_create("alice").begin_turn(keep=0, new_tokens=[1], messages=[USER], sampling={}).append([2, 3])
    session = reopen().get("alice")
    turn = session.begin_turn(keep=3, new_tokens=[], messages=[], sampling={})
    turn.append([4])
    turn.finish(reason="stop", n_tokens=1, message=REPLY)
    assert session.tokens == [1, 2, 3, 4]
    assert session.messages == [{**USER, "end": 1}, {**REPLY, "start": 1, "end": 4}]
    assert not session.interrupted
    assert state_of(reopen().get("alice")) == state_of(session)


def test_an_answer_can_be_given_again_from_the_end_of_the_prompt(reopen: Opener) -> None:
    session = reopen().get_or_create("alice")
    say(session, [1, 2], [3, 4])
    say(session, [], [5], keep=2)
    assert session.tokens == [1, 2, 5]
    assert reopen().get("alice").tokens == [1, 2, 5]


def test_a_second_turn_at_once_is_refused_as_busy(reopen: Opener) -> None:
    sessions = reopen()
    turn = sessions.get_or_create("alice").begin_turn(keep=0, new_tokens=[1], messages=[], sampling={})
    for refused in (
        lambda: sessions.get("alice").begin_turn(keep=1, new_tokens=[], messages=[], sampling={}),
        lambda: sessions.truncate("alice", 0),
        lambda: sessions.fork("alice", "bob"),
        lambda: sessions.delete("alice"),
    ):
        with pytest.raises(errors.SessionBusy, match="alice"):
            refused()
    assert sessions.list()[0].state == "active"
    turn.finish(reason="cancelled", n_tokens=0, message=None)
    assert sessions.truncate("alice", 0).tokens == []


def test_a_finished_turn_takes_nothing_more(reopen: Opener) -> None:
    turn = reopen().get_or_create("alice").begin_turn(keep=0, new_tokens=[1], messages=[], sampling={})
    turn.finish(reason="stop", n_tokens=0, message=None)
    with pytest.raises(ValueError, match="finished"):
        turn.append([2])
    with pytest.raises(ValueError, match="finished"):
        turn.finish(reason="stop", n_tokens=0, message=None)


@pytest.mark.parametrize(
    ("n_tokens", "messages"),
    [
        (0, []),
        (2, []),  # in the middle of the prompt
        (3, [{**USER, "end": 3}]),
        (4, [{**USER, "end": 3}, {**REPLY, "content": None, "start": 3, "end": 4}]),  # in the middle of the reply
        (5, [{**USER, "end": 3}, {**REPLY, "start": 3, "end": 5}]),
        (6, [{**USER, "end": 3}, {**REPLY, "start": 3, "end": 5}, {**USER, "end": 6}]),
    ],
)
def test_truncate_and_fork_cut_anywhere(reopen: Opener, n_tokens: int, messages: list[object]) -> None:
    sessions = reopen()
    say(sessions.get_or_create("alice"), [1, 2, 3], [4, 5])
    say(sessions.get("alice"), [6], [7])
    whole = state_of(sessions.get("alice"))
    fork = sessions.fork("alice", "fork", n_tokens)
    assert fork.tokens == [1, 2, 3, 4, 5, 6, 7][:n_tokens]
    assert fork.messages == messages
    assert state_of(sessions.get("alice")) == whole
    cut = sessions.truncate("alice", n_tokens)
    assert (cut.tokens, cut.messages) == (fork.tokens, fork.messages)
    sessions = reopen()
    assert sessions.get("alice").messages == sessions.get("fork").messages == messages
    say(sessions.get("fork"), [9], [9])
    assert reopen().get("alice").tokens == cut.tokens


def test_a_cut_outside_the_history_is_refused_with_the_figure(reopen: Opener) -> None:
    sessions = reopen()
    say(sessions.get_or_create("alice"), [1], [2])
    for n_tokens in (-1, 3):
        with pytest.raises(errors.InvalidRequest, match="2 tokens"):
            sessions.truncate("alice", n_tokens)
        with pytest.raises(errors.InvalidRequest, match="2 tokens"):
            sessions.fork("alice", "bob", n_tokens)
    assert [summary.name for summary in sessions.list()] == ["alice"]


def test_a_fork_onto_an_existing_name_is_refused(reopen: Opener) -> None:
    sessions = reopen()
    sessions.get_or_create("alice")
    sessions.get_or_create("bob")
    with pytest.raises(errors.SessionExists, match="bob"):
        sessions.fork("alice", "bob")


def test_a_deleted_session_is_gone_and_its_name_starts_afresh(reopen: Opener) -> None:
    sessions = reopen()
    held = sessions.get_or_create("alice")
    say(held, [1], [2])
    sessions.delete("alice")
    for lost in (lambda: sessions.get("alice"), lambda: sessions.delete("alice"), lambda: held.tokens):
        with pytest.raises(errors.SessionNotFound, match="alice"):
            lost()
    assert sessions.get_or_create("alice").tokens == []
    assert reopen().get("alice").tokens == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../../etc", "a\0b", "a\nb", "\x7f", "\x85", "\ud800", "x" * 10_000, "é" * 101]
)
def test_a_bad_name_is_refused(reopen: Opener, name: str) -> None:
    sessions = reopen()
    for refused in (sessions.get, sessions.get_or_create, sessions.delete, lambda name: sessions.fork("alice", name)):
        with pytest.raises(errors.InvalidRequest, match="session name"):
            refused(name)
    assert sessions.list() == []


def test_names_of_any_script_are_keys(reopen: Opener) -> None:
    names = ["a", "a b", "a.b", "alice", "Ålice", "会話", "🦜" * 50, "a\\b", "~", "x" * 200]
    sessions = reopen()
    for name in names:
        say(sessions.get_or_create(name), [len(name)], [1])
    sessions = reopen()
    assert [s.name for s in sessions.list()] == sorted(names, key=str.encode)
    assert all(sessions.get(name).tokens == [len(name), 1] for name in names)


def test_another_model_goes_on_from_the_token_ids_with_a_note(reopen: Opener) -> None:
    say(reopen().get_or_create("alice"), [1], [2])
    session = reopen(model=b"n" * 32).get("alice")
    assert session.tokens == [1, 2]
    assert session.note is not None
    assert (b"m" * 6).hex() in session.note
    assert (b"n" * 6).hex() in session.note
    say(session, [3], [4])
    assert session.note is None
    assert reopen(model=b"n" * 32).get("alice").note is None


def test_another_tokenizer_is_a_mismatch_that_names_both(reopen: Opener) -> None:
    say(reopen().get_or_create("alice"), [1], [2])
    sessions = reopen(tokenizer=b"u" * 32)
    with pytest.raises(errors.SessionMismatch, match=f"{(b't' * 6).hex()}.*{(b'u' * 6).hex()}"):
        sessions.get("alice")
    assert [summary.name for summary in sessions.list()] == ["alice"]
    sessions.delete("alice")
    assert sessions.get_or_create("alice").tokens == []


def test_the_list_is_paged_in_order(reopen: Opener) -> None:
    sessions = reopen()
    for number in range(25):
        sessions.get_or_create(f"s{number:02}")
    pages: list[list[SessionSummary]] = [sessions.list(limit=10)]
    while pages[-1]:
        pages.append(sessions.list(after=pages[-1][-1].name, limit=10))
    assert [len(page) for page in pages] == [10, 10, 5, 0]
    assert [summary.name for page in pages for summary in page] == [f"s{number:02}" for number in range(25)]
