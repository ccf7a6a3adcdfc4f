"""Board games: stones in a row (tic-tac-toe, Connect Four, gomoku), and Hex."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.spaces import Box
from fdg.arguments import checked_names
from fdg.errors import FdgError


class Board(NamedTuple):
    """A position."""

    stones: jax.Array  # [rows, columns] int8: 1 of the first player, -1 of the second, 0 empty
    moves: jax.Array  # [] int32, of both players so far
    score: jax.Array  # [] float32, of the first player
    over: jax.Array  # [] bool
    groups: Any = ()  # [rows + 2, columns + 2] int32, for Hex: connected stones have equal numbers


@dataclasses.dataclass(frozen=True)
class _BoardGame:
    """Base class of stone games. Subclasses define where a move puts its stone, and who has won."""

    def init(self, key: jax.Array) -> Board:
        """An empty board."""
        return Board(
            jnp.zeros(self._shape, jnp.int8),
            jnp.int32(0),
            jnp.float32(0),
            jnp.bool_(False),
            self._initial_groups(),
        )

    def player(self, position: Board) -> jax.Array:
        """The player to move: 0 and 1 in turn."""
        return position.moves % 2

    def outcome(self, position: Board) -> tuple[jax.Array, jax.Array]:
        """`(over, score)`."""
        return position.over, position.score

    def observe(self, position: Board) -> jax.Array:
        """`[rows, columns, 2]` float32: own stones, and the other player's."""
        stone = self._own_stone(position)
        return jnp.stack([position.stones == stone, position.stones == -stone], axis=-1).astype(jnp.float32)

    @property
    def observation_space(self) -> Box:
        """Two planes of zeros and ones."""
        return Box(0.0, 1.0, (*self._shape, 2))

    def _own_stone(self, position: Board) -> jax.Array:
        """The stone of the player to move: 1 or -1, int8."""
        return (1 - 2 * self.player(position)).astype(jnp.int8)

    def _initial_groups(self) -> Any:
        return ()

    @property
    def _shape(self) -> tuple[int, int]:
        raise NotImplementedError


@checked_names
@dataclasses.dataclass(frozen=True)
class LineGame(_BoardGame):
    """The first player with `length` stones in a row, column or diagonal wins; a full board is a draw.

    With `gravity` a move is a column, and the stone falls to the lowest free place (Connect Four); else a
    move is a place, `row * columns + column`.

    >>> LineGame("game:tic_tac_toe", rows=3, columns=3, length=3, gravity=False).num_actions
    9
    """

    name: str
    rows: int
    columns: int
    length: int
    gravity: bool

    def __post_init__(self):
        for field in ("rows", "columns", "length"):
            _check_size(self.name, field, getattr(self, field))
        if self.length > max(self.rows, self.columns):
            raise FdgError(
                f"environment '{self.name}': a row of {self.length} does not fit on a board of {self.rows}"
                f" rows and {self.columns} columns: give a smaller length, or a larger board"
            )

    @property
    def num_actions(self) -> int:
        """The number of columns, or of places."""
        return self.columns if self.gravity else self.rows * self.columns

    @property
    def max_moves(self) -> int:
        """The number of places."""
        return self.rows * self.columns

    def legal(self, position: Board) -> jax.Array:
        """Columns that are not full, or places that are free."""
        free = position.stones == 0
        return free[0] if self.gravity else free.ravel()

    def play(self, position: Board, action: jax.Array) -> Board:
        """Places a stone."""
        stone, legal = self._own_stone(position), self.legal(position)[action]
        if self.gravity:
            height = jnp.sum(position.stones[:, action] != 0)
            row, column = jnp.maximum(self.rows - 1 - height, 0), action
        else:
            row, column = action // self.columns, action % self.columns
        stones = position.stones.at[row, column].set(stone)
        won = jnp.any(jnp.all(stones.ravel()[_lines(*self._shape, self.length)] == stone, axis=1))
        score = jnp.where(legal, jnp.where(won, stone, 0), -stone).astype(jnp.float32)
        moves = position.moves + 1
        return Board(stones, moves, score, (score != 0) | (moves == self.max_moves), position.groups)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.rows, self.columns


