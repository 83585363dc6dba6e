"""Sessions: what a conversation is after every kind of turn, cut, crash and damage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.daemon.completion import _finish as end_turn
from colibri.daemon.sessions import Session, Sessions, SessionSummary, Turn
from colibri.kvstore import DataDir, Record, StoreFull, TruthStore, truth
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


def test_a_clock_that_is_set_back_makes_no_session_older_than_its_beginning(tmp_path: Path) -> None:
    store = TruthStore(tmp_path / "truth")
    times = iter([5000.0, 3000.0, 1000.0, 6000.0, 2000.0])
    sessions = Sessions(store, model_fingerprint=MODEL, tokenizer_fingerprint=TOKENIZER, clock=lambda: next(times))
    session = sessions.get_or_create("alice")
    say(session, [1], [2])
    assert (session.created, session.updated) == (5000.0, 5000.0)
    session.begin_turn(keep=2, new_tokens=[3], messages=[USER], sampling={})
    assert session.updated == 6000.0
    (summary,) = sessions.list(None, 10)
    assert (summary.created, summary.updated) == (5000.0, 6000.0)
    store.close()


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


def test_a_reply_that_is_cut_before_its_first_token_and_again_after_it_is_still_one_message(reopen: Opener) -> None:
    reopen().get_or_create("alice").begin_turn(keep=0, new_tokens=[1], messages=[USER], sampling={})
    reopen().get("alice").begin_turn(keep=1, new_tokens=[], messages=[], sampling={}).append([2, 3])
    session = reopen().get("alice")
    assert session.messages[1] == {"role": "assistant", "content": None, "start": 1, "end": 3}
    turn = session.begin_turn(keep=3, new_tokens=[], messages=[], sampling={})
    turn.append([4])
    turn.finish(reason="stop", n_tokens=1, message=REPLY)
    assert reopen().get("alice").messages == [{**USER, "end": 1}, {**REPLY, "start": 1, "end": 4}]


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


def test_ten_thousand_sessions_are_listed_page_by_page(tmp_path: Path) -> None:
    store = TruthStore(tmp_path / "truth")
    head = {"created": 1.0, "updated": 2.0, "n_turns": 3, "n_tokens": 4, "open": False}
    for number in range(10_000):
        store.commit(f"s{number:05}", [Record(0, 0, {})], previous=None, head=head, sync=False)
    sessions = Sessions(store, model_fingerprint=MODEL, tokenizer_fingerprint=TOKENIZER)
    page = sessions.list(after="s08999", limit=100)
    assert page[0] == SessionSummary("s09000", 1.0, 2.0, 3, 4, "idle")
    names, after = [], None
    while page := sessions.list(after, 1000):
        names += [summary.name for summary in page]
        after = names[-1]
    assert names == [f"s{number:05}" for number in range(10_000)]
    store.close()


def test_a_flipped_byte_is_session_corrupt_naming_the_turn_and_others_go_on(reopen: Opener, tmp_path: Path) -> None:
    sessions = reopen()
    for name in ("alice", "bob"):
        for turn in range(1, 4):
            say(sessions.get_or_create(name), [turn] * 1000, [ord(name[0])])
    reopen()  # closing moved all of it to table files
    needle = (2).to_bytes(4, "little") * 1000
    for table in sorted((tmp_path / "truth").glob("*.sst")):
        data = bytearray(table.read_bytes())
        if (at := data.find(needle)) >= 0:  # alice's second turn: her keys come first
            data[at + 2000] ^= 1
            table.write_bytes(data)
            break
    sessions = reopen()
    with pytest.raises(errors.SessionCorrupt, match="turn 2") as caught:
        sessions.get("alice")
    assert caught.value.extra["turns"] == [2]
    assert len(sessions.get("bob").tokens) == 3003
    say(sessions.get("bob"), [4], [5])
    say(sessions.get_or_create("carol"), [1], [2])
    with pytest.raises(errors.SessionCorrupt):
        sessions.fork("alice", "dave")
    assert [summary.name for summary in sessions.list()] == ["alice", "bob", "carol"]
    sessions.delete("alice")
    say(sessions.get_or_create("alice"), [7], [8])
    sessions = reopen()
    assert sessions.get("alice").tokens == [7, 8]
    assert sessions.get("bob").tokens[-2:] == [4, 5]


def test_a_full_disk_ends_the_turn_as_storage_full_and_leaves_what_was_accepted(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreFull("no space left")

    sessions = reopen()
    session = sessions.get_or_create("alice")
    say(session, [1], [2])
    turn = session.begin_turn(keep=2, new_tokens=[3], messages=[USER], sampling={})
    turn.append([4])
    with monkeypatch.context() as patch:
        patch.setattr(TruthStore, "commit", full)
        with pytest.raises(errors.StorageFull, match="alice"):
            turn.append([5])
        assert session.tokens == [1, 2, 3, 4, 5]
        with pytest.raises(errors.StorageFull):
            turn.finish(reason="stop", n_tokens=2, message=REPLY)
        assert session.interrupted
        assert session.tokens == [1, 2, 3, 4]
        with pytest.raises(errors.StorageFull):
            session.begin_turn(keep=4, new_tokens=[6], messages=[USER], sampling={})
        assert session.tokens == [1, 2, 3, 4]
    say(session, [6], [7])
    assert reopen().get("alice").tokens == [1, 2, 3, 4, 6, 7]


def test_a_turn_whose_last_tokens_find_no_room_is_over_and_the_next_one_begins(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreFull("no space left")

    session = reopen().get_or_create("alice")
    turn = session.begin_turn(keep=0, new_tokens=[1], messages=[USER], sampling={})
    with monkeypatch.context() as patch:
        patch.setattr(TruthStore, "commit", full)
        with pytest.raises(errors.StorageFull):
            end_turn(turn, [2], "stop", 1, REPLY)
    assert not session.active
    say(session, [3], [4])


def test_tokens_that_a_failed_append_kept_are_written_by_the_next(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreFull("no space left")

    turn = reopen().get_or_create("alice").begin_turn(keep=0, new_tokens=[0], messages=[], sampling={})
    for start in range(0, 300, 50):
        with monkeypatch.context() as patch:
            patch.setattr(TruthStore, "commit", full)
            with pytest.raises(errors.StorageFull):
                turn.append(list(range(start, start + 49)))
        turn.append([start + 49])
    assert reopen().get("alice").tokens == [0, *range(300)]


ACTIONS = st.one_of(
    st.tuples(st.just("turn"), st.integers(0, 100), st.lists(st.integers(0, 300), max_size=5), st.integers(0, 150)),
    st.tuples(st.just("crash"), st.integers(0, 100), st.lists(st.integers(0, 300), max_size=5), st.integers(0, 150)),
    st.tuples(st.just("truncate"), st.integers(0, 100)),
    st.tuples(st.just("fork"), st.integers(0, 100)),
    st.just(("restart",)),
)


@settings(max_examples=30)
@given(actions=st.lists(ACTIONS, max_size=8))
def test_any_history_is_what_a_plain_list_says(actions: list[tuple[Any, ...]]) -> None:
    with TemporaryDirectory() as folder:
        store = TruthStore(folder + "/truth", reserve_bytes=0)
        sessions = Sessions(store, model_fingerprint=MODEL, tokenizer_fingerprint=TOKENIZER)
        name, model, interrupted = "s0", [], False
        sessions.get_or_create(name)
        for number, (action, *arguments) in enumerate(actions, 1):
            session = sessions.get(name)
            at = len(model) * arguments[0] // 100 if arguments else 0
            if action in ("turn", "crash"):
                prompt, n_reply = arguments[1:]
                reply = list(range(n_reply))
                turn = session.begin_turn(keep=at, new_tokens=prompt, messages=[USER], sampling={})
                for start in range(0, n_reply, 7):
                    turn.append(reply[start : start + 7])
                kept = reply if action == "crash" else reply[: n_reply // 2]
                if action == "turn":
                    turn.finish(reason="stop", n_tokens=len(kept), message=REPLY)
                model, interrupted = model[:at] + prompt + kept, action == "crash"
            elif action == "truncate":
                sessions.truncate(name, at)
                model, interrupted = model[:at], False
            elif action == "fork":
                sessions.fork(name, f"s{number}", at)
                name, model, interrupted = f"s{number}", model[:at], False
            if action in ("crash", "restart"):
                store.close()
                store = TruthStore(folder + "/truth", reserve_bytes=0)
                sessions = Sessions(store, model_fingerprint=MODEL, tokenizer_fingerprint=TOKENIZER)
            session = sessions.get(name)
            assert (session.tokens, session.interrupted) == (model, interrupted)
            assert all(message["end"] <= len(model) for message in session.messages)
        store.close()


WRITER = """
import sys
from colibri.daemon.sessions import Sessions
from colibri.kvstore import DataDir, PageWrite
data = DataDir(sys.argv[1])
sessions = Sessions(data.truth, model_fingerprint=b"m" * 32, tokenizer_fingerprint=b"t" * 32)
session = sessions.get_or_create("s")
while True:
    number = len(session.turns)
    turn = session.begin_turn(keep=len(session.tokens), new_tokens=[number], messages=[], sampling={})
    print("accepted", number, flush=True)
    for token in range(20):
        turn.append([token])
    print("generated", number, flush=True)
    data.pages.write([PageWrite(number.to_bytes(16, "big"), bytes(16), tuple(range(32)), number, bytes(50_000))])
    turn.finish(reason="stop", n_tokens=20, message=None)
    print("done", number, flush=True)
