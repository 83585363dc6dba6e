"""Makes the tiny random checkpoints that the tests run on, tests/data/tiny-*: one of each family.

They are saved by transformers itself (DeepSeek-MoE by hand: transformers has no such class), in bf16, with a real
byte-level tokenizer and a ChatML template, so that everything from conversion to chat works on them. Weights are random
but large enough that logits and routing are decided, not near-ties. All leave awkward remainders on purpose: a
vocabulary that is no multiple of 16, widths that are no multiple of 32.

    python tools/make_tiny_checkpoints.py [OUT_FOLDER]

Needs torch and transformers. Made once and committed; made again it gives the same weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, IM_START, IM_END = range(3)
VOCABULARY = 300  # 256 bytes, 3 special tokens, and some merges
CORPUS = [
    "The hummingbird hovers before the flower and drinks.",
    "What is the name of the bird? The name is colibri.",
    "A page of the cache holds thirty-two tokens, and the cache is on the disk.",
    "Once upon a time there was a small bird that could fly in the rain.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: every text has tokens, and tokens may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_text_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Tokenizer, its configuration and the template, as transformers 5 lays them out."""
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def randomize(weights: Iterable[tuple[str, torch.Tensor]], seed: int) -> None:
    """Normal weights scaled by fan-in, norms around one, routers with spread: every part of the model matters to the
    logits.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in weights:
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias") or "shared_expert_gate" in name:
                weight.copy_(noise)
            elif weight.dim() == 1:
                weight.copy_(1 + 0.2 * noise)
            elif "embed" in name:
                weight.copy_(noise)
            elif name.endswith("gate.weight"):
                weight.copy_(0.25 * noise)
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)


def tiny_mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
    )
    return MixtralForCausalLM(config)


def tiny_qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
    )
    return Qwen3MoeForCausalLM(config)


def tiny_qwen2_moe() -> PreTrainedModel:
    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=56,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
    )
    return Qwen2MoeForCausalLM(config)


def tiny_olmoe() -> PreTrainedModel:
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        clip_qkv=1.0,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
        pad_token_id=None,
    )
    return OlmoeForCausalLM(config)


DEEPSEEK = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 56,
    "max_position_embeddings": 4096,
    "model_type": "deepseek",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}


def deepseek_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as in the published checkpoint of DeepSeek-MoE 16B."""
    hidden, width, dense, n_shared = 48, 24, 56, 2
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}

    def add_mlp(prefix: str, n: int) -> None:
        shapes.update({f"{prefix}.{part}_proj.weight": (n, hidden) for part in ("gate", "up")})
        shapes[f"{prefix}.down_proj.weight"] = (hidden, n)

    for layer in range(3):
        prefix = f"model.layers.{layer}"
        shapes.update({f"{prefix}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"})
        shapes.update({f"{prefix}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")})
        if layer == 0:
            add_mlp(f"{prefix}.mlp", dense)
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (6, hidden)
        add_mlp(f"{prefix}.mlp.shared_experts", n_shared * width)
        for expert in range(6):
            add_mlp(f"{prefix}.mlp.experts.{expert}", width)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}


def save_deepseek(folder: Path, seed: int) -> None:
    """What save_pretrained() would write, without a class that has it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: torch.empty(shape) for name, shape in deepseek_shapes().items()}
    randomize(weights.items(), seed)
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK, indent=2) + "\n")


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "tiny-mixtral": tiny_mixtral,
    "tiny-qwen3-moe": tiny_qwen3_moe,
    "tiny-qwen2-moe": tiny_qwen2_moe,
    "tiny-olmoe": tiny_olmoe,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent.parent / "tests" / "data")
    out = parser.parse_args().out
    tokenizer = make_tokenizer()
    for seed, (name, make) in enumerate(FAMILIES.items(), 1):
        model = make()
        randomize(model.named_parameters(), seed)
        model.generation_config = GenerationConfig(eos_token_id=[END_OF_TEXT, IM_END], pad_token_id=END_OF_TEXT)
        model.to(torch.bfloat16).save_pretrained(out / name)
        save_text_files(out / name, tokenizer)
        print(f"{out / name}: {sum(p.numel() for p in model.parameters())} weights")
    save_deepseek(out / "tiny-deepseek", len(FAMILIES) + 1)
    save_text_files(out / "tiny-deepseek", tokenizer)


if __name__ == "__main__":
    main()
