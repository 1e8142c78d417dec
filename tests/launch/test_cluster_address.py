"""Addresses as people and files give them, and when a secret is needed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from launch.cluster_address import format_address, is_loopback, parse_address, read_secret, write_address
from launch.config import ClusterSection


@pytest.mark.parametrize(
    ("text", "expected"), [("10.0.0.1:0", ("10.0.0.1", 0)), ("node7:65535", ("node7", 65535)), ("[::1]:5", ("::1", 5))]
)
def test_addresses_go_there_and_back(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text, "here") == expected
    assert format_address(*expected) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:x", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused_by_its_source(text: str) -> None:
    with pytest.raises(ValueError, match=f"--controller = '{text}': expected HOST:PORT, or a file that holds it"):
        parse_address(text, "--controller")


def test_an_address_file_is_this_users_alone(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("what was there before")
    write_address(file, "127.0.0.1:77")
    assert parse_address(str(file), "here") == ("127.0.0.1", 77)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match="No such file"):
        parse_address(str(tmp_path / "missing"), "here")


def test_only_loopback_needs_no_secret(tmp_path: Path) -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    cluster = ClusterSection()
    assert read_secret(cluster, "127.0.0.1", {}) == b""
    with pytest.raises(ValueError, match="10.0.0.1 is not this machine alone: set LOCKSTEP_SECRET"):
        read_secret(cluster, "10.0.0.1", {})
    assert read_secret(cluster, "10.0.0.1", {"LOCKSTEP_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    with pytest.raises(ValueError, match="LOCKSTEP_SECRET has 5 bytes: expected at least 16"):
        read_secret(cluster, "10.0.0.1", {"LOCKSTEP_SECRET": "short"})
    file = tmp_path / "secret"
    file.write_text("fedcba9876543210\n")
    cluster = ClusterSection(secret_file=str(file))
    assert read_secret(cluster, "127.0.0.1", {}) == b"fedcba9876543210"
    file.unlink()
    with pytest.raises(ValueError, match="cluster.secret_file = .*: No such file"):
        read_secret(cluster, "10.0.0.1", {})
