"""The forms of the experts against one expert at a time, and the layer's stages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.dispatcher import Dispatched, LocalDispatcher
from moe.experts import DENSE_MAX_TOKENS, DenseExperts, GatedMlp, GroupedExperts, SmallExperts
from moe.layer import MoeLayer
from moe.router import Router, RouterConfig, Routing
from parallel.linear import PlainLinear

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, NUM_SHARED = 16, 12, 6, 2, 2


class Weights:
    """Random experts and a shared expert of `NUM_SHARED` blocks, in every form."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        blocks = NUM_EXPERTS + NUM_SHARED
        self.gate = torch.randn(blocks, WIDTH, HIDDEN, generator=generator)
        self.up = torch.randn(blocks, WIDTH, HIDDEN, generator=generator)
        self.down = torch.randn(blocks, HIDDEN, WIDTH, generator=generator) * 0.3

    def block(self, i: int, hidden: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(hidden, self.gate[i])) * F.linear(hidden, self.up[i]), self.down[i])

    def mlp(self, first: int, last: int) -> GatedMlp:
        gate_up = torch.cat((self.gate[first:last].flatten(0, 1), self.up[first:last].flatten(0, 1)))
        down = self.down[first:last].transpose(0, 1).flatten(1)
        return GatedMlp(PlainLinear(gate_up), PlainLinear(down))

    def grouped(self) -> GroupedExperts:
        return GroupedExperts([self.mlp(e, e + 1) for e in range(NUM_EXPERTS)])

    def shared(self) -> GatedMlp:
        return self.mlp(NUM_EXPERTS, NUM_EXPERTS + NUM_SHARED)

    def dense(self) -> DenseExperts:
        whole = self.mlp(0, NUM_EXPERTS + NUM_SHARED)
        return DenseExperts(whole.gate_up, whole.down, NUM_EXPERTS, WIDTH, torch.device("cpu"))

    def expected(self, hidden: Tensor, routing: Routing, *, with_shared: bool) -> Tensor:
        output = torch.zeros_like(hidden)
        for t in range(hidden.shape[0]):
            for e, w in zip(routing.expert_ids[t].tolist(), routing.weights[t].tolist(), strict=True):
                if e < NUM_EXPERTS:
                    output[t] += w * self.block(e, hidden[t])
        if with_shared:
            output += sum(self.block(i, hidden) for i in range(NUM_EXPERTS, NUM_EXPERTS + NUM_SHARED))
        return output


def tokens(num_tokens: int) -> Dispatched:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K)[1]
    return Dispatched(hidden, Routing(ids, torch.rand(num_tokens, TOP_K, generator=generator)))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40, 200])
def test_grouped_experts(num_tokens: int) -> None:
    weights, given = Weights(), tokens(num_tokens)
    expected = weights.expected(given.hidden, given.routing, with_shared=False)
    assert torch.allclose(weights.grouped()(given), expected, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 3, 48])
def test_dense_experts_contain_the_shared_one(num_tokens: int) -> None:
    weights, given = Weights(), tokens(num_tokens)
    expected = weights.expected(given.hidden, given.routing, with_shared=True)
    assert torch.allclose(weights.dense()(given), expected, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 2, DENSE_MAX_TOKENS, DENSE_MAX_TOKENS + 1])
def test_small_experts_agree_on_all_sides_of_the_switches(num_tokens: int) -> None:
    weights, given = Weights(), tokens(num_tokens)
    small = SmallExperts(weights.dense(), weights.grouped(), weights.shared())
    expected = weights.expected(given.hidden, given.routing, with_shared=True)
    assert torch.allclose(small(given), expected, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_tokens_for_no_expert_get_nothing(num_tokens: int) -> None:
    weights, given = Weights(), tokens(num_tokens)
    given.routing.expert_ids[::2] = NUM_EXPERTS
    given.routing.weights[::2] = 0.0
    output = weights.grouped()(given)
    assert torch.equal(output[::2], torch.zeros_like(output[::2]))
    expected = weights.expected(given.hidden, given.routing, with_shared=False)
    assert torch.allclose(output, expected, atol=1e-4)
    if num_tokens <= DENSE_MAX_TOKENS:
        with_shared = weights.expected(given.hidden, given.routing, with_shared=True)
        assert torch.allclose(weights.dense()(given)[1::2], with_shared[1::2], atol=1e-4)


def test_a_token_may_have_only_some_experts_here() -> None:
    weights, given = Weights(), tokens(1)
    given.routing.expert_ids[0, 0] = NUM_EXPERTS
    expected = weights.expected(given.hidden, given.routing, with_shared=False)
    assert torch.allclose(weights.grouped()(given), expected, atol=1e-5)
    assert expected.abs().max() > 0.01


def test_interleaved_halves_equal_the_whole() -> None:
    weights = Weights()
    generator = torch.Generator().manual_seed(3)
    config = RouterConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="softmax", method="greedy")
    router = Router(config, torch.randn(NUM_EXPERTS, HIDDEN, generator=generator), None)
    layer = MoeLayer(router, LocalDispatcher(), weights.grouped(), weights.shared())
    hidden = torch.randn(6, HIDDEN, generator=generator)

    def run(parts: list[Tensor]) -> Tensor:
        states = [layer.route(part) for part in parts]
        for state in states:
            layer.dispatch_send(state)
            layer.run_shared(state)
        for state in states:
            layer.run_experts(state)
        for state in states:
            layer.combine_send(state)
        return torch.cat([layer.combine_recv(state) for state in states])

    whole = run([hidden])
    assert torch.allclose(run([hidden[:3], hidden[3:]]), whole, atol=1e-5)
    assert torch.allclose(whole, weights.expected(hidden, router(hidden), with_shared=True), atol=1e-4)
