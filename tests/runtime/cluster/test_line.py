"""Lines: what is sent comes once, whole and in order, and every fault has its own name and names the peer."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cluster.frames import HEADER_BYTES, FrameDecoder, encode_header
from runtime.cluster.line import (
    Frame,
    FrameDamaged,
    FrameLine,
    FrameLost,
    FrameRepeated,
    FrameTooLarge,
    LineClosed,
    LineCongested,
    LineError,
    LineTimeout,
    connect_line,
)
from tests.runtime.cluster.line_pair import SECRET, SOON_S, bare_peer, line_pair, listening

FRAMES = [Frame(3, 1, b"first"), Frame(4, 0, b""), Frame(5, 2, bytes(range(256)) * 200), Frame(6, 2, b"last")]


def wire(frames: list[Frame]) -> list[bytes]:
    return [encode_header(f.kind, f.epoch, n, f.body) + f.body for n, f in enumerate(frames, 1)]


def collect(line: FrameLine, num_frames: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < num_frames:
        frames += line.wait(SOON_S)
    return frames


def test_frames_arrive_in_both_directions() -> None:
    with line_pair("relay") as (accepted, connected):
        for frame in FRAMES:
            accepted.send(frame.kind, frame.epoch, frame.body)
            connected.send(frame.kind, frame.epoch, bytearray(frame.body))
        assert collect(connected, len(FRAMES)) == FRAMES
        assert collect(accepted, len(FRAMES)) == FRAMES
        assert accepted.peer.startswith("relay at 127.0.0.1:")
        assert connected.peer.startswith("controller at 127.0.0.1:")


def test_nothing_waits_and_small_messages_leave_at_once() -> None:
    with line_pair() as (accepted, connected):
        assert accepted.receive() == []
        assert accepted.flush()
        assert not accepted.wants_write
        for line in (accepted, connected):
            with socket.socket(fileno=socket.dup(line.fileno())) as sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        with pytest.raises(LineTimeout, match="nothing came within 0.01 s"):
            accepted.wait(0.01)


def test_what_the_system_does_not_take_is_queued_and_flushed() -> None:
    body = bytes(range(251)) * 80_000  # 20 MB
    with line_pair() as (accepted, connected):
        connected.max_frame_bytes = len(body)
        sent = bytearray(body)
        accepted.send(7, 1, sent)
        sent[:] = bytes(len(sent))  # the caller's again
        assert accepted.wants_write
        accepted.send(8, 1, b"behind", limited=False)
        frames: list[Frame] = []
        while len(frames) < 2:
            accepted.flush()
            frames += connected.receive()
        assert frames == [Frame(7, 1, body), Frame(8, 1, b"behind")]
        assert not accepted.wants_write


def test_a_slow_reader_is_a_named_error_and_loses_nothing() -> None:
    with line_pair() as (accepted, connected):
        accepted.max_queued_bytes = 1 << 20
        body, sent = bytes(300_000), list[int]()

        def send_on() -> None:
            while True:
                accepted.send(1, 1, body)
                sent.append(1)

        with pytest.raises(LineCongested, match=r"keeper at 127.* does not take its frames: \d+ bytes wait") as fault:
            send_on()
        assert str(1 << 20) in str(fault.value)
        assert accepted.queued_bytes <= 1 << 20
        received = 0
        while received < len(sent):
            accepted.flush()
            received += len(connected.receive())
        accepted.send(1, 1, b"and on")  # the refused frame took no number
        assert connected.wait(SOON_S) == [Frame(1, 1, b"and on")]


def test_threads_may_send_at_once() -> None:
    with line_pair() as (accepted, connected):
        def send(kind: int) -> None:
            for number in range(300):
                connected.send(kind, 1, number.to_bytes(4, "little") * 50)

        threads = [threading.Thread(target=send, args=(kind,)) for kind in range(3)]
        for thread in threads:
            thread.start()
        frames = collect(accepted, 900)
        for thread in threads:
            thread.join()
        for kind in range(3):
            assert [int.from_bytes(f.body[:4], "little") for f in frames if f.kind == kind] == list(range(300))


def test_a_closed_peer_is_told_after_what_it_sent() -> None:
    with line_pair() as (accepted, connected):
        connected.send(1, 1, b"farewell")
        connected.close()
        assert accepted.wait(SOON_S) == [Frame(1, 1, b"farewell")]
        for _ in range(2):
            with pytest.raises(LineClosed, match="keeper at 127.* has closed the line"):
                accepted.wait(SOON_S)
        with pytest.raises(LineClosed, match="at this end"):
            connected.send(1, 1, b"")
        with pytest.raises(LineClosed, match="at this end"):
            connected.receive()


def test_what_came_before_a_failed_send_is_still_read() -> None:
    with bare_peer() as (line, peer):
        peer.sendall(b"".join(wire(FRAMES[:2])))
        peer.close()
        with pytest.raises(LineClosed):
            line.send(1, 1, b"too late")
        assert line.receive() == FRAMES[:2]
        with pytest.raises(LineClosed):
            line.receive()


def test_an_end_inside_a_frame_says_so() -> None:
    with bare_peer() as (line, peer):
        peer.sendall(wire(FRAMES)[0][:-1])
        peer.close()
        with pytest.raises(LineClosed, match="within a frame, 40 bytes of it"):
            line.wait(SOON_S)


def broken_body(frames: list[bytes]) -> bytes:
    return frames[0] + frames[1] + frames[2][:-7] + b"\xff" + frames[2][-6:]


def broken_length(frames: list[bytes]) -> bytes:
    damaged = bytearray(frames[1])
    damaged[14] ^= 0x40  # would wait for 4 MB more
    return frames[0] + damaged


def other_version(frames: list[bytes]) -> bytes:
    damaged = bytearray(frames[1])
    damaged[4] = 9
    damaged[32:36] = zlib.crc32(damaged[:32]).to_bytes(4, "little")
    return frames[0] + damaged


def too_large(frames: list[bytes]) -> bytes:
    header = bytearray(frames[1][:HEADER_BYTES])
    header[12:16] = (1 << 31).to_bytes(4, "little")
    header[32:36] = zlib.crc32(header[:32]).to_bytes(4, "little")
    return frames[0] + header


FAULTS: list[tuple[Callable[[list[bytes]], bytes], int, type[LineError], str]] = [  # how, frames before it, what
    (lambda frames: frames[0] + frames[2], 1, FrameLost, "frame 3 came, expected 2: 1 are lost"),
    (lambda frames: frames[0] + frames[0], 1, FrameRepeated, "frame 1 came again, expected 2"),
    (lambda frames: frames[1] + frames[0], 0, FrameLost, "frame 2 came, expected 1"),
    (lambda frames: frames[0] + b"GET / HTTP/1.1", 1, FrameDamaged, "begins with b'GET '"),
    (broken_body, 2, FrameDamaged, "frame 3 has checksum"),
    (broken_length, 1, FrameDamaged, "header after frame 1 is damaged"),
    (other_version, 1, FrameDamaged, "version 9, expected 1"),
    (too_large, 1, FrameTooLarge, "frame 2 of 2147483648 bytes, expected at most 4194304"),
]


@pytest.mark.parametrize(("make", "num_good", "kind", "text"), FAULTS)
def test_faults_have_names(
    make: Callable[[list[bytes]], bytes], num_good: int, kind: type[LineError], text: str
) -> None:
    data = make(wire(FRAMES))
    with bare_peer() as (line, peer):
        peer.sendall(data)
        frames: list[Frame] = []

        def receive_on() -> None:
            while True:
                frames.extend(line.receive())

        for _ in range(2):  # and stay
            with pytest.raises(kind, match=text) as fault:
                receive_on()
            assert str(fault.value).startswith("keeper at nowhere: ")
        assert frames == FRAMES[: len(frames)]
        assert len(frames) == num_good


def test_nothing_is_kept_for_a_frame_that_is_too_long() -> None:
    decoder = FrameDecoder("peer", max_frame_bytes=10)
    with pytest.raises(FrameTooLarge):
        decoder.feed(encode_header(1, 1, 1, bytes(11)))
    assert decoder.num_pending == 0


def test_frames_of_older_epochs_are_dropped_by_number() -> None:
    with line_pair() as (accepted, connected):
        accepted.oldest_epoch = 5
        for epoch in (4, 5, 0, 6, 1):
            connected.send(1, epoch, b"")
        assert [frame.epoch for frame in collect(accepted, 3)] == [5, 0, 6]
        with pytest.raises(LineTimeout):
            accepted.wait(0.05)
        assert accepted.num_stale == 2


def test_nobody_listens() -> None:
    with listening() as listener:
        host, port = listener.getsockname()
    with pytest.raises(LineTimeout, match=f"nobody answers at {host}:{port} within 0.05 s"):
        connect_line(host, port, secret=SECRET, role="keeper", timeout_s=0.05)


def test_a_host_without_an_address_is_the_users_mistake() -> None:
    with pytest.raises(ValueError, match="no-such-host.invalid"):
        connect_line("no-such-host.invalid", 1, secret=SECRET, role="keeper", timeout_s=0.05)


frames_strategy = st.lists(
    st.builds(Frame, st.integers(0, 65535), st.integers(0, 2**32 - 1), st.binary(max_size=80)), max_size=6
)


@settings(max_examples=150, deadline=None)
@given(frames=frames_strategy, cuts=st.lists(st.integers(0, 500), max_size=8))
def test_any_split_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    data = b"".join(wire(frames))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder, found = FrameDecoder("peer"), list[Frame]()
    for start, end in zip(edges, edges[1:], strict=False):
        found += decoder.feed(data[start:end])
    assert found == frames
    assert decoder.num_pending == 0


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.binary(max_size=120), min_size=1, max_size=5))
def test_random_bytes_are_refused_or_awaited(pieces: list[bytes]) -> None:
    """No frame ever comes out of noise, nothing but named errors, and no more is kept than was fed."""
    decoder = FrameDecoder("peer")
    try:
        for piece in pieces:
            assert decoder.feed(piece) == []
    except LineError:
        assert decoder.num_pending == 0
    assert decoder.num_pending <= len(b"".join(pieces))


@settings(max_examples=250, deadline=None)
@given(frames=frames_strategy.filter(bool), at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(frames: list[Frame], at: int, flip: int) -> None:
    data = bytearray(b"".join(wire(frames)))
    at %= len(data)
    data[at] ^= flip
    decoder, found = FrameDecoder("peer"), list[Frame]()
    with pytest.raises(LineError):  # noqa: PT012  (frames before the fault come first)
        found += decoder.feed(data)
        found += decoder.feed(b"")
    assert found == frames[: len(found)]
    assert len(found) < len(frames)
