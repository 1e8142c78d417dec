"""Reads `config.json` of DeepSeek-V2 / V2-Lite / V3 / R1-format checkpoints and refuses what is not supported."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.router import RouterConfig
from runtime.models.rope import RopeConfig

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shapes and constants of one model; `q_lora_rank=None` means that queries have no low-rank form."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_dense_layers: int  # leading ones, the MTP layer counted as the last; may exceed their number
    num_shared_experts: int
    router: RouterConfig | None  # None: every layer is dense
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_experts(self) -> int:
        return self.router.num_experts if self.router else 0

    @property
    def latent_width(self) -> int:
        """Values one position takes in one layer's cache: the latent and the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


_ROPE_KEYS = frozenset(
    {
        "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "attention_factor", "truncate", "partial_rotary_factor", "max_position_embeddings",
    }
)


class _Reader:
    """A JSON object whose complaints name the key, the value and the file."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def error(self, key: str, expected: str) -> ValueError:
        return ValueError(f"{self.path}: {key} = {self.values.get(key)!r}: expected {expected}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"an integer >= {minimum}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "a finite number > 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def require(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse any value but those of `allowed`; an absent key or null is allowed."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise self.error(key, why)


def load_model_config(folder: Path) -> ModelConfig:
    """Raises FileNotFoundError without a config.json, ValueError naming the key and value it cannot serve."""
    path = folder / "config.json"
    read = _Reader(_read_object(path), path)
    if read.values.get("model_type") not in MODEL_TYPES:
        raise read.error("model_type", " or ".join(MODEL_TYPES))
    _refuse_unsupported(read)
    num_layers = read.integer("num_hidden_layers")
    num_mtp_layers = _num_mtp_layers(read)
    num_dense = read.integer("first_k_dense_replace", 0, minimum=0)
    has_experts = num_dense < num_layers + num_mtp_layers
    if read.values.get("n_routed_experts") is None and "num_experts" not in read.values:
        has_experts = False
    q_rank = read.values.get("q_lora_rank")
    max_positions = read.integer("max_position_embeddings")
    return ModelConfig(
        model_type=read.values["model_type"],
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        moe_intermediate_size=read.integer("moe_intermediate_size") if has_experts else 0,
        num_hidden_layers=num_layers,
        num_mtp_layers=num_mtp_layers,
        num_attention_heads=read.integer("num_attention_heads"),
        q_lora_rank=None if q_rank is None else read.integer("q_lora_rank"),
        kv_lora_rank=_even(read, "kv_lora_rank"),
        qk_nope_head_dim=_even(read, "qk_nope_head_dim"),
        qk_rope_head_dim=_even(read, "qk_rope_head_dim"),
        v_head_dim=read.integer("v_head_dim"),
        num_dense_layers=num_dense if has_experts else num_layers + num_mtp_layers,
        num_shared_experts=read.integer("n_shared_experts", 0, minimum=0),
        router=_router_config(read) if has_experts else None,
        rope=_rope_config(read, max_positions),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tie_word_embeddings=read.boolean("tie_word_embeddings", False),
        bos_token_id=read.integer("bos_token_id", minimum=0) if read.values.get("bos_token_id") is not None else None,
        eos_token_ids=_eos_token_ids(folder, read),
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    return values


def _refuse_unsupported(read: _Reader) -> None:
    read.require("hidden_act", ("silu",), "silu")
    read.require("attention_bias", (False,), "false: biases in attention are not supported")
    read.require("mlp_bias", (False,), "false: biases in the feed-forward part are not supported")
    read.require("moe_layer_freq", (1,), "1: every layer after the leading dense ones is a MoE layer")
    read.require("sliding_window", (False,), "null: sliding-window attention is not supported")
    read.require("partial_rotary_factor", (1.0,), "1: the rotary part is qk_rope_head_dim")
    read.require("rope_interleave", (True,), "true: only interleaved rotary pairs are supported")
    heads = read.integer("num_attention_heads")
    read.require("num_key_value_heads", (heads,), f"num_attention_heads ({heads}): MLA has one key head per head")
    quantization = read.values.get("quantization_config")
    if quantization is not None and not (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == "fp8"
        and quantization.get("weight_block_size") == [128, 128]
        and quantization.get("fmt", "e4m3") == "e4m3"
    ):
        raise read.error("quantization_config", "quant_method fp8, fmt e4m3, weight_block_size [128, 128]")


def _num_mtp_layers(read: _Reader) -> int:
    count = read.integer("num_nextn_predict_layers", read.values.get("num_mtp_layers") or 0, minimum=0)
    if count > 1:
        raise read.error("num_nextn_predict_layers", "0 or 1: several MTP layers are not supported yet")
    return count


def _even(read: _Reader, key: str) -> int:
    """Rotary pairs are read as complex numbers, which must begin at even places of their rows."""
    value = read.integer(key)
    if value % 2:
        raise read.error(key, "an even number")
    return value


def _router_config(read: _Reader) -> RouterConfig:
    is_v3 = read.values["model_type"] == "deepseek_v3"
    num_experts = read.integer("n_routed_experts", read.values.get("num_experts"))
    method = read.values.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    scoring = read.values.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")
    grouped = method != "greedy"
    if not is_v3 and read.boolean("norm_topk_prob", False) and read.number("routed_scaling_factor", 1.0) != 1.0:
        # DeepSeek's own code then leaves the factor out, transformers the normalisation, vLLM neither.
        raise read.error("norm_topk_prob", "false in a deepseek_v2 model with a routed_scaling_factor: readings differ")
    try:
        return RouterConfig(
            num_experts=num_experts,
            top_k=read.integer("num_experts_per_tok"),
            scoring=scoring,
            method=method,
            num_groups=read.integer("n_group", 1) if grouped else 1,
            num_chosen_groups=read.integer("topk_group", 1) if grouped else 1,
            normalise=read.boolean("norm_topk_prob", is_v3),
            scaling=read.number("routed_scaling_factor", 1.0),
        )
    except ValueError as error:
        raise ValueError(f"{read.path}: {error}") if str(read.path) not in str(error) else error from None


def _rope_config(read: _Reader, max_positions: int) -> RopeConfig:
    """Old style: `rope_theta` and `rope_scaling`; new style: one `rope_parameters` object."""
    key = "rope_parameters" if read.values.get("rope_parameters") is not None else "rope_scaling"
    given = read.values.get(key) or {}
    if not isinstance(given, dict):
        raise read.error(key, "an object or null")
    inner = _Reader(given, read.path)
    unknown = sorted(set(given) - _ROPE_KEYS)
    if unknown:
        raise ValueError(f"{read.path}: {key}.{unknown[0]} is not supported: known are {', '.join(sorted(_ROPE_KEYS))}")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = inner.number("rope_theta", read.number("rope_theta", 10_000.0))
    if kind in ("default", None):
        return RopeConfig(theta=theta)
    if kind != "yarn":
        raise ValueError(f"{read.path}: {key}.rope_type = {kind!r}: expected default or yarn")
    original = inner.integer("original_max_position_embeddings", max_positions)
    attention_factor = given.get("attention_factor")
    return RopeConfig(
        theta=theta,
        factor=inner.number("factor", max_positions / original),
        original_max_positions=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        mscale=inner.number("mscale", 1.0) if given.get("mscale") else 0.0,
        mscale_all_dim=inner.number("mscale_all_dim", 1.0) if given.get("mscale_all_dim") else 0.0,
        attention_factor=None if attention_factor is None else inner.number("attention_factor", 1.0),
        truncate=inner.boolean("truncate", True),
    )


def _eos_token_ids(folder: Path, read: _Reader) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    value = _read_object(generation).get("eos_token_id") if generation.is_file() else None
    value = read.values.get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    vocab_size = read.integer("vocab_size")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
        raise ValueError(f"{folder}: eos_token_id = {value!r}: expected an id or a list of ids in 0..{vocab_size - 1}")
    return tuple(ids)
