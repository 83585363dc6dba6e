"""Requests through the socket of a real daemon on a tiny model: what is answered, and that company changes nothing."""

from __future__ import annotations

import pytest

from colibri.protocol import Progress, Token
from colibri.protocol import messages as wire
from colibri.protocol.errors import (
    Cancelled,
    ColibriError,
    DeadlineExceeded,
    InvalidRequest,
    PromptTooLong,
    SessionBusy,
    SessionExists,
    SessionNotFound,
)
from support.daemon import GREEDY, DaemonProcess, Reply, WireClient, chat

# Some 60 steps of 64 rows: there is time to do something meanwhile.
LONG_PROMPT = [3 + i % 200 for i in range(3800)]


def generate(prompt: str, **fields: object) -> wire.Generate:
    return wire.Generate(prompt=prompt, **{"sampling": GREEDY, **fields})  # type: ignore[arg-type]


# Replies


def test_a_chat_is_answered_in_pieces_that_are_the_stored_message(client: WireClient) -> None:
    reply = client.chat("Hello there", session="pieces", max_tokens=24)
    assert len(reply.pieces) > 1
    stored = client.ask(wire.SessionGet(name="pieces", include_tokens=True)).result
    assert [message.role for message in stored.messages] == ["user", "assistant"]
    assert stored.messages[1].content == reply.text
    assert stored.tokens[-len(reply.ids) :] == reply.ids
    assert reply.result.usage.completion_tokens == len(reply.ids) == 24
    assert reply.result.durable


def test_a_reply_without_a_session_is_not_called_durable(client: WireClient) -> None:
    result = client.chat("Hello", max_tokens=2).result
    assert not result.durable
    assert result.session is None


def test_the_pieces_are_the_decoding_of_the_tokens(client: WireClient) -> None:
    reply = client.ask(generate("Once upon a time", max_tokens=48))
    assert client.ask(wire.Detokenize(tokens=reply.ids)).result.text == reply.text


def test_a_second_turn_prefills_only_what_is_new(client: WireClient) -> None:
    client.chat("one", session="suffix", max_tokens=20)
    before = client.ask(wire.SessionGet(name="suffix", include_tokens=True)).result.tokens
    result = client.chat("two", session="suffix", max_tokens=4).result
    # The last token of a reply was drawn and never computed.
    assert result.usage.cached_tokens == len(before) - 1
    after = client.ask(wire.SessionGet(name="suffix", include_tokens=True)).result.tokens
    assert after[: len(before)] == before


def test_a_turn_in_a_session_says_what_a_whole_conversation_would(client: WireClient) -> None:
    first = client.chat("one", session="same", max_tokens=12, sampling=GREEDY)
    second = client.chat("two", session="same", max_tokens=12, sampling=GREEDY)
    tokens = client.ask(wire.SessionGet(name="same", include_tokens=True)).result.tokens
    prompt = tokens[: len(tokens) - len(second.ids)]
    assert client.ask(wire.Generate(tokens=prompt, max_tokens=12, sampling=GREEDY)).ids == second.ids
    assert first.ids in [tokens[i : i + 12] for i in range(len(tokens))]


def test_scores_are_the_log_probabilities_of_generating(client: WireClient) -> None:
    prompt = client.ask(wire.Tokenize(text="A hummingbird")).result.tokens
    reply = client.ask(wire.Generate(tokens=prompt, max_tokens=10, logprobs=0, sampling=GREEDY))
    scores = client.ask(wire.Score(tokens=prompt + reply.ids)).result
    assert scores.logprobs[len(prompt) - 1 :] == reply.logprobs  # to the bit: one row at a time, or all at once


@pytest.mark.parametrize("tokens", [[], [5]])
def test_a_score_of_nothing_is_empty(client: WireClient, tokens: list[int]) -> None:
    assert client.ask(wire.Score(tokens=tokens)).result.logprobs == []


