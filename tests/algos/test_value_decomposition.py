"""VDN and QMIX: mixtures, targets and losses by hand; the game that tells one from the other; refusals.

VDN: Sunehag et al. 2018 (arXiv 1706.05296), section 3. QMIX: Rashid et al. 2018 (arXiv 1803.11485), equation
5 (what rises with each agent's value), equation 6 (the loss) and figure 2 (the mixture); the game of two
steps is its section 5. Lambda-returns: `test_returns.py`.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos import agent_values
from algos.replay import Step
from algos.rollout import Recollection
from algos.sequences import SequenceReplay, Sequences
from algos.value_decomposition import Parameters
from fdg.errors import FdgError
from tests.algos.probes import trained

# A network of three observations, 0, 1 and 2, and two actions that is a table: its parameters are its values.
TABLE = algos.Network(
    init=lambda key, observation: jnp.zeros((3, 2)),
    apply=lambda table, observation: table[observation[:, 0].astype(jnp.int32)],
)
ONLINE = Parameters(jnp.array([[1.0, 2.0], [4.0, 3.0], [0.0, 5.0]]), ())
TARGET = Parameters(jnp.array([[6.0, 2.0], [1.0, 8.0], [3.0, 4.0]]), ())


def vdn(**fields):
    fields = {"num_envs": 1, "num_steps": 3, "batch_size": 1, "discount": 0.5, "network": TABLE, **fields}
    return algos.VDN(env=envs.make("probe:agents"), **fields)


def sequence():
    """Three steps of two agents, of which the second is truncated, and the third leads to 2, 2."""

    def seen(*pairs):
        return jnp.array(pairs, jnp.float32)[None, :, :, None]

    steps = Step(
        observation=seen((0, 1), (1, 2), (2, 0)),
        action=jnp.array([[[0, 1], [1, 1], [0, 0]]]),
        reward=jnp.array([[[1.0, 3.0], [0.0, 2.0], [4.0, 0.0]]]),  # of the team: 2, 1 and 2
        terminated=jnp.zeros((1, 3), bool),
        truncated=jnp.array([[False, True, False]]),
        final_observation=seen((1, 2), (0, 0), (2, 2)),
    )
    return Sequences((), jnp.array([[True, False, True]]), steps)


def target(algorithm, parameters=ONLINE, older=TARGET):
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), sequence())
    return algorithm._target(parameters, older, (), sequences, ())[:, 0]


def test_targets_by_hand():
    """The best of the target network: 8 + 4 after the first step, 6 + 6, 4 + 4.

    Those that learn prefer 0, 1 after the first step, 1, 1 after the second, and 1, 1: 1 + 4, 2 + 2, 4 + 4.
    """
    np.testing.assert_allclose(target(vdn(double=False)), [2 + 6, 1 + 6, 2 + 4])
    np.testing.assert_allclose(target(vdn()), [2 + 2.5, 1 + 2, 2 + 4])
    # Lambda 1/2: the first step is followed by half of its own 5 and half of the 3 of the second step.
    np.testing.assert_allclose(target(vdn(q_lambda=0.5)), [2 + 0.5 * (2.5 + 1.5), 3, 6])
    np.testing.assert_allclose(target(vdn(reward_scale=2.0)), [4 + 2.5, 2 + 2, 4 + 4])
    ended = sequence().steps._replace(terminated=jnp.array([[False, False, True]]))
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), sequence()._replace(steps=ended))
    assert float(vdn()._target(ONLINE, TARGET, (), sequences, ())[2, 0]) == 2.0


def test_the_loss_by_hand():
    """Values of what was done: 1 + 3, 3 + 5 and 0 + 1; targets 4.5, 3 and 6: errors 1/2, -5 and 5.

    The loss is half the mean of their squares, (1/4 + 25 + 25) / 6, times the weight; the gradient is minus
    the error, a third of it, times the weight, at both agents' actions.
    """
    gradient, error, losses = vdn().gradient(ONLINE, TARGET, sequence(), jnp.array([2.0]))
    assert float(losses["loss"]) == pytest.approx(2 * 50.25 / 6)
    assert float(error[0]) == pytest.approx(10.5 / 3)
    by_hand = 2 / 3 * np.array([[-0.5 - 5.0, 0.0], [0.0, -0.5 + 5.0], [-5.0, 5.0]])
    np.testing.assert_allclose(gradient.agents, by_hand, rtol=1e-6)


# --- mixtures ---


def mixture(values, state, weights, key=None):
    """What a mixer of one unit without hypernetworks gives; `weights` by layer, the same for all inputs."""
    mixer = agent_values.monotonic_mixer(1, ())
    parameters = mixer.init(jax.random.key(0), values, state)
    for name, (kernel, bias) in weights.items():
        parameters[name] = jax.tree.map(jnp.ones_like, parameters[name])
        parameters[name] = {"kernel": kernel * parameters[name]["kernel"], "bias": jnp.array(bias)}
    return mixer.apply(parameters, values, state)


def test_a_mixture_by_hand():
    """State 2: weights |2 - 3| and |-1 * 2 - 3|, biases 2 * 2 and relu(2 - 1) * 1/2.

    Values 1 and -2: 1 * 1 - 2 * 1 + 4 = 3, an ELU leaves it; 3 * 5 + 1/2. Values -9 and 1: -8 + 4 = -4.
    """
    weights = {
        "weight_1": (1.0, [-3.0, -3.0]), "bias_1": (2.0, [0.0]), "weight_2": (-1.0, [-3.0]),
        "bias_2_0": (1.0, [-1.0]), "bias_2": (0.5, [0.0]),
    }  # fmt: skip
    found = mixture(jnp.array([[1.0, -2.0], [-9.0, 1.0]]), jnp.full((2, 1), 2.0), weights)
    np.testing.assert_allclose(found, [15.5, 5 * (np.exp(-4.0) - 1) + 0.5], rtol=1e-6)


@pytest.mark.parametrize("broken", [False, True])
def test_what_all_do_is_worth_no_less_where_one_is_worth_more(broken, monkeypatch):
    """Equation 5: no derivative by an agent's value is below zero. Without absolute values many are."""
    if broken:
        monkeypatch.setattr(jnp, "abs", lambda x: x)
    mixer = agent_values.monotonic_mixer(4, (8,))
    keys = jax.random.split(jax.random.key(0), 3)
    values, state = 9 * jax.random.normal(keys[0], (64, 3)), 9 * jax.random.normal(keys[1], (64, 5))
    parameters = mixer.init(keys[2], values, state)
    slope = jax.grad(lambda values: jnp.sum(mixer.apply(parameters, values, state)))(values)
    assert slope.shape == (64, 3) and bool(jnp.any(slope < 0)) == broken


