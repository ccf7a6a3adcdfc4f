"""Tests whether every environment starts: trains for three iterations, with its name as the only flag.

    python -m bench.every_environment                        # all; writes docs/every_environment.md
    python -m bench.every_environment --only jumanji: MPE_   # names with these prefixes; the page keeps all
    python -m bench.every_environment --sample 100 --seed 0  # 100 random ones from EnvPool and Gymnasium
    python -m bench.every_environment --again                # tries refused environments again
    python -m bench.every_environment --trace                # only traces: quick
    python -m bench.every_environment --list                 # prints names, in the order of the trials

Each environment runs in its own fork, on one device, for at most `--limit` seconds of CPU time. So a hang or
crash affects no other environment, and other work on the machine makes no difference. A second start skips
finished environments. `--seed` shuffles the order, so that the environments that finish first are a fair
sample. The algorithm is PPO for one agent, IPPO for several.
"""

import dataclasses
import importlib
import itertools
import json
import os
import random
import time
import traceback
from pathlib import Path
from typing import Any

from bench import harness
from bench.forks import LateError, LostError, forked
from bench.results import read

TABLE = Path("docs/every_environment.md")
RESULTS = Path("docs/every_environment.json")
ITERATIONS = 3
ON_THE_HOST = ("envpool:", "gymnasium:")  # prefixes of the names of environments that run on the host


