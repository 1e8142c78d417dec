"""A shared-memory ring: one writer, up to 64 readers that each get every message, in order and checked.

The writer fills a record behind all readers and then stores its sequence number in the header; a reader copies the
record, verifies the copy and then stores how far it is. Whoever is killed at whatever instruction, the others see a
whole message or none. A side that waits gives way 50 times, then sleeps and is woken through a futex; it never sleeps
for longer than 50 ms without a look at whether the other side still lives.

    fd = create_segment("plans", capacity=1 << 20)
    writer = RingWriter(fd, "plans", ["rank 0", "rank 1"])
    subprocess.Popen(..., pass_fds=[fd])     # there: reader = RingReader(fd, index)
    writer.send(plan, timeout_s=1.0)         # there: plan = reader.receive(timeout_s=None)
"""

from runtime.ring_errors import (
    MessageTooLarge,
    ReaderDead,
    ReaderLagging,
    ReaderNotAttached,
    RingClosed,
    RingDamaged,
    RingError,
    RingTimeout,
    WriterDead,
)
from runtime.ring_layout import create_segment
from runtime.ring_reader import RingReader
from runtime.ring_writer import RingWriter

__all__ = [
    "MessageTooLarge",
    "ReaderDead",
    "ReaderLagging",
    "ReaderNotAttached",
    "RingClosed",
    "RingDamaged",
    "RingError",
    "RingReader",
    "RingTimeout",
    "RingWriter",
    "WriterDead",
    "create_segment",
]
