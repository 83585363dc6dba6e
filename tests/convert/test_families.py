"""Configurations: what each family makes of them, by key; and what is refused, by key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colibri.convert import ConfigError, ConvertError, TensorError, UnsupportedModel, convert, inspect
from colibri.convert.architecture import Architecture
from colibri.convert.config import Config
from colibri.convert.families import find
from colibri.convert.format import ArchFlag
from colibri.convert.rope import Rope, resolve

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
QWEN2_MOE: dict[str, Any] = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "vocab_size": 300,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek",
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "vocab_size": 300,
}


def describe(config: dict[str, Any]) -> Architecture:
    reader = Config(config)
    return find(reader).architecture(reader)


@pytest.mark.parametrize(
    ("base", "value", "normalised"),
    [
        (MIXTRAL, None, True),
        (MIXTRAL, True, True),
        (MIXTRAL, False, True),  # the reference does not read the key
        (QWEN3_MOE, None, False),
        (QWEN3_MOE, True, True),
        (QWEN3_MOE, False, False),
        (QWEN2_MOE, None, False),
        (QWEN2_MOE, True, True),
        (OLMOE, None, False),
        (OLMOE, True, True),
        (DEEPSEEK, None, False),
        (DEEPSEEK, True, True),
        (DEEPSEEK | {"num_experts_per_tok": 1}, True, False),  # one weight alone is left as it is
    ],
)
def test_norm_topk_prob_has_its_family_s_default(base: dict[str, Any], value: bool | None, normalised: bool) -> None:
    config = base if value is None else base | {"norm_topk_prob": value}
    assert (ArchFlag.NORM_TOPK in describe(config).flags) is normalised


@pytest.mark.parametrize("base", [MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, DEEPSEEK])
def test_an_explicit_head_dim_wins_over_hidden_by_heads(base: dict[str, Any]) -> None:
    assert describe(base).head_dim == base["hidden_size"] // 4
    wide = describe(base | {"head_dim": 32})
    assert (wide.head_dim, wide.rope.rotary_dim, wide.attention_scale) == (32, 32, 32**-0.5)
    assert describe(base | {"head_dim": None}).head_dim == base["hidden_size"] // 4


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
        ({"decoder_sparse_step": 2}, {0, 2, 4}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, {0, 1, 3, 4, 5}),
        ({"mlp_only_layers": [17]}, set()),
    ],
)
def test_dense_layers_follow_the_configuration(keys: dict[str, Any], dense: set[int]) -> None:
    architecture = describe(QWEN3_MOE | keys)
    assert architecture.dense_layers == dense
    assert architecture.moe_layers == [layer for layer in range(6) if layer not in dense]


def test_a_model_whose_layers_are_all_dense_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="mlp_only_layers"):
        describe(QWEN3_MOE | {"mlp_only_layers": list(range(6))})


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({}, {0}),
        ({"first_k_dense_replace": 0}, set()),
        ({"first_k_dense_replace": 3}, {0, 1, 2}),
        ({"moe_layer_freq": 2}, {0, 1, 3, 5}),
    ],
)
def test_dense_layers_of_deepseek_come_first(keys: dict[str, Any], dense: set[int]) -> None:
    assert describe(DEEPSEEK | keys).dense_layers == dense


def test_shared_experts_are_as_wide_as_the_configuration_says() -> None:
    qwen, deepseek = describe(QWEN2_MOE), describe(DEEPSEEK)
    assert (qwen.shared_width, deepseek.shared_width) == (40, 2 * 24)
    assert ArchFlag.SHARED_GATED in qwen.flags
    assert ArchFlag.SHARED_GATED not in deepseek.flags
    without = describe(DEEPSEEK | {"n_shared_experts": None})
    assert (without.shared_width, ArchFlag.SHARED_EXPERT in without.flags) == (0, False)


@pytest.mark.parametrize(("keys", "biased"), [({}, True), ({"qkv_bias": True}, True), ({"qkv_bias": False}, False)])
def test_qwen2_moe_has_biases_on_q_k_and_v_unless_told_otherwise(keys: dict[str, Any], biased: bool) -> None:
    flags = describe(QWEN2_MOE | keys).flags
    assert (ArchFlag.QKV_BIAS in flags, ArchFlag.O_BIAS in flags) == (biased, False)


def test_olmoe_clips_where_the_configuration_says_so() -> None:
    assert ArchFlag.QKV_CLIP not in describe(OLMOE).flags
    clipped = describe(OLMOE | {"clip_qkv": 8.0})
    assert (ArchFlag.QKV_CLIP in clipped.flags, clipped.qkv_clip) == (True, 8.0)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3-moe", ["experts", "dense", "experts"]),
        ("qwen2-moe", ["dense", "experts", "experts"]),
        ("deepseek", ["dense", "experts", "experts"]),
        ("olmoe", ["experts", "experts"]),
    ],
)
def test_inspect_shows_which_layers_are_dense(
    family: str, kinds: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    convert(tiny_checkpoint.parent / f"tiny-{family}", tmp_path / "model.colibri")
    assert [plan.kind for plan in inspect(tmp_path / "model.colibri").layers] == kinds


def test_both_names_for_the_number_of_experts_are_read() -> None:
    """transformers 5 saves `num_local_experts` where released checkpoints have `num_experts`."""
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert describe(renamed).n_experts == describe(QWEN3_MOE).n_experts == 8


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (MIXTRAL | {"sliding_window": 1024}, "sliding_window"),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 1024}, "sliding_window"),
        (QWEN3_MOE | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 1024}, "sliding_window"),
        (DEEPSEEK | {"scoring_func": "sigmoid"}, "scoring_func"),
        (DEEPSEEK | {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        (DEEPSEEK | {"first_k_dense_replace": 6}, "first_k_dense_replace"),
        (MIXTRAL | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_parameters"),
        (MIXTRAL | {"rope_parameters": {"rope_type": "mystery"}}, "rope_parameters"),
        (MIXTRAL | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (MIXTRAL | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_feature_that_colibri_lacks_is_refused_by_its_key(config: dict[str, Any], where: str) -> None:
    with pytest.raises(UnsupportedModel, match=where):
        describe(config)


@pytest.mark.parametrize(
    "config",
    [
        MIXTRAL | {"sliding_window": 4096},
        MIXTRAL | {"sliding_window": None},
        QWEN3_MOE | {"use_sliding_window": False, "sliding_window": 16},
        QWEN3_MOE | {"layer_types": ["full_attention"] * 6},
    ],
)
def test_a_window_that_changes_nothing_is_accepted(config: dict[str, Any]) -> None:
    assert describe(config).max_positions == 4096


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("num_hidden_layers", 2000),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("head_dim", 1024),
        ("num_experts_per_tok", 5),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", 1),
        ("rope_theta", -1),
        ("rope_parameters", [1]),
    ],
)
def test_an_impossible_value_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        describe(MIXTRAL | {key: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "dense model"),
        ({"model_type": "qwen3"}, "dense model"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "does not know"),
        ({"model_type": "jetmoe", "num_local_experts": 8}, "does not know"),
    ],
)
def test_other_families_are_refused_with_the_supported_ones(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        describe(config)
    assert "mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek" in str(caught.value)


def test_a_configuration_without_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type"):
        describe({})


# --- rotary embedding


def rope_of(config: dict[str, Any], head_dim: int = 64) -> Rope:
    return resolve(Config(config), head_dim=head_dim, max_positions=4096, default_theta=1e4)


def test_old_and_new_ways_to_write_theta_give_the_same_frequencies() -> None:
    new = rope_of({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    old = rope_of({"rope_theta": 1e6, "rope_scaling": None})
    np.testing.assert_array_equal(old.inv_freq, new.inv_freq)
    np.testing.assert_allclose(new.inv_freq, 1e6 ** (-np.arange(0, 64, 2) / 64), rtol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek"])
def test_old_and_new_configurations_give_the_same_model(family: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The fingerprint covers all but the JSON, which quotes the configuration as it was."""
    source = tiny_checkpoint.parent / f"tiny-{family}"
    config = json.loads((source / "config.json").read_text())
    parameters = config.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    spellings = {
        "old": {"rope_theta": parameters["rope_theta"], "rope_scaling": None},
        "new": {"rope_parameters": parameters},
    }
    fingerprints = set()
    for name, keys in spellings.items():
        folder = Path(shutil.copytree(source, tmp_path / name))
        (folder / "config.json").write_text(json.dumps(config | keys))
        fingerprints.add(convert(folder, tmp_path / "model.colibri").fingerprint)
    assert len(fingerprints) == 1


