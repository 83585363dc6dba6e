"""Two small tokenizers of the kinds that models have, made on the spot."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Once upon a time there was a hummingbird, and it said: hello, world!",
    "Größe, naïve café, 日本語のテキスト, 你好世界, emoji 🐦🌺",
    "def f(x):\n    return x + 1\n\n# user: assistant: system:\n",
]


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    """Byte-level BPE as GPT-2, Qwen and DeepSeek have it; <think> is added without the special flag."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[special(text) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def sentencepiece_json() -> str:
    """BPE with byte fallback and U+2581 as Mixtral has it. Its merges can spell </s>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz</>.,!", "\u2581h", "he", "ll", "\u2581he", "llo", "</", "s>"]
    data = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for i, text in enumerate(["<unk>", "<s>", "</s>"])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [pair.split() for pair in ["\u2581 h", "h e", "l l", "\u2581 he", "ll o", "< /", "s >", "</ s>"]],
        },
    }
    return json.dumps(data)
