"""Each operation's fields: what is taken, and how what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from colibri.protocol.errors import InvalidRequest
from colibri.protocol.messages import (
    REQUESTS,
    Chat,
    Completion,
    Generate,
    Message,
    ModelInfo,
    Sampling,
    SessionInfo,
    Token,
)

# For each operation: the least that it takes, and everything that it takes.
LEAST: dict[str, dict[str, Any]] = {
    "hello": {"version": 1, "client": "test"},
    "generate": {"prompt": "Once"},
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "score": {"tokens": [1, 2]},
    "tokenize": {"text": "a"},
    "detokenize": {"tokens": []},
    "session.list": {},
    "session.get": {"name": "a"},
    "session.fork": {"name": "a", "to": "b"},
    "session.truncate": {"name": "a", "n_tokens": 0},
    "session.delete": {"name": "a"},
    "stats": {},
    "model": {},
    "health": {},
    "cancel": {"target": 1},
}
SAMPLING = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "seed": 2**64 - 1,
    "logit_bias": {"7": -100.0, "8": 1.0},
}
COMMON = {
    "session": "alice",
    "resume": True,
    "max_tokens": 5,
    "sampling": SAMPLING,
    "stop": ["\n", "END"],
    "logprobs": 20,
    "deadline_s": 1.5,
}
MOST = LEAST | {
    "generate": {"tokens": [0, 2**31 - 1], "parse_special": True} | COMMON,
    "chat": LEAST["chat"] | COMMON,
    "tokenize": {"text": "a", "parse_special": True, "add_special": True},
    "session.list": {"after": "a", "limit": 10},
    "session.get": {"name": "a", "include_tokens": True},
    "session.fork": {"name": "a", "to": "b", "n_tokens": 3},
}


def parse(op: str, fields: dict[str, Any]) -> Any:
    return REQUESTS[op].from_wire(fields)


def refusal(op: str, fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(op, fields)
    return caught.value


def test_the_examples_cover_every_operation() -> None:
    assert LEAST.keys() == REQUESTS.keys()


@pytest.mark.parametrize("op", REQUESTS)
def test_the_least_that_an_operation_takes_is_taken(op: str) -> None:
    assert parse(op, LEAST[op]).op == op


@pytest.mark.parametrize("op", REQUESTS)
def test_a_request_with_every_field_comes_back_as_it_was_sent(op: str) -> None:
    request = parse(op, MOST[op])
    assert request.to_wire() == MOST[op]
    assert parse(op, request.to_wire()) == request


@pytest.mark.parametrize("op", REQUESTS)
def test_an_unknown_field_is_refused_by_name(op: str) -> None:
    error = refusal(op, LEAST[op] | {"temprature": 1})
    assert error.where == "temprature"
    assert "unknown field" in error.message


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in REQUESTS for name in LEAST[op] if op not in ("generate", "score")]
)
def test_a_missing_field_is_refused_by_name(op: str, name: str) -> None:
    fields = {key: value for key, value in LEAST[op].items() if key != name}
    assert refusal(op, fields).where == name


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in REQUESTS for name in MOST[op]])
def test_a_field_of_another_type_is_refused_by_name(op: str, name: str) -> None:
    """No field takes bytes, and none a map with this key."""
    for wrong in (b"bytes", {"surprise": [1]}):
        where = refusal(op, MOST[op] | {name: wrong}).where
        assert where is not None
        assert where.split(".")[0] == name


@pytest.mark.parametrize(
    ("op", "fields", "where"),
    [
        ("generate", {"prompt": "a", "tokens": [1]}, "prompt"),
        ("generate", {}, "prompt"),
        ("generate", {"prompt": ""}, "prompt"),
        ("generate", {"tokens": []}, "tokens"),
        ("generate", {"tokens": [1, -1]}, "tokens[1]"),
        ("generate", {"tokens": [2**31]}, "tokens[0]"),
        ("generate", {"tokens": [True]}, "tokens[0]"),
        ("generate", {"tokens": [1.0]}, "tokens[0]"),
        ("generate", {"tokens": "abc"}, "tokens"),
        ("generate", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("generate", {"prompt": "a", "max_tokens": None}, "max_tokens"),
        ("generate", {"prompt": "a", "max_tokens": True}, "max_tokens"),
        ("generate", {"prompt": "a", "parse_special": 1}, "parse_special"),
        ("generate", {"prompt": "a", "stop": [""]}, "stop[0]"),
        ("generate", {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ("generate", {"prompt": "a", "stop": ["é" * 513]}, "stop[0]"),
        ("generate", {"prompt": "a", "stop": "x"}, "stop"),
        ("generate", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("generate", {"prompt": "a", "logprobs": True}, "logprobs"),
        ("generate", {"prompt": "a", "deadline_s": 0}, "deadline_s"),
        ("generate", {"prompt": "a", "deadline_s": float("inf")}, "deadline_s"),
        ("generate", {"prompt": "a", "resume": True}, "resume"),
        ("generate", {"prompt": "a", "sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ("generate", {"prompt": "a", "sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ("generate", {"prompt": "a", "sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ("generate", {"prompt": "a", "sampling": {"top_p": 1e-300}}, "sampling.top_p"),
        ("generate", {"prompt": "a", "sampling": {"repetition_penalty": 5e-324}}, "sampling.repetition_penalty"),
        ("generate", {"prompt": "a", "sampling": {"top_p": 0}}, "sampling.top_p"),
        ("generate", {"prompt": "a", "sampling": {"top_p": 1.01}}, "sampling.top_p"),
        ("generate", {"prompt": "a", "sampling": {"min_p": 2}}, "sampling.min_p"),
        ("generate", {"prompt": "a", "sampling": {"top_k": 1.5}}, "sampling.top_k"),
        ("generate", {"prompt": "a", "sampling": {"seed": -1}}, "sampling.seed"),
        ("generate", {"prompt": "a", "sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
        ("generate", {"prompt": "a", "sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias.x"),
        ("generate", {"prompt": "a", "sampling": {"logit_bias": {"²": 1}}}, "sampling.logit_bias.²"),
        ("generate", {"prompt": "a", "sampling": {"logit_bias": {"9999999999": 1}}}, "sampling.logit_bias"),
        ("generate", {"prompt": "a", "sampling": {"logit_bias": {"7": "1"}}}, "sampling.logit_bias.7"),
        ("generate", {"prompt": "a", "sampling": {"seeed": 1}}, "sampling.seeed"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "", "content": ""}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": "", "nickname": "x"}]}, "messages[0].nickname"),
        ("chat", {"messages": [{"role": "user", "content": "", "name": 7}]}, "messages[0].name"),
        ("chat", {"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
        ("chat", {"messages": [{"role": "user", "content": ""}], "tools": [{"f": [1, b"x"]}]}, "tools[0].f[1]"),
        (
            "chat",
            {"messages": [{"role": "user", "content": ""}], "template_args": {"a": {"b": float("inf")}}},
            "template_args.a.b",
        ),
        ("chat", {"messages": [{"role": "user", "content": ""}], "template_args": []}, "template_args"),
        ("chat", {"messages": [{"role": "user", "content": ["parts"]}]}, "messages[0].content"),
        ("score", {}, "tokens"),
        ("score", {"tokens": [1], "text": "a"}, "tokens"),
        ("session.list", {"limit": 0}, "limit"),
        ("session.truncate", {"name": "a", "n_tokens": -1}, "n_tokens"),
        ("cancel", {"target": 0}, "target"),
        ("hello", {"version": 1, "client": "x" * 201}, "client"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_path(op: str, fields: dict[str, Any], where: str) -> None:
    assert refusal(op, fields).where == where


def test_what_a_template_may_know_of_a_message_comes_through() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, None, True, "ü"]}}}
    messages = [
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
    ]
    fields = {"messages": messages, "tools": [call], "template_args": {"enable_thinking": False}}
    assert REQUESTS["chat"].from_wire(fields).to_wire() == fields | {"max_tokens": 256, "sampling": {}}


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../../etc/passwd", "a\0b", "a\nb", "\x1b[2J", "a\u2028b", "x" * 10_000, "é" * 101, 7, None],
)
def test_a_name_that_could_be_a_path_or_break_a_line_is_refused(name: Any) -> None:
    assert refusal("session.get", {"name": name}).where == "name"


@pytest.mark.parametrize("name", ["alice", "two words", "...", "für-🐦", "a.b", "é" * 100])
def test_a_plain_name_is_taken(name: str) -> None:
    assert parse("session.get", {"name": name}).name == name


def test_null_means_left_out() -> None:
    assert parse("generate", {"prompt": "a", "session": None, "stop": None}) == Generate(prompt="a")


def test_an_empty_prompt_goes_on_in_a_session() -> None:
    assert parse("generate", {"prompt": "", "session": "a"}).prompt == ""


def test_integers_are_numbers() -> None:
    assert parse("generate", {"prompt": "a", "sampling": {"temperature": 1}}).sampling == Sampling(temperature=1.0)


def test_a_refusal_stays_short_however_large_the_value_is() -> None:
    assert len(str(refusal("session.get", {"name": "x" * 1_000_000}))) < 200
    assert len(str(refusal("cancel", {"target": [0] * 1_000_000}))) < 200


def test_what_was_wrong_stands_in_the_message() -> None:
    error = refusal("generate", {"prompt": "a", "sampling": {"top_p": 1.5}})
    assert str(error) == "sampling.top_p: must be a number over 0 and at most 1, not 1.5"


def test_messages_become_objects() -> None:
    assert parse("chat", LEAST["chat"]) == Chat(messages=[Message(role="user", content="hi")])


# Answers.

COMPLETION = {
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2},
    "timings": {"queue_s": 0.0, "load_s": 0.0, "prefill_s": 0.1, "decode_s": 0.2},
    "seed": 5,
    "durable": True,
    "session": {"name": "a", "n_tokens": 5, "n_turns": 1, "created": True, "age_s": 0.0},
    "note": "model changed: pages not reused",
}


def test_a_result_comes_back_as_it_was_sent() -> None:
    assert Completion.from_wire(COMPLETION).to_wire() == COMPLETION


def test_an_answer_may_hold_fields_of_a_newer_daemon() -> None:
    assert Completion.from_wire(COMPLETION | {"mood": "good"}).finish_reason == "stop"


def test_an_answer_must_hold_what_this_version_promises() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Completion.from_wire({key: value for key, value in COMPLETION.items() if key != "usage"}, "done")
    assert caught.value.where == "done.usage"


def test_alternatives_are_pairs_per_token() -> None:
    token = Token.from_wire({"text": "a", "ids": [1], "logprobs": [-0.5], "top": [[[1, -0.5], [2, -1]]]})
    assert token.top == [[(1, -0.5), (2, -1.0)]]


@pytest.mark.parametrize("top", [1, [1], [[1]], [[[1]]], [[["a", 1]]], [[[1, "a"]]], [[[True, 1.0]]]])
def test_alternatives_of_another_shape_are_refused(top: Any) -> None:
    with pytest.raises(InvalidRequest):
        Token.from_wire({"text": "a", "ids": [1], "top": top})


def test_a_session_with_an_odd_role_can_still_be_read() -> None:
    summary = {"name": "a", "created": 1.0, "updated": 2.0, "n_turns": 1, "n_tokens": 9, "state": "idle"}
    info = SessionInfo.from_wire(summary | {"messages": [{"role": "tool", "content": "", "end": 4}]})
    assert [message.role for message in info.messages] == ["tool"]
    assert info.tokens is None


def test_the_model_is_told_with_every_field() -> None:
    with pytest.raises(InvalidRequest, match="is missing"):
        ModelInfo.from_wire({"name": "m"})
