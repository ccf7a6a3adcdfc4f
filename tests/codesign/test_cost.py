import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.codesign import cost, layers
from envs.codesign.layers import LARGEST_COUNT
from envs.codesign.technology import Technology
from fdg.errors import FdgError
from tests.codesign.draw import KNOWN, random_layers, random_subs
from tests.refusing import refuses

FEW_EXAMPLES = settings(max_examples=5, deadline=None)
seeds = st.integers(0, 2**31 - 1)


def costs(stacked, subs):
    return cost.layer_costs(stacked, subs, KNOWN)


def random_case(seed):
    random = np.random.default_rng(seed)
    found = random_layers(random, 24)
    return found, layers.stack(found), random_subs(random, 24)


def test_layer_by_hand():
    # 8 kernels of 4 channels, 3 x 3, 8 x 8 outputs, on 4 x 4 weight-stationary PEs.
    layer = layers.convolution(4, 8, 8, groups=1)
    sub = cost.sub_accelerator(
        "dla", rows=4, columns=4, buffer_bytes=1024, noc_bytes_per_cycle=8, dram_bytes_per_cycle=0.5
    )
    found = cost.layer_costs(layers.stack([layer]), jax.tree.map(lambda x: x[None], sub))
    found = jax.tree.map(lambda x: x[0, 0].item(), found)
    macs = 8 * 4 * 9 * 64
    assert (found.macs, found.compute_cycles, found.utilization) == (macs, 2 * 9 * 64, 1.0)
    onchip = 288 + macs // 4 + 512  # weights once, inputs once per 4 kernels, sums once
    offchip = 288 + 256 + 512  # the 288 bytes of weights fit into half of the buffer
    assert (found.onchip_bytes, found.offchip_bytes) == (onchip, offchip)
    # max(1152, 5408 / 8, 1056 / 0.5), plus 4 + 4 to fill the array
    assert found.latency_cycles == 2112 + 8 and cost.BOUNDS[found.bound] == "off-chip"
    assert found.energy_pj == pytest.approx(0.23 * (macs * 5 + onchip * 8 + offchip * 200), rel=1e-6)
    # 16 PEs, 1 KB, and the fixed area of a chip
    area = cost.area_mm2(jax.tree.map(lambda x: x[None], sub))
    assert area == pytest.approx(0.384 + 16 * 0.00178 + 0.00325, rel=1e-6)


def test_no_overlap_adds_the_terms():
    _, stacked, subs = random_case(0)
    sequential = cost.layer_costs(stacked, subs, KNOWN, overlap=False)
    overlapped = costs(stacked, subs)
    onchip = np.ceil(overlapped.onchip_bytes / subs.noc_bytes_per_cycle[None])
    offchip = np.ceil(overlapped.offchip_bytes / subs.dram_bytes_per_cycle[None])
    terms = np.stack([overlapped.compute_cycles, onchip, offchip]).astype(np.int64)
    fill = overlapped.latency_cycles - terms.max(0)
    np.testing.assert_array_equal(sequential.latency_cycles, terms.sum(0) + fill)


@FEW_EXAMPLES
@given(seeds)
def test_invariants(seed):
    found, stacked, subs = random_case(seed)
    got = costs(stacked, subs)
    assert got.latency_cycles.dtype == got.compute_cycles.dtype == jnp.int32
    assert np.all((got.utilization >= 0) & (got.utilization <= 1 + 1e-6))
    compulsory = np.asarray([[x.weight_words + x.input_words + x.output_words] for x in found], np.float32)
    assert np.all(got.offchip_bytes >= compulsory) and np.all(got.onchip_bytes >= compulsory * (1 - 1e-6))
    assert np.all(got.latency_cycles >= got.compute_cycles)
    assert np.all(got.energy_pj >= 0.23 * np.asarray(got.macs)) and np.all(np.isfinite(got.energy_pj))
    multiplies = np.asarray([[x.macs > 0] for x in found])
    assert np.all((got.compute_cycles > 0) == multiplies)


@FEW_EXAMPLES
@given(
    seeds, st.sampled_from(["buffer_bytes", "noc_bytes_per_cycle", "dram_bytes_per_cycle"]), st.floats(1, 8)
)
def test_more_resources_are_never_worse(seed, name, times):
    _, stacked, subs = random_case(seed)
    more = np.asarray(getattr(subs, name) * times).astype(getattr(subs, name).dtype)
    before, after = costs(stacked, subs), costs(stacked, subs._replace(**{name: more}))
    assert np.all(after.latency_cycles <= before.latency_cycles)
    assert np.all(after.offchip_bytes <= before.offchip_bytes) and np.all(after.energy_pj <= before.energy_pj)


# XLA may divide by multiplying by a reciprocal. Then a quotient next to a whole number rounds up to another,
# and leakage, a part of the energy, is that of one cycle more or less.
BATCH_TOLERANCES = {"latency_cycles": {"atol": 1}, "energy_pj": {"rtol": 1e-4}}


