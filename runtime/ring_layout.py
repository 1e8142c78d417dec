"""The memory of a ring: what lies where, how a segment is made, and the header that readers check."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.liveness import ProcessId
from runtime.ring_errors import RingDamaged

MAGIC = b"LKSTRING"
VERSION = 1
MAX_READERS = 64
MAX_CAPACITY = 1 << 30  # bytes; a position must not advance by 2**32 unseen: a sleeper's futex sees 32 bits of it
ALIGN = 32  # records start at multiples, so that a record's header never wraps around

# Offsets in bytes. What one side writes on every message has a cache line of its own.
FIXED = struct.Struct("=8sIIQQQQ")  # magic, version, readers, data bytes, capacity, writer's pid, its start time
FIXED_CRC = struct.Struct("=I")  # CRC-32 of the fixed fields after the magic
NAME, NAME_BYTES = 64, 64
SEQUENCE = 128  # u64: messages published. Stored last: what it counts is complete
WRITER_STATE = 192  # u64
WRITER_WAITS_FOR = 200  # u8 in a u64: 1 + index of the reader the writer sleeps for, or 0
READER_SLEEPS = 256  # u8[MAX_READERS], looked at eight in a word
SLOTS, SLOT_BYTES = 4096, 128  # one for each reader
SLOT_POSITION, SLOT_STATE, SLOT_PID, SLOT_START, SLOT_NAME = 0, 64, 72, 80, 88  # position: u64, bytes taken so far
SLOT_NAME_BYTES = SLOT_BYTES - SLOT_NAME
DATA = SLOTS + MAX_READERS * SLOT_BYTES
RECORD_BYTES = 32  # u64: sequence number, length, checksum, 0; the message follows
ABSENT, OPEN, CLOSED = 0, 1, 2  # states of an end
assert RECORD_BYTES == ALIGN


@dataclass(frozen=True)
class Header:
    """What a segment says of itself."""

    name: str
    num_readers: int
    writer: ProcessId


def create_segment(name: str, capacity: int) -> int:
    """A file descriptor of fresh memory for one ring whose messages have up to `capacity` bytes.

    It has no name in any directory, so nothing can be left behind: children inherit it (`pass_fds`), others open
    /proc/PID/fd/FD. Both ends keep a mapping of their own; the caller closes the descriptor.
    """
    if not 0 < capacity <= MAX_CAPACITY:
        raise ValueError(f"capacity of ring {name!r} = {capacity} bytes: expected 1..{MAX_CAPACITY}")
    size = DATA + record_bytes(capacity)
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return os.dup(file.fileno())
    import fcntl

    fd = os.memfd_create(f"lockstep-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)  # memory that is short is an OSError now, not a SIGBUS at the first wrap
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def record_bytes(length: int) -> int:
    """What a message of `length` bytes takes in the ring."""
    return RECORD_BYTES + -(-length // ALIGN) * ALIGN


def slot(index: int) -> int:
    """Offset of a reader's slot."""
    return SLOTS + index * SLOT_BYTES


def data_bytes(size: int) -> int:
    """What is left for records in a segment of `size` bytes."""
    if size <= DATA + RECORD_BYTES or size % ALIGN:
        raise ValueError(f"a segment of {size} bytes was not made by create_segment")
    return size - DATA


def write_header(memory: mmap.mmap, name: str, readers: Sequence[str]) -> None:
    """Initialise a fresh segment; from here on readers may attach."""
    if memory[: FIXED.size] != bytes(FIXED.size):
        raise ValueError(f"ring {name!r}: the segment has had a writer already; every ring needs a fresh one")
    if not 1 <= len(readers) <= MAX_READERS:
        raise ValueError(f"ring {name!r} has {len(readers)} readers: expected 1..{MAX_READERS}")
    memory[NAME : NAME + NAME_BYTES] = _padded(name, NAME_BYTES)
    for index, reader in enumerate(readers):
        memory[slot(index) + SLOT_NAME : slot(index) + SLOT_BYTES] = _padded(reader, SLOT_NAME_BYTES)
    me, room = ProcessId.of(os.getpid()), data_bytes(len(memory))
    FIXED.pack_into(memory, 0, bytes(8), VERSION, len(readers), room, room - RECORD_BYTES, me.pid, me.start)
    FIXED_CRC.pack_into(memory, FIXED.size, _fixed_crc(memory))
    memory[: len(MAGIC)] = MAGIC  # last: what it stands before is complete


def read_header(memory: mmap.mmap) -> Header:
    """Raises RingDamaged where it is not a header of this version that fits the memory."""
    magic, version, num_readers, room, capacity, pid, start = FIXED.unpack_from(memory, 0)
    name = name_at(memory, NAME, NAME_BYTES)
    if magic != MAGIC:
        raise RingDamaged(f"no ring: magic {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise RingDamaged(f"ring {name!r} has version {version}, expected {VERSION}")
    (crc,) = FIXED_CRC.unpack_from(memory, FIXED.size)
    if crc != _fixed_crc(memory):
        raise RingDamaged(f"ring {name!r}: header has checksum {_fixed_crc(memory):#x}, expected {crc:#x}")
    if (room, capacity) != (data_bytes(len(memory)), data_bytes(len(memory)) - RECORD_BYTES):
        raise RingDamaged(f"ring {name!r}: header speaks of {room} data bytes, mapped are {data_bytes(len(memory))}")
    return Header(name, num_readers, ProcessId(pid, start))


def name_at(memory: mmap.mmap, offset: int, size: int) -> str:
    """A name field."""
    return memory[offset : offset + size].rstrip(b"\0").decode(errors="replace")


def _fixed_crc(memory: mmap.mmap) -> int:
    return zlib.crc32(memory[len(MAGIC) : FIXED.size])


def _padded(name: str, size: int) -> bytes:
    encoded = name.encode()
    if not 1 <= len(encoded) <= size:
        raise ValueError(f"name {name!r} has {len(encoded)} bytes: expected 1..{size}")
    return encoded.ljust(size, b"\0")
