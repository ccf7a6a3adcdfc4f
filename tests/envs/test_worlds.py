"""Craftax, Playground, Octax and Jumanji: names, traced shapes, equality with Jumanji, and optimistic resets.

`python -m bench.every_environment` compiles and trains all environments, in minutes.
"""

import dataclasses
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import adapters, from_craftax, from_jumanji, from_octax, from_playground
from envs.contract import random_actions
from envs.environment import vectorize
from envs.literals import Literal, as_arrays, replace_arrays, replace_pytree_arrays
from envs.optimistic import OptimisticallyReset
from envs.quiet import quietly, relaxed_checks
from fdg.errors import FdgError
from tests.envs.conformance import assert_conforms


def traced(name, count=2, **overrides):
    """Shapes of the first step, without compiling."""

    def first_step(key):
        env = envs.make(name, **overrides)
        keys = jax.random.split(key, count)
        state, observation = env.reset(keys)
        return env.step(keys, state, random_actions(env, keys, observation))

    return jax.eval_shape(first_step, jax.eval_shape(lambda: jax.random.key(0)))


_BRIX = from_octax.OctaxEnvironment("brix")

# --- all packages ---


@pytest.mark.parametrize(
    ("name", "overrides", "shape", "actions", "limit"),
    [
        (
            "Craftax-Classic-Symbolic-v1",
            {"max_timesteps": 50, "reset_ratio": 2},
            (1345,),
            envs.Discrete(17),
            50,
        ),
        ("playground:CartpoleBalance", {"action_repeat": 4}, (5,), envs.Box(-1.0, 1.0, (1,)), 250),
        ("jumanji:Snake-v1", {"num_rows": 6, "num_cols": 6}, (181,), envs.Discrete(4), None),
        # A one-hot map of 10 x 10 cells with 32 values, and a one-hot time of 51.
        ("jumanji:Connector-v3", {}, (10 * 10 * 32 + 51,), envs.MultiDiscrete((5,) * 10), None),
        ("jumanji:MultiCVRP-v0", {}, None, envs.MultiDiscrete((21, 21)), None),
        # Its initial score is a Python number.
        ("jumanji:PacMan-v1", {}, None, envs.Discrete(5), None),
    ],
)
def test_shapes_match_spaces(name, overrides, shape, actions, limit):
    if name.startswith("playground:"):
        pytest.importorskip("mujoco_playground")
    env = envs.make(name, **overrides)
    assert env.action_space == actions and env.max_episode_steps == limit
    assert shape is None or env.observation_space.shape == shape
    before = {id(array) for array in jax.live_arrays()}
    _, time_step = traced(name, **overrides)
    assert time_step.reward.shape == time_step.terminated.shape == (2,)
    left = [array for array in jax.live_arrays() if array.ndim and id(array) not in before]
    assert not left, left


@pytest.mark.parametrize(
    ("module", "load", "extra"),
    [
        (
            "craftax.craftax.envs",
            lambda: from_craftax._craftax_environment.__wrapped__("Craftax-Symbolic-v1"),
            "craftax",
        ),
        ("mujoco_playground._src", from_playground._suite.__wrapped__, "playground"),
        ("octax.environments", lambda: from_octax._octax_environment.__wrapped__(_BRIX), "octax"),
        ("jumanji", from_jumanji._jumanji.__wrapped__, "jumanji"),
    ],
)  # fmt: skip
def test_missing_package(module, load, extra, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(module.partition(".")[0]):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FdgError, match=rf"is not installed: pip install 'fdg\[{extra}\]'"):
        load()


def test_missing_package_is_not_a_refused_parameter():
    with pytest.raises(FdgError, match=r"^install it$"), adapters.converting_errors("here", "Playground", ()):
        raise FdgError("install it")


def test_names_match_packages():
    with quietly():
        import jumanji
    assert set(from_jumanji.NAMES) == set(jumanji.registered_environments())
    pytest.importorskip("mujoco_playground")
    with quietly():
        from mujoco_playground._src import dm_control_suite
    assert set(from_playground.TASKS) == set(dm_control_suite.ALL_ENVS)


# --- Jumanji ---


def test_matches_jumanji():
    """Tetris: one action per rotation and column; the mask is Jumanji's, flattened."""
    name = "Tetris-v0"
    env = envs.make(f"jumanji:{name}", num_rows=6, num_cols=5, time_limit=9)
    rollout = assert_conforms(env)
    assert env.action_space == envs.Discrete(4 * 5)
    observation, mask = envs.features_and_mask(rollout.first_observation)
    import jumanji

    theirs = jumanji.make(name, num_rows=6, num_cols=5, time_limit=9)
    with relaxed_checks():
        keys = jax.random.split(jax.random.key(1), 3)
        state, first = jax.jit(theirs.reset)(keys[0])
        turn, column = divmod(int(rollout.action[0, 0]), 5)
        _, second = jax.jit(theirs.step)(state, jnp.array([turn, column]))
    np.testing.assert_array_equal(mask[0], np.asarray(first.observation.action_mask).reshape(-1))
    np.testing.assert_array_equal(observation[0, :30], np.asarray(first.observation.grid).reshape(-1))
    assert rollout.step.reward[0, 0] == np.asarray(second.reward)
    assert rollout.step.terminated.any(), "the time limit terminates in Jumanji"


# --- Craftax: textures and pixels ---


