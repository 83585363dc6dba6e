"""Tokenizing, incremental decoding and stop strings, against the `tokenizers` library and against decoding at once."""

from __future__ import annotations

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from colibri.daemon.text import IncrementalDecoder, StopStrings, TextStream, Tokenizer, UnsupportedTokenizer


@pytest.fixture(scope="module")
def byte_level(byte_level_json: str) -> Tokenizer:
    return Tokenizer(byte_level_json)


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_json: str) -> Tokenizer:
    return Tokenizer(sentencepiece_json, bos=1, add_bos=True)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours and the reference."""
    reference = tokenizers.Tokenizer.from_str(request.getfixturevalue(f"{request.param}_json"))
    return request.getfixturevalue(request.param), reference


def pieces(tokenizer: Tokenizer, ids: list[int], *, at_start: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, at_start=at_start)
    return [*map(decoder.feed, ids), decoder.flush()]


# Encoding


@given(text=st.text(max_size=60))
def test_text_is_tokenised_as_the_reference_does(pair: tuple[Tokenizer, tokenizers.Tokenizer], text: str) -> None:
    ours, reference = pair
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids


@given(
    parts=st.lists(st.sampled_from(["<|im_end|>", "</s>", "<s>", "<think>", "a", " ", "</", "s>", "\n"]), max_size=8)
)
def test_no_text_becomes_a_control_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    ids = tokenizer.encode("".join(parts))
    assert tokenizer.control.keys().isdisjoint(ids)


@given(parts=st.lists(st.sampled_from(["<|im_end|>", "<s>", "<think>", "ab", " ", "\n"]), max_size=8))
def test_a_plain_control_string_reads_back_as_it_was_typed(byte_level: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    assert byte_level.decode(byte_level.encode(text)) == text


def test_control_strings_are_control_tokens_where_that_is_asked_for(
    pair: tuple[Tokenizer, tokenizers.Tokenizer],
) -> None:
    ours, reference = pair
    text = "<s>hello</s> world"
    ids = ours.encode(text, parse_special=True)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert not ours.control.keys().isdisjoint(ids)


def test_a_token_that_frames_thinking_is_control_though_it_is_not_flagged_special(byte_level: Tokenizer) -> None:
    think = byte_level.token_id("<think>")
    assert think not in byte_level.encode("<think>")
    assert byte_level.encode("<think>", parse_special=True) == [think]


def test_the_unknown_token_is_not_control(sentencepiece: Tokenizer) -> None:
    assert sorted(sentencepiece.control.values()) == ["</s>", "<s>"]


@pytest.mark.parametrize(("text", "parse_special"), [("hello", False), ("<s>hello", True), ("", False)])
def test_bos_stands_in_front_exactly_once(sentencepiece: Tokenizer, text: str, parse_special: bool) -> None:
    ids = sentencepiece.encode(text, parse_special=parse_special, add_special=True)
    assert ids.index(1) == 0
    assert ids.count(1) == 1


def test_a_model_without_bos_gets_none(byte_level: Tokenizer) -> None:
    assert byte_level.encode("hello", add_special=True) == byte_level.encode("hello")


def test_a_file_that_asks_for_truncation_is_not_obeyed(byte_level_json: str) -> None:
    reference = tokenizers.Tokenizer.from_str(byte_level_json)
    reference.enable_truncation(4)
    reference.enable_padding(length=64)
    text = "Once upon a time there was a hummingbird"
    assert Tokenizer(reference.to_str()).encode(text) == Tokenizer(byte_level_json).encode(text)


def test_an_unknown_kind_of_decoder_is_refused_by_name(byte_level_json: str) -> None:
    data = json.loads(byte_level_json) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        Tokenizer(json.dumps(data))


# Decoding


@given(text=st.text(max_size=60))
def test_the_joined_pieces_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


@given(data=st.data())
def test_any_ids_joined_from_pieces_equal_the_full_decode(
    byte_level: Tokenizer, byte_level_json: str, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocabulary + 3), max_size=24))
    reference = tokenizers.Tokenizer.from_str(byte_level_json)
    assert "".join(pieces(byte_level, ids)) == reference.decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet="hello 日🐦é.", max_size=30), data=st.data())
def test_sentencepiece_text_decodes_as_the_reference_does(
    sentencepiece: Tokenizer, sentencepiece_json: str, text: str, data: st.DataObject
) -> None:
    ids = sentencepiece.encode(text)
    reference = tokenizers.Tokenizer.from_str(sentencepiece_json)
    assert "".join(pieces(sentencepiece, ids)) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["🐦", "漢字", "ÿ"])
def test_a_character_is_sent_whole(tokenizer: Tokenizer, text: str) -> None:
    parts = pieces(tokenizer, tokenizer.encode("x" + text))
    assert "".join(parts) == "x" + text
    assert "\ufffd" not in "".join(parts)
    assert parts.count("") > 1  # a part of a character says nothing, and there is nothing to flush


def test_a_character_cut_off_at_the_end_becomes_one_replacement(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab🦜")
    assert byte_level.decode(ids[:-1]) == "ab\ufffd"
    assert pieces(byte_level, ids[:-1])[-1] == "\ufffd"


def test_a_gap_in_the_vocabulary_is_harmless(tokenizer: Tokenizer) -> None:
    gap = tokenizer.vocabulary + 100
    ids = tokenizer.encode("x🐦")
    assert tokenizer.decode([ids[0], gap, *ids[1:-1], gap, ids[-1]]) == tokenizer.decode(ids)


def test_a_continuation_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello")
    assert "".join(pieces(sentencepiece, ids, at_start=False)) == " hello"
    assert "".join(pieces(sentencepiece, ids, at_start=True)) == "hello"


def test_special_tokens_are_not_part_of_a_reply(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<think>a<|im_end|>", parse_special=True)
    assert byte_level.decode(ids, skip_special=True) == "<think>a"
    assert byte_level.decode(ids) == "<think>a<|im_end|>"


# Stop strings


def run(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    watch = StopStrings(stops)
    return "".join([*map(watch.feed, parts), watch.flush()]), watch.matched


def first_to_end(stops: list[str], text: str) -> tuple[str, str | None]:
    """The specification: grow the text by one character until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, at: list[int]) -> list[str]:
    borders = [0, *sorted(i for i in at if i <= len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(
    text=st.text(alphabet="ab.", max_size=30),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3),
    at=st.lists(st.integers(0, 30), max_size=12),
)
def test_streaming_stops_where_reading_at_once_does(text: str, stops: list[str], at: list[int]) -> None:
    assert run(stops, cut(text, at)) == first_to_end(stops, text)


@given(
    text=st.text(alphabet="ab", max_size=20), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)
)
def test_nothing_is_held_that_cannot_become_a_stop_string(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    sent = "".join(map(watch.feed, text))
    if watch.matched is None:
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_false_start_is_released_when_it_cannot_complete() -> None:
    watch = StopStrings(["\nUser:"])
    assert [watch.feed(piece) for piece in ["a\n", "Us", "age"]] == ["a", "", "\nUsage"]


def test_text_after_a_stop_string_is_dropped() -> None:
    watch = StopStrings(["STOP"])
    assert watch.feed("one STOP two") == "one "
    assert watch.feed("three") == ""
    assert watch.flush() == ""


# A reply


@given(text=st.text(alphabet="ab <日🐦", max_size=24), stop=st.text(alphabet="ab <日🐦", min_size=1, max_size=3))
def test_sent_tokens_say_no_more_than_the_sent_text(byte_level: Tokenizer, text: str, stop: str) -> None:
    ids = byte_level.encode(text)
    stream = TextStream(byte_level, [stop])
    sent = "".join(stream.feed(token).text for token in ids) + stream.flush().text
    expected, matched = first_to_end([stop], text)
    assert (sent, stream.stop_string) == (expected, matched)
    assert sent.startswith(byte_level.decode(ids[: stream.n_sent]))
    if matched is None:
        assert stream.n_sent == len(ids)


def test_tokens_of_a_held_beginning_are_sent_with_its_text(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ["</x>"])
    ids = byte_level.encode("a</y")
    released = [stream.feed(token) for token in ids]
    assert "".join(piece.text for piece in released) == "a</y"
    assert sum(piece.n_tokens for piece in released) == len(ids)
    assert released[1].n_tokens == 0


def test_a_token_that_holds_the_start_of_a_stop_string_is_not_kept(byte_level_json: str) -> None:
    byte_level = Tokenizer(byte_level_json)
    hello = byte_level.encode(" the")
    assert len(hello) == 1  # one token: " the"
    stream = TextStream(byte_level, ["he"])
    assert stream.feed(hello[0]).text == " t"
    assert stream.n_sent == 0