"""

REPLY_LENGTH = 20


def kill_at_random_moments(path: Path, n_kills: int, seed: int) -> None:
    """Everything that the writer reported before its death must be there after it, however often."""
    random = Random(seed)
    for _ in range(n_kills):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(random.randrange(1, 60))]
            writer.kill()
            lines += writer.stdout.readlines()
        what, number = next(line for line in reversed(lines) if line.endswith("\n")).split()
        with DataDir(path) as data:
            sessions = Sessions(data.truth, model_fingerprint=MODEL, tokenizer_fingerprint=TOKENIZER)
            session = sessions.get("s")
            assert not data.truth.log_was_damaged
            n_turns = len(session.turns)
            assert n_turns > int(number)
            last = session.tokens[session.turns[int(number)].start :]
            assert last[0] == int(number)
            if what != "accepted":
                assert last[1 : 1 + REPLY_LENGTH] == list(range(REPLY_LENGTH))
            if what == "done":
                assert session.turns[int(number)].reason == "stop"
            assert all(len(data.pages.read(meta)) == 50_000 for meta in data.pages.children(bytes(16)))


def test_kill_9_at_any_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, n_kills=6, seed=1)


@pytest.mark.slow
def test_kill_9_fifty_times_loses_nothing_acknowledged(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, n_kills=50, seed=2)


def test_every_commit_point_is_synced_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By RocksDB's own count of synced logs: a kill cannot tell, only a machine that loses power could."""
    options = truth._options()
    options.enable_statistics()
    monkeypatch.setattr(truth, "_options", lambda: options)
    store = TruthStore(tmp_path / "truth")
    sessions = Sessions(store, model_fingerprint=MODEL, tokenizer_fingerprint=TOKENIZER)

    def n_syncs() -> int:
        line = next(line for line in options.get_statistics().splitlines() if line.startswith("rocksdb.wal.synced "))
        return int(line.rsplit(maxsplit=1)[-1])

    def syncs(action: Callable[[], object]) -> int:
        before = n_syncs()
        action()
        return n_syncs() - before

    session = sessions.get_or_create("s")
    turns: list[Turn] = []

    def begin() -> None:
        turns.append(session.begin_turn(keep=0, new_tokens=[1, 2], messages=[USER], sampling={}))

    assert syncs(lambda: sessions.get_or_create("another")) == 1
    assert syncs(begin) == 1
    assert syncs(lambda: turns[0].append([3, 4])) == 0
    assert syncs(lambda: turns[0].finish(reason="stop", n_tokens=2, message=REPLY)) == 1
    assert syncs(lambda: sessions.fork("s", "fork")) == 1
    assert syncs(lambda: sessions.truncate("s", 1)) == 1
    assert syncs(lambda: sessions.delete("fork")) == 1
    store.close()
