"""Steps in two halves, and rollouts in rings: the numbers of whole steps of all instances; what overlaps."""

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
from envs.wrappers import FrameStack
from fdg.errors import FdgError, HostError
from tests.conformance.comparison import assert_same, copied, plain
from tests.conformance.test_algorithms import SMALL
from tests.envs.conformance import COMPILE_FAST

B, T = 4, 6
SEEN, ACTIONS = Box(-1e9, 1e9, (2,)), Discrete(3)
events = []  # of pools that note what is done with them
before_step = {}  # by name of a source: what its pools call first in each step, with their number of rows


@pytest.fixture(autouse=True)
def _end_pools():
    yield
    host.close()
    before_step.clear()


@dataclasses.dataclass(frozen=True)
class Adding:
    """Observes its seed and the sum of the episode's actions, which is the reward; it has five steps."""

    name: str = "adding"
    observation_space: Any = SEEN
    action_space: Any = ACTIONS
    max_episode_steps: int | None = 5

    def start(self, size):
        return Sums(self, size)


class Sums:
    """Its pool, which has no halves of its own: a thread steps it."""

    def __init__(self, source, size):
        self.source, self.seen, self.length = source, np.zeros((size, 2), np.float32), np.zeros(size, int)

    def reset(self, rows, seeds, timeout):
        self.seen[rows] = np.stack([seeds % 1000, np.zeros(len(rows))], axis=1)
        self.length[rows] = 0
        return self.seen[rows].copy()

    def step(self, action, timeout):
        before_step.get(self.source.name, len)(action)
        self.seen[:, 1] += 1 + action
        self.length += 1
        final, ended = self.seen.copy(), self.length == 5
        self.seen[ended, 1], self.length[ended] = 0, 0
        return Transition(
            self.seen.copy(), final[:, 1].copy(), np.zeros(len(ended), bool), ended.copy(), final
        )

    def close(self):
        pass


ADDING = HostEnvironment(Adding())


def keys(number, seed=0):
    return jax.random.split(jax.random.key(seed), number)


def by_sum(observation, keys):
    """Acts by what it saw, and by its random numbers."""
    drawn = jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys)
    return (observation[:, 1].astype(jnp.int32) + drawn) % 3, observation[:, 0]


def rolled(env, rings, act=by_sum, rollouts=2, ready=True):
    """`rollouts` one after the other, `[T, B]` each, of environments that start as one batch does."""

    def begin(keys):
        with host.in_parts(rings):
            return env.reset(keys)

    starts = [begin(part) for part in in_parts(keys(B), rings)]
    state, observation = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(B, *x[0].shape[1:]), *starts)
    step = env.step if rings == 1 else (env.send, env.recv, *([env.ready] if ready else []))

    @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
    def one(key, state, observation):
        return rollout(act, step, key, state, observation, T, rings)

    made = []
    for seed in range(rollouts):
        state, observation, steps = one(jax.random.key(seed), state, observation)
        made.append((observation, steps))
    return jax.tree.map(np.asarray, made)


# --- the two halves of a step ---


def test_a_step_in_two_halves_is_a_step():
    whole, halves = (
        ADDING,
        dataclasses.replace(ADDING, timeout=61.0),
    )  # unlike each other, so neither is closed
    one, other = whole.reset(keys(2))[0], halves.reset(keys(2))[0]
    for seed in range(7):
        given = keys(2, seed), jnp.array([2, 1])
        one, step = whole.step(given[0], one, given[1])
        other, same = halves.recv(halves.send(given[0], other, given[1]))
        jax.tree.map(np.testing.assert_array_equal, step, same)
        ticket = other.inner
        np.testing.assert_array_equal(ticket.steps, seed + 1)
    assert step.reward.tolist() == [6.0, 4.0]  # the second step of the second episode


def test_gymnasium_begins_a_step_in_its_workers():
    env = envs.make("gymnasium:tests.envs.faulty:Counting-v0", fault="none", workers=2)
    state, _ = env.reset(keys(3))
    sent = env.send(keys(3), state, jnp.ones(3, jnp.int32))
    _, step = env.recv(sent)
    np.testing.assert_array_equal(step.observation[:, 1], 1)


def test_receiving_twice_is_an_error():
    state, _ = ADDING.reset(keys(2))
    sent = ADDING.send(keys(2), state, jnp.zeros(2, jnp.int32))
    ADDING.recv(sent)
    with pytest.raises(HostError, match="recv of step 1, which was not sent or was already received: call"):
        jax.block_until_ready(ADDING.recv(sent))


def test_receiving_what_was_not_sent_is_an_error():
    state, _ = ADDING.reset(keys(2))
    with pytest.raises(HostError, match="environment 'adding': recv of step 0, which was not"):
        jax.block_until_ready(ADDING.recv(state))


def test_a_state_that_was_sent_before_starts_new_episodes(caplog):
    """As one that was stepped before: a pool cannot go back."""
    state, first = ADDING.reset(keys(2))
    ADDING.send(keys(2), state, jnp.zeros(2, jnp.int32))
    _, step = ADDING.recv(ADDING.send(keys(2, 1), state, jnp.zeros(2, jnp.int32)))
    assert step.truncated.all() and (step.reward == 0).all()
    np.testing.assert_array_equal(step.final_observation, first)
    assert "2 new episodes start here" in caplog.text


