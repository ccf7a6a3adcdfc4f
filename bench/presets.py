"""Presets are measured, not picked: candidates as sweeps on choosing seeds, the best confirmed on fresh ones.

    python -m bench.presets --list                             # families, members, candidates
    python -m bench.presets sparse-control --seeds 24          # choose, confirm; the table docs/presets.md
    python -m bench.presets minatar --seeds 24 --confirm-only  # what the present preset is worth
    python -m bench.presets minatar --algo pqn --seeds 24 --confirm-only

Any family with any algorithm that can act in it; what is tried is in `bench/preset_studies.py`.

Choosing: every *shape* (flags that make another program) is one run of `fdg.train --sweep`, in which all
values of all seeds are one program, for each member of the family that settings are chosen on. Candidates are
ranked on each member by their interquartile mean, and the one of the best mean rank is the choice, so that no
member's scale of rewards outweighs another's.

Confirming: the choice, and the preset that there is (`fdg.train` with no flag but the name), on seeds and on
members that had no part in choosing. Runs are kept in `runs/presets/`, and gone on with where interrupted.
"""

import argparse
import dataclasses
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import algos
import envs
from bench.preset_studies import MEMBERS, SWEPT, Study, default_algorithm, study_of
from bench.summarize import bootstrap_interval, interquartile_mean
from fdg.errors import FdgError
from fdg.training.sweep_results import read_results

