"""Real launchers: ids of one process through torchrun, and through Slurm and Ray where they are."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tests.launch.launchers import Shape, one_process, through_ray, through_slurm, through_torchrun, write_prompts

pytestmark = pytest.mark.slow
SHAPES = [Shape(nodes=2, per_node=1), Shape(nodes=2, per_node=2, tp=2)]


def names(shape: Shape) -> str:
    return f"{shape.nodes}x{shape.per_node}, tp {shape.tp}"


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_torchrun(shape: Shape, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 6, 16)
    assert through_torchrun(shape, prompts) == one_process(prompts)


@pytest.mark.skipif(
    "SLURM_CONF" not in os.environ or shutil.which("sbatch") is None, reason="no Slurm cluster: SLURM_CONF is not set"
)
@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_slurm(shape: Shape, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 6, 16)
    assert through_slurm(shape, prompts) == one_process(prompts)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_ray(shape: Shape, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 6, 16)
    assert through_ray(shape, prompts) == one_process(prompts)
