"""Using a trained run: loading, acting, evaluation, in Python and on the command line."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from fdg.commands import search_flags
from fdg.errors import FdgError
from fdg.training import description
from fdg.training.name_resolver import PERMIT_ALL
from tests.refusing import refuses
from tests.training.trained import fitted, small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("runs") / "ppo", eval_episodes=8)


def summary(run):
    return json.loads((run.path / "summary.json").read_text())


def test_load_restores_the_run(run):
    loaded = fdg.load(run.path)
    assert loaded.algorithm == run.algorithm and loaded.iteration == run.iteration == 4 and loaded.finished
    for ours, theirs in zip(jax.tree.leaves(run.state), jax.tree.leaves(loaded.state), strict=True):
        if not jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(ours, theirs)
    assert len(loaded.metrics) == 4 and loaded.summary == summary(run)
    assert "PPO on CartPole-v1, iteration 4" in repr(loaded) and "(not solved: < 475)" in run.printed


def test_load_with_another_algorithm_is_refused(run):
    for name, value, stored in (("hidden", (16,), [8]), ("num_envs", 8, 4)):
        with pytest.raises(FdgError) as refused:
            fdg.load(run.path, algorithm=small(**{name: value}))
        assert f"contradicts the {stored} of the run in {run.path}: leave algorithm out" in str(refused.value)
        assert str(refused.value).startswith(f"algorithm: {name}=")
    with pytest.raises(FdgError, match=r"algorithm: algo='fdg\.agents:Agents' contradicts the 'ppo'"):
        fdg.load(run.path, algorithm=fdg.agents(small(), 2))
    assert fdg.load(run.path, algorithm=small(learning_rate=1e-2)).iteration == 4


def test_evaluate_equals_eval_return(run):
    value = summary(run)["eval_return"]
    assert fdg.load(run.path).evaluate().mean == run.evaluate().mean == run.last_evaluation.mean == value
    sampled = run.evaluate(greedy=False)
    assert sampled.actions == "sampled" and str(sampled).startswith("sampled: return")
    assert run.evaluate(seed=5).returns.tolist() != run.evaluate().returns.tolist()
    more = run.evaluate(episodes=3)
    assert more.returns.shape == more.lengths.shape == (1, 3)
    low, high = more.interval
    assert low <= more.mean <= high
    assert [row["return"] for row in more.rows()] == more.returns[0].tolist()


def test_policy_takes_one_or_many_observations(run):
    rows = np.asarray(jax.random.normal(jax.random.key(0), (7, 4)))
    policy, _ = run.algorithm.policy_and_value(run.state.parameters, jnp.asarray(rows))
    expected = np.asarray(policy.mode())
    assert run.policy(rows).tolist() == expected.tolist()
    one = run.policy(rows[0].tolist())
    assert one.shape == () and one.dtype == np.int32 and int(one) == expected[0]
    drawn = np.mean([run.policy(rows, greedy=False) for _ in range(200)], axis=0)
    np.testing.assert_allclose(drawn, jnp.exp(policy.log_prob(jnp.ones(7, jnp.int32))), atol=0.12)


def test_policy_compiles_once(run):
    from tests.compilations import compilations

    policy = run.acting()
    policy(np.zeros(4))
    with compilations() as compiled:
        for _ in range(3):
            policy(np.ones(4))
    assert not compiled


def reset_of(run):
    return run.algorithm.env.reset(jax.random.split(jax.random.key(0), 3))


def step_of(run):
    actions = jnp.zeros(3, jnp.int32)
    return run.algorithm.env.step(jax.random.split(jax.random.key(1), 3), reset_of(run)[0], actions)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda run: run.policy(np.zeros(3)), r"shape \[3\]: CartPole-v1 has shape \[4\], and batches"),
        (lambda run: run.policy("left"), "an observation of CartPole-v1 is an array"),
        (
            lambda run: run.policy((np.zeros(4), {})),
            "info\\) that reset of Gymnasium gives: .*, its first element$",
        ),
        (
            lambda run: run.policy((np.zeros(4), 1.0, True, False, {})),
            "that step of Gymnasium .*, its first element$",
        ),
        (
            lambda run: run.policy(reset_of(run)),
            r"pair \(state, observation\) that reset gives: .*, its second element$",
        ),
        (lambda run: run.policy((np.zeros((3, 4)),) * 2), r"\(state, observation\) that reset gives"),
        (
            lambda run: run.policy(step_of(run)),
            r"pair \(state, step\) that step gives: give step.observation",
        ),
        (lambda run: run.policy(step_of(run)[1]), "what step gives: give its observation, step.observation"),
        (lambda run: run.predict(np.zeros(4)), r"Run has no predict: write run.policy\(observation\)"),
        (lambda run: fdg.load(run.path / "checkpoints"), r"has no config.json\): give /.*ppo$"),
        (
            lambda run: run.export("policy.jax", format="onnx"),
            "has the ending of another format: leave out one",
        ),
        (lambda run: jax.jit(run.policy)(jnp.zeros(4)), r"inside jit, use run.actor\(\)"),
        (lambda run: run.evaluate(0), "episodes=0: give an integer of at least 1"),
        (
            lambda run: run.evaluate(1, env=envs.make("Pendulum-v1")),
            "env Pendulum-v1: its observation_space is .*: give an environment with the spaces of CartPole",
        ),
        (lambda run: run.acting(1), "agent=1: this run has one agent: give agent=0"),
        (lambda run: fdg.load(run.path / "none"), r"no run in .*none \(it has no config.json\): give /"),
        (
            lambda run: fdg.load(run.path, checkpoint="best"),
            "no best checkpoint: only runs with --eval-every",
        ),
        (lambda run: fdg.load(run.path, checkpoint=99), "has no such checkpoint: give "),
    ],
)
def test_one_line_errors(run, call, message):
    with refuses(match=message):
        call(run)


def test_evaluate_in_another_environment(run):
    heavy = run.evaluate(env=envs.make("CartPole-v1", gravity=30.0))
    assert heavy.returns.shape == (1, 8) and heavy.returns.tolist() != run.evaluate().returns.tolist()


def test_algorithm_without_an_actor(tmp_path):
    from tests.tiny import Pupil, Silent

    run = fitted(tmp_path / "silent", Silent(), iterations=2, total_steps=2)
    assert run.last_evaluation is None
    for call in (lambda: run.policy, run.evaluate, lambda: run.play("x.gif"), lambda: run.export("x")):
        with pytest.raises(FdgError, match=r"Silent cannot .*: .* give it a method actor\(state\)"):
            call()
    pupil = fitted(tmp_path / "pupil", Pupil(), iterations=2, total_steps=16, eval_episodes=8)
    assert pupil.evaluate().mean == summary(pupil)["eval_return"] and pupil.evaluate().returns is None
    with pytest.raises(FdgError, match="Pupil cannot be evaluated"):
        pupil.evaluate(greedy=False)


def test_evaluation_sees_an_attribute_changed_between_runs(tmp_path):
    from tests.tiny import Walk

    class Scored(Walk):
        bonus = 1.0

        def evaluate(self, state, key, episodes):
            return {"return": jnp.float32(self.bonus)}

    algorithm = Scored()
    assert fitted(tmp_path / "one", algorithm).evaluate().mean == 1.0
    Scored.bonus = 2.0
    assert fitted(tmp_path / "two", algorithm).evaluate().mean == 2.0


@pytest.mark.parametrize("name", ["CartPole-v1?gravity=9.0", "probe:masked", "Reacher-misc?num_joints=3"])
def test_description_rebuilds_the_algorithm(name):
    env_name, overrides = envs.parse(name)
    algorithm = small(env=env_name) if not overrides else None
    if overrides:
        algorithm = algos.PPO(env=envs.make(env_name, **overrides))
    config = description.describe(algorithm, policies.GPUOnly())
    assert "rebuilds" not in config and description.rebuild_algorithm(config, PERMIT_ALL) == algorithm


def test_description_has_numpy_numbers():
    hidden = envs.HideObservations(envs.make("CartPole-v1", gravity=np.float64(9.0)), np.array([0, 1]))
    env = envs.FrameStack(hidden, np.int64(2))
    algorithm = algos.A2C(env=env, num_envs=np.int64(8), hidden=(np.int64(8),), learning_rate=np.float32(0.5))
    policy = policies.SingleLearnerCoarse(actors=np.int64(3), staleness=np.int64(1))
    config = json.loads(json.dumps(description.describe(algorithm, policy)))
    assert "rebuilds" not in config
    assert config["env"] == "CartPole-v1?gravity=9.0&hide_observations=(0, 1)&frame_stack=2"
    assert description.rebuild_algorithm(config, PERMIT_ALL) == algorithm
    assert description.rebuild_policy(config, PERMIT_ALL) == policy


def test_run_repr():
    state = types.SimpleNamespace(iteration=jnp.int32(0))
    one, several = (fdg.Run(small(), state, 1200, agents=agents) for agents in (None, 3))
    assert repr(one) == "<Run PPO on CartPole-v1, iteration 1,200>"
    assert repr(several) == "<Run PPO on CartPole-v1, iteration 1,200, 3 agents>"


def test_member_from_text():
    """Selects a member by `best` or by NAME=VALUE pairs."""
    run = types.SimpleNamespace(best="the best", member=lambda seed, **named: (seed, named))
    assert search_flags.member_of(run, "best") == "the best"
    assert search_flags.member_of(run, "seed=2,lr=1e-3") == (2, {"learning_rate": 1e-3})
    assert search_flags.member_of(run, "anneal=0.5") == (None, {"anneal": 0.5})
