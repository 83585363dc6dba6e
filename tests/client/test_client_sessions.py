"""Sessions from the client's side: made or resumed, and it says which."""

from __future__ import annotations

import pytest

import colibri
from colibri.protocol.messages import Chat
from colibri.sessions import age
from support.fake_daemon import FakeDaemon, holding


@pytest.fixture
def alice(client: colibri.Client) -> colibri.Session:
    """A session of one turn, resumed."""
    client.session("alice").chat("hi")
    return client.session("alice")


def test_a_new_session_says_that_it_is_new(client: colibri.Client) -> None:
    session = client.session("alice")
    assert not session.resumed
    assert str(session) == "session 'alice': new"


def test_a_resumed_session_says_how_old_and_how_long_it_is(alice: colibri.Session) -> None:
    assert alice.resumed
    assert alice.n_turns == 1
    assert alice.n_tokens == len("hi") + len("You said: hi")
    assert str(alice) == "session 'alice': resumed, 2 h old, 1 turn, 14 tokens"


def test_a_turn_is_told_with_the_reply_and_remembered(client: colibri.Client) -> None:
    session = client.session("alice")
    reply = session.chat("hi")
    assert reply.session is not None
    assert reply.session.created
    assert reply.durable
    assert (session.n_turns, session.n_tokens) == (1, 14)


def test_asking_for_a_new_session_never_continues_an_old_one(client: colibri.Client, alice: colibri.Session) -> None:
    with pytest.raises(colibri.SessionExists, match="resume it, or choose another"):
        client.session("alice", resume=False)


def test_asking_to_resume_never_makes_a_new_one(client: colibri.Client) -> None:
    with pytest.raises(colibri.SessionNotFound):
        client.session("nobody", resume=True)


def test_every_turn_says_what_it_expects(client: colibri.Client, daemon: FakeDaemon) -> None:
    session = client.session("alice")
    session.chat("one")
    session.chat("two")
    assert [request.resume for request in daemon.received if isinstance(request, Chat)] == [False, True]


def test_a_session_that_another_program_made_meanwhile_is_not_taken_over(
    client: colibri.Client, daemon: FakeDaemon
) -> None:
    mine = client.session("alice")
    client.session("alice").chat("of another program")
    with pytest.raises(colibri.SessionExists):
        mine.chat("hi")


def test_a_session_deleted_meanwhile_is_not_made_anew(client: colibri.Client, alice: colibri.Session) -> None:
    client.session("alice").delete()
    with pytest.raises(colibri.SessionNotFound):
        alice.chat("hi")


def test_after_a_first_turn_that_failed_both_are_possible(client: colibri.Client, daemon: FakeDaemon) -> None:
    session = client.session("alice")
    daemon.script["chat"] = holding(["a"])
    session.chat_stream("hi").close()
    del daemon.script["chat"]
    assert session.chat("hi").text == "You said: hi"


def test_after_a_first_turn_that_was_dropped_both_are_possible(client: colibri.Client, daemon: FakeDaemon) -> None:
    session = client.session("alice")
    daemon.sessions["alice"], daemon.tokens["alice"] = [], []  # as the daemon does when it accepts the prompt
    daemon.script["chat"] = holding(["a"])
    for _ in session.chat_stream("hi"):
        break
    del daemon.script["chat"]
    assert session.chat("hi").text == "You said: hi"


def test_a_chat_streams(alice: colibri.Session) -> None:
    assert [piece.text for piece in alice.chat_stream("yo")] == ["You", " said", ": ", "yo"]
    assert alice.n_turns == 2


def test_raw_text_goes_on_in_a_session(alice: colibri.Session) -> None:
    assert alice.generate("").result.text == "You said: "


def test_a_fork_is_another_session(client: colibri.Client, alice: colibri.Session) -> None:
    fork = alice.fork("alice-2", n_tokens=5)
    assert (fork.name, fork.resumed, fork.n_tokens) == ("alice-2", True, 5)
    with pytest.raises(colibri.SessionExists):
        alice.fork("alice-2")


def test_a_session_is_truncated(alice: colibri.Session) -> None:
    alice.truncate(3)
    assert alice.n_tokens == 3
    assert alice.info(include_tokens=True).tokens == list(b"hiY")


def test_a_session_shows_its_messages(alice: colibri.Session) -> None:
    assert [(m.role, m.content) for m in alice.info().messages] == [("user", "hi"), ("assistant", "You said: hi")]
    assert alice.info().tokens is None


def test_a_deleted_session_is_gone(client: colibri.Client, alice: colibri.Session) -> None:
    alice.delete()
    assert client.sessions() == []


def test_all_sessions_are_listed_however_many_pages_they_fill(client: colibri.Client, daemon: FakeDaemon) -> None:
    names = [f"s{i:04}" for i in range(2500)]
    daemon.sessions |= {name: [] for name in names}
    daemon.tokens |= {name: [] for name in names}
    assert [summary.name for summary in client.sessions()] == names


@pytest.mark.parametrize("name", ["", "../etc", "a\nb"])
def test_a_bad_name_is_refused(client: colibri.Client, name: str) -> None:
    with pytest.raises(colibri.InvalidRequest):
        client.session(name)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (7199, "1 h"), (7200, "2 h"), (9 * 86400, "9 d")]
)
def test_an_age_is_said_in_one_unit(seconds: float, words: str) -> None:
    assert age(seconds) == words