@functools.cache
def _lines(rows: int, columns: int, length: int) -> np.ndarray:
    """The places of each line: `[lines, length]` int32."""
    lines = []
    for row in range(rows):
        for column in range(columns):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                places = [(row + i * down, column + i * right) for i in range(length)]
                if all(0 <= r < rows and 0 <= c < columns for r, c in places):
                    lines.append([r * columns + c for r, c in places])
    return np.array(lines, np.int32)


@checked_names
@dataclasses.dataclass(frozen=True)
class HexGame(_BoardGame):
    """Hex: the first player connects the first and last rows, the second the first and last columns.

    A place's neighbours are above, above right, left, right, below left and below. There is no draw, and no
    swap rule. In observations, the player to move always connects the first and last rows: for the second
    player, the board and actions are transposed.

    >>> HexGame(size=5).num_actions
    25
    """

    size: int = 5
    name: ClassVar[str] = "game:hex"

    def __post_init__(self):
        _check_size(self.name, "size", self.size)

    @property
    def num_actions(self) -> int:
        """The number of places."""
        return self.size**2

    @property
    def max_moves(self) -> int:
        """The number of places; a full board has one winner."""
        return self.size**2

    def legal(self, position: Board) -> jax.Array:
        """Free places, from the side of the player to move."""
        return self._as_seen_by_mover(position, position.stones == 0).ravel()

    def observe(self, position: Board) -> jax.Array:
        """`[size, size, 2]` float32: own stones, and the other player's."""
        stone = self._own_stone(position)
        stones = self._as_seen_by_mover(position, position.stones)
        return jnp.stack([stones == stone, stones == -stone], axis=-1).astype(jnp.float32)

    def play(self, position: Board, action: jax.Array) -> Board:
        """Places a stone, and merges the groups that the stone touches."""
        stone, legal = self._own_stone(position), self.legal(position)[action]
        action_row, action_column = action // self.size, action % self.size
        row, column = jnp.where(
            stone == 1, jnp.stack([action_row, action_column]), jnp.stack([action_column, action_row])
        )
        stones = position.stones.at[row, column].set(stone)
        # A group's number has the sign of its player; the frame around the board is four groups.
        label = (_FIRST_GROUP + action).astype(jnp.int32) * stone
        groups = position.groups.at[row + 1, column + 1].set(label)
        touched = groups[row + 1 + _NEIGHBOURS[:, 0], column + 1 + _NEIGHBOURS[:, 1]]  # [6]
        own_touched = jnp.where(touched * stone > 0, touched, 0)[None, None]
        merged = (groups != 0) & jnp.any(groups[..., None] == own_touched, axis=-1)
        groups = jnp.where(merged, label, groups)
        sides = jnp.where(stone == 1, jnp.stack([groups[0, 1], groups[-1, 1]]), groups[1, jnp.array([0, -1])])
        won = sides[0] == sides[1]
        score = jnp.where(legal, jnp.where(won, stone, 0), -stone).astype(jnp.float32)
        return Board(stones, position.moves + 1, score, score != 0, groups)

    def _as_seen_by_mover(self, position: Board, board: jax.Array) -> jax.Array:
        """A board from the side of the player to move: transposed for the second player."""
        return jnp.where(self.player(position) == 0, board, board.T)

    def _initial_groups(self) -> jax.Array:
        """The groups of an empty board within its frame: each side of the frame is one group."""
        frame = np.zeros((self.size + 2, self.size + 2), np.int32)
        frame[0, 1:], frame[-1, :-1] = 1, 2  # two corners belong to rows, two to none
        frame[1:-1, 0], frame[1:-1, -1] = -1, -2
        return jnp.asarray(frame)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.size, self.size


# (rows down, columns right)
_NEIGHBOURS = np.array([(-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0)], np.int32)
_FIRST_GROUP = 3  # number of the first group of stones; the frame's groups are ±1 and ±2


def _check_size(name: str, field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 2 <= value <= 26:
        raise FdgError(f"environment '{name}': {field}={value!r}: give a whole number from 2 to 26")
