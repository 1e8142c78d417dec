"""The feed-forward networks of the experts, in the form that suits their size."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.dispatcher import Dispatched
from parallel.linear import Linear

# Up to this many weights in a layer, running every expert on every token beats sorting tokens ...
DENSE_MAX_ELEMENTS = 1_000_000
# ... as long as the tokens are few enough for the wasted products to be cheap.
DENSE_MAX_TOKENS = 48


class GatedMlp:
    """`down(silu(gate(x)) * up(x))` with gate and up fused into one product: [gate | up]."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down
        self._width = down.in_features

    def __call__(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        return self._down(gated(self._gate_up(hidden), self._width))


def gated(gate_up: Tensor, width: int) -> Tensor:
    """[n, 2 * width] of [gate | up] -> [n, width]."""
    return F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])


class Experts(Protocol):
    def __call__(self, tokens: Dispatched) -> Tensor:
        """[num_received, hidden_size]: each token's weighted sum over the experts of this rank."""


class GroupedExperts:
    """Tokens sorted by expert; each expert that has any runs once on its own."""

    def __init__(self, gate_up: list[Linear], down: list[Linear]) -> None:
        self._gate_up, self._down = gate_up, down
        self._width = down[0].in_features

    def __call__(self, tokens: Dispatched) -> Tensor:
        hidden, routing = tokens.hidden, tokens.routing
        if hidden.shape[0] == 1:
            return self._single(hidden, routing.expert_ids[0].tolist(), routing.weights)
        num_experts, top_k = len(self._down), routing.expert_ids.shape[1]
        sorted_ids, order = routing.expert_ids.flatten().sort(stable=True)  # [num_tokens * top_k]
        counts = torch.bincount(sorted_ids, minlength=num_experts + 1).tolist()[:num_experts]
        num_routed = sum(counts)
        if num_routed == 0:
            return torch.zeros_like(hidden)
        order = order[:num_routed]
        token_idx = order // top_k
        pieces = torch.split(hidden.index_select(0, token_idx), counts)  # per expert: [count, hidden_size]
        inner = torch.cat([self._gate_up[e](piece) for e, piece in enumerate(pieces) if counts[e]])
        inner = gated(inner, self._width).mul_(routing.weights.view(-1, 1).index_select(0, order))
        output = torch.cat([self._down[e](piece) for e, piece in enumerate(torch.split(inner, counts)) if counts[e]])
        return torch.zeros_like(hidden).index_add_(0, token_idx, output)

    def _single(self, hidden: Tensor, expert_ids: list[int], weights: Tensor) -> Tensor:
        """One token: nothing to sort. weights: [1, top_k]."""
        chosen = [e for e in expert_ids if e < len(self._down)]
        if not chosen:
            return torch.zeros_like(hidden)
        inner = torch.cat([self._gate_up[e](hidden) for e in chosen])  # [num chosen, 2 * width]
        inner = gated(inner, self._width).mul_(weights.view(-1, 1))
        output = self._down[chosen[0]](inner[:1])
        for i, expert in enumerate(chosen[1:], start=1):
            output += self._down[expert](inner[i : i + 1])
        return output


class DenseExperts:
    """Every expert on every token as two products, with routing weights (mostly 0) in between.

    gate_up: [num_blocks, 2, width, hidden_size], down: [num_blocks, hidden_size, width], float32. The shared expert,
    when there is one, is cut into blocks of `width` after the routed experts; they always have weight 1.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, num_experts: int) -> None:
        self._num_blocks, _, self._width, hidden_size = gate_up.shape
        self._num_experts = num_experts
        self._gate_t = gate_up.transpose(0, 1).reshape(-1, hidden_size).t().contiguous()  # [hidden, 2 * blocks * width]
        self._down_t = down.transpose(1, 2).reshape(-1, hidden_size)  # [blocks * width, hidden]
        # Column num_experts also takes the routes to "no expert": with a shared expert it loses that token's weight 1,
        # which only happens to dummy rows.
        self._base = torch.zeros(1, max(self._num_blocks, num_experts + 1), device=gate_up.device)
        self._base[:, num_experts : self._num_blocks] = 1.0

    def __call__(self, tokens: Dispatched) -> Tensor:
        hidden, routing = tokens.hidden, tokens.routing
        num_tokens = hidden.shape[0]
        weights = self._base.expand(num_tokens, -1).scatter(1, routing.expert_ids, routing.weights)
        inner = gated(torch.mm(hidden, self._gate_t), self._num_blocks * self._width)
        inner = inner.view(num_tokens, self._num_blocks, self._width)
        inner.mul_(weights[:, : self._num_blocks, None])
        return torch.mm(inner.view(num_tokens, -1), self._down_t)
