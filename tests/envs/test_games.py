"""Two-player games: rules against plain Python and pgx; players on known tic-tac-toe positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import games
from fdg.errors import FdgError

TIC_TAC_TOE, HEX = games.tic_tac_toe(), games.HexGame(size=4)
SMALL_FOUR = games.connect_four(rows=4, columns=5)


@functools.partial(jax.jit, static_argnums=0)
def play(game, position, action):
    return game.play(position, action)


def play_moves(game, *actions):
    position = game.init(jax.random.key(0))
    for action in actions:
        position = play(game, position, jnp.int32(action))
    return position


def outcome(game, *actions):
    over, score = game.outcome(play_moves(game, *actions))
    return bool(over), float(score)


def test_tic_tac_toe_outcomes():
    assert outcome(TIC_TAC_TOE, 0, 3, 1, 4) == (False, 0)
    assert outcome(TIC_TAC_TOE, 0, 3, 1, 4, 2) == (True, 1)
    assert outcome(TIC_TAC_TOE, 0, 3, 1, 4, 8, 5) == (True, -1)
    assert outcome(TIC_TAC_TOE, 0, 1, 2, 4, 3, 5, 7, 6, 8) == (True, 0)
    assert outcome(TIC_TAC_TOE, 0, 0) == (True, 1), "a move to an occupied cell loses"


def test_connect_four_observations_are_relative_to_the_player():
    position = play_moves(SMALL_FOUR, 2, 2, 0)
    own, other = np.moveaxis(np.asarray(SMALL_FOUR.observe(position)), -1, 0)
    assert [*zip(*np.nonzero(own), strict=True)] == [(2, 2)], "the second stone is on top of the first"
    assert [*zip(*np.nonzero(other), strict=True)] == [(3, 0), (3, 2)]
    assert int(SMALL_FOUR.player(position)) == 1
    assert SMALL_FOUR.legal(play_moves(SMALL_FOUR, 1, 1, 1, 1)).tolist() == [True, False, True, True, True]


def test_hex_is_transposed_for_the_second_player():
    position = play_moves(HEX, 1)  # row 0, column 1
    own, other = np.moveaxis(np.asarray(HEX.observe(position)), -1, 0)
    assert not own.any() and [*zip(*np.nonzero(other), strict=True)] == [(1, 0)]
    assert np.flatnonzero(~np.asarray(HEX.legal(position))).tolist() == [4]
    column = [play_moves(HEX, 0, 1, 4, 5, 8, 9), play_moves(HEX, 0, 1, 4, 5, 8, 9, 12)]
    assert [bool(one.over) for one in column] == [False, True] and float(column[1].score) == 1


# --- random games against plain Python and pgx ---


def lines_winner(board, length):
    """The player (1, -1 or 0) with a line: checks every cell in every direction."""
    rows, columns = board.shape
    for r, c in np.ndindex(rows, columns):
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            ends = r + (length - 1) * down, c + (length - 1) * right
            if 0 <= ends[0] < rows and 0 <= ends[1] < columns:
                total = sum(int(board[r + i * down, c + i * right]) for i in range(length))
                if abs(total) == length:
                    return total // length
    return 0


def hex_winner(board):
    """The player (1, -1 or 0) that connects both sides: flood fill from the first row or column."""
    size = len(board)
    for stone, first, last in ((1, lambda r, c: r == 0, lambda r, c: r == size - 1),
                               (-1, lambda r, c: c == 0, lambda r, c: c == size - 1)):  # fmt: skip
        reached = {(r, c) for r, c in np.ndindex(size, size) if first(r, c) and board[r, c] == stone}
        while True:
            more = {
                (r + down, c + right)
                for r, c in reached
                for down, right in ((-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0))
                if 0 <= r + down < size and 0 <= c + right < size and board[r + down, c + right] == stone
            }
            if more <= reached:
                break
            reached |= more
        if any(last(r, c) for r, c in reached):
            return stone
    return 0


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def random_games(game, key, count, moves):
    """Final positions of random games; positions, legal moves and actions `[count, moves, ...]`."""

    def step(position, key):
        legal = game.legal(position)
        action = jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))
        after = games.game.play_on(game, position, action)
        return after, (position, legal, action)

    def play_game(key):
        start = game.init(key)
        end, history = jax.lax.scan(step, start, jax.random.split(key, moves))
        return end, history

    return jax.vmap(play_game)(jax.random.split(key, count))


@pytest.mark.parametrize(
    ("game", "winner"),
    [
        (TIC_TAC_TOE, lambda board: lines_winner(board, 3)),
        (SMALL_FOUR, lambda board: lines_winner(board, 4)),
        (HEX, hex_winner),
    ],
    ids=["tic_tac_toe", "connect_four", "hex"],
)
def test_random_games_match_reference(game, winner):
    end, (positions, legal, _) = random_games(game, jax.random.key(1), 24, game.max_moves)
    assert np.asarray(end.over).all() and len(set(end.score.tolist())) >= 2
    for i in range(24):
        for t in range(game.max_moves):
            board = np.asarray(positions.stones[i, t])
            expected = winner(board)
            assert float(positions.score[i, t]) == expected, board
            assert bool(positions.over[i, t]) == (expected != 0 or (board != 0).all())
            if game is not HEX:
                free = board[0] == 0 if game.gravity else board.ravel() == 0
                np.testing.assert_array_equal(legal[i, t], free)


@pytest.mark.parametrize(
    ("ours", "name"),
    [(games.connect_four(), "connect_four"), (TIC_TAC_TOE, "tic_tac_toe")],
    ids=["connect_four", "tic_tac_toe"],
)
def test_matches_pgx(ours, name):
    pytest.importorskip("pgx")
    theirs = games.PgxGame(name)
    _, (positions, legal, actions) = random_games(ours, jax.random.key(2), 8, ours.max_moves)

    def replay(actions):
        def one(position, action):
            return games.game.play_on(theirs, position, action), position

        return jax.lax.scan(one, theirs.init(jax.random.key(5)), actions)[1]

    other = jax.jit(jax.vmap(replay))(actions)
    over, score = jax.jit(jax.vmap(jax.vmap(theirs.outcome)))(other)
    np.testing.assert_array_equal(over, positions.over)
    np.testing.assert_array_equal(score, positions.score)
    going = ~np.asarray(over)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(jax.vmap(jax.vmap(theirs.legal)))(other))[going], legal[going]
    )
    seen = jax.jit(jax.vmap(jax.vmap(ours.observe)))(positions)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(jax.vmap(jax.vmap(theirs.observe)))(other))[going], np.asarray(seen)[going]
    )
    env = envs.make("pgx:tic_tac_toe", opponent="greedy")
    assert env == envs.make("pgx:tic_tac_toe", opponent="greedy") and env.name == "pgx:tic_tac_toe"
    with pytest.raises(FdgError, match="unknown game of pgx 'otello': did you mean 'othello'"):
        envs.make("pgx:otello")


# --- environments ---


def test_random_opening_moves():
    """Zero to two moves, equally often; a game that they would end starts from the initial position."""
    env = envs.vectorize(games.Turns(TIC_TAC_TOE, random_moves=2))
    state, _ = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 300))
    counts = np.bincount(np.asarray(state.inner.moves), minlength=3)
    assert len(counts) == 3 and (counts > 70).all()
    env = envs.vectorize(games.Turns(games.connect_four(2, 2, 2), random_moves=3))  # the third move wins
    state, _ = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 100))
    assert not np.asarray(state.inner.over).any() and set(state.inner.moves.tolist()) == {0, 1, 2}


def test_agent_starts_half_of_the_games():
    env = envs.make("game:tic_tac_toe", opponent="greedy")
    keys = jax.random.split(jax.random.key(0), 64)
    state, observation = jax.jit(env.reset)(keys)
    began = np.asarray(state.inner.player) == 0
    assert 16 < began.sum() < 48
    stones = np.asarray(observation.observation).sum(axis=(1, 2))
    np.testing.assert_array_equal(stones[:, 1], ~began)  # the opponent has moved if it started
    step = jax.jit(env.step)
    ends = []
    for _ in range(5):  # the lowest legal action, which almost always loses to a greedy opponent
        state, step_ = step(keys, state, jnp.argmax(observation.action_mask, axis=1).astype(jnp.int32))
        observation = step_.observation
        ends += np.asarray(step_.episode_return)[np.asarray(step_.terminated)].tolist()
    assert len(ends) >= 64 and np.mean(ends) < -0.3


def test_turns_reward_the_last_player():
    env = envs.vectorize(games.Turns(TIC_TAC_TOE))
    keys = jax.random.split(jax.random.key(0), 1)
    state, _ = jax.jit(env.reset)(keys)
    rewards, step_env = [], jax.jit(env.step)
    for action in (0, 3, 1, 4, 8, 5):
        state, step = step_env(keys, state, jnp.array([action]))
        rewards.append(float(step.reward[0]))
    assert rewards == [0, 0, 0, 0, 0, 1] and bool(step.terminated[0]), "the last player gets the reward"


# --- players ---


def test_greedy_player_wins_and_blocks():
    greedy = games.Greedy(TIC_TAC_TOE)
    choose = jax.jit(jax.vmap(lambda key, position: greedy.choose(key, (), position)[0], (0, None)))
    keys = jax.random.split(jax.random.key(0), 12)
    for actions, best in {(0, 3, 1, 4): {2}, (0, 4, 1): {2}, (0, 1, 4, 2): {8, 3, 6}}.items():
        assert set(choose(keys, play_moves(TIC_TAC_TOE, *actions)).tolist()) <= best, actions
    # A double threat cannot be blocked: any move is allowed.
    assert set(choose(keys, play_moves(TIC_TAC_TOE, 0, 1, 4, 5, 6)).tolist()) <= {2, 3, 7, 8}


def test_invalid_arguments_are_refused():
    with pytest.raises(FdgError, match="games=3 is odd"):
        games.match(HEX, games.Uniform(HEX), games.Uniform(HEX), jax.random.key(0), 3)
    with pytest.raises(FdgError, match="a row of 6 does not fit on a board of 4 rows and 5 columns"):
        envs.make("game:connect_four", rows=4, columns=5, length=6)
    with pytest.raises(FdgError, match=r"unknown opponent 'gredy': did you mean 'greedy'"):
        envs.make("game:hex", opponent="gredy")
    with pytest.raises(FdgError, match="size=40: give a whole number from 2 to 26"):
        envs.make("game:hex", size=40)
