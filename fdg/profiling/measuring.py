"""`profile`: the time of an engine's iteration by fragment."""

import collections
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import jaxprs
from fdg.arguments import check_at_least, checked
from fdg.engine import Engine
from fdg.jaxprs.count import Product
from fdg.lowering import host_calls
from fdg.placing.plans import Plan
from fdg.placing.policy import Group
from fdg.processes import distributed
from fdg.profiling.fragments import Placed, place_fragments, programs
from fdg.profiling.rates import Rates
from fdg.profiling.repeating import Repeated, compile_all
from fdg.profiling.report import FragmentProfile, GroupProfile, ProductProfile, Profile
from fdg.profiling.work import Work, sum_of_work
from fdg.showing.plan_outline import split_fragments
from fdg.showing.words import ancestors

_ITERATIONS_S = 0.2  # approximate seconds of a round of iterations
_COVERED = 0.98  # fraction of the operations in products that measured ones must cover
_MOST_PRODUCTS = 12  # timed products per group


@checked
def profile(engine: Engine, state: Any, rounds: int = 7) -> Profile:
    """Times an engine's iteration and each of its fragments, and compares them with the devices' limits.

    Fragments run alone, many calls in one program, with the inputs of their first call after `state`; matrix
    products of their shapes, and memory, are timed in turn. This takes as long as compiling the engine twice,
    and some seconds. Host environments are stepped: a later run continues with new episodes there. A
    collective: all processes call it.

    Args:
      engine: an engine.
      state: its state; it is copied and stays usable.
      rounds: timing rounds.

    Raises:
      FdgError: `rounds` is below 1; as `engine.run`.
    """
    check_at_least(1, rounds=rounds)
    plan = engine.plan
    fragments = place_fragments(plan)
    whole = Iterations(engine, state)
    apart = split_fragments(plan)
    alone = programs(plan, engine.devices, _local_leaves(engine, state))
    alone = {name: one for name, one in alone.items() if name not in apart}
    compile_all(alone.values())
    rates = {group.name: _rates(engine, group, fragments) for group in plan.groups}
    for _ in range(rounds):
        whole.measure()
        for one in alone.values():
            one.measure()
        for group in rates.values():
            if group is not None:
                group.measure()
    return profile_of_parts(engine.plan, fragments, whole, alone, rates, rounds)


class Iterations:
    """Times an engine's iterations."""

    def __init__(self, engine: Engine, state: Any, seconds: float | None = None, least: int = 1):
        """Compiles the engine and chooses the number of iterations in a round.

        Copies the state. A round takes about `seconds` (None: a fifth of a second), and has at least `least`
        iterations.
        """
        self._engine = engine
        self._state = jax.tree.map(jnp.copy, state)
        self._count = least
        self.samples: list[float] = []  # seconds of an iteration in each round
        # busy seconds of each group in each round; empty for a single group
        self.busy: list[Mapping[str, float]] = []
        self._run()
        once = self._run() / least
        wanted = math.ceil((_ITERATIONS_S if seconds is None else seconds) / max(once, 1e-6))
        self._count = distributed.exchange(max(least, wanted))[0]

    def measure(self) -> None:
        """Runs one round."""
        before = self._engine.busy_seconds()
        self.samples.append(self._run() / self._count)
        after = self._engine.busy_seconds()
        self.busy.append({group: (after[group] - before[group]) / self._count for group in after})

    @property
    def seconds(self) -> float:
        """Seconds of an iteration in the best round."""
        return min(self.samples)

    def busy_s(self, group: str) -> float | None:
        """Busy seconds of a group in an iteration; None for a single group."""
        found = [each[group] for each in self.busy if group in each]
        return min(found) if found else None

    def _run(self) -> float:
        begun = time.perf_counter()
        self._state, metrics = self._engine.run(self._state, self._count)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - begun


def _local_leaves(engine: Engine, state: Any) -> list[Any]:
    """The leaves of a state on one device.

    Those of the initial state if other processes have parts of the state, or it has host environments, which
    the engine steps.
    """
    leaves, plan = jax.tree.leaves(state), engine.plan
    device = jax.local_devices(backend=engine.devices[0].platform)[0]
    on_host = host_calls.calls_host(jaxprs.open_jaxpr(plan.graph.jaxpr).eqns)
    if all(leaf.is_fully_addressable for leaf in leaves) and not on_host:
        return [jax.device_put(leaf, device) for leaf in leaves]

    def init(key: jax.Array) -> list[jax.Array]:
        made = jax.tree.map(jnp.asarray, engine.algorithm.init(key))
        return jax.tree.leaves(made if plan.delayed is None else plan.delayed.start(made))

    with jax.default_device(device):
        return jax.jit(init)(jax.random.key(0))