@dataclasses.dataclass(frozen=True)
class TwoSteps:
    """The first agent chooses one of two games, in which both act: always 7, or a table up to 8."""

    name: str = "two-steps"
    num_agents: typing.ClassVar = 2
    observation_space: typing.ClassVar = envs.Box(0.0, 1.0, (3,))
    action_space: typing.ClassVar = envs.Discrete(2)
    max_episode_steps: typing.ClassVar = None

    def reset(self, key):
        return self._shown(jnp.int32(0))

    def step(self, key, state, action):
        table = jnp.array([[0.0, 1.0], [1.0, 8.0]])[action[0], action[1]]
        reward = jnp.stack([jnp.float32(0), jnp.float32(7), table])[state]
        state, seen = self._shown(jnp.where(state > 0, state, 1 + action[0]))
        return state, seen, jnp.full(2, reward), reward > 0, jnp.bool_(False)

    def _shown(self, state):
        return state, jnp.broadcast_to(jax.nn.one_hot(state, 3)[None], (2, 3))


@pytest.mark.parametrize(("kind", "earns"), [(algos.VDN, 7.0), (algos.QMIX, 8.0)])
def test_the_game_of_two_steps(kind, earns):
    """A sum cannot say that only both together earn 8, and takes 7; a mixture can (the paper's table 2)."""
    algorithm = kind(
        env=envs.vectorize(TwoSteps()), num_envs=8, num_steps=2, batch_size=32, num_updates=2, hidden=(16,),
        buffer_size=2_000, learning_starts=64, epsilon_end=1.0, anneal_learning_rate=False, target_period=50,
    )  # fmt: skip
    state = trained(algorithm, 600)
    assert float(algorithm.evaluate(state, jax.random.key(1), 1)["return"]) == earns
    # What both games' best is worth, at the first step of an episode that goes on from there.
    mixed = []
    for game in (1, 2):
        _, seen = algorithm.env.single._shown(jnp.int32(game))
        begins = Recollection((), jnp.ones(1, bool))
        values, _ = algorithm._one_step(state.learned.parameters.agents, seen[None], begins)
        best = jnp.max(values, axis=-1)
        mixed.append(float(algorithm._mixed(state.learned.parameters.mixer, best, seen[None])[0]))
    assert mixed[0] == pytest.approx(7.0, abs=0.4)
    assert mixed[1] == pytest.approx(8.0, abs=0.1) if earns == 8.0 else mixed[1] < 7.0


