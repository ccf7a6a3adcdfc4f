"""Table of features and algorithms: which combinations work, and the error messages of the others.

    python -m tests.algos.matrix                         # every cell; writes docs/matrix.md
    python -m tests.algos.matrix --cells sac:memory ppo  # one cell, or all of an algorithm or a feature

A cell is a command line: two small iterations of an algorithm, with the flags of a feature. It works or
ends in a one-line error. Anything else is a bug, as is a flag that changes no metric.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

import tests.conftest  # noqa: F401  eight host devices and fast compilation

import jax  # isort: skip
import jax.numpy as jnp

import algos
import envs
from fdg import export, train
from tests.algos.offline.data import random_steps

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"

# Small sizes, and the kind of environment for each algorithm, unless the feature has its own.
ROLLOUT = "--num-envs 4 --num-steps 8 --total-steps 64 --hidden 8"
EPOCHS = f"{ROLLOUT} --num-epochs 1 --num-minibatches 2"
REPLAY = (
    "--num-envs 4 --num-steps 4 --total-steps 32 --hidden 8"
    " --batch-size 8 --buffer-size 64 --learning-starts 16"
)
SAC_LIKE = f"{REPLAY} --updates-per-step 0.125"
OFFLINE = "--num-envs 4 --num-steps 2 --total-steps 16 --hidden 8 --batch-size 8 --dataset DATA"
ONLINE = f"{OFFLINE} --online true"
MODEL = "--hidden-size 8 --num-layers 1 --num-heads 2"
BATCH = "--num-prompts 4 --num-minibatches 1 --total-steps 16"
SMALL: Mapping[str, tuple[str, str]] = {
    "ppo": ("discrete", EPOCHS),
    "recurrent_ppo": ("discrete", f"{EPOCHS} --memory-size 4 --sequence-length 4"),
    "ippo": ("team", f"{EPOCHS}"),
    "mappo": ("team", f"{EPOCHS} --memory-size 4"),
    "a2c": ("discrete", ROLLOUT),
    "a3c": ("discrete", f"{ROLLOUT} --num-workers 2"),
    "impala": ("discrete", ROLLOUT),
    "dqn": ("discrete", SAC_LIKE),
    "pqn": ("discrete", EPOCHS),
    "sac": ("continuous", SAC_LIKE),
    "td3": ("continuous", SAC_LIKE),
    "fast_td3": ("continuous", f"{SAC_LIKE} --critic-hidden 8"),
    "qr_dqn": ("discrete", f"{SAC_LIKE} --quantiles 3"),
    "c51": ("discrete", f"{SAC_LIKE} --atoms 3"),
    "crossq": ("continuous", f"{SAC_LIKE} --critic-hidden 8"),
    "redq": ("continuous", f"{SAC_LIKE} --critic-hidden 8 --num-critics 3"),
    "droq": ("continuous", f"{SAC_LIKE} --critic-hidden 8"),
    "tqc": ("continuous", f"{SAC_LIKE} --critic-hidden 8 --num-critics 3 --quantiles 4"),
    "vdn": ("team", f"{REPLAY} --num-updates 1 --sequence-length 2"),
    "qmix": ("team", f"{REPLAY} --num-updates 1 --sequence-length 2 --mixer-size 4 --hypernetwork 4"),
    "bc": ("continuous", OFFLINE),
    "iql": ("continuous", ONLINE),
    "td3_bc": ("continuous", ONLINE),
    "rebrac": ("continuous", ONLINE),
    "cql": ("continuous", f"{ONLINE} --num-actions 2"),
    "alphazero": (
        "game",
        "--num-envs 4 --num-steps 2 --num-minibatches 2 --num-simulations 2 --total-steps 16 --hidden 8",
    ),
    "muzero": ("discrete", f"{EPOCHS} --num-simulations 2 --unroll-steps 2 --latent-size 8"),
    "sft": ("text", f"{MODEL} {BATCH}"),
    "dpo": ("text", f"{MODEL} {BATCH}"),
    "ppo_rlhf": ("text", f"{MODEL} {BATCH}"),
    "grpo": ("text", f"{MODEL} --num-prompts 4 --group-size 2 --num-minibatches 1 --total-steps 16"),
    "reward_model": ("text", f"{MODEL} {BATCH}"),
}
ENVIRONMENTS = {
    "discrete": "probe:policy_of_observation",
    "continuous": "probe:continuous",
    "team": "probe:agents",
    "game": "game:tic_tac_toe",
    "text": "text:copying?length=3&letters=8",
}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature that is tried with every algorithm.

    Attributes:
      what: short description.
      flags: command-line flags for each kind of environment, or for all ("").
      environments: replacements of the usual environment of a kind.
      changes: the flags change metrics.
      off: flags that switch it off, if it may be on by default.
    """

    what: str
    flags: Mapping[str, str]
    environments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changes: bool = False
    off: str = ""


