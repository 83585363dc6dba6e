"""Text and tokens: the model's own tokenizer, decoding that may stop anywhere, stop strings.

Rules:
  - What a user typed never becomes a control token. `encode` reads control strings as ordinary text unless it is told
    `parse_special`; text without them is tokenised exactly as the reference does either way.
  - Decoding is defined on bytes: a token is a few bytes, a text is their concatenation read as UTF-8, and bytes that
    are no character become U+FFFD as in Python's and Rust's lossy decoders. So the pieces of a stream, joined, are the
    decoding of the whole, wherever it was cut; a character that is still incomplete at the end becomes one U+FFFD.
  - An id without a token (a gap in a padded vocabulary) has no bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from colibri.protocol.errors import PromptTooLong


class UnsupportedTokenizer(ValueError):
    """The tokenizer is of a kind whose tokens cannot be read as bytes."""


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte, as byte-level BPE writes bytes (Radford et al. 2019): printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Added tokens that are not flagged special but frame a conversation all the same, like <think> or [TOOL_CALLS].
_MARKUP = re.compile(r"<\S+>|\[\S+\]")


def _parts(decoder: Any) -> list[Mapping[str, Any]]:
    """The steps of the `decoder` entry of a tokenizer.json, sequences flattened."""
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _parts(part)]
    return [decoder]


def _is_sentencepiece(step: Mapping[str, Any]) -> bool:
    """Whether this step of a decoder turns U+2581 into a space or <0x41> into a byte."""
    return step.get("type") in ("Metaspace", "ByteFallback") or step.get("pattern") == {"String": "\u2581"}


def _strips_space(step: Mapping[str, Any]) -> bool:
    """Whether this step takes the space away that the encoder put before a text."""
    if step.get("type") == "Metaspace":
        return bool(step.get("prepend_scheme") != "never" and step.get("add_prefix_space", True))
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


class Tokenizer:
    """The tokenizer of a model, from the text of its tokenizer.json.

    `bos` is put before a raw prompt if `add_bos`. Safe to share between threads.
    Raises UnsupportedTokenizer for a decoder neither byte-level nor like SentencePiece's, ValueError for bad JSON.
    """

    def __init__(self, tokenizer_json: str, *, bos: int | None = None, add_bos: bool = False) -> None:
        data = json.loads(tokenizer_json)
        steps = _parts(data.get("decoder"))
        self._byte_level = any(step.get("type") == "ByteLevel" for step in steps)
        if not self._byte_level and not any(map(_is_sentencepiece, steps)):
            kinds = ", ".join(str(step.get("type")) for step in steps) or "none"
            raise UnsupportedTokenizer(f"its decoder is {kinds}; known are byte-level and SentencePiece-like ones")
        self.strips_leading_space = any(map(_strips_space, steps))
        self.bos = bos
        self.add_bos = add_bos and bos is not None
        self._parsing = _load(data)
        self._added: dict[int, str] = {token["id"]: token["content"] for token in data.get("added_tokens", ())}
        self._special = frozenset(token["id"] for token in data.get("added_tokens", ()) if token.get("special"))
        self.control = self._find_control(data)
        self._plain = _load_plain(data, self.control)
        self._control_string = _any_of(self.control.values())
        self._special_string = _any_of(self.control[token] for token in self.control.keys() & self._special)
        self._bytes: dict[int, bytes] = {}
        self._longest_token = _longest_token_bytes(data) if _covers_all_text(data) else None

    @staticmethod
    def from_model(model_json: Mapping[str, Any]) -> Tokenizer:
        """From the JSON part of a model file (docs/format.md)."""
        bos = model_json.get("bos_token_id")
        return Tokenizer(model_json["tokenizer"], bos=bos, add_bos=bool(model_json.get("add_bos")))

    @staticmethod
    def _find_control(data: Mapping[str, Any]) -> dict[int, str]:
        """Id → string of the tokens that only a template may make. The unknown token is what plain text may become."""
        unknown = data["model"].get("unk_token")
        return {
            token["id"]: token["content"]
            for token in data.get("added_tokens", ())
            if token["content"] != unknown and (token.get("special") or _MARKUP.fullmatch(token["content"]))
        }

    @property
    def vocabulary(self) -> int:
        """One more than the highest id that has a token."""
        return max(self._parsing.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact string."""
        found: int | None = self._parsing.token_to_id(token)
        return found

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids. `parse_special`: control strings become tokens; `add_special`: a BOS first where wanted."""
        ids = (
            list(self._parsing.encode(text, add_special_tokens=False).ids)
            if parse_special
            else self._encode_plain(text)
        )
        return self.with_bos(ids) if add_special else ids

    def refuse_longer_than(self, text: str, max_tokens: int) -> None:
        """Raises PromptTooLong for a text that is surely more tokens, before time is spent on tokenising it."""
        if self._least_tokens(text) > max_tokens and (n := self._least_tokens(self._normalized(text))) > max_tokens:
            raise PromptTooLong(
                f"the text alone is at least {n} tokens, and the context is {max_tokens}",
                hint="shorten the prompt",
                context=max_tokens,
            )

    def _least_tokens(self, text: str) -> int:
        """A bound from below; 0 where there is none."""
        return -(-len(text.encode()) // self._longest_token) if self._longest_token else 0

    def _normalized(self, text: str) -> str:
        """What the tokens really cover: a normalizer may shorten a text."""
        normalizer = self._parsing.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text)).replace("\u2581", " ")

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with exactly one BOS in front where the model expects one."""
        return [self.bos, *ids] if self.add_bos and self.bos is not None and ids[:1] != [self.bos] else ids

    def _encode_plain(self, text: str) -> list[int]:
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if self.control.keys().isdisjoint(ids):
            return ids
        # The vocabulary itself can spell a control string (SentencePiece merges may end in "</s>"): take it apart.
        return [part for token in ids for part in (self._spell(token) if token in self.control else (token,))]

    def _spell(self, control: int) -> list[int]:
        text = self.control[control]
        if len(text) < 2:
            return []
        return self._encode_plain(text[:1]) + self._encode_plain(text[1:])

    def has_control(self, text: str, *, special_only: bool = False) -> bool:
        """Whether the reference tokenisation of `text` could contain a control token (one flagged special)."""
        pattern = self._special_string if special_only else self._control_string
        if pattern.search(text):
            return True
        normalizer = self._parsing.normalizer
        return normalizer is not None and bool(pattern.search(normalizer.normalize_str(text)))

    def split_at_control(self, text: str) -> list[str]:
        """Pieces of `text`, control strings apart: joined they are `text`."""
        pieces, at = [], 0
        for match in self._control_string.finditer(text):
            pieces += [text[at : match.start()], match.group()]
            at = match.end()
        return [piece for piece in [*pieces, text[at:]] if piece]

    def replace_control(self, text: str, replacement: Callable[[str], str], *, special_only: bool = False) -> str:
        """`text` with every control string (flagged special) replaced."""
        pattern = self._special_string if special_only else self._control_string
        return pattern.sub(lambda match: replacement(match.group()), text)

    def is_special(self, token: int) -> bool:
        """Whether the token is flagged special: it has no place in a reply's text."""
        return token in self._special

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; b"" for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._read_bytes(token)
        return known

    def _read_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        found = self._parsing.id_to_token(token)
        if found is None:
            return b""
        text = str(found)
        if self._byte_level:
            codes = [_BYTE_OF_CHARACTER.get(character) for character in text]
            return text.encode() if None in codes else bytes(code for code in codes if code is not None)
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, at_start: bool = True) -> str:
        """The text of `ids`. `at_start`: they begin a text, so that a SentencePiece's leading space goes."""
        decoder = IncrementalDecoder(self, skip_special=skip_special, at_start=at_start)
        return "".join([*map(decoder.feed, ids), decoder.flush()])


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    """A pre-tokenizer's steps, sequences flattened; `name` is that of a sequence's list."""
    if not isinstance(part, Mapping):
        return []
    return [step for inner in part[name] for step in _steps(inner, name)] if name in part else [part]


