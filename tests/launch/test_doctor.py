"""Doctor on one node: stable ids, exit codes, and for each check something that makes it complain."""

from __future__ import annotations

import json
import socket
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from launch.cli import run_command
from launch.config import load_config
from launch.doctor import DoctorOptions, examine, run
from launch.doctor_model import Memory, check_files, check_memory, cpu_memory
from launch.doctor_network import check_bind, check_controller, check_environment, check_interface
from launch.doctor_node import check_processors, check_shm, within
from launch.doctor_ranks import check_rank_map, check_ranks
from launch.doctor_report import Finding, Status, blocking, from_json, ok, table, to_json, warning, worst
from launch.memory_need import MemoryNeed

IDS = [  # scripts rely on them: never renamed, only added to
    "version.python", "version.lockstep", "version.packages", "node.system", "node.shm", "node.files", "node.memlock",
    "node.processors", "node.clock", "accel.devices", "accel.rdma", "net.interface", "net.mtu", "net.name", "net.bind",
    "net.controller", "env.interfaces", "env.slow", "launch.ranks", "launch.map", "model.files", "model.tokenizer",
    "config.engine", "config.layout", "config.capacity", "memory.fit",
]
GIB = 1 << 30


def doctor(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    code = run_command(["doctor", "--json", "--address", "127.0.0.1", *args])
    return code, json.loads(capsys.readouterr().out)


def status_of(report: Any, id: str) -> Status:
    found: Status = next(check["status"] for check in report["checks"] if check["id"] == id)
    return found


def test_the_demo_is_fit_and_every_check_has_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys)
    assert code == 0, report
    assert [check["id"] for check in report["checks"]] == IDS
    assert set(report) == {"schema", "node", "status", "checks"}
    assert from_json(report["checks"])
    assert status_of(report, "memory.fit") == "ok"


@pytest.mark.parametrize(
    ("args", "id"),
    [
        (["--set", "parallel.tp=3"], "config.layout"),
        (["--set", "model.path=/nowhere"], "model.files"),
        (["--set", "draft.tokens=99"], "config.engine"),
        (["--memory-gib", "0.01"], "memory.fit"),
        (["--controller", "127.0.0.1:1"], "net.controller"),
        (["--set", "engine.thread=1"], "config.read"),
        (["--set", "cluster.bind=10.1.2.3:0"], "net.bind"),
    ],
)
def test_what_blocks_is_exit_code_1_and_named_by_its_id(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, args: list[str], id: str
) -> None:
    monkeypatch.delenv("LOCKSTEP_SECRET", raising=False)
    code, report = doctor(capsys, *args)
    assert code == 1
    assert report["status"] == "blocking"
    assert status_of(report, id) == "blocking"


@pytest.mark.parametrize("args", [["--weights", "float3"], ["--config", "/nowhere.toml"], ["--ranks-per-node", "5"]])
def test_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert run_command(["doctor", *args]) == 2
    assert capsys.readouterr().err.startswith("lockstep: error: ")


def test_a_check_that_fails_itself_keeps_no_other_from_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Finding:
        raise RuntimeError("no such\nthing")

    monkeypatch.setattr("launch.doctor.check_shm", fail)
    findings = examine(load_config(None), DoctorOptions(), {})
    broken = next(finding for finding in findings if finding.id == "node.shm")
    assert (broken.status, broken.found) == ("blocking", "the check itself failed: RuntimeError: no such thing")
    assert len(findings) == len(IDS)


@pytest.mark.parametrize(
    ("name", "memory_gib", "weights", "fits"),
    [
        ("2x8-h200", 140.4, "bfloat16", True), ("2x8-h200", 140.4, None, False), ("4x8-h100", 79.6, "bfloat16", True),
        ("4x8-h100", 79.6, None, False), ("ep72-decode", 140.4, None, True), ("ep72-decode", 79.6, None, False),
    ],
)
def test_the_examples_say_truly_whether_they_fit(
    root: Path, name: str, memory_gib: float, weights: str | None, fits: bool
) -> None:
    out = StringIO()
    options = DoctorOptions(
        config=root / "configs" / f"deepseek-r1-{name}.toml", memory_gib=memory_gib, weights=weights, json=True
    )
    run(options, {}, out)
    report = json.loads(out.getvalue())
    assert status_of(report, "memory.fit") == ("ok" if fits else "blocking")
    assert status_of(report, "config.layout") == "ok"


def need(kv: int, rest: int) -> MemoryNeed:
    return MemoryNeed(
        experts=rest, attention=0, other_weights=0, kv=kv, least_kv=GIB, tables=0, step=0, overhead=0
    )


def test_where_only_the_pages_are_too_many_their_number_is_named() -> None:
    memory = Memory(per_rank=100 * GIB, source="test")
    assert check_memory(need(kv=40 * GIB, rest=50 * GIB), memory).status == "ok"
    too_many = check_memory(need(kv=50 * GIB, rest=60 * GIB), memory)
    assert too_many.status == "blocking"
    assert f"kv_cache_bytes to at most {98 * GIB - 60 * GIB}" in too_many.advice
    assert "use more ranks" in check_memory(need(kv=50 * GIB, rest=98 * GIB), memory).advice
    assert check_memory(need(kv=1, rest=1), None).status == "skipped"


