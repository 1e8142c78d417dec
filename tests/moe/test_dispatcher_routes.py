"""Which rows reach which rank, and that a message keeps every bit, for arbitrary routings."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.dispatch_message import pack, unpack
from moe.dispatcher import AllGatherDispatcher, AllToAllDispatcher, Dispatched
from moe.router import Routing
from parallel.layout import Layout, RankGroups
from tests.small_layers import received
from tests.thread_group import run_ranks

SIZE, PER_RANK = 3, 2
NUM_EXPERTS = SIZE * PER_RANK
Routes = list[list[int]]  # per token its experts; NUM_EXPERTS for none

routes_of_a_token = st.lists(st.integers(0, NUM_EXPERTS), min_size=2, max_size=2, unique=True) | st.just(
    [NUM_EXPERTS, NUM_EXPERTS]
)
routes_of_a_rank = st.lists(routes_of_a_token, max_size=5)


def tokens_of(rank: int, routes: Routes) -> tuple[Tensor, Routing]:
    """Token t of rank r has hidden values (r, t); a route's weight tells expert and token."""
    hidden = torch.tensor([[float(rank), float(t)] for t in range(len(routes))]).view(-1, 2)
    ids = torch.tensor(routes, dtype=torch.int64).view(-1, 2)
    weights = torch.tensor([[weight_of(e, t) for e in row] for t, row in enumerate(routes)]).view(-1, 2)
    return hidden, Routing(ids, weights)


def weight_of(expert: int, token: int) -> float:
    return 0.0 if expert == NUM_EXPERTS else expert + token / 8


def expected_rows(rank: int, all_routes: list[Routes]) -> list[tuple[list[float], list[tuple[int, float]]]]:
    """Every token with an expert on `rank`, once, in order of sender and token."""
    rows = []
    for sender, routes in enumerate(all_routes):
        for t, experts in enumerate(routes):
            here = sorted((e - rank * PER_RANK, weight_of(e, t)) for e in experts if e // PER_RANK == rank)
            if here:
                rows.append(([float(sender), float(t)], here))
    return rows


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(routes_of_a_rank, min_size=SIZE, max_size=SIZE))
def test_each_rank_sees_its_tokens_once_and_in_order(all_routes: list[Routes]) -> None:
    def work(rank: int, groups: RankGroups) -> tuple[Dispatched, Dispatched]:
        hidden, routing = tokens_of(rank, all_routes[rank])
        exact, padded = AllToAllDispatcher(groups.ep, PER_RANK), AllGatherDispatcher(groups.ep, PER_RANK)
        exact_sent = exact.dispatch_send(exact.announce(hidden, routing))
        padded_sent = padded.dispatch_send(padded.announce(hidden, routing, 5))
        return exact.dispatch_recv(exact_sent), padded.dispatch_recv(padded_sent)

    for rank, (exact, padded) in enumerate(run_ranks(Layout(dp=SIZE), work)):
        expected = expected_rows(rank, all_routes)
        assert received(exact, PER_RANK) == expected
        assert [row for row in received(padded, PER_RANK) if row[1]] == expected
        assert padded.hidden.shape == (SIZE * 5, 2)
        for routing in (exact.routing, padded.routing):
            assert not routing.weights[routing.expert_ids == PER_RANK].any()
            assert int(routing.expert_ids.clamp(0, PER_RANK).ne(routing.expert_ids).sum()) == 0


words = st.integers(-(2**31), 2**31 - 1)  # any bits: NaN, infinities, denormals, -0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 3, 2**20]))
def test_a_message_keeps_every_bit(data: st.DataObject, num_tokens: int, top_k: int, width: int, first: int) -> None:
    def bits(columns: int) -> Tensor:
        drawn = data.draw(st.lists(words, min_size=num_tokens * columns, max_size=num_tokens * columns))
        return torch.tensor(drawn, dtype=torch.int32).view(num_tokens, columns)

    hidden, weights, num_local = bits(width), bits(top_k), 5
    count = num_tokens * top_k
    drawn_ids = data.draw(st.lists(st.integers(0, 2**20 + 8), min_size=count, max_size=count))
    ids = torch.tensor(drawn_ids, dtype=torch.int64).view(num_tokens, top_k)
    message = pack(hidden.view(torch.float32), Routing(ids, weights.view(torch.float32)))
    assert message.shape == (num_tokens, width + 2 * top_k)
    found = unpack(message, top_k, first, num_local)
    here = (ids >= first) & (ids < first + num_local)
    assert torch.equal(found.hidden.view(torch.int32), hidden)
    assert torch.equal(found.routing.expert_ids, torch.where(here, ids - first, num_local))
    assert torch.equal(found.routing.weights.view(torch.int32), torch.where(here, weights, 0))


def test_rows_of_zeros_are_tokens_for_no_expert() -> None:
    for first in (0, 4):
        found = unpack(torch.zeros(2, 7), 2, first, 4)
        assert found.hidden.shape == (2, 3)
        assert torch.equal(found.routing.expert_ids, torch.full((2, 2), 4))
