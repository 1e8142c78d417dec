"""Frames on the wire: a header of 36 bytes and the body, and the decoder that trusts none of it.

Little-endian: magic, version, kind, epoch, length, sequence number (1, 2, ...), checksum of the body, and last the
CRC-32 of the header itself. So a damaged length is noticed before anybody waits for that many bytes.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from runtime.checksum import checksum
from runtime.cluster.line_errors import FrameDamaged, FrameLost, FrameRepeated, FrameTooLarge, LineError

MAGIC = b"LSFR"
VERSION = 1
MAX_FRAME_BYTES = 4 << 20  # of a body, until a line is told otherwise

_FIELDS = struct.Struct("<4sHHIIQQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


@dataclass(frozen=True)
class Frame:
    """One message. `epoch` is 0 for what belongs to no epoch."""

    kind: int
    epoch: int
    body: bytes


def encode_header(kind: int, epoch: int, sequence: int, body: bytes | bytearray | memoryview) -> bytes:
    """The header that goes before `body`, which has at most 2**32 - 1 bytes."""
    fields = _FIELDS.pack(MAGIC, VERSION, kind, epoch, len(body), sequence, checksum(body, sequence))
    return fields + _CRC.pack(zlib.crc32(fields))


class FrameDecoder:
    """Bytes in any pieces to frames in order. After a fault nothing more is decoded: the same fault is raised again."""

    def __init__(self, peer: str, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.fault: LineError | None = None
        self._peer = peer
        self._buffer = bytearray()
        self._sequence = 0  # of the last frame

    @property
    def num_pending(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """All frames that are complete now. Those before a fault are returned; the next call raises it.

        Raises FrameDamaged, FrameTooLarge, FrameLost, FrameRepeated.
        """
        if self.fault is not None:
            raise self.fault
        self._buffer += data
        frames: list[Frame] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except LineError as fault:
            self.fault = fault
            self._buffer.clear()
            if not frames:
                raise
        return frames

    def _next(self) -> Frame | None:
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES:
            if buffer:
                self._check_start()
            return None
        _, _, kind, epoch, length, sequence, check = self._checked(bytes(buffer[:HEADER_BYTES]))
        end = HEADER_BYTES + length
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            body = bytes(view[HEADER_BYTES:end])
        found = checksum(body, sequence)
        if found != check:
            raise FrameDamaged(f"{self._peer}: frame {sequence} has checksum {found:#x}, expected {check:#x}")
        del buffer[:end]
        self._sequence = sequence
        return Frame(kind, epoch, body)

    def _checked(self, header: bytes) -> tuple[bytes, int, int, int, int, int, int]:
        """The fields of a header that is whole, of this version, next in order and not too long."""
        fields: tuple[bytes, int, int, int, int, int, int] = _FIELDS.unpack_from(header)
        magic, version, _, _, length, sequence, _ = fields
        if magic != MAGIC:
            self._check_start()
        if zlib.crc32(header[: _FIELDS.size]) != _CRC.unpack_from(header, _FIELDS.size)[0]:
            raise FrameDamaged(f"{self._peer}: the header after frame {self._sequence} is damaged")
        if version != VERSION:
            raise FrameDamaged(f"{self._peer}: frame of version {version}, expected {VERSION} ({magic!r})")
        expected = self._sequence + 1
        if sequence < expected:
            raise FrameRepeated(f"{self._peer}: frame {sequence} came again, expected {expected}")
        if sequence > expected:
            raise FrameLost(f"{self._peer}: frame {sequence} came, expected {expected}: {sequence - expected} are lost")
        if length > self.max_frame_bytes:
            raise FrameTooLarge(
                f"{self._peer}: frame {sequence} of {length} bytes, expected at most {self.max_frame_bytes}"
            )
        return fields

    def _check_start(self) -> None:
        start = bytes(self._buffer[: len(MAGIC)])
        if start != MAGIC[: len(start)]:
            raise FrameDamaged(f"{self._peer}: a frame begins with {start!r}, expected {MAGIC!r}")
