"""Commands of `lockstep` that start or check a launch over several hosts: slurm, ray, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path | None, typer.Option("--config", help="TOML file; the built-in demo if left out.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
]
RanksPerNode = Annotated[
    int | None, typer.Option(help="Whole tp groups on each node; as many as 8 ranks allow if left out.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `lockstep`."""
    app.command("slurm")(slurm)


def slurm(
    config: Config = None,
    overrides: Overrides = None,
    ranks_per_node: RanksPerNode = None,
    job_name: Annotated[str, typer.Option()] = "lockstep",
    partition: Annotated[str | None, typer.Option()] = None,
    account: Annotated[str | None, typer.Option()] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, as sbatch takes it.")] = None,
    output: Annotated[str, typer.Option(help="Where the job's output goes.")] = "lockstep-%j.log",
    requeue: Annotated[bool, typer.Option("--requeue", help="Queue the job again after exit code 75.")] = False,
    python: Annotated[str, typer.Option(help="Interpreter on the nodes.")] = sys.executable,
    sbatch: Annotated[list[str] | None, typer.Option(help="Another option of sbatch; may be repeated.")] = None,
    srun: Annotated[list[str] | None, typer.Option(help="Another option of srun; may be repeated.")] = None,
) -> int:
    """Print a batch script for this configuration: `lockstep slurm --config F > job.sbatch; sbatch job.sbatch`."""
    from launch.config import BUILT_IN, load_config
    from launch.slurm.script import SlurmOptions, batch_script

    options = SlurmOptions(
        ranks_per_node=ranks_per_node, job_name=job_name, partition=partition, account=account, time=time,
        output=output, requeue=requeue, python=python, sbatch=sbatch or (), srun=srun or (),
    )
    settings = overrides or []
    script = batch_script(
        load_config(config, settings), config or BUILT_IN, options, settings=settings,
        command=f"lockstep slurm --config {config or BUILT_IN}",
    )
    sys.stdout.write(script)
    return 0
