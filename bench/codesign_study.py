"""Compares search methods for co-design with equal numbers of evaluations.

python -m bench.codesign_study                      # runs missing cells, into runs/codesign-study
python -m bench.codesign_study --only 'small.*ppo'  # cells whose names match a regular expression
python -m bench.codesign_study --show               # prints tables of finished cells, and draws the picture
python -m bench.codesign_study --area               # compares chips of one sub-accelerator, and of two

A cell is a problem, a level of its specs and a method; its results are one JSON file. Methods propose 50
designs at a time. A design's worth is its score if it meets the specs, else -1 minus its violation of them.
This orders designs as constrained domination does.
"""

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
from bench import harness
from bench.codesign_specs import LEVELS
from envs.codesign import accuracy, exhaustive, problem, reading
from envs.codesign.environment import CoDesign
from envs.codesign.searching import WithBest
from fdg import files
from fdg.training import statistics

SEEDS = range(20)  # settings were chosen on seeds 500 to 579
EVALUATIONS, BUDGETS, BATCH = 5_000, (500, 2_000, 5_000), 50
NEAR = 0.005  # a score counts as near the optimum within this difference
PICTURE = Path("docs/images/codesign/search.png")


@functools.cache
def small_workload(level):
    """W1's tasks on 90 chips: 5,898,240 designs. Specs are quantiles of 100,000 random designs."""
    w1 = reading.get("w1")
    chips = dataclasses.replace(w1.chips, pes=(0, 128, 256), noc_bytes_per_cycle=(16, 32), buffer_kb=(16,))
    w1 = dataclasses.replace(w1, chips=chips, levels=(), name="small")
    return dataclasses.replace(w1, specs=exhaustive.specs_at(w1, LEVELS[level]))


def problem_of(name, level):
    return small_workload(level) if name == "small" else reading.get(name).at(level)


def repair_and_evaluate(workload, proposals):
    """Repairs proposals [n, decisions] to fit the budgets, and evaluates them; one program for all specs."""
    specs = jnp.asarray(workload.specs)
    workload = dataclasses.replace(workload, specs=problem.Specs())
    return _repair_and_evaluate(workload, jnp.asarray(proposals, jnp.int32), specs)


@functools.partial(jax.jit, static_argnames="workload")
def _repair_and_evaluate(workload, proposals, specs):
    designs = jax.vmap(functools.partial(problem.repair, workload))(proposals)
    return designs, problem.evaluate(workload, designs, specs)


def accuracies(workload):
    """For each task, the accuracies of all its networks."""
    return [accuracy.of_choices(task, workload.accuracy, workload.table) for task in workload.tasks]


@functools.partial(jax.jit, static_argnames="workload")
def random_designs(workload, seed):
    return jax.vmap(functools.partial(problem.draw, workload))(jax.random.split(jax.random.key(seed), BATCH))


# Each proposer is a generator: it yields proposed designs [50, decisions], and receives (repaired designs,
# worths, evaluation).


def random(workload, rng):
    while True:
        yield np.asarray(random_designs(workload, int(rng.integers(2**31))))


def evolution(workload, rng, population=100, sample=25):
    """Regularised evolution (arXiv 1802.01548): a child is the best of a sample with one decision changed."""
    counts = np.asarray([len(decision.options) for decision in workload.decisions()])
    designs, worth = np.zeros((0, len(counts)), int), np.zeros(0)
    while True:
        if len(worth) < population:
            new = next(random(workload, rng))
        else:
            samples = rng.integers(len(worth), size=(BATCH, sample))
            new = designs[samples[np.arange(BATCH), worth[samples].argmax(1)]]
            positions = rng.integers(len(counts), size=BATCH)
            new[np.arange(BATCH), positions] = rng.integers(counts[positions])
        new, value, _ = yield new
        designs, worth = np.concatenate([designs, new])[-population:], np.append(worth, value)[-population:]


