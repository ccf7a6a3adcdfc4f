"""Opponents for games: scripted and trained players; and matches between two players."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.games.game import Game, Player, Position, masked_observation, play_on, random_move, score_of, select
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
    """A `Player` that looks two moves ahead: wins if it can, and avoids moves that let the opponent win.

    Ties are broken at random. To choose one of `n` moves it evaluates `n + n * n` positions.
    """

    game: Game

    def begin(self, key: jax.Array) -> tuple[()]:
        """No memory."""
        return ()

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """A winning move, else a move that the opponent cannot answer by winning, else a random legal
        move.
        """
        game, actions = self.game, jnp.arange(self.game.num_actions, dtype=jnp.int32)
        player = game.player(position)

        def score_after(position: Position, action: jax.Array) -> tuple[Position, jax.Array]:
            next_positions = play_on(game, position, action)
            return next_positions, score_of(game, next_positions, player)

        next_positions, score = jax.vmap(score_after, in_axes=(None, 0))(position, actions)
        reply_scores = jax.vmap(jax.vmap(score_after, in_axes=(None, 0)), in_axes=(0, None))(
            next_positions, actions
        )[1]
        legal_replies = jax.vmap(game.legal)(next_positions)
        worst_score = jnp.min(jnp.where(legal_replies, reply_scores, 1.0), axis=1)
        over = jax.vmap(lambda next_position: game.outcome(next_position)[0])(next_positions)
        legal = masked_observation(game, position).action_mask
        return _best_move(key, jnp.where(over, 2 * score, jnp.minimum(worst_score, 0.0)), legal), memory


@checked
@dataclasses.dataclass(frozen=True)
class Trained:
    """A `Player` from an `algos.Actor`, which sees observations.

    Compares by the identity of its actor. Its memory is the actor's memory and a flag `[1]` bool, True at the
    start of a game.
    """

    game: Game
    actor: Any  # an algos.Actor
    greedy: bool = True

    def begin(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """An empty memory."""
        return self.actor.memory(1), jnp.ones(1, bool)

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """The actor's move."""
        actor_memory, is_first = memory
        observation = jax.tree.map(lambda x: x[None], masked_observation(self.game, position))
        action, actor_memory = self.actor.act(actor_memory, observation, is_first, key[None], self.greedy)
        return action[0].astype(jnp.int32), (actor_memory, jnp.zeros_like(is_first))


def _best_move(key: jax.Array, score: jax.Array, legal: jax.Array) -> jax.Array:
    """A random legal move of the highest score: `[]` int32."""
    score = jnp.where(legal, score, -jnp.inf)
    best = score == jnp.max(score)
    return jax.random.categorical(key, jnp.where(best, 0.0, -jnp.inf)).astype(jnp.int32)


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
      random_moves: random opening moves of each game, an even number; none if they would end it.
        Deterministic players would otherwise repeat one game.

    Returns:
      Scores of `one`: `[games]` float32, 1 won, -1 lost, 0 drawn.

    Raises:
      FdgError: `games` or `random_moves` is odd, or a player is for another game.
    """
    for name, number in (("games", games), ("random_moves", random_moves)):
        if number % 2:
            raise FdgError(
                f"match: {name}={number} is odd: give an even number, as each player moves first in half"
            )
    for player in (one, other):
        if getattr(player, "game", game) != game:
            raise FdgError(
                f"player {player!r:.60} plays another game than {game!r:.60}: make the player for this game"
            )
    keys = jax.random.split(key, (2, games // 2))
    start_games = jax.vmap(lambda key: _start_game(game, one, other, key, random_moves))
    # `first_games`: games where `one` moves next; `second_games`: games where `other` does. They swap after
    # each move, so the program contains the code of each player once.
    first_games, second_games = start_games(keys[0]), start_games(keys[1])

    def any_unfinished(carry: Any) -> jax.Array:
        over = [jax.vmap(lambda position: game.outcome(position)[0])(half.position) for half in carry[:2]]
        return ~jnp.all(jnp.stack(over))

    def both_move(carry: Any) -> Any:
        ones_turn, others_turn, is_swapped = carry
        after_one = jax.vmap(lambda half: _play_move(game, one, half, 0))(ones_turn)
        after_other = jax.vmap(lambda half: _play_move(game, other, half, 1))(others_turn)
        return after_other, after_one, ~is_swapped

    carry = first_games, second_games, jnp.bool_(False)
    first_games, second_games, is_swapped = jax.lax.while_loop(any_unfinished, both_move, carry)
    first_games, second_games = select(is_swapped, (second_games, first_games), (first_games, second_games))
    first_scores, second_scores = (
        jax.vmap(lambda position: game.outcome(position)[1])(half.position)
        for half in (first_games, second_games)
    )
    return jnp.concatenate([first_scores, 0.0 - second_scores])


class _Match(NamedTuple):
    """One game of a match."""

    key: jax.Array
    position: Position
    memories: tuple[Any, Any]  # memories of `one` and `other`


def _start_game(game: Game, one: Player, other: Player, key: jax.Array, random_moves: int) -> _Match:
    key, start_key, first_key, second_key, *opening_keys = jax.random.split(key, 4 + random_moves)
    initial = position = game.init(start_key)
    for move_key in opening_keys:
        position = play_on(game, position, random_move(game, move_key, position))
    position = select(game.outcome(position)[0], initial, position)
    return _Match(key, position, (one.begin(first_key), other.begin(second_key)))


def _play_move(game: Game, player: Player, game_state: _Match, player_index: int) -> _Match:
    """The game after a move of player `player_index` (0: `one`, 1: `other`); unchanged if it is over."""
    key, move_key = jax.random.split(game_state.key)
    over, _ = game.outcome(game_state.position)
    memories = list(game_state.memories)
    action, memory = player.choose(move_key, memories[player_index], game_state.position)
    memories[player_index] = select(over, memories[player_index], memory)
    return _Match(key, play_on(game, game_state.position, action), (memories[0], memories[1]))
