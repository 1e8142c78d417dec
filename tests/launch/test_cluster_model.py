"""The model over ranks of several nodes: token ids of one process, also when ranks are lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from launch.local_cluster import LocalCluster
from runtime.engine import Engine
from runtime.recovery import RecoveryEvent
from runtime.request import GenerateRequest, SamplingParams
from tests.launch.cluster_driver import ANY_SOURCE, command_of
from tests.launch.dying import children

NUM_REQUESTS, NUM_TOKENS = 4, 40
SETTINGS = (ANY_SOURCE, "cluster.stall_s=10", "parallel.split_min_tokens=4")


def generate(engine: Engine, after_steps: Callable[[int], None] = lambda _: None) -> list[list[int]]:
    """Greedy and seeded requests, of different lengths; `after_steps` is called after every step."""
    ids: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    for i in range(NUM_REQUESTS):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8 if i % 2 else 0.0, seed=i)
        engine.submit(
            GenerateRequest(request_id=str(i), prompt_token_ids=tuple(range(3 + i, 20 + 5 * i)), sampling=sampling)
        )
    steps = 0
    while engine.has_work():
        for chunk in engine.step():
            assert chunk.error is None, chunk.error
            ids[int(chunk.request_id)] += chunk.token_ids
        steps += 1
        after_steps(steps)
    return ids


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LocalCluster(config=None, ranks_per_node=()) as alone:
        engine = Engine(alone.engine_config)
    ids = generate(engine)
    engine.close()
    assert all(len(tokens) == NUM_TOKENS for tokens in ids)
    return ids


def rank_process(local: LocalCluster, rank: int) -> int:
    """The rank that is in the epoch: the first that its keeper has started."""
    return min(pid for pid in children(local.workers[rank].pid) if "rank_epochs" in command_of(pid))


def test_a_lost_rank_costs_no_token_and_repeats_none(expected: list[list[int]]) -> None:
    events: list[RecoveryEvent] = []
    with LocalCluster(config=None, ranks_per_node=(1, 1), overrides=[*SETTINGS, "parallel.tp=2"]) as local:
        engine = Engine(local.engine_config, deployment=local.deploy(), on_event=events.append)

        def strike(steps: int) -> None:
            if steps == 12:
                os.kill(rank_process(local, 1), signal.SIGKILL)

        assert generate(engine, strike) == expected
        assert [event.stage for event in events] == ["lost", "recovered"]
        assert events[0].message.startswith("rank 1 (dp 0, tp 1) was killed by SIGKILL")
        engine.close()
        assert local.wait() == {0: 0, 1: 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_per_node", "dp", "tp"),
    [((1, 1), 2, 1), ((2, 2), 2, 2), ((2, 2), 1, 4), ((2, 2), 4, 1), ((1, 1, 1, 1), 2, 2)],
)
def test_the_ids_of_one_process(
    expected: list[list[int]], ranks_per_node: tuple[int, ...], dp: int, tp: int
) -> None:
    overrides = [*SETTINGS, f"parallel.dp={dp}", f"parallel.tp={tp}", "engine.debug=true"]
    with LocalCluster(config=None, ranks_per_node=ranks_per_node, overrides=overrides) as local:
        engine = Engine(local.engine_config, deployment=local.deploy())
        assert generate(engine) == expected
        engine.close()
        assert set(local.wait().values()) == {0}