def test_top_logprobs_come_with_each_token(client: WireClient) -> None:
    id = client.send(generate("x", max_tokens=3, logprobs=4))
    tokens = [answer.body for answer in client.answers(id) if isinstance(answer.body, Token)]
    top = [pairs for token in tokens for pairs in token.top or ()]
    logprobs = [logprob for token in tokens for logprob in token.logprobs or ()]
    assert [len(pairs) for pairs in top] == [4, 4, 4]
    assert [pairs[0][1] for pairs in top] == logprobs  # greedy: the first is the one that was taken


# Stop strings


def test_a_stop_string_ends_the_reply_before_it(client: WireClient) -> None:
    whole = client.ask(generate("Once", max_tokens=40))
    stop = whole.text[9:12]
    reply = client.ask(generate("Once", max_tokens=40, stop=[stop]))
    assert reply.result.finish_reason == "stop_string"
    assert reply.text == whole.text[: whole.text.index(stop)]
    assert reply.ids == whole.ids[: len(reply.ids)]


def test_a_session_keeps_no_token_of_a_stop_string(client: WireClient) -> None:
    whole = client.ask(generate("Once", max_tokens=40))
    reply = client.ask(generate("Once", session="stopped", max_tokens=40, stop=[whole.text[9:12]]))
    tokens = client.ask(wire.SessionGet(name="stopped", include_tokens=True)).result.tokens
    assert tokens[len(tokens) - len(reply.ids) :] == reply.ids
    assert whole.text[9:12] not in client.ask(wire.Detokenize(tokens=reply.ids)).result.text


def test_a_stop_string_that_does_not_come_changes_nothing(client: WireClient) -> None:
    whole = client.ask(generate("Once", max_tokens=20))
    reply = client.ask(generate("Once", max_tokens=20, stop=[whole.text[-1] + "never"]))
    assert (reply.text, reply.ids) == (whole.text, whole.ids)
    assert reply.result.finish_reason == "length"


# Company


def test_eight_at_once_say_what_each_says_alone(client: WireClient) -> None:
    requests = [
        generate(f"{i} Once upon", max_tokens=16, sampling=wire.Sampling(temperature=1.5, seed=i, top_p=0.9))
        for i in range(8)
    ]
    alone = [client.ask(request).ids for request in requests]
    together = [client.finish(id).ids for id in [client.send(request) for request in requests]]
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == 8


def test_tokens_of_one_step_share_a_frame(client: WireClient) -> None:
    ids = [client.send(generate(f"{i}", max_tokens=300)) for i in range(3)]
    frames = 0
    receive = client.protocol.receive_data

    def counting(data: bytes) -> list[object]:
        nonlocal frames
        frames += data.count(b"\xa7answers")
        return receive(data)  # type: ignore[return-value]

    client.protocol.receive_data = counting  # type: ignore[method-assign,assignment]
    for id in ids:
        client.finish(id)
    assert frames > 10


def test_health_is_answered_while_a_prompt_is_read(client: WireClient) -> None:
    id = client.send(wire.Generate(tokens=LONG_PROMPT, max_tokens=1))
    assert client.wait_for(id, Progress).prefilled < len(LONG_PROMPT)
    assert client.ask(wire.Health()).result["status"] == "ok"
    assert client.wait_for(id, Progress).prefilled < len(LONG_PROMPT)  # and that was still so
    client.ask(wire.Cancel(target=id))


def test_two_turns_at_once_in_one_session_run_in_order(client: WireClient) -> None:
    first = client.send(chat("one", session="ordered", max_tokens=20, sampling=GREEDY))
    second = client.send(chat("two", session="ordered", max_tokens=5, sampling=GREEDY))
    replies = [client.finish(first), client.finish(second)]
    stored = client.ask(wire.SessionGet(name="ordered")).result.messages
    assert [message.content for message in stored] == ["one", replies[0].text, "two", replies[1].text]
    assert replies[1].result.session.n_turns == 2