def sample_host_environments(count: int, seed: int) -> list[str]:
    """Names of `count` random environments, alternately of EnvPool and Gymnasium; none if `count` is 0."""
    if not count:
        return []
    import envpool
    import gymnasium

    chooser = random.Random(seed)
    known = sorted(envpool.list_all_envs()), sorted(gymnasium.registry)
    names_by_prefix = dict(zip(ON_THE_HOST, known, strict=True))
    in_turn = [
        [prefix + name for name in chooser.sample(names, min(count // 2, len(names)))]
        for prefix, names in names_by_prefix.items()
    ]
    return [name for pair in itertools.zip_longest(*in_turn) for name in pair if name]


def jax_environments(seed: int) -> list[str]:
    """Names of the environments in JAX, shuffled, without probes."""
    import envs

    names = [name for name in envs.names() if not name.startswith("probe:")]
    return random.Random(seed).sample(names, len(names))


def start(name: str, trace: bool) -> dict[str, Any]:
    """Trains in the environment; with `trace` only traces, and steps an environment on the host.

    Returns:
      The environment's entry in `RESULTS`.
    """
    import jax

    import envs
    import fdg
    import policies
    from fdg.commands.parse import parse

    algo = "ppo" if envs.num_agents(envs.make(name)) is None else "ippo"
    job = parse(["--env", name, "--algo", algo, "--devices", "1"], "bench", "")
    result = {"algo": algo, "preset": job.record["preset_name"], "ok": True, "message": "", "how": "trained"}
    if trace:
        result["how"] = "traced"
        fdg.trace(job.algorithm)
        if name.startswith(ON_THE_HOST):
            _step(job.algorithm.env, min(job.algorithm.num_envs, 2))
        return result
    job = dataclasses.replace(job, num_iterations=ITERATIONS)
    engine = fdg.compile(job.algorithm, policies.GPUOnly(), jax.devices()[:1])
    _, metrics = engine.run(engine.init(0), ITERATIONS)
    finite = all(bool(jax.numpy.isfinite(x).all()) for k, x in metrics.items() if "loss" in k)
    learns_later = getattr(job.algorithm, "learning_starts", 0) > ITERATIONS * job.steps_per_iteration
    if finite or learns_later:
        return result
    return {**result, "ok": False, "message": "a loss is not finite"}


def _step(env: Any, count: int) -> None:
    """Makes two steps with `count` environments on the host, and checks their results."""
    import jax

    from envs.checking import check_batch_step

    keys = jax.random.split(jax.random.key(0), count)
    state, _ = env.reset(keys)
    for _ in range(2):
        action = jax.vmap(env.action_space.sample)(keys)
        state, _ = check_batch_step(env, env.step(keys, state, action), count)


def start_in_fork(name: str, trace: bool, limit: int) -> dict[str, Any]:
    """The result of `start` in a fork, or an entry with the error; `limit` is in seconds of CPU time."""
    begun = time.perf_counter()

    def call() -> dict[str, Any]:
        try:
            result = start(name, trace)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            # If a host callback failed, JAX's message contains its error as a line "HostError: ...".
            message = next((line for line in lines if line.startswith("HostError: ")), lines[0])
            # A ValueError is a refusal; any other error is a bug, which needs its place.
            is_refusal = isinstance(error, ValueError)
            place = "" if is_refusal else f" ({traceback.extract_tb(error.__traceback__)[-1]})"
            message = f"{type(error).__name__}: {message}"[:300] + place[-150:]
            result = {"ok": False, "how": "refused", "message": message}
        return {**result, "cpu_s": round(time.process_time() + sum(os.times()[2:4]), 1)}

    try:
        return {**forked(call, limit), "wall_s": round(time.perf_counter() - begun, 1)}
    except (LateError, LostError) as error:
        return {"ok": False, "how": "refused", "message": str(error).splitlines()[-1]}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The page, as Markdown: counts, refusals with reasons, and the environments that started."""
    started = {name: result for name, result in results.items() if result["ok"]}
    refused = {name: result for name, result in results.items() if not result["ok"]}
    counts = []
    for source, is_of in {
        "JAX sources": lambda name: not name.startswith(ON_THE_HOST),
        "EnvPool": lambda name: name.startswith("envpool:"),
        "Gymnasium": lambda name: name.startswith("gymnasium:"),
    }.items():
        of_source = [result for name, result in results.items() if is_of(name)]
        outcomes = [result["how"] if result["ok"] else "refused" for result in of_source]
        counts.append(
            (source, len(outcomes), *(outcomes.count(what) for what in ("trained", "traced", "refused")))
        )
    head = ("", "tried", "trained", "traced, and stepped if on the host", "refused")
    reasons = [(f"`{name}`", result["message"].replace("|", "/")) for name, result in refused.items()]
    started_rows = [(f"`{name}`", x["algo"], x["preset"] or "none", x["how"]) for name, x in started.items()]
    parts = [
        "# Which environments start",
        "Each environment was trained for three iterations, with `--env` as the only flag. The tables count"
        " the results, give the reason for each environment that does not start, and list those that do.",
        harness.table(head, counts),
        "```sh\n"
        "python -m bench.every_environment                        # all of the JAX sources\n"
        "python -m bench.every_environment --sample 100 --seed 0  # 100 of EnvPool's and Gymnasium's\n"
        "```",
        *([harness.table(("refused", "reason"), reasons)] if reasons else []),
        harness.table(("started", "algorithm", "preset", ""), started_rows),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = harness.parser("bench.every_environment", __doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX")
    parser.add_argument("--sample", type=int, default=0, metavar="N")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=600, metavar="SECONDS")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    names = sample_host_environments(args.sample, args.seed) or jax_environments(args.seed)
    names = [name for name in names if not args.only or name.startswith(tuple(args.only))]
    if args.list:
        print("\n".join(names))
        return
    for module in ("fdg.commands.parse", "envs", "algos", "policies"):  # every fork needs these
        importlib.import_module(module)  # none of them starts a backend of JAX
    print(f"in the order of seed {args.seed}", flush=True)
    results = read(RESULTS)
    for name in names:
        before = results.get(name)
        is_done = before is not None and (args.trace or before["how"] != "traced")
        if is_done and (before["ok"] or not args.again):
            continue
        results[name] = start_in_fork(name, args.trace, args.limit)
        print(name, json.dumps(results[name]), flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        TABLE.write_text(table(dict(sorted(results.items()))))


if __name__ == "__main__":
    main()
