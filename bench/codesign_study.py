"""Search methods on co-design at equal evaluations; a cell (problem, method) is a JSON file, which is kept.

python -m bench.codesign_study                      # runs what is missing in runs/codesign-study
python -m bench.codesign_study --only 'small.*ppo'  # cells whose name has this, a regular expression
python -m bench.codesign_study --show               # tables of what is there, and the picture
python -m bench.codesign_study --area               # one, two equal or two different sub-accelerators

Methods propose 50 designs at a time. A design's worth is its score if it meets the specs, else -1 less what
exceeds them: the order of constrained domination.
"""

import argparse
import dataclasses
import functools
import json
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import algos
from envs.codesign import accuracy, exhaustive, problem, reading
from envs.codesign.environment import CoDesign
from envs.codesign.searching import WithBest
from fdg.training import statistics

SEEDS, TUNING = range(20), range(500, 580)  # reported; settings are chosen on these alone
EVALUATIONS, BUDGETS, AT_ONCE = 5_000, (500, 2_000, 5_000), 50
LEVELS = {"tight": 0.08, "medium": 0.15, "loose": 0.30}
WITHIN = 0.005  # of the optimum's score
PICTURE = Path("docs/images/codesign/search.png")


@functools.cache
def small(level):
    """W1's tasks on 90 chips, 5,898,240 designs; specs are quantiles of 100,000 random designs."""
    w1 = reading.get("w1")
    chips = dataclasses.replace(w1.chips, pes=(0, 128, 256), noc_bytes_per_cycle=(16, 32), buffer_kb=(16,))
    w1 = dataclasses.replace(w1, chips=chips, levels=(), name="small")
    return dataclasses.replace(w1, specs=exhaustive.specs_at(w1, LEVELS[level]))


def problem_of(name, level):
    return small(level) if name == "small" else reading.get(name).at(level)


def unspecified(of):
    """The same for all levels, so one program."""
    return dataclasses.replace(of, specs=problem.Specs())


@functools.partial(jax.jit, static_argnames="of")
def measured(of, drawn, specs):
    """Designs [n] within the budgets, and what they take."""
    designs = jax.vmap(functools.partial(problem.repair, of))(drawn)
    return designs, problem.evaluate(of, designs, specs)


@functools.partial(jax.jit, static_argnames="of")
def drawn(of, seed):
    return jax.vmap(functools.partial(problem.draw, of))(jax.random.split(jax.random.key(seed), AT_ONCE))


# Generators: each yields designs [50, decisions], and gets them back within the budgets, with what they take.


def random(of, rng):
    while True:
        yield np.asarray(drawn(of, int(rng.integers(2**31))))


def evolution(of, rng, population=100, sample=25):
    """Regularised evolution (arXiv 1802.01548): children change one decision of the best of a sample."""
    counts = np.asarray([len(one.options) for one in of.decisions()])
    designs, worth = np.zeros((0, len(counts)), int), np.zeros(0)
    while True:
        if len(worth) < population:
            new = next(random(of, rng))
        else:
            of_sample = rng.integers(len(worth), size=(AT_ONCE, sample))
            new = designs[of_sample[np.arange(AT_ONCE), worth[of_sample].argmax(1)]]
            which = rng.integers(len(counts), size=AT_ONCE)
            new[np.arange(AT_ONCE), which] = rng.integers(counts[which])
        new, value, _ = yield new
        designs, worth = np.concatenate([designs, new])[-population:], np.append(worth, value)[-population:]


