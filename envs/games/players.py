"""Who one can play against: players that need no training, trained ones, and matches between any two."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envs.games.game import Game, Player, Position, play_on, random_move, score_of, seen, where
from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A `Player` that draws each move from the legal ones, all equally probable."""

    game: Any  # a Game

    def begin(self, key: jax.Array) -> tuple[()]:
        """Nothing."""
        return ()

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """A random legal move."""
        return random_move(self.game, key, position), memory


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A `Player` that looks two moves ahead: it wins if it can, then avoids moves that let the other win.

    Draws among moves that are equal in this. It plays `n + n * n` moves for each of its own.
    """

    game: Any  # a Game

    def begin(self, key: jax.Array) -> tuple[()]:
        """Nothing."""
        return ()

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """The move that wins, else one that does not lose, else any."""
        game, actions = self.game, jnp.arange(self.game.num_actions, dtype=jnp.int32)
        mover = game.player(position)

        def score_after(position: Position, action: jax.Array) -> tuple[Position, jax.Array]:
            after = play_on(game, position, action)
            return after, score_of(game, after, mover)

        after, score = jax.vmap(score_after, in_axes=(None, 0))(position, actions)
        replies = jax.vmap(jax.vmap(score_after, in_axes=(None, 0)), in_axes=(0, None))(after, actions)[1]
        can_reply = jax.vmap(game.legal)(after)
        worst = jnp.min(jnp.where(can_reply, replies, 1.0), axis=1)
        over = jax.vmap(lambda one: game.outcome(one)[0])(after)
        legal = seen(game, position).action_mask
        return _best(key, jnp.where(over, 2 * score, jnp.minimum(worst, 0.0)), legal), memory


@dataclasses.dataclass(frozen=True)
class Trained:
    """A `Player` that acts as an `algos.Actor` does, which sees observations.

    Compares by the identity of its actor. Its memory is the actor's, and whether a game begins.
    """

    game: Any  # a Game
    actor: Any  # an algos.Actor
    greedy: bool = True

    def begin(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """An empty memory."""
        return self.actor.memory(1), jnp.ones(1, bool)

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """The actor's move."""
        remembered, start = memory
        observation = jax.tree.map(lambda x: x[None], seen(self.game, position))
        action, remembered = self.actor.act(remembered, observation, start, key[None], self.greedy)
        return action[0].astype(jnp.int32), (remembered, jnp.zeros_like(start))


def _best(key: jax.Array, score: jax.Array, legal: jax.Array) -> jax.Array:
    """A random one of the legal moves of the highest score: `[]` int32."""
    score = jnp.where(legal, score, -jnp.inf)
    best = score == jnp.max(score)
    return jax.random.categorical(key, jnp.where(best, 0.0, -jnp.inf)).astype(jnp.int32)


def match(
    game: Game, one: Player, other: Player, key: jax.Array, games: int, random_moves: int = 0
) -> jax.Array:
    """Plays games between two players, side by side; in the first half of them `one` begins.

    Args:
      game: what they play.
      one, other: players of it.
      key: one key.
      games: how many, an even number.
      random_moves: moves of each game that are drawn before the players take over, an even number. Two
        players that draw nothing would play one game again and again.

    Returns:
      Scores of `one`: `[games]` float32, 1 won, -1 lost, 0 drawn.

    Raises:
      FdgError: an odd number.
    """
    for name, count in (("games", games), ("random_moves", random_moves)):
        if count % 2:
            raise FdgError(f"match: {name}={count} is odd: each player begins half of the games")
    first, second = jax.random.split(key)
    return jnp.concatenate(
        [
            _played(game, one, other, jax.random.split(first, games // 2), random_moves),
            0.0 - _played(game, other, one, jax.random.split(second, games // 2), random_moves),
        ]
    )


def _played(game: Game, one: Player, other: Player, keys: jax.Array, random_moves: int) -> jax.Array:
    """Scores of `one`, who begins each game: `[len(keys)]`."""

    def move(player: Player, key: jax.Array, memory: Any, position: Position) -> tuple[Any, Position]:
        over, _ = game.outcome(position)
        action, after = player.choose(key, memory, position)
        return where(over, memory, after), play_on(game, position, action)

    def start(key: jax.Array) -> tuple[jax.Array, Position, Any, Any]:
        key, *drawn = jax.random.split(key, 5)
        position = game.init(drawn[0])
        for opening in jax.random.split(drawn[3], random_moves):
            _, position = move(Uniform(game), opening, (), position)
        return key, position, one.begin(drawn[1]), other.begin(drawn[2])

    def both_move(carry: Any) -> Any:
        key, position, memory, of_other = carry
        key, *drawn = jax.random.split(key, 3)
        memory, position = move(one, drawn[0], memory, position)
        of_other, position = move(other, drawn[1], of_other, position)
        return key, position, memory, of_other

    def unfinished(carry: Any) -> jax.Array:
        return ~jnp.all(jax.vmap(lambda one: game.outcome(one)[0])(carry[1]))

    _, position, *_ = jax.lax.while_loop(unfinished, jax.vmap(both_move), jax.vmap(start)(keys))
    return jax.vmap(lambda one: game.outcome(one)[1])(position)
