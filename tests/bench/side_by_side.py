"""Lockstep beside its peers on one checkpoint, in one run: every engine in turn, twice, and a table of ratios.

    python tests/bench/side_by_side.py --model CKPT [--prompts succ] [--vllm-python VENV/bin/python] [--ranks]

With --ranks: one process with two threads, and two ranks with one thread each, in every layout.

CKPT is a DeepSeek-V3-format folder. transformers runs in this interpreter's environment, vLLM's CPU build in its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("engines.py")
RANKS = [
    ["--threads", "1"], ["--threads", "2"], ["--tp", "2"], ["--tp", "2", "--split", "on"], ["--dp", "2"],
    ["--dp", "2", "--split", "on"], ["--tp", "2", "--exchange", "torch"], ["--dp", "2", "--exchange", "torch"],
    ["--tp", "2", "--draft-tokens", "1"], ["--dp", "2", "--draft-tokens", "1"],
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--prompts", choices=("random", "succ"), default="random")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out-tokens", default="64")
    parser.add_argument("--reps", default="1", help="measurements of each figure in a round")
    parser.add_argument("--ranks", action="store_true", help="two cores' worth of ranks instead of one thread")
    args = parser.parse_args()
    runs: list[tuple[str, list[str]]] = [
        (sys.executable, ["lockstep"]), (sys.executable, ["lockstep", "--storage", "float32"]),
        (sys.executable, ["lockstep", "--draft-tokens", "1"]),
        (sys.executable, ["lockstep", "--draft-tokens", "1", "--storage", "float32"]),
        (sys.executable, ["transformers"]),
    ]
    if args.vllm_python:
        runs += [(args.vllm_python, ["vllm"]), (args.vllm_python, ["vllm", "--draft-tokens", "1"])]
        runs += [(args.vllm_python, ["vllm", "--compiled"])]
    if args.ranks:
        runs = [(sys.executable, ["lockstep", *extra]) for extra in RANKS]
        if args.vllm_python:
            runs.append((args.vllm_python, ["vllm", "--tp", "2"]))
    figures: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for python, extra in runs:
            command = [
                python, str(SCRIPT), *extra, "--model", str(args.model), "--prompts", args.prompts,
                "--batches", args.batches, "--out-tokens", args.out_tokens, "--reps", args.reps,
            ]
            environment = {**os.environ, **ENVIRONMENT}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"failed: {' '.join(extra)}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            for line in done.stdout.splitlines():
                if line.startswith("{"):
                    print(line, flush=True)
                    figures.append(json.loads(line))
    print(table(figures))


def table(figures: list[dict[str, Any]]) -> str:
    """Best of the rounds for each engine and figure, as Markdown."""
    columns = ["startup s", "prefill", *dict.fromkeys(f"B={f['batch']}" for f in figures if f["kind"] == "decode")]
    rows: dict[str, dict[str, float]] = {}
    for f in figures:
        name = f"{f['engine']}, {f['storage']} weights" + (f", MTP k={f['k']}" if f["k"] else "")
        if f["tp"] * f["dp"] * f["threads"] > 1:
            name += f", tp {f['tp']}, dp {f['dp']}, threads {f['threads']}"
        if f["exchange"] == "torch":
            name += ", gloo"
        if f["split"] == "on":
            name += ", split"
        row = rows.setdefault(name, {})
        if f["kind"] == "startup":
            row["startup s"] = min(row.get("startup s", float("inf")), f["seconds"])
        else:
            column = "prefill" if f["kind"] == "prefill" else f"B={f['batch']}"
            row[column] = max(row.get(column, 0.0), f["tokens_per_s"])
    lines = ["| tokens/s | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(str(row.get(c, "-")) for c in columns) + " |" for name, row in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