@pytest.mark.oracle
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.25},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="the live oracle needs transformers and torch")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    config = MixtralConfig(**MIXTRAL | {"head_dim": 64}, rope_parameters=dict(parameters))
    reference = MixtralRotaryEmbedding(config)
    ours = rope_of({"rope_parameters": parameters})
    np.testing.assert_allclose(ours.inv_freq, reference.inv_freq.numpy(), rtol=3e-7)
    assert ours.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


# --- tied embeddings


@pytest.fixture
def tied(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny Mixtral with tie_word_embeddings, its head still in the weights."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "tied"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def set_head(folder: Path, head: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    if head is not None:
        tensors["lm_head.weight"] = head(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors")


def test_tied_without_a_head_and_with_an_equal_head_are_the_same(tied: Path, tmp_path: Path) -> None:
    set_head(tied, lambda embedding: embedding.copy())
    with_head = convert(tied, tmp_path / "with.colibri")
    set_head(tied, None)
    without = convert(tied, tmp_path / "without.colibri")
    assert with_head.fingerprint == without.fingerprint
    assert "tied" in inspect(tmp_path / "without.colibri").architecture["flags"]


def test_tied_with_a_head_that_differs_keeps_both_and_warns(tied: Path, tmp_path: Path) -> None:
    report = convert(tied, tmp_path / "model.colibri")
    assert any("warning: tie_word_embeddings" in note for note in report.notes)
    assert "tied" not in inspect(tmp_path / "model.colibri").architecture["flags"]


def test_untied_without_a_head_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "headless"))
    set_head(folder, None)
    with pytest.raises(TensorError, match=r"lm_head\.weight: missing"):
        convert(folder, tmp_path / "model.colibri")


