"""QMIX: the mixer by hand, its monotonicity, and a game that VDN cannot represent.

Rashid et al. 2018 (arXiv 1803.11485): equation 5 (monotonicity), figure 2 (the mixer), section 5 (the
two-step game). Targets and loss: `test_vdn.py`.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos import qmix
from algos.networks import of_module
from algos.rings import Recollection
from tests.algos.probes import trained


def mixture(values, state, weights, key=None):
    """Output of a mixer with one unit and linear hypernetworks; `weights` by layer."""
    mixer = of_module(qmix.MonotonicMixer(1, ()))
    parameters = jax.jit(mixer.init)(jax.random.key(0), values, state)
    for name, (kernel, bias) in weights.items():
        parameters[name] = jax.tree.map(jnp.ones_like, parameters[name])
        parameters[name] = {"kernel": kernel * parameters[name]["kernel"], "bias": jnp.array(bias)}
    return mixer.apply(parameters, values, state)


def test_mixer_by_hand():
    """State 2: weights |2 - 3| and |-1 * 2 - 3|, biases 2 * 2 and relu(2 - 1) * 1/2.

    Values 1 and -2: 1 * 1 - 2 * 1 + 4 = 3 (ELU: 3); 3 * 5 + 1/2. Values -9 and 1: -8 + 4 = -4.
    """
    weights = {
        "weight_1": (1.0, [-3.0, -3.0]), "bias_1": (2.0, [0.0]), "weight_2": (-1.0, [-3.0]),
        "bias_2_0": (1.0, [-1.0]), "bias_2": (0.5, [0.0]),
    }  # fmt: skip
    found = mixture(jnp.array([[1.0, -2.0], [-9.0, 1.0]]), jnp.full((2, 1), 2.0), weights)
    np.testing.assert_allclose(found, [15.5, 5 * (np.exp(-4.0) - 1) + 0.5], rtol=1e-6)


@pytest.mark.parametrize("broken", [False, True])
def test_mixer_is_monotonic(broken, monkeypatch):
    """Equation 5: derivatives by agents' values are not negative. Without absolute values, some are."""
    if broken:
        monkeypatch.setattr(jnp, "abs", lambda x: x)
    mixer = of_module(qmix.MonotonicMixer(4, (8,)))
    keys = jax.random.split(jax.random.key(0), 3)
    values, state = 9 * jax.random.normal(keys[0], (64, 3)), 9 * jax.random.normal(keys[1], (64, 5))
    parameters = mixer.init(keys[2], values, state)
    slope = jax.jit(jax.grad(lambda values: jnp.sum(mixer.apply(parameters, values, state))))(values)
    assert slope.shape == (64, 3) and bool(jnp.any(slope < 0)) == broken


@dataclasses.dataclass(frozen=True)
class TwoStep:
    """The first agent chooses one of two games for both: reward 7, or a reward table up to 8."""

    name: str = "two-steps"
    num_agents: typing.ClassVar = 2
    observation_space: typing.ClassVar = envs.Box(0.0, 1.0, (3,))
    action_space: typing.ClassVar = envs.Discrete(2)
    max_episode_steps: typing.ClassVar = None

    def reset(self, key):
        return self._observe(jnp.int32(0))

    def step(self, key, state, action):
        table = jnp.array([[0.0, 1.0], [1.0, 8.0]])[action[0], action[1]]
        reward = jnp.stack([jnp.float32(0), jnp.float32(7), table])[state]
        state, observation = self._observe(jnp.where(state > 0, state, 1 + action[0]))
        return state, observation, jnp.full(2, reward), reward > 0, jnp.bool_(False)

    def _observe(self, state):
        return state, jnp.broadcast_to(jax.nn.one_hot(state, 3)[None], (2, 3))


@pytest.mark.parametrize(("kind", "expected"), [(algos.VDN, 7.0), (algos.QMIX, 8.0)])
def test_two_step_game(kind, expected):
    """A sum cannot represent the reward table, so VDN gets 7; QMIX gets 8 (table 2 of the paper)."""
    algorithm = kind(
        env=envs.vectorize(TwoStep()), num_envs=8, num_steps=2, batch_size=32, num_updates=2, hidden=(16,),
        buffer_size=2_000, learning_starts=64, epsilon_end=1.0, anneal_learning_rate=False, target_period=50,
    )  # fmt: skip
    state = trained(algorithm, 600)
    assert float(algorithm.evaluate(state, jax.random.key(1), 1)["return"]) == expected
    # Joint values of the best actions in both games, with a new episode that starts there.
    mixed = []
    for game in (1, 2):
        _, observation = algorithm.env.single._observe(jnp.int32(game))
        start = Recollection((), jnp.ones(1, bool))
        values, _ = algorithm._one_step(state.learned.parameters.agents, observation[None], start)
        best = jnp.max(values, axis=-1)
        mixed.append(float(algorithm._mix(state.learned.parameters.mixer, best, observation[None])[0]))
    assert mixed[0] == pytest.approx(7.0, abs=0.4)
    assert mixed[1] == pytest.approx(8.0, abs=0.1) if expected == 8.0 else mixed[1] < 7.0