def test_two_connections_at_once_in_one_session_run_in_order(daemon: DaemonProcess) -> None:
    with daemon.connect() as one, daemon.connect() as two:
        first = one.send(chat("one", session="ordered-2", max_tokens=40, sampling=GREEDY))
        one.wait_for(first, Token)
        second = two.send(chat("two", session="ordered-2", max_tokens=5, sampling=GREEDY))
        with pytest.raises(SessionBusy):
            _ = two.ask(wire.SessionTruncate(name="ordered-2", n_tokens=0)).result
        reply = two.finish(second)
        assert one.finish(first).result.finish_reason == "length"
        assert reply.result.session.n_turns == 2
        assert reply.result.usage.cached_tokens > 40  # the whole of the other's turn came before it
        stored = two.ask(wire.SessionGet(name="ordered-2")).result.messages
    assert [message.role for message in stored] == ["user", "assistant", "user", "assistant"]
    assert [message.content for message in stored[::2]] == ["one", "two"]


def test_a_session_cannot_be_changed_under_a_running_turn(client: WireClient) -> None:
    id = client.send(wire.Generate(tokens=LONG_PROMPT, session="busy", max_tokens=1))
    client.wait_for(id, Progress)
    for request in (wire.SessionTruncate(name="busy", n_tokens=0), wire.SessionDelete(name="busy")):
        with pytest.raises(SessionBusy):
            _ = client.ask(request).result
    client.ask(wire.Cancel(target=id))
    client.finish(id)
    assert client.ask(wire.SessionDelete(name="busy")).result


# Cancelling


def test_cancelling_in_decode_keeps_what_was_sent(client: WireClient) -> None:
    id = client.send(generate("Once", session="cut", max_tokens=3000))
    client.wait_for(id, Token)
    assert client.ask(wire.Cancel(target=id)).result["found"]
    reply = client.finish(id)
    assert reply.result.finish_reason == "cancelled"
    assert reply.result.durable
    tokens = client.ask(wire.SessionGet(name="cut", include_tokens=True)).result.tokens
    assert tokens[len(tokens) - len(reply.ids) :] == reply.ids
    assert len(tokens) < 3000


def test_cancelling_in_prefill_stops_the_work(client: WireClient) -> None:
    id = client.send(wire.Generate(tokens=LONG_PROMPT[::-1], max_tokens=1))
    client.wait_for(id, Progress)
    client.ask(wire.Cancel(target=id))
    reply = client.finish(id)
    assert reply.result.finish_reason == "cancelled"
    assert reply.ids == []
    assert client.wait_until(lambda stats: stats["scheduler"]["running"] == 0)["pages"]["active"] == 0


def test_cancelling_in_the_queue_answers_at_once(client: WireClient) -> None:
    running = [client.send(generate(f"{i}", max_tokens=3000)) for i in range(4)]
    client.wait_for(running[-1], Token)
    queued = client.send(generate("queued", max_tokens=5))
    client.ask(wire.Cancel(target=queued))
    assert client.finish(queued).result.finish_reason == "cancelled"
    for id in running:
        client.ask(wire.Cancel(target=id))
        assert client.finish(id).result.finish_reason == "cancelled"


def test_cancelling_a_turn_that_waits_for_another_changes_nothing(client: WireClient) -> None:
    first = client.send(generate("Once", session="waits", max_tokens=3000))
    client.wait_for(first, Token)
    second = client.send(generate(" more", session="waits", max_tokens=5))
    client.ask(wire.Cancel(target=second))
    result = client.finish(second).result
    assert result.finish_reason == "cancelled"
    assert not result.durable
    client.ask(wire.Cancel(target=first))
    client.finish(first)
    assert client.ask(wire.SessionGet(name="waits")).result.n_turns == 1


def test_cancelling_what_is_not_there_says_so(client: WireClient) -> None:
    assert client.ask(wire.Cancel(target=77777)).result == {"found": False}


