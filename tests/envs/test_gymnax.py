"""Every environment of gymnax: the contract, and equality with gymnax and Gymnasium."""

import urllib.error

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import from_gymnax
from fdg.errors import FdgError
from tests.envs.conformance import assert_conforms
from tests.lazy_module import LazyModule

gymnax = LazyModule("gymnax")  # imports seaborn and pandas
MNIST = "gymnax.utils.load_mnist.load_mnist"

LIMIT = 7  # truncates three times within a rollout


@pytest.fixture(scope="module")
def mnist():
    """Four images in the form that gymnax reads: unsigned pixels as int8."""
    images = np.arange(4 * 28 * 28).reshape(4, 28, 28).astype(np.uint8).view(np.int8)
    labels = np.arange(4, dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MNIST, lambda: ((images, labels), (images, labels)))
        clear_caches()
        yield
    clear_caches()


def clear_caches():
    from_gymnax._construct.cache_clear()
    from_gymnax._facts.cache_clear()


def test_names_match_gymnax():
    assert list(from_gymnax.NAMES) == gymnax.registered_envs


class GymnaxStep:
    """gymnax's own batched step with auto-reset."""

    def __init__(self, name, **params):
        self.env, default = gymnax.make(name)
        self.params = default.replace(**params)

    def reset(self, keys):
        observation, state = jax.vmap(self.env.reset, (0, None))(keys, self.params)
        return state, observation

    def step(self, keys, state, action):
        with jax.numpy_rank_promotion("allow"):
            step = jax.vmap(self.env.step, (0, 0, 0, None))
            observation, state, reward, terminated, truncated, info = step(keys, state, action, self.params)
        final_observation = info["final_observation"]
        return jax.tree.map(strong, state), (observation, final_observation, reward, terminated, truncated)


def strong(x):
    return jax.lax.convert_element_type(x, x.dtype)


@pytest.mark.parametrize("name", from_gymnax.NAMES)
def test_matches_gymnax(name, mnist):
    env = envs.make(name, max_steps_in_episode=LIMIT)
    limit = LIMIT if name != "BernoulliBandit-misc" else float(LIMIT)  # gymnax's type
    rollout = assert_conforms(env, beside=GymnaxStep(name, max_steps_in_episode=limit))
    step = rollout.step
    assert env.observation_space.dtype == "float32"
    assert (step.terminated | step.truncated).any(axis=0).all(), "no episode ended"
    assert (step.episode_length[step.truncated] == LIMIT).all()

    observation, final_observation, reward, terminated, truncated = rollout.other_results
    if name == "FrozenLake-misc":
        observation, final_observation = np.eye(16)[observation], np.eye(16)[final_observation]
    if name == "MNISTBandit-bsuite":  # gymnax's pixels above 127 are negative, ours are not
        observation = np.where(observation < 0, observation + 256 / 255, observation)
        assert step.observation.max() > 0.9
    np.testing.assert_allclose(step.reward, reward, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(step.terminated, terminated)
    np.testing.assert_array_equal(step.truncated, truncated & ~terminated)
    np.testing.assert_allclose(step.observation, observation, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(step.final_observation, final_observation, rtol=1e-5, atol=1e-5)


# Gymnasium's state by gymnax's field names, and the range of the random states.
CLASSIC_CONTROL = {
    "CartPole-v1": {"x": 2.39, "x_dot": 3.0, "theta": 0.209, "theta_dot": 3.0},
    "Pendulum-v1": {"theta": 10.0, "theta_dot": 8.0},
    "Acrobot-v1": {"joint_angle1": 3.1, "joint_angle2": 3.1, "velocity_1": 10.0, "velocity_2": 20.0},
    "MountainCar-v0": {"position": 0.59, "velocity": 0.07},
    "MountainCarContinuous-v0": {"position": 0.449, "velocity": 0.07},
}


@pytest.mark.parametrize("name", CLASSIC_CONTROL)
def test_step_matches_gymnasium(name):
    ranges = CLASSIC_CONTROL[name]
    reference = gymnasium.make(name, disable_env_checker=True)
    reference.reset(seed=0)
    env = envs.make(name)
    count, random = 128, np.random.default_rng(0)
    states = {field: random.uniform(-r, r, count).astype(np.float32) for field, r in ranges.items()}
    reference.action_space.seed(0)
    actions = np.stack([reference.action_space.sample() for _ in range(count)])
    # Also beyond the bounds: Pendulum clips the torque, and MountainCarContinuous the force but not its cost.
    actions = actions * 2 if actions.dtype == np.float32 else actions

    keys = jax.random.split(jax.random.key(0), count)
    state, _ = env.reset(keys)
    state = state._replace(
        inner=state.inner.replace(**{field: jnp.asarray(x) for field, x in states.items()})
    )
    _, step = jax.jit(env.step)(keys, state, jnp.asarray(actions))

    ends = 0
    for i in range(count):
        reference.unwrapped.state = np.asarray([x[i] for x in states.values()], float)
        if hasattr(reference.unwrapped, "steps_beyond_terminated"):
            reference.unwrapped.steps_beyond_terminated = None
        observation, reward, terminated, _, _ = reference.unwrapped.step(actions[i])
        np.testing.assert_allclose(step.final_observation[i], observation, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(step.reward[i], reward, rtol=1e-5, atol=1e-5)
        assert bool(step.terminated[i]) == bool(terminated)
        ends += bool(terminated)
    assert ends > 0 or name == "Pendulum-v1", "no terminal state was tested"
    assert env.max_episode_steps == reference.spec.max_episode_steps
    assert env.action_space.shape == reference.action_space.shape
    np.testing.assert_allclose(env.observation_space.high_array, reference.observation_space.high, rtol=1e-6)


def test_overrides():
    assert envs.make("Pendulum-v1", max_torque=1.0).action_space == envs.Box(-1.0, 1.0, (1,))
    assert envs.make("DeepSea-bsuite", size=5).observation_space.shape == (5, 5)
    assert envs.make("DeepSea-bsuite", size=5).max_episode_steps == 5
    large = envs.make("FrozenLake-misc", map_name="8x8", is_slippery=False)
    assert large.observation_space.shape == (64,) and large.max_episode_steps == 200

    env = envs.make("DiscountingChain-bsuite", reward_timestep=[1, 2, 3, 4, 5])
    keys = jax.random.split(jax.random.key(0), 1)
    state, _ = env.reset(keys)
    rewards = []
    for _ in range(3):
        state, step = env.step(keys, state, jnp.ones(1, jnp.int32))
        rewards.append(step.reward[0].item())
    assert rewards == [0, 1, 0]


def test_failed_download_is_reported(monkeypatch):
    def offline():
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(MNIST, offline)
    clear_caches()
    env = envs.make("MNISTBandit-bsuite")
    with pytest.raises(
        FdgError, match=r"'MNISTBandit-bsuite': its data set could not be downloaded .*no network"
    ):
        env.reset(jax.random.split(jax.random.key(0), 1))


@pytest.mark.parametrize("size", [100_000, 10**9])
def test_arrays_too_large_for_memory_are_refused(size):
    with pytest.raises(FdgError, match=f"DeepSea-bsuite': size={size} makes arrays of .* GB"):
        envs.make("DeepSea-bsuite", size=size)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # PointRobot
@pytest.mark.parametrize(
    "name", ["Pendulum-v1", "UmbrellaChain-bsuite", "PointRobot-misc", "BernoulliBandit-misc", "Pong-misc"]
)
def test_traces_with_64_bits(name):
    with jax.enable_x64(True):
        assert "is right" in envs.check(envs.make(name), steps=0)
