"""Checks of names, interfaces, ports and the environment variables that decide how ranks talk."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from launch.doctor_report import Finding, blocking, ok, skipped, warning
from launch.network import device_of_route, interface_of, mtu_of

CONNECT_S = 5.0
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES")
_SLOW: Mapping[str, tuple[str, str]] = {  # variable -> the value that slows everything down, and why
    "NCCL_IB_DISABLE": ("1", "NCCL uses TCP between nodes"),
    "NCCL_P2P_DISABLE": ("1", "accelerators of one node do not reach each other's memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one node talk over the network"),
    "NCCL_DEBUG": ("TRACE", "every call is logged"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel: nothing overlaps"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked with another one"),
}
_IGNORED = {
    "PROMETHEUS_MULTIPROC_DIR": "ranks push their counters to one process",
}


def check_interface(address: str | None, num_nodes: int) -> Iterator[Finding]:
    """The device under this node's own address, or that of the default route; its packets."""
    name = interface_of(address) if address else device_of_route()
    if name is None:
        where = f"no interface has {address}" if address else "no default route"
        if address:
            yield blocking("net.interface", where, "cluster.advertise or --address must be of this node")
        else:
            yield skipped("net.interface", f"{where}: name this node's address with --address")
        return
    if name == "lo" and num_nodes > 1:
        yield blocking("net.interface", "lo", "other nodes cannot reach the loopback interface: name another address")
    else:
        yield ok("net.interface", f"{name}{f' ({address})' if address else ''}")
    mtu = mtu_of(name)
    if mtu is not None and mtu < 9000 and num_nodes > 1:
        yield warning("net.mtu", f"{mtu} on {name}", "jumbo frames (9000) on all nodes and switches make TCP cheaper")
    else:
        yield ok("net.mtu", f"{mtu} on {name}")


def check_name(num_nodes: int) -> Finding:
    """gloo and torchrun resolve the own name; Debian maps it to 127.0.1.1."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return warning("net.name", f"{name}: {error.strerror}", "add the name to /etc/hosts; torchrun resolves it")
    if address.startswith("127.") and num_nodes > 1:
        return warning("net.name", f"{name} is {address}", "gloo gives it to other nodes: set GLOO_SOCKET_IFNAME")
    return ok("net.name", f"{name} is {address}")


def check_bind(bind: str, has_secret: bool, num_nodes: int = 1) -> Finding:
    """Whether the controller could listen here now. Only on the controller's node is a refusal a fault."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return blocking("net.bind", f"cluster.bind = {bind!r}", "expected HOST:PORT, port 0 for a free one")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return blocking("net.bind", f"{host}: {error.strerror}", "name an address of the controller's node")
    family, kind, protocol, _, address = infos[0]
    is_loopback = str(address[0]).startswith(("127.", "::1"))
    if is_loopback and num_nodes > 1:
        return warning("net.bind", f"{bind} for {num_nodes} nodes", "name an address that all reach, or give --listen")
    if not is_loopback and not has_secret:
        return blocking("net.bind", f"{bind} without a secret", "set LOCKSTEP_SECRET or cluster.secret_file")
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            return warning(
                "net.bind", f"{bind}: {error.strerror}",
                "on the controller's node: another port or address; elsewhere: nothing",
            )
    return ok("net.bind", f"{bind} is free")


def check_controller(address: str | None, variable: str = "--controller") -> Finding:
    """Whether a connection is taken. Nothing is sent: the controller drops it."""
    if address is None:
        return skipped("net.controller", f"no {variable} given")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return blocking("net.controller", f"{variable} = {address!r}", "give HOST:PORT as the controller prints it")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return ok("net.controller", f"{address} answers")
    except OSError as error:
        return blocking(
            "net.controller", f"{variable} = {address}: {error.strerror or error}",
            "start the controller first; check its address, the route and the firewall",
        )


def check_environment(env: Mapping[str, str]) -> Iterator[Finding]:
    """Interfaces that variables name must be here; some settings slow everything down, some have no effect."""
    present = {name for _, name in socket.if_nameindex()}
    wrong = [
        f"{variable} = {env[variable]}" for variable in _INTERFACES
        if variable in env and not _names_one(env[variable], present)
    ]
    if wrong:
        yield blocking("env.interfaces", "; ".join(wrong), f"no such interface here: {', '.join(sorted(present))}")
    else:
        yield ok("env.interfaces", ", ".join(f"{v} = {env[v]}" for v in _INTERFACES if v in env) or "none is named")
    slow = [f"{name} = {value}: {why}" for name, (value, why) in _SLOW.items() if env.get(name) == value]
    if slow:
        yield warning("env.slow", "; ".join(slow), "unset it, unless you are looking for a fault")
    else:
        yield ok("env.slow", "no setting that slows ranks down")
    ignored = [f"{name}: {why}" for name, why in _IGNORED.items() if name in env]
    if ignored:
        yield warning("env.ignored", "; ".join(ignored), "it has no effect")


def _names_one(value: str, present: set[str]) -> bool:
    """As NCCL reads it: prefixes, `=name` exactly, `^name` all but those; devices of UCX may end in `:port`."""
    if value.startswith("^") or value == "all":
        return True
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    wanted = [name.partition(":")[0] for name in names if name and not name.startswith("mlx")]
    return not wanted or any(
        name == device if exact else device.startswith(name) for name in wanted for device in present
    )
