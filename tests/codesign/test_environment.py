import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from envs import registry
from envs.codesign import environment, found, problem
from envs.codesign.environment import CoDesign
from envs.codesign.problem import Specs
from envs.contract import COMPILE_FAST, random_actions
from fdg.errors import FdgError
from fdg.training.checkpoint import Checkpoints
from tests.codesign.small import PROBLEM, all_designs
from tests.conformance import dialogue
from tests.conformance.comparison import assert_same, copied, leaves, plain
from tests.refusing import refuses

ENV = CoDesign(PROBLEM, order="sequence", info=environment.INFO)
SINGLE_STEP = dataclasses.replace(ENV, order="at_once")
STEPS = ENV.max_episode_steps
evaluate = jax.jit(problem.evaluate, static_argnums=0, compiler_options=COMPILE_FAST)


def keys(number, seed=0):
    return jax.random.split(jax.random.key(seed), number)


@functools.cache
def episodes(env, number=16, times=3, masked=True):
    """Time steps [T, B] of random episodes, and the state after them."""

    @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
    def run():
        state, observation = env.reset(keys(number))

        def step(carry, key):
            state, observation = carry
            if masked:
                action = random_actions(env, jax.random.split(key, number), observation)
            else:  # any integers, also outside the action space
                action = jax.random.randint(key, (number, *env.action_space.shape), -3, 9)
            state, time_step = env.step(jax.random.split(key, number), state, action)
            return (state, time_step.observation), (action, time_step)

        each = keys(times * env.max_episode_steps, seed=1)
        (state, _), steps = jax.lax.scan(step, (state, observation), each)
        return state, *steps

    return run()


@pytest.mark.parametrize("env", [ENV, SINGLE_STEP], ids=["sequence", "at once"])
def test_designs_are_within_budgets(env):
    state = episodes(env, masked=False)[0]
    results = env.designs(state)
    allowed = {tuple(one) for one in all_designs().tolist()}
    assert {tuple(one) for one in [results.best.choices.tolist(), *results.front.choices.tolist()]} <= allowed
    raw = jax.random.randint(jax.random.key(5), (300, STEPS), -3, 9)
    repair = jax.jit(jax.vmap(functools.partial(problem.repair, PROBLEM)))
    repaired = repair(raw)
    sampled = jax.jit(jax.vmap(functools.partial(problem.draw, PROBLEM)))(keys(300))
    assert {tuple(one) for one in [*repaired.tolist(), *sampled.tolist()]} <= allowed
    # Allowed designs stay unchanged.
    each = all_designs()
    assert (repair(each) == each).all()


def test_reward_of_an_episode():
    _, action, step = episodes(ENV)
    choices = action[:STEPS].T
    by_hand = evaluate(PROBLEM, choices)
    last = jax.tree.map(lambda x: np.asarray(x)[STEPS - 1], step)
    assert not np.asarray(step.reward)[: STEPS - 1].any() and last.terminated.all()
    assert (last.episode_length == STEPS).all() and (last.episode_return == last.reward).all()
    for at in range(len(choices)):
        costs = [float(x[at]) for x in by_hand[:3]]
        over = [max(x - s, 0) / (b - s) for x, s, b in zip(costs, PROBLEM.specs, PROBLEM.bounds, strict=True)]
        score = float(by_hand.accuracy[at, 0])
        assert last.reward[at] == pytest.approx(score - 10 * sum(over), rel=1e-4)
        assert last.episode_info["feasible"][at] == (sum(over) == 0)
        assert last.episode_info["latency_cycles"][at] == costs[0]
        # The final observation contains costs relative to the specs, and accuracies.
        relative = [min(x / s, 10) for x, s in zip(costs, PROBLEM.specs, strict=True)]
        np.testing.assert_allclose(last.final_observation.observation[at, -4:], [*relative, score], rtol=1e-5)
    first = dataclasses.replace(ENV, reward="feasible_first")
    reward = np.asarray(episodes(first)[2].reward)[STEPS - 1]
    penalty = -np.minimum(np.asarray(by_hand.violation), 10)
    np.testing.assert_allclose(reward, np.where(by_hand.feasible, by_hand.score, penalty), rtol=1e-5)