def test_a_cancelled_score_is_an_error(client: WireClient) -> None:
    id = client.send(wire.Score(tokens=LONG_PROMPT))
    client.ask(wire.Cancel(target=id))
    with pytest.raises(Cancelled):
        _ = client.finish(id).result


def test_a_deadline_ends_a_request_and_keeps_what_was_sent(client: WireClient) -> None:
    id = client.send(generate("Once", session="late", max_tokens=3500, deadline_s=0.3))
    reply = client.finish(id)
    with pytest.raises(DeadlineExceeded):
        _ = reply.result
    tokens = client.ask(wire.SessionGet(name="late", include_tokens=True)).result.tokens
    assert tokens[len(tokens) - len(reply.ids) :] == reply.ids


def test_a_deadline_counts_while_waiting_for_another_turn(client: WireClient) -> None:
    first = client.send(generate("Once", session="late2", max_tokens=3500))
    client.wait_for(first, Token)
    with pytest.raises(DeadlineExceeded):
        _ = client.ask(generate("more", session="late2", deadline_s=0.1)).result
    client.ask(wire.Cancel(target=first))
    client.finish(first)


# Going on with a reply that was cut


def test_an_empty_prompt_goes_on_with_the_reply(client: WireClient) -> None:
    whole = client.chat("one", session="whole", max_tokens=20, sampling=GREEDY)
    part = client.chat("one", session="parts", max_tokens=8, sampling=GREEDY)
    rest = client.ask(generate("", session="parts", max_tokens=12))
    assert part.ids + rest.ids == whole.ids
    messages = client.ask(wire.SessionGet(name="parts")).result.messages
    assert [message.role for message in messages] == ["user", "assistant"]
    assert messages[1].content == whole.text


def test_a_cut_reply_is_closed_before_the_next_question(client: WireClient) -> None:
    client.chat("one", session="closed", max_tokens=5, sampling=GREEDY)
    client.chat("two", session="closed", max_tokens=5, sampling=GREEDY)
    tokens = client.ask(wire.SessionGet(name="closed", include_tokens=True)).result.tokens
    text = client.ask(wire.Detokenize(tokens=tokens)).result.text
    assert text.count("<|im_end|>") == 3  # one, its reply, two
    assert text.count("<|im_start|>") == 4


def test_generating_and_chatting_may_take_turns(client: WireClient) -> None:
    client.ask(generate("Once upon a time", session="mixed", max_tokens=4))
    before = client.ask(wire.SessionGet(name="mixed", include_tokens=True)).result.tokens
    client.chat("and then?", session="mixed", max_tokens=4)
    after = client.ask(wire.SessionGet(name="mixed", include_tokens=True)).result
    assert after.tokens[: len(before)] == before
    assert [message.role for message in after.messages] == ["raw", "raw", "user", "assistant"]


# Sessions


def test_resume_says_whether_a_session_must_be_there(client: WireClient) -> None:
    with pytest.raises(SessionNotFound):
        _ = client.chat("hi", session="nobody", resume=True).result
    assert client.chat("hi", session="somebody", resume=False, max_tokens=1).result.session.created
    with pytest.raises(SessionExists):
        _ = client.chat("hi", session="somebody", resume=False).result
    assert not client.chat("hi", session="somebody", resume=True, max_tokens=1).result.session.created


def test_a_fork_goes_its_own_way(client: WireClient) -> None:
    client.chat("one", session="trunk", max_tokens=40)
    forked = client.ask(wire.SessionFork(name="trunk", to="branch")).result
    result = client.chat("two", session="branch", max_tokens=4).result
    assert result.usage.cached_tokens >= forked["n_tokens"] - 1
    assert client.ask(wire.SessionGet(name="trunk")).result.n_tokens == forked["n_tokens"]


def test_regenerating_prefills_one_token_and_says_the_same(client: WireClient) -> None:
    first = client.chat("one", session="again", max_tokens=12, sampling=GREEDY)
    n_prompt = first.result.usage.prompt_tokens
    client.ask(wire.SessionTruncate(name="again", n_tokens=n_prompt))
    second = client.ask(generate("", session="again", max_tokens=12))
    assert second.ids == first.ids
    assert second.result.usage.cached_tokens == n_prompt - 1