def test_memory_of_the_cpu_is_shared_by_the_ranks_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8192 kB\n")
    memory = cpu_memory(4, tmp_path / "meminfo")
    assert memory is not None
    assert memory.per_rank == 2 << 20


def test_files_that_are_cut_or_missing(tmp_path: Path, minnow: Path) -> None:
    whole = (minnow / "model.safetensors").read_bytes()
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(whole)
    assert check_files(tmp_path).status == "ok"
    path.write_bytes(whole[:-1])
    assert f"{len(whole) - 1} bytes, expected {len(whole)}" in check_files(tmp_path).found
    path.write_bytes(b"short")
    assert "no header" in check_files(tmp_path).found
    path.write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": path.name, "b": "model-00002-of-00002.safetensors"}}))
    assert check_files(tmp_path).found.endswith("missing model-00002-of-00002.safetensors")
    index.write_text("{}")
    assert "cannot be read" in check_files(tmp_path).found


def test_names_of_interfaces_are_read_as_nccl_reads_them() -> None:
    def status(**env: str) -> Status:
        return next(check.status for check in check_environment(env) if check.id == "env.interfaces")

    assert status(NCCL_SOCKET_IFNAME="lo") == status(NCCL_SOCKET_IFNAME="=lo,eth") == "ok"
    assert status(NCCL_SOCKET_IFNAME="^docker") == "ok"
    assert status(NCCL_SOCKET_IFNAME="=l") == status(GLOO_SOCKET_IFNAME="nosuch0") == "blocking"


def test_settings_that_slow_down_or_do_nothing_are_warned_of() -> None:
    found = {check.id: check for check in check_environment({"NCCL_IB_DISABLE": "1", "PROMETHEUS_MULTIPROC_DIR": "/x"})}
    assert found["env.slow"].status == found["env.ignored"].status == "warning"
    assert "NCCL_IB_DISABLE = 1" in found["env.slow"].found


def test_addresses_and_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert check_controller(address).status == "ok"
        assert check_bind(address, has_secret=False).status == "warning"  # taken: by the controller, or by another
    assert check_controller(address).status == "blocking"
    assert check_bind("127.0.0.1", has_secret=False).status == "blocking"
    assert check_bind("0.0.0.0:0", has_secret=False).status == "blocking"
    assert check_bind("127.0.0.1:0", has_secret=True, num_nodes=1).status == "ok"
    assert check_bind("127.0.0.1:0", has_secret=True, num_nodes=2).status == "warning"
    assert [check.status for check in check_interface("203.0.113.9", 2)] == ["blocking"]
    assert next(iter(check_interface("127.0.0.1", 2))).status == "blocking"


def test_ranks_and_their_map() -> None:
    assert check_ranks({}, 2).status == "skipped"
    assert check_ranks({"RANK": "1", "WORLD_SIZE": "2"}, 2).found == "rank 1 of 2, node 0, from manual"
    assert "WORLD_SIZE = 2" in check_ranks({"RANK": "1", "WORLD_SIZE": "2"}, 4).found
    config = load_config(None, ["parallel.dp=3", "parallel.tp=2"])
    assert check_rank_map(config, 2).found == "node 0: [r0-1], dp 0; node 1: [r2-3], dp 1; node 2: [r4-5], dp 2"
    assert check_rank_map(config, 3).status == "warning"


def test_limits_of_the_node(tmp_path: Path) -> None:
    assert check_shm(tmp_path / "nowhere").status == "warning"
    assert check_processors(1000, 1).status == "warning"


@pytest.mark.parametrize(
    ("found", "bounds", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True), ("2.14.0", ">=2.11,<2.14", False), ("2.9", ">=2.11", False),
        ("1.0", ">=1.0", True), ("5.24.0", "==5.24.0", True), ("5.24.1", "==5.24.0", False), ("3", "", True),
    ],
)
def test_versions_within_bounds(found: str, bounds: str, fits: bool) -> None:
    assert within(found, bounds) is fits


def test_the_table_shows_advice_below_and_counts_at_the_end() -> None:
    findings = [ok("a.b", "fine"), warning("net.mtu", "1500", "raise it"), blocking("x", "one\ntwo", "")]
    assert table(findings) == (
        "ok        a.b      fine\n"
        "warning   net.mtu  1500\n"
        "                   -> raise it\n"
        "blocking  x        one\n"
        "                   two\n"
        "1 ok, 1 warning, 1 blocking"
    )
    assert worst(findings) == "blocking"
    assert from_json(json.loads(to_json(findings, node="n"))["checks"]) == findings


@pytest.mark.parametrize("values", [{}, [{}], [{"id": "a", "status": "fine", "found": "", "advice": ""}], ["x"]])
def test_reports_of_another_form_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        from_json(values)


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--help"]) == 0
    assert "something blocks" in " ".join(capsys.readouterr().out.split())
