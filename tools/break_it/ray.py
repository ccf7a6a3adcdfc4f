"""Kills parts of runs on a local Ray cluster of two nodes, and compares the results with undisturbed runs.

    python -m tools.break_it.ray           # all cases; some minutes
    python -m tools.break_it.ray actor     # one case

A case trains on two nodes (two raylets on this machine), and kills a part of the run after its second
checkpoint: an actor, a process, a node, or nothing (`whole`). Metrics and last checkpoint are compared with a
run in one process. The case `worker` kills environment workers of a run on one node.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench import harness
from fdg.training.checkpoint import Checkpoints
from fdg.training.run_directory import read_metrics, read_summary
from tools.break_it.comparing import compare
from tools.break_it.processes import descendants

# Flags of the run that loses a part.
FLAGS = "--algo tests.tiny:Pupil --num-envs 12 --seed 2 --total-steps 4800 --checkpoint-every 50"
_PATIENCE = 400.0  # seconds after which a run counts as hanging
# The program of a cluster's process; its arguments are the numbers of nodes and of CPUs of each.
_CLUSTER = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
from ray.cluster_utils import Cluster
node_args = {"num_cpus": int(sys.argv[2]), "object_store_memory": int(80e6), "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node_args)
added_nodes = [cluster.add_node(**node_args) for _ in range(int(sys.argv[1]) - 1)]
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "lose a node":
        cluster.remove_node(added_nodes.pop(), allow_graceful=False)
cluster.shutdown()
"""


@contextlib.contextmanager
def start_cluster(nodes: int = 2, cpus: int = 2) -> Iterator[tuple[str, subprocess.Popen]]:
    """A cluster of raylets on this machine: its address, and its process.

    The process removes a node when it reads the line "lose a node".
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER, str(nodes), str(cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def start(command: str, log: Path) -> subprocess.Popen:
    """Starts a module, with its output in a file."""
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, "-m", *command.split()], stdout=file, stderr=file)


def wait_for_checkpoint(run: Path, process: subprocess.Popen) -> None:
    """Waits until a run has its second checkpoint."""
    end = time.monotonic() + _PATIENCE
    while len(Checkpoints(run / "checkpoints").iterations()) < 2:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the run in {run} has no checkpoint: see the log beside it")
        time.sleep(0.1)


def processes_with(raylets: subprocess.Popen, text: str) -> list[int]:
    """Processes of a cluster whose command line contains a text."""
    return [pid for pid, line in descendants(raylets.pid).items() if text in " ".join(line)]


def wait_or_kill(process: subprocess.Popen) -> int:
    """Waits for a process and returns its exit status; kills a process that hangs."""
    try:
        return process.wait(_PATIENCE)
    finally:
        process.kill()


def lose_part(case: str, folder: Path, undisturbed: Path) -> str:
    """Runs on two nodes and loses a part; returns a description of the result.

    `case` is one of `LOST_PARTS`: "whole" loses none; "named" an actor, without restart.
    """
    run, log = folder / case, folder / f"{case}.log"
    with start_cluster() as (address, raylets):
        launch = f"fdg.launch --ray --ray-address {address} --nodes 2 --restarts {int(case != 'named')}"
        process = start(f"{launch} -- {FLAGS} --out {run}", log)
        start_time = time.monotonic()
        if case != "whole":
            wait_for_checkpoint(run, process)
            if case in ("actor", "named"):
                os.kill(processes_with(raylets, "ray::Host")[-1], signal.SIGKILL)
            elif case == "process":
                os.kill(processes_with(raylets, "fdg.launching.tied")[-1], signal.SIGKILL)
            elif case == "node":
                assert raylets.stdin is not None
                raylets.stdin.write("lose a node\n")
                raylets.stdin.flush()
            start_time = time.monotonic()
            while "error: process" not in log.read_text() and process.poll() is None:
                time.sleep(0.1)
        seconds = time.monotonic() - start_time
        status = wait_or_kill(process)
    messages = [line for line in log.read_text().splitlines() if line.startswith(("error", "restart"))]
    if case == "named":
        return f"status {status}; after {seconds:.1f} s: {'; '.join(messages)}"
    num_rows, (difference, _) = len(list(read_metrics(run / "metrics.jsonl"))), compare(run, undisturbed)
    restarts = f"; after {seconds:.1f} s: {'; '.join(messages)}" if messages else ""
    return f"status {status}; {num_rows} iterations, largest relative difference {difference:.1e}{restarts}"


# Flags of the run that loses workers, and how many it loses.
WORKER_FLAGS = (
    "--env ray:gymnasium:CartPole-v1 --env-workers 2 --num-envs 5 --num-steps 16 --hidden 8"
    " --num-minibatches 1 --total-steps 24000 --eval-episodes 0"
)
KILLS = 3


def lose_workers(folder: Path) -> str:
    """Kills environment workers of a run at random moments; returns a description of the result."""
    run, log = folder / "worker", folder / "worker.log"
    random = np.random.default_rng(0)
    with start_cluster(1, cpus=3) as (address, raylets):
        os.environ["RAY_ADDRESS"] = address
        process = start(f"fdg.train {WORKER_FLAGS} --out {run}", log)
        wait_for_checkpoint(run, process)
        for _ in range(KILLS):
            time.sleep(random.uniform(0, 5))
            num_restarts = log.read_text().count("start anew")
            os.kill(int(random.choice(processes_with(raylets, "ray::Worker"))), signal.SIGKILL)
            while log.read_text().count("start anew") == num_restarts and process.poll() is None:
                time.sleep(0.1)
        status = wait_or_kill(process)
        del os.environ["RAY_ADDRESS"]
    restarts = [line for line in log.read_text().splitlines() if "start anew" in line]
    lost_episodes = sum(int(line.split("; ")[1].split()[0]) for line in restarts)
    last = next(line for line in reversed(log.read_text().splitlines()) if line.startswith("lost "))
    rows, summary = list(read_metrics(run / "metrics.jsonl")), read_summary(run) or {}
    counted = rows[-1]["lost_episodes"], summary.get("lost_episodes")
    return (
        f"status {status}; {len(rows)} of 300 iterations; {len(restarts)} of {KILLS} kills cost"
        f" {lost_episodes} episodes, counted {counted[0]} and {counted[1]}: {last}"
    )


LOST_PARTS = ("whole", "actor", "process", "node", "named")
CASES = (*LOST_PARTS, "worker")


def main() -> None:
    parser = harness.parser("tools.break_it.ray", __doc__)
    parser.add_argument("cases", nargs="*", default=CASES, help=", ".join(CASES))
    parser.add_argument("--keep", help="a folder for runs and logs, which are not deleted then")
    args = parser.parse_args()
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"{', '.join(unknown)}: cases are {', '.join(CASES)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with contextlib.ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        undisturbed = folder / "undisturbed"
        command = f"fdg.train {FLAGS} --devices 1 --out {undisturbed}"
        if not read_summary(undisturbed) and start(command, folder / "undisturbed.log").wait(_PATIENCE):
            raise SystemExit((folder / "undisturbed.log").read_text())
        for case in args.cases:
            result = lose_workers(folder) if case == "worker" else lose_part(case, folder, undisturbed)
            print(f"{case:8} {result}", flush=True)


if __name__ == "__main__":
    main()