def _for_all(flags: str) -> dict[str, str]:
    return {"": flags}


# Episodes of several steps.
LONGER = {"discrete": "probe:parts?length=4", "continuous": "probe:parts?continuous=True&length=4"}


HERE = "tests.algos.matrix"
SWEEP = "--sweep learning_rate=1e-4,1e-3"
FEATURES: Mapping[str, Feature] = {
    "plain": Feature("defaults", _for_all("")),
    "bonus": Feature("a user-defined bonus on rewards", _for_all(f"--bonus {HERE}:BONUS"), changes=True),
    # The one-step probes have no novelty in observations, and rewards with a deviation of 1.
    "rnd": Feature(
        "random network distillation",
        _for_all("--rnd true"),
        {"team": "MPE_simple_spread_v3"},
        changes=True,
    ),
    "observations": Feature(
        "observations normalised by running statistics",
        _for_all("--normalize-observation true"),
        changes=True,
        off="--normalize-observation false",
    ),
    "rewards": Feature(
        "rewards normalised by running statistics",
        _for_all("--normalize-reward true"),
        {"discrete": "CartPole-v1"},
        changes=True,
    ),
    "memory": Feature("a network with a memory (GRU)", _for_all("--memory gru")),
    "distributional": Feature(
        "categorical distributions of returns",
        _for_all("--atoms 5 --value-min -2.0 --value-max 2.0"),
        changes=True,
    ),
    "priorities": Feature("prioritised replay", _for_all("--priority-exponent 0.6"), changes=True),
    "n_step": Feature("n-step returns from replay", _for_all("--n-step 2"), LONGER, changes=True),
    "explorer": Feature(
        "a user-defined exploration strategy",
        {"": f"--explore {HERE}:NOISE", "discrete": f"--explore {HERE}:BOLTZMANN"},
        changes=True,
    ),
    "transform": Feature(
        "a user-defined change of samples before learning",
        _for_all(f"--transform {HERE}:doubled"),
        changes=True,
    ),
    "masks": Feature(
        "action masks",
        _for_all(""),
        {"discrete": "probe:masked", "continuous": "probe:masked", "team": "MPE_simple_speaker_listener_v4",
         "text": "probe:masked"},
    ),
    "parts": Feature(
        "observations with several parts (a pytree)",
        _for_all(""),
        {"discrete": "probe:parts", "continuous": "probe:parts?continuous=True", "game": "probe:parts",
         "team": "probe:unlike", "text": "probe:parts"},
    ),
    "bfloat16": Feature(
        "matrix products in bfloat16", {"": "--precision bfloat16", "text": "--dtype bfloat16"}
    ),
    "rings": Feature("environments in several groups that take turns (rings)", _for_all("--rings 2")),
    "seeds": Feature("several seeds in one program", _for_all("--num-seeds 2")),
    "sweep": Feature("a sweep in one program", _for_all(SWEEP)),
    "population": Feature("population-based training", _for_all(f"{SWEEP} --num-seeds 2 --exploit-every 1")),
    "staleness": Feature(
        "actors with stale parameters",
        {"": "--policy single_learner_coarse --staleness 1", "text": "--policy split --staleness 1"},
    ),
    "streaming": Feature("continuous batching, generation ahead", _for_all("--slots 2 --ahead 1")),
    "onnx": Feature("export of the policy as an ONNX file", _for_all("")),
}  # fmt: skip

