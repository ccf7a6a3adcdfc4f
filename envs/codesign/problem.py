"""A co-design problem as a value: decisions and masks; costs and scores of designs."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign import accuracy, cost, schedule, templates
from envs.codesign.layers import Layer, output_words, stack
from envs.codesign.space import Chips, Decision, Task
from envs.codesign.technology import Technology
from fdg.errors import FdgError, unknown_name


class Specs(NamedTuple):
    """Upper limits of a design; infinite for no limit."""

    latency_cycles: float = math.inf
    energy_pj: float = math.inf
    area_mm2: float = math.inf


_ANY, _CHIPS = Specs(), Chips()  # default values


@dataclasses.dataclass(frozen=True)
class Problem:
    """Networks for several tasks on one chip, within specs.

    Equal arguments make equal values; arrays are made when a design is evaluated.
    """

    tasks: tuple[Task, ...]  # one network is chosen for each
    chips: Chips = _CHIPS  # one chip is chosen of these
    technology: Technology = cost.PROCESS  # constants of the process
    specs: Specs = _ANY  # limits of a design
    # further specs by name, such as ("tight", Specs(...)); see `at`
    levels: tuple[tuple[str, Specs], ...] = ()
    # maximum costs of designs, which scale the paper's penalty: infinite if unknown
    bounds: Specs = _ANY
    accuracy: str = "surrogate"  # source of accuracies, one of `accuracy.SOURCES`
    table: str = ""  # file of accuracies, in place of the shipped one (`accuracy="table"`)
    name: str = "codesign"  # for messages
    # files that the problem was read from, (name in a run directory, path)
    read_from: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.accuracy not in accuracy.SOURCES:
            raise unknown_name("source of accuracies", self.accuracy, accuracy.SOURCES)

    @property
    def files(self) -> dict[str, str]:
        """`read_from` as a dictionary: files that a run copies."""
        return dict(self.read_from)

    def decisions(self) -> tuple[Decision, ...]:
        """All decisions, in order: those of each network, then of each sub-accelerator."""
        networks = [x._replace(name=f"{task.name}: {x.name}") for task in self.tasks for x in task.decisions]
        subs = [
            decision._replace(name=f"sub-accelerator {i}: {decision.name}")
            for i in range(self.chips.subaccelerators)
            for decision in self.chips.decisions()
        ]
        return (*networks, *subs)

    def count(self) -> int:
        """The number of designs that `enumerate_all` evaluates."""
        return math.prod(len(task.choices()) for task in self.tasks) * len(self.chips.all())

    def at(self, level: str) -> "Problem":
        """This problem with the specs of a level.

        Raises:
          FdgError: it has no such level.
        """
        levels = dict(self.levels)
        if level not in levels:
            if not levels:
                raise FdgError(
                    f"{self.name} has no specs called '{level}': write [specs.{level}] in its file"
                )
            raise unknown_name(f"level of specs of {self.name}", level, levels)
        return dataclasses.replace(self, specs=levels[level])


def mask(problem: Problem, chosen: jax.Array, at: jax.Array | int) -> jax.Array:
    """Which options of decision `at` are within the budgets, bool [largest number of options].

    Earlier choices use up PEs and bandwidth, and the minimum for later sub-accelerators is reserved. A
    sub-accelerator with 0 PEs is absent; it has one option per decision. If all others are absent, the last
    one needs PEs. `chosen` [decisions] int32 are indices of options; those from `at` on are not read.
    """
    decisions, chips = problem.decisions(), problem.chips
    max_options = max(len(decision.options) for decision in decisions)
    num_options = jnp.asarray([len(decision.options) for decision in decisions])
    per_sub = len(chips.decisions())
    first = len(decisions) - per_sub * chips.subaccelerators
    pes, noc = _padded_options(chips, max_options)
    pes_left, noc_left = remaining_budget(problem, chosen, at)
    sub = (at - first) // per_sub
    later_subs = chips.subaccelerators - 1 - sub
    is_alone = (sub == chips.subaccelerators - 1) & (pes_left == chips.budget_pes)
    fits_pes = (pes <= pes_left - later_subs * min(chips.pes)) & ((pes > 0) | ~is_alone)
    # The margin allows for rounding errors in sums of float32 fractions.
    fits_noc = noc <= (noc_left - later_subs * min(chips.noc_bytes_per_cycle)) * (1 + 1e-6)
    pes_option = chosen[first + jnp.maximum(sub, 0) * per_sub]
    is_absent = pes[pes_option] == 0
    position = (at - first) % per_sub  # 0: PEs, 2: bandwidth
    allowed = jnp.where(position == 2, fits_noc, True) & (
        ~is_absent | _is_absent_option(chips, max_options, position)
    )
    allowed = jnp.where(position == 0, fits_pes, allowed)
    return jnp.where(at >= first, allowed, True) & (jnp.arange(max_options) < num_options[at])


def _is_absent_option(chips: Chips, max_options: int, position: jax.Array | int) -> jax.Array:
    """True for an absent sub-accelerator's only option: of bandwidths the lowest, else the first."""
    least = chips.noc_bytes_per_cycle.index(min(chips.noc_bytes_per_cycle))
    return jnp.arange(max_options) == jnp.where(position == 2, least, 0)


