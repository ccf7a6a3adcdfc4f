"""How many host devices a job is given, beside how fast it is on one, on so many, and on all cores.

    python -m bench.device_choice                           # jobs of all kinds, on a quiet machine
    python -m bench.device_choice --only brax spread        # those whose names have these in them
    python -m bench.device_choice --json build/choice.json  # writes what was measured

A job is measured on one device, on as many as it is given, and on as many as there are cores: a process each,
which has compiled and waits; they train in turns. Prints what an iteration takes and what was predicted, what
the job is given, and how long that takes by the quickest. Target: never longer than one device.
"""

import contextlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

import fdg
import policies
from bench.harness import in_turns, parser, table
from bench.peers.alternate import ours
from fdg.commands.parse import parse
from fdg.cores import usable_cores

# PureJaxRL's settings for continuous control, with long rollouts of few environments and short ones of many.
_WIDE = "--hidden 256 256 --activation tanh --normalize-observation true --normalize-reward true"
_FEW = f"{_WIDE} --num-steps 64 --num-minibatches 8"
_MANY = f"{_WIDE} --num-steps 10 --num-minibatches 32"

ROUND_S = 0.7  # of training in a round, as predicted for the quickest

JOBS = {
    **{f"cartpole-{n}": f"--num-envs {n}" for n in (4, 16, 32, 64, 256, 4096)},
    "cartpole-pqn": "--algo pqn",
    "cartpole-pqn-wide": "--algo pqn --num-envs 32 --hidden 256 256",
    "cartpole-dqn": "--algo dqn",
    "cartpole-a2c": "--algo a2c",
    "cartpole-impala": "--algo impala",
    "cartpole-recurrent": "--algo recurrent_ppo",
    "acrobot": "--env Acrobot-v1",
    "mountain-car": "--env MountainCar-v0",
    "pendulum": "--env Pendulum-v1",
    "pendulum-wide-16": f"--env Pendulum-v1 {_FEW} --num-epochs 10 --num-envs 16",
    "pendulum-wide-2048": f"--env Pendulum-v1 {_MANY} --num-epochs 4 --num-envs 2048",
    "pendulum-sac": "--algo sac --env Pendulum-v1",
    "pendulum-td3": "--algo td3 --env Pendulum-v1",
    "breakout": "--env Breakout-MinAtar",
    "breakout-narrow": "--env Breakout-MinAtar --hidden 64 64",
    "breakout-convolved": "--env Breakout-MinAtar --convolve true",
    "breakout-pqn": "--algo pqn --env Breakout-MinAtar",
    "asterix": "--env Asterix-MinAtar",
    "brax": "--env brax:inverted_pendulum",
    "brax-positional-64": f"--env brax:inverted_pendulum:positional {_FEW} --num-envs 64",
    "brax-positional-2048": f"--env brax:inverted_pendulum:positional {_MANY} --num-envs 2048",
    "spread-ippo": "--algo ippo --env MPE_simple_spread_v3",
    "spread-ippo-tanh": "--algo ippo --env MPE_simple_spread_v3 --activation tanh --num-envs 16",
    "spread-mappo": "--algo mappo --env MPE_simple_spread_v3",
    "catch": "--env Catch-bsuite",
    "snake": "--env jumanji:Snake-v1",
    "craftax-classic": "--env Craftax-Classic-Symbolic-v1",
}  # fmt: skip


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measures a job on one device, on as many as it is given, and on all, in turns.

    Returns:
      What it is given, seconds of an iteration by devices, and what was predicted of all numbers looked at.
    """
    words = f"{JOBS[name]} --policy gpu_only"
    job = parse(f"{words} --total-steps {10**9}".split(), "device_choice", "")
    graph = fdg.trace(job.algorithm)
    cores = usable_cores()
    choice = policies.auto(
        job.algorithm, cores, policies=[job.policy], num_seeds=job.agents, graph=graph, further=False
    )
    predicted = {row.candidate.devices: row.seconds for row in choice.rows if row.prediction is not None}
    chosen = choice.devices
    counts = sorted({1, chosen, cores} & set(predicted))
    iterations = math.ceil(ROUND_S / min(predicted[n] for n in counts))
    words += f" --total-steps {iterations * job.steps_per_iteration}"
    with contextlib.ExitStack() as stack:
        drivers = {n: stack.enter_context(ours(f"{words} --devices {n}", continues=True)) for n in counts}
        said = in_turns({n: driver.round for n, driver in drivers.items()}, rounds)
    seconds = {n: statistics.median(one["seconds"] for one in said[n]) / iterations for n in counts}
    return {"name": name, "chosen": chosen, "seconds": seconds, "predicted": predicted}


def milliseconds(seconds: float) -> str:
    """In three digits or whole ones."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def main() -> int:
    """Reads the command line, measures, prints; the status says whether one device was ever quicker."""
    line = parser("bench.device_choice", __doc__)
    line.add_argument("--only", nargs="+", default=[""], help="parts of the names of those to measure")
    line.add_argument("--rounds", type=int, default=5, help="of each, in turns, after one more")
    line.add_argument("--json", type=Path, help="where to write what was measured")
    given = line.parse_args()
    names = [name for name in JOBS if any(part in name for part in given.only)]
    if not names:
        line.error(f"--only {' '.join(given.only)}: no job has this in its name; they are {', '.join(JOBS)}")
    print(table(("job", "ms an iteration (predicted), by devices", "is given", "by the quickest"), ()))
    every, slower = [], []
    for name in names:
        one = measure(name, given.rounds)
        every.append(one)
        seconds, chosen = one["seconds"], one["chosen"]
        cells = [f"{n}: {milliseconds(s)} ({milliseconds(one['predicted'][n])})" for n, s in seconds.items()]
        loss = seconds[chosen] / min(seconds.values())
        print(f"| {name} | {', '.join(cells)} | {chosen} | {loss:.2f} |", flush=True)
        slower += [name] * (seconds[chosen] > 1.05 * seconds[1])
        if given.json:
            given.json.write_text(json.dumps(every, indent=1))
    said = ", ".join(slower) or "none"
    print(f"\n{len(every)} jobs; slower than one device by more than a twentieth: {said}")
    return int(bool(slower))


if __name__ == "__main__":
    raise SystemExit(main())
