"""Which experts a token goes to, and with what weight: DeepSeek-V2 and V3 rules as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCORINGS = ("softmax", "sigmoid")
METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Raises ValueError when the counts cannot be routed; the messages use the keys of config.json."""

    num_experts: int
    top_k: int
    scoring: str
    method: str
    num_groups: int = 1
    num_chosen_groups: int = 1
    normalise: bool = True
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring_func = {self.scoring!r}: expected one of {', '.join(SCORINGS)}")
        if self.method not in METHODS:
            raise ValueError(f"topk_method = {self.method!r}: expected one of {', '.join(METHODS)}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"n_group = {self.num_groups} does not divide n_routed_experts = {self.num_experts}")
        if self.num_chosen_groups > self.num_groups:
            raise ValueError(f"topk_group = {self.num_chosen_groups} exceeds n_group = {self.num_groups}")
        eligible = self.num_experts // self.num_groups * self.num_chosen_groups
        if self.top_k > eligible:
            raise ValueError(f"num_experts_per_tok = {self.top_k} exceeds the {eligible} experts of the chosen groups")


@dataclass(frozen=True, slots=True)
class Routing:
    """`expert_ids == num_experts` with weight 0 means no expert: that is how dummy rows are routed."""

    expert_ids: Tensor  # [num_tokens, top_k] int64
    weights: Tensor  # [num_tokens, top_k] float32


class Router:
    """Scores tokens with its own weight and routes them.

    weight: [num_experts, hidden_size] float32; bias: [num_experts] float32, added for the choice only (noaux_tc).
    """

    def __init__(self, config: RouterConfig, weight: Tensor, bias: Tensor | None) -> None:
        self.config = config
        self._weight_t = weight.t()  # [hidden_size, num_experts]
        self._bias = bias

    def __call__(self, hidden: Tensor, dummy: Tensor | None = None) -> Routing:
        """hidden: [num_tokens, hidden_size]; dummy: [num_tokens] bool, tokens that go to no expert."""
        logits = torch.mm(hidden, self._weight_t)  # [num_tokens, num_experts]
        return route(logits, self._bias, self.config, dummy)


def route(logits: Tensor, bias: Tensor | None, config: RouterConfig, dummy: Tensor | None = None) -> Routing:
    """logits: [num_tokens, num_experts] float32. Ties are broken as `torch.topk` breaks them."""
    scores = logits.sigmoid() if config.scoring == "sigmoid" else torch.softmax(logits, -1)
    choice = scores if bias is None else scores + bias  # [num_tokens, num_experts]
    if config.num_chosen_groups < config.num_groups:
        choice = _limit_groups(choice, config)
    expert_ids = torch.topk(choice, config.top_k, dim=-1, sorted=False)[1]  # [num_tokens, top_k]
    weights = scores.gather(1, expert_ids)
    if config.normalise:
        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    if config.scaling != 1.0:
        weights.mul_(config.scaling)
    if dummy is not None:
        expert_ids = expert_ids.masked_fill(dummy[:, None], config.num_experts)
        weights = weights.masked_fill(dummy[:, None], 0.0)
    return Routing(expert_ids, weights)


def _limit_groups(choice: Tensor, config: RouterConfig) -> Tensor:
    """Scores with everything outside the best groups at -inf; a group counts its two best, or its best one."""
    group_size = config.num_experts // config.num_groups
    groups = choice.view(-1, config.num_groups, group_size)  # [num_tokens, num_groups, group_size]; maybe no tokens
    if config.method == "noaux_tc":
        group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1)[0].sum(-1)  # [num_tokens, num_groups]
    else:
        group_scores = groups.amax(-1)
    chosen = torch.topk(group_scores, config.num_chosen_groups, dim=-1, sorted=False)[1]
    closed = torch.full_like(group_scores, -torch.inf).scatter_(1, chosen, 0.0)  # [num_tokens, num_groups]
    return (groups + closed[:, :, None]).view(-1, config.num_experts)
