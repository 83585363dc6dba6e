"""The binding: Python values in and out, typed exceptions, and the engine's promises seen from Python."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from colibri import native
from colibri.native import Batch, Context, Model, Sampling

TOKENS = [5, 80, 200, 17, 33, 299, 4]


@pytest.fixture(scope="module")
def model(tiny_q8_model_path: Path) -> Iterator[Model]:
    with Model(tiny_q8_model_path) as opened:
        yield opened


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, n_pages=8, max_rows=64, prefill_threads=1, decode_threads=1) as opened:
        yield opened


def one_sequence(tokens: list[int], **fields: object) -> Batch:
    n = len(tokens)
    flags = [native.ROW_NONE] * (n - 1) + [native.ROW_LOGITS]
    return Batch(tokens, list(range(n)), [0] * n, flags, [list(range(-(-n // native.PAGE_TOKENS)))], **fields)  # type: ignore[arg-type]


def test_info_tells_what_the_file_says(model: Model) -> None:
    assert model.info.vocabulary == 300
    assert len(model.info.fingerprint) == 32
    assert set(model.info.end_tokens) == set(model.json["end_tokens"])
    model.verify()


def test_lists_and_arrays_give_the_same_bits(context: Context) -> None:
    context.forward(one_sequence(TOKENS))
    from_lists = context.logits(0).copy()
    batch = one_sequence(TOKENS)
    batch.tokens, batch.positions = array("i", TOKENS), np.arange(len(TOKENS), dtype=np.int64)
    context.forward(batch)
    assert from_lists.tobytes() == context.logits(0).tobytes()


def test_logits_are_a_read_only_view(context: Context) -> None:
    context.forward(one_sequence(TOKENS))
    assert context.logits(0).shape == (300,)
    with pytest.raises(ValueError, match="read-only"):
        context.logits(0)[0] = 1
    with pytest.raises(native.InvalidArgument):
        context.logits(1)


def test_scores_are_log_probabilities_of_the_logits(context: Context) -> None:
    batch = one_sequence(TOKENS, targets=[0] * (len(TOKENS) - 1) + [42])
    batch.flags = [0] * (len(TOKENS) - 1) + [native.ROW_LOGITS | native.ROW_SCORE]
    result = context.forward(batch)
    logits = context.logits(0).astype(np.float64)
    assert result.row_status == [0] * len(TOKENS)
    assert result.logprobs is not None
    assert result.logprobs[-1] == pytest.approx(logits[42] - np.log(np.exp(logits).sum()), abs=1e-5)


def test_greedy_sampling_takes_the_largest_logit_of_those_allowed(context: Context, model: Model) -> None:
    context.forward(one_sequence(TOKENS))
    order = np.argsort(-context.logits(0), kind="stable")
    sampled = context.sample(0, Sampling(n_top_logprobs=3))
    assert sampled.token == order[0]
    assert [token for token, _ in sampled.top] == order[:3].tolist()
    assert sampled.top[0][1] == sampled.logprob
    mask = np.zeros(10, np.uint32)
    mask[order[1] // 32] = 1 << (order[1] % 32)
    assert context.sample(0, Sampling(allowed=mask)).token == order[1]
    assert context.sample(0, Sampling(bias={int(order[2]): 100.0})).token == order[2]
    with pytest.raises(native.InvalidArgument, match="allowed"):
        context.sample(0, Sampling(allowed=mask[:9]))


@pytest.mark.parametrize(
    ("batch", "error", "word"),
    [
        (Batch([300], [0], [0], [0], [[0]]), native.InvalidArgument, "token"),
        (Batch([2**31], [0], [0], [0], [[0]]), native.InvalidArgument, "tokens"),
        (Batch([1], [0], [0], [256], [[0]]), native.InvalidArgument, "flags"),
        (Batch([1, 2], [0], [0], [0], [[0]]), native.InvalidArgument, "length"),
        (Batch([1], [0], [0], [0], [[99]]), native.InvalidArgument, "page 99"),
        (Batch([1], [0], [0], [0], [[]]), native.InvalidArgument, "NULL"),
        (Batch([1] * 65, list(range(65)), [0] * 65, [0] * 65, [[0, 1, 2]]), native.CapacityError, "n_rows"),
    ],
)
def test_a_bad_batch_is_a_typed_error_that_names_the_field(
    context: Context, batch: Batch, error: type[native.NativeError], word: str
) -> None:
    with pytest.raises(error, match=word):
        context.forward(batch)


def test_pages_move_between_contexts_and_infer_goes_on(context: Context, model: Model) -> None:
    first = context.infer(TOKENS, 40)
    whole = [*first, *context.infer(first[-1:], 10)]
    with Context(model, n_pages=8) as other:
        for page in range(-(-context.length // native.PAGE_TOKENS)):
            n_tokens = min(native.PAGE_TOKENS, context.length - page * native.PAGE_TOKENS)
            other.kv_load(page, n_tokens, *context.kv_save(page))
        assert other.length == context.length
        other.truncate(len(TOKENS) + len(first) - 1)
        assert other.infer(first[-1:], 10) == whole[len(first) :]


def test_a_damaged_page_is_refused(context: Context) -> None:
    context.infer(TOKENS, 1)
    data, total = context.kv_save(0)
    assert native.checksum(data) == total
    with pytest.raises(native.ChecksumMismatch):
        context.kv_load(0, 7, data[:-1] + b"\x01", total)


def infer_for_ever(context: Context) -> None:
    while True:
        context.truncate(0)
        context.infer(TOKENS, 4000)


def test_cancel_raises_and_tells_what_was_written(model: Model) -> None:
    with Context(model, n_pages=128, prefill_threads=1, decode_threads=1) as context:
        stop = threading.Event()

        def cancel() -> None:
            while not stop.is_set():
                context.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        try:
            with pytest.raises(native.Canceled) as caught:
                infer_for_ever(context)
        finally:
            stop.set()
            thread.join()
        assert context.length <= len(TOKENS) + len(caught.value.output_ids)


def test_what_is_closed_refuses_instead_of_crashing(tiny_q8_model_path: Path) -> None:
    model = Model(tiny_q8_model_path)
    context = Context(model, n_pages=1)
    with pytest.raises(native.InvalidArgument, match="1 contexts"):
        model.close()
    context.close()
    context.close()
    model.close()
    for use in (lambda: context.length, context.cancel, lambda: Context(model, n_pages=1), model.verify):
        with pytest.raises(native.InvalidArgument, match="closed"):
            use()


def test_a_file_that_is_no_model_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(native.IOFailure, match="missing"):
        Model(tmp_path / "missing")
    for name, content, field in (
        ("empty", b"", "magic"),
        ("text", b"hello", "magic"),
        ("cut", b"COLIBRI\x1a", "header"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(native.FormatError, match=f"{name}: .*{field}"):
            Model(tmp_path / name)


def test_an_instruction_set_is_chosen_by_name(model: Model) -> None:
    assert "scalar" in native.isa_names()
    with Context(model, n_pages=1, isa="scalar") as context:
        assert context.isa == "scalar"
    with pytest.raises(native.Unsupported, match="quantum"):
        Context(model, n_pages=1, isa="quantum")