def _rates(engine: Engine, group: Group, fragments: Sequence[Placed]) -> Rates | None:
    """The rates of a group's devices for its fragments; None if it has none in this process."""
    devices = [engine.devices[i] for i in group.devices]
    here = [device for device in devices if device.process_index == jax.process_index()]
    if not here:
        return None
    rates = Rates(here)
    mine = [one for one in fragments if one.group == group]
    products = _per_iteration(mine).products
    rates.prepare(_largest_products(products), [one.border for one in mine])
    return rates


def _per_iteration(fragments: Sequence[Placed]) -> Work:
    """The work of an iteration; nested fragments count in their parent on the same group."""
    names = {one.site.fragment.name for one in fragments}
    return sum_of_work(
        (one.work, one.site.fragment.calls_per_iteration)
        for one in fragments
        if one.site.fragment.parent not in names
    )


def _largest_products(products: Mapping[Product, int]) -> list[Product]:
    """The products with the most operations."""
    flops = collections.Counter({product: product.flops * count for product, count in products.items()})
    found, covered = [], 0
    for product, count in flops.most_common(_MOST_PRODUCTS):
        if covered >= _COVERED * flops.total():
            break
        found.append(product)
        covered += count
    return found


def profile_of_parts(
    plan: Plan,
    fragments: Sequence[Placed],
    whole: Iterations,
    alone: Mapping[str, Repeated],
    rates: Mapping[str, Rates | None],
    rounds: int,
) -> Profile:
    """Builds the profile."""
    rows = []
    for one in fragments:
        f, group = one.site.fragment, rates[one.group.name]
        rows.append(
            FragmentProfile(
                name=f.name,
                role=f.role,
                parent=f.parent,
                depth=len(ancestors(plan.graph, f.name)),
                group=one.group.name,
                calls=f.calls_per_iteration,
                exact=f.calls_exact,
                flops=f.flops_per_call * (plan.graph.agents or 1),
                work=one.work,
                seconds=alone[f.name].seconds if f.name in alone else None,
                products_s=0.0 if group is None else group.seconds(one.work.products),
                memory_s=0.0 if group is None else group.memory_seconds(one.border),
            )
        )
    first = next((group for group in rates.values() if group is not None), None)
    return Profile(
        algorithm=plan.graph.name,
        policy=str(plan.policy),
        num_devices=sum(len(group) for group in plan.groups),
        agents=plan.graph.agents,
        iteration_s=min(whole.samples),
        usual_s=statistics.median(whole.samples),
        rounds=rounds,
        fragments=tuple(rows),
        products=tuple(_products(plan.groups, fragments, rates)),
        groups=tuple(_group(group, fragments, whole, alone) for group in plan.groups),
        memory_rate=0.0 if first is None else first.memory_rate,
        notes=tuple(_notes(fragments, alone)),
    )


def _products(
    groups: Sequence[Group], fragments: Sequence[Placed], rates: Mapping[str, Rates | None]
) -> list[ProductProfile]:
    found = []
    for group in groups:
        work = _per_iteration([one for one in fragments if one.group == group])
        of_group = rates[group.name]
        measured = {} if of_group is None else of_group.products
        for product, calls in work.products.items():
            seconds, layout = measured.get(product, (None, ""))
            found.append(ProductProfile(product, group.name, calls, seconds, layout, len(group)))
    return found


def _group(
    group: Group, fragments: Sequence[Placed], whole: Iterations, alone: Mapping[str, Repeated]
) -> GroupProfile:
    """A group's time; of nested fragments, the outermost timed one counts."""
    here = {one.site.fragment.name: one.site.fragment for one in fragments if one.group == group}
    counted = 0.0
    for name, fragment in here.items():
        if name in alone and fragment.parent not in {other for other in here if other in alone}:
            counted += alone[name].seconds * fragment.calls_per_iteration
    return GroupProfile(group.name, len(group), whole.busy_s(group.name), counted)


def _notes(fragments: Sequence[Placed], alone: Mapping[str, Repeated]) -> list[str]:
    missing = [one.site.fragment.name for one in fragments if one.site.fragment.name not in alone]
    guessed = [one.site.fragment.name for one in fragments if not one.work.exact]
    notes = []
    if missing:
        notes.append(f"not run by itself (in parts on several groups, or not here): {', '.join(missing)}")
    if guessed:
        notes.append(
            f"operations depend on the data (a loop as its longest, or once, a branch): {', '.join(guessed)}"
        )
    return notes
