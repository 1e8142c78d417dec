"""Stand-ins for Slurm's commands and for Lockstep's processes, as small scripts in a folder for PATH."""

from __future__ import annotations

import sys
from pathlib import Path

# Starts the step's tasks here, with the variables that Slurm gives them on several nodes; ends with their worst code.
SRUN = """
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1:]
while command and command[0].startswith("--"):
    command.pop(0)
value = dict(word[2:].split("=", 1) for word in options if "=" in word)
total, per_node = int(value["ntasks"]), int(value["ntasks-per-node"])
nodes = total // per_node
tasks = []
for rank in range(total):
    env = os.environ | {
        "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(total), "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node), "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})", "FAKE_SRUN_PID": str(os.getpid()),
    }
    tasks.append(subprocess.Popen(command, env=env))
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """
import os, sys
if sys.argv[1] == "requeue":
    open(os.path.join(os.environ["FAKE_DIR"], "requeued"), "w").write(sys.argv[2])
else:
    print("NodeName=" + sys.argv[3], "Arch=x86_64\\n   NodeAddr=127.0.0.1 NodeHostName=somewhere")
"""

# `python -m launch.cli controller ...` or `python -m launch.worker ...`, as far as the script can tell.
PYTHON = """
import json, os, signal, sys, time
sys.path[:0] = [os.environ["FAKE_ROOT"]]
folder = os.environ["FAKE_DIR"]
def note(name, **more):
    path = os.path.join(folder, name)
    secret = os.environ.get("LOCKSTEP_SECRET")
    with open(path + ".new", "w") as file:
        json.dump({"args": sys.argv[1:], "secret": secret, "ppid": os.getppid(), **more}, file)
    os.rename(path + ".new", path)
def stop(*_):
    note("stopped")
    os._exit(0)
def after(name):
    return sys.argv[sys.argv.index(name) + 1]
if sys.argv[2] == "launch.cli":
    signal.signal(signal.SIGTERM, stop)
    note("controller")
    code = int(os.environ.get("FAKE_CONTROLLER_CODE", "0"))
    if os.environ.get("FAKE_NO_ADDRESS"):
        time.sleep(float(os.environ.get("FAKE_DEAF_S", "0")))
        sys.exit(code)
    with open(after("--address-file"), "w") as file:
        file.write(after("--listen").replace(":0", ":4711"))
    wanted = int(os.environ["FAKE_WORKERS"])
    while len([name for name in os.listdir(folder) if name.startswith("worker") and "new" not in name]) < wanted:
        time.sleep(0.02)
    if os.environ.get("FAKE_STAY"):
        time.sleep(30)
    sys.exit(code)
from launch.rank_env import RankEnv
env = RankEnv.from_environment(os.environ)
note(f"worker{env.rank}", rank=env.rank, node=env.node_rank, local=env.local_rank, source=env.source,
     step_pid=int(os.environ["FAKE_SRUN_PID"]), advertise=os.environ.get("LOCKSTEP_ADVERTISE"))
sys.exit(int(os.environ.get("FAKE_WORKER_CODE", "0")))
"""


def install(folder: Path) -> Path:
    """Write the stand-ins into `folder`; the path of the interpreter that a script should use."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("fake-python", PYTHON)):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    return folder / "fake-python"
