"""The static routing table of a model: to which experts each token id was sent in a text (docs/format.md).

The model reads the text in pieces; for each layer and token id the experts that were chosen most often are kept, and
how often each expert was chosen by any token. The last tenth of the text is not learned from: what the table foresees
is compared there with what the router chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from colibri.native import PAGE_TOKENS, ROW_NONE, Batch, Context, Model, NativeError, checksum

from .errors import ModelFileError
from .format import align
from .writer import AtomicFile

MAGIC = b"COLIBRT\x1a"
VERSION = 1
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("file_bytes", "<u8"),
        ("checksum", "<u8"),
        ("fingerprint", "u1", 32),
        ("n_layers", "<u4"),
        ("n_experts", "<u4"),
        ("top_k", "<u4"),
        ("vocabulary", "<u4"),
        ("n_tokens", "<u8"),
        ("reserved", "u1", 40),
    ]
)
CHECKED_FROM = 32  # the checksum is of all behind it

PIECE_TOKENS = 1024  # a new context begins so often: what a token is sent to depends little on what is long before it
STEP_ROWS = 256
HELD_OUT = 0.1

Routing = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Calibration:
    """What was learned. Hit rates are shares of the choices in the held-out text that would have been foreseen: by the
    table, by the experts used most often in their layer, by those of the token before.
    """

    path: str
    n_tokens: int
    n_held_out: int
    tokens_known: int
    vocabulary: int
    hit_rate: float
    hit_rate_by_frequency: float
    hit_rate_by_last_token: float
    table_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def route(model: Model, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> Routing:
    """Experts that the router chose: [n_tokens, layers with experts, top_k]."""
    found = []
    length = min(PIECE_TOKENS, model.info.max_positions)
    with Context(model, n_pages=-(-length // PAGE_TOKENS), max_rows=STEP_ROWS, max_logits=1) as context:
        for piece in range(0, len(tokens), length):
            for begin in range(piece, min(piece + length, len(tokens)), STEP_ROWS):
                rows = list(tokens[begin : min(begin + STEP_ROWS, piece + length, len(tokens))])
                positions = list(range(begin - piece, begin - piece + len(rows)))
                pages = list(range(-(-(positions[-1] + 1) // PAGE_TOKENS)))
                batch = Batch(rows, positions, [0] * len(rows), [ROW_NONE] * len(rows), [pages], want_routing=True)
                result = context.forward(batch)
                assert result.routing is not None
                found.append(result.routing)
                if progress:
                    progress(begin + len(rows))
    routing = np.concatenate(found)
    return routing[:, (routing[0] >= 0).all(axis=1)]


def _count(routing: Routing, n_experts: int) -> npt.NDArray[np.float64]:
    """[n, layers, k] → how often each expert was chosen: [layers, n_experts]."""
    layers = range(routing.shape[1])
    return np.stack([np.bincount(routing[:, layer].ravel(), minlength=n_experts) for layer in layers]).astype(float)


def learn(
    tokens: npt.NDArray[np.int64], routing: Routing, n_experts: int, vocabulary: int
) -> tuple[npt.NDArray[np.float32], Routing]:
    """Frequencies [layers, n_experts], and the chosen [layers, vocabulary, top_k], each ascending. A token that the
    text does not have is taken to go where most go; so are ties resolved.
    """
    top_k = routing.shape[2]
    counts = _count(routing, n_experts)
    frequencies = counts / len(tokens)
    often = np.argsort(-counts, axis=1, kind="stable")[:, :top_k]
    chosen = np.repeat(np.sort(often, axis=1)[:, None], vocabulary, axis=1).astype(np.int32)
    order = np.argsort(tokens, kind="stable")
    ids, starts = np.unique(tokens[order], return_index=True)
    for token, rows in zip(ids, np.split(order, starts[1:]), strict=True):
        own = _count(routing[rows], n_experts) + frequencies / 2  # below one choice: for ties
        chosen[:, token] = np.sort(np.argsort(-own, axis=1, kind="stable")[:, :top_k], axis=1)
    return frequencies.astype(np.float32), chosen


def write_table(
    path: Path, fingerprint: bytes, frequencies: npt.NDArray[np.float32], chosen: Routing, n_tokens: int
) -> int:
    """Writes a table in place of another at once; its size. Raises OutputError."""
    n_layers, n_experts = frequencies.shape
    vocabulary, top_k = chosen.shape[1:]
    bits = np.zeros((n_layers, vocabulary, -(-n_experts // 64)), np.uint64)
    at = np.indices((n_layers, vocabulary))
    for expert in np.moveaxis(chosen, 2, 0).astype(np.uint64):
        bits[(*at, expert >> np.uint64(6))] |= np.uint64(1) << (expert & np.uint64(63))
    middle = frequencies.astype("<f4").tobytes()
    body = middle.ljust(align(len(middle), 64), b"\0") + bits.swapaxes(0, 1).astype("<u8").tobytes()
    header = np.zeros((), HEADER)
    header["magic"], header["version"], header["header_bytes"] = MAGIC, VERSION, HEADER.itemsize
    header["file_bytes"], header["n_tokens"] = HEADER.itemsize + len(body), n_tokens
    header["fingerprint"] = np.frombuffer(fingerprint, np.uint8)
    header["n_layers"], header["n_experts"], header["top_k"] = n_layers, n_experts, top_k
    header["vocabulary"] = vocabulary
    header["checksum"] = checksum(header.tobytes()[CHECKED_FROM:] + body)
    data = header.tobytes() + body
    with AtomicFile(path, len(data)) as file:
        file.write_at(0, data)
        file.commit()
    return len(data)


def _hit_rate(routing: Routing, foreseen: Routing) -> float:
    """Share of routing [n, layers, k] that is in foreseen [n, layers, any]."""
    return float((routing[..., :, None] == foreseen[..., None, :]).any(axis=-1).mean()) if len(routing) else 0.0


def calibrate(
    model_path: Path, text: str, out: Path, *, progress: Callable[[int, int], None] | None = None
) -> Calibration:
    """Learns the table of a model from a text and writes it. Raises ModelFileError and OutputError; ValueError if the
    text is too short to learn and to compare.
    """
    try:
        with Model(model_path) as model:
            tokens = Tokenizer.from_str(model.json["tokenizer"]).encode(text, add_special_tokens=False).ids
            n_learned = int(len(tokens) * (1 - HELD_OUT))
            if n_learned < 1 or n_learned == len(tokens):
                raise ValueError(f"a text of {len(tokens)} tokens is too short")
            n_tokens = len(tokens)
            routing = route(model, tokens, (lambda done: progress(done, n_tokens)) if progress else None)
            info = model.info
    except NativeError as error:
        raise ModelFileError(str(error)) from error
    ids = np.array(tokens, np.int64)
    frequencies, chosen = learn(ids[:n_learned], routing[:n_learned], info.n_experts, info.vocabulary)
    n_bytes = write_table(out, info.fingerprint, frequencies, chosen, n_learned)
    held = routing[n_learned:]
    often = np.argsort(-frequencies, axis=1, kind="stable")[:, : info.top_k].astype(np.int32)
    return Calibration(
        path=str(out),
        n_tokens=n_learned,
        n_held_out=len(held),
        tokens_known=len(np.unique(ids[:n_learned])),
        vocabulary=info.vocabulary,
        hit_rate=_hit_rate(held, chosen[:, ids[n_learned:]].swapaxes(0, 1)),
        hit_rate_by_frequency=_hit_rate(held, np.broadcast_to(often, (len(held), *often.shape))),
        hit_rate_by_last_token=_hit_rate(held, routing[n_learned - 1 : -1]),
        table_bytes=n_bytes,
    )
