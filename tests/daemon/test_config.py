"""Sizes, and where data are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.daemon.config import default_data_dir, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("4096", 4096), ("1GiB", 1 << 30), ("1.5 MiB", 3 << 19), ("20GB", 20 * 10**9), ("2g", 2 * 10**9), ("7kib", 7168)],
)
def test_sizes_are_read_as_people_write_them(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "1XB", "1 GiB or so", "GiB", "1e9"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_shown_short(n_bytes: int, text: str) -> None:
    assert format_size(n_bytes) == text


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"STATE_DIRECTORY": "/var/lib/x", "XDG_STATE_HOME": "/s", "HOME": "/h"}, "/var/lib/x"),
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/colibri"),
        ({"HOME": "/h"}, "/h/.local/state/colibri"),
        ({}, "/var/lib/colibri"),
    ],
)
def test_data_are_kept_where_the_system_keeps_state(environ: dict[str, str], path: str) -> None:
    assert default_data_dir(environ) == Path(path)