# --- probe environments ---

QUICK = {
    "num_envs": 8, "num_steps": 4, "batch_size": 16, "num_updates": 2, "buffer_size": 2_000, "hidden": (16,),
    "learning_starts": 64, "total_steps": 10_000, "target_period": 20, "anneal_learning_rate": False,
}  # fmt: skip


def test_agents_remember_each_its_own_cue():
    """With all options: a GRU, sequences shorter than a rollout, lambda, priorities, a dueling head."""
    algorithm = algos.QMIX(
        env=envs.make("probe:agents", delay=1), memory="gru", memory_size=16, sequence_length=2,
        q_lambda=0.5, priority_exponent=0.6, dueling=True, mixer_size=8, hypernetwork=(8,), **QUICK,
    )  # fmt: skip
    state = trained(algorithm, 150)
    assert float(algorithm.evaluate(state, jax.random.key(1), 64)["return"]) > 0.95


def test_unlike_agents():
    """Observations in parts, and actions that only one of them has: the other's are masked."""
    algorithm = algos.VDN(env=envs.make("probe:unlike"), **QUICK)
    state = trained(algorithm, 150)
    assert float(algorithm.evaluate(state, jax.random.key(1), 64)["return"]) > 0.9


# --- sequences ---


def test_sequences_are_stored_with_the_memory_before_them():
    """Two environments, rollouts of four steps in sequences of two; the memory counts the steps."""
    buffer = SequenceReplay(num_envs=2, buffer_size=16, batch_size=64, sequence_length=2, learning_starts=8)
    zeros = jnp.zeros((2, 1))
    state = buffer.init_of(zeros, zeros, jnp.zeros(2, jnp.int32), jnp.zeros(2))
    for first in (0, 4):
        time = jnp.broadcast_to(first + jnp.arange(4.0)[:, None], (4, 2)) + jnp.array([[0.0, 100.0]])
        never = jnp.zeros((4, 2), bool)
        assert bool(buffer.is_ready(state)) == (first > 0)
        steps = Step(time[..., None], time.astype(jnp.int32), time, never, never, time[..., None] + 1)
        state = buffer.add(state, buffer.cut(time[::2, :, None], never, steps))
    drawn = buffer.sample(state, jax.random.key(0)).transition
    np.testing.assert_array_equal(np.unique(drawn.memory), [0, 2, 4, 6, 100, 102, 104, 106])
    np.testing.assert_array_equal(drawn.steps.reward, drawn.memory + jnp.arange(2.0)[None])
    np.testing.assert_array_equal(drawn.steps.observation[:, :, 0], drawn.steps.action)


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sequence_length": 2}, "sequence_length=2 does not divide num_steps=3"),
        ({"q_lambda": 2.0}, "q_lambda=2.0: it must be from 0 to 1"),
        ({"num_updates": 0}, "num_updates=0: it must be above zero"),
        ({"buffer_size": 2}, "buffer_size=2 holds no window of sequence_length=3 steps of num_envs=1 .* 3"),
        ({"memory": "gruu"}, "memory"),
        ({"env": envs.make("CartPole-v1")}, "'CartPole-v1' is an environment of one agent"),
        ({"env": envs.make("probe:agents", continuous=True)}, "cannot act in the action space Box"),
    ],
)
def test_refused(fields, says):
    with pytest.raises(FdgError, match=says):
        dataclasses.replace(vdn(), **fields)


def test_a_mixture_of_no_size_is_refused():
    for fields, says in (({"mixer_size": 0}, "mixer_size=0"), ({"hypernetwork": (0,)}, "hypernetwork=")):
        with pytest.raises(FdgError, match=says):
            algos.QMIX(env=envs.make("probe:agents"), **fields)


def test_a_network_of_another_width_is_refused():
    table = algos.Network(TABLE.init, lambda table, observation: TABLE.apply(table, observation)[:, :1])
    algorithm = vdn(network=table)
    with pytest.raises(
        FdgError, match=r"float32\[1, 1, 2, 1\]: it must be \[1, 1, 2, 2\], one for each of 2"
    ):
        algorithm.check_when_traced(jax.eval_shape(algorithm.init, jax.random.key(0)))