def _padded_options(chips: Chips, max_options: int) -> tuple[jax.Array, jax.Array]:
    """Numbers of PEs, int32, and bandwidths, float32, padded with 0 to [max_options]."""
    pes, noc = (
        np.pad(np.asarray(x), (0, max_options - len(x))) for x in (chips.pes, chips.noc_bytes_per_cycle)
    )
    return jnp.asarray(pes, jnp.int32), jnp.asarray(noc, jnp.float32)


def remaining_budget(problem: Problem, chosen: jax.Array, at: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """PEs and bandwidth that remain for the sub-accelerator of decision `at`."""
    chips, decisions = problem.chips, problem.decisions()
    per_sub = len(chips.decisions())
    first = len(decisions) - per_sub * chips.subaccelerators
    pes, noc = _padded_options(chips, max(len(chips.pes), len(chips.noc_bytes_per_cycle)))
    starts = jnp.arange(chips.subaccelerators) * per_sub + first
    is_before = jnp.arange(chips.subaccelerators) < (at - first) // per_sub
    spent = jnp.where(is_before, pes[chosen[starts]], 0)
    noc_spent = jnp.where(spent > 0, noc[chosen[starts + 2]], 0)
    return chips.budget_pes - spent.sum(), chips.budget_noc_bytes_per_cycle - noc_spent.sum()


def repair(problem: Problem, choices: jax.Array) -> jax.Array:
    """The nearest design within the budgets, decision by decision.

    An option beyond the remaining budget becomes the nearest lower one within it, or else the first.
    `choices` [decisions] int32 may be any numbers; use `jax.vmap` for many.
    """
    return jax.lax.fori_loop(
        0, len(problem.decisions()), lambda at, chosen: decide(problem, chosen, at, chosen[at]), choices
    )


def draw(problem: Problem, key: jax.Array) -> jax.Array:
    """A random design, [decisions] int32: each decision is uniform among the remaining options."""

    def step(at: jax.Array, chosen: jax.Array) -> jax.Array:
        allowed = mask(problem, chosen, at)
        drawn = jax.random.uniform(jax.random.fold_in(key, at), allowed.shape)
        return chosen.at[at].set(jnp.where(allowed, drawn, -1).argmax().astype(jnp.int32))

    total = len(problem.decisions())
    return jax.lax.fori_loop(0, total, step, jnp.zeros(total, jnp.int32))


def decide(problem: Problem, chosen: jax.Array, at: jax.Array, option: jax.Array) -> jax.Array:
    """`chosen` with an option for decision `at`, repaired as in `repair`."""
    allowed = mask(problem, chosen, at)
    indices = jnp.arange(len(allowed))
    lower = jnp.where(allowed & (indices <= option), indices, -1).max()
    return chosen.at[at].set(jnp.where(lower < 0, allowed.argmax(), lower).astype(chosen.dtype))


class Tables(NamedTuple):
    """Costs of every layer of every network on every sub-accelerator.

    M tasks, N networks of a task, L layers of a network, U unique layers, F kinds of sub-accelerators.
    """

    layer: np.ndarray  # [M, N, L] int32, index of a unique layer; 0 for none
    latency_cycles: np.ndarray  # [F, U] int32; a design reads contiguous entries
    energy_pj: np.ndarray  # [F, U] float32
    map_bytes: np.ndarray  # [U] float32, of a layer's output
    noc_bytes_per_cycle: np.ndarray  # [F] float32
    area_mm2: np.ndarray  # [F] float32, without the chip's shared parts


_MAX_COSTS = 2**24  # entries of a table: 128 MiB, which stay cached


def tables(problem: Problem) -> Tables:
    """Look-up tables of costs; sizes are padded to the largest network's."""
    registered = tuple(map(templates.get, problem.chips.templates))  # a template may be registered again
    return _tables(problem.tasks, problem.chips, problem.technology, registered)


@functools.lru_cache(maxsize=16)
def _tables(tasks: tuple[Task, ...], chips: Chips, technology: Technology, _: tuple) -> Tables:
    """As `tables`; the last argument, the templates, is only a key of the cache."""
    networks = [[task.build(*choice) for choice in task.choices()] for task in tasks]
    max_networks, longest = max(map(len, networks)), max(len(layers) for task in networks for layers in task)
    layer_index: dict[Layer | None, int] = {None: 0}
    layer = np.zeros((len(tasks), max_networks, longest), np.int32)
    for task, task_networks in enumerate(networks):
        for network, one in enumerate(task_networks):
            layer[task, network, : len(one)] = [layer_index.setdefault(x, len(layer_index)) for x in one]
    kinds = 1 + math.prod(len(x.options) for x in chips.decisions()[1:]) * sum(x > 0 for x in chips.pes)
    if len(layer_index) * kinds > _MAX_COSTS:
        raise FdgError(
            f"chips: {kinds:,} sub-accelerators that differ, times {len(layer_index):,} layers, are more than"
            f" {_MAX_COSTS:,} costs: give fewer options of PEs, bandwidths or buffers"
        )
    with jax.ensure_compile_time_eval():
        layers, subs = stack(list(layer_index)), chips.subs()
        costs = cost.layer_costs(layers, subs, chips.templates, technology)
        words = jax.vmap(output_words)(layers)
        single_subs = jax.tree.map(lambda x: x[:, None], subs)
        areas = jax.vmap(lambda sub: cost.area_mm2(sub, chips.templates, technology))(single_subs)
        arrays = (
            layer,
            jnp.where(words[:, None] > 0, costs.latency_cycles, 0).T,
            costs.energy_pj.T,
            words * jnp.float32(technology.word_bytes),
            jnp.where(subs.rows > 0, subs.noc_bytes_per_cycle, jnp.inf),
            areas - technology.chip_mm2,
        )
        return Tables(*map(np.asarray, arrays))


class Costs(NamedTuple):
    """Costs of designs."""

    latency_cycles: jax.Array  # int32
    energy_pj: jax.Array  # float32
    area_mm2: jax.Array  # float32


def costs_of(problem: Problem, costs: Tables, networks: jax.Array, kinds: jax.Array) -> Costs:
    """Costs of a design, scalars; use `jax.vmap` for many.

    `costs` are `tables(problem)`; `networks` [M] int32 are indices among each task's `choices()`, `kinds`
    [subaccelerators] int32 among `chips.kinds()`.
    """
    costs = jax.tree.map(jnp.asarray, costs)
    layer = costs.layer[jnp.arange(len(problem.tasks)), networks]
    latency, energy = (x[kinds, layer[..., None]] for x in (costs.latency_cycles, costs.energy_pj))
    transfer = cost.whole_cycles(costs.map_bytes[layer] / costs.noc_bytes_per_cycle[kinds].min())
    area = problem.technology.chip_mm2 + costs.area_mm2[kinds].sum()
    return Costs(*schedule.chain_schedule(latency, energy, transfer), area)


def positions(problem: Problem, choices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A design as indices, int32: [M] among each task's `choices()`, and [A] among `chips.kinds()`.

    `choices` [decisions] int32 are within the budgets.
    """
    first, networks = 0, []
    for task in problem.tasks:
        networks.append(_mixed_radix(choices[first:], [len(decision.options) for decision in task.decisions]))
        first += len(task.decisions)
    chips, kinds = problem.chips, []
    rank = np.cumsum([x > 0 for x in chips.pes]) - 1  # indices among the options above 0
    sizes = [len(decision.options) for decision in chips.decisions()]
    for sub in range(chips.subaccelerators):
        pes, *rest = (choices[first + sub * len(sizes) + i] for i in range(len(sizes)))
        kind = 1 + _mixed_radix([jnp.asarray(rank, jnp.int32)[pes], *rest], [0, *sizes[1:]])
        kinds.append(jnp.where(jnp.asarray(chips.pes)[pes] > 0, kind, 0))
    return jnp.stack(networks).astype(jnp.int32), jnp.stack(kinds).astype(jnp.int32)


def _mixed_radix(digits: Any, bases: list[int]) -> jax.Array:
    """The number that digits of several bases represent."""
    index = jnp.int32(0)
    for at, base in enumerate(bases):
        index = index * base + digits[at]
    return index


class Evaluation(NamedTuple):
    """Costs and scores of designs; M tasks."""

    latency_cycles: jax.Array  # [B] int32
    energy_pj: jax.Array  # [B] float32
    area_mm2: jax.Array  # [B] float32
    accuracy: jax.Array  # [B, M] float32, NaN if unknown
    score: jax.Array  # [B] float32, weighted sum of accuracies
    excess: jax.Array  # [B, 3] float32, of latency, energy and area, relative to the spec
    violation: jax.Array  # [B] float32, the sum of `excess`
    feasible: jax.Array  # [B] bool


def evaluate(problem: Problem, choices: jax.Array, specs: Any = None) -> Evaluation:
    """Evaluates any number of designs with one compiled program.

    Args:
      problem: a static argument of the program.
      choices: [B, decisions] int32 within the budgets: indices of the options of `problem.decisions()`.
      specs: [3] or [B, 3], in place of the problem's.

    Returns:
      Arrays [B, ...]. With `accuracy="train"`, networks of designs that violate a spec are not trained: their
      accuracies are 0.

    >>> from envs.codesign import space
    >>> problem = Problem((space.resnet9(), space.unet()))
    >>> design = repair(problem, jax.numpy.zeros(19, "int32") + 3)
    >>> found = evaluate(problem, design[None])
    >>> found.feasible.tolist(), found.accuracy.shape
    ([True], (1, 2))
    """
    return _evaluate(problem, jnp.asarray(choices, jnp.int32), problem.specs if specs is None else specs)


@functools.partial(jax.jit, static_argnames="problem")
def _evaluate(problem: Problem, choices: jax.Array, specs: Any) -> Evaluation:
    """As `evaluate`, compiled."""
    specs = jnp.broadcast_to(jnp.asarray(specs, jnp.float32), (len(choices), 3))
    networks, kinds = jax.vmap(lambda choice: positions(problem, choice))(choices)
    costs = jax.vmap(functools.partial(costs_of, problem, tables(problem)))(networks, kinds)
    excess = jax.vmap(over)(costs, specs)
    violation = excess.sum(1)
    feasible = violation == 0
    accuracies = accuracy.accuracies(problem.tasks, problem.accuracy, problem.table, networks, feasible)
    weights = jnp.asarray([task.weight for task in problem.tasks], jnp.float32)
    score = (jnp.nan_to_num(accuracies) * weights[None]).sum(1)
    return Evaluation(*costs, accuracies, score, excess, violation, feasible)


def over(costs: Costs, specs: Any) -> jax.Array:
    """The excess over the specs, each relative to its spec; 0 if it is met: [3] float32."""
    # Not x / spec - 1: XLA may multiply by the reciprocal, and a value equal to its spec would exceed it.
    pairs = [(x, jnp.asarray(spec, jnp.float32)) for x, spec in zip(costs, specs, strict=True)]
    return jnp.stack([jnp.where(x > spec, (x - spec) / spec, 0) for x, spec in pairs])


def precedes(keys: tuple, others: tuple) -> jax.Array:
    """Lexicographic less-than of keys; False if all are equal.

    >>> precedes((0, 2.0), (0, 3.0)).item(), precedes((1, 2.0), (0, 3.0)).item()
    (True, False)
    """
    result = jnp.bool_(False)
    for key, other in zip(reversed(keys), reversed(others), strict=True):
        result = (key < other) | ((key == other) & result)
    return result


class Scheduled(NamedTuple):
    """The schedule of a design's layers."""

    names: tuple[str, ...]  # [N] "task: number" of each layer, in the order of the schedule's arrays
    layers: tuple[Layer, ...]  # [N]
    schedule: schedule.Schedule  # arrays [N]
    costs: cost.LayerCosts  # arrays [N, A]


def improved_schedule(problem: Problem, choices: Any, moves: int = schedule.MOVES) -> Scheduled:
    """The schedule of one design, improved by moves; no slower than in `evaluate`.

    `choices` are [decisions] int32, `moves` as in `schedule.schedule`; 0 for list schedules only.
    """
    networks, kinds = (x.tolist() for x in positions(problem, jnp.asarray(choices, jnp.int32)))
    task_layers = [task.build(*task.choices()[at]) for task, at in zip(problem.tasks, networks, strict=True)]
    must_precede = schedule.chains(*map(len, task_layers))
    first_layer = 0
    for task, layers in zip(problem.tasks, task_layers, strict=True):
        rows = slice(first_layer, first_layer + len(layers))
        if task.branches is not None:
            must_precede[rows, rows] = False
            for i, j in task.branches:
                must_precede[first_layer + i, first_layer + j] = True
        first_layer += len(layers)
    subs = jax.tree.map(lambda x: x[jnp.asarray(kinds)], problem.chips.subs())
    all_layers = tuple(layer for layers in task_layers for layer in layers)
    stacked = stack(all_layers)
    costs = cost.layer_costs(stacked, subs, problem.chips.templates, problem.technology)
    work = schedule.work_of(costs, stacked, subs, jnp.asarray(must_precede), problem.technology.word_bytes)
    spec = min(problem.specs.latency_cycles, cost.LARGEST_COUNT)
    names = [
        f"{task.name}: {i}"
        for task, layers in zip(problem.tasks, task_layers, strict=True)
        for i in range(len(layers))
    ]
    return Scheduled(tuple(names), all_layers, schedule.schedule(work, int(spec), moves), costs)