def test_textures_are_made_once_per_size():
    made = []
    textures = from_craftax._Textures(lambda size: made.append(size) or {"grass": jnp.ones((size, size))})
    assert isinstance(textures[2]["grass"], Literal) and textures[2] is textures[2]
    assert textures[3]["grass"].shape == (3, 3) and made == [2, 3]


@pytest.mark.whole  # four seconds to read the package's files
def test_craftax_pixels():
    assert traced("Craftax-Pixels-v1")[1].observation.shape == (2, 130, 110, 3)
    state, _ = traced("Craftax-Classic-Pixels-v1")

    def zeros_of(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key(0) if is_key else np.zeros(x.shape[1:], x.dtype)

    state_of_zeros = jax.tree.map(zeros_of, state.inner)
    (picture,) = from_craftax.CraftaxEnvironment("Craftax-Classic-Pixels-v1").frames([state_of_zeros])
    assert picture.shape == (144, 144, 3) and picture.dtype == np.uint8


# --- optimistic resets ---


@dataclasses.dataclass(frozen=True)
class Countdown:
    """Terminates after a random number of steps, 1 to 9; the observation identifies the episode."""

    name: typing.ClassVar[str] = "countdown"
    observation_space: typing.ClassVar = envs.Box(0.0, 1.0, (2,))
    action_space: typing.ClassVar = envs.Discrete(2)
    max_episode_steps: typing.ClassVar[int] = 7

    def reset(self, key):
        state = jax.random.randint(key, (), 1, 10), jax.random.uniform(key)
        return state, self._observe(state)

    def step(self, key, state, action):
        state = state[0] - 1, state[1]
        return state, self._observe(state), jnp.float32(1), state[0] <= 0, jnp.bool_(False)

    def _observe(self, state):
        return jnp.stack([state[0] / 10, state[1]])


def rollout(env, count, steps=40):
    """Time steps `[T, B]` with action 0."""

    @jax.jit
    def run(key):
        keys = jax.random.split(key, (steps + 1, count))
        state, _ = env.reset(keys[0])

        def body(state, keys):
            return env.step(keys, state, jnp.zeros(count, jnp.int32))

        return jax.lax.scan(body, state, keys[1:])[1]

    return jax.tree.map(np.asarray, run(jax.random.key(3)))


def test_lone_reset_equals_vectorize():
    plain, shared = (
        rollout(vectorize(Countdown()), 8),
        rollout(OptimisticallyReset(Countdown(), reset_ratio=4), 8),
    )
    done = shared.terminated | shared.truncated
    first = done.reshape(-1, 2, 4).cumsum(-1) == 1  # the first of the neighbours that end at this step
    first = first.reshape(done.shape) & done
    assert done.any() and not first[done].all(), "some end together, and share a start"
    # Both agree until two neighbours end together: compare each environment up to there.
    for b in range(8):
        group = slice(b // 4 * 4, b // 4 * 4 + 4)
        together = np.flatnonzero(done[:, group].sum(-1) > 1)
        until = together[0] if len(together) else len(done)
        for ours, theirs in zip(jax.tree.leaves(shared), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(ours[:until, b], theirs[:until, b])


def test_neighbours_that_end_together_share_a_start():
    step = rollout(OptimisticallyReset(Countdown(), reset_ratio=4), 8)
    done = (step.terminated | step.truncated).reshape(-1, 2, 4)
    episodes = step.observation[..., 1].reshape(-1, 2, 4)
    shared = 0
    for t, group in np.argwhere(done.sum(-1) > 1):
        assert len(set(episodes[t, group, done[t, group]])) == 1
        shared += 1
    assert shared and step.episode_length.max() == 7
    assert (step.final_observation[step.terminated][:, 0] <= 0).all(), "the last observation before the reset"


def test_reset_ratio_that_does_not_divide_the_batch():
    one, other = (
        rollout(OptimisticallyReset(Countdown(), reset_ratio=16), 3),
        rollout(vectorize(Countdown()), 3),
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


# --- literals ---


def test_literals_behave_as_arrays():
    class Game:
        __module__ = "game"

        def __init__(self):
            self.table = jnp.arange(6).reshape(2, 3)
            self.parts = {"a": [jnp.ones(2)], "b": (jnp.zeros(1), 3)}
            self.myself = self

    game = Game()
    replace_arrays(game, "game")
    assert isinstance(game.table, Literal) and isinstance(game.parts["a"][0], Literal)
    assert isinstance(game.parts["b"][0], Literal) and game.parts["b"][1] == 3

    @jax.jit
    def use(i):
        return (
            game.table[i],
            game.table.take(i, axis=1),
            game.table.at[i].set(9),
            game.table[0].dot(i + game.table[1]),
        )

    row, column, changed, product = use(1)
    assert (
        row.tolist() == [3, 4, 5] and column.tolist() == [1, 4] and changed.tolist() == [[0, 1, 2], [9, 9, 9]]
    )
    assert product == 0 * 4 + 1 * 5 + 2 * 6


def test_as_arrays_restores_jax_arrays():
    class Model:
        pass

    model = Model()
    model.mass, model.name = {"x": jnp.ones(2)}, "m"
    replace_pytree_arrays(model)
    literal = model.mass["x"]
    assert isinstance(literal, Literal)
    with pytest.raises(ZeroDivisionError), as_arrays(model):
        assert isinstance(model.mass["x"], jax.Array)
        raise ZeroDivisionError
    assert model.mass["x"] is literal