def genetic(of, rng, begin=None, fixed=()):
    """Tournaments of two, uniform crossover, one decision changed on average; the best 50 stay."""
    counts = np.asarray([len(one.options) for one in of.decisions()])
    free = ~np.isin(np.arange(len(counts)), fixed)
    new = next(random(of, rng))
    designs, worth = np.zeros((0, len(counts)), int), np.zeros(0)
    while True:
        new, value, _ = yield np.where(free, new, new if begin is None else begin)
        designs, worth = np.concatenate([designs, new]), np.append(worth, value)
        _, first = np.unique(designs, axis=0, return_index=True)
        kept = first[np.argsort(-worth[first], kind="stable")][:AT_ONCE]
        designs, worth = designs[kept], worth[kept]
        parents = designs[rng.integers(len(worth), size=(2, 2, AT_ONCE)).min(0)]
        new = np.where(rng.random(parents[0].shape) < 0.5, *parents)
        changed = rng.random(new.shape) < 1 / free.sum()
        new = np.where(changed, rng.integers(counts, size=new.shape), new)


def network_then_hardware(of, rng):
    """The networks of highest accuracy, which cost no evaluations here; then all of them for a chip."""
    best = [task.choices()[accuracy.of_choices(task, of.accuracy, of.table).argmax()] for task in of.tasks]
    options = [one.options for task in of.tasks for one in task.decisions]
    networks = [one.index(x) for one, x in zip(options, sum(best, ()), strict=True)]
    begin = np.pad(networks, (0, len(of.decisions()) - len(networks)))
    return genetic(of, rng, begin, range(len(networks)))


