"""What `lockstep controller` does beyond `lockstep generate`."""

from __future__ import annotations

from typing import Literal

import pytest

from launch.controller_command import has_network
from runtime.engine import Deployment
from runtime.placing import even_nodes
from runtime.sizing import Sizes
from tests.fakes import load_toy
from tests.placement_runs import config
from tests.runtime.test_split_calibration import VirtualRanks


@pytest.mark.parametrize(
    ("nodes", "exchange", "expected"),
    [([0, 0], "auto", False), ([0, 0], "torch", True), ([0, 1], "auto", True), ([1, 1], "sockets", False)],
)
def test_the_split_is_measured_where_a_network_lies_between_ranks(
    nodes: list[int], exchange: Literal["auto", "sockets", "torch"], expected: bool
) -> None:
    deployment = Deployment(
        facts=load_toy().facts, sizes=Sizes(max_model_len=64, num_pages=40), bytes_read=(),
        channel=VirtualRanks(lambda _tokens, _split: 1.0), ranks_per_node=even_nodes(nodes),
    )
    assert has_network(config(dp=2, exchange=exchange), deployment) is expected


def test_nodes_of_different_sizes_have_a_network_between_them() -> None:
    deployment = Deployment(
        facts=load_toy().facts, sizes=Sizes(max_model_len=64, num_pages=40), bytes_read=(),
        channel=VirtualRanks(lambda _tokens, _split: 1.0), ranks_per_node=even_nodes([0, 0, 1]),
    )
    assert has_network(config(dp=3), deployment)
