"""`send` and `recv`, and rollouts in rings: equality with one batch and `step`, and what overlaps."""

import dataclasses
import functools
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.rings import in_parts
from algos.rollout import rollout
from envs import Box, Discrete, HostEnvironment, host, running_pools
from envs.pools import Transition
from fdg.errors import FdgError, HostError
from tests.conformance.comparison import assert_same, copied, plain
from tests.conformance.test_algorithms import SMALL
from tests.envs.conformance import COMPILE_FAST

B, T = 4, 6
OBSERVATIONS, ACTIONS = Box(-1e9, 1e9, (2,)), Discrete(3)
events = []  # of `RecordingPool` and `recording_policy`
before_step = {}  # by name of a source: a function of the actions, called at the start of each step


@pytest.fixture(autouse=True)
def _close_pools():
    yield
    host.close()
    before_step.clear()


@dataclasses.dataclass(frozen=True)
class Adding:
    """Observes its seed and the sum of 1 + action, which is the reward; episodes have five steps."""

    name: str = "adding"
    observation_space: Any = OBSERVATIONS
    action_space: Any = ACTIONS
    max_episode_steps: int | None = 5

    def start(self, size):
        return AddingPool(self, size)


class AddingPool:
    """The pool of `Adding`, without `send` and `recv`: a thread steps it."""

    def __init__(self, source, size):
        self.source, self.obs, self.length = source, np.zeros((size, 2), np.float32), np.zeros(size, int)

    def reset(self, rows, seeds, timeout):
        self.obs[rows] = np.stack([seeds % 1000, np.zeros(len(rows))], axis=1)
        self.length[rows] = 0
        return self.obs[rows].copy()

    def step(self, action, timeout):
        before_step.get(self.source.name, len)(action)
        self.obs[:, 1] += 1 + action
        self.length += 1
        final, ended = self.obs.copy(), self.length == 5
        self.obs[ended, 1], self.length[ended] = 0, 0
        return Transition(
            self.obs.copy(), final[:, 1].copy(), np.zeros(len(ended), bool), ended.copy(), final
        )

    def close(self):
        pass


ADDING = HostEnvironment(Adding())


def keys(number, seed=0):
    return jax.random.split(jax.random.key(seed), number)


def sum_policy(observation, keys):
    """Acts by the observation and random numbers."""
    drawn = jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys)
    return (observation[:, 1].astype(jnp.int32) + drawn) % 3, observation[:, 0]


def run_rollouts(env, rings, act=sum_policy, rollouts=2, ready=True):
    """`rollouts` rollouts in sequence, `[T, B]` each; all numbers of rings have the same initial states."""

    def begin(keys):
        with host.in_parts(rings):
            return env.reset(keys)

    starts = [begin(part) for part in in_parts(keys(B), rings)]
    state, observation = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(B, *x[0].shape[1:]), *starts)
    step = env.step if rings == 1 else (env.send, env.recv, *([env.ready] if ready else []))

    @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
    def run(key, state, observation):
        return rollout(act, step, key, state, observation, T, rings)

    made = []
    for seed in range(rollouts):
        state, observation, steps = run(jax.random.key(seed), state, observation)
        made.append((observation, steps))
    return jax.tree.map(np.asarray, made)


# --- send and recv ---


def test_send_and_recv_equal_step():
    env, other_env = (
        ADDING,
        dataclasses.replace(ADDING, timeout=61.0),
    )  # unequal, so neither pool is closed
    state, other = env.reset(keys(2))[0], other_env.reset(keys(2))[0]
    for seed in range(7):
        inputs = keys(2, seed), jnp.array([2, 1])
        state, step = env.step(inputs[0], state, inputs[1])
        other, expected = other_env.recv(other_env.send(inputs[0], other, inputs[1]))
        jax.tree.map(np.testing.assert_array_equal, step, expected)
        ticket = other.inner
        np.testing.assert_array_equal(ticket.steps, seed + 1)
    assert step.reward.tolist() == [6.0, 4.0]  # the second step of the second episode


def test_gymnasium_send_and_recv():
    env = envs.make("gymnasium:tests.envs.faulty:Counting-v0", fault="none", workers=2)
    state, _ = env.reset(keys(3))
    sent = env.send(keys(3), state, jnp.ones(3, jnp.int32))
    _, step = env.recv(sent)
    np.testing.assert_array_equal(step.observation[:, 1], 1)


def test_second_recv_is_an_error():
    state, _ = ADDING.reset(keys(2))
    sent = ADDING.send(keys(2), state, jnp.zeros(2, jnp.int32))
    ADDING.recv(sent)
    with pytest.raises(HostError, match="recv of step 1, which was not sent or was already received: call"):
        jax.block_until_ready(ADDING.recv(sent))


def test_recv_without_send_is_an_error():
    state, _ = ADDING.reset(keys(2))
    with pytest.raises(HostError, match="environment 'adding': recv of step 0, which was not"):
        jax.block_until_ready(ADDING.recv(state))


def test_state_sent_twice_starts_new_episodes(caplog):
    """A pool cannot go back to an earlier state."""
    state, first = ADDING.reset(keys(2))
    ADDING.send(keys(2), state, jnp.zeros(2, jnp.int32))
    _, step = ADDING.recv(ADDING.send(keys(2, 1), state, jnp.zeros(2, jnp.int32)))
    assert step.truncated.all() and (step.reward == 0).all()
    np.testing.assert_array_equal(step.final_observation, first)
    assert "2 new episodes start here" in caplog.text


