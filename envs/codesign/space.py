"""Designs of networks and a chip as a value: decisions, budgets, masks, and all designs one by one."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign import cost, schedule
from envs.codesign.cost import SubAccelerators
from envs.codesign.layers import (
    Layer,
    addition,
    convolution,
    gemm,
    output_words,
    stack,
    transposed_convolution,
)
from envs.codesign.technology import Technology
from fdg.errors import FdgError


class Decision(NamedTuple):
    """One choice: its name, and what may be chosen."""

    name: str
    options: tuple


@dataclasses.dataclass(frozen=True)
class NetworkSpace:
    """Networks for a task.

    Attributes:
      name: of the task.
      decisions: what can be chosen.
      build: the layers of a choice, one option a decision, in the order in which they run.
    """

    name: str
    decisions: tuple[Decision, ...]
    build: Callable[..., list[Layer]]

    def choices(self) -> list[tuple]:
        """Every choice, the last decision changing fastest."""
        return list(itertools.product(*(one.options for one in self.decisions)))


def resnet9(size: int = 32, classes: int = 10) -> NetworkSpace:
    """256 classifiers: a convolution, three stages that halve the image, each with 0 or 1 residual pairs."""

    def build(width: int, *stages: int) -> list[Layer]:
        found, channels, rows = [convolution(3, width, size)], width, size
        for width, residuals in zip(stages[::2], stages[1::2], strict=True):
            found, rows = [*found, convolution(channels, width, rows, stride=2)], rows // 2
            pair = [convolution(width, width, rows)] * 2
            found, channels = [*found, *[*pair, addition(width, rows)] * residuals], width
        return [*found, gemm(1, classes, channels)]

    stages = [
        (Decision(f"filters {i}", (16 << i, 32 << i)), Decision(f"residuals {i}", (0, 1))) for i in (1, 2, 3)
    ]
    return NetworkSpace(
        "classify", (Decision("filters 0", (8, 16, 24, 32)), *itertools.chain(*stages)), build
    )


def unet(size: int = 64) -> NetworkSpace:
    """256 U-Nets for segmentation: 2 to 5 levels, filters of the first, the inner and the last."""

    def build(height: int, first: int, inner: int, last: int) -> list[Layer]:
        widths = [first, *[inner] * (height - 2), last]
        found = [convolution(3, first, size)]
        for level in range(1, height):
            found += [convolution(widths[level - 1], widths[level], size >> (level - 1), stride=2)]
        for level in reversed(range(height - 1)):
            rows = size >> (level + 1)
            found += [transposed_convolution(widths[level + 1], widths[level], rows, kernel=2, stride=2)]
            found += [convolution(2 * widths[level], widths[level], 2 * rows)]  # with the map of this level
        return [*found, convolution(first, 1, size, kernel=1)]

    filters = [Decision(f"filters {at}", options) for at, options in (
        ("first", (4, 8, 12, 16)), ("inner", (8, 16, 24, 32)), ("last", (16, 32, 48, 64))
    )]  # fmt: skip
    return NetworkSpace("segment", (Decision("height", (2, 3, 4, 5)), *filters), build)


@dataclasses.dataclass(frozen=True)
class Chips:
    """Chips of one or more sub-accelerators that share budgets.

    Attributes:
      subaccelerators: at most.
      templates: names.
      pes: numbers of PEs; 0 leaves a sub-accelerator out.
      noc_bytes_per_cycle: bandwidths between buffer and PEs.
      buffer_kb: buffers' sizes.
      budget_pes: of all sub-accelerators together.
      budget_noc_bytes_per_cycle: likewise.
      dram_bytes_per_cycle: of each sub-accelerator.
    """

    subaccelerators: int = 2
    templates: tuple[str, ...] = cost.TEMPLATES
    pes: tuple[int, ...] = tuple(range(0, 4097, 512))
    noc_bytes_per_cycle: tuple[int, ...] = tuple(range(8, 57, 8))
    buffer_kb: tuple[int, ...] = (64, 128, 256, 512)
    budget_pes: int = 4096
    budget_noc_bytes_per_cycle: int = 64
    dram_bytes_per_cycle: float = 16.0

    def __post_init__(self) -> None:
        for name in ("templates", "pes", "noc_bytes_per_cycle", "buffer_kb"):
            options = getattr(self, name)
            if not options or len(set(options)) < len(options):
                raise FdgError(f"chips: {name} is {options}; give at least one option, each once")
        least_pes = min((x for x in self.pes if x), default=0)
        needed = self.subaccelerators * min(self.noc_bytes_per_cycle)
        if not 0 < least_pes <= self.budget_pes:
            raise FdgError(f"chips: no option of pes={self.pes} is in the budget of {self.budget_pes} PEs")
        if needed > self.budget_noc_bytes_per_cycle:
            raise FdgError(
                f"chips: {self.subaccelerators} sub-accelerators need {needed} bytes a cycle, more than "
                f"budget_noc_bytes_per_cycle={self.budget_noc_bytes_per_cycle}; give smaller options"
            )
        for one in self.kinds()[1:]:
            self._sub(one)

    def decisions(self) -> tuple[Decision, ...]:
        """Of one sub-accelerator."""
        return (
            Decision("pes", self.pes),
            Decision("template", self.templates),
            Decision("noc_bytes_per_cycle", self.noc_bytes_per_cycle),
            Decision("buffer_kb", self.buffer_kb),
        )

    def kinds(self) -> list[tuple]:
        """Every sub-accelerator as (pes, template, noc_bytes_per_cycle, buffer_kb); the first is none."""
        present = [tuple(x for x in self.pes if x), *(one.options for one in self.decisions()[1:])]
        return [(0, *(one.options[0] for one in self.decisions()[1:])), *itertools.product(*present)]

    def subs(self) -> SubAccelerators:
        """`kinds` as arrays [kinds]."""
        none = SubAccelerators(*(jnp.zeros_like(x) for x in self._sub(self.kinds()[1])))
        return jax.tree.map(lambda *x: jnp.stack(x), none, *map(self._sub, self.kinds()[1:]))

    def _sub(self, kind: tuple) -> SubAccelerators:
        pes, template, noc, kilobytes = kind
        rates = {"noc_bytes_per_cycle": noc, "dram_bytes_per_cycle": self.dram_bytes_per_cycle}
        return cost.sub_accelerator(
            template, pes, buffer_bytes=1024 * kilobytes, known=self.templates, **rates
        )

    def all(self) -> np.ndarray:
        """Positions in `kinds` of every chip within the budgets, each set once: [chips, subaccelerators]."""
        kinds = self.kinds()
        pes = np.asarray([kind[0] for kind in kinds])
        noc = np.asarray([kind[2] if kind[0] else 0 for kind in kinds])
        positions = np.asarray(
            list(itertools.combinations_with_replacement(range(len(kinds)), self.subaccelerators))
        )
        fits = (pes[positions].sum(1) <= self.budget_pes) & (pes[positions].sum(1) > 0)
        return positions[fits & (noc[positions].sum(1) <= self.budget_noc_bytes_per_cycle)]


class Specs(NamedTuple):
    """What a design may take at most."""

    latency_cycles: float
    energy_pj: float
    area_mm2: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """Networks for several tasks on one chip.

    Attributes:
      tasks: of which a network each is chosen.
      chips: likewise a chip.
      technology: constants of the process.
    """

    tasks: tuple[NetworkSpace, ...]
    chips: Chips = Chips()
    technology: Technology = cost.PROCESS

    def decisions(self) -> tuple[Decision, ...]:
        """All, in their order: those of each network, then of each sub-accelerator."""
        networks = [
            one._replace(name=f"{task.name}: {one.name}") for task in self.tasks for one in task.decisions
        ]
        subs = [
            one._replace(name=f"sub-accelerator {i}: {one.name}")
            for i in range(self.chips.subaccelerators)
            for one in self.chips.decisions()
        ]
        return (*networks, *subs)

    def count(self) -> int:
        """Designs that `enumerate_all` meets."""
        return math.prod(len(task.choices()) for task in self.tasks) * len(self.chips.all())


def mask(problem: Problem, chosen: jax.Array, at: jax.Array | int) -> jax.Array:
    """Which options of decision `at` the budgets leave, bool [most options of any decision].

    PEs and bandwidth of what was chosen are spent, the least bandwidth of the sub-accelerators that follow is
    kept, and the last one is there if no other is. Of one that is not there, only the first options are left.

    Args:
      problem: static.
      chosen: [decisions] int32, positions among options; those from `at` on are not read.
      at: which decision.
    """
    decisions, chips = problem.decisions(), problem.chips
    most = max(len(one.options) for one in decisions)
    lengths = jnp.asarray([len(one.options) for one in decisions])
    first, each = len(decisions) - 4 * chips.subaccelerators, len(chips.decisions())
    pes, noc = (
        jnp.asarray([*options, *[0] * (most - len(options))], jnp.int32)
        for options in (chips.pes, chips.noc_bytes_per_cycle)
    )
    before = jnp.arange(chips.subaccelerators) * each + first
    sub = (at - first) // each
    is_before = jnp.arange(chips.subaccelerators) < sub
    pes_before = jnp.where(is_before, pes[chosen[before]], 0)
    noc_before = jnp.where(is_before & (pes_before > 0), noc[chosen[before + 2]], 0)
    to_come = (chips.subaccelerators - 1 - sub) * min(chips.noc_bytes_per_cycle)
    is_last = (sub == chips.subaccelerators - 1) & (pes_before.sum() == 0)
    by_pes = (pes <= chips.budget_pes - pes_before.sum()) & ((pes > 0) | ~is_last)
    by_noc = noc <= chips.budget_noc_bytes_per_cycle - to_come - noc_before.sum()
    here = chosen[first + jnp.maximum(sub, 0) * each]
    is_absent = pes[here] == 0
    what = (at - first) % each
    of_sub = jnp.where(what == 2, by_noc, True) & (~is_absent | (jnp.arange(most) == 0))
    of_sub = jnp.where(what == 0, by_pes, of_sub)
    return jnp.where(at >= first, of_sub, True) & (jnp.arange(most) < lengths[at])


class Tables(NamedTuple):
    """What every network costs on every sub-accelerator: of M tasks, N networks, L layers, F kinds."""

    latency_cycles: jax.Array  # [M, N, L, F] int32
    energy_pj: jax.Array  # [M, N, L, F] float32
    map_bytes: jax.Array  # [M, N, L] float32, of a layer's output
    noc_bytes_per_cycle: jax.Array  # [F] float32
    area_mm2: jax.Array  # [F] float32, without what a chip has once


class Evaluation(NamedTuple):
    """What designs take."""

    latency_cycles: jax.Array  # int32
    energy_pj: jax.Array  # float32
    area_mm2: jax.Array  # float32


def tables(problem: Problem) -> Tables:
    """Costs that are looked up for designs; sizes are padded to the largest network's."""
    networks = [[task.build(*choice) for choice in task.choices()] for task in problem.tasks]
    most, longest = max(map(len, networks)), max(len(one) for task in networks for one in task)
    padded = [
        [*one, *[None] * (longest - len(one))]
        for task in networks
        for one in task + [[]] * (most - len(task))
    ]
    flat = stack([layer for one in padded for layer in one])
    subs, known, shape = problem.chips.subs(), problem.chips.templates, (len(networks), most, longest)
    costs = cost.layer_costs(flat, subs, known, problem.technology)
    one_each = jax.tree.map(lambda x: x[:, None], subs)
    areas = jax.vmap(lambda one: cost.area_mm2(one, known, problem.technology))(one_each)
    latency = jnp.where(jax.vmap(output_words)(flat)[:, None] > 0, costs.latency_cycles, 0)
    return Tables(
        latency.reshape(*shape, -1),
        costs.energy_pj.reshape(*shape, -1),
        (jax.vmap(output_words)(flat) * jnp.float32(problem.technology.word_bytes)).reshape(shape),
        jnp.where(subs.rows > 0, subs.noc_bytes_per_cycle, jnp.inf),
        areas - problem.technology.chip_mm2,
    )


