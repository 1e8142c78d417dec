"""A re-placement that cannot be checked changes nothing; what does not fit is refused; ranks that come later fit in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moe.placement import Placement, save_placement
from runtime.channel import Channel, RankFailure
from runtime.config import EngineConfig
from runtime.engine import Deployment, Engine
from runtime.loading import load_model, read_facts
from runtime.models.config import load_model_config
from runtime.placement_messages import Loads, Place, PlacementRequest, Stage, placement_of, stage
from runtime.placement_round import Rebalanced, agreed_fingerprints
from runtime.placing import even_nodes, first_placement, load_bytes
from runtime.rank_messages import decode_control, encode_control
from runtime.recovery import RestartLimits
from runtime.sizing import choose_sizes
from tests.placement_runs import MINNOW, assert_same, config, move_everything, run, submit
from tests.rank_threads import ThreadChannel, engine_over_threads
from tests.runtime.driving import Outcome


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    engine = Engine(config(dp=1))
    outcomes = run(engine)
    engine.close()
    return outcomes


def test_weights_that_differ_from_those_served_are_refused(
    alone: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint changes under a running engine: the round fails by name, streams go on, the next round is good."""
    move_everything(monkeypatch)
    model = tmp_path / "minnow"
    shutil.copytree(MINNOW, model)
    engine, _ = engine_over_threads(config(model, dp=2, redundant_experts=4, expert_source="files"))
    try:
        before = engine.balancer
        assert before is not None
        placement = before.placement
        assert_same(run(engine), alone)  # every rank has loaded before the file changes
        file = model / "model.safetensors"
        intact = file.read_bytes()
        tensors = load_file(file)
        for name, values in tensors.items():
            if ".mlp.experts." in name:
                tensors[name] = values * 1.01
        file.unlink()  # ranks have mapped the old one
        save_file(tensors, file)
        outcomes = submit(engine)
        with pytest.raises(ValueError, match=r"stay where they are: rank \d: layer \d, expert \d+ from .*minnow"):
            engine.rebalance()
        assert before.placement.same_as(placement)
        assert before.last is not None
        assert "checksum" in before.last.error
        while engine.has_work():
            for chunk in engine.step():
                outcomes[chunk.request_id].add(chunk)
        assert_same(outcomes, alone)
        file.unlink()
        file.write_bytes(intact)
        assert isinstance(engine.rebalance(), Rebalanced)
        assert not before.placement.same_as(placement)
        assert_same(run(engine), alone)
    finally:
        engine.close()


