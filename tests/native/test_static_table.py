"""Static tables: learned, refused, used to read ahead, and to route where that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri.convert.calibration import CHECKED_FROM, HEADER, learn, route, write_table
from colibri.native import ROW_LOGITS, Batch, ChecksumMismatch, Context, FormatError, InvalidArgument, Model, checksum
from support.models import SPARSE

VOCABULARY, TOP_K = SPARSE.config["vocab_size"], SPARSE.config["num_experts_per_tok"]
N_EXPERTS, SLOT_BYTES = SPARSE.config["num_experts"], 417792
TOKENS = np.random.default_rng(5).integers(40, size=600)  # some tokens again and again, most never


@pytest.fixture(scope="module")
def table(sparse_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "t.table"
    with Model(sparse_model_path) as model:
        routing = route(model, TOKENS.tolist())
        write_table(path, model.info.fingerprint, *learn(TOKENS, routing, N_EXPERTS, VOCABULARY), len(TOKENS))
    return path


def run(context: Context, tokens: list[int]) -> tuple[bytes, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    """Logits of the last token and the routing [n, layers, k]."""
    n = len(tokens)
    flags = [0] * (n - 1) + [ROW_LOGITS]
    pages = list(range(-(-n // 32)))
    result = context.forward(Batch(tokens, list(range(n)), [0] * n, flags, [pages], want_routing=True))
    assert result.routing is not None
    return context.logits(0).tobytes(), result.routing


def test_a_token_goes_where_it_went_most_often() -> None:
    tokens = np.array([3, 3, 3, 1])
    routing = np.array([[[0, 1]], [[0, 2]], [[0, 2]], [[1, 3]]], np.int32)
    frequencies, chosen = learn(tokens, routing, 4, 5)
    assert frequencies.tolist() == [[0.75, 0.5, 0.5, 0.25]]
    assert chosen[0, 3].tolist() == [0, 2]
    assert chosen[0, 1].tolist() == [1, 3]
    assert chosen[0, 4].tolist() == [0, 1], "a token that never came goes where most went"


@pytest.mark.parametrize("slots", [0, 24])
def test_static_routing_is_the_tables_and_repeats_to_the_bit(sparse_model_path: Path, table: Path, slots: int) -> None:
    tokens, found = TOKENS[:50].tolist(), []
    options = {"n_pages": 2, "max_context": 64, "expert_ram_bytes": slots * SLOT_BYTES}
    with Model(sparse_model_path) as model:
        for threads in (1, 2):
            with Context(model, static_table=table, routing="static", prefill_threads=threads, **options) as context:  # type: ignore[arg-type]
                found.append(run(context, tokens))
        with Context(model, n_pages=2, max_context=64) as context:
            exact = run(context, tokens)
        chosen = learn(TOKENS, route(model, TOKENS.tolist()), N_EXPERTS, VOCABULARY)[1]
    assert found[0][0] == found[1][0] != exact[0]
    assert np.array_equal(found[0][1], chosen[:, tokens].swapaxes(0, 1))


def test_a_table_that_only_foresees_changes_nothing(sparse_model_path: Path, table: Path) -> None:
    with Model(sparse_model_path) as model:
        with Context(model, n_pages=2, max_context=64) as context:
            expected = run(context, TOKENS[:50].tolist())
        ram = 20 * SLOT_BYTES
        with Context(model, n_pages=2, max_context=64, static_table=table, expert_ram_bytes=ram) as context:
            assert run(context, TOKENS[:50].tolist())[0] == expected[0]
            for token in TOKENS:
                run(context, [int(token)])
            assert context.expert_stats().read_ahead_used > 0
            assert context.table_checksum != 0


def change(path: Path, out: Path, field: str, value: int, *, sealed: bool = True) -> Path:
    data = bytearray(path.read_bytes())
    header = np.frombuffer(data[: HEADER.itemsize], HEADER).copy()
    header[field] = value
    data[: HEADER.itemsize] = header.tobytes()
    if sealed:
        header["checksum"] = checksum(bytes(data[CHECKED_FROM:]))
        data[: HEADER.itemsize] = header.tobytes()
    out.write_bytes(data)
    return out


def test_what_is_not_a_table_of_the_model_is_refused(sparse_model_path: Path, table: Path, tmp_path: Path) -> None:
    other, cut, bits = tmp_path / "other", tmp_path / "cut", tmp_path / "bits"
    cut.write_bytes(table.read_bytes()[:-8])
    data = bytearray(table.read_bytes())
    data[-1] = 0x80
    bits.write_bytes(data)
    damaged = bits.with_name("damaged")
    damaged.write_bytes(data)
    refused = [
        (change(table, other, "fingerprint", 7), InvalidArgument, "of another model"),
        (cut, FormatError, "file_bytes: expected"),
        (damaged, ChecksumMismatch, "damaged"),
        (change(bits, bits, "n_tokens", 1), FormatError, "chosen: entry .* does not name 2 of 16"),
        (change(table, tmp_path / "k", "top_k", 3), FormatError, "top_k: expected 2, got 3"),
        (sparse_model_path, FormatError, "not a static table"),
    ]
    with Model(sparse_model_path) as model:
        for path, error, words in refused:
            with pytest.raises(error, match=words) as caught:
                Context(model, n_pages=1, static_table=path)
            assert str(path) in str(caught.value)
        with pytest.raises(InvalidArgument, match="static needs a static_table"):
            Context(model, n_pages=1, routing="static")
