"""Runs of language models that are killed (-9), again and again, and go on: 0 differing bits.

    python -m bench.rlhf_resume                        # SFT, DPO, GRPO and PPO-RLHF, 20 kills each
    python -m bench.rlhf_resume --algo grpo --kills 5
    python -m bench.rlhf_resume --placements           # in float64, each time under another placement

Problems come in epochs whose borders lie within iterations. The last state (with the key and the iteration
that the next prompts follow from), every row of metrics and every table of samples are compared with those of
a run that was left alone; under other placements, numbers to 1e-12 of the largest of their array.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KEPT = Path("build/rlhf_resume")
TIMES = ("wall_s", "tokens_per_s")
ALGORITHMS = ("sft", "dpo", "grpo", "ppo_rlhf")
PLACEMENTS = ("one device", "colocated", "split", "standalone")
BOUND = 1e-12


def algorithm_of(name: str) -> Any:
    """A small one, whose rewards differ from the first iteration on."""
    import jax.numpy as jnp

    import algos
    import envs

    class Counted(envs.text.TextTask):
        def reward(self, answer: Any, tokens: Any, mask: Any) -> Any:
            total = (jnp.sum(jnp.where(mask, tokens % 5, 0), axis=1) / 7.0).astype(jnp.float32)
            return envs.text.Reward(total, {"counted": total})

    env = Counted(envs.make("text:addition", digits=1).problem)
    fields = {"num_prompts": 4, "dataset_size": 6, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    groups = {} if name == "sft" else {"group_size": 2}
    return algos.get(name)(env=env, **fields, **groups)


def train(name: str, out: Path, iterations: int, placement: str) -> None:
    """Begins a run, or goes on with it."""
    import jax

    import fdg
    import policies

    policy, count = {
        "one device": (policies.GPUOnly(), 1),
        "colocated": (policies.Colocated(), 2),
        "split": (policies.Split(actors=2, learners=1), 3),
        "standalone": (policies.Standalone(actors=1, learners=2, references=1), 4),
    }[placement]
    algorithm = algorithm_of(name)
    fdg.fit(
        algorithm,
        policy,
        total_steps=iterations * algorithm.steps_per_iteration,
        devices=jax.devices()[:count],
        eval_episodes=0,
        checkpoint_every=1,
        out=out,
        resume=True,
        progress=False,
    )


class Child:
    """`train` in a process of its own, a copy of this one: which has imported all, and computed nothing."""

    def __init__(self, *arguments: Any):
        self.pid, self.status = os.fork(), None
        if not self.pid:
            status = 1
            try:
                train(*arguments)
                status = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def ended(self) -> bool:
        """Whether it has come to an end by itself."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def kill(self) -> None:
        """At once, with -9."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait(self) -> None:
        """Until its end, which has to be a good one."""
        while not self.ended():
            time.sleep(0.05)
        if self.status:
            raise SystemExit(f"it ended with status {self.status}")


def newest(run: Path) -> int:
    """Iteration of the last checkpoint; 0 without one."""
    names = [path.name for path in (run / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def killed(name: str, run: Path, iterations: int, kills: int, placements: tuple[str, ...]) -> int:
    """Trains with so many kills at random moments, each go under the next placement: how many hit."""
    draw, hits = random.Random(f"{name} {kills}"), 0
    for number in range(kills):
        child = Child(name, run, iterations, placements[number % len(placements)])
        if number % 4 == 0:  # anywhere while it starts
            time.sleep(draw.uniform(0.0, 4.0))
        else:  # as soon as it has got on; while it computes or writes
            goal = newest(run) + draw.randint(1, 3)
            while newest(run) < goal and not child.ended():
                time.sleep(0.002)
            time.sleep(draw.uniform(0.0, 0.1))
        hits += not child.ended()
        child.kill()
    Child(name, run, iterations, placements[kills % len(placements)]).wait()
    return hits


def arrays(run: Path) -> dict[str, Any]:
    """Of the last state, read without computing anything."""
    from fdg.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    return dict(checkpoints.arrays(latest))


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics of each iteration, without times."""
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in every]


def tables(run: Path) -> dict[str, str]:
    """Tables of samples, prompts included."""
    return {path.name: path.read_text() for path in (run / "samples").glob("*.jsonl")}


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, float]:
    """Differing bits of two states, and the largest difference relative to the largest of its array."""
    import numpy as np

    assert one.keys() == other.keys()
    bits, largest = 0, 0.0
    for name, value in one.items():
        a, b = (np.frombuffer(x.tobytes(), np.uint8) for x in (value, other[name]))
        bits += int(np.unpackbits(a ^ b).sum())
        x, y = (np.asarray(x, np.float64) for x in (value, other[name]))
        scale = max(1.0, float(np.max(np.abs(y), initial=0.0)))
        largest = max(largest, float(np.max(np.abs(x - y), initial=0.0)) / scale)
    return bits, largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--algo", choices=ALGORITHMS, action="append")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--placements", action="store_true")
    given = parser.parse_args()
    names = given.algo or ALGORITHMS
    if len(names) > 1:  # who has read a checkpoint has threads, and a fork of it may wait for ever
        more = ["--kills", str(given.kills), *["--placements"] * given.placements]
        command = [sys.executable, "-m", "bench.rlhf_resume", *more, "--algo"]
        return max(subprocess.run([*command, name], check=False).returncode for name in names)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(given.placements)}
    # With a cache of programs (JAX_COMPILATION_CACHE_DIR), a child compiles nothing that another one has.
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4"
    import fdg.training.checkpoint  # imported before the first child: each has it then

    assert fdg.training.checkpoint
    placements = PLACEMENTS[1:] + PLACEMENTS[:1] if given.placements else PLACEMENTS[:1]
    iterations, wrong = 3 * given.kills + 2, 0
    for name in names:
        whole, run = (
            KEPT / f"{name}{'-placements' * given.placements}-{kind}" for kind in ("whole", "killed")
        )
        for path in (whole, run):
            shutil.rmtree(path, ignore_errors=True)
        Child(name, whole, iterations, "one device").wait()
        hits = killed(name, run, iterations, given.kills, placements)
        bits, largest = apart(arrays(run), arrays(whole))
        same = [a == b for a, b in zip(rows(run), rows(whole), strict=True)]
        shared = tables(run).keys() & tables(whole).keys()
        alike = sum(tables(run)[key] == tables(whole)[key] for key in shared)
        wrong += largest > BOUND if given.placements else bits > 0 or not all(same) or alike < len(shared)
        print(
            f"{name:8} {given.kills} kills, {hits} before its end: {bits} bits of the state differ (at most"
            f" {largest:.1e}); {sum(same)} of {len(same)} rows of metrics and {alike} of {len(shared)} tables"
            " of samples are the same",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