def test_what_a_step_raises_comes_out_of_recv():
    def fails(action):
        raise HostError("the wheels fell off")

    state, _ = ADDING.reset(keys(2))
    before_step["adding"] = fails
    sent = ADDING.send(keys(2), state, jnp.zeros(2, jnp.int32))
    jax.block_until_ready(sent)
    with pytest.raises(HostError, match="the wheels fell off"):
        jax.block_until_ready(ADDING.recv(sent))
    assert host.running() == 0


def test_wrappers_that_only_show_have_the_halves_of_what_they_are_around():
    env = FrameStack(ADDING, 2)

    class Doubled(envs.Wrapper):
        def step(self, keys, state, action):
            state, step = super().step(keys, state, action)
            return state, step._replace(reward=2 * step.reward)

    assert hasattr(env, "send") and not hasattr(Doubled(env), "send")
    assert not hasattr(FrameStack(envs.make("CartPole-v1"), 2), "send")
    jax.tree.map(np.testing.assert_array_equal, rolled(env, 1), rolled(env, 2))


# --- rings ---


@pytest.mark.parametrize(("rings", "ready"), [(2, False), (4, True)])
def test_rings_give_the_numbers_of_the_whole_batch_whatever_sleeps(rings, ready):
    expected = rolled(ADDING, 1)
    drawn = random.SystemRandom()
    before_step["adding"] = lambda action: time.sleep(0.004 * drawn.random())
    found = rolled(ADDING, rings, ready=ready)
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    (_, ((observation, action), seed, step)), _ = found
    assert action.shape == (T, B) and len(set(seed[0].tolist())) == B
    np.testing.assert_array_equal(step.reward[0], 1 + action[0])  # by hand: nothing was added before
    np.testing.assert_array_equal(step.final_observation[:-2, :, 1], observation[1:-1, :, 1])


class Noted(Sums):
    """A pool with halves of its own, which notes them."""

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
class Noting(Adding):
    def start(self, size):
        return Noted(self, size)


def noting(observation, keys):
    """Acts, and notes it."""

    def note(observation):
        events.append("act")
        return np.zeros(len(observation), np.int32)

    return jax.pure_callback(note, jax.ShapeDtypeStruct(keys.shape, jnp.int32), observation), None


@pytest.mark.parametrize("ready", [False, True])
def test_while_one_part_steps_the_others_act(ready):
    """In turns; also where the parts are equally fast, for the one with the fewest steps is served first."""
    events.clear()
    rolled(HostEnvironment(Noting()), 2, noting, rollouts=1, ready=ready)
    first = ["reset", "reset", "act", "send 0", "act", "send 1"]
    turn = ["recv 0", "act", "send 0", "recv 1", "act", "send 1"]
    assert events == [*first, *turn * (T - 1), "recv 0", "recv 1"]


def test_a_slow_part_holds_up_no_other(monkeypatch):
    """Part 1 is never ready while another is: part 0 takes its five steps first, then part 1."""
    monkeypatch.setattr(
        Noted, "ready", lambda self: self.part == 0 or events.count("recv 0") == T - 1, raising=False
    )
    events.clear()
    found = rolled(HostEnvironment(Noting()), 2, noting, rollouts=1)
    one_part = [[f"recv {part}", "act", f"send {part}"] * (T - 1) for part in range(2)]
    assert events[6:] == [*one_part[0], *one_part[1], "recv 0", "recv 1"]
    events.clear()
    expected = rolled(HostEnvironment(Noting()), 1, noting, rollouts=1)
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_all_pools_of_a_ring_are_kept():
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
def test_parts_of_a_batch_stay_split_over_devices(name, policy, count, devices):
    """Nothing is gathered to make the parts, and the numbers are those of one part on one device."""
    fields = {} if name == "a2c" else {"num_minibatches": 1, "burn_in": 0}
    whole = dataclasses.replace(SMALL[name](), **fields)
    engine = fdg.compile(dataclasses.replace(whole, rings=2), policy, devices[:count])
    engine.compile(1)
    assert not engine.unexplained()
    state = jax.jit(whole.init)(jax.random.key(0))
    assert_same(plain(whole, copied(state), 2), engine.run(copied(state), 2))


def test_rings_that_do_not_divide_the_environments():
    with pytest.raises(FdgError, match="rings=3 does not divide num_envs=4: use a divisor"):
        algos.PPO(env=envs.make("CartPole-v1"), num_envs=4, rings=3)
    with pytest.raises(FdgError, match="rings=2: each worker steps its environments together; use A2C"):
        algos.A3C(env=envs.make("CartPole-v1"), rings=2)


def test_the_plan_has_both_halves_where_the_environments_are():
    algorithm = algos.PPO(env=ADDING, num_envs=4, num_steps=2, num_minibatches=2, hidden=(4,), rings=2)
    stepping = {each.name for each in fdg.trace(algorithm).fragments if each.role == "environment"}
    assert stepping >= {"send", "recv"} and "step" not in stepping
