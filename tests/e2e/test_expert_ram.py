"""A daemon with less memory for experts than they take, and one that reads its weights: the same replies."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.convert import calibrate
from colibri.protocol import messages as wire
from support.daemon import GREEDY, DaemonProcess, Reply

REQUEST = wire.Generate(prompt="Once upon a time", max_tokens=24, sampling=GREEDY)


def reply(daemon: DaemonProcess) -> Reply:
    with daemon.connect() as client:
        return client.ask(REQUEST)


@pytest.fixture(scope="module")
def expected(tiny_q8_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    with DaemonProcess(tiny_q8_model_path, tmp_path_factory.mktemp("mapped")) as daemon:
        return reply(daemon).ids


@pytest.mark.parametrize("weights", ["map", "read"])
def test_a_daemon_within_a_budget_says_the_same(
    tiny_q8_model_path: Path, tmp_path: Path, expected: list[int], weights: str
) -> None:
    with DaemonProcess(tiny_q8_model_path, tmp_path, "--expert-ram", "64KiB", "--weights", weights) as daemon:
        assert reply(daemon).ids == expected
        with daemon.connect() as client:
            experts = client.ask(wire.Stats()).result["experts"]
    assert experts["slots_used"] <= experts["slots"]
    assert experts["budget_bytes"] <= 64 << 10
    assert experts["hits"] + experts["misses"] > 0


def test_a_daemon_that_reads_its_weights_says_the_same(
    tiny_q8_model_path: Path, tmp_path: Path, expected: list[int]
) -> None:
    with DaemonProcess(tiny_q8_model_path, tmp_path, "--weights", "read") as daemon:
        assert reply(daemon).ids == expected


def test_static_routing_is_named_in_the_reply_and_never_mixed_with_exact_pages(
    tiny_q8_model_path: Path, tmp_path: Path
) -> None:
    table = tmp_path / "t.table"
    calibrate(tiny_q8_model_path, "once upon a time there was a cat. " * 40, table)
    prompt = wire.Generate(prompt="Once upon a time " * 10, max_tokens=4, sampling=GREEDY, session="s")
    keys = []
    for options in ([], ["--static-table", str(table)], ["--static-table", str(table), "--routing", "static"]):
        with DaemonProcess(tiny_q8_model_path, tmp_path, *options) as daemon, daemon.connect() as client:
            result = client.ask(prompt).result
            keys.append(client.server.model.numerics_key)
            assert ("approximate" in (result.note or "")) == ("static" in options)
            if "static" in options:
                assert "routing was exact" in result.note
            daemon.stop()
    assert keys[0] == keys[1] != keys[2]
