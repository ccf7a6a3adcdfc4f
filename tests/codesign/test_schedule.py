import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.codesign import cost, layers, schedule
from envs.codesign.schedule import Work, chains
from fdg.errors import FdgError
from tests.codesign import draw
from tests.codesign.draw import KNOWN, random_subs

CPSAT = json.loads((pathlib.Path(__file__).parent / "cpsat.json").read_text())


def assert_valid(work, found):
    """No layer starts before its inputs have arrived, and no sub-accelerator runs two layers at once."""
    work, found = jax.tree.map(lambda x: np.asarray(x).astype(np.int64), (work, found))
    sub, start, end = found.sub_accelerator, found.start_cycle, found.end_cycle
    duration = work.latency_cycles[np.arange(len(sub)), sub]
    assert np.array_equal(end - start, duration) and start.min() >= 0
    for i, j in np.argwhere(work.before):
        assert start[j] >= end[i] + (work.transfer_cycles[i] if sub[i] != sub[j] else 0)
    for a in range(work.latency_cycles.shape[1]):
        (of_sub,) = np.where((sub == a) & (duration > 0))
        of_sub = of_sub[np.argsort(start[of_sub])]
        assert np.all(start[of_sub][1:] >= end[of_sub][:-1])
    assert found.latency_cycles == end.max()


def padded(cycles, energy, transfer, before):
    """Pads to 12 layers with zero-cost layers, so that tests share one compiled program."""
    padding = 12 - len(cycles)
    return Work(
        jnp.pad(jnp.int32(cycles), ((0, padding), (0, 0))),
        jnp.pad(jnp.float32(energy), ((0, padding), (0, 0))),
        jnp.pad(jnp.int32(transfer), (0, padding)),
        jnp.pad(jnp.asarray(before), (0, padding)),
    )


def random_work(seed, num_layers=12, subs=2):
    work, random = draw.random_work(seed, num_layers, subs), np.random.default_rng(seed)
    return work._replace(energy_pj=jnp.asarray(2 ** random.uniform(0, 5, (num_layers, subs)), jnp.float32))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from([0, schedule.MOVES]), st.floats(0.5, 3))
def test_random_schedules_are_valid(seed, moves, slack):
    work = random_work(seed)
    shortest = schedule.schedule(work, moves=0)
    spec = int(float(shortest.latency_cycles) * slack)
    found = schedule.schedule(work, spec, moves=moves)
    assert_valid(work, found)
    taken = np.asarray(work.energy_pj)[np.arange(12), np.asarray(found.sub_accelerator)]
    assert found.energy_pj == pytest.approx(taken.sum(), rel=1e-5)
    assert found.latency_cycles <= max(spec, int(shortest.latency_cycles))


def test_two_networks_by_hand():
    # Chains of two and one layer. The first needs 4 + 6 cycles on sub-accelerator 0, 9 + 2 on 1; a move, 3.
    work = padded([[4, 9], [6, 2], [5, 5]], [[1, 1], [5, 1], [4, 2]], [3, 0, 0], chains(2, 1))
    found = schedule.schedule(work)
    # Layer 0 on sub-accelerator 0 until 4, transfer until 7, layer 1 on 1 until 9; layer 2 on 1 until 5.
    assert found.latency_cycles == 9 and found.sub_accelerator[:3].tolist() == [0, 1, 1]
    assert found.start_cycle[:3].tolist() == [0, 7, 0] and found.energy_pj == 4
    # Without transfer cycles, layer 1 starts on 1 when layer 2 ends, at 5, and ends at 7.
    free = schedule.schedule(work._replace(transfer_cycles=jnp.zeros(12, jnp.int32)))
    assert free.latency_cycles == 7


def test_energy_is_reduced_within_the_spec():
    # The second sub-accelerator needs a tenth of the energy and twice the time.
    work = padded([[10, 20]] * 4, [[10, 1]] * 4, [0] * 4, chains(4))
    by_spec = {spec: schedule.schedule(work, spec) for spec in (0, 40, 50, 65, 80)}
    assert [int(x.latency_cycles) for x in by_spec.values()] == [40, 40, 50, 60, 80]
    assert [float(x.energy_pj) for x in by_spec.values()] == [40, 40, 31, 22, 4]


def test_latency_is_near_cp_sat():
    """`cpsat.json` has the optima by OR-tools' CP-SAT: of 100 problems, and of 60 larger ones."""
    found = [schedule.schedule(draw.random_work(seed, 12)).latency_cycles for seed in range(10)]
    gaps = [int(cycles) / optimum - 1 for cycles, optimum in zip(found, CPSAT["12"], strict=False)]
    assert min(gaps) >= 0 and np.mean(gaps) <= 0.03 and np.max(gaps) <= 0.15


def test_diamond_by_hand():
    # A diamond: 0, then 1 and 2 in parallel, then 3.
    before = np.zeros((4, 4), bool)
    before[0, [1, 2]] = before[1, 3] = before[2, 3] = True
    work = padded([[2, 2], [5, 9], [9, 4], [1, 1]], [[0, 0]] * 4, [1] * 4, before)
    found = schedule.schedule(work)
    assert_valid(work, found)
    # 0 ends at 2; 1 runs from 2 to 7, and 2 from 3 to 7 after a transfer; 3 runs from 8 to 9 after another.
    assert found.latency_cycles == 9


def test_invalid_dependencies():
    stacked, subs = layers.stack([layers.gemm(1, 2, 3)] * 3), random_subs(np.random.default_rng(0), 2)
    costs = cost.layer_costs(stacked, subs, KNOWN)
    with pytest.raises(FdgError, match=r"before is \[2, 2\]; give \[3, 3\]"):
        schedule.work_of(costs, stacked, subs, chains(2))
    with pytest.raises(FdgError, match=r"layer 2 comes before layer 0; number layers so that"):
        schedule.work_of(costs, stacked, subs, np.eye(3, k=-2, dtype=bool))
    with pytest.raises(FdgError, match=r"layer 1 comes before itself"):
        schedule.work_of(costs, stacked, subs, jnp.zeros((3, 3), bool).at[1, 1].set(True))
