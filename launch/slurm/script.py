"""Writes the batch script of one configuration: `lockstep slurm --config F > job.sbatch`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch.config import LaunchConfig

TEMPLATE = Path(__file__).with_name("lockstep.sbatch.in")
MOST_RANKS_PER_NODE = 8  # where nothing else is said: accelerators of the usual node
_REQUEUE = '[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"  # temporary: try again later\n'
_PLACE = re.compile(r"@([a-z_]+)@")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What the configuration does not say. `sbatch`: further #SBATCH options; `srun`: further options of the step."""

    ranks_per_node: int | None = None
    job_name: str = "lockstep"
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    output: str = "lockstep-%j.log"
    requeue: bool = False
    python: str = sys.executable
    sbatch: Sequence[str] = ()
    srun: Sequence[str] = ()


def batch_script(
    config: LaunchConfig, path: Path, options: SlurmOptions, *, settings: Sequence[str] = (), command: str = ""
) -> str:
    """The text of the script. `path`: of the configuration file; `settings`: `section.key=value` on top of it.

    Raises ValueError when the ranks do not fill nodes, or a tp group would not be on one node.
    """
    per_node = ranks_per_node(config, options.ranks_per_node)
    num_ranks = config.parallel.dp * config.parallel.tp
    values = {
        "num_nodes": str(num_ranks // per_node), "ranks_per_node": str(per_node), "num_ranks": str(num_ranks),
        "dp": str(config.parallel.dp), "tp": str(config.parallel.tp), "threads": str(config.engine.threads),
        "command": " ".join(command.split()) or "lockstep slurm",
        "directives": "\n".join(f"#SBATCH {line}" for line in _directives(config, options, per_node)),
        "python": shlex.quote(options.python), "config": shlex.quote(str(path.resolve())),
        "settings": " ".join(f"--set {shlex.quote(setting)}" for setting in settings),
        "srun_options": "".join(f" {shlex.quote(option)}" for option in options.srun),
        "requeue": _REQUEUE if options.requeue else "",
    }
    return _PLACE.sub(lambda match: values[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def ranks_per_node(config: LaunchConfig, given: int | None) -> int:
    """`given`, or as many whole tp groups as a node of 8 takes. Raises ValueError where nodes would not be alike."""
    tp, num_ranks = config.parallel.tp, config.parallel.dp * config.parallel.tp
    per_node = given if given is not None else _largest_share(num_ranks, tp)
    if per_node < 1 or per_node > num_ranks:
        raise ValueError(f"ranks per node = {per_node}: expected 1..{num_ranks}, since dp * tp = {num_ranks}")
    if per_node % tp:
        raise ValueError(f"ranks per node = {per_node}: tp = {tp} must divide it, since a tp group is on one node")
    if num_ranks % per_node:
        raise ValueError(f"ranks per node = {per_node}: it must divide dp * tp = {num_ranks}, so that nodes are alike")
    return per_node


def _largest_share(num_ranks: int, tp: int) -> int:
    fitting = [n for n in range(tp, max(tp, MOST_RANKS_PER_NODE) + 1, tp) if num_ranks % n == 0]
    return max(fitting, default=tp)


def _directives(config: LaunchConfig, options: SlurmOptions, per_node: int) -> list[str]:
    num_ranks = config.parallel.dp * config.parallel.tp
    lines = [
        f"--job-name={options.job_name}", f"--nodes={num_ranks // per_node}", f"--ntasks={num_ranks}",
        f"--ntasks-per-node={per_node}", f"--cpus-per-task={config.engine.threads}", f"--output={options.output}",
        "--signal=B:TERM@60",
    ]
    named = {"partition": options.partition, "account": options.account, "time": options.time}
    lines += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if not config.engine.device.startswith("cpu"):
        # Of the node, not of each task: ranks choose by their local rank, and need to see each other's devices.
        lines.append(f"--gpus-per-node={per_node}")
    if options.requeue:
        lines.append("--requeue")
    return [*lines, *options.sbatch]
