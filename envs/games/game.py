"""Two-player games, and the environments made of them.

A game is a small frozen value with pure functions of one position. Two environments are made of it:
`Against`, in which an agent meets a player (`envs.games.players`), and `Turns`, in which it makes the moves
of both sides.

    game = connect_four(rows=6, columns=7)
    env = vectorize(Against(game, Greedy(game)))
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from envs.composite import ObservationSpace
from envs.observations import MaskedObservation
from envs.spaces import Discrete
from fdg.arguments import checked

Position = Any


@runtime_checkable
class Game(Protocol):
    """A game of two players who move in turn, see everything, and share what one wins and the other loses.

    A frozen, hashable value that holds no arrays. A position is any pytree whose shapes and dtypes `play`
    keeps. Methods take one position, without batch axis.
    """

    @property
    def name(self) -> str:
        """Name in messages, and that `envs.make` knows its environment by, if it does."""

    @property
    def num_actions(self) -> int:
        """Moves that can be legal at some time, `n`."""

    @property
    def max_moves(self) -> int | None:
        """Moves of both players after which a game has ended at the latest; None where there is no such
        number.
        """

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of `observe`."""

    def init(self, key: jax.Array) -> Position:
        """The position before the first move."""

    def player(self, position: Position) -> jax.Array:
        """Whose move it is: `[]` int32, 0 for the player who begins, 1 for the other."""

    def legal(self, position: Position) -> jax.Array:
        """Which moves are legal: `[n]` bool."""

    def play(self, position: Position, action: jax.Array) -> Position:
        """The position after a move. A move that is not legal loses the game at once."""

    def outcome(self, position: Position) -> tuple[jax.Array, jax.Array]:
        """`(over [] bool, score [] float32)`: whether the game has ended, and what player 0 has by it: 1 won,
        -1 lost, 0 drawn or not yet over.
        """

    def observe(self, position: Position) -> Any:
        """What the player sees whose move it is, from their side of the board."""


@runtime_checkable
class Player(Protocol):
    """Who chooses moves in one game; a hashable value with pure functions."""

    def begin(self, key: jax.Array) -> Any:
        """Memory before the first move, a pytree whose shapes and dtypes `choose` keeps; `()` for none."""

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """`(action [] int32, memory)` for a position of the player's move."""


def score_of(game: Game, position: Position, player: jax.Array) -> jax.Array:
    """What a player has in a position: `[]` float32, 1, -1 or 0."""
    score = game.outcome(position)[1]
    return jnp.where(player == 0, score, -score)


def seen(game: Game, position: Position) -> MaskedObservation:
    """The observation of a position, with the legal moves; after the end of a game all count as legal."""
    over, _ = game.outcome(position)
    return MaskedObservation(game.observe(position), game.legal(position) | over)


def play_on(game: Game, position: Position, action: jax.Array) -> Position:
    """The position after a move, and the same position where the game has ended."""
    over, _ = game.outcome(position)
    return where(over, position, game.play(position, action))


def random_move(game: Game, key: jax.Array, position: Position) -> jax.Array:
    """One of the legal moves, all equally probable: `[]` int32."""
    legal = seen(game, position).action_mask
    return jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf)).astype(jnp.int32)


def where(condition: jax.Array, new: Any, old: Any) -> Any:
    """One of two pytrees, by a scalar condition."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


class Seat(NamedTuple):
    """State of `Against`: a position, which player the agent is, and what the opponent remembers."""

    position: Position
    player: jax.Array  # [] int32: 0 where the agent began
    memory: Any


@dataclasses.dataclass(frozen=True)
class _OfGame:
    """What both environments say of their game."""

    game: Game

    @property
    def name(self) -> str:
        """Name of the game."""
        return self.game.name

    @property
    def observation_space(self) -> ObservationSpace:
        """Of the game."""
        return self.game.observation_space

    @property
    def action_space(self) -> Discrete:
        """A number for each move."""
        return Discrete(self.game.num_actions)


@checked
@dataclasses.dataclass(frozen=True)
class Against(_OfGame):
    """A `SingleEnvironment`: an agent meets an opponent. One step is a move of the agent and the reply.

    Who begins is drawn for each game. Reward 1 where the agent won, -1 where it lost, 0 else.
    """

    opponent: Player

    @property
    def max_episode_steps(self) -> int | None:
        """Moves of the agent in the longest game, rounded up."""
        return None if self.game.max_moves is None else (self.game.max_moves + 1) // 2

    def reset(self, key: jax.Array) -> tuple[Seat, MaskedObservation]:
        """Starts a game; where the opponent begins, after its first move."""
        start_key, player_key, memory_key, reply_key = jax.random.split(key, 4)
        position = self.game.init(start_key)
        player = jax.random.randint(player_key, (), 0, 2, jnp.int32)
        memory = self.opponent.begin(memory_key)
        state = self._replied(reply_key, position, player, memory)
        return state, seen(self.game, state.position)

    def step(
        self, key: jax.Array, state: Seat, action: jax.Array
    ) -> tuple[Seat, MaskedObservation, jax.Array, jax.Array, jax.Array]:
        """The agent's move, and the opponent's if the game goes on."""
        moved = self.game.play(state.position, action)
        state = self._replied(key, moved, state.player, state.memory)
        over, _ = self.game.outcome(state.position)
        reward = score_of(self.game, state.position, state.player)
        return state, seen(self.game, state.position), reward, over, jnp.bool_(False)

    def _replied(self, key: jax.Array, position: Position, player: jax.Array, memory: Any) -> Seat:
        """The state after the opponent's move, where it is its move and the game is not over."""
        over, _ = self.game.outcome(position)
        replies = ~over & (self.game.player(position) != player)
        action, after = self.opponent.choose(key, memory, position)
        position = where(replies, self.game.play(position, action), position)
        return Seat(position, player, where(replies, after, memory))


@checked
@dataclasses.dataclass(frozen=True)
class Turns(_OfGame):
    """A `SingleEnvironment`: an agent makes the moves of both players, one a step.

    Observations are those of the player whose move it is, rewards those of the player who has just moved: 1
    for the move that wins. The value of a position after a move is the negative of what it is for the mover.

    Attributes:
      game: which game.
      random_moves: a game begins after random moves, of which there are from 0 to this many, drawn for each
        game; without any where they would have ended it.
    """

    random_moves: int = 0

    @property
    def max_episode_steps(self) -> int | None:
        """Moves in the longest game."""
        return self.game.max_moves

    def reset(self, key: jax.Array) -> tuple[Position, MaskedObservation]:
        """Starts a game."""
        start_key, count_key, *keys = jax.random.split(key, 2 + self.random_moves)
        start = position = self.game.init(start_key)
        count = jax.random.randint(count_key, (), 0, self.random_moves + 1)
        for i, drawn in enumerate(keys):
            moved = play_on(self.game, position, random_move(self.game, drawn, position))
            position = where(i < count, moved, position)
        position = where(self.game.outcome(position)[0], start, position)
        return position, seen(self.game, position)

    def step(
        self, key: jax.Array, state: Position, action: jax.Array
    ) -> tuple[Position, MaskedObservation, jax.Array, jax.Array, jax.Array]:
        """One move."""
        mover = self.game.player(state)
        state = self.game.play(state, action)
        over, _ = self.game.outcome(state)
        return state, seen(self.game, state), score_of(self.game, state, mover), over, jnp.bool_(False)
