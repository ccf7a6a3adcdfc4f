"""Presets are measured, not picked: candidates as sweeps on choosing seeds, the best confirmed on fresh ones.

    python -m tools.presets --list                             # families, members, candidates
    python -m tools.presets sparse-control --seeds 24          # choose, confirm; prints tables
    python -m tools.presets minatar --seeds 24 --confirm-only  # what the present preset is worth
    python -m tools.presets minatar --algo pqn --seeds 24 --confirm-only

Any family with any algorithm that can act in it; what is tried is in `tools/preset_studies.py`.

Choosing: every *shape* (flags that make another program) is one run of `fdg.train --sweep`, in which all
values of all seeds are one program, for each member of the family that settings are chosen on. Candidates are
ranked on each member by their interquartile mean, and the one of the best mean rank is the choice, so that no
member's scale of rewards outweighs another's.

Confirming: the choice, and the preset that there is (`fdg.train` with no flag but the name), on seeds and on
members that had no part in choosing. Runs are kept in `runs/presets/`, and continued where interrupted.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import algos
import envs
from bench import harness
from bench.harness import table
from bench.runs import Reached, train_seeds
from fdg.errors import FdgError
from fdg.training.statistics import interquartile_mean
from fdg.training.sweep_results import read_results
from tools.preset_studies import MEMBERS, SWEPT, Study, default_algorithm, is_together, study_of

RUNS = Path("runs/presets")
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


def choose(family: str, algo: str, study: Study, seeds: int, seed: int) -> dict[str, dict[str, float]]:
    """What candidates were worth, the best first: flags, and interquartile means by environment."""
    worth: dict[Candidate, dict[str, float]] = {}
    for i, shape in enumerate(study.shapes):
        for env in study.choose_on:
            out = RUNS / f"{family}-{algo}-{_plain(env)}-shape-{i}"
            for candidate, returns in _returns(study, algo, env, shape, seeds, seed, out):
                worth.setdefault(candidate, {})[env] = float(interquartile_mean(np.array(returns)))
    table = np.array([[values[env] for env in study.choose_on] for values in worth.values()])
    ranks = np.mean(np.argsort(np.argsort(-np.nan_to_num(table, nan=-np.inf), axis=0), axis=0), axis=1)
    ordered = [list(worth)[i] for i in np.argsort(ranks, kind="stable")]
    return {candidate.flags: worth[candidate] for candidate in ordered}


def confirm(
    family: str, algo: str, study: Study, seeds: int, flags: str, name: str
) -> Iterator[tuple[str, str, Reached]]:
    """Environment, settings and what fresh seeds reach there; `flags` empty: those of the preset."""
    for env in (*study.choose_on, *study.confirm_on):
        out = RUNS / f"{family}-{algo}-{_plain(env)}-{name}"
        runs = train_seeds(_words(study, algo, env, flags), out, FRESH, seeds, is_together(env))
        yield f"{env}{'' if env in study.choose_on else ' (fresh)'}", name, Reached.of(runs)


def _words(study: Study, algo: str, env: str, flags: str) -> list[str]:
    return ["--env", env, "--algo", algo, "--total-steps", str(study.total_steps), *shlex.split(flags)]


def _returns(
    study: Study, algo: str, env: str, shape: str, seeds: int, seed: int, out: Path
) -> list[tuple[Candidate, list[float]]]:
    words = _words(study, algo, env, shape)
    if is_together(env) and study.sweep:
        train_seeds([*words, "--sweep", *study.sweep], out, seed, seeds, together=True)
        return [
            (Candidate(shape, tuple(sorted(point["values"].items()))), point["returns"])
            for point in read_results(out)["points"]
        ]
    named = [item.partition("=") for item in study.sweep]
    grids = [[(name, float(value)) for value in values.split(",")] for name, _, values in named]
    found = []
    for i, values in enumerate(itertools.product(*grids)):
        candidate = Candidate(shape, tuple(values))
        words = _words(study, algo, env, candidate.flags)
        runs = train_seeds(words, out.with_name(f"{out.name}-{i}"), seed, seeds, is_together(env))
        found.append((candidate, list(Reached.of(runs).returns)))
    return found


def _plain(env: str) -> str:
    return env.translate(str.maketrans(":?/", "---"))


def main() -> None:
    parser = harness.parser("tools.presets", __doc__)
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
    confirmed = []
    if not given.confirm_only:
        chosen = choose(given.family, algo, tried, given.seeds, given.seed)
        rows = [(flags, *(f"{value:.1f}" for value in worth.values())) for flags, worth in chosen.items()]
        print(table(("tried, IQM", *tried.choose_on), rows))
        confirmed += confirm(given.family, algo, tried, given.seeds, next(iter(chosen)), "chosen")
    confirmed += confirm(given.family, algo, tried, given.seeds, "", "preset")
    head = ("environment", "settings", "seeds", "mean", "IQM [95% interval]", "lowest, highest", "wall time")
    print(table(head, [(env, name, *reached.cells) for env, name, reached in confirmed]))


if __name__ == "__main__":
    main()