def test_best_design_over_episodes():
    state, action, step = episodes(ENV)
    designs = np.asarray(action).reshape(3, STEPS, 16).transpose(0, 2, 1).reshape(-1, STEPS)
    each = evaluate(PROBLEM, jnp.asarray(designs))
    first = np.lexsort((each.energy_pj, -each.score, each.violation))[0]
    results = ENV.designs(state)
    assert results.best.choices.tolist() == designs[first].tolist()
    assert results.best.score == pytest.approx(float(each.score[first]))
    best_score = np.asarray(step.episode_info["best_score"])[STEPS - 1 :: STEPS]
    feasible = np.where(each.feasible, each.score, -np.inf).reshape(3, 16)
    so_far = np.maximum.accumulate(feasible)
    np.testing.assert_allclose(best_score, np.where(np.isfinite(so_far), so_far, np.nan), rtol=1e-5)
    # States with a further axis (seeds, devices), within the state of an algorithm.
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    assert_same(results, ENV.designs({"env_state": twice, "count": 3}))
    with pytest.raises(FdgError, match="contains 0 of its states"):
        ENV.designs({"count": 3})


def pareto_front(points):
    """The distinct points that no other dominates, by a double loop."""

    def dominates(a, b):
        return a[0] < b[0] or (a[0] == b[0] and all(x <= y for x, y in zip(a, b, strict=True)))

    points = sorted(set(points))
    return [p for p in points if not any(q != p and dominates(q, p) for q in points)]  # fmt: skip


def test_pareto_front():
    insert = jax.jit(lambda front, new: jax.lax.scan(lambda f, x: (found.insert(f, x), None), front, new)[0])
    for seed in range(6):
        random = np.random.default_rng(seed)
        number = 12 if seed % 2 else 60
        new = found.empty(PROBLEM, (number,))._replace(
            latency_cycles=jnp.asarray(random.integers(1, 9, number), jnp.int32),
            energy_pj=jnp.asarray(random.integers(1, 9, number), jnp.float32),
            area_mm2=jnp.ones(number),
            score=jnp.asarray(random.integers(0, 4, number), jnp.float32),
            violation=jnp.asarray(random.integers(0, 2, number) * (seed < 4), jnp.float32),
        )
        empty = found.empty(PROBLEM, (found.POINTS,))
        results = found.merge(jax.tree.map(lambda x: x[:1], new), insert(empty, new))

        def rows(x):
            fields = (x.violation, -x.score, x.latency_cycles, x.energy_pj)
            return [tuple(float(y) for y in one) for one in zip(*fields, strict=True)]

        expected = pareto_front(rows(new))
        assert len(expected) > (1 if seed < 4 else 2)
        if len(expected) < found.POINTS:
            assert sorted(rows(results.front)) == expected


def test_full_front_drops_crowded_points():
    # 40 points, none of which dominates another: 0.01 apart, except for the last one at 1.4.
    at = jnp.append(jnp.arange(39) * 0.01, 1.4)
    new = found.empty(PROBLEM, (40,))._replace(
        score=at, latency_cycles=jnp.ones(40, jnp.int32), energy_pj=jnp.exp(at), violation=jnp.zeros(40)
    )
    front = jax.lax.scan(lambda f, x: (found.insert(f, x), None), found.empty(PROBLEM, (16,)), new)[0]
    assert jnp.isfinite(front.violation).all() and front.score.max() == at[-1]


def barely_infeasible():
    """A problem whose most accurate networks slightly exceed the latency spec; and all its designs."""
    each = all_designs()
    costs = evaluate(PROBLEM, each)
    best = np.asarray(costs.score) == np.asarray(costs.score).max()
    cycles = 0.98 * np.asarray(costs.latency_cycles)[best].min()
    specs, bounds = Specs(latency_cycles=cycles), Specs(latency_cycles=10 * cycles)
    return CoDesign(dataclasses.replace(PROBLEM, specs=specs, bounds=bounds), order="at_once"), each


def test_best_design_is_feasible_if_any_is():
    each = all_designs()
    costs = evaluate(PROBLEM, each)
    limits = np.stack([np.asarray(x, np.float64) for x in costs[:3]], 1)
    num_feasible = 0
    for quantile in np.linspace(0, 0.6, 13):
        specs = jnp.asarray(np.quantile(limits, quantile, axis=0), jnp.float32)
        evaluated = evaluate(PROBLEM, each, specs)
        designs = found.Designs(each, *evaluated[:5], evaluated.violation)
        best = found.merge(designs, jax.tree.map(lambda x: x[:1], designs)).best
        meets = (limits <= np.asarray(specs, np.float64)[None] * (1 + 1e-6)).all(1)
        assert (best.violation == 0) == meets.any()
        num_feasible += meets.any()
        if meets.any():
            assert best.score == np.asarray(evaluated.score)[meets].max()
    assert 3 <= num_feasible < 13


