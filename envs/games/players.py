"""Opponents: players without training, trained ones, and matches between any two."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.games.game import Game, Player, Position, play_on, random_move, score_of, seen, where
from fdg.arguments import checked
from fdg.errors import FdgError


@checked
@dataclasses.dataclass(frozen=True)
class Uniform:
    """A `Player` with uniformly random legal moves."""

    game: Game

    def begin(self, key: jax.Array) -> tuple[()]:
        """No memory."""
        return ()

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """A random legal move."""
        return random_move(self.game, key, position), memory


@checked
@dataclasses.dataclass(frozen=True)
class Greedy:
    """A `Player` that looks two moves ahead: wins if it can, and avoids moves that let the other win.

    Ties are broken at random. To choose one of `n` moves, it evaluates `n + n * n` moves.
    """

    game: Game

    def begin(self, key: jax.Array) -> tuple[()]:
        """No memory."""
        return ()

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """A winning move, else a move after which no reply wins, else any move."""
        game, actions = self.game, jnp.arange(self.game.num_actions, dtype=jnp.int32)
        mover = game.player(position)

        def score_after(position: Position, action: jax.Array) -> tuple[Position, jax.Array]:
            after = play_on(game, position, action)
            return after, score_of(game, after, mover)

        after, score = jax.vmap(score_after, in_axes=(None, 0))(position, actions)
        replies = jax.vmap(jax.vmap(score_after, in_axes=(None, 0)), in_axes=(0, None))(after, actions)[1]
        can_reply = jax.vmap(game.legal)(after)
        worst = jnp.min(jnp.where(can_reply, replies, 1.0), axis=1)
        is_over = jax.vmap(lambda x: game.outcome(x)[0])(after)
        legal = seen(game, position).action_mask
        return _best_move(key, jnp.where(is_over, 2 * score, jnp.minimum(worst, 0.0)), legal), memory


@checked
@dataclasses.dataclass(frozen=True)
class Trained:
    """A `Player` from an `algos.Actor`, which sees observations.

    Players are equal if they have the same actor object. Memory: the actor's, and whether the game starts.
    """

    game: Game
    actor: Any  # an algos.Actor
    greedy: bool = True

    def begin(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """An empty memory."""
        return self.actor.memory(1), jnp.ones(1, bool)

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """The actor's move."""
        actor_memory, start = memory
        observation = jax.tree.map(lambda x: x[None], seen(self.game, position))
        action, actor_memory = self.actor.act(actor_memory, observation, start, key[None], self.greedy)
        return action[0].astype(jnp.int32), (actor_memory, jnp.zeros_like(start))


def _best_move(key: jax.Array, score: jax.Array, legal: jax.Array) -> jax.Array:
    """A random legal move of the highest score: `[]` int32."""
    score = jnp.where(legal, score, -jnp.inf)
    is_best = score == jnp.max(score)
    return jax.random.categorical(key, jnp.where(is_best, 0.0, -jnp.inf)).astype(jnp.int32)


@checked
def match(
    game: Game, one: Player, other: Player, key: jax.Array, games: int, random_moves: int = 0
) -> jax.Array:
    """Plays games between two players, in parallel; in the first half `one` moves first.

    Args:
      game: the game.
      one, other: its players.
      key: one key.
      games: an even number.
      random_moves: the number of random opening moves, even; without them, deterministic players would repeat
        one game. A game that these moves would end starts without them.

    Returns:
      Scores of `one`: `[games]` float32, 1 won, -1 lost, 0 drawn.

    Raises:
      FdgError: a number is odd, or a player is for another game.
    """
    for name, count in (("games", games), ("random_moves", random_moves)):
        if count % 2:
            raise FdgError(
                f"match: {name}={count} is odd: give an even number, because each player begins half of the"
                " games"
            )
    for player in (one, other):
        if getattr(player, "game", game) != game:
            raise FdgError(
                f"player {player!r:.60} plays another game than {game!r:.60}: make it for this game"
            )
    keys = jax.random.split(key, (2, games // 2))
    start_games = jax.vmap(lambda key: _start(game, one, other, key, random_moves))
    # Games where `one` moves next, and games where `other` does: they swap roles after each move, so a
    # program contains each player's code once.
    first, second = start_games(keys[0]), start_games(keys[1])

    def unfinished(carry: Any) -> jax.Array:
        over = [jax.vmap(lambda position: game.outcome(position)[0])(half.position) for half in carry[:2]]
        return ~jnp.all(jnp.stack(over))

    def move_all(carry: Any) -> Any:
        one_to_move, other_to_move, is_swapped = carry
        moved = jax.vmap(lambda half: _move(game, one, half, 0))(one_to_move)
        replied = jax.vmap(lambda half: _move(game, other, half, 1))(other_to_move)
        return replied, moved, ~is_swapped

    first, second, is_swapped = jax.lax.while_loop(unfinished, move_all, (first, second, jnp.bool_(False)))
    first, second = where(is_swapped, (second, first), (first, second))
    first_scores, second_scores = (
        jax.vmap(lambda position: game.outcome(position)[1])(half.position) for half in (first, second)
    )
    return jnp.concatenate([first_scores, 0.0 - second_scores])


class _GameState(NamedTuple):
    """The state of one game of a match."""

    key: jax.Array
    position: Position
    memories: tuple[Any, Any]  # of `one` and `other`


def _start(game: Game, one: Player, other: Player, key: jax.Array, random_moves: int) -> _GameState:
    """A game after its random opening moves."""
    key, start_key, first_key, second_key, *opening_keys = jax.random.split(key, 4 + random_moves)
    start = position = game.init(start_key)
    for opening_key in opening_keys:
        position = play_on(game, position, random_move(game, opening_key, position))
    position = where(game.outcome(position)[0], start, position)
    return _GameState(key, position, (one.begin(first_key), other.begin(second_key)))


def _move(game: Game, player: Player, state: _GameState, index: int) -> _GameState:
    """The game after a move of the player with this index, if the game is not over."""
    key, move_key = jax.random.split(state.key)
    over, _ = game.outcome(state.position)
    memories = list(state.memories)
    action, memory_after = player.choose(move_key, memories[index], state.position)
    memories[index] = where(over, memories[index], memory_after)
    return _GameState(key, play_on(game, state.position, action), (memories[0], memories[1]))