def genetic(workload, rng, start=None, fixed=()):
    """Tournaments of two, uniform crossover, one decision changed on average; the best 50 survive.

    Decisions with indices in `fixed` keep their values in the design `start`.
    """
    counts = np.asarray([len(decision.options) for decision in workload.decisions()])
    free = ~np.isin(np.arange(len(counts)), fixed)
    new = next(random(workload, rng))
    designs, worth = np.zeros((0, len(counts)), int), np.zeros(0)
    while True:
        new, value, _ = yield np.where(free, new, new if start is None else start)
        designs, worth = np.concatenate([designs, new]), np.append(worth, value)
        _, first = np.unique(designs, axis=0, return_index=True)
        survivors = first[np.argsort(-worth[first], kind="stable")][:BATCH]
        designs, worth = designs[survivors], worth[survivors]
        parents = designs[rng.integers(len(worth), size=(2, 2, BATCH)).min(0)]
        new = np.where(rng.random(parents[0].shape) < 0.5, *parents)
        mutated = rng.random(new.shape) < 1 / free.sum()
        new = np.where(mutated, rng.integers(counts, size=new.shape), new)


def network_then_hardware(workload, rng):
    """Takes the most accurate networks, which costs no evaluations; then searches for a chip for them."""
    best = [task.choices()[x.argmax()] for task, x in zip(workload.tasks, accuracies(workload), strict=True)]
    options = [decision.options for task in workload.tasks for decision in task.decisions]
    choices = [values.index(x) for values, x in zip(options, sum(best, ()), strict=True)]
    start = np.pad(choices, (0, len(workload.decisions()) - len(choices)))
    return genetic(workload, rng, start, range(len(choices)))