def _covers_all_text(data: Mapping[str, Any]) -> bool:
    """Whether every byte of a normalised text is part of some token: nothing is dropped, and no token swallows text
    that it does not spell, such as unknown words or the space around it."""
    model = data["model"]
    vocabulary = model.get("vocab", {})
    byte_level = all(character in vocabulary for character in _BYTE_OF_CHARACTER)
    byte_fallback = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    keeps_all = all(
        step["type"] in ("ByteLevel", "Metaspace", "Digits")
        or (step["type"] == "Split" and step.get("behavior") != "Removed")
        for step in _steps(data.get("pre_tokenizer"), "pretokenizers")
    )
    strips = any(token.get("lstrip") or token.get("rstrip") for token in data.get("added_tokens", ()))
    return model.get("type") == "BPE" and bool(byte_level or byte_fallback) and keeps_all and not strips


def _longest_token_bytes(data: Mapping[str, Any]) -> int:
    """Bytes of text that one token stands for at most."""
    byte_level = any(step.get("type") == "ByteLevel" for step in _parts(data.get("decoder")))
    own = (len(token) if byte_level else len(token.replace("\u2581", " ").encode()) for token in data["model"]["vocab"])
    added = (len(token["content"].encode()) for token in data.get("added_tokens", ()))
    return max((*own, *added))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches one of the texts, the longest where several could; nothing if there are none."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def _load(data: Mapping[str, Any]) -> Any:
    """A tokenizer that neither truncates nor pads, whatever the file asks for."""
    return tokenizers.Tokenizer.from_str(json.dumps({**data, "truncation": None, "padding": None}))


