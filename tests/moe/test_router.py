"""Routing against the formulas written out token by token, ties and dummy rows included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe.router import Router, RouterConfig, route

V3 = RouterConfig(num_experts=16, top_k=4, scoring="sigmoid", method="noaux_tc", num_groups=4, num_chosen_groups=2,
                  normalise=True, scaling=2.5)
V2_LIMITED = RouterConfig(num_experts=16, top_k=3, scoring="softmax", method="group_limited_greedy", num_groups=4,
                          num_chosen_groups=2, normalise=False, scaling=16.0)
V2_GREEDY = RouterConfig(num_experts=16, top_k=6, scoring="softmax", method="greedy", normalise=False)
V2_NORMALISED = RouterConfig(num_experts=16, top_k=6, scoring="softmax", method="greedy", normalise=True)


def reference(logits: Tensor, bias: Tensor | None, config: RouterConfig) -> list[dict[int, float]]:
    """expert -> weight for each token, in plain Python."""
    result = []
    for row in logits:
        scores = (row.sigmoid() if config.scoring == "sigmoid" else row.softmax(-1)).tolist()
        choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        size = config.num_experts // config.num_groups
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(config.num_groups)]
        rank = [sum(g[:2]) if config.method == "noaux_tc" else g[0] for g in groups]
        best = sorted(range(config.num_groups), key=lambda g: -rank[g])[: config.num_chosen_groups]
        eligible = [e for e in range(config.num_experts) if e // size in best]
        chosen = sorted(eligible, key=lambda e: -choice[e])[: config.top_k]
        total = sum(scores[e] for e in chosen) if config.normalise else 1.0
        result.append({e: scores[e] / total * config.scaling for e in chosen})
    return result


@pytest.mark.parametrize("config", [V3, V2_LIMITED, V2_GREEDY, V2_NORMALISED])
def test_matches_the_formulas(config: RouterConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 16, generator=generator) * 2
    bias = torch.randn(16, generator=generator) * 0.3 if config.method == "noaux_tc" else None
    routing = route(logits, bias, config)
    for ids, weights, expected in zip(
        routing.expert_ids.tolist(), routing.weights.tolist(), reference(logits, bias, config), strict=True
    ):
        assert set(ids) == set(expected)
        for expert, weight in zip(ids, weights, strict=True):
            assert weight == pytest.approx(expected[expert], rel=1e-5)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.zeros(1, 16)
    bias = torch.zeros(16)
    bias[[1, 2, 5, 6]] = 0.5
    routing = route(logits, bias, V3)
    assert set(routing.expert_ids[0].tolist()) == {1, 2, 5, 6}
    assert torch.allclose(routing.weights, torch.full((1, 4), 2.5 / 4))


def test_ties_fall_as_topk_falls() -> None:
    logits = torch.zeros(3, 16)
    routing = route(logits, None, V2_GREEDY)
    expected = torch.topk(logits.softmax(-1), 6, dim=-1, sorted=False)[1]
    assert torch.equal(routing.expert_ids, expected)


def test_dummy_rows_go_to_no_expert() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(16, 8, generator=generator), torch.randn(3, 8, generator=generator)
    router = Router(V3, weight, torch.zeros(16))
    plain, masked = router(hidden), router(hidden, torch.tensor([False, True, False]))
    assert torch.equal(masked.expert_ids[[0, 2]], plain.expert_ids[[0, 2]])
    assert torch.equal(masked.weights[[0, 2]], plain.weights[[0, 2]])
    assert masked.expert_ids[1].tolist() == [16] * 4
    assert masked.weights[1].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "tanh"}, "scoring_func = 'tanh'"),
        ({"method": "best"}, "topk_method = 'best'"),
        ({"num_groups": 3}, "n_group = 3 does not divide n_routed_experts = 16"),
        ({"num_groups": 2, "num_chosen_groups": 3}, "topk_group = 3 exceeds n_group = 2"),
        ({"num_groups": 8, "num_chosen_groups": 1, "top_k": 3}, "num_experts_per_tok = 3 exceeds the 2"),
    ],
)
def test_impossible_counts_are_named(changes: dict[str, object], message: str) -> None:
    values = {"num_experts": 16, "top_k": 2, "scoring": "softmax", "method": "greedy", **changes}
    with pytest.raises(ValueError, match=message):
        RouterConfig(**values)  # type: ignore[arg-type]
