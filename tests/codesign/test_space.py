import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs.codesign import cost, exhaustive, layers, problem, reading, schedule, space
from envs.codesign.problem import Problem, Specs
from envs.codesign.space import Chips
from tests.codesign.draw import random_work
from tests.codesign.small import TASK, build
from tests.refusing import refuses

CHIPS = Chips(
    templates=("dla", "shi"), pes=(0, 64, 128), noc_bytes_per_cycle=(8, 16, 24), buffer_kb=(4, 8),
    budget_pes=192, budget_noc_bytes_per_cycle=32,
)  # fmt: skip
SMALL = Problem((TASK, TASK), CHIPS)
SPECS = Specs(9_000, 2e6, 0.7)


def test_chips_are_hashable_values():
    assert hash(Chips(pes=[0, 512])) == hash(Chips(pes=(0, 512)))
    for field, value, message in (
        ("subaccelerators", True, "subaccelerators is True; give 1 to 8"),
        ("pes", (-1, 512), r"pes is \(-1, 512\); numbers of PEs are 0 or more"),
    ):
        with refuses(match=message):
            Chips(**{field: value})


def test_spaces_have_256_networks():
    for task in (space.resnet9(), space.unet()):
        found = [task.build(*choice) for choice in task.choices()]
        assert len(found) == 256 and len({tuple(one) for one in found}) >= 200
    classifier, segmenter = space.resnet9().build(8, 32, 1, 64, 0, 128, 0), space.unet().build(3, 4, 8, 16)
    assert [one.out_rows for one in classifier] == [32, 16, 16, 16, 16, 8, 4, 1]
    assert classifier[-1].in_channels == 128 and classifier[4].macs == 0
    assert segmenter[-1].output_words == 64 * 64
    # The output of each layer is the input of the next.
    for one, other in itertools.pairwise(segmenter[:3]):
        assert one.out_channels == other.in_channels and one.out_rows == other.in_rows


def allowed_designs(designs, chosen, i, mask):
    """Yields all designs that the masks allow, with decisions before `i` given by `chosen`."""
    decisions = designs.decisions()
    if i == len(decisions):
        yield tuple(one.options[c] for one, c in zip(decisions, chosen, strict=True))
        return
    allowed = np.asarray(mask(jnp.asarray(chosen, jnp.int32), i))
    assert allowed.any()
    for option in np.flatnonzero(allowed):
        yield from allowed_designs(designs, [*chosen[:i], int(option), *chosen[i + 1 :]], i + 1, mask)


STACKS = [layers.stack((build(*choice) + [None])[:2]) for choice in TASK.choices()]


def test_masks_allow_exactly_the_chips_within_budget():
    mask = jax.jit(lambda chosen, i: problem.mask(Problem((), CHIPS), chosen, i))
    found = list(allowed_designs(Problem((), CHIPS), [0] * 8, 0, mask))
    kinds = CHIPS.kinds()
    for design in found:
        pairs = [design[:4], design[4:]]
        assert 0 < sum(one[0] for one in pairs) <= 192
        assert sum(one[2] for one in pairs if one[0]) <= 32
    by_masks = {tuple(sorted((kinds.index(one[:4]), kinds.index(one[4:])))) for one in found}
    # Masks reserve bandwidth for the second, so a single sub-accelerator with more bandwidth is the second.
    assert by_masks == {tuple(one) for one in CHIPS.all().tolist()}


def test_network_decisions_are_not_masked():
    assert [one.name for one in SMALL.decisions()][:5:4] == ["task: filters", "sub-accelerator 0: pes"]
    allowed = problem.mask(SMALL, jnp.zeros(12, jnp.int32), 1)
    assert allowed.tolist() == [True, True, False]