def _load_plain(data: Mapping[str, Any], control: Mapping[int, str]) -> Any:
    """The same tokenizer with every control token flagged special and special tokens taken as ordinary text."""
    added = [token | {"special": token["id"] in control} for token in data.get("added_tokens", ())]
    plain = _load({**data, "added_tokens": added})
    plain.encode_special_tokens = True
    return plain


class IncrementalDecoder:
    """Ids in, text out as soon as it is certain. Constant time a token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_space = at_start and tokenizer.strips_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """Whether bytes are held that may become a character."""
        return bool(self._utf8.getstate()[0])

    def feed(self, token: int) -> str:
        """The text that this token makes certain; often "", at times more than its own."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        data = self._tokenizer.bytes_of(token)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is held: "", or one U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string to be completed, in text that arrives in pieces of any size.

    The one that ends first wins, the longer of two that end together: so the outcome does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Text that no stop string can reach any more. After a match: what stood before it, then nothing."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        n_held = self._n_possible_beginning(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def _n_possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = max(map(len, self._stops), default=0) - 1
        for n in range(min(longest, len(text)), 0, -1):
            end = text[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0

    def flush(self) -> str:
        """A false start that never completed."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to send, and how many further tokens are now wholly sent with it."""

    text: str
    n_tokens: int


class TextStream:
    """One reply on its way out: decodes, watches for stop strings, and says which tokens have been sent.

    A token counts as sent when all of its text is; so after a stop string `n_sent` tokens are exactly those that a
    continuation may keep: none of the match, no half character.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, at_start: bool = False) -> None:
        self._decoder = IncrementalDecoder(tokenizer, at_start=at_start)
        self._stops = StopStrings(stops)
        self._n_decoded = 0
        self._n_released = 0
        self._ends: deque[int] = deque()  # where in the text each token that is not yet sent ends
        self.n_sent = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.matched

    def prime(self, tokens: Iterable[int]) -> str:
        """Text of the tokens that this reply goes on from; a character they leave open is completed by the next."""
        return "".join(map(self._decoder.feed, tokens))

    def feed(self, token: int, *, is_end: bool = False) -> Piece:
        """Takes the next token. An end token has no text, whatever its flags."""
        text = "" if is_end else self._decoder.feed(token)
        self._n_decoded += len(text)
        # A token that ends inside a character is sent when that character is.
        self._ends.append(self._n_decoded + self._decoder.pending)
        return self._release(self._stops.feed(text))

    def flush(self) -> Piece:
        """The end: what was held for a character or a stop string that did not come."""
        tail = self._decoder.flush()
        self._n_decoded += len(tail)
        text = self._stops.feed(tail)
        return self._release(text + self._stops.flush())

    def _release(self, text: str) -> Piece:
        self._n_released += len(text)
        n_tokens = 0
        while self._ends and self._ends[0] <= self._n_released:
            self._ends.popleft()
            n_tokens += 1
        self.n_sent += n_tokens
        return Piece(text, n_tokens)
