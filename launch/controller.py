"""The controller of a cluster: listens, waits for the workers of all ranks, and makes of them a deployment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.cluster_address import format_address, parse_address, read_secret, write_address
from launch.config import ClusterSection, LaunchConfig
from launch.deployment import exchange_bytes, plan_bytes, result_bytes
from launch.launch_rules import LaunchRules
from launch.preflight import gather_facts
from parallel.layout import Layout
from parallel.shm_group import segment_size
from runtime.cluster.acceptor import Acceptor
from runtime.cluster.cluster import Cluster
from runtime.cluster.cluster_rules import ClusterLimits
from runtime.cluster.relay_messages import EpochMemory, GroupSegment
from runtime.config import EngineConfig
from runtime.engine import Deployment
from runtime.load_progress import StartupWatcher
from runtime.loading import read_facts
from runtime.models.config import load_model_config
from runtime.placing import check_fits, even_nodes
from runtime.rank import settle
from runtime.rank_watch import Patience
from runtime.recovery import RestartLimits
from runtime.sizing import Sizes, choose_sizes

GRACE_S = 0.2  # from the first sign of trouble until a cause is named
START_STALL_S = 15.0  # of silence while a rank loads: it may hold its interpreter for long


class Controller:
    """Listens from the start; `deploy` waits for the workers. Close what `deploy` made before this."""

    def __init__(self, config: LaunchConfig, engine_config: EngineConfig, *, listen: str | None = None) -> None:
        """`listen`: HOST:PORT in the place of `cluster.bind`. Raises ValueError for what cannot work."""
        self._config, self._engine_config = config, engine_config
        self._model = load_model_config(engine_config.model)
        check_fits(engine_config, self._model)
        bind = listen if listen is not None else config.cluster.bind
        host, port = parse_address(bind, "--listen" if listen is not None else "cluster.bind")
        secret = read_secret(config.cluster, host, os.environ)
        try:
            listener = socket.create_server((host, port), family=_family(host), backlog=256)
        except OSError as error:
            raise ValueError(f"cannot listen at {bind}: {error.strerror or error}") from None
        self._acceptor = Acceptor(listener, secret=secret, dead_after_s=config.cluster.reform_s)
        self._cluster: Cluster | None = None
        self._address_file: Path | None = None

    @property
    def address(self) -> str:
        """HOST:PORT, for workers."""
        return format_address(*self._acceptor.address)

    def write_address(self, file: Path) -> None:
        """Have workers find the address in `file`, until this controller ends."""
        write_address(file, self.address)
        self._address_file = file

    def deploy(self, *, gather_s: float | None = None, watcher: StartupWatcher | None = None) -> Deployment:
        """Wait for the workers of all ranks (`gather_s` for the first of them) and form the first epoch.

        Raises ValueError when they are no launch of this configuration, or for what a rank finds wrong with the model;
        RankFailure for what befalls a rank. All workers have been told then.
        """
        config, cluster = self._engine_config, self._config.cluster
        facts = read_facts(config)
        sizes = choose_sizes(config, facts)
        rules = LaunchRules(config.layout.ep, gather_facts(self._config, None), cluster.may_differ)
        memory_sizes, node_of_rank = _MemorySizes.of(config, sizes), list[int]()

        def memory(epoch: int, nodes: Sequence[int]) -> EpochMemory:
            _check_exchange(config, nodes)
            node_of_rank[:] = nodes
            return _memory(config.layout, memory_sizes, epoch, nodes)

        limits = _limits(cluster, gather_s)
        made = self._cluster = Cluster(self._acceptor, config.layout, rules, memory, limits, watcher)
        made.gather()
        reported: list[Mapping[str, int]] = []

        def sizes_of(ranks: Sequence[Mapping[str, int]]) -> Sizes:
            reported[:] = ranks
            return Sizes(max_model_len=sizes.max_model_len, num_pages=min(sizes.num_pages, settle(ranks)))

        channel = made.form_first(sizes_of)
        assert made.sizes is not None
        return Deployment(
            facts=facts, sizes=made.sizes, channel=channel, recover=made.recover,
            bytes_read=tuple(rank["bytes_read"] for rank in reported), ranks_per_node=even_nodes(node_of_rank),
            restarts=RestartLimits(max_restarts=cluster.max_restarts, window_s=cluster.restart_window_s),
        )

    @property
    def told(self) -> int:
        """The exit code that workers are, or were, told."""
        return self._cluster.farewell.code if self._cluster is not None else 0

    def interrupt(self, code: int, text: str) -> None:
        """Have workers exit with `code` when this ends well or badly, from a signal's handler."""
        if self._cluster is not None:
            self._cluster.interrupt(code, text)

    def close(self, code: int = 0, text: str = "") -> None:
        """End everything that is left; may be called twice."""
        if self._cluster is not None:
            self._cluster.close(code, text)
        self._acceptor.close()
        if self._address_file is not None:
            with suppress(FileNotFoundError):
                self._address_file.unlink()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _limits(cluster: ClusterSection, gather_s: float | None) -> ClusterLimits:
    return ClusterLimits(
        gather_s=gather_s, join_s=cluster.join_s, stall_s=cluster.stall_s, reform_s=cluster.reform_s,
        patience=Patience(stall_s=cluster.stall_s, start_stall_s=START_STALL_S, grace_s=GRACE_S),
    )


def _check_exchange(config: EngineConfig, nodes: Sequence[int]) -> None:
    """Raises ValueError where ranks of several hosts were to have nothing but shared memory between them."""
    if config.exchange == "shared_memory" and len(set(nodes)) > 1:
        raise ValueError(
            f'parallel.exchange = "shared_memory": the ranks are on nodes {sorted(set(nodes))}, which share none; '
            'set it to "auto" or "sockets"'
        )


@dataclass(frozen=True, kw_only=True)
class _MemorySizes:
    """Bytes of the largest plan, for results, and of the largest exchange."""

    plans: int
    results: int
    exchange: int

    @classmethod
    def of(cls, config: EngineConfig, sizes: Sizes) -> _MemorySizes:
        model = load_model_config(config.model)
        return cls(
            plans=plan_bytes(config, sizes, model.vocab_size), results=result_bytes(config),
            exchange=exchange_bytes(config, model),
        )


def _memory(layout: Layout, sizes: _MemorySizes, epoch: int, nodes: Sequence[int]) -> EpochMemory:
    """What relays allocate: shared memory for those ranks of a group that are on one node."""
    segments = [
        GroupSegment(name=name, ranks=ranks, num_bytes=segment_size(len(ranks), sizes.exchange))
        for name, group in _groups(layout)
        for ranks in _by_node(group, nodes)
        if len(ranks) > 1
    ]
    return EpochMemory(
        epoch=epoch, node_of_rank=nodes, plan_bytes=sizes.plans, result_bytes=sizes.results,
        slot_bytes=sizes.exchange, segments=segments,
    )


def _groups(layout: Layout) -> list[tuple[str, list[int]]]:
    everybody = list(range(layout.ep))
    groups = [("tp", [r for r in everybody if layout.dp_rank(r) == group]) for group in range(layout.dp)]
    return [*groups, ("ep", everybody)]


def _by_node(ranks: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    return [[rank for rank in ranks if nodes[rank] == node] for node in sorted({nodes[rank] for rank in ranks})]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