def hardware_then_network(of, rng):
    """Half of the designs are drawn, for the chip of the one nearest to the specs; then networks for it."""
    networks = sum(len(task.decisions) for task in of.tasks)
    seen = []
    for _ in range(EVALUATIONS // AT_ONCE // 2):
        new, _, result = yield next(random(of, rng))
        apart = np.abs(np.log(np.stack(result[:3], 1) / np.asarray(of.specs)[None])).sum(1)
        first = np.lexsort((apart, result.violation))[0]
        seen.append((result.violation[first], apart[first], new[first]))
    nearest = min(seen, key=lambda one: one[:2])[2]
    yield from genetic(of, rng, nearest, range(networks, len(of.decisions())))


def batched_tpe(seed, candidates=24):
    """Optuna's multivariate TPE; all trials of a batch share their history: densities are computed once."""
    from optuna.samplers import TPESampler
    from optuna.samplers._tpe import sampler as tpe
    from optuna.trial import TrialState

    class Batched(TPESampler):
        proposed: list | None = None

        def _sample(self, study, trial, search_space):
            if not self.proposed:
                complete = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
                parts = tpe._split_trials(study, complete, tpe.default_gamma(len(complete)))
                below, above = (
                    self._build_parzen_estimator(study, search_space, part, handle_below=at == 0)
                    for at, part in enumerate(parts)
                )
                drawn = below.sample(self._rng.rng, candidates * AT_ONCE)
                rows, of_row = np.unique(np.stack([*drawn.values()]), axis=1, return_inverse=True)
                differ = dict(zip(drawn, rows, strict=True))
                value = (below.log_pdf(differ) - above.log_pdf(differ))[of_row].reshape(AT_ONCE, candidates)
                best = value.argmax(1) + candidates * np.arange(AT_ONCE)
                self.proposed = [{key: int(x[at]) for key, x in drawn.items()} for at in best]
            return self.proposed.pop(0)

    return Batched(seed=seed, multivariate=True, constant_liar=False)


def optuna_by(name):
    """One of Optuna's samplers, with excess over the specs as constraints."""

    def propose(of, rng):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = int(rng.integers(2**31))
        sampler = (
            batched_tpe(seed)
            if name == "tpe"
            else optuna.samplers.NSGAIISampler(population_size=AT_ONCE, seed=seed)
        )
        study = optuna.create_study(sampler=sampler, direction="maximize")
        space = {
            f"{at:02d}": optuna.distributions.IntDistribution(0, len(one.options) - 1)
            for at, one in enumerate(of.decisions())
        }
        while True:
            trials = [study.ask(space) for _ in range(AT_ONCE)]
            _, _, costs = yield np.asarray([list(trial.params.values()) for trial in trials])
            for trial, excess, score in zip(trials, costs.excess.tolist(), costs.score.tolist(), strict=True):
                for at, each in enumerate(excess):
                    trial.set_constraint(str(at), each)
                study.tell(trial, score)

    return propose


PROPOSERS = {
    "random": random,
    "evolution": evolution,
    "genetic": genetic,
    "network-then-hardware": network_then_hardware,
    "hardware-then-network": hardware_then_network,
    "nsga2": optuna_by("nsga2"),
    "tpe": optuna_by("tpe"),
}


def proposed(method, of, seeds):
    """Worth of the best so far [seeds, batches], and the best designs [seeds, decisions]."""

    def by_seed(x):
        return np.asarray(x).reshape(len(seeds), AT_ONCE, *x.shape[1:])

    makers = [PROPOSERS[method](of, np.random.default_rng([seed, 41])) for seed in seeds]
    new = [next(one) for one in makers]
    curve, best = np.full((len(seeds), 0), -np.inf), np.asarray(new)[:, 0]
    for _ in range(EVALUATIONS // AT_ONCE):
        flat = jnp.asarray(np.concatenate(new), jnp.int32)
        designs, result = jax.tree.map(by_seed, measured(unspecified(of), flat, jnp.asarray(of.specs)))
        worth = np.where(result.feasible, result.score, -1 - result.violation)
        top = worth.argmax(1)
        before = curve[:, -1] if curve.size else np.full(len(seeds), -np.inf)
        is_better = worth.max(1) > before
        best = np.where(is_better[:, None], designs[np.arange(len(seeds)), top], best)
        curve = np.concatenate([curve, np.maximum(before, worth.max(1))[:, None]], 1)
        new = [
            one.send((designs[i], worth[i], type(result)(*(x[i] for x in result))))
            for i, one in enumerate(makers)
        ]
    return curve, best


@functools.partial(jax.jit, static_argnames="algorithm")
def trained(algorithm, keys):
    best = WithBest(algorithm)

    def one(state):
        state, metrics = jax.lax.scan(
            lambda state, _: best.iterate(state), state, None, algorithm.num_iterations
        )
        return state.env_state.best, (metrics["best_score"], metrics["best_violation"])

    # One after the other: a batch of orthogonal matrices may wait for itself on a CPU of two threads.
    return jax.vmap(one)(jax.lax.map(best.init, keys))


def ppo(of, seeds):
    """PPO by its preset, all seeds in one program."""
    env = CoDesign(of)
    steps = env.max_episode_steps
    preset = algos.PPO.preset(env.name, env)
    algorithm = algos.PPO(env=env, **{**preset, "total_steps": EVALUATIONS * steps})
    episodes, (score, violation) = jax.tree.map(
        np.asarray, trained(algorithm, jax.vmap(jax.random.key)(jnp.asarray(list(seeds))))
    )
    iterations = np.arange(1, algorithm.num_iterations + 1)
    designs = algorithm.num_envs * (iterations * algorithm.num_steps // steps)
    worth = np.where(violation == 0, score, -1 - np.nan_to_num(violation, nan=np.inf))
    at = np.searchsorted(designs, AT_ONCE * np.arange(1, EVALUATIONS // AT_ONCE + 1), "right") - 1
    curve = np.where(at < 0, -np.inf, worth[:, at])
    top = np.where(episodes.violation == 0, episodes.score, -1 - episodes.violation).argmax(1)
    return curve, episodes.choices[np.arange(len(top)), top]


def exhaustively(of, seeds):
    """The best of all designs, for every seed: as a curve that is level."""
    scores = tuple(task.weight * accuracy.of_choices(task, of.accuracy, of.table) for task in of.tasks)
    optimum = exhaustive.enumerate_all(of, scores, of.specs)
    print(f"{of.name}, {of.specs}: {optimum}")
    return np.full((len(seeds), EVALUATIONS // AT_ONCE), optimum.score), np.full(
        (len(seeds), 1), optimum.feasible
    )


METHODS = ("ppo", *PROPOSERS)
JOINT = ("ppo", "genetic", "random", "network-then-hardware", "hardware-then-network")
SLOW = {"tpe"}  # a seed at a time
CELLS = [
    *(("small", level, method) for level in ("tight", "medium") for method in ("exhaustive", *METHODS)),
    *(("w1", level, method) for level in LEVELS for method in METHODS),
    *((name, level, method) for name in ("w2", "w3") for level in LEVELS for method in JOINT),
]


def run(name, level, method, path, seeds=SEEDS):
    """Adds the seeds that a cell lacks."""
    cell = json.loads(path.read_text()) if path.is_file() else {"worth": [], "design": [], "cpu_seconds": 0.0}
    of, together = problem_of(name, level), 1 if method in SLOW else len(seeds)
    search = {"ppo": ppo, "exhaustive": exhaustively}.get(method, functools.partial(proposed, method))
    while missing := list(seeds)[len(cell["worth"]) :][:together]:
        before = time.process_time()
        curve, best = search(of, missing)
        cell["worth"] += curve.round(5).tolist()
        cell["design"] += best.tolist()
        cell["cpu_seconds"] = round(cell["cpu_seconds"] + time.process_time() - before, 1)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(cell))
        part.replace(path)
        print(f"{path.stem}: {len(cell['worth'])} seeds, {cell['cpu_seconds']} s of CPU", flush=True)


def read(folder):
    return {
        cell: json.loads(path.read_text())
        for cell in CELLS
        if (path := folder / f"{'-'.join(cell)}.json").is_file()
    }


def score(worth):
    """Scores, 0 where no design met the specs."""
    return np.maximum(np.asarray(worth), 0)


def with_interval(values):
    low, high = statistics.interval(np.asarray(values))
    return f"{np.mean(values):.3f} ({low:.3f} to {high:.3f})"


def show_methods(cells):
    """Score by evaluations, mean and interval over seeds; in brackets the seeds that meet the specs."""
    optimum = {cell[:2]: one["worth"][0][0] for cell, one in cells.items() if cell[2] == "exhaustive"}
    print(f"\n| problem | method | seeds | {' | '.join(f'{x:,}' for x in BUDGETS)} |\n|{'---|' * 6}")
    for (name, level, method), one in cells.items():
        if name not in ("small", "w1") or method == "exhaustive":
            continue
        worth = np.asarray(one["worth"])
        worth = worth[:, [budget // AT_ONCE - 1 for budget in BUDGETS if budget <= AT_ONCE * worth.shape[1]]]
        columns = [f"{with_interval(score(x))} [{(x >= 0).sum()}]" for x in worth.T]
        if (name, level) in optimum:
            hits = (worth >= optimum[name, level] - WITHIN).sum(0)
            columns = [f"{x} {hit} near" for x, hit in zip(columns, hits, strict=True)]
        columns += [""] * (len(BUDGETS) - len(columns))
        print(f"| {name}, {level} | {method} | {len(worth)} | {' | '.join(columns)} |")
    for key, value in optimum.items():
        print(f"optimum of {', '.join(key)}: {value:.4f}; near is within {WITHIN} of it")


def show_order(cells, seeds=10):
    """One after the other or jointly, of ten seeds; the last columns: relative to networks first."""
    print("\n| problem | method | score | meet all | us, uJ, mm2 | excess | less of each | points |")
    print("|" + "---|" * 8)
    for name, level in dict.fromkeys(cell[:2] for cell in cells if cell[0] != "small"):
        of, rows = problem_of(name, level), {}
        for method in JOINT:
            if one := cells.get((name, level, method)):
                number = len(one["design"][:seeds])
                padded = np.resize(one["design"][:seeds], (len(SEEDS) * AT_ONCE, len(of.decisions())))
                result = measured(unspecified(of), jnp.asarray(padded, jnp.int32), jnp.asarray(of.specs))[1]
                rows[method] = jax.tree.map(lambda x, number=number: np.asarray(x)[:number], result)
        for method, result in rows.items():
            means = [np.mean(x) for x in result[:3]]
            us, uj = means[0] / of.technology.clock_hz * 1e6, means[1] / 1e6
            columns = [with_interval(result.score), f"{result.feasible.sum()} of {len(result.score)}"]
            columns += [f"{us:.2f}, {uj:.2f}, {means[2]:.2f}", f"{result.violation.mean():.0%}"]
            if (first := rows.get("network-then-hardware")) and first is not result:
                less = [np.mean(x) / y for x, y in zip(first[:3], means, strict=True)]
                columns += [", ".join(f"{x:.2f} x" for x in less)]
                columns += [f"{100 * (result.score.mean() - first.score.mean()):+.1f}"]
            else:
                columns += ["", ""]
            print(f"| {name}, {level} | {method} | {' | '.join(columns)} |")


@functools.partial(jax.jit, static_argnames="of")
def on_chips(of, networks, kinds):
    costs = problem.tables(of)
    return jax.lax.map(lambda one: problem.costs_of(of, costs, networks, one), kinds, batch_size=4096)


def show_area():
    """Least latency of the most accurate networks within an area, over all chips of a workload."""
    kinds = ("one", "two equal ones", "two that differ")
    print(f"\n| workload | mm2 at most | us with {' | '.join(kinds)} | its templates |\n|{'---|' * 6}")
    for name in reading.WORKLOADS:
        of = reading.get(name)
        chips, known = of.chips.all(), of.chips.kinds()
        networks = [accuracy.of_choices(task, of.accuracy, of.table).argmax() for task in of.tasks]
        costs = on_chips(of, jnp.asarray(networks, jnp.int32), jnp.asarray(chips))
        cycles = np.asarray(costs.latency_cycles, float)
        kind = np.where(chips[:, 0] == 0, 0, np.where(chips[:, 0] == chips[:, 1], 1, 2))
        for level, specs in of.levels:
            fits = np.asarray(costs.area_mm2) <= specs.area_mm2
            at = [np.where(fits & (kind == each), cycles, np.inf).argmin() for each in range(3)]
            us = [cycles[i] / of.technology.clock_hz * 1e6 for i in at]
            columns = [*(f"{x:.2f}" for x in us), " and ".join(known[i][1] for i in chips[at[2]])]
            print(f"| {name} | {specs.area_mm2} ({level}) | {' | '.join(columns)} |")


def plot(cells, path):
    """Score by evaluations of w1, means and intervals over seeds, a panel a level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), sharey=True, layout="constrained")
    evaluations = AT_ONCE * np.arange(1, EVALUATIONS // AT_ONCE + 1)
    for axes, level in zip(panels, LEVELS, strict=True):
        for at, method in enumerate(METHODS):
            if ("w1", level, method) not in cells or method == "network-then-hardware":
                continue
            curves = score(cells["w1", level, method]["worth"])
            low, high = statistics.intervals(curves)
            here = evaluations[: curves.shape[1]]
            axes.plot(here, curves.mean(0), color=f"C{at}", label=method, linewidth=1.6)
            axes.fill_between(here, low, high, color=f"C{at}", alpha=0.15, linewidth=0)
        axes.set_title(f"w1, {level} specs", loc="left", fontsize=11)
        axes.set_xlabel("designs evaluated")
        axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("score, 0 if no design meets the specs")
    panels[0].set_ylim(0.35, 0.7)
    panels[-1].legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cells whose name has this, a regular expression")
    parser.add_argument("--out", type=Path, default=Path("runs/codesign-study"))
    parser.add_argument("--show", action="store_true", help="prints tables of what is there")
    parser.add_argument("--area", action="store_true", help="prints latencies at equal area")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for cell in CELLS:
        name = "-".join(cell)
        if not (args.show or args.area) and re.search(args.only, name):
            run(*cell, args.out / f"{name}.json")
    if args.show:
        cells = read(args.out)
        show_methods(cells)
        plot(cells, PICTURE)
        show_order(cells)
    if args.area:
        show_area()


if __name__ == "__main__":
    main()