def hardware_then_network(workload, rng):
    """Takes the chip of the random design nearest to the specs; then searches for networks for it."""
    num_network_decisions = sum(len(task.decisions) for task in workload.tasks)
    candidates = []
    for _ in range(EVALUATIONS // BATCH // 2):
        new, _, result = yield next(random(workload, rng))
        distance = np.abs(np.log(np.stack(result[:3], 1) / np.asarray(workload.specs)[None])).sum(1)
        best = np.lexsort((distance, result.violation))[0]
        candidates.append((result.violation[best], distance[best], new[best]))
    nearest = min(candidates, key=lambda design: design[:2])[2]
    yield from genetic(workload, rng, nearest, range(num_network_decisions, len(workload.decisions())))


def batched_tpe(seed, candidates=24):
    """Optuna's multivariate TPE, which computes densities once for all trials of a batch."""
    from optuna.samplers import TPESampler
    from optuna.samplers._tpe import sampler as tpe
    from optuna.trial import TrialState

    class Batched(TPESampler):
        proposed: list | None = None

        def _sample(self, study, trial, search_space):
            if not self.proposed:
                complete = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
                halves = tpe._split_trials(study, complete, tpe.default_gamma(len(complete)))
                below, above = (
                    self._build_parzen_estimator(study, search_space, half, handle_below=i == 0)
                    for i, half in enumerate(halves)
                )
                drawn = below.sample(self._rng.rng, candidates * BATCH)
                rows, inverse = np.unique(np.stack([*drawn.values()]), axis=1, return_inverse=True)
                distinct = dict(zip(drawn, rows, strict=True))
                value = below.log_pdf(distinct) - above.log_pdf(distinct)
                value = value[inverse].reshape(BATCH, candidates)
                best = value.argmax(1) + candidates * np.arange(BATCH)
                self.proposed = [{key: int(x[i]) for key, x in drawn.items()} for i in best]
            return self.proposed.pop(0)

    return Batched(seed=seed, multivariate=True, constant_liar=False)


def optuna_proposer(name):
    """A proposer that uses one of Optuna's samplers; the excess over the specs is a constraint."""

    def propose(workload, rng):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = int(rng.integers(2**31))
        sampler = (
            batched_tpe(seed)
            if name == "tpe"
            else optuna.samplers.NSGAIISampler(population_size=BATCH, seed=seed)
        )
        study = optuna.create_study(sampler=sampler, direction="maximize")
        space = {
            f"{i:02d}": optuna.distributions.IntDistribution(0, len(decision.options) - 1)
            for i, decision in enumerate(workload.decisions())
        }
        while True:
            trials = [study.ask(space) for _ in range(BATCH)]
            _, _, costs = yield np.asarray([list(trial.params.values()) for trial in trials])
            for trial, excess, score in zip(trials, costs.excess.tolist(), costs.score.tolist(), strict=True):
                for i, value in enumerate(excess):
                    trial.set_constraint(str(i), value)
                study.tell(trial, score)

    return propose


PROPOSERS = {
    "random": random,
    "evolution": evolution,
    "genetic": genetic,
    "network-then-hardware": network_then_hardware,
    "hardware-then-network": hardware_then_network,
    "nsga2": optuna_proposer("nsga2"),
    "tpe": optuna_proposer("tpe"),
}


def search(method, workload, seeds):
    """Searches; returns the best worth so far [seeds, batches] and the best designs [seeds, decisions]."""

    def by_seed(x):
        return np.asarray(x).reshape(len(seeds), BATCH, *x.shape[1:])

    proposers = [PROPOSERS[method](workload, np.random.default_rng([seed, 41])) for seed in seeds]
    new = [next(proposer) for proposer in proposers]
    curve, best = np.full((len(seeds), 0), -np.inf), np.asarray(new)[:, 0]
    for _ in range(EVALUATIONS // BATCH):
        designs, result = jax.tree.map(by_seed, repair_and_evaluate(workload, np.concatenate(new)))
        worth = np.where(result.feasible, result.score, -1 - result.violation)
        top = worth.argmax(1)
        previous = curve[:, -1] if curve.size else np.full(len(seeds), -np.inf)
        is_better = worth.max(1) > previous
        best = np.where(is_better[:, None], designs[np.arange(len(seeds)), top], best)
        curve = np.concatenate([curve, np.maximum(previous, worth.max(1))[:, None]], 1)
        new = [
            proposer.send((designs[i], worth[i], type(result)(*(x[i] for x in result))))
            for i, proposer in enumerate(proposers)
        ]
    return curve, best


@functools.partial(jax.jit, static_argnames="algorithm")
def train_seeds(algorithm, keys):
    """Trains with each key; returns the best episodes, and each iteration's best score and violation."""
    best = WithBest(algorithm)

    def train(state):
        state, metrics = jax.lax.scan(
            lambda state, _: best.iterate(state), state, None, algorithm.num_iterations
        )
        return state.env_state.best, (metrics["best_score"], metrics["best_violation"])

    # `map`, because a batch of orthogonal initialisers may deadlock on a CPU with two threads.
    return jax.vmap(train)(jax.lax.map(best.init, keys))


def ppo(workload, seeds):
    """Searches by PPO with its preset, all seeds in one program; returns the same as `search`."""
    env = CoDesign(workload)
    steps = env.max_episode_steps
    preset = algos.PPO.preset(env.name, env)
    algorithm = algos.PPO(env=env, **{**preset, "total_steps": EVALUATIONS * steps})
    episodes, (score, violation) = jax.tree.map(
        np.asarray, train_seeds(algorithm, jax.vmap(jax.random.key)(jnp.asarray(list(seeds))))
    )
    iterations = np.arange(1, algorithm.num_iterations + 1)
    designs = algorithm.num_envs * (iterations * algorithm.num_steps // steps)
    worth = np.where(violation == 0, score, -1 - np.nan_to_num(violation, nan=np.inf))
    last = np.searchsorted(designs, BATCH * np.arange(1, EVALUATIONS // BATCH + 1), "right") - 1
    curve = np.where(last < 0, -np.inf, worth[:, last])
    top = np.where(episodes.violation == 0, episodes.score, -1 - episodes.violation).argmax(1)
    return curve, episodes.choices[np.arange(len(top)), top]


def enumerate_designs(workload, seeds):
    """The optimum over all designs, in the form of `search`: a constant curve for each seed."""
    scores = tuple(task.weight * x for task, x in zip(workload.tasks, accuracies(workload), strict=True))
    optimum = exhaustive.enumerate_all(workload, scores, workload.specs)
    print(f"{workload.name}, {workload.specs}: {optimum}")
    return np.full((len(seeds), EVALUATIONS // BATCH), optimum.score), np.full(
        (len(seeds), 1), optimum.feasible
    )


METHODS = ("ppo", *PROPOSERS)
# Joint search, and search for networks or for chips first, which `show_order` compares.
ORDER_METHODS = ("ppo", "genetic", "random", "network-then-hardware", "hardware-then-network")
SLOW = {"tpe"}  # methods that run one seed at a time
CELLS = [
    *(("small", level, method) for level in ("tight", "medium") for method in ("exhaustive", *METHODS)),
    *(("w1", level, method) for level in LEVELS for method in METHODS),
    *((name, level, method) for name in ("w2", "w3") for level in LEVELS for method in ORDER_METHODS),
]


def run(name, level, method, path):
    """Runs the seeds that a cell lacks, and adds their results to its file."""
    cell = json.loads(path.read_text()) if path.is_file() else {"worth": [], "design": [], "cpu_seconds": 0.0}
    workload, seeds_at_once = problem_of(name, level), 1 if method in SLOW else len(SEEDS)
    best_of = {"ppo": ppo, "exhaustive": enumerate_designs}.get(method, functools.partial(search, method))
    while missing := SEEDS[len(cell["worth"]) :][:seeds_at_once]:
        before = time.process_time()
        curve, best = best_of(workload, missing)
        cell["worth"] += curve.round(5).tolist()
        cell["design"] += best.tolist()
        cell["cpu_seconds"] = round(cell["cpu_seconds"] + time.process_time() - before, 1)
        files.write(path, json.dumps(cell).encode())
        print(f"{path.stem}: {len(cell['worth'])} seeds, {cell['cpu_seconds']} s of CPU", flush=True)


def read(folder):
    return {
        cell: json.loads(path.read_text())
        for cell in CELLS
        if (path := folder / f"{'-'.join(cell)}.json").is_file()
    }


def score(worth):
    """Scores from worths: 0 where no design met the specs."""
    return np.maximum(np.asarray(worth), 0)


def mean_with_interval(values):
    low, high = statistics.interval(np.asarray(values))
    return f"{np.mean(values):.3f} ({low:.3f} to {high:.3f})"


def show_methods(cells):
    """Prints mean scores with intervals over seeds, and in brackets how many seeds meet the specs."""
    optimum = {cell[:2]: stored["worth"][0][0] for cell, stored in cells.items() if cell[2] == "exhaustive"}
    rows = []
    for (name, level, method), stored in cells.items():
        if name not in ("small", "w1") or method == "exhaustive":
            continue
        worth = np.asarray(stored["worth"])
        worth = worth[:, [budget // BATCH - 1 for budget in BUDGETS if budget <= BATCH * worth.shape[1]]]
        columns = [f"{mean_with_interval(score(x))} [{(x >= 0).sum()}]" for x in worth.T]
        if (name, level) in optimum:
            hits = (worth >= optimum[name, level] - NEAR).sum(0)
            columns = [f"{x} {hit} near" for x, hit in zip(columns, hits, strict=True)]
        columns += [""] * (len(BUDGETS) - len(columns))
        rows.append((f"{name}, {level}", method, len(worth), *columns))
    print("", harness.table(("problem", "method", "seeds", *(f"{x:,}" for x in BUDGETS)), rows), sep="\n")
    for key, value in optimum.items():
        print(f"optimum of {', '.join(key)}: {value:.4f}; near is within {NEAR} of it")


def show_order(cells):
    """Prints joint and sequential search with ten seeds, and compares them with network-then-hardware."""
    rows = []
    for name, level in dict.fromkeys(cell[:2] for cell in cells if cell[0] != "small"):
        workload, results = problem_of(name, level), {}
        for method in ORDER_METHODS:
            if stored := cells.get((name, level, method)):
                designs = np.asarray(stored["design"][:10])
                count, shape = len(designs), (len(SEEDS) * BATCH, len(workload.decisions()))
                result = repair_and_evaluate(workload, np.resize(designs, shape))[1]
                results[method] = jax.tree.map(lambda x, count=count: np.asarray(x)[:count], result)
        for method, result in results.items():
            means = [np.mean(x) for x in result[:3]]
            us, uj = means[0] / workload.technology.clock_hz * 1e6, means[1] / 1e6
            columns = [mean_with_interval(result.score), f"{result.feasible.sum()} of {len(result.score)}"]
            columns += [f"{us:.2f}, {uj:.2f}, {means[2]:.2f}", f"{result.violation.mean():.0%}"]
            if (first := results.get("network-then-hardware")) and first is not result:
                ratios = [np.mean(x) / y for x, y in zip(first[:3], means, strict=True)]
                columns += [", ".join(f"{x:.2f} x" for x in ratios)]
                columns += [f"{100 * (result.score.mean() - first.score.mean()):+.1f}"]
            else:
                columns += ["", ""]
            rows.append((f"{name}, {level}", method, *columns))
    head = ("problem", "method", "score", "meet all", "us, uJ, mm2", "excess", "less of each", "points")
    print("", harness.table(head, rows), sep="\n")


@functools.partial(jax.jit, static_argnames="workload")
def costs_on_chips(workload, networks, kinds):
    costs = problem.tables(workload)
    return jax.lax.map(lambda chip: problem.costs_of(workload, costs, networks, chip), kinds, batch_size=4096)


def show_area():
    """Prints the lowest latency of the most accurate networks on any chip, for each limit of area."""
    rows = []
    for name in reading.WORKLOADS:
        workload = reading.get(name)
        chips, sub_kinds = workload.chips.all(), workload.chips.kinds()
        networks = [x.argmax() for x in accuracies(workload)]
        costs = costs_on_chips(workload, jnp.asarray(networks, jnp.int32), jnp.asarray(chips))
        cycles = np.asarray(costs.latency_cycles, float)
        kind = np.where(chips[:, 0] == 0, 0, np.where(chips[:, 0] == chips[:, 1], 1, 2))
        for level, specs in workload.levels:
            fits = np.asarray(costs.area_mm2) <= specs.area_mm2
            fastest = [np.where(fits & (kind == i), cycles, np.inf).argmin() for i in range(3)]
            us = [cycles[i] / workload.technology.clock_hz * 1e6 for i in fastest]
            columns = [*(f"{x:.2f}" for x in us), " and ".join(sub_kinds[i][1] for i in chips[fastest[2]])]
            rows.append((name, f"{specs.area_mm2} ({level})", *columns))
    kinds = ("us with one", "two equal ones", "two that differ")
    print("", harness.table(("workload", "mm2 at most", *kinds, "its templates"), rows), sep="\n")


def plot(cells, path):
    """Draws scores of w1 by evaluations, means and intervals over seeds, with a panel for each level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), sharey=True, layout="constrained")
    evaluations = BATCH * np.arange(1, EVALUATIONS // BATCH + 1)
    for axes, level in zip(panels, LEVELS, strict=True):
        for i, method in enumerate(METHODS):
            if ("w1", level, method) not in cells or method == "network-then-hardware":
                continue
            curves = score(cells["w1", level, method]["worth"])
            low, high = statistics.intervals(curves)
            x = evaluations[: curves.shape[1]]
            axes.plot(x, curves.mean(0), color=f"C{i}", label=method, linewidth=1.6)
            axes.fill_between(x, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
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
    parser = harness.parser("bench.codesign_study", __doc__)
    parser.add_argument("--only", default="", help="a regular expression that the cell's name matches")
    parser.add_argument("--out", type=Path, default=Path("runs/codesign-study"))
    parser.add_argument("--show", action="store_true", help="print tables of finished cells")
    parser.add_argument("--area", action="store_true", help="print latencies at equal area")
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
