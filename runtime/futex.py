"""Sleeping until a 32-bit word of shared memory changes: a futex on Linux, short naps elsewhere."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from typing import Protocol

FUTEX_WAIT, FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
EVERYBODY = 0x7FFFFFFF
# The C library has no wrapper, and the number of the call is the architecture's.
SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
SHORTEST_NAP_S, LONGEST_NAP_S = 50e-6, 5e-3


class Sleeper(Protocol):
    """How one side of a ring sleeps. Addresses are those of an aligned 32-bit word that stays mapped."""

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        """Return once the word is not `seen`, when woken, or after `timeout_s`: the caller looks again in any case."""

    def wake(self, address: int) -> None:
        """Wake everybody who sleeps on this word."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The kernel compares the word and queues the sleeper in one step, so no wake-up is lost in between."""

    def __init__(self) -> None:
        number = futex_number()
        if number is None:
            raise ValueError(f"no futex on {sys.platform} / {platform.machine()}: use Naps")
        self._number = number
        # CDLL gives up the interpreter lock during the call: other threads of a sleeping reader run on.
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = [
            ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_uint32,
        ]  # fmt: skip

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        whole = int(timeout_s)
        timeout = _Timespec(whole, int((timeout_s - whole) * 1e9))
        # EAGAIN (already changed), EINTR and ETIMEDOUT need no telling apart: the caller looks at the word again.
        self._syscall(self._number, address, FUTEX_WAIT, seen, ctypes.addressof(timeout), None, 0)

    def wake(self, address: int) -> None:
        self._syscall(self._number, address, FUTEX_WAKE, EVERYBODY, None, None, 0)


class Naps:
    """Without a futex: looks again after naps that grow to 5 ms, and nobody has to wake it."""

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        word = ctypes.c_uint32.from_address(address)
        deadline, nap = time.monotonic() + timeout_s, SHORTEST_NAP_S
        while word.value == seen and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_NAP_S)

    def wake(self, address: int) -> None:
        pass


def futex_number() -> int | None:
    """The number of the futex call on this machine, or None where there is none that we know."""
    return SYSCALL_NUMBERS.get(platform.machine()) if hasattr(os, "memfd_create") else None


def best_sleeper() -> Sleeper:
    """A futex where there is one."""
    return Futex() if futex_number() is not None else Naps()
