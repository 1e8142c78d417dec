"""The same prompts through torchrun, Slurm and Ray as people type them, against one process: are the ids equal?

    python -m tests.launch.launchers --launcher torchrun --nodes 2 --per-node 2 --tp 2 --prompts 24
    python -m tests.launch.launchers --launcher torchrun --nodes 4 --namespaces     within delaynet: hosts lk0, lk1, ...

Slurm needs a cluster (SLURM_CONF) whose nodes see this checkout; Ray is started here with as many nodes as asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"
LIMIT_S = 400.0
Ids = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`nodes` hosts of `per_node` ranks, in dp groups of `tp`."""

    nodes: int
    per_node: int
    tp: int = 1
    more: tuple[str, ...] = ()  # further section.key=value

    @property
    def settings(self) -> list[str]:
        values = (f"parallel.dp={self.nodes * self.per_node // self.tp}", f"parallel.tp={self.tp}", *self.more)
        return [part for value in values for part in ("--set", value)]


def write_prompts(folder: Path, count: int, max_tokens: int) -> Path:
    """The first shared prompts, alternately greedy and seeded."""
    path = folder / "prompts.jsonl"
    with PROMPTS.open(encoding="utf-8") as rows, path.open("w", encoding="utf-8") as out:
        for index, row in enumerate(islice(rows, count)):
            sampling = {"temperature": 0.8, "seed": index} if index % 2 else {}
            prompt = json.loads(row)["prompt"]
            out.write(json.dumps({"id": str(index), "prompt": prompt, "max_tokens": max_tokens, **sampling}) + "\n")
    return path


def one_process(prompts: Path) -> Ids:
    return _ids(_run([sys.executable, "-m", "launch.cli", "generate", "--json", "--prompts", str(prompts)]))


def through_torchrun(shape: Shape, prompts: Path, *, namespaces: bool = False) -> Ids:
    """A controller, and a torchrun for each node; in namespaces hosts are 10.77.0.1, 10.77.0.2, ..."""
    first = "10.77.0.1" if namespaces else "127.0.0.1"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        address = Path(folder) / "address"
        port = _free_port()
        environment = _environment() | {"LOCKSTEP_SECRET": secrets.token_hex(16)}
        controller = stack.enter_context(_process(
            [*_host(0, namespaces), sys.executable, "-m", "launch.cli", "controller", *shape.settings, "--json",
             "--listen", f"{first}:0", "--address-file", str(address), "--prompts", str(prompts)], environment,
        ))
        _wait_for(address, controller)
        for node in range(shape.nodes):
            stack.enter_context(_process([
                *_host(node, namespaces), sys.executable, "-m", "torch.distributed.run", "--nnodes", str(shape.nodes),
                "--nproc-per-node", str(shape.per_node), "--node-rank", str(node), "--master-addr", first,
                "--master-port", str(port), "-m", "launch.worker", *shape.settings, "--controller",
                address.read_text().strip(),
            ], environment))
        output, _ = controller.communicate(timeout=LIMIT_S)
        assert controller.returncode == 0, controller.returncode
        return _ids(output)


def through_slurm(shape: Shape, prompts: Path) -> Ids:
    """A batch job on the cluster of SLURM_CONF."""
    with tempfile.TemporaryDirectory() as folder:
        script, log = Path(folder) / "job.sbatch", Path(folder) / "log"
        script.write_text(_run([
            sys.executable, "-m", "launch.cli", "slurm", *shape.settings, "--ranks-per-node", str(shape.per_node),
            "--output", str(log),
        ]))
        _run(["sbatch", "--wait", str(script), "--json", "--prompts", str(prompts)])
        return _ids(log.read_text())


def through_ray(shape: Shape, prompts: Path) -> Ids:
    """A Ray cluster with `shape.nodes` nodes on this machine."""
    from ray.cluster_utils import Cluster

    from launch.cli import run_command

    node = {"num_cpus": shape.per_node, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(shape.nodes - 1):
            cluster.add_node(**node)
        with tempfile.TemporaryFile("w+") as output, _standard_output_to(output.fileno()):
            code = run_command([
                "ray", "--ray-address", cluster.address, "--host", "127.0.0.1", *shape.settings, "--json", "--prompts",
                str(prompts),
            ])
            assert code == 0, code
            sys.stdout.flush()
            output.seek(0)
            return _ids(output.read())
    finally:
        cluster.shutdown()


def _ids(output: str) -> Ids:
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["id"]: row["token_ids"] for row in rows if "id" in row}


def _host(node: int, namespaces: bool) -> list[str]:
    return ["ip", "netns", "exec", f"lk{node}"] if namespaces else []


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S
    )
    return done.stdout


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Ended, if it does not end by itself within seconds, when the block is left."""
    process = subprocess.Popen(command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_for(address: Path, controller: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT_S
    while not address.exists():
        assert controller.poll() is None, controller.returncode
        assert time.monotonic() < until
        time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _standard_output_to(fd: int) -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(fd, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=("torchrun", "slurm", "ray"), required=True)
    for name, default in (("nodes", 2), ("per-node", 1), ("tp", 1), ("prompts", 24), ("max-tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--namespaces", action="store_true")
    options = parser.parse_args()
    shape = Shape(nodes=options.nodes, per_node=options.per_node, tp=options.tp, more=tuple(options.set))
    with tempfile.TemporaryDirectory() as folder:
        prompts = write_prompts(Path(folder), options.prompts, options.max_tokens)
        expected = one_process(prompts)
        if options.launcher == "torchrun":
            found = through_torchrun(shape, prompts, namespaces=options.namespaces)
        else:
            found = (through_slurm if options.launcher == "slurm" else through_ray)(shape, prompts)
    differing = sorted(key for key in expected if list(found.get(key, ())) != list(expected[key]))
    sys.stdout.write(json.dumps({
        "launcher": options.launcher, "nodes": shape.nodes, "per_node": shape.per_node, "tp": shape.tp,
        "more": shape.more, "prompts": len(expected), "differing": differing,
    }) + "\n")
    return int(bool(differing) or not expected)


if __name__ == "__main__":
    sys.exit(main())