NOISE = algos.explorers.correlated_noise()
BOLTZMANN = algos.explorers.boltzmann()


def _count_bonus(count, time_step):
    """A bonus of 1 / sqrt(1 + number of steps)."""
    reward = jnp.broadcast_to(1 / jnp.sqrt(1 + count), time_step.reward.shape)
    return count + time_step.reward.size, reward


BONUS = algos.Bonus(init=lambda observation: jnp.float32(0), apply=_count_bonus)


def doubled(rows, parameters, key):
    """A transform that doubles rewards."""

    def double(path, x):
        return 2 * x if getattr(path[-1], "name", "") == "reward" else x

    return jax.tree_util.tree_map_with_path(double, rows)


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a cell: `works`, `refused` with the error line, or `bug` with all output."""

    kind: str
    output: str = ""


def cells(names: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Pairs (algorithm, feature), selected by names `ALGORITHM:FEATURE`, `ALGORITHM` or `FEATURE`."""
    wanted = set(names)
    if unknown := [name for name in wanted if not set(name.split(":")) <= {*SMALL, *FEATURES}]:
        raise SystemExit(f"no algorithm or feature: {', '.join(unknown)}")
    pairs = itertools.product(SMALL, FEATURES)
    return [(a, f) for a, f in pairs if not wanted or {a, f, f"{a}:{f}"} & wanted]


def line(algorithm: str, feature: str, without: bool = False) -> str:
    """The command line of a cell; `without` leaves out the feature's flags."""
    kind, flags = SMALL[algorithm]
    entry = FEATURES[feature]
    env = entry.environments.get(kind, ENVIRONMENTS[kind])
    policy = "--policy gpu_only"
    extra = entry.off if without else entry.flags.get(kind, entry.flags[""])
    common = f"{'' if '--policy' in extra else policy} --devices 1 --preset none --eval-episodes 0"
    return " ".join(f"--algo {algorithm} --env {env} {flags} {extra} {common}".split())


def run(algorithm: str, feature: str) -> Result:
    """Runs a cell in this process, in a temporary folder."""
    words = _with_data(line(algorithm, feature))
    with tempfile.TemporaryDirectory() as folder:
        result = _command(train.main, [*words.split(), "--out", f"{folder}/run"])
        if result.kind == "works" and FEATURES[feature].changes:
            before, after = _plain(line(algorithm, feature, without=True)), _metrics(f"{folder}/run")
            if before == {name: after.get(name) for name in before}:
                return Result("bug", "it works, but no metric changes")
        if feature == "onnx" and result.kind == "works":
            result = _command(export.main, [f"{folder}/run", "--out", f"{folder}/policy.onnx"])
        return dataclasses.replace(result, output=result.output.replace(folder, "FOLDER"))


def _with_data(words: str) -> str:
    if "DATA" not in words:
        return words
    name, options = envs.parse(words.split()[3])
    return words.replace("DATA", random_steps(name, **options))


@functools.cache
def _plain(words: str) -> dict[str, list[str]]:
    """Metrics of a command line that works."""
    with tempfile.TemporaryDirectory() as folder:
        assert _command(train.main, [*_with_data(words).split(), "--out", f"{folder}/run"]).kind == "works"
        return _metrics(f"{folder}/run")


