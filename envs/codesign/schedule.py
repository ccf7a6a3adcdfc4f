"""Schedules the layers of several networks on several sub-accelerators: pure functions of arrays.

A sub-accelerator runs one layer at a time, without preemption. A layer starts after its predecessors end,
plus the transfer time of outputs from other sub-accelerators.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign.cost import LayerCosts, SubAccelerators, whole_cycles
from envs.codesign.layers import LARGEST_COUNT, Layers, add, output_words
from fdg.errors import FdgError


class Work(NamedTuple):
    """Input of a scheduler: N layers of all networks, on A sub-accelerators."""

    latency_cycles: jax.Array  # [N, A] int32
    energy_pj: jax.Array  # [N, A] float32
    transfer_cycles: jax.Array  # [N] int32, of a layer's output to another sub-accelerator
    before: jax.Array  # [N, N] bool: i must end before j starts; only i < j, a topological order


class Schedule(NamedTuple):
    """Where and when each layer runs."""

    sub_accelerator: jax.Array  # [N] int32
    start_cycle: jax.Array  # [N] int32
    end_cycle: jax.Array  # [N] int32
    latency_cycles: jax.Array  # int32, the end of the last layer
    energy_pj: jax.Array  # float32, the sum over layers


def chains(*lengths: int) -> np.ndarray:
    """`Work.before` of networks whose layers run in sequence.

    >>> chains(2, 1).astype(int).tolist()
    [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    """
    total = sum(lengths)
    before, first = np.zeros((total, total), bool), 0
    for length in lengths:
        for layer in range(first, first + length - 1):
            before[layer, layer + 1] = True
        first += length
    return before


def _remaining_paths(work: Work, latency: jax.Array) -> jax.Array:
    """Least cycles from a layer's end on each sub-accelerator to the end of its longest path, [N, A] float32.

    The optimistic cost table of PEFT (Arabnejad and Barbosa, IEEE TPDS 2014, equation 3): each later layer
    runs on its best sub-accelerator, and waits only for its transfer. `latency` is in cycles, [N, A] float32,
    infinite if a layer may not run there.
    """
    elsewhere = ~jnp.eye(latency.shape[1], dtype=bool)

    def step(after: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
        # [N, A, A]: the cycles of each later layer there and after it, plus the transfer from here.
        there = (after + latency)[:, None] + (elsewhere * work.transfer_cycles[layer])[None]
        best = jnp.where(work.before[layer][:, None], there.min(2), 0).max(0)
        return after.at[layer].set(best), None

    return jax.lax.scan(step, jnp.zeros_like(latency), jnp.arange(len(latency)), reverse=True)[0]


def _list_schedule(work: Work, allowed: jax.Array, eagerness: jax.Array) -> Schedule:
    """List scheduling with look-ahead.

    The next layer is the ready one with the least earliest start minus `eagerness` times its remaining path
    (0: earliest start; large: critical path). It runs where its end plus the remaining path is earliest.
    `allowed` [N, A] bool says where each layer may run.
    """
    total, num_subs = work.latency_cycles.shape
    latency = jnp.where(allowed, work.latency_cycles, LARGEST_COUNT)
    cycles = jnp.where(allowed, work.latency_cycles, jnp.inf)
    after = _remaining_paths(work, cycles)
    remaining = (after + cycles).min(1)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        # num_waiting [N]: predecessors that have not ended. earliest [N, A]: least start after predecessors.
        # free [A]: when a sub-accelerator ends its last layer.
        is_done, num_waiting, earliest, free, sub, start, end = carry
        starts = jnp.maximum(earliest, free[None])
        ends = add(starts, latency)
        best = jnp.where(allowed, ends + after, jnp.inf).argmin(1)
        first = jnp.take_along_axis(starts, best[:, None], 1)[:, 0]
        layer = jnp.where(is_done | (num_waiting > 0), jnp.inf, first - eagerness * remaining).argmin()
        chosen_sub = best[layer]
        layer_end, successors = ends[layer, chosen_sub], work.before[layer]
        transfer_end = add(layer_end, work.transfer_cycles[layer])
        arrives = jnp.where(jnp.arange(num_subs) == chosen_sub, layer_end, transfer_end)
        carry = (
            is_done.at[layer].set(True),
            num_waiting - successors,
            jnp.where(successors[:, None], jnp.maximum(earliest, arrives[None]), earliest),
            free.at[chosen_sub].set(layer_end),
            sub.at[layer].set(chosen_sub.astype(jnp.int32)),
            start.at[layer].set(starts[layer, chosen_sub]),
            end.at[layer].set(layer_end),
        )
        return carry, None

    zeros = jnp.zeros(total, jnp.int32)
    initial = (
        jnp.zeros(total, bool),
        work.before.sum(0, dtype=jnp.int32),
        jnp.zeros((total, num_subs), jnp.int32),
        jnp.zeros(num_subs, jnp.int32),
        *(zeros, zeros, zeros),
    )
    *_, sub, start, end = jax.lax.scan(step, initial, None, total)[0]
    energy = jnp.take_along_axis(work.energy_pj, sub[:, None], 1).sum()
    return Schedule(sub, start, end, end.max(), energy)


def chain_schedule(
    latency_cycles: jax.Array, energy_pj: jax.Array, transfer_cycles: jax.Array, eagerness: float = 0.3
) -> tuple[jax.Array, jax.Array]:
    """Cycles (int32) and pJ (float32) of a list schedule of chains; faster than for graphs.

    Equal to the result of `_list_schedule`, which explains `eagerness`, if each layer may run anywhere. For M
    networks of L layers: `latency_cycles` [M, L, A] int32, padded with 0; `energy_pj` [M, L, A] float32;
    `transfer_cycles` [M, L] int32.
    """
    # On a CPU, XLA repeats computations that several outputs of a loop's body share. So a step only chooses a
    # layer and its sub-accelerator, and the next step applies the choice.
    networks, length, num_subs = latency_cycles.shape
    to_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    from_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)

    def step_table(cycles: jax.Array, pj: jax.Array, transfer: jax.Array) -> jax.Array:
        """The values that a step needs, for each number of finished layers: [L + 1, 3 A + 2] int32.

        In columns: by sub-accelerator, cycles of the next layer, then the path after it; the least path that
        remains; the last layer's transfer, then its energies by sub-accelerator. `to_bits` packs floats.
        """
        transfer = jnp.pad(transfer, (1, 0))

        def back(after: tuple, of_layer: tuple) -> tuple[tuple, jax.Array]:
            """One layer back: `after` is the path after a layer, by the sub-accelerator that runs it."""
            ends = [x + y for x, y in zip(after, of_layer[0], strict=True)]
            least = functools.reduce(jnp.minimum, ends)
            return tuple(jnp.minimum(x, least + of_layer[1]) for x in ends), jnp.stack([*after, least])

        initial = (jnp.float32(0),) * num_subs
        after = jax.lax.scan(back, initial, (cycles.astype(jnp.float32), transfer[:-1]), reverse=True)[1]
        ahead = jnp.pad(jnp.concatenate([cycles, to_bits(after)], 1), ((0, 1), (0, 0)))
        return jnp.concatenate([ahead, transfer[:, None], to_bits(jnp.pad(pj, ((1, 0), (0, 0))))], 1)

    rows = [step_table(*each) for each in zip(latency_cycles, energy_pj, transfer_cycles, strict=True)]

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        # By network: the number of finished layers, the end of the last one, and its sub-accelerator. By
        # sub-accelerator: when it is free. `choice`: network * A + sub-accelerator; its layer ends at `end`.
        done, ready, where, free, energy, choice, end = carry
        sub = choice % num_subs
        free = [jnp.where(sub == a, end, free[a]) for a in range(num_subs)]
        done, ready, where, options = list(done), list(ready), list(where), []
        for m in range(networks):
            is_chosen = choice // num_subs == m
            done[m] = done[m] + is_chosen
            ready[m], where[m] = jnp.where(is_chosen, end, ready[m]), jnp.where(is_chosen, sub, where[m])
            head = rows[m].at[done[m]].get(mode="promise_in_bounds")
            cycles, after, (remaining, transfer), spent = jnp.split(
                head, (num_subs, 2 * num_subs, 2 * num_subs + 2)
            )
            elsewhere, sub_options = add(ready[m], transfer), []
            for a in range(num_subs):
                start = jnp.maximum(jnp.where(where[m] == a, ready[m], elsewhere), free[a])
                layer_end = add(start, cycles[a])
                sub_options.append(
                    (layer_end + from_bits(after[a]), start, layer_end, jnp.int32(m * num_subs + a))
                )
                energy += jnp.where(is_chosen & (sub == a), from_bits(spent[a]), 0)
            _, start, layer_end, option = _first_minimum(sub_options)
            key = jnp.where(done[m] < length, start - eagerness * from_bits(remaining), jnp.inf)
            options.append((key, layer_end, option))
        _, end, choice = _first_minimum(options)
        return (tuple(done), tuple(ready), tuple(where), tuple(free), energy, choice, end), None

    zero = jnp.int32(0)
    of_network, of_sub = (zero,) * networks, (zero,) * num_subs
    initial = (of_network, of_network, of_network, of_sub, jnp.float32(0), zero + networks * num_subs, zero)
    _, _, _, free, energy, _, _ = jax.lax.scan(step, initial, None, networks * length + 1)[0]
    return functools.reduce(jnp.maximum, free), energy


def _first_minimum(options: list[tuple]) -> tuple:
    """The first tuple with the least first element."""

    def smaller(old: tuple, new: tuple) -> tuple:
        return tuple(jnp.where(new[0] < old[0], y, x) for x, y in zip(old, new, strict=True))

    return functools.reduce(smaller, options)


# The values of eagerness that are tried: at first, and after each move.
_INITIAL_EAGERNESS, _MOVE_EAGERNESS = (0.0, 0.1, 0.3, 1.0), (0.1, 1.0)
MOVES = 24  # default number of moves of each kind


def _shortest(work: Work, allowed: jax.Array, eagerness: tuple[float, ...]) -> Schedule:
    """The shortest of the list schedules with these values of eagerness."""
    results = jax.vmap(lambda x: _list_schedule(work, allowed, x))(jnp.float32(eagerness))
    return jax.tree.map(lambda x: x[results.latency_cycles.argmin()], results)


def _schedule_assigned(work: Work, assigned: jax.Array) -> Schedule:
    """The shortest list schedule of an assignment [N]."""
    allowed = jnp.arange(work.latency_cycles.shape[1])[None] == assigned[:, None]
    return _shortest(work, allowed, _MOVE_EAGERNESS)


def _all_moves(work: Work, assigned: jax.Array) -> tuple[jax.Array, Schedule]:
    """Makes all moves of runs of 1, 2, 4, ... consecutive layers to one sub-accelerator.

    Starts from an assignment [N]. Returns which layers change their sub-accelerator, [moves, N] bool, and the
    schedules [moves, ...].
    """
    total, num_subs = work.latency_cycles.shape
    runs = [(i, i + 2**k) for k in range(total.bit_length()) for i in range(total - 2**k + 1)]
    is_moved = np.repeat([[low <= i < high for i in range(total)] for low, high in runs], num_subs, 0)
    target = np.tile(np.arange(num_subs, dtype=np.int32), len(runs))[:, None]
    moved = jnp.where(is_moved, target, assigned[None])  # the assignment after each move
    return moved != assigned[None], jax.vmap(lambda x: _schedule_assigned(work, x))(moved)


def _tabu_search(work: Work, first: Schedule, moves: int) -> Schedule:
    """Tabu search over assignments; each step takes the best move, even if the schedule gets longer.

    A moved layer stays for eight steps (fewer for few layers), unless moving it gives the shortest schedule
    so far (Glover, ORSA J. Computing 1989).
    """
    total = len(work.latency_cycles)

    def step(carry: tuple, at: jax.Array) -> tuple[tuple, None]:
        assigned, best, stays_until = carry
        changed, schedules = _all_moves(work, assigned)
        is_tabu = (changed & (stays_until > at)[None]).any(1) & (
            schedules.latency_cycles >= best.latency_cycles
        )
        chosen_move = jnp.where(is_tabu | ~changed.any(1), jnp.inf, schedules.latency_cycles).argmin()
        new = jax.tree.map(lambda x: x[chosen_move], schedules)
        best = _select(new.latency_cycles < best.latency_cycles, new, best)
        stays_until = jnp.where(changed[chosen_move], at + 1 + min(8, 2 * total // 3), stays_until)
        return (new.sub_accelerator, best, stays_until), None

    initial = first.sub_accelerator, first, jnp.zeros(total, jnp.int32)
    return jax.lax.scan(step, initial, jnp.arange(moves))[0][1]


def _save_energy(work: Work, first: Schedule, spec_cycles: jax.Array, moves: int) -> Schedule:
    """Takes the moves that save most energy per added cycle, while the latency meets the spec."""

    def step(current: Schedule, _: None) -> tuple[Schedule, None]:
        schedules = _all_moves(work, current.sub_accelerator)[1]
        saved = current.energy_pj - schedules.energy_pj
        added = jnp.maximum(schedules.latency_cycles - current.latency_cycles, 0)
        is_gain = (saved > 0) & (schedules.latency_cycles <= spec_cycles)
        value = jnp.where(is_gain, saved / (1 + added), -1)
        best = value.argmax()
        return _select(value[best] > 0, jax.tree.map(lambda x: x[best], schedules), current), None

    saving = jax.lax.scan(step, first, None, moves)[0]
    # the least energy of any assignment
    least = _schedule_assigned(work, work.energy_pj.argmin(1).astype(jnp.int32))
    return _select(least.latency_cycles <= spec_cycles, least, saving)


def _select(is_new: jax.Array, new: Schedule, old: Schedule) -> Schedule:
    return jax.tree.map(lambda a, b: jnp.where(is_new, a, b), new, old)


def schedule(work: Work, spec_cycles: jax.Array | int = 0, moves: int = MOVES) -> Schedule:
    """Minimises energy within a latency spec; minimises latency if no schedule meets the spec.

    Starts from list schedules with look-ahead, then moves runs of layers to other sub-accelerators: first to
    shorten the schedule, then, if it meets the spec, to save energy. With `moves=0` it only makes the list
    schedules, which takes a hundredth of the time.

    Args:
      work: N layers and A sub-accelerators.
      spec_cycles: the latency spec; 0: only minimise latency.
      moves: number of consecutive moves of each kind.
    """
    return _schedule(work, jnp.asarray(spec_cycles, jnp.int32), moves)


@functools.partial(jax.jit, static_argnames="moves")
def _schedule(work: Work, spec_cycles: jax.Array, moves: int) -> Schedule:
    """As `schedule`, compiled."""
    best = _shortest(work, jnp.ones_like(work.latency_cycles, bool), _INITIAL_EAGERNESS)
    if not moves:
        return best
    best = _tabu_search(work, best, moves)
    saving = _save_energy(work, best, spec_cycles, moves)
    return _select(best.latency_cycles <= spec_cycles, saving, best)


def work_of(
    costs: LayerCosts, layers: Layers, subs: SubAccelerators, before: jax.Array, word_bytes: int = 1
) -> Work:
    """The `Work` of layers with costs `cost.layer_costs(layers, subs)`.

    `costs` are [N, A], for `layers` [N] in topological order. `before` is as in `Work`; `chains` for networks
    without branches.
    """
    total = len(layers.groups)
    if jnp.shape(before) != (total, total):
        raise FdgError(f"schedule: before is {list(jnp.shape(before))}; give [{total}, {total}]")
    if not isinstance(before, jax.core.Tracer) and np.any(np.tril(before)):
        late, early = (int(x) for x in np.argwhere(np.tril(before))[0])
        other = "itself" if late == early else f"layer {early}"
        raise FdgError(
            f"schedule: layer {late} comes before {other}; number layers so that each needs lower ones"
        )
    slowest = jnp.where(subs.rows > 0, subs.noc_bytes_per_cycle, jnp.inf).min()
    maps_bytes = jax.vmap(output_words)(layers) * jnp.float32(word_bytes)
    transfer = whole_cycles(maps_bytes / slowest)
    return Work(costs.latency_cycles, costs.energy_pj, transfer, jnp.asarray(before, bool))
