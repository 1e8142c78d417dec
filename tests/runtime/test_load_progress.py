"""What a rank will read is known beforehand, near enough, and its phase says how far it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.group import SoloGroup
from parallel.layout import Layout, RankGroups
from runtime.load_progress import Loaded, LoadProgress, described, expected_bytes, parse
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.weights import WeightSource


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
@pytest.mark.parametrize("with_mtp", [True, False])
def test_expected_bytes_are_those_read(minnow: Path, dp: int, tp: int, with_mtp: bool) -> None:
    layout, rank = Layout(dp=dp, tp=tp), dp * tp - 1
    groups = RankGroups(tp=SoloGroup("tp"), ep=SoloGroup("ep"))
    groups.tp.rank, groups.tp.size = layout.tp_rank(rank), layout.tp
    groups.ep.rank, groups.ep.size = rank, layout.ep
    told: list[int] = []
    config = load_model_config(minnow)
    with WeightSource(minnow) as source:
        source.on_read = told.append
        skip = None if with_mtp else f"model.layers.{config.num_hidden_layers}."
        expected = expected_bytes(source.sizes(), layout, skip=skip)
        DeepseekModel.load(source, config, groups=groups, storage="float32", with_mtp=with_mtp)
        read = source.bytes_read
    assert expected == pytest.approx(read, rel=0.01)
    assert max(told) == read


def test_the_phase_changes_by_hundredths() -> None:
    phases: list[str] = []
    progress = LoadProgress(phases.append, 1000)
    for done in range(0, 1201, 5):
        progress(done)
    assert len(phases) == 121
    assert parse(phases[0]) == Loaded(0, 1000)
    assert parse(phases[-1]) == Loaded(1000, 1000)  # more than expected is all of it


def test_other_phases_say_nothing_of_loading() -> None:
    assert parse(described(3, 10) + ": all_gather on ep") == Loaded(3, 10)
    assert parse("loading weights") is None
    assert parse("importing libraries") is None