def evaluate(problem: Problem, costs: Tables, networks: jax.Array, kinds: jax.Array) -> Evaluation:
    """A design: scalars, `jax.vmap` it for many.

    Args:
      problem: static.
      costs: `tables(problem)`.
      networks: [M] int32, positions among each task's `choices()`.
      kinds: [subaccelerators] int32, positions among `chips.kinds()`.
    """
    tasks = jnp.arange(len(problem.tasks))
    latency, energy = (x[tasks, networks][..., kinds] for x in (costs.latency_cycles, costs.energy_pj))
    transfer = cost.whole_cycles(costs.map_bytes[tasks, networks] / costs.noc_bytes_per_cycle[kinds].min())
    found = schedule.chain_schedule(latency, energy, transfer)
    area = problem.technology.chip_mm2 + costs.area_mm2[kinds].sum()
    return Evaluation(found.latency_cycles, found.energy_pj, area)


class Enumerated(NamedTuple):
    """What `enumerate_all` found."""

    designs: int
    feasible: int
    networks: tuple[int, ...]  # of the best design: positions among each task's choices
    kinds: tuple[int, ...]  # its sub-accelerators: positions among the chips' kinds
    score: float
    evaluation: Evaluation
    violation: float  # 0 where a design meets the specs; else the least sum of relative excess


