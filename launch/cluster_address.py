"""Where a cluster's controller is, and the secret that its processes share."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launch.config import ClusterSection

SECRET_VARIABLE = "LOCKSTEP_SECRET"
MIN_SECRET_BYTES = 16


def parse_address(text: str, source: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT, [IPv6]:PORT, or of the file of that name, as `--address-file` writes it.

    Raises ValueError, naming `source`, for anything else.
    """
    given = text
    if os.sep in text or Path(text).is_file():
        try:
            text = Path(text).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"{source} = {given}: {error.strerror}") from None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{source} = {given!r}: expected HOST:PORT, or a file that holds it")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def write_address(file: Path, address: str) -> None:
    """Write the controller's address for workers to read; only this user may, and nobody sees half of it."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as handle:
            handle.write(address + "\n")
        part.replace(file)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise


def read_secret(cluster: ClusterSection, host: str, environment: Mapping[str, str]) -> bytes:
    """The shared secret, from the environment or the configured file. Raises ValueError where one is needed.

    On the loopback interface none is: b"".
    """
    value = environment.get(SECRET_VARIABLE, "")
    source = SECRET_VARIABLE
    if not value and cluster.secret_file is not None:
        source = f"cluster.secret_file = {cluster.secret_file}"
        try:
            value = Path(cluster.secret_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"{source}: {error.strerror}") from None
    if not value:
        if is_loopback(host):
            return b""
        raise ValueError(
            f"{host} is not this machine alone: set {SECRET_VARIABLE} or cluster.secret_file, to the same on all nodes"
        )
    if len(value.encode()) < MIN_SECRET_BYTES:
        raise ValueError(f"{source} has {len(value.encode())} bytes: expected at least {MIN_SECRET_BYTES}")
    return value.encode()


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is one of this machine's loopback interface. Raises ValueError for no address."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(f"{host}: {error.strerror}") from None
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)