@FEW_EXAMPLES
@example(495827)  # 250,527 bytes at 2.5088325 per cycle: 99,858 cycles, or 99,859
@given(seeds)
def test_costs_are_independent_of_the_batch(seed):
    found, stacked, subs = random_case(seed)
    both = costs(stacked, subs)
    alone = costs(jax.tree.map(lambda x: x[5:6], stacked), jax.tree.map(lambda x: x[3:4], subs))
    for name, one, of_all in zip(both._fields, alone, both, strict=True):
        np.testing.assert_allclose(one[0, 0], of_all[5, 3], **{"rtol": 0, **BATCH_TOLERANCES.get(name, {})})
    nothing = costs(layers.stack([*found[:-1], None]), subs)
    assert all(not np.any(x[-1]) for x in nothing)  # an empty layer costs nothing, not even filling
    pairs = [jax.tree.map(lambda x, at=at: x[at : at + 1], subs) for at in range(24)]
    fixed = Technology().chip_mm2
    total = sum(float(cost.area_mm2(pair, KNOWN)) - fixed for pair in pairs)
    assert cost.area_mm2(subs, KNOWN) == pytest.approx(fixed + total, rel=1e-5)


def test_absent_sub_accelerator_is_never_fastest():
    _, stacked, subs = random_case(0)
    absent, present = (
        subs._replace(rows=np.concatenate([[n], subs.rows[1:]]).astype(np.int32)) for n in (0, 1)
    )
    cycles = np.asarray(costs(stacked, absent).latency_cycles)
    assert np.all(cycles[:, 0] == LARGEST_COUNT) and np.all(cycles.min(axis=1) < LARGEST_COUNT)
    assert cost.area_mm2(absent, KNOWN) < cost.area_mm2(present, KNOWN)


def plain_offchip(weights, inputs, outputs, buffer):
    """With Python floats (float64)."""
    half = buffer / 2
    if min(weights, inputs) <= half:
        return weights + inputs + outputs
    ways = []
    for sixteenths in range(1, 16):
        held = half * sixteenths / 16
        ways.append(weights + inputs * np.ceil(weights / held))
        ways.append(inputs + weights * np.ceil(inputs / (half - held)))
    return outputs + min(ways)


@FEW_EXAMPLES
@given(seeds)
def test_offchip_traffic_matches_float64(seed):
    random = np.random.default_rng(seed)
    sizes = np.floor(2 ** random.uniform(5, 20, (200, 3))).astype(np.float32)
    buffers = np.floor(2 ** random.uniform(8, 18, 200)).astype(np.float32)
    found = jax.vmap(cost.offchip_bytes)(*sizes.T, buffers)
    plain = [plain_offchip(*map(float, (*size, buffer))) for size, buffer in zip(sizes, buffers, strict=True)]
    np.testing.assert_allclose(found, plain, rtol=1e-5)


def test_leakage():
    _, stacked, subs = random_case(0)
    leaking = cost.layer_costs(stacked, subs, KNOWN, Technology(leakage_w_per_mm2=0.1))
    before = costs(stacked, subs)
    for at in range(2):
        one = jax.tree.map(lambda x, at=at: x[at : at + 1], subs)
        mm2 = float(cost.area_mm2(one, KNOWN)) - Technology().chip_mm2
        more = 0.1 * mm2 * float(before.latency_cycles[0, at]) / 1e9 * 1e12
        assert leaking.energy_pj[0, at] - before.energy_pj[0, at] == pytest.approx(more, rel=1e-2)


VALID = {
    "template": "dla",
    "pes": 64,
    "buffer_bytes": 1024,
    "noc_bytes_per_cycle": 8,
    "dram_bytes_per_cycle": 1,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"template": "dlaa"}, "unknown template 'dlaa': did you mean 'dla'?"),
        ({"template": "systolic-os"}, "template 'systolic-os' is not among dla, shi, rs: give one"),
        ({"pes": 0}, "pes is 0; give a whole number from 1"),
        ({"pes": 2.5}, "pes is 2.5; give a whole number"),
        ({"pes": None}, "give either pes, or rows and columns"),
        ({"rows": 4, "columns": 4}, "give either pes, or rows and columns"),
        ({"pes": None, "rows": 4}, "give either pes, or rows and columns"),
        ({"pes": None, "rows": 4, "columns": -4}, "columns is -4; give a whole number"),
        (
            {"buffer_bytes": 2**40},
            "buffer_bytes is 1099511627776; give a whole number from 1 to 2,147,000,000",
        ),
        ({"noc_bytes_per_cycle": 0}, "noc_bytes_per_cycle is 0; give a number above 0"),
        ({"dram_bytes_per_cycle": float("nan")}, "dram_bytes_per_cycle is nan; give a number above 0"),
    ],
)
def test_invalid_sub_accelerators(changes, message):
    with refuses(message):
        cost.sub_accelerator(**{**VALID, **changes})


@pytest.mark.parametrize("one", dataclasses.fields(Technology), ids=lambda one: one.name)
def test_invalid_technology(one):
    with pytest.raises(FdgError, match=f"technology: {one.name} is -1; give a number"):
        Technology(**{one.name: -1})