def test_penalty_grows_if_violations_have_higher_reward():
    env, each = barely_infeasible()
    evaluated = evaluate(env.problem, each)
    good = each[int(jnp.where(evaluated.feasible, evaluated.score, -1).argmax())]
    reward = evaluated.score - 10 * evaluated.excess[:, 0] / 9
    bad = each[int(jnp.where(evaluated.feasible, -jnp.inf, reward).argmax())]
    start, _ = env.reset(keys(1))
    step = jax.jit(env.step, compiler_options=COMPILE_FAST)
    for history in (
        ((bad, 10), (good, 10), (bad, 10), (good, 10)),
        ((good, 10), (bad, 20), (bad, 20)),
    ):
        state = start
        for design, rho in history:
            state, _ = step(keys(1), state, design[None])
            assert state.rho.tolist() == [rho]


def test_random_specs():
    tight, loose = Specs(2_000, 1e5, 0.5), Specs(8_000, 4e6, 0.9)
    env = CoDesign(
        dataclasses.replace(PROBLEM, levels=(("tight", tight), ("loose", loose)), specs=loose),
        order="sequence",
        draws_specs=True,
    )
    state, observation = jax.jit(env.reset, compiler_options=COMPILE_FAST)(keys(200))
    specs = np.asarray(state.specs)
    assert (specs >= np.float32(tight)).all() and (specs <= np.float32(loose)).all()
    middle = np.log(specs / np.float32(tight)).mean(0) / np.log(np.float32(loose) / np.float32(tight))
    assert np.abs(middle - 0.5).max() < 0.1
    seen = observation.observation[:, 3 * STEPS + 2 : 3 * STEPS + 5]
    np.testing.assert_allclose(seen, specs / np.float32(loose), rtol=1e-5)
    start, _, steps = episodes(env)
    assert len({tuple(one) for one in np.asarray(start.specs).tolist()}) == 16  # each episode has its own
    assert np.unique(np.asarray(steps.observation.observation)[0, :, 3 * STEPS + 2]).size == 16


def test_random_specs_need_both_levels():
    """A spec in neither level stays absent; one in a single level, or looser in `tight`, is refused."""
    tight, loose = Specs(2_000, 1e5), Specs(8_000, 4e6)
    levels = ("tight", tight), ("loose", loose)
    env = CoDesign(dataclasses.replace(PROBLEM, levels=levels, specs=loose), draws_specs=True)
    specs = np.asarray(env.reset(keys(20))[0].specs)
    assert np.isposinf(specs[:, 2]).all() and np.isfinite(specs[:, :2]).all()
    for bad in (Specs(2_000), Specs(9_000, 1e5)):
        problem = dataclasses.replace(PROBLEM, levels=(("tight", bad), ("loose", loose)), specs=loose)
        with pytest.raises(FdgError, match=r"specs=random draws .*: give it in both or neither"):
            CoDesign(problem, draws_specs=True)


class RandomSearch(NamedTuple):
    """Random search as a user algorithm, without learning."""

    number: int
    env: Any = ENV

    def init(self, key):
        state, observation = self.env.reset(jax.random.split(key, self.number))
        return {"env_state": state, "observation": observation, "key": key}

    def iterate(self, state):
        def one(carry, key):
            env_state, observation = carry
            both = jax.random.split(key, (2, self.number))
            env_state, step = self.move(both[0], env_state, self.act(observation, both[1]))
            return (env_state, step.observation), step.reward

        key, own = jax.random.split(state["key"])
        begin = state["env_state"], state["observation"]
        (env_state, observation), reward = jax.lax.scan(one, begin, jax.random.split(own, STEPS))
        return {"env_state": env_state, "observation": observation, "key": key}, {
            "reward": self.mean(self.total(reward))
        }

    @fdg.fragment("actor")
    def act(self, observation, keys):
        return random_actions(self.env, keys, observation)

    @fdg.fragment("environment")
    def move(self, keys, env_state, action):
        return self.env.step(keys, env_state, action)

    @fdg.fragment("learner", in_axes=1, out_axes=None)
    def total(self, reward):
        return reward.sum()

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def mean(self, total):
        return total / self.number


SETUPS = {
    "4 devices": (policies.GPUOnly(), 4),
    "actors apart": (policies.SingleLearnerFine(workers=2), 3),
    **{f"{count} devices": (policies.GPUOnly(), count) for count in (1, 2, 8)},
    **{
        f"{one}, 8 devices": (policies.get(one)(), 8)
        for one in policies.names()
        if one not in dialogue.POLICIES
    },
}


