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
    app.command("doctor")(doctor)
    app.command("ray", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(ray)


def doctor(
    config: Config = None,
    overrides: Overrides = None,
    ranks_per_node: RanksPerNode = None,
    controller: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", envvar="LOCKSTEP_CONTROLLER", help="See whether it answers.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(envvar="LOCKSTEP_ADVERTISE", help="Where other nodes reach this one.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Memory of each rank, in the place of what is here.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Count weights as float32, bfloat16 or float8, not as they are stored today.")
    ] = None,
    meet: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Check a whole launch: every rank runs this; the address is rank 0's."),
    ] = None,
    meet_s: Annotated[float, typer.Option("--meet-s", help="How long rank 0 waits for the others, in seconds.")] = 25.0,
    json: Annotated[bool, typer.Option("--json", help="JSON on standard output and nothing else.")] = False,
) -> int:
    """Check this node, or with --meet a whole launch. Exit code 0: at most warnings; 1: something blocks; 2: usage."""
    from launch.doctor import DoctorOptions, run

    return run(DoctorOptions(
        config=config, overrides=overrides or (), controller=controller, address=address, meet=meet, meet_s=meet_s,
        ranks_per_node=ranks_per_node, memory_gib=memory_gib, weights=weights, json=json,
    ))


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


def ray(
    context: typer.Context,
    config: Config = None,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option("--ray-address", envvar="RAY_ADDRESS", help="A Ray cluster, or auto; a new one if left out."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Where the controller listens; the address of rank 0's node if left out.")
    ] = None,
    cpus_per_rank: Annotated[float | None, typer.Option(help="Of a bundle; engine.threads if left out.")] = None,
    place_s: Annotated[
        float, typer.Option("--place-s", help="How long Ray may take to place all ranks, in seconds.")
    ] = 120.0,
) -> int:
    """Run `lockstep controller` and its workers under Ray; further arguments are the controller's."""
    from launch.ray_cluster import run
    from launch.ray_launch import RayOptions

    return run(RayOptions(
        config=config, overrides=overrides or (), address=address, host=host, cpus_per_rank=cpus_per_rank,
        place_s=place_s, arguments=context.args,
    ))
