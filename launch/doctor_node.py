"""Checks of one node: versions, shared memory, limits, processors, clock, accelerators and their network."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from launch.doctor_report import Finding, blocking, ok, skipped, warning
from launch.network import accelerators, rdma_devices

GIB = 1 << 30
MIN_PYTHON = (3, 11)
LEAST_SHM = GIB  # NCCL and torch keep their buffers there; containers often have 64 MiB
LEAST_FILES_PER_RANK = 256
_STA_UNSYNC, _TIME_ERROR = 0x40, 5  # sys/timex.h
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(;.*)?")
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([\d.]+)")


def check_versions() -> Iterator[Finding]:
    """Python, and every package that the distribution names, within its bounds."""
    found = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        yield blocking("version.python", found, f"use Python {'.'.join(map(str, MIN_PYTHON))} or later")
    else:
        yield ok("version.python", found)
    try:
        wanted = [match for text in requires("lockstep") or () if (match := _REQUIREMENT.fullmatch(text))]
    except PackageNotFoundError:
        yield warning("version.lockstep", "run from a checkout, not installed", "`pip install -e .` names its versions")
        wanted = [match for name in ("torch", "numpy", "msgpack") if (match := _REQUIREMENT.fullmatch(name))]
    else:
        yield ok("version.lockstep", version("lockstep"))
    yield _check_packages([(match[1], match[2].strip()) for match in wanted if not match[3]])


def _check_packages(wanted: list[tuple[str, str]]) -> Finding:
    wrong, fine = [], []
    for name, bounds in wanted:
        try:
            found = version(name)
        except PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        if within(found, bounds):
            fine.append(f"{name} {found}")
        else:
            wrong.append(f"{name} {found}, expected {bounds}")
    if wrong:
        return blocking("version.packages", "; ".join(wrong), "install the versions that pyproject.toml names")
    return ok("version.packages", ", ".join(fine))


def within(found: str, bounds: str) -> bool:
    """Whether a version satisfies bounds such as `>=2.11,<2.14`; what is not a number in it does not count."""
    number = _numbers(found)
    for operator, text in _BOUND.findall(bounds):
        limit = _numbers(text)
        width = max(len(number), len(limit))
        a, b = (value + (0,) * (width - len(value)) for value in (number, limit))
        if not {">=": a >= b, "<=": a <= b, "==": a[: len(limit)] == limit, "<": a < b, ">": a > b}[operator]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def check_system() -> Finding:
    """What the plan rings and relays are made of."""
    if sys.platform != "linux":
        return blocking("node.system", platform.system(), "ranks need Linux: memfd, futex, abstract Unix sockets")
    try:
        os.close(os.memfd_create("lockstep-doctor"))
    except OSError as error:
        return blocking("node.system", f"memfd_create: {error.strerror}", "allow it in the container's seccomp profile")
    return ok("node.system", f"{platform.system()} {platform.release()} {platform.machine()}")


def check_shm(folder: Path = Path("/dev/shm")) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return warning("node.shm", f"{folder}: {error.strerror}", "mount a tmpfs there (docker: --shm-size=16g)")
    found = f"{folder}: {usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f}"
    if usage.free < LEAST_SHM:
        return warning("node.shm", found, "NCCL and torch keep buffers there: docker --shm-size=16g, or --ipc=host")
    return ok("node.shm", found)


def check_open_files(local_ranks: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = LEAST_FILES_PER_RANK * max(local_ranks, 1) + 1024
    found = f"ulimit -n is {_limit(soft)} (hard {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < least:
        return warning("node.files", found, f"raise it to {least}: a rank keeps a connection to each other one")
    return ok("node.files", found)


def check_memlock() -> Finding:
    """Only RDMA pins memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"ulimit -l is {_limit(soft, 1024)} KiB" if soft != resource.RLIM_INFINITY else "ulimit -l is unlimited"
    if soft != resource.RLIM_INFINITY and rdma_devices():
        return blocking("node.memlock", found, "RDMA pins its buffers: docker --ulimit memlock=-1, or limits.conf")
    return ok("node.memlock", found)


def check_processors(num_threads: int, local_ranks: int) -> Finding:
    available = len(os.sched_getaffinity(0))
    wanted = num_threads * max(local_ranks, 1)
    found = f"{available} cores for {local_ranks} ranks of {num_threads} threads"
    if wanted > available:
        return warning(
            "node.processors", found, "threads that share a core wait for each other: fewer ranks or engine.threads"
        )
    return ok("node.processors", found)


def check_clock() -> Finding:
    """Whether something keeps the clock right; how far clocks are apart is told by a check of the whole launch."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, modes = 0: only read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError) as error:
        return skipped("node.clock", f"adjtimex: {error}")
    if state < 0:
        return skipped("node.clock", f"adjtimex: {os.strerror(ctypes.get_errno())}")
    status = ctypes.c_int.from_buffer(buffer, 40 if ctypes.sizeof(ctypes.c_long) == 8 else 20).value
    if state == _TIME_ERROR or status & _STA_UNSYNC:
        return warning("node.clock", "not synchronised", "run chronyd or systemd-timesyncd, or logs get out of order")
    return ok("node.clock", "synchronised")


def check_rdma(device: str, num_nodes: int) -> Finding:
    """InfiniBand or RoCE between accelerators of several nodes."""
    found = rdma_devices()
    if device.startswith("cpu") or num_nodes < 2:
        return skipped("accel.rdma", f"not needed here; {', '.join(found) or 'no device'}")
    if not found:
        return warning("accel.rdma", "no InfiniBand or RoCE device", "NCCL falls back to TCP: many times slower")
    inactive = [line for line in found if "ACTIVE" not in line]
    if inactive:
        return warning("accel.rdma", "; ".join(inactive), "check cable and switch, or name the others in NCCL_IB_HCA")
    if not Path("/sys/module/nvidia_peermem").exists() and accelerators():
        return warning("accel.rdma", "; ".join(found), "load nvidia_peermem, or data goes through the host's memory")
    return ok("accel.rdma", "; ".join(found))


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)
