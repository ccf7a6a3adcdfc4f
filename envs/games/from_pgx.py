"""Two-player games of pgx (Koyama et al. 2023, arXiv 2303.17503) as an `envs.games.Game`.

Player 0 moves first, whatever number pgx gives the player who does. pgx is imported on first use.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.adapters import importing
from envs.spaces import Box

PREFIX = "pgx:"  # of its names for `envs.make`
# Games of perfect information with alternating moves.
NAMES = (
    "animal_shogi", "chess", "connect_four", "gardner_chess", "go_19x19", "go_9x9", "hex", "othello", "shogi",
    "tic_tac_toe",
)  # fmt: skip


class Position(NamedTuple):
    """pgx's state, and the number that pgx gives the first player."""

    state: Any
    first: jax.Array  # [] int32


@dataclasses.dataclass(frozen=True)
class PgxGame:
    """A game by pgx's name."""

    id: str

    @property
    def name(self) -> str:
        """`pgx:` and pgx's name."""
        return f"{PREFIX}{self.id}"

    @property
    def num_actions(self) -> int:
        """As in pgx."""
        return self._env.num_actions

    @property
    def max_moves(self) -> None:
        """None: the game ends by pgx's rules."""
        return None

    @property
    def observation_space(self) -> Box:
        """Planes `[rows, columns, channels]`, float32."""
        return Box(0.0, 1.0, self._env.observation_shape)

    def init(self, key: jax.Array) -> Position:
        """The initial position."""
        with jax.numpy_rank_promotion("allow"):  # pgx needs rank promotion
            state = self._env.init(key)
        return Position(state, state.current_player.astype(jnp.int32))

    def player(self, position: Position) -> jax.Array:
        """0 for the first player."""
        return jnp.where(position.state.current_player == position.first, 0, 1)

    def legal(self, position: Position) -> jax.Array:
        """As in pgx."""
        return position.state.legal_action_mask

    def play(self, position: Position, action: jax.Array) -> Position:
        """The position after a move."""
        with jax.numpy_rank_promotion("allow"):
            return position._replace(state=self._env.step(position.state, action))

    def outcome(self, position: Position) -> tuple[jax.Array, jax.Array]:
        """Whether pgx's game has ended, and the first player's reward."""
        state = position.state
        is_over = state.terminated | state.truncated
        return is_over, jnp.where(is_over, state.rewards[position.first], 0.0)

    def observe(self, position: Position) -> jax.Array:
        """pgx's planes, as the player to move sees them."""
        return position.state.observation.astype(jnp.float32)

    @property
    def _env(self) -> Any:
        return _env(self.id)


@functools.cache
def _env(name: str) -> Any:
    """pgx's game; imports pgx."""
    with importing(f"environment '{PREFIX}{name}' needs", "pgx", "search"):
        import pgx

        return pgx.make(name)
