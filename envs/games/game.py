"""Two-player games, and environments of games.

A game is a small frozen value with pure functions of one position. Two environments use a game: `Against`,
where an agent plays against a player (`envs.games.players`), and `Turns`, where an agent plays both sides.

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

Position = Any  # any pytree of arrays


@runtime_checkable
class Game(Protocol):
    """A two-player zero-sum game of perfect information with alternating moves.

    A frozen, hashable value without arrays. A position is any pytree; `play` keeps its shapes and dtypes.
    Methods take one position, without batch axis.
    """

    @property
    def name(self) -> str:
        """Name in messages; also the environment's name for `envs.make`, if it has one."""

    @property
    def num_actions(self) -> int:
        """Number of possible moves, `n`."""

    @property
    def max_moves(self) -> int | None:
        """The longest game, in moves of both players; None if unlimited."""

    @property
    def observation_space(self) -> ObservationSpace:
        """The space of `observe`."""

    def init(self, key: jax.Array) -> Position:
        """The initial position."""

    def player(self, position: Position) -> jax.Array:
        """The player to move: `[]` int32, 0 for the first player, 1 for the second."""

    def legal(self, position: Position) -> jax.Array:
        """Legal moves: `[n]` bool."""

    def play(self, position: Position, action: jax.Array) -> Position:
        """The position after a move. An illegal move loses the game at once."""

    def outcome(self, position: Position) -> tuple[jax.Array, jax.Array]:
        """`(over [] bool, score [] float32)`: whether the game has ended, and player 0's score: 1 won, -1
        lost, 0 drawn or not over.
        """

    def observe(self, position: Position) -> Any:
        """The observation of the player to move, from their side of the board."""


@runtime_checkable
class Player(Protocol):
    """Chooses moves in one game; a hashable value with pure functions."""

    def begin(self, key: jax.Array) -> Any:
        """The initial memory: a pytree whose shapes and dtypes `choose` keeps, or `()`."""

    def choose(self, key: jax.Array, memory: Any, position: Position) -> tuple[jax.Array, Any]:
        """`(action [] int32, memory)` for a position where the player moves."""


def score_of(game: Game, position: Position, player: jax.Array) -> jax.Array:
    """A player's score in a position: `[]` float32, 1, -1 or 0."""
    score = game.outcome(position)[1]
    return jnp.where(player == 0, score, -score)


def seen(game: Game, position: Position) -> MaskedObservation:
    """The observation of a position, masked by legal moves; after the end of a game all moves are legal."""
    over, _ = game.outcome(position)
    return MaskedObservation(game.observe(position), game.legal(position) | over)


def play_on(game: Game, position: Position, action: jax.Array) -> Position:
    """The position after a move; unchanged after the end of the game."""
    over, _ = game.outcome(position)
    return where(over, position, game.play(position, action))


def random_move(game: Game, key: jax.Array, position: Position) -> jax.Array:
    """A uniformly random legal move: `[]` int32."""
    legal = seen(game, position).action_mask
    return jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf)).astype(jnp.int32)


def where(condition: jax.Array, new: Any, old: Any) -> Any:
    """Selects one of two pytrees by a scalar condition."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


class Seat(NamedTuple):
    """State of `Against`: a position, the agent's player, and the opponent's memory."""

    position: Position
    player: jax.Array  # [] int32: 0 if the agent moves first
    memory: Any


@dataclasses.dataclass(frozen=True)
class _GameEnvironment:
    """Properties that both environments take from their game."""

    game: Game

    @property
    def name(self) -> str:
        """Name of the game."""
        return self.game.name

    @property
    def observation_space(self) -> ObservationSpace:
        """The game's observation space."""
        return self.game.observation_space

    @property
    def action_space(self) -> Discrete:
        """An index for each move."""
        return Discrete(self.game.num_actions)


@checked
@dataclasses.dataclass(frozen=True)
class Against(_GameEnvironment):
    """A `SingleEnvironment`: an agent against an opponent. One step is the agent's move and the reply.

    A random player moves first in each game. Reward 1 if the agent won, -1 if it lost, 0 otherwise.
    """

    opponent: Player

    @property
    def max_episode_steps(self) -> int | None:
        """The agent's moves in the longest game, rounded up."""
        return None if self.game.max_moves is None else (self.game.max_moves + 1) // 2

    def reset(self, key: jax.Array) -> tuple[Seat, MaskedObservation]:
        """Starts a game; if the opponent moves first, after its first move."""
        start_key, player_key, memory_key, reply_key = jax.random.split(key, 4)
        position = self.game.init(start_key)
        player = jax.random.randint(player_key, (), 0, 2, jnp.int32)
        memory = self.opponent.begin(memory_key)
        state = self._after_reply(reply_key, position, player, memory)
        return state, seen(self.game, state.position)

    def step(
        self, key: jax.Array, state: Seat, action: jax.Array
    ) -> tuple[Seat, MaskedObservation, jax.Array, jax.Array, jax.Array]:
        """The agent's move, and the opponent's reply unless the game is over."""
        position = self.game.play(state.position, action)
        state = self._after_reply(key, position, state.player, state.memory)
        over, _ = self.game.outcome(state.position)
        reward = score_of(self.game, state.position, state.player)
        return state, seen(self.game, state.position), reward, over, jnp.bool_(False)

    def _after_reply(self, key: jax.Array, position: Position, player: jax.Array, memory: Any) -> Seat:
        """The state after the opponent's move, if the opponent is to move and the game is not over."""
        over, _ = self.game.outcome(position)
        replies = ~over & (self.game.player(position) != player)
        action, memory_after = self.opponent.choose(key, memory, position)
        position = where(replies, self.game.play(position, action), position)
        return Seat(position, player, where(replies, memory_after, memory))


@checked
@dataclasses.dataclass(frozen=True)
class Turns(_GameEnvironment):
    """A `SingleEnvironment`: an agent plays both sides, one move per step.

    Observations are those of the player to move, rewards those of the player who has just moved: 1 for the
    winning move. So the value after a move, for the next player, is the negative of the mover's value.

    Attributes:
      game: which game.
      random_moves: the largest number of random moves at the start of a game; the number is random. A game
        that these moves would end starts without them.
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
        for i, move_key in enumerate(keys):
            next_position = play_on(self.game, position, random_move(self.game, move_key, position))
            position = where(i < count, next_position, position)
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
