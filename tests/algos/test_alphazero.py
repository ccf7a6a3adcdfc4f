"""Gumbel AlphaZero: equation 1 of Silver et al. 2017 (arXiv 1712.01815) is the loss; value targets are each
player's outcome ("Methods" there); policy targets are equation 11 of Danihelka et al. 2022.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.alphazero import Sample
from envs import games
from fdg.errors import FdgError

pytest.importorskip("mctx")
GAME = games.tic_tac_toe()


def small(**fields):
    settings = {"num_envs": 4, "num_steps": 4, "num_minibatches": 2, "num_simulations": 8, "hidden": (16,)}
    return algos.AlphaZero(env=envs.make("game:tic_tac_toe"), **{**settings, **fields})


def after(*actions):
    position = GAME.init(jax.random.key(0))
    play = jax.jit(GAME.play)
    for action in actions:
        position = play(position, jnp.int32(action))
    return position


def time_steps(reward, terminated):
    """A rollout `[T, 1]`; observation t is t + 1."""
    count = len(reward)
    column = lambda x, dtype: jnp.array(x, dtype)[:, None]  # noqa: E731
    no_ends = jnp.zeros((count, 1), bool)
    zeros = jnp.zeros((count, 1))
    number = jnp.arange(1.0, count + 1)[:, None]
    return envs.TimeStep(
        None, column(reward, jnp.float32), column(terminated, bool), no_ends, number, zeros, zeros
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Move 3 wins: 1 for its player, -1 for the other. The next game continues; its last position has the
        # value 0.5 for the player who is not to move.
        ({}, [1.0, -1.0, 1.0, 0.5, -0.5]),
        ({"discount": 0.5}, [0.25, -0.5, 1.0, 0.125, -0.25]),
        # lambda 0: minus the search value of the next position.
        ({"value_lambda": 0.0}, [-0.2, -0.3, 1.0, -0.9, -0.5]),
        # lambda 0.5: second move -(0.5 * 0.3 + 0.5 * 1); first move -(0.5 * 0.2 + 0.5 * -0.65).
        ({"value_lambda": 0.5}, [0.225, -0.65, 1.0, -0.2, -0.5]),
    ],
)
def test_targets_by_hand(fields, expected):
    def apply(parameters, observation):
        return jnp.zeros((len(observation), 9)), jnp.full(len(observation), np.arctanh(0.5))

    algorithm = small(network=algos.Network(lambda key, observation: {}, apply), **fields)
    step = time_steps([0, 0, 1, 0, 0], [False, False, True, False, False])
    value = jnp.array([0.1, 0.2, 0.3, 0.4, 0.9])[:, None]
    np.testing.assert_allclose(algorithm.targets({}, value, step)[:, 0], expected, rtol=1e-6)


def test_loss_by_hand():
    """Legal moves have probabilities 3/4 and 1/4, search policy 1/2 each, value 0.2, target -1."""

    def apply(parameters, observation):
        logits = jnp.array([jnp.log(3.0), 5.0, 0.0] + [9.0] * 6)
        return jnp.broadcast_to(logits, (len(observation), 9)), jnp.full(len(observation), np.arctanh(0.2))

    algorithm = small(network=algos.Network(lambda key, observation: {}, apply), value_coefficient=0.5)
    mask = jnp.array([True, False, True] + [False] * 6)[None]
    policy = jnp.array([0.5, 0.0, 0.5] + [0.0] * 6)[None]
    observation = envs.MaskedObservation(jnp.zeros((1, 3, 3, 2)), mask)
    loss, parts = algorithm.loss({}, Sample(observation, policy, jnp.array([-1.0])))
    cross_entropy = -0.5 * np.log(0.75) - 0.5 * np.log(0.25)
    np.testing.assert_allclose(parts["policy_loss"], cross_entropy, rtol=1e-6)
    np.testing.assert_allclose(parts["value_loss"], 0.5 * 1.2**2, rtol=1e-6)
    np.testing.assert_allclose(parts["entropy"], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(loss, cross_entropy + 0.5 * 0.72, rtol=1e-6)


# --- searches, compared with minimax ---


@functools.cache
def minimax(board, stone):
    """Value for the player to move, and its optimal moves; a board is a tuple of 1, -1 and 0."""
    lines = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
    if any(all(board[i] == -stone for i in line) for line in lines):
        return -1, ()
    free = [i for i in range(9) if board[i] == 0]
    if not free:
        return 0, ()
    values = {i: -minimax((*board[:i], stone, *board[i + 1 :]), -stone)[0] for i in free}
    best = max(values.values())
    return best, tuple(i for i in free if values[i] == best)


POSITIONS = ((0, 3, 1), (4, 0, 8, 2), (0, 4, 8), (0, 1), (4, 1, 0, 8, 2))


@pytest.mark.parametrize("kind", ["gumbel", "playouts"])
def test_long_search_matches_minimax(kind):
    # After 0, 4, 8, random playouts favour a losing move: they would need thousands of simulations.
    chosen = POSITIONS if kind == "gumbel" else [one for one in POSITIONS if one != (0, 4, 8)]
    positions = [after(*actions) for actions in chosen]

    def evaluate(parameters, key, position):
        return jnp.zeros(9), jnp.float32(0)

    if kind == "gumbel":
        player = algos.search.SearchPlayer(GAME, evaluate, (), simulations=300)
    else:
        player = algos.search.RandomPlayouts(GAME, simulations=300)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *positions)
    keys = jax.random.split(jax.random.key(0), len(positions))
    found = jax.jit(jax.vmap(lambda key, one: player.choose(key, (), one)[0]))(keys, stacked)
    for action, position in zip(found.tolist(), positions, strict=True):
        board, stone = tuple(np.asarray(position.stones).ravel().tolist()), 1 - 2 * (int(position.moves) % 2)
        assert action in minimax(board, stone)[1], board


def test_search_values_of_final_positions():
    """An immediate win has value 1; a lost position has value -1."""
    algorithm = small(num_simulations=64)
    parameters = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(algorithm.init, jax.random.key(0)).parameters
    )
    positions = jax.tree.map(lambda *x: jnp.stack(x), after(0, 3, 1, 4), after(0, 1, 4, 5, 6))
    found = jax.jit(algorithm.search)(parameters, positions, jax.random.split(jax.random.key(1), 2))
    assert found.action[0] == 2 and found.policy[0, 2] > 0.5
    np.testing.assert_allclose(jnp.sum(found.policy, axis=1), 1.0, rtol=1e-5)
    assert (np.asarray(found.policy)[np.asarray(positions.stones).reshape(2, 9) != 0] == 0).all()
    assert found.value[0] > 0.5 and found.value[1] < -0.5


@pytest.mark.whole
def test_learns_tic_tac_toe():
    """The network beats random moves without search; with search it draws with a greedy player or wins."""
    algorithm = small(
        num_envs=64, num_steps=8, num_simulations=16, hidden=(64,), learning_rate=3e-3, total_steps=512 * 80
    )
    iterate, state = jax.jit(algorithm.iterate), jax.jit(algorithm.init)(jax.random.key(0))
    for _ in range(80):
        state, _ = iterate(state)
    play = jax.jit(lambda state, key: games.match(GAME, algorithm.player(state), games.Greedy(GAME), key, 64))
    assert play(state, jax.random.key(1)).mean() > 0.1
    assert algorithm.evaluate(state, jax.random.key(2), 128)["return"] > 0.75


def test_invalid_settings():
    with pytest.raises(FdgError, match=r"'CartPole-v1' is not a two-player game.*game:connect_four"):
        algos.AlphaZero(env=envs.make("CartPole-v1"))
    with pytest.raises(FdgError, match="num_simulations"):
        small(num_simulations=0)
    with pytest.raises(FdgError, match="bonus: a search values only how a game ends; leave it out"):
        small(bonus=algos.Bonus(jnp.zeros_like, lambda state, step: (state, step.reward)))
    with pytest.raises(FdgError, match="rings=2: all games move together; leave it out"):
        small(rings=2)
    assert "alphazero" in algos.able_in(envs.make("game:hex"))
    assert "alphazero" not in algos.able_in(envs.make("CartPole-v1"))
