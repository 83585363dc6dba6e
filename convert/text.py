"""What Python needs of a checkpoint besides weights: tokenizer, chat template, end tokens, generation defaults.

It becomes the JSON of the file (docs/format.md, "JSON"). No tokenizer is built from files other than tokenizer.json:
that is the one form from which every reader gets the same tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from .checkpoint import parse_json
from .errors import DamagedFile, MissingFile, UnsupportedModel
from .format import MAX_END_TOKENS


@dataclass
class TextAssets:
    """Contents of the files about text, and what was concluded from them."""

    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tokenizer: str
    tokenizer_config: dict[str, Any]
    special_tokens_map: dict[str, Any] | None
    chat_template: str | None
    end_tokens: list[int]
    bos_token_id: int | None
    add_bos: bool
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by name
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The part of the file's JSON that is about text."""
        return {
            "config": self.config,
            "generation_config": self.generation_config,
            "tokenizer": self.tokenizer,
            "tokenizer_config": self.tokenizer_config,
            "special_tokens_map": self.special_tokens_map,
            "chat_template": self.chat_template,
            "end_tokens": self.end_tokens,
            "bos_token_id": self.bos_token_id,
            "add_bos": self.add_bos,
            "tokenizer_fingerprint": hashlib.sha256(self.tokenizer.encode()).hexdigest(),
        }


class _Folder:
    """Reads the small files of a checkpoint and remembers their hashes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, str] = {}

    def _raw(self, name: str) -> bytes | None:
        try:
            raw = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        self.files[name] = hashlib.sha256(raw).hexdigest()
        return raw

    def text(self, name: str) -> str | None:
        """The file's text; None where it is not there."""
        raw = self._raw(name)
        try:
            return None if raw is None else raw.decode()
        except UnicodeDecodeError as error:
            raise DamagedFile(f"not UTF-8: {error}", where=name) from None

    def object(self, name: str) -> dict[str, Any] | None:
        """The file's JSON object; None where it is not there."""
        raw = self._raw(name)
        if raw is None:
            return None
        value = parse_json(raw, name)
        if not isinstance(value, dict):
            raise DamagedFile("is not a JSON object", where=name)
        return value

    def tokenizer(self) -> str:
        """The text of tokenizer.json; MissingFile with advice."""
        text = self.text("tokenizer.json")
        if text is None:
            raise MissingFile(
                "the checkpoint has no tokenizer.json",
                where=str(self.path),
                hint="load its tokenizer with transformers and save it there with save_pretrained()",
            )
        return text


def read_text_assets(path: Path, vocabulary: int) -> TextAssets:
    """Reads config.json, generation_config.json and the tokenizer's files of a checkpoint folder."""
    folder = _Folder(path)
    config = folder.object("config.json") or {}
    generation_config = folder.object("generation_config.json")
    tokenizer_text = folder.tokenizer()
    tokenizer = _parse_tokenizer(tokenizer_text)
    tokenizer_config = folder.object("tokenizer_config.json") or {}
    special = folder.object("special_tokens_map.json")
    notes: list[str] = []
    by_id, by_text = [config, generation_config or {}], [tokenizer_config, special or {}]
    bos = _bos(tokenizer, config, tokenizer_config)
    assets = TextAssets(
        config=config,
        generation_config=generation_config,
        tokenizer=tokenizer_text,
        tokenizer_config=tokenizer_config,
        special_tokens_map=special,
        chat_template=folder.text("chat_template.jinja") or _template_of(tokenizer_config),
        end_tokens=_end_tokens(tokenizer, by_id, by_text, vocabulary, notes),
        bos_token_id=bos,
        add_bos=_adds_bos(tokenizer, tokenizer_config, bos),
        files=folder.files,
        notes=notes,
    )
    _note_what_is_odd(assets, tokenizer, vocabulary)
    return assets


def _parse_tokenizer(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise DamagedFile(f"is not a tokenizer: {error}", where="tokenizer.json") from None


def _template_of(tokenizer_config: dict[str, Any]) -> str | None:
    """A template in tokenizer_config.json: text, or a list of named ones of which `default` is taken."""
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_id(tokenizer: tokenizers.Tokenizer, token: Any) -> int | None:
    """Id of a token that is given as text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _bos(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> int | None:
    """The token that the tokenizer's configuration names, else the id in the model's."""
    named = _token_id(tokenizer, tokenizer_config.get("bos_token"))
    configured = config.get("bos_token_id")
    return named if named is not None else configured if type(configured) is int else None


def _end_tokens(
    tokenizer: tokenizers.Tokenizer,
    by_id: list[dict[str, Any]],
    by_text: list[dict[str, Any]],
    vocabulary: int,
    notes: list[str],
) -> list[int]:
    """Every id that some file names as the end of a text or turn, in the order found, each once."""
    found: list[int] = []
    for source in by_id:
        value = source.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
    for source in by_text:
        ids = [_token_id(tokenizer, source.get(key)) for key in ("eos_token", "eot_token")]
        found += [item for item in ids if item is not None]
    unique = list(dict.fromkeys(found))
    outside = [item for item in unique if not 0 <= item < vocabulary]
    if outside:
        notes.append(f"warning: end tokens outside the vocabulary of {vocabulary} are left out: {outside}")
    kept = [item for item in unique if item not in outside]
    if len(kept) > MAX_END_TOKENS:
        raise UnsupportedModel(f"{len(kept)} end tokens, more than {MAX_END_TOKENS}", where="eos_token_id")
    return kept


def _adds_bos(tokenizer: tokenizers.Tokenizer, tokenizer_config: dict[str, Any], bos: int | None) -> bool:
    """Whether the reference tokenizer puts BOS before a raw prompt: as its configuration says, else as it encodes."""
    if bos is None:
        return False
    configured = tokenizer_config.get("add_bos_token")
    if isinstance(configured, bool):
        return configured
    return bool(tokenizer.encode("a").ids[:1] == [bos])


def _note_what_is_odd(assets: TextAssets, tokenizer: tokenizers.Tokenizer, vocabulary: int) -> None:
    if not assets.end_tokens:
        assets.notes.append("warning: no file names an end token; generation stops at its limit only")
    if assets.chat_template is None:
        assets.notes.append("the checkpoint has no chat template; chat requests will be refused")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= vocabulary:
        assets.notes.append(f"warning: the tokenizer has ids up to {highest}, the model {vocabulary} rows")