def test_attention_biases_are_kept_where_the_configuration_has_them(tiny_qwen_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen_checkpoint, tmp_path / "biased"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(TensorError, match=r"q_proj\.bias: missing"):
        convert(folder, tmp_path / "model.colibri")
    tensors = load_file(folder / "model.safetensors")
    widths = {"q": 64, "k": 16, "v": 16, "o": 48}
    for layer in range(3):
        for part, width in widths.items():
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = np.ones(width, np.float32)
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "model.colibri")
    assert {"qkv_bias", "o_bias"} <= set(inspect(tmp_path / "model.colibri").architecture["flags"])


def test_unknown_keys_are_ignored_with_a_note(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "odd"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"favourite_colour": "green"}))
    assert convert(tiny_checkpoint, tmp_path / "plain.colibri").notes == []
    assert any("favourite_colour" in note for note in convert(folder, tmp_path / "model.colibri").notes)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "tie_encoder_decoder"])
def test_a_key_that_does_not_matter_is_ignored_with_a_note(key: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = with_keys(tiny_checkpoint, tmp_path, {key: "flash_attention_2"})
    plain, noted = (convert(source, tmp_path / "model.colibri") for source in (tiny_checkpoint, folder))
    assert noted.fingerprint == plain.fingerprint
    assert [note for note in noted.notes if note.endswith(f": {key}")]


@pytest.mark.parametrize(
    ("key", "value", "inert"),
    [
        ("final_logit_softcapping", 30.0, None),
        ("attn_logit_softcapping", 50.0, None),
        ("logits_scaling", 8.0, 1.0),
        ("residual_multiplier", 0.22, 1),
        ("clip_qkv", 8.0, None),
        ("scoring_func", "sigmoid", "softmax"),
        ("routed_scaling_factor", 2.5, 1.0),
    ],
)
def test_a_key_that_matters_but_has_no_place_in_the_family_is_refused(
    key: str, value: Any, inert: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    convert(with_keys(tiny_checkpoint, tmp_path / "inert", {key: inert}), tmp_path / "model.colibri")
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {key}"):
        convert(with_keys(tiny_checkpoint, tmp_path / "set", {key: value}), tmp_path / "model.colibri")


def with_keys(checkpoint: Path, folder: Path, keys: dict[str, Any]) -> Path:
    """A copy of a checkpoint with these keys in its configuration."""
    copy = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | keys))
    return copy


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_config_json_that_is_not_an_object_is_refused(text: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "broken"))
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConvertError, match=r"config\.json"):
        convert(folder, tmp_path / "model.colibri")


@pytest.mark.parametrize(
    ("name", "kept"), [("int8", "q8"), ("int4", "q4"), ("float16", "f16"), ("bfloat16", "bf16"), ("float32", "f32")]
)
def test_long_names_of_formats_are_accepted(name: str, kept: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert convert(tiny_checkpoint, tmp_path / "model.colibri", quantize=name).format == kept


def test_an_unknown_format_is_refused_with_the_known_ones(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="q3"):
        convert(tiny_checkpoint, tmp_path / "model.colibri", quantize="q3")