def test_enumerate_all_matches_python():
    scores = np.float32([0.1, 0.35, 0.3, 0.6]), np.float32([0, 0.2, 0.15, 0.3])
    found = exhaustive.enumerate_all(SMALL, scores, SPECS)
    kinds, choices, chips = CHIPS.kinds(), TASK.choices(), CHIPS.all()
    assert found.designs == SMALL.count() == 16 * len(chips)
    by_design = {}
    subs = CHIPS.subs()
    costs = [cost.layer_costs(one, subs, CHIPS.templates) for one in STACKS]
    of_pair = jax.jit(jax.vmap(schedule.chain_schedule))
    for first, second in itertools.product(range(4), repeat=2):
        pair = [costs[first], costs[second]]
        maps = [[one.output_words for one in build(*choices[i])] for i in (first, second)]
        maps = np.asarray([one + [0] * (2 - len(one)) for one in maps])
        latency = np.stack([np.asarray(x.latency_cycles) for x in pair])
        latency = np.where((maps > 0)[..., None], latency, 0)[..., chips].transpose(2, 0, 1, 3)
        energy = np.stack([np.asarray(x.energy_pj) for x in pair])[..., chips].transpose(2, 0, 1, 3)
        noc = np.asarray([min(kinds[k][2] for k in chip if kinds[k][0]) for chip in chips])
        cycles, pj = of_pair(latency, energy, np.ceil(maps[None] / noc[:, None, None]).astype(np.int32))
        for i, chip in enumerate(chips.tolist()):
            mm2 = 0.384 + sum(
                kinds[k][0] * 0.00178 * (1.2 if kinds[k][1] == "shi" else 1) + 0.00325 * kinds[k][3]
                for k in chip if kinds[k][0]
            )  # fmt: skip
            values = int(cycles[i]), float(pj[i]), mm2
            by_design[first, second, *chip] = (float(scores[0][first] + scores[1][second]), *values)
    meets = {one: x for one, x in by_design.items() if all(a <= b for a, b in zip(x[1:], SPECS, strict=True))}
    assert found.feasible == len(meets) and 0 < len(meets) < len(by_design) and found.violation == 0
    best = max(x[0] for x in meets.values())
    least = min(x[2] for x in meets.values() if x[0] > best - 1e-6)
    assert found.score == pytest.approx(best) and found.costs.energy_pj == pytest.approx(least, rel=1e-6)
    assert by_design[*found.networks, *found.kinds][1] == found.costs.latency_cycles
    # If no design meets the specs: the least violation.
    none = exhaustive.enumerate_all(SMALL, scores, Specs(10, 1e3, 0.1))
    excess = [x[1] / 10 + x[2] / 1e3 + x[3] / 0.1 - 3 for x in by_design.values()]
    assert none.feasible == 0 and none.violation == pytest.approx(min(excess), rel=1e-5)


def test_chain_schedule_matches_graph_schedule():
    of_chains = jax.jit(schedule.chain_schedule)
    for seed in range(0, 12, 3):  # two chains
        work = random_work(seed, 12, 2)
        work = work._replace(energy_pj=work.latency_cycles**0.5, before=schedule.chains(6, 6))
        shapes = (2, 6, 2), (2, 6, 2), (2, 6)
        parts = [x.reshape(shape) for x, shape in zip(work[:3], shapes, strict=True)]
        found = [of_chains(*parts, jnp.float32(x)) for x in (0.0, 0.1, 0.3, 1.0)]
        cycles, pj = min(found, key=lambda each: int(each[0]))
        graph = schedule.schedule(work, moves=0)
        assert cycles == graph.latency_cycles and float(pj) == pytest.approx(float(graph.energy_pj), rel=1e-6)


@pytest.mark.parametrize("pes", [1, 7, 15, 64, 100, 4096])
def test_default_options_are_eighths_of_the_budget(pes):
    settings = {"budget": {"pes": pes, "bandwidth_gb_s": 16}, "accuracy": {"source": "surrogate"}}
    chips = reading.from_dict({**settings, "task": [{"name": "one", "space": "resnet9", "weight": 1}]}).chips
    assert chips.pes[0] == 0 and chips.pes[-1] == pes and len(chips.pes) == min(pes + 1, 9)
    assert chips.noc_bytes_per_cycle == (2, 4, 6, 8, 10, 12, 14)


def test_costs_equal_to_specs_are_feasible():
    # x / x - 1 may differ from 0 if XLA multiplies by the reciprocal.
    costs = np.random.default_rng(0).uniform(0.4, 3, (3, 512)).astype(np.float32)
    over = jax.jit(jax.vmap(problem.over, in_axes=(0, None)))
    for i in range(32):
        specs = costs[:, i]
        assert not over(tuple(costs), tuple(specs))[i].any()
        assert (over(tuple(costs), tuple(np.nextafter(specs, np.float32(0))))[i] > 0).all()


def test_specs_at_quantiles():
    tight, loose = (exhaustive.specs_at(SMALL, q, samples=4096) for q in (0.1, 0.5))
    assert (
        all(a < b for a, b in zip(tight, loose, strict=True))
        and exhaustive.specs_at(SMALL, 0.1, samples=4096) == tight
    )
    with refuses("specs_at: 65,733,132,288 designs, more than 2^31"):
        exhaustive.specs_at(reading.get("w1"), 0.1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: dataclasses.replace(CHIPS, pes=()), "pes is (); give at least one option, each once"),
        (lambda: dataclasses.replace(CHIPS, buffer_kb=(8, 8)), "buffer_kb is (8, 8); give at least one"),
        (lambda: exhaustive.enumerate_all(SMALL, (np.zeros(5),) * 2, SPECS), "[4, 4] choices, but"),
    ],
)  # fmt: skip
def test_invalid_arguments(make, message):
    with refuses(message):
        make()
