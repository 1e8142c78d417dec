"""The feed-forward networks of the experts, in the form that suits their size."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.dispatch_protocol import Dispatched
from moe.router import Routing
from parallel.linear import Linear

# Up to this many weights in a layer, running every expert on every token beats sorting tokens ...
DENSE_MAX_ELEMENTS = 1_000_000
# ... as long as the tokens are few enough for the wasted products to be cheap.
DENSE_MAX_TOKENS = 48
# Up to this many routed rows experts share their element-wise operations; beyond it, cache locality wins.
TOGETHER_MAX_ROWS = 256


class GatedMlp:
    """`down(silu(gate(x)) * up(x))` with gate and up fused into one product: [gate | up]."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, hidden: Tensor, weights: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape; weights: [num_tokens, 1], factors on the result."""
        inner = gated(self.gate_up(hidden), self.down.in_features)
        return self.down(inner if weights is None else inner.mul_(weights))


def gated(gate_up: Tensor, width: int) -> Tensor:
    """[n, 2 * width] of [gate | up] -> [n, width]."""
    return F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])


class Experts(Protocol):
    def __call__(self, tokens: Dispatched) -> Tensor:
        """[num_received, hidden_size]: each token's weighted sum over the experts of this rank."""


class GroupedExperts:
    """Tokens sorted by expert; each expert that has any runs once on its own."""

    def __init__(self, experts: list[GatedMlp]) -> None:
        self.experts = experts  # others may take their place between steps

    def __call__(self, tokens: Dispatched) -> Tensor:
        hidden, routing = tokens.hidden, tokens.routing
        num_experts, top_k = len(self.experts), routing.expert_ids.shape[1]
        if hidden.shape[0] == 1:
            return self._one_token(hidden, routing)
        sorted_ids, order = routing.expert_ids.flatten().sort(stable=True)  # [num_tokens * top_k]
        counts = torch.bincount(sorted_ids, minlength=num_experts + 1).tolist()[:num_experts]
        order = order[: sum(counts)]  # without those for no expert
        token_idx = order // top_k
        weights = routing.weights.view(-1, 1).index_select(0, order)
        output = torch.zeros_like(hidden)
        if len(order) == 0:
            return output
        if len(order) <= TOGETHER_MAX_ROWS:
            routed = torch.split(hidden.index_select(0, token_idx), counts)  # per expert: [count, hidden_size]
            pieces = [(e, piece) for e, piece in enumerate(routed) if counts[e]]
            return output.index_add_(0, token_idx, self._run_together(pieces, weights))
        begin = 0
        for expert, count in enumerate(counts):
            rows = slice(begin, begin := begin + count)
            if count:
                piece = hidden.index_select(0, token_idx[rows])
                output.index_add_(0, token_idx[rows], self.experts[expert](piece, weights[rows]))
        return output

    def _one_token(self, hidden: Tensor, routing: Routing) -> Tensor:
        """[1, hidden_size]: nothing to sort, one row for each expert. With many ranks most routes lead elsewhere."""
        expert_ids, weights = routing.expert_ids[0].tolist(), routing.weights.view(-1, 1)
        here = [i for i, expert in enumerate(expert_ids) if expert < len(self.experts)]
        if not here:
            return torch.zeros_like(hidden)
        if len(here) < len(expert_ids):
            expert_ids, weights = [expert_ids[i] for i in here], weights[here]
        return self._run_together([(e, hidden) for e in expert_ids], weights).sum(0, keepdim=True)

    def _run_together(self, pieces: list[tuple[int, Tensor]], weights: Tensor) -> Tensor:
        """Few rows: join the experts' inner values for what is done element by element. weights: [num_rows, 1]."""
        inner = torch.cat([self.experts[e].gate_up(piece) for e, piece in pieces])  # [num_rows, 2 * width]
        inner = gated(inner, inner.shape[1] // 2).mul_(weights)
        inner_pieces = torch.split(inner, [piece.shape[0] for _, piece in pieces])
        return torch.cat([self.experts[e].down(part) for (e, _), part in zip(pieces, inner_pieces, strict=True)])


class DenseExperts:
    """Every expert on at most DENSE_MAX_TOKENS tokens: two products, with routing weights (mostly 0) in between.

    Blocks of `width` are the routed experts in order and then the shared expert, cut into blocks, whose weight is 1.
    gate_up: hidden_size -> [gates of all blocks | ups of all blocks]; down: all blocks -> hidden_size.
    """

    def __init__(self, gate_up: Linear, down: Linear, num_experts: int, width: int, device: torch.device) -> None:
        self._gate_up, self._down, self._width = gate_up, down, width
        self._num_blocks = down.in_features // width
        # Column num_experts also takes the routes to "no expert": with a shared expert it loses that token's weight 1,
        # which only happens to dummy rows.
        self._base = torch.zeros(DENSE_MAX_TOKENS, max(self._num_blocks, num_experts + 1), device=device)
        self._base[:, num_experts : self._num_blocks] = 1.0

    def __call__(self, tokens: Dispatched) -> Tensor:
        routing, num_tokens = tokens.routing, tokens.hidden.shape[0]
        weights = self._base[:num_tokens].clone().scatter_(1, routing.expert_ids, routing.weights)
        inner = gated(self._gate_up(tokens.hidden), self._down.in_features)
        if weights.shape[1] > self._num_blocks:  # without a shared expert the last column stands for none
            weights = weights[:, : self._num_blocks]
        inner.view(num_tokens, self._num_blocks, self._width).mul_(weights.unsqueeze(-1))
        return self._down(inner)


class SmallExperts:
    """Experts small enough to be held twice: all at once for a few tokens, grouped for many and for a single one."""

    def __init__(self, few: DenseExperts, many: GroupedExperts, shared: GatedMlp | None) -> None:
        self._few, self._many, self._shared = few, many, shared

    def __call__(self, tokens: Dispatched) -> Tensor:
        # A single token reads a fraction of the weights when it visits its own experts only.
        if 1 < tokens.hidden.shape[0] <= DENSE_MAX_TOKENS:
            return self._few(tokens)
        output = self._many(tokens)
        return output if self._shared is None else output.add_(self._shared(tokens.hidden))
