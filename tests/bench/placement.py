"""What placing experts gains and costs: imbalance of a layer's ranks, planning time, and the map's share of a step.

`python -m tests.bench.placement`: loads are drawn from a Zipf-like law of growing steepness.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from moe.balance import initial_placement, place_experts
from moe.packing import greedy_slots
from moe.placement import imbalance
from moe.replicas import ReplicaMap, replica_table
from moe.router import Routing

SETTINGS = [(256, 16, 32), (256, 72, 32), (64, 8, 8)]  # experts, ranks, redundant experts
STEEPNESS = [0.5, 1.0, 1.5]
NUM_LAYERS = 4


def zipf(num_experts: int, steepness: float, seed: int) -> NDArray[np.float64]:
    """[NUM_LAYERS, num_experts] loads, shuffled in each layer."""
    generator = np.random.default_rng(seed)
    law = 1e5 / np.arange(1, num_experts + 1) ** steepness
    return np.stack([generator.permutation(law) for _ in range(NUM_LAYERS)])


def greedy_imbalance(loads: NDArray[np.float64], num_ranks: int, num_slots: int) -> float:
    """Of the published method, averaged over layers; replicas share equally."""
    found = []
    for layer in loads:
        slots = greedy_slots(layer, num_ranks, num_slots)
        counts = np.bincount([e for held in slots for e in held], minlength=len(layer))
        totals = [sum(layer[e] / counts[e] for e in held) for held in slots]
        found.append(max(totals) / (sum(totals) / num_ranks))
    return float(np.mean(found))


def compare() -> None:
    print("| experts, ranks, redundant | steepness | in order | published greedy | here | planning, ms a layer |")
    print("|---|---|---|---|---|---|")
    for num_experts, num_ranks, spare in SETTINGS:
        spare += -(num_experts + spare) % num_ranks
        num_slots = (num_experts + spare) // num_ranks
        for steepness in STEEPNESS:
            loads = zipf(num_experts, steepness, seed=0)
            first = initial_placement(range(NUM_LAYERS), num_experts, num_ranks, num_slots)
            begin = time.perf_counter()
            placed = place_experts(loads, first.layers, num_ranks=num_ranks, num_slots=num_slots, old=first)
            took = (time.perf_counter() - begin) / NUM_LAYERS
            print(
                f"| {num_experts}, {num_ranks}, {spare} | {steepness} | {imbalance(first, loads).mean():.2f} "
                f"| {greedy_imbalance(loads, num_ranks, num_slots):.3f} | {imbalance(placed, loads).mean():.3f} "
                f"| {1e3 * took:.0f} |"
            )


def map_cost() -> None:
    placement = initial_placement([0], 256, 16, 18)
    replicas = ReplicaMap(replica_table(placement, 0, 0, 8))
    for num_tokens in (1, 8, 64, 512):
        ids = torch.randint(0, 256, (num_tokens, 8))
        routing = Routing(ids, torch.rand(num_tokens, 8))
        for _ in range(50):
            replicas(routing)
        begin = time.perf_counter()
        for _ in range(500):
            replicas(routing)
        print(f"map and count of {num_tokens} tokens: {(time.perf_counter() - begin) / 500 * 1e6:.0f} us a layer")


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare()
    with torch.inference_mode():
        map_cost()
