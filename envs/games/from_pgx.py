"""Two-player games of pgx (Koyama et al. 2023, arXiv 2303.17503) as an `envs.games.Game`.

Player 0 is who begins, whatever pgx numbers it. pgx is imported at first use.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.adapters import importing
from envs.spaces import Box

PREFIX = "pgx:"
# Those in which players move in turn and see everything.
NAMES = (
    "animal_shogi", "chess", "connect_four", "gardner_chess", "go_19x19", "go_9x9", "hex", "othello", "shogi",
    "tic_tac_toe",
)  # fmt: skip


class Position(NamedTuple):
    """pgx's state, and which of its players began."""

    state: Any
    first: jax.Array  # [] int32


@dataclasses.dataclass(frozen=True)
class PgxGame:
    """A game of pgx by its name there."""

    id: str

    @property
    def name(self) -> str:
        """`pgx:` and its name there."""
        return f"{PREFIX}{self.id}"

    @property
    def num_actions(self) -> int:
        """As of pgx."""
        return self._env.num_actions

    @property
    def max_moves(self) -> None:
        """Not known here: a game ends by pgx's own rules."""
        return None

    @property
    def observation_space(self) -> Box:
        """Planes `[rows, columns, channels]`, float32."""
        return Box(0.0, 1.0, self._env.observation_shape)

    def init(self, key: jax.Array) -> Position:
        """The position before the first move."""
        with jax.numpy_rank_promotion("allow"):  # pgx is written for it
            state = self._env.init(key)
        return Position(state, state.current_player.astype(jnp.int32))

    def player(self, position: Position) -> jax.Array:
        """0 for who began."""
        return jnp.where(position.state.current_player == position.first, 0, 1)

    def legal(self, position: Position) -> jax.Array:
        """As of pgx."""
        return position.state.legal_action_mask

    def play(self, position: Position, action: jax.Array) -> Position:
        """A move."""
        with jax.numpy_rank_promotion("allow"):
            return position._replace(state=self._env.step(position.state, action))

    def outcome(self, position: Position) -> tuple[jax.Array, jax.Array]:
        """pgx's `terminated`, and the reward of who began."""
        state = position.state
        over = state.terminated | state.truncated
        return over, jnp.where(over, state.rewards[position.first], 0.0)

    def observe(self, position: Position) -> jax.Array:
        """pgx's planes, of the player whose move it is."""
        return position.state.observation.astype(jnp.float32)

    @property
    def _env(self) -> Any:
        return _env(self.id)


@functools.cache
def _env(name: str) -> Any:
    with importing(f"environment '{PREFIX}{name}' needs", "pgx", "search"):
        import pgx

        return pgx.make(name)
