"""Tokenizing, incremental decoding and stop strings, against the `tokenizers` library and against decoding at once."""

from __future__ import annotations

import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from colibri.daemon.text import IncrementalDecoder, StopStrings, TextStream, Tokenizer, UnsupportedTokenizer
from colibri.native import Model
from colibri.protocol.errors import PromptTooLong


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


# Where pre-tokenisers split differently: categories, combining, direction, white space, case, digits, normal forms.
HARD_UNICODE = [
    "It's we'll THEY'RE I\u2019m 'tis o'clock rock'n'roll",
    "  two   three    four \n\n\n\t\ttabs \r\n crlf\r cr \x0b\x0c end  ",
    "nbsp\u00a0thin\u2009ideographic\u3000zero\u200bwidth\u2060joiner\ufeffbom\u2028line\u2029paragraph\u0085next",
    "1234567890 3.14159 1,000,000 0x1F 1e-9 \u0661\u0662\u0663 \u0967\u0968\u0969 \u2160\u2161"
    " \u00bd\u00b2\u2083 \U0001d7d8",
    "e\u0301 \u00e9 n\u0303 \u1e9b\u0323 \uac00 \u1100\u1161\u11a8 \u0915\u094d\u0937\u093f a\u0300\u0316\u0327",
    "\u0627\u0644\u0639\u064e\u0631\u0628\u0650\u064a\u0651\u0629 \u05e9\u05b8\u05dc\u05d5\u05b9\u05dd"
    " \u202eright\u202c to left \u200f\u200e",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u1781\u17d2\u1798\u17c2\u179a"
    " \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \uff8a\uff9d\uff76\uff78"
    " \u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd"
    " \U0001f1e9\U0001f1ea\U0001f1eb \u2764\ufe0f\u2764\ufe0e 1\ufe0f\u20e3",
    "\u00df\u1e9e \u0130i\u0307 \u03c3\u03c2\u03a3 \u01c5 \ufb01\ufb00 \u212b \u2126 \uff21\uff22\uff23",
    "\x00\x01\x1b[0m\x7f\u0080 \ufffd\ufffe\uffff \ue000\uf8ff \U000e0001\U0010ffff",
    "snake_case camelCase SCREAMING kebab-case path/to/file.py?a=b&c=d#e user@example.org $#@!%^&*()[]{}",
    "z" * 300 + " " * 300 + "\n" * 40 + "\u0301" * 40 + "\U0001f426" * 40,
    "\u2581 \u2581\u2581a <0x41> <0xE9> \u0120\u010a",
    "",
    " ",
    "\n",
]
# Regular expressions that models published since 2019 split text with, each in its tokenizer.json.
SPLITS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "deepseek": r"\p{N}{1,3}|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+|[^\s\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "nfc", "shipped", *SPLITS])
def published(request: pytest.FixtureRequest, byte_level_json: str, sentencepiece_json: str) -> str:
    """The tokenizer.json of one kind."""
    if request.param == "sentencepiece":
        return sentencepiece_json
    if request.param == "shipped":
        with Model(Path(__file__).parents[2] / "models" / "default.colibri") as model:
            return str(model.json["tokenizer"])
    data = json.loads(byte_level_json)
    if request.param == "nfc":
        data["normalizer"] = {"type": "NFC"}
    elif request.param in SPLITS:
        split = {"type": "Split", "pattern": {"Regex": SPLITS[request.param]}, "behavior": "Isolated", "invert": False}
        whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole]}
    return json.dumps(data)


def test_hard_unicode_is_tokenised_as_the_reference_does(published: str) -> None:
    ours, reference = Tokenizer(published), tokenizers.Tokenizer.from_str(published)
    for text in [*HARD_UNICODE, "".join(HARD_UNICODE)]:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected
        assert ours.encode(text, parse_special=True) == expected


@pytest.mark.oracle
def test_hard_unicode_is_tokenised_as_transformers_does(published: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(published))
    ours = Tokenizer(published)
    for text in HARD_UNICODE:
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False)


def test_hard_unicode_comes_back_as_it_was(published: str) -> None:
    tokenizer = Tokenizer(published)
    normal_form = json.loads(published)["normalizer"] == {"type": "NFC"}
    for text in HARD_UNICODE:
        expected = unicodedata.normalize("NFC", text) if normal_form else text
        if tokenizer.strips_leading_space:  # SentencePiece writes a space as U+2581, and knows no difference
            expected = expected.replace("\u2581", " ")
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == expected


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


# Prompts that are too long


def test_a_text_that_is_surely_too_long_is_refused_before_it_is_tokenised(
    byte_level: Tokenizer, sentencepiece: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        monkeypatch.setattr(tokenizer, "_plain", None)  # encoding would fail
        with pytest.raises(PromptTooLong, match=r"at least \d+ tokens, and the context is 100") as caught:
            tokenizer.refuse_longer_than("hello world " * 1000, 100)
        assert caught.value.extra == {"context": 100}


@given(text=st.text(), control=st.sampled_from(["", "<s>", "</s>", "<|im_end|>", "\u2581", "  "]), n=st.integers(1, 50))
def test_a_text_that_fits_is_never_refused(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str, control: str, n: int
) -> None:
    text = (text + control) * n
    for tokenizer in (byte_level, sentencepiece):
        for parse_special in (False, True):
            tokenizer.refuse_longer_than(text, len(tokenizer.encode(text, parse_special=parse_special)))


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"added_tokens": [{"id": 0, "content": "<x>", "rstrip": True, "special": True}]},
    ],
    ids=["drops space", "drops what splits", "a token that swallows space"],
)
def test_where_tokens_may_stand_for_any_length_nothing_is_refused_early(
    byte_level_json: str, change: dict[str, Any]
) -> None:
    data = json.loads(byte_level_json)
    defaults = {"single_word": False, "lstrip": False, "normalized": False}
    change = {
        key: [defaults | token for token in value] if key == "added_tokens" else value for key, value in change.items()
    }
    Tokenizer(json.dumps(data | change)).refuse_longer_than(" " * 100_000, 1)


def test_a_normalizer_that_shortens_is_taken_into_account(byte_level_json: str) -> None:
    shortening = {"type": "Replace", "pattern": {"String": "xxxxxxxx"}, "content": ""}
    tokenizer = Tokenizer(json.dumps(json.loads(byte_level_json) | {"normalizer": shortening}))
    tokenizer.refuse_longer_than("x" * 80_000, 1)
    with pytest.raises(PromptTooLong):
        tokenizer.refuse_longer_than("y" * 80_000, 1)
