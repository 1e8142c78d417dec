"""Network devices and accelerators of this node, from the kernel's own tables (Linux); nothing is opened or loaded."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921  # linux/sockios.h


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address or name; None where none has."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return None
    if wanted[0] == 127:
        return "lo"  # the whole of 127.0.0.0/8 is there, though only one address is listed
    return next((name for _, name in socket.if_nameindex() if _request(name, _SIOCGIFADDR)[20:24] == wanted), None)


def mtu_of(interface: str) -> int | None:
    """Bytes of a packet; None for an interface that is not here."""
    found = _request(interface, _SIOCGIFMTU)
    return int(struct.unpack_from("i", found, 16)[0]) if any(found) else None


def device_of_route() -> str | None:
    """The interface of the default route; None without one."""
    try:
        lines = Path("/proc/self/net/route").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    routes = [line.split() for line in lines]
    return next((fields[0] for fields in routes if len(fields) > 7 and fields[1] == fields[7] == "00000000"), None)


def rdma_devices() -> list[str]:
    """InfiniBand and RoCE devices with link layer, state and rate: `mlx5_0 InfiniBand ACTIVE 400 Gb/sec`."""
    found = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        for port in sorted((device / "ports").glob("*")):
            layer, state, rate = (_line(port / name) for name in ("link_layer", "state", "rate"))
            short = " ".join(rate.split()[:2])
            found.append(f"{device.name} {layer} {state.partition(': ')[2] or state} {short}".strip())
    return found


def accelerators() -> str:
    """Models of the NVIDIA devices that the driver lists, `8 x NVIDIA H200`; empty without any."""
    models: dict[str, int] = {}
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in _text(information).splitlines():
            if line.startswith("Model:"):
                model = line.partition(":")[2].strip()
                models[model] = models.get(model, 0) + 1
    return ", ".join(f"{count} x {model}" for model, count in models.items())


def _request(interface: str, code: int) -> bytes:
    """The kernel's answer, zeros where it has none (no such interface, no IPv4 address)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            return fcntl.ioctl(sock.fileno(), code, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return bytes(256)


def _line(path: Path) -> str:
    return _text(path).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