def violation(found: Evaluation, specs: Specs) -> jax.Array:
    """Sum of what exceeds the specs, each relative to its spec; 0 where all are met."""
    parts = [jnp.maximum(x / spec - 1, 0) for x, spec in zip(found, specs, strict=True)]
    return functools.reduce(jnp.add, parts)


_CHUNK = 4096


@functools.partial(jax.jit, static_argnames="problem")
def _chunk(problem: Problem, costs: Tables, chips: jax.Array, indices: jax.Array) -> tuple:
    counts = [len(task.choices()) for task in problem.tasks]

    def one(index: jax.Array) -> tuple[jax.Array, jax.Array, Evaluation]:
        places = [math.prod(counts[task + 1 :]) for task in range(len(counts))]
        chosen = jnp.stack([index // place % count for place, count in zip(places, counts, strict=True)])
        rest = index // math.prod(counts)
        return chosen, chips[rest], evaluate(problem, costs, chosen, chips[rest])

    return jax.vmap(one)(indices)


def designs_at(problem: Problem, indices: jax.Array) -> tuple[jax.Array, jax.Array, Evaluation]:
    """The designs of these numbers, up to `problem.count()`: networks, kinds, and what they take."""
    return _chunk(problem, tables(problem), jnp.asarray(problem.chips.all()), jnp.asarray(indices))


def specs_at(problem: Problem, quantile: float, samples: int = 100_000, seed: int = 0) -> Specs:
    """The quantiles of latency, energy and area over designs drawn uniformly: the smaller, the tighter."""
    drawn = np.random.default_rng(seed).integers(0, problem.count(), samples)
    found = designs_at(problem, jnp.asarray(drawn, jnp.int32))[2]
    return Specs(*(float(np.quantile(x, quantile)) for x in found))


def enumerate_all(problem: Problem, scores: tuple[np.ndarray, ...], specs: Specs) -> Enumerated:
    """The best of all designs: the highest score among those that meet the specs, then the least energy.

    Args:
      problem: whose networks run layer after layer.
      scores: of each task's choices, such as weighted accuracies; a design's is the sum.
      specs: what it may take.

    Raises:
      FdgError: scores that are not one a choice, or more than 2^31 designs.
    """
    counts = [len(task.choices()) for task in problem.tasks]
    if [len(each) for each in scores] != counts:
        raise FdgError(
            f"enumerate: scores of {[len(each) for each in scores]} choices; give {counts}, one a choice"
        )
    total = problem.count()
    if total + _CHUNK >= 2**31:
        raise FdgError(f"enumerate: {total:,} designs, more than 2^31; give fewer options")
    given = jnp.asarray(np.stack([np.pad(x, (0, max(counts) - len(x))) for x in scores]), jnp.float32)
    feasible, best, index = _best(problem, tables(problem), jnp.asarray(problem.chips.all()), given, specs)
    networks, kinds, found = jax.tree.map(lambda x: x[0], designs_at(problem, index[None]))
    return Enumerated(
        designs=total,
        feasible=int(feasible),
        networks=tuple(networks.tolist()),
        kinds=tuple(kinds.tolist()),
        score=float(sum(each[i] for each, i in zip(scores, networks.tolist(), strict=True))),
        evaluation=Evaluation(*(x.item() for x in found)),
        violation=float(best[0]),
    )


@functools.partial(jax.jit, static_argnames="problem")
def _best(problem: Problem, costs: Tables, chips: jax.Array, scores: jax.Array, specs: Specs) -> tuple:
    total, tasks = problem.count(), jnp.arange(len(problem.tasks))

    def step(carry: tuple, first: jax.Array) -> tuple[tuple, None]:
        feasible, best, index = carry
        indices = first + jnp.arange(_CHUNK)
        networks, _, found = _chunk(problem, costs, chips, jnp.minimum(indices, total - 1))
        excess = jnp.where(indices < total, violation(found, specs), jnp.inf)
        score = scores[tasks[None], networks].sum(1)
        # Least of (violation, -score, energy), one after another.
        keys = excess, -score, found.energy_pj
        at = jnp.lexsort(keys[::-1])[0]
        key = tuple(x[at] for x in keys)
        is_better = functools.reduce(
            lambda later, pair: (pair[0] < pair[1]) | ((pair[0] == pair[1]) & later),
            zip(reversed(key), reversed(best), strict=True),
            jnp.bool_(False),
        )
        best = tuple(jnp.where(is_better, a, b) for a, b in zip(key, best, strict=True))
        return (feasible + (excess == 0).sum(), best, jnp.where(is_better, indices[at], index)), None

    begin = jnp.int32(0), (jnp.float32(jnp.inf),) * 3, jnp.int32(0)
    firsts = jnp.arange(0, total, _CHUNK)
    return jax.lax.scan(step, begin, firsts)[0]


def surrogate(task: NetworkSpace) -> np.ndarray:
    """A formula in place of accuracies, not measured: 1 - (1 + weights / 1,000)^(-1/2), [choices] float32."""
    weights = [sum(layer.weight_words for layer in task.build(*choice)) for choice in task.choices()]
    return 1 - (1 + np.asarray(weights, np.float32) / 1000) ** -0.5
