"""Two-player games, as environments by name (`envs.make("game:connect_four")`) and as values."""

import functools
from collections.abc import Callable
from typing import Any

from envs.environment import Vectorized, vectorize
from envs.games.boards import HexGame, LineGame
from envs.games.from_pgx import NAMES, PgxGame
from envs.games.game import Against, Game, Player, Turns
from envs.games.players import Greedy, Trained, Uniform, match
from fdg.arguments import check_call, checked_names
from fdg.errors import unknown_name

__all__ = [
    "OPPONENTS",
    "Against",
    "Game",
    "Greedy",
    "HexGame",
    "LineGame",
    "PgxGame",
    "Player",
    "Trained",
    "Turns",
    "Uniform",
    "connect_four",
    "factories",
    "gomoku",
    "make_of_pgx",
    "match",
    "tic_tac_toe",
]

PREFIX = "game:"  # of names in the registry
# name -> class of the `Player`, made with a game
OPPONENTS: dict[str, Callable[[Any], Any]] = {"random": Uniform, "greedy": Greedy}


@checked_names
def tic_tac_toe() -> LineGame:
    """Three in a row on a 3 x 3 board."""
    return LineGame("game:tic_tac_toe", 3, 3, 3, gravity=False)


@checked_names
def connect_four(rows: int = 6, columns: int = 7, length: int = 4) -> LineGame:
    """Stones fall; `length` in a row win."""
    return LineGame("game:connect_four", rows, columns, length, gravity=True)


@checked_names
def gomoku(size: int = 9, length: int = 5) -> LineGame:
    """`length` or more stones in a row win, on a `size` x `size` board."""
    return LineGame("game:gomoku", size, size, length, gravity=False)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories of environments by name, for the registry: an agent plays a game against an opponent."""
    games: dict[str, Callable[..., Game]] = {
        "tic_tac_toe": tic_tac_toe, "connect_four": connect_four, "gomoku": gomoku, "hex": HexGame
    }  # fmt: skip
    return {f"{PREFIX}{name}": functools.partial(_make, game) for name, game in games.items()}


def make_of_pgx(name: str, opponent: str = "random") -> Vectorized:
    """The environment of one of pgx's games, by pgx's name.

    Raises:
      UnknownNameError: no such game, or it is not a two-player game of perfect information with alternating
      moves.
    """
    if name not in NAMES:
        raise unknown_name("game of pgx", name, NAMES)
    return _make(functools.partial(PgxGame, name), opponent)


def _make(make_game: Callable[..., Game], opponent: str = "random", **sizes: Any) -> Vectorized:
    """Makes the environment of a game against an opponent, a name in `OPPONENTS`."""
    if opponent not in OPPONENTS:
        raise unknown_name("opponent", opponent, OPPONENTS)
    if isinstance(make_game, type):
        check_call(make_game, (), sizes, "parameter")
    game = make_game(**sizes)
    return vectorize(Against(game, OPPONENTS[opponent](game)))