@pytest.mark.parametrize("name", SETUPS)
def test_best_design_on_any_devices_and_after_resume(name, devices, tmp_path):
    policy, count = SETUPS[name]
    search = RandomSearch(8)
    start = search.init(jax.random.key(0))
    expected, _ = plain(search, copied(start), 3)
    engine = fdg.compile(search, policy, devices[:count])
    state, _ = engine.run(copied(start), 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state)
    checkpoints.close()
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    continued, _ = engine.run(state, 1)
    resumed, _ = engine.run(Checkpoints(tmp_path).restore(2, types), 1)
    assert_same(expected, continued)
    assert_same(ENV.designs(expected), ENV.designs(continued))
    continued_leaves, resumed_leaves = leaves(ENV.designs(continued)), leaves(ENV.designs(resumed))
    assert {path: x.tobytes() for path, x in continued_leaves.items()} == {
        path: x.tobytes() for path, x in resumed_leaves.items()
    }
    assert not engine.unexplained()


def test_spec_parameters_override_the_file(tmp_path):
    file = tmp_path / "p.toml"
    file.write_text('[specs]\nlatency_cycles = 500\nenergy_uj = 2\n[[task]]\nname = "one"\nspace = "unet"\n')
    assert registry.make(f"codesign:{file}", area_mm2=1).problem.specs == Specs(500.0, 2e6, 1.0)
    assert registry.make(f"codesign:{file}", energy_uj=1).problem.specs == Specs(500.0, 1e6)


def test_make_with_parameters():
    settings = {"specs": "tight", "order": "sequence", "accuracy": "surrogate"}
    env = registry.make("codesign:w1", **settings)
    assert env == registry.make("codesign:w1", **settings) and hash(env) == hash(env)
    assert env.problem.specs.latency_cycles == 3058 and env.max_episode_steps == 19
    one_sub = registry.make("codesign:w1", subs=1, latency_ms=0.004, order="sequence", accuracy="surrogate")
    assert one_sub.max_episode_steps == 15 and one_sub.problem.specs == Specs(4000.0)
    single_step = registry.make("codesign:w1", accuracy="surrogate")
    assert single_step.action_space.shape == (19,) and single_step.max_episode_steps == 1
    assert registry.parse("codesign:w1?specs=random&info=score") == (
        "codesign:w1", {"specs": "random", "info": "score"}
    )  # fmt: skip
    assert envs.trust_reason("codesign:w1", {}) is None
    algos.DQN(env=single_step), algos.PPO(env=env)
    # A design takes one step with order=at_once, and many steps with order=sequence.
    assert (
        algos.PPO.preset("codesign:w1", single_step)["num_steps"]
        == 1
        < algos.PPO.preset("codesign:w1", env)["num_steps"]
    )


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"spec": "tight"}, "unknown parameter of codesign:w1 'spec': did you mean 'specs'?"),
        ({"specs": "tigth"}, "unknown specs of codesign:w1 'tigth': did you mean 'tight'?"),
        ({"specs": "latency_ms=0.003,energy_uj=2"}, "numbers are given as latency_ms=0.003"),
        ({"specs": 0.003}, "0.003: give the name of a level; numbers are given"),
        ({"specs": {"latency_ms": 3}}, "(fdg codesign: --latency-ms 0.003 --energy-uj 2)"),
        ({"order": "once"}, "'once': did you mean 'at_once'? (known: at_once, sequence)"),
        ({"reward": 3}, "unknown reward of codesign:w1 '3' (known: feasible_first, paper)"),
        ({"accuracy": "tabel"}, "unknown source of accuracies 'tabel': did you mean 'table'?"),
        ({"subs": 0}, "subaccelerators is 0; give 1 to 8"),
        ({"subs": 9}, "subaccelerators is 9; give 1 to 8"),
        ({"latency_ms": -1}, "latency_ms is -1; give a number above 0"),
        ({"latency_ms": "fast"}, "latency_ms is 'fast'; give a number above 0"),
        ({"latency": 1.0}, "unknown parameter of codesign:w1 'latency'"),
        ({"specs": "tight", "area_mm2": 1.0}, "specs=tight and area_mm2 are given: leave one out"),
        ({"info": "scores"}, "unknown info of codesign:w1 'scores': did you mean 'score'?"),
        ({"info": 3}, "info=3: give names of entries of info"),
    ],
)
def test_invalid_parameters(parameters, message):
    with refuses(message):
        registry.make("codesign:w1", **parameters)


def test_unknown_names_are_refused():
    for name in ("w4", "nowhere.toml", "", "w1.toml/..", "."):
        with pytest.raises(FdgError):
            registry.make(f"codesign:{name}")
