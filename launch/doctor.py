"""`lockstep doctor`: what would keep this node, or with `--meet` a whole launch, from serving."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from launch.cluster_address import parse_address, read_secret
from launch.config import LaunchConfig, load_config
from launch.doctor_launch import Report, Verdict, collect, folded, report_to
from launch.doctor_model import GIB, Memory, check_files, check_plan, check_tokenizer, cpu_memory
from launch.doctor_network import check_bind, check_controller, check_environment, check_interface, check_name
from launch.doctor_node import (
    check_clock,
    check_memlock,
    check_open_files,
    check_processors,
    check_rdma,
    check_shm,
    check_system,
    check_versions,
)
from launch.doctor_ranks import check_accelerators, check_rank_map, check_ranks, device_memory, has_rank
from launch.doctor_report import Finding, blocking, exit_code, table, to_json, worst
from launch.preflight import gather_facts
from launch.rank_env import RankEnv
from launch.slurm.script import ranks_per_node
from runtime.cluster.line import LineError

WEIGHT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
BIND_TIMEOUT_S = 25.0  # for all ranks to come


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """`address`: of this node, for others. `memory_gib`: of each rank, in the place of what is here. `weights`: how
    weights would be stored, if not as they are today. `meet`: where rank 0 collects the reports of all ranks."""

    config: Path | None = None
    overrides: Sequence[str] = ()
    controller: str | None = None
    address: str | None = None
    ranks_per_node: int | None = None
    memory_gib: float | None = None
    weights: str | None = None
    meet: str | None = None
    meet_s: float = BIND_TIMEOUT_S
    json: bool = False


def run(options: DoctorOptions, env: Mapping[str, str] = os.environ, out: TextIO | None = None) -> int:
    """Print what was found. 0: nothing but warnings; 1: something blocks. ValueError for the command line's faults."""
    out = out if out is not None else sys.stdout
    if options.weights is not None and options.weights not in WEIGHT_BYTES:
        raise ValueError(f"--weights {options.weights}: expected one of {', '.join(WEIGHT_BYTES)}")
    if options.config is not None and not options.config.is_file():
        raise FileNotFoundError(f"{options.config}: no such configuration file")
    try:
        config = load_config(options.config, options.overrides)
    except ValueError as error:
        findings = [blocking("config.read", str(error), "correct the key that the message names")]
        _show(findings, options, out)
        return exit_code(findings)
    findings = examine(config, options, env)
    if options.meet is not None:
        return _whole_launch(config, options, env, findings, out)
    _show(findings, options, out)
    return exit_code(findings)


def examine(config: LaunchConfig, options: DoctorOptions, env: Mapping[str, str]) -> list[Finding]:
    """All checks of one node, in the order of the table. A check that fails itself blocks under its own name."""
    num_ranks = config.parallel.dp * config.parallel.tp
    local_ranks = _local_ranks(config, options, env)
    num_nodes = -(-num_ranks // local_ranks)
    device, folder = config.engine.device, Path(config.model.path)
    has_secret = bool(env.get("LOCKSTEP_SECRET") or config.cluster.secret_file)
    value_bytes = WEIGHT_BYTES[options.weights] if options.weights else None
    checks: list[tuple[str, Callable[[], Finding | Iterable[Finding]]]] = [
        ("version", check_versions),
        ("node.system", check_system),
        ("node.shm", check_shm),
        ("node.files", lambda: check_open_files(local_ranks)),
        ("node.memlock", check_memlock),
        ("node.processors", lambda: check_processors(config.engine.threads, local_ranks)),
        ("node.clock", check_clock),
        ("accel.devices", lambda: check_accelerators(device, local_ranks)),
        ("accel.rdma", lambda: check_rdma(device, num_nodes)),
        ("net.interface", lambda: check_interface(options.address or config.cluster.advertise, num_nodes)),
        ("net.name", lambda: check_name(num_nodes)),
        ("net.bind", lambda: check_bind(config.cluster.bind, has_secret, num_nodes)),
        ("net.controller", lambda: check_controller(options.controller)),
        ("env", lambda: check_environment(env)),
        ("launch.ranks", lambda: check_ranks(env, num_ranks)),
        ("launch.map", lambda: check_rank_map(config, local_ranks)),
        ("model.files", lambda: check_files(folder)),
        ("model.tokenizer", lambda: check_tokenizer(folder)),
        ("config", lambda: check_plan(config, _memory(options, device, local_ranks), value_bytes=value_bytes)),
    ]
    return [finding for id, check in checks for finding in _run_check(id, check)]


def _run_check(id: str, check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # noqa: BLE001  (a check must not keep the others from being shown)
        what = f"the check itself failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [blocking(id, what, "report this")]


def _whole_launch(
    config: LaunchConfig, options: DoctorOptions, env: Mapping[str, str], findings: Sequence[Finding], out: TextIO
) -> int:
    assert options.meet is not None
    host, port = parse_address(options.meet, "--meet")
    if port == 0:
        raise ValueError(f"--meet {options.meet}: expected a port that is the same for all ranks")
    secret = read_secret(config.cluster, host, env)
    rank = RankEnv.from_environment(env)
    own = Report(env=rank, facts=gather_facts(config, rank, address=options.address), findings=findings)
    if rank.rank != 0:
        try:
            verdict = report_to(own, host, port, secret=secret, timeout_s=options.meet_s)
        except LineError as error:
            verdict = Verdict(code=1, text=f"rank 0 cannot be reached (--meet): {error}")
        if verdict.text:
            sys.stderr.write(f"lockstep doctor: rank {rank.rank} ({rank.host}): {verdict.text}\n")
        return verdict.code
    with _listen(host, port) as listener:
        verdict, reports, about = collect(
            own, listener, secret=secret, num_ranks=config.parallel.dp * config.parallel.tp,
            may_differ=config.cluster.may_differ, timeout_s=options.meet_s,
        )
    _show_launch(reports, about, options, out)
    return verdict.code


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"--meet {host}:{port}: {error.strerror or error}; give an address of rank 0's node") from None


def _show_launch(
    reports: Sequence[Report], about: Sequence[Finding], options: DoctorOptions, out: TextIO
) -> None:
    if options.json:
        ranks = [
            {
                "rank": report.env.rank, "node": report.env.host, "status": worst(report.findings),
                "checks": [asdict(finding) for finding in report.findings],
            }
            for report in reports
        ]
        out.write(to_json(about, node=socket.gethostname(), more={"ranks": ranks}) + "\n")
    else:
        out.write(table([*about, *folded(reports)]) + "\n")


def _show(findings: Sequence[Finding], options: DoctorOptions, out: TextIO) -> None:
    if options.json:
        out.write(to_json(findings, node=socket.gethostname()) + "\n")
    else:
        out.write(table(findings) + "\n")


def _local_ranks(config: LaunchConfig, options: DoctorOptions, env: Mapping[str, str]) -> int:
    """Ranks on this node: as started, as given, or as a launcher would place them."""
    if has_rank(env):
        try:
            return RankEnv.from_environment(env).local_world_size
        except ValueError:
            pass  # `launch.ranks` tells
    try:
        return ranks_per_node(config, options.ranks_per_node)
    except ValueError:
        if options.ranks_per_node is not None:
            raise
        return config.parallel.tp


def _memory(options: DoctorOptions, device: str, local_ranks: int) -> Memory | None:
    if options.memory_gib is not None:
        return Memory(per_rank=int(options.memory_gib * GIB), source="--memory-gib")
    return cpu_memory(local_ranks) if device.startswith("cpu") else device_memory()
