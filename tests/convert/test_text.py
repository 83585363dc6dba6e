"""Tokenizer, template and end tokens: collected from every file that may name them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from colibri.convert import ConvertError, convert, inspect
from colibri.convert.text import read_text_assets
from colibri.native import Model

VOCABULARY = 300


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def change(folder: Path, name: str, **values: Any) -> None:
    """Sets keys of a JSON file; None removes one."""
    path = folder / name
    document = (json.loads(path.read_text()) if path.exists() else {}) | values
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def test_end_tokens_come_from_configuration_generation_configuration_and_tokenizer(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=5)
    change(folder, "generation_config.json", eos_token_id=[7, 5, 9])
    change(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    change(folder, "special_tokens_map.json", eos_token={"content": "<|endoftext|>"})
    assert read_text_assets(folder, VOCABULARY).end_tokens == [5, 7, 9, 2, 0]


def test_the_chat_end_token_is_found_where_only_the_tokenizer_names_it(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read_text_assets(folder, VOCABULARY).end_tokens == [0, 2]


def test_end_tokens_reach_the_header_that_the_engine_reads(folder: Path, tmp_path: Path) -> None:
    change(folder, "config.json", eos_token_id=[11, 12])
    convert(folder, tmp_path / "model.colibri")
    with Model(tmp_path / "model.colibri") as model:
        assert model.info.end_tokens == (11, 12, 0, 2)
        assert model.json["end_tokens"] == [11, 12, 0, 2]
    assert inspect(tmp_path / "model.colibri").end_tokens == [11, 12, 0, 2]


def test_an_end_token_outside_the_vocabulary_is_left_out_with_a_warning(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=[300, 3])
    assets = read_text_assets(folder, VOCABULARY)
    assert assets.end_tokens == [3, 0, 2]
    assert any("300" in note for note in assets.notes)


def test_a_model_without_any_end_token_is_told(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    change(folder, "tokenizer_config.json", eos_token=None)
    assets = read_text_assets(folder, VOCABULARY)
    assert assets.end_tokens == []
    assert any("end token" in note for note in assets.notes)


def test_more_end_tokens_than_the_header_holds_are_refused(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=list(range(20, 37)))
    with pytest.raises(ConvertError, match="end tokens"):
        read_text_assets(folder, VOCABULARY)


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("inline", "inline"),
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}], "named"),
        (None, None),
    ],
)
def test_a_template_in_the_tokenizer_configuration_is_found(
    folder: Path, configured: Any, expected: str | None
) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder, "tokenizer_config.json", chat_template=configured)
    assert read_text_assets(folder, VOCABULARY).chat_template == expected


def test_a_template_file_wins_over_the_tokenizer_configuration(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template="inline")
    expected = (folder / "chat_template.jinja").read_text()
    assert read_text_assets(folder, VOCABULARY).chat_template == expected


@pytest.mark.parametrize("added", [True, False])
def test_bos_is_added_where_the_tokenizer_configuration_says_so(folder: Path, added: bool) -> None:
    change(folder, "tokenizer_config.json", bos_token="<|endoftext|>", add_bos_token=added)
    assets = read_text_assets(folder, VOCABULARY)
    assert (assets.bos_token_id, assets.add_bos) == (0, added)


def test_bos_is_added_where_the_tokenizer_itself_does(folder: Path) -> None:
    change(folder, "tokenizer_config.json", bos_token="<|endoftext|>", add_bos_token=None)
    assert not read_text_assets(folder, VOCABULARY).add_bos
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<|endoftext|>", "type_id": 0}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": bos}, text],
        "pair": [{"SpecialToken": bos}, text],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_text_assets(folder, VOCABULARY).add_bos


def test_a_tokenizer_larger_than_the_model_is_told(folder: Path) -> None:
    assert any("ids up to 299" in note for note in read_text_assets(folder, 290).notes)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": "\\ud800"}'])
def test_a_broken_text_file_is_refused_by_name(folder: Path, tmp_path: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConvertError, match=name.replace(".", r"\.")):
        convert(folder, tmp_path / "model.colibri")
    assert not (tmp_path / "model.colibri").exists()


def test_a_checkpoint_without_tokenizer_json_is_refused_with_advice(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match="save_pretrained"):
        convert(folder, tmp_path / "model.colibri")


def test_the_tokenizer_s_text_is_kept_to_the_byte_and_does_not_touch_the_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    before = convert(folder, tmp_path / "a.colibri")
    (folder / "chat_template.jinja").write_text("another ✓")
    after = convert(folder, tmp_path / "b.colibri")
    assert after.fingerprint == before.fingerprint
    with Model(tmp_path / "b.colibri") as model:
        assert model.json["tokenizer"] == (folder / "tokenizer.json").read_text()
        assert model.json["chat_template"] == "another ✓"