def _metrics(folder: str) -> dict[str, list[str]]:
    """Metrics of a run except times, as text, since NaN is not equal to itself."""
    rows = [json.loads(row) for row in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    names = [name for name in rows[0] if not name.endswith(("_s", "_per_second"))]
    return {name: [repr(row.get(name)) for row in rows] for name in names}


def _command(main, words: list[str]) -> Result:
    out, output = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(output):
            status = main(words)
    except BaseException:  # every exception is a bug
        return Result("bug", f"{output.getvalue()}{traceback.format_exc()}")
    if status == 0:
        return Result("works")
    text = output.getvalue().strip()
    in_one_line = status == 2 and text.startswith("error: ") and "\n" not in text
    return Result("refused", text.removeprefix("error: ")) if in_one_line else Result("bug", text)


# --- the page ---


def page(results: Mapping[tuple[str, str], Result]) -> str:
    """Text of `docs/matrix.md` from the results of all cells."""
    counts = collections.Counter(result.kind for result in results.values())
    total = sum(counts.values())
    rows = [
        f"| {algorithm} | "
        + " | ".join(_SIGNS[results[algorithm, feature].kind] for feature in FEATURES)
        + " |"
        for algorithm in SMALL
    ]
    legend = []
    for feature, entry in FEATURES.items():
        flags = " or ".join(f"`{flags}`" for flags in entry.flags.values() if flags)
        legend.append(f"| {feature} | {entry.what} | {flags} |")
    head = f"""# Features and algorithms

This table shows which features can be combined with which algorithm. {counts["works"]} of {total} pairs work
({counts["works"] / total:.0%}); the others end in a
[one-line error message](#error-messages-of-the-other-pairs).
`python -m tests.algos.matrix` runs two small iterations of each pair from the command line and writes
this page.
"""
    marks = ["| | " + " | ".join(FEATURES) + " |", "|---|" + "---|" * len(FEATURES), *rows]
    flags = ["| feature | what it is | flags |", "|---|---|---|", *legend]
    reasons = ["## Error messages of the other pairs", "", *_reasons(results)]
    return "\n".join([head, *marks, "", *flags, "", *reasons, ""])


_SIGNS = {"works": "yes", "refused": "-", "bug": "BUG"}


def _reasons(results: Mapping[tuple[str, str], Result]) -> list[str]:
    """A line for each error message of each feature, with its algorithms."""
    lines = []
    for feature in FEATURES:
        output: dict[str, list[str]] = {}
        for algorithm in SMALL:
            result = results[algorithm, feature]
            if result.kind != "works":
                names = rf"\b({algorithm}|{algos.get(algorithm).__name__})\b"
                text = re.sub(rf" under --algo {algorithm}", "", result.output)
                text = re.sub(rf"^{names}:? ", "", text)
                output.setdefault(text, []).append(algorithm)
        lines += [f"- **{feature}**, {', '.join(names)}: {text}" for text, names in output.items()]
    return lines


def recorded() -> dict[tuple[str, str], str]:
    """The outcome of each cell in `docs/matrix.md`."""
    kinds = {sign: kind for kind, sign in _SIGNS.items()}
    found = {}
    for row in PAGE.read_text().splitlines():
        name, *signs = [word.strip() for word in row.strip("|").split("|")]
        if name in SMALL and len(signs) == len(FEATURES):
            found.update({(name, f): kinds[sign] for f, sign in zip(FEATURES, signs, strict=True)})
    return found


def main() -> None:
    """Runs the selected cells; writes the page if all were run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="*", default=[], metavar="NAME")
    chosen = cells(parser.parse_args().cells)
    results = {}
    for number, (algorithm, feature) in enumerate(chosen):
        start = time.monotonic()
        result = results[algorithm, feature] = run(algorithm, feature)
        print(
            f"{time.monotonic() - start:5.1f} s  {result.kind:8} {algorithm}:{feature}  {result.output}",
            flush=True,
        )
        if number % 20 == 19:
            jax.clear_caches()
    if len(results) == len(cells()):
        PAGE.write_text(page(results))
    counts = collections.Counter(result.kind for result in results.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    sys.exit(1 if counts["bug"] else 0)


if __name__ == "__main__":
    main()
