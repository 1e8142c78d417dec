"""What one MTP draft a step can gain at most: the floor of a step from the bytes and FLOPs of its products.

A product of T rows with an [out, in] weight takes at least max(bytes / bandwidth, 2 T out in / flops). Bandwidth and
FLOP rate are measured here, on one thread, with the storage the engine uses: the product of one row, and of 512. The
floor of a step is the sum over its products; routed experts count as often as distinct ones are hit by uniform routing.

    python tests/bench/mtp_floor.py --model CKPT [--batches 1,8,32] [--acceptance 1.0]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from parallel.linear import Storage, build_linear
from runtime.models.config import ModelConfig, load_model_config

Product = tuple[int, int, float]  # out, in, how many


def layer_products(config: ModelConfig, layer: int, tokens: int) -> list[Product]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    products: list[Product] = [(config.latent_width, hidden, 1), (hidden, heads * config.v_head_dim, 1)]
    if config.q_lora_rank:
        products += [(config.q_lora_rank, hidden, 1), (query, config.q_lora_rank, 1)]
    else:
        products.append((query, hidden, 1))
    products.append((heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank, 1))
    if layer < config.num_dense_layers or config.router is None:
        return [*products, (3 * config.intermediate_size, hidden, 1)]
    shared, experts = config.num_shared_experts, config.num_experts
    width = 3 * config.moe_intermediate_size
    hit = experts * (1 - (1 - config.router.top_k / experts) ** tokens)
    return [*products, (experts, hidden, 1), (width * shared, hidden, 1), (width, hidden, hit)]


def step_floor(
    config: ModelConfig, tokens: int, logit_rows: int, seconds: Callable[[int, int, float], float], *, head: bool
) -> float:
    """Seconds of one pass of the target (or, with `head`, of the MTP layer) over `tokens` tokens."""
    layers = [config.num_hidden_layers] if head else range(config.num_hidden_layers)
    total = seconds(config.vocab_size, config.hidden_size, logit_rows)
    if head:
        total += seconds(config.hidden_size, 2 * config.hidden_size, tokens)
    for layer in layers:
        for out, width, count in layer_products(config, layer, tokens):
            rows = tokens if count == 1 or config.router is None else tokens * config.router.top_k / count
            total += count * seconds(out, width, rows)
    return total


def measure_rates(storage: Storage) -> tuple[float, float, int]:
    """(bytes per second, FLOP per second, bytes per weight) of the engine's products, one thread."""
    torch.set_num_threads(1)
    out, width = 32768, 1024
    linear = build_linear(torch.randn(out, width) * 0.02, storage, "bench")
    size = 4 if storage == "float32" else 2

    def best(rows: int, reps: int) -> float:
        x = torch.randn(rows, width)
        times = []
        for _ in range(reps):
            begin = time.perf_counter()
            linear(x)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    with torch.inference_mode():
        best(1, 3)
        return size * out * width / best(1, 15), 2 * 512 * out * width / best(512, 3), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--storage", choices=("auto", "float32"), default="auto")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--acceptance", type=float, default=1.0)
    args = parser.parse_args()
    config = load_model_config(args.model)
    bandwidth, flops, size = measure_rates(args.storage)

    def seconds(out: int, width: int, rows: float) -> float:
        return max(size * out * width / bandwidth, 2 * rows * out * width / flops)

    for batch in map(int, args.batches.split(",")):
        plain = step_floor(config, batch, batch, seconds, head=False)
        target = step_floor(config, 2 * batch, 2 * batch, seconds, head=False)
        head = step_floor(config, 2 * batch, batch, seconds, head=True)
        print(json.dumps({
            "model": args.model.name, "storage": args.storage, "batch": batch, "gb_per_s": round(bandwidth / 1e9, 1),
            "gflop_per_s": round(flops / 1e9, 1), "plain_floor_ms": round(plain * 1e3, 2),
            "mtp_floor_ms": round((target + head) * 1e3, 2),
            "ratio_floor": round((1 + args.acceptance) * plain / (target + head), 3),
        }))


if __name__ == "__main__":
    main()
