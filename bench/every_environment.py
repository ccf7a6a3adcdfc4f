"""Whether every environment starts: three iterations with no flag but its name, one after the other.

    python -m bench.every_environment                       # all, and the table docs/every_environment.md
    python -m bench.every_environment --only jumanji: MPE_  # those that begin so; the table keeps the others
    python -m bench.every_environment --drawn 100 --seed 0  # so many of EnvPool's and of Gymnasium's each
    python -m bench.every_environment --list                # names, and the algorithm of each

Each runs in a process of its own, `--limit` seconds at most, on one device: what hangs or dies takes no other
along. What was tried before is tried again. A refusal is a line with its reason. PPO for one agent, IPPO for
several.
"""

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TABLE = Path("docs/every_environment.md")
KEPT = Path("docs/every_environment.json")
ITERATIONS = 3


def drawn(count: int, seed: int) -> list[str]:
    """Environments of EnvPool's and of Gymnasium's, so many of each, at random."""
    import envpool
    import gymnasium

    chooser = random.Random(seed)
    theirs = {
        "envpool:": sorted(envpool.list_all_envs()),
        "gymnasium:": sorted(name for name in gymnasium.registry if "/" not in name or "ALE/" in name),
    }
    return [
        prefix + name
        for prefix, names in theirs.items()
        for name in sorted(chooser.sample(names, min(count, len(names))))
    ]


def registered() -> list[str]:
    """Those of the JAX sources; probes are tests."""
    import envs

    return [name for name in envs.names() if not name.startswith("probe:")]


def one(name: str) -> dict[str, Any]:
    """Trains one in this process. Returns what came of it."""
    import jax

    import envs
    import fdg
    from fdg.commands.parse import parse

    algo = "ppo" if envs.num_agents(envs.make(name)) is None else "ippo"
    job = parse(["--env", name, "--algo", algo, "--devices", "1"], "bench", "")
    job = dataclasses.replace(job, num_iterations=ITERATIONS)
    begun = time.perf_counter()
    engine = fdg.compile(job.algorithm, job.policy, jax.devices()[:1])
    state = engine.init(0)
    state, metrics = engine.run(state, 1)
    compiled = time.perf_counter()
    state, metrics = engine.run(state, ITERATIONS - 1)
    seconds = (time.perf_counter() - compiled) / (ITERATIONS - 1)
    finite = all(bool(jax.numpy.isfinite(x).all()) for k, x in metrics.items() if "loss" in k)
    return {
        "algo": algo,
        "preset": job.record["preset_name"],
        "ok": finite,
        "said": "" if finite else "a loss is no number",
        "compile_s": round(compiled - begun, 1),
        "steps_per_s": round(job.steps_per_iteration / seconds),
    }


def tried(name: str, limit: float) -> dict[str, Any]:
    """What came of an environment, in a process of its own."""
    words = [sys.executable, "-m", "bench.every_environment", "--one", name]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"ok": False, "said": f"not done after {limit:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return {"ok": False, "said": said[:300]}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The count, the refusals with their reasons, and what started."""
    started = {name: result for name, result in results.items() if result["ok"]}
    refused = {name: result for name, result in results.items() if not result["ok"]}
    lines = [
        "# Which environments start",
        "",
        f"Three iterations with no flag but the name: {len(started)} of {len(results)} that were tried.",
        "",
        "```sh",
        "python -m bench.every_environment",
        "```",
        "",
    ]
    if refused:
        lines += ["| refused | reason |", "|---|---|"]
        lines += [f"| `{name}` | {result['said'].replace('|', '/')} |" for name, result in refused.items()]
        lines += [""]
    lines += ["| started | algorithm | preset |", "|---|---|---|"]
    lines += [f"| `{n}` | {r['algo']} | {r['preset'] or 'none'} |" for n, r in started.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX")
    parser.add_argument("--drawn", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one)))
        return
    names = drawn(given.drawn, given.seed) if given.drawn else registered()
    if given.drawn:
        print(f"drawn with seed {given.seed}")
    names = [name for name in names if not given.only or name.startswith(tuple(given.only))]
    if given.list:
        print("\n".join(names))
        return
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in names:
        results[name] = tried(name, given.limit)
        print(name, json.dumps(results[name]), flush=True)
        KEPT.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        TABLE.write_text(table(dict(sorted(results.items()))))


if __name__ == "__main__":
    main()
