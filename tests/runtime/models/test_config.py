"""config.json: both spellings of rope, defaults of both families, and refusals by key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.models.config import load_model_config
from runtime.models.rope import RopeConfig, rotate, rotation_table, softmax_scale

MINNOW = Path(__file__).parents[3] / "configs" / "minnow"


def write(folder: Path, **changes: Any) -> Path:
    values = {**json.loads((MINNOW / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
    return folder


def test_minnow() -> None:
    config = load_model_config(MINNOW)
    assert (config.hidden_size, config.num_hidden_layers, config.num_mtp_layers) == (192, 5, 1)
    assert (config.latent_width, config.num_experts, config.eos_token_ids) == (80, 16, (1,))
    assert config.router is not None
    assert (config.router.method, config.router.scaling, config.router.normalise) == ("noaux_tc", 1.5, True)


YARN = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0}


def test_both_spellings_of_rope_agree(tmp_path: Path) -> None:
    old = load_model_config(write(tmp_path, rope_theta=5e4, rope_scaling={"type": "yarn", **YARN})).rope
    new_style = {"rope_type": "yarn", "rope_theta": 5e4, **YARN}
    new = load_model_config(
        write(tmp_path, rope_theta="absent", rope_scaling="absent", rope_parameters=new_style)
    ).rope
    assert old == new
    assert (old.theta, old.factor, old.mscale_all_dim) == (5e4, 40.0, 1.0)


def test_families_have_their_own_defaults(tmp_path: Path) -> None:
    absent = dict.fromkeys(("topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"), "absent")
    v3 = load_model_config(write(tmp_path, **absent)).router
    v2 = load_model_config(write(tmp_path, model_type="deepseek_v2", **absent)).router
    assert v3 is not None
    assert v2 is not None
    assert (v3.method, v3.scoring, v3.normalise) == ("noaux_tc", "sigmoid", True)
    assert (v2.method, v2.scoring, v2.normalise, v2.num_groups) == ("greedy", "softmax", False, 1)


def test_stop_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[3, 4])
    assert load_model_config(tmp_path).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_model_config(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama': expected deepseek_v2 or deepseek_v3"),
        ({"model_type": "absent"}, "model_type = None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': expected silu"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type = 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters.rope_type = 'llama3'"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]"),
        ({"topk_method": "best"}, "topk_method = 'best'"),
        ({"scoring_func": "tanh"}, "scoring_func = 'tanh'"),
        ({"n_group": 5}, "n_group = 5 does not divide n_routed_experts = 16"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 exceeds the 8 experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = {'quant_method': 'gptq'}"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "quantization_config"),
        ({"vocab_size": -4}, "vocab_size = -4: expected an integer >= 1"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"hidden_size": "absent"}, "hidden_size = None"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15: expected an even number"),
        ({"kv_lora_rank": 63}, "kv_lora_rank = 63: expected an even number"),
        ({"qk_nope_head_dim": 31}, "qk_nope_head_dim = 31: expected an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor = inf: expected a finite number > 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": [1]}}, r"mscale = \[1\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": "x"}}, "mscale_all_dim = 'x'"),
        ({"eos_token_id": "end"}, "eos_token_id = 'end'"),
        ({"eos_token_id": [1, 4096]}, r"eos_token_id = \[1, 4096\]: expected an id or a list of ids in 0..4095"),
        ({"eos_token_id": True}, "eos_token_id = True"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ],
)
def test_refusals_name_key_and_value(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_model_config(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


# What the published config.json files say, training-time and remote-code keys included (sizes as published).
_PUBLISHED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.Config"},
    "aux_loss_alpha": 0.001, "ep_size": 1, "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "seq_aux": True, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128,
}
_R1: dict[str, Any] = {
    **_PUBLISHED, "model_type": "deepseek_v3", "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "rope_scaling": {"type": "yarn", **YARN}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    },
}
_V2: dict[str, Any] = {
    **_PUBLISHED, "model_type": "deepseek_v2", "bos_token_id": 100000, "eos_token_id": 100001,
    "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128,
    "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "rope_scaling": {"type": "yarn", **YARN}, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400,
}
_V2_LITE: dict[str, Any] = {
    **_V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "rope_scaling": {"type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
}


@pytest.mark.parametrize(
    ("published", "router", "q_lora_rank", "num_mtp_layers"),
    [
        (_R1, ("sigmoid", "noaux_tc", 8, 4, True, 2.5), 1536, 1),
        (_V2, ("softmax", "group_limited_greedy", 8, 3, False, 16.0), 1536, 0),
        (_V2_LITE, ("softmax", "greedy", 1, 1, False, 1.0), None, 0),
    ],
    ids=["r1", "v2", "v2_lite"],
)
def test_published_configurations(
    tmp_path: Path, published: dict[str, Any], router: tuple[Any, ...], q_lora_rank: int | None, num_mtp_layers: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_model_config(tmp_path)
    read = config.router
    assert read is not None
    assert router == (
        read.scoring, read.method, read.num_groups, read.num_chosen_groups, read.normalise, read.scaling
    )
    assert (config.q_lora_rank, config.num_mtp_layers) == (q_lora_rank, num_mtp_layers)
    assert (config.rope.factor, config.rope.mscale) == (40.0, published["rope_scaling"]["mscale"])
    assert config.num_dense_layers == published["first_k_dense_replace"]


@pytest.mark.parametrize(
    ("changes", "num_dense"),
    [
        ({"first_k_dense_replace": 5}, 5),  # all of the target's layers; the MTP layer comes after them
        ({"first_k_dense_replace": 9}, None),
        ({"n_routed_experts": "absent"}, None),
    ],
)
def test_dense_targets_with_an_mtp_layer(tmp_path: Path, changes: dict[str, Any], num_dense: int | None) -> None:
    """The MTP layer follows the rule of the layers before it: experts from `first_k_dense_replace` on, if any."""
    config = load_model_config(write(tmp_path, **changes))
    if num_dense is None:
        assert config.router is None
        assert config.num_dense_layers >= 6
    else:
        assert config.router is not None
        assert config.num_dense_layers == num_dense


def test_the_published_quantisation_is_accepted(tmp_path: Path) -> None:
    published = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    assert load_model_config(write(tmp_path, quantization_config=published)).hidden_size == 192


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_broken_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config.json is not (a )?JSON"):
        load_model_config(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file: .*config.json"):
        load_model_config(tmp_path)


def test_rotation_depends_on_distance_only() -> None:
    table = rotation_table(RopeConfig(theta=100.0), 8, 64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, generator=generator), torch.randn(8, generator=generator)

    def score(at_q: int, at_k: int) -> float:
        return float(rotate(q.clone()[None], table[[at_q]])[0] @ rotate(k.clone()[None], table[[at_k]])[0])

    assert score(0, 0) == pytest.approx(float(q @ k), abs=1e-5)
    assert score(40, 33) == pytest.approx(score(7, 0), abs=1e-4)
    assert abs(score(7, 0) - score(0, 0)) > 1e-2


def test_yarn_scales_attention_by_mscale_squared() -> None:
    yarn = RopeConfig(theta=1e4, factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    assert softmax_scale(yarn, 192) == pytest.approx(192**-0.5 * 1.3688879**2, rel=1e-6)
    assert softmax_scale(RopeConfig(theta=1e4), 192) == 192**-0.5