RUNS = Path("runs/presets")
KEPT, TABLE = Path("docs/presets.json"), Path("docs/presets.md")
FRESH = 10_000  # seeds from here on confirm; below, they choose


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that are tried: flags, and values that were swept."""

    shape: str
    values: tuple[tuple[str, float], ...]

    @property
    def flags(self) -> str:
        """As a command line has them."""
        return " ".join([self.shape, *(f"--{n.replace('_', '-')} {v:g}" for n, v in self.values)]).strip()


def choose(family: str, algo: str, study: Study, seeds: int, seed: int) -> dict[str, Any]:
    """The best candidate, and what all were worth: `[candidates, members]` interquartile means."""
    worth: dict[Candidate, dict[str, float]] = {}
    for i, shape in enumerate(study.shapes):
        for env in study.choose_on:
            out = RUNS / f"{family}-{algo}-{_plain(env)}-shape-{i}"
            for candidate, returns in _returns(study, algo, env, shape, seeds, seed, out):
                worth.setdefault(candidate, {})[env] = float(interquartile_mean(np.array(returns)))
    table = np.array([[values[env] for env in study.choose_on] for values in worth.values()])
    ranks = np.mean(np.argsort(np.argsort(-np.nan_to_num(table, nan=-np.inf), axis=0), axis=0), axis=1)
    ordered = [list(worth)[i] for i in np.argsort(ranks, kind="stable")]
    return {
        "best": ordered[0],
        "tried": [{"flags": candidate.flags, "worth": worth[candidate]} for candidate in ordered],
    }


def confirm(
    family: str, algo: str, study: Study, seeds: int, flags: str, name: str
) -> dict[str, dict[str, Any]]:
    """Returns of fresh seeds on all members; `flags` empty: those of the preset."""
    said = {}
    for env in (*study.choose_on, *study.confirm_on):
        out = RUNS / f"{family}-{algo}-{_plain(env)}-{name}"
        words = ["--env", env, "--algo", algo, "--total-steps", str(study.total_steps), *shlex.split(flags)]
        returns, wall = _run(words, seeds, FRESH, out, study.together)
        said[env] = {
            "returns": returns,
            "wall_s": wall,
            "command": f"python -m fdg.train {shlex.join(words)}"
            + (f" --num-seeds {seeds} --seed {FRESH}" if study.together else f" --seed {FRESH}"),
        }
    return said


def _returns(
    study: Study, algo: str, env: str, shape: str, seeds: int, seed: int, out: Path
) -> list[tuple[Candidate, list[float]]]:
    words = ["--env", env, "--algo", algo, "--total-steps", str(study.total_steps), *shlex.split(shape)]
    if study.together and study.sweep:
        _run([*words, "--sweep", *study.sweep], seeds, seed, out, together=True)
        return [
            (Candidate(shape, tuple(sorted(point["values"].items()))), point["returns"])
            for point in read_results(out)["points"]
        ]
    named = [item.partition("=") for item in study.sweep]
    grids = [[(name, float(value)) for value in values.split(",")] for name, _, values in named]
    found = []
    for i, values in enumerate(itertools.product(*grids)):
        candidate = Candidate(shape, tuple(values))
        asked = [*words, *shlex.split(" ".join(f"--{n.replace('_', '-')} {v:g}" for n, v in values))]
        found.append(
            (candidate, _run(asked, seeds, seed, out.with_name(f"{out.name}-{i}"), study.together)[0])
        )
    return found


def _run(words: Sequence[str], seeds: int, seed: int, out: Path, together: bool) -> tuple[list[float], float]:
    """Evaluation returns of all seeds, and the seconds that training took."""
    if together:
        _train([*words, "--num-seeds", str(seeds), "--seed", str(seed)], out)
        outs = [out]
    else:
        outs = [out / f"seed-{seed + i}" for i in range(seeds)]
        for i, part in enumerate(outs):
            _train([*words, "--seed", str(seed + i)], part)
    summaries = [json.loads((part / "summary.json").read_text()) for part in outs]
    returns = [r for s in summaries for r in s.get("eval_returns", [s["eval_return"]])]
    return returns, sum(summary["wall_s"] for summary in summaries)


def _train(words: Sequence[str], out: Path) -> None:
    if (out / "summary.json").exists():
        return
    words = ["--resume", str(out)] if (out / "config.json").exists() else [*words, "--out", str(out)]
    print("python -m fdg.train", shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-m", "fdg.train", *words], check=True)


def _plain(env: str) -> str:
    return env.replace(":", "-").replace("?", "-").replace("/", "-")


def table(kept: dict[str, Any]) -> str:
    """Every family: what was confirmed, on which members and seeds, and what else was tried."""
    lines = [
        "# What presets are worth",
        "",
        "`python -m bench.presets FAMILY --seeds N` tries candidates on choosing seeds and confirms the best"
        f" on fresh ones, from {FRESH:,} on, also on environments that had no part in choosing. *Preset*:"
        " `fdg.train` with no flag but `--env`, `--algo` and `--total-steps`.",
        "",
    ]
    for title, study in sorted(kept.items()):
        lines += [f"## {title}", ""]
        lines += [
            "| environment | settings | seeds | mean | IQM [95% interval] | lowest, highest | wall time |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for name, members in study["confirmed"].items():
            for env, said in members.items():
                returns = np.array(said["returns"])
                low, high = bootstrap_interval(returns)
                lines.append(
                    f"| {env}{'' if env in study['chosen_on'] else ' (fresh)'} | {name} | {len(returns)} |"
                    f" {returns.mean():.1f} | {interquartile_mean(returns):.1f} [{low:.1f}, {high:.1f}] |"
                    f" {returns.min():.1f}, {returns.max():.1f} | {said['wall_s']:.0f} s |"
                )
        lines += ["", "```sh"]
        lines += [said["command"] for members in study["confirmed"].values() for said in members.values()]
        lines += ["```", ""]
        if study.get("tried"):
            best = study["tried"][0]["flags"]
            lines += [f"Chosen of {len(study['tried'])}: `{best}`.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="?", choices=sorted(MEMBERS))
    parser.add_argument("--algo", choices=sorted(SWEPT), help="the family's first, if left out")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="the first of those that choose")
    parser.add_argument(
        "--total-steps", type=int, default=None, help="other than the study's, to try this out"
    )
    parser.add_argument(
        "--confirm-only", action="store_true", help="choose nothing: what the preset is worth"
    )
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list or given.family is None:
        for family in MEMBERS:
            algo = default_algorithm(family)
            print(f"{family} {algo}: {study_of(family, algo)}")
        return
    if not 0 <= given.seed <= FRESH - given.seeds:
        parser.error(f"--seed {given.seed}: choosing seeds are below {FRESH - given.seeds}")
    algo = given.algo or default_algorithm(given.family)
    tried = study_of(given.family, algo)
    if given.total_steps:
        tried = dataclasses.replace(tried, total_steps=given.total_steps)
    try:
        name, changed = envs.parse(tried.choose_on[0])
        algos.make(algo, envs.make(name, **changed))
    except FdgError as error:
        parser.error(str(error))
    found: dict[str, Any] = {"chosen_on": tried.choose_on, "confirmed": {}}
    if not given.confirm_only:
        chosen = choose(given.family, algo, tried, given.seeds, given.seed)
        found["tried"] = chosen["tried"]
        flags = chosen["best"].flags
        found["confirmed"]["chosen"] = confirm(given.family, algo, tried, given.seeds, flags, "chosen")
    found["confirmed"]["preset"] = confirm(given.family, algo, tried, given.seeds, "", "preset")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[f"{given.family}, {algo}"] = found
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    TABLE.write_text(table(kept))
    print(table({f"{given.family}, {algo}": found}))


if __name__ == "__main__":
    main()
