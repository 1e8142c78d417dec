"""`python -m launch.worker`: what torchrun, Slurm, Ray or a person starts once for every rank.

It becomes a keeper (launch/keeper.py) when the controller has been reached. It exits with the job's code.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from launch.cluster_address import format_address, parse_address, read_secret
from launch.config import LaunchConfig, load_config
from launch.exit_codes import EXIT_CONFIG, EXIT_OK, EXIT_PEER_LOST, EXIT_USAGE
from launch.keeper import Keeper, Verdict
from launch.keeper_children import RANK_MODULE, RELAY_MODULE, ChildStarter
from launch.preflight import gather_facts
from launch.rank_env import RankEnv
from launch.rank_epochs import ClusterRankSpec
from launch.relay_main import RelaySpec
from runtime.cluster.grants import fetch_grant, relay_socket_name
from runtime.cluster.keeper_messages import KEEPER_FRAME, Hello, encode
from runtime.cluster.line import AuthenticationFailed, FrameLine, LineError, VersionRefused, connect_line

CONTROLLER_VARIABLE, CONFIG_VARIABLE, ADVERTISE_VARIABLE = (
    "LOCKSTEP_CONTROLLER", "LOCKSTEP_CONFIG", "LOCKSTEP_ADVERTISE"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code; errors are one line on standard error that names this rank."""
    options = _parser().parse_args(arguments)
    who = "lockstep worker"
    try:
        env = RankEnv.from_environment(os.environ)
        who = f"lockstep worker: rank {env.rank} (node {env.node_rank}, {env.host})"
        verdict = _work(options, env)
    except (ValueError, FileNotFoundError, PermissionError) as error:
        verdict = Verdict(code=EXIT_USAGE, text=str(error))
    if verdict.text:
        kind = "" if verdict.code == EXIT_OK else "error: "
        sys.stderr.write(f"{who}: {kind}{verdict.text}\n")
    return verdict.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.worker", description=__doc__, allow_abbrev=False)
    environment = os.environ
    parser.add_argument("--config", type=Path, default=environment.get(CONFIG_VARIABLE), help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    parser.add_argument(
        "--controller", default=environment.get(CONTROLLER_VARIABLE), metavar="HOST:PORT",
        help="what `lockstep controller` has printed, or the file that it has written",
    )
    parser.add_argument("--rank-module", default=RANK_MODULE, help=argparse.SUPPRESS)
    parser.add_argument("--relay-module", default=RELAY_MODULE, help=argparse.SUPPRESS)
    return parser


def _work(options: argparse.Namespace, env: RankEnv) -> Verdict:
    if not options.controller:
        raise ValueError(f"--controller and {CONTROLLER_VARIABLE} are not set: expected HOST:PORT of the controller")
    config = load_config(options.config, options.set)
    host, port = parse_address(options.controller, f"--controller or {CONTROLLER_VARIABLE}")
    secret = read_secret(config.cluster, host, os.environ)
    wait = config.cluster
    try:
        line = connect_line(
            host, port, secret=secret, role="keeper", timeout_s=wait.join_s, dead_after_s=wait.reform_s
        )
    except (AuthenticationFailed, VersionRefused) as error:
        return Verdict(code=EXIT_CONFIG, text=str(error))
    except LineError as error:
        return Verdict(code=EXIT_PEER_LOST, text=f"{error} (--controller or {CONTROLLER_VARIABLE})")
    return _keep(options, env, config, line, (host, port), secret)


def _keep(
    options: argparse.Namespace, env: RankEnv, config: LaunchConfig, line: FrameLine, controller: tuple[str, int],
    secret: bytes,
) -> Verdict:
    advertise = os.environ.get(ADVERTISE_VARIABLE) or config.cluster.advertise or _own_address(line)
    _check_own(advertise)
    socket_name = relay_socket_name(format_address(*controller), env.node_rank)
    relay = RelaySpec(
        parent_pid=os.getpid(), node_rank=env.node_rank, controller_host=controller[0], controller_port=controller[1],
        secret=secret.hex(), socket_name=socket_name, host=env.host,
    )
    starter = ChildStarter(
        spec=ClusterRankSpec(
            rank=env.rank, world_size=env.world_size, local_rank=env.local_rank, local_world_size=env.local_world_size,
            parent_pid=os.getpid(), keeper_fd=-1, host=advertise, secret=secret.hex(), tp=config.parallel.tp,
            threads=config.engine.threads, debug=config.engine.debug, config=config.model_dump(mode="json"),
        ),
        relay_spec=relay.to_json() if env.local_rank == 0 else None,
        rank_module=options.rank_module, relay_module=options.relay_module,
    )
    _say_hello(line, env, gather_facts(config, env, address=advertise))
    keeper = Keeper(
        line, starter, host=advertise, spare=config.cluster.spare, stall_s=config.cluster.stall_s,
        fetch=lambda epoch, timeout_s: fetch_grant(socket_name, epoch=epoch, rank=env.rank, timeout_s=timeout_s),
    )
    return keeper.run()


def _say_hello(line: FrameLine, env: RankEnv, facts: dict[str, str]) -> None:
    line.send(KEEPER_FRAME, 0, encode(Hello(
        rank=env.rank, world_size=env.world_size, local_rank=env.local_rank, local_world_size=env.local_world_size,
        node_rank=env.node_rank, num_nodes=env.num_nodes, source=env.source, host=env.host, pid=os.getpid(),
        facts=facts,
    )))


def _own_address(line: FrameLine) -> str:
    """The address of this host on the way to the controller: the way between hosts, most likely."""
    with socket.socket(fileno=os.dup(line.fileno())) as sock:
        return str(sock.getsockname()[0])


def _check_own(address: str) -> None:
    """Raises ValueError unless ranks can listen at `address`, and at nothing else."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
            fault = "stands for all addresses" if ip_address(sock.getsockname()[0]).is_unspecified else ""
    except OSError as error:
        fault = error.strerror or str(error)
    if fault:
        raise ValueError(
            f"cluster.advertise or {ADVERTISE_VARIABLE} = {address}: {fault}; expected one address of this host that "
            "the other hosts reach"
        )


if __name__ == "__main__":
    sys.exit(main())
