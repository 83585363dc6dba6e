"""docs/protocol.md and the code say the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from colibri.protocol import messages
from colibri.protocol.connection import PART_ITEMS
from colibri.protocol.errors import ColibriError
from colibri.protocol.frames import MAX_ARRAY, MAX_CONTAINERS, MAX_DEPTH, MAX_MAP, FrameDecoder
from colibri.protocol.messages import REQUESTS
from colibri.protocol.records import Record

DOC = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
OPERATIONS = DOC.partition("## Operations")[2].partition("\n## ")[0]
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^### |\Z)", OPERATIONS, re.MULTILINE | re.DOTALL))
# What hello to cancel are answered with.
RESULTS: dict[str, list[type[Record]]] = {
    "hello": [messages.ServerInfo, messages.ModelInfo, messages.Limits],
    "generate": [
        messages.Completion,
        messages.Usage,
        messages.Timings,
        messages.SessionState,
        messages.Sampling,
        messages.Token,
    ],
    "score": [messages.Scores],
    "tokenize": [messages.TokenIds],
    "detokenize": [messages.Text],
    "session.list": [messages.SessionPage, messages.SessionSummary],
}


def field_names(*records: type[Record]) -> set[str]:
    return {field.name for record in records for field in dataclasses.fields(record)}


def test_every_operation_is_documented_and_every_documented_one_exists() -> None:
    assert list(SECTIONS) == list(REQUESTS)


@pytest.mark.parametrize("op", REQUESTS)
def test_every_field_of_a_request_is_documented_with_whether_it_may_be_left_out(op: str) -> None:
    text = SECTIONS[op] + (SECTIONS["generate"] if op == "chat" else "")
    for field in dataclasses.fields(REQUESTS[op]):
        optional = field.default is not dataclasses.MISSING
        assert re.search(rf"`{field.name}{re.escape('?') if optional else ''}`", text), field.name


@pytest.mark.parametrize("op", RESULTS)
def test_every_field_of_a_result_is_documented(op: str) -> None:
    for name in field_names(*RESULTS[op]):
        assert re.search(rf"`{name}\??`", SECTIONS[op]), name


@pytest.mark.parametrize("op", REQUESTS)
def test_every_documented_field_of_a_request_exists(op: str) -> None:
    known = field_names(REQUESTS[op], messages.Message, messages.Sampling, *RESULTS.get(op, []))
    for line in re.findall(r"^ *- (`.*)$", SECTIONS[op].partition("→")[0], re.MULTILINE):
        for name in re.findall(r"`([a-z_]+)\??`", line.partition(":")[0]):
            assert name in known, name


def test_every_error_is_documented_and_every_documented_one_exists() -> None:
    table = DOC.partition("## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    client_side = {"daemon_unavailable", "connection_lost"}
    assert documented == set(ColibriError._by_type) - client_side


def test_the_limits_are_those_of_the_code() -> None:
    frames = DOC.partition("## Connection and frames")[2].partition("\n## ")[0]
    for limit in (MAX_ARRAY, MAX_MAP, MAX_CONTAINERS, MAX_DEPTH):
        assert f"{limit:,}" in frames
    assert "16 MiB by default; 64 KiB before" in frames
    assert f"more than {PART_ITEMS:,} items" in DOC


def test_the_example_frame_is_one() -> None:
    (line,) = re.findall(r"^    ((?:[0-9a-f]{2} )+[0-9a-f]{2})$", DOC, re.MULTILINE)
    decoder = FrameDecoder()
    decoder.feed(bytes.fromhex(line))
    assert decoder.next_message() == {"id": 2, "op": "detokenize", "tokens": [1, 2]}