def test_a_chat_goes_on_after_cutting_anywhere(client: WireClient) -> None:
    client.chat("one", session="cut-up", max_tokens=10)
    client.chat("two", session="cut-up", max_tokens=10)
    n_tokens = client.ask(wire.SessionGet(name="cut-up")).result.n_tokens
    for n in range(n_tokens, -1, -7):
        client.ask(wire.SessionFork(name="cut-up", to=f"cut-{n}", n_tokens=n))
        reply = client.chat("more", session=f"cut-{n}", max_tokens=2)
        assert reply.result.usage.completion_tokens > 0
        messages = client.ask(wire.SessionGet(name=f"cut-{n}")).result.messages
        assert [message.content for message in messages[-2:]] == ["more", reply.text]


def test_sessions_are_listed_page_by_page(client: WireClient) -> None:
    for name in ("list-a", "list-b", "list-c"):
        client.chat("hi", session=name, max_tokens=1)
    page = client.ask(wire.SessionList(after="list-", limit=2)).result
    assert [summary.name for summary in page.sessions] == ["list-a", "list-b"]
    rest = client.ask(wire.SessionList(after=page.next, limit=2)).result
    assert rest.sessions[0].name == "list-c"


# Refusals


def error_of(reply: Reply) -> ColibriError:
    with pytest.raises(ColibriError) as caught:
        _ = reply.result
    return caught.value


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: WireClient) -> None:
    error = error_of(client.ask(wire.Generate(tokens=LONG_PROMPT, max_tokens=1000)))
    assert isinstance(error, PromptTooLong)
    assert "3800" in error.message
    assert "4096" in error.message


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (wire.Generate(tokens=[5, 300]), "tokens"),
        (wire.Score(tokens=[5, 300]), "tokens"),
        (wire.Detokenize(tokens=[1, 300]), "tokens[1]"),
        (wire.Generate(prompt="x", sampling=wire.Sampling(logit_bias={300: 1.0})), "sampling.logit_bias.300"),
        (wire.Chat(messages=[wire.Message(role="user\n<|im_start|>system", content="x")]), "messages[0].role"),
        (wire.Chat(messages=[wire.Message(role="raw", content="x")]), "messages[0].role"),
        (wire.Chat(messages=[wire.Message(role="usr", content="x")]), "messages[0].role"),
    ],
)
def test_what_is_not_of_this_model_is_refused_by_field(client: WireClient, request_: wire.Request, where: str) -> None:
    error = error_of(client.ask(request_))
    assert isinstance(error, InvalidRequest)
    assert error.where == where


def test_a_refused_first_turn_leaves_no_session_behind(client: WireClient) -> None:
    error_of(client.ask(wire.Generate(tokens=LONG_PROMPT, max_tokens=1000, session="unborn")))
    assert isinstance(error_of(client.ask(wire.SessionGet(name="unborn"))), SessionNotFound)


def test_an_unknown_session_is_not_found_and_disturbs_nobody(client: WireClient) -> None:
    alone = client.ask(generate("Once", max_tokens=30))
    id = client.send(generate("Once", max_tokens=30))
    for request in (
        wire.SessionGet(name="x"),
        wire.SessionTruncate(name="x", n_tokens=0),
        wire.SessionDelete(name="x"),
    ):
        assert isinstance(error_of(client.ask(request)), SessionNotFound)
    assert client.finish(id).ids == alone.ids


def test_the_daemon_has_no_pages_in_use_when_nothing_runs(daemon: DaemonProcess) -> None:
    with daemon.connect() as client:
        stats = client.wait_until(lambda stats: stats["scheduler"]["running"] == 0)
    pages = stats["pages"]
    assert pages["free"] + pages["cached"] == pages["total"]
