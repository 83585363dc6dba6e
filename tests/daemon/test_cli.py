"""The command line of colibrid against its page, and where packages are missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from colibri.daemon import main as entry
from colibri.daemon.cli import colibrid

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_every_option_is_on_the_page_and_the_other_way_round() -> None:
    documented = set(re.findall(r"^\| `(--[a-z-]+)", PAGE.read_text(), flags=re.MULTILINE))
    options = {option for parameter in colibrid.params for option in parameter.opts}
    assert documented == options - {"--version", "-h", "--help"}


def test_defaults_on_the_page_are_those_of_the_command() -> None:
    rows = dict(
        re.findall(r"^\| `(--[a-z-]+)[^|]*(?:\\\|[^|]*)*\| `?([^|`]+?)`? \|", PAGE.read_text(), flags=re.MULTILINE)
    )
    defaults = {parameter.opts[0]: parameter.default for parameter in colibrid.params}
    for option in ("--kv-ram", "--kv-disk", "--kv-format", "--max-batch-size", "--max-step-rows", "--max-queue"):
        assert rows[option] == str(defaults[option])


def test_a_missing_default_model_is_said() -> None:
    result = CliRunner().invoke(colibrid, ["--model", "default", "--kv-ram", "nonsense"])
    assert result.exit_code == 2
    assert "default model" in result.output or "is not a size" in result.output


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "colibri.daemon.cli")
    monkeypatch.setitem(sys.modules, "click", None)
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == entry.EXIT_NOT_INSTALLED
    assert "pip install 'colibri-moe[daemon]'" in capsys.readouterr().err


def test_a_hugging_face_folder_is_answered_with_the_command_that_converts_it(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = ["--socket", str(tmp_path / "socket"), "--data-dir", str(tmp_path / "data")]
    result = CliRunner().invoke(colibrid, ["--model", str(tiny_checkpoint), *options])
    assert result.exit_code == 1
    assert f"colibrictl convert {tiny_checkpoint} tiny-mixtral.colibri" in result.output
    assert not (tmp_path / "data").exists()