def test_recv_raises_the_error_of_a_step():
    def fails(action):
        raise HostError("the wheels fell off")

    state, _ = ADDING.reset(keys(2))
    before_step["adding"] = fails
    sent = ADDING.send(keys(2), state, jnp.zeros(2, jnp.int32))
    jax.block_until_ready(sent)
    with pytest.raises(HostError, match="the wheels fell off"):
        jax.block_until_ready(ADDING.recv(sent))
    assert host.running() == 0


# --- rings ---


@pytest.mark.parametrize(("rings", "ready"), [(2, False), (4, True)])
def test_rings_equal_one_batch_under_random_delays(rings, ready):
    expected = run_rollouts(ADDING, 1)
    drawn = random.SystemRandom()
    before_step["adding"] = lambda action: time.sleep(0.004 * drawn.random())
    found = run_rollouts(ADDING, rings, ready=ready)
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    (_, ((observation, action), seed, step)), _ = found
    assert action.shape == (T, B) and len(set(seed[0].tolist())) == B
    np.testing.assert_array_equal(step.reward[0], 1 + action[0])  # by hand: the sum starts at zero
    np.testing.assert_array_equal(step.final_observation[:-2, :, 1], observation[1:-1, :, 1])


class RecordingPool(AddingPool):
    """A pool with `send` and `recv`, which records the calls."""

    def send(self, action, timeout):
        self.action = action.copy()
        events.append(f"send {self.part}")

    def recv(self, timeout):
        events.append(f"recv {self.part}")
        return self.step(self.action, timeout)

    def reset(self, rows, seeds, timeout):
        self.part = len(events)
        events.append("reset")
        return super().reset(rows, seeds, timeout)


@dataclasses.dataclass(frozen=True)
class Recording(Adding):
    def start(self, size):
        return RecordingPool(self, size)


def recording_policy(observation, keys):
    """Acts, and records the call."""

    def record(observation):
        events.append("act")
        return np.zeros(len(observation), np.int32)

    return jax.pure_callback(record, jax.ShapeDtypeStruct(keys.shape, jnp.int32), observation), None


@pytest.mark.parametrize("ready", [False, True])
def test_other_parts_act_while_one_steps(ready):
    """Equally fast parts take turns, because the part with the fewest steps is served first."""
    events.clear()
    run_rollouts(HostEnvironment(Recording()), 2, recording_policy, rollouts=1, ready=ready)
    first = ["reset", "reset", "act", "send 0", "act", "send 1"]
    turn = ["recv 0", "act", "send 0", "recv 1", "act", "send 1"]
    assert events == [*first, *turn * (T - 1), "recv 0", "recv 1"]


def test_slow_part_does_not_delay_others(monkeypatch):
    """Part 1 is not ready until part 0 has taken its five steps."""
    monkeypatch.setattr(
        RecordingPool, "ready", lambda self: self.part == 0 or events.count("recv 0") == T - 1, raising=False
    )
    events.clear()
    found = run_rollouts(HostEnvironment(Recording()), 2, recording_policy, rollouts=1)
    one_part = [[f"recv {part}", "act", f"send {part}"] * (T - 1) for part in range(2)]
    assert events[6:] == [*one_part[0], *one_part[1], "recv 0", "recv 1"]
    events.clear()
    expected = run_rollouts(HostEnvironment(Recording()), 1, recording_policy, rollouts=1)
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_pools_of_all_rings_stay_open():
    many = 2 * running_pools._MAX_POOLS
    algorithm = algos.A2C(env=ADDING, num_envs=many, num_steps=2, hidden=(4,), rings=many)
    jax.block_until_ready(algorithm.init(jax.random.key(0)))
    assert host.running() == many


@pytest.mark.parametrize(
    ("name", "policy", "count"),
    [
        ("a2c", policies.GPUOnly(), 2),
        pytest.param("recurrent_ppo", policies.GPUOnly(), 4, marks=pytest.mark.whole),
        pytest.param("recurrent_ppo", policies.Workers(environments=2, actors=2), 5, marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_rings_stay_split_over_devices(name, policy, count, devices):
    """No gather is needed, and the results equal those without rings on one device."""
    plainly = {"normalize_observation": False, "normalize_reward": False}
    fields = plainly if name == "a2c" else {"num_minibatches": 1, "burn_in": 0}
    algorithm = dataclasses.replace(SMALL[name](), **fields)
    engine = fdg.compile(dataclasses.replace(algorithm, rings=2), policy, devices[:count])
    engine.compile(1)
    assert not engine.unexplained()
    state = jax.jit(algorithm.init)(jax.random.key(0))
    assert_same(plain(algorithm, copied(state), 2), engine.run(copied(state), 2))


def test_invalid_rings_are_refused():
    with pytest.raises(FdgError, match="rings=3 does not divide num_envs=4: use 2 or 4"):
        algos.PPO(env=envs.make("CartPole-v1"), num_envs=4, rings=3)
    with pytest.raises(FdgError, match="rings=2: each worker steps its environments together; use A2C"):
        algos.A3C(env=envs.make("CartPole-v1"), rings=2)


def test_graph_has_send_and_recv_fragments():
    algorithm = algos.PPO(env=ADDING, num_envs=4, num_steps=2, num_minibatches=2, hidden=(4,), rings=2)
    stepping = {each.name for each in fdg.trace(algorithm).fragments if each.role == "environment"}
    assert stepping >= {"send", "recv"} and "step" not in stepping