def test_a_missing_checkpoint_ends_the_round_only(
    alone: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_everything(monkeypatch)
    model = tmp_path / "minnow"
    shutil.copytree(MINNOW, model)
    engine, _ = engine_over_threads(config(model, tp=2, redundant_experts=2, expert_source="files"))
    try:
        assert_same(run(engine), alone)  # every rank has loaded before the file goes
        (model / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="has neither model.safetensors nor"):
            engine.rebalance()
        assert_same(run(engine), alone)
    finally:
        engine.close()


def test_replicas_of_different_weights_are_named() -> None:
    model = load_model_config(MINNOW)
    placement = first_placement(config(dp=2, redundant_experts=4), model)
    assert placement is not None
    held = [replace_ids(placement, rank) for rank in range(2)]
    found = agreed_fingerprints(placement, held)
    assert found[0].tolist() == [1000 + e for e in range(16)]
    shared = int(placement.experts[2, 1, -1])
    other = bytearray(held[1].fingerprints)
    other[8 * (2 * 10 + 9)] ^= 1
    with pytest.raises(ValueError, match=rf"layer {placement.layers[2]}, expert {shared}: rank 0 holds .* rank 1 of"):
        agreed_fingerprints(placement, [held[0], replace(held[1], fingerprints=bytes(other))])


def replace_ids(placement: Placement, rank: int) -> Loads:
    """What a rank would say whose weights have checksum 1000 + expert."""
    fingerprints = (placement.experts[:, rank].astype("uint64") + 1000).tobytes()
    return Loads(round_id=1, counts=b"", fingerprints=fingerprints)


def failing_over(channel_of: Callable[[], ThreadChannel], settings: Any) -> tuple[Engine, list[ThreadChannel]]:
    """An engine whose ranks can be replaced by others that have just loaded."""
    channels = [channel_of()]

    def recover() -> Channel:
        channels[-1].close()
        channels.append(channel_of())
        return channels[-1]

    facts = read_facts(settings)
    deployment = Deployment(
        facts=facts, sizes=choose_sizes(settings, facts), channel=channels[0], bytes_read=(), recover=recover,
        restarts=RestartLimits(),
    )
    return Engine(settings, deployment=deployment), channels


@pytest.mark.parametrize("lost_after", [3, 6])
def test_ranks_that_replace_lost_ones_take_the_placement_in_force(
    alone: dict[str, Outcome], lost_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ranks load the first placement; before any step they must hold the one that the controller counts on."""
    move_everything(monkeypatch)
    settings = config(dp=2, redundant_experts=4)
    engine, channels = failing_over(lambda: ThreadChannel(settings), settings)
    try:
        assert engine.balancer is not None
        outcomes = submit(engine)
        step = 0
        while engine.has_work():
            if step == lost_after - 2:
                engine.rebalance()
            if step == lost_after:
                placement = engine.balancer.placement
                engine.rebalance(wait=False)  # a round under way goes with the ranks
                channels[-1].failure = RankFailure("rank 1 is gone")
            for chunk in engine.step():
                outcomes[chunk.request_id].add(chunk)
            step += 1
        assert len(channels) == 2
        assert engine.balancer.placement.same_as(placement)
        assert_same(outcomes, alone)
        assert_same(run(engine, {2}), alone)  # and it can go on from there
    finally:
        engine.close()


class LosesTheChange(ThreadChannel):
    """Its first change reaches the ranks of one node; then a relay is gone."""

    loses = True

    def __init__(self, settings: EngineConfig) -> None:
        super().__init__(settings)
        self.requests: list[PlacementRequest] = []

    def request(self, message: PlacementRequest) -> None:
        self.requests.append(message)
        if isinstance(message, Place) and LosesTheChange.loses:
            LosesTheChange.loses = False
            self.failure = RankFailure("the relay of node 1 is gone")
            raise self.failure
        super().request(message)


def test_a_change_that_reached_some_ranks_only_is_taken_back_on_all(
    alone: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that go on may have changed over already: all are told which placement is in force."""
    move_everything(monkeypatch)
    monkeypatch.setattr(LosesTheChange, "loses", True)
    settings = config(dp=2, redundant_experts=4)
    engine, channels = failing_over(lambda: LosesTheChange(settings), settings)
    try:
        assert engine.balancer is not None
        placement = engine.balancer.placement
        with pytest.raises(RankFailure):
            engine.rebalance()
        assert_same(run(engine), alone)
        told = channels[1].requests if isinstance(channels[1], LosesTheChange) else []
        assert [type(message) for message in told] == [Stage, Place]
        assert isinstance(told[0], Stage)
        assert placement_of(told[0]).same_as(placement)
    finally:
        engine.close()


def test_new_ranks_that_cannot_take_the_placement_in_force_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that moved over the network, then changed on disk: the old ranks are gone, the new ones are refused."""
    move_everything(monkeypatch)
    model = tmp_path / "minnow"
    shutil.copytree(MINNOW, model)
    settings = config(model, dp=2, redundant_experts=4)
    engine, channels = failing_over(lambda: ThreadChannel(settings), settings)
    try:
        run(engine)
        engine.rebalance()
        file = model / "model.safetensors"
        tensors = load_file(file)
        file.unlink()  # ranks have mapped the old one
        save_file({n: v * 1.01 if ".mlp.experts." in n else v for n, v in tensors.items()}, file)
        outcomes = submit(engine)
        channels[-1].failure = RankFailure("rank 1 is gone")
        while engine.has_work():
            for chunk in engine.step():
                outcomes[chunk.request_id].add(chunk)
        assert all("cannot be started again: rank" in str(found.error) for found in outcomes.values())
        assert len(channels) == 2
        assert not channels[1].is_running
    finally:
        engine.close()
        if channels[-1].is_running:
            channels[-1].close()


def test_a_saved_placement_is_where_an_engine_starts(
    alone: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_everything(monkeypatch)
    file = tmp_path / "placement.json"
    engine, _ = engine_over_threads(config(dp=2, redundant_experts=4))
    try:
        engine.rebalance()
        assert engine.balancer is not None
        saved = engine.balancer.placement
        save_placement(saved, file)
    finally:
        engine.close()
    engine, _ = engine_over_threads(config(dp=2, redundant_experts=4, placement_file=str(file)))
    try:
        assert engine.balancer is not None
        assert (engine.balancer.placement.experts == saved.experts).all()
        assert_same(run(engine), alone)
    finally:
        engine.close()
    for settings, message in [
        (dict(dp=2, redundant_experts=6), r"made for slots a rank 10, here are 11"),
        (dict(dp=4, redundant_experts=4), r"made for ranks 2, here are 4"),
        (dict(dp=2, redundant_experts=4, k=0), r"made for layers \[1, 2, 3, 4, 5\], here are \[1, 2, 3, 4\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused(placement_file=str(file), **settings)
    values = json.loads(file.read_text())
    values["experts"][1][0][0] = values["experts"][1][0][1]
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="layer 2: (expert .* is on no rank|the shares of expert)"):
        refused(dp=2, redundant_experts=4, placement_file=str(file))
    file.write_text("[1]")
    with pytest.raises(ValueError, match="placement.json: expected an object with format"):
        refused(dp=2, redundant_experts=4, placement_file=str(file))
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        refused(dp=2, placement_file="nowhere")


def refused(**settings: Any) -> None:
    made = config(**settings)
    first_placement(made, load_model_config(made.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(dp=2, redundant_experts=3), r"redundant_experts = 3: 16 \+ 3 experts do not divide by the 2 ranks"),
        (dict(dp=3, redundant_experts=1), r"16 \+ 1 experts do not divide by the 3 ranks of dp x tp; 2 or 5 would"),
        (dict(dp=3, rebalance_steps=0), r"redundant_experts = 0: 16 \+ 0 experts do not divide by the 3 ranks"),
        (dict(dp=2, redundant_experts=18), "redundant_experts = 18: with 16 each of 2 ranks holds all 16"),
        (dict(dp=2, redundant_experts=-2), "redundant_experts = -2: expected an integer >= 0"),
        (dict(dp=2, rebalance_steps=-1), "rebalance_steps = -1: expected an integer >= 0"),
        (dict(redundant_experts=2), "redundant_experts = 2, .* is one rank, which holds all experts"),
        (dict(dp=2, expert_source="files"), "expert_source = 'files': experts have fixed places; set redundant"),
        (dict(dp=4, redundant_experts=4, ranks_per_node=3), r"ranks_per_node = 3: expected a divisor of dp \* tp = 4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused(**settings)


def test_without_placement_experts_stay_and_nothing_is_counted() -> None:
    engine, _ = engine_over_threads(config(dp=2))
    try:
        assert engine.balancer is None
        with pytest.raises(ValueError, match="experts have fixed places: set parallel.rebalance_steps"):
            engine.rebalance()
    finally:
        engine.close()
    assert load_model(config(dp=1)).experts is None
    assert load_bytes(config(dp=2)) == 0
    assert load_bytes(config(dp=2, redundant_experts=4)) > 8 * 5 * 20


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [([0, 0, 1, 1], 2), ([3, 1, 0], 1), ([5, 5], 2), ([0, 0, 1], None), ([0, 1, 0, 1], None), ([0, 0, 1, 2], None),
     ([0, 0, 1, 1, 0, 0], None), ([], None)],
)
def test_nodes_count_where_they_are_even(nodes: list[int], expected: int | None) -> None:
    assert even_nodes(nodes) == expected


def test_messages_that_do_not_hold_together_are_refused() -> None:
    placement = first_placement(config(dp=2, redundant_experts=4), load_model_config(MINNOW))
    assert placement is not None
    message = stage(3, placement, "files", None, 2)
    decoded = decode_control(encode_control(message))
    assert isinstance(decoded, Stage)
    assert placement_of(decoded).same_as(placement)
    with pytest.raises(ValueError, match="array of 396 bytes: expected 400"):
        placement_of(replace(message, experts=message.experts[:-4]))
    with pytest.raises(ValueError, match="placement 3: .* is on no rank"):
        placement_of(replace(message, experts=bytes(len(message.experts))))
