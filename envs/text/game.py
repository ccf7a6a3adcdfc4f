"""Conversations: environments that answer text with text, tools among them, and what a model said in them.

A `TextGame` is played in turns. `play` alternates between a model and the game, and keeps apart what each of
them said: a model learns from its own tokens alone.

    prompt            said        reply       said     reply
    17*23-5=  model: <17*23>  tool: 391|  model: 386  (over)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from envs.text.prompts import Prompts
from envs.text.task import Problem, Reward, Split, TextProblem, TextTask
from fdg.errors import FdgError, kind_of, listed


class Reply(NamedTuple):
    """What a game answers; every field has the leading axis `N`."""

    state: Any  # for the next turn
    tokens: jax.Array  # [N, L] int32, right-padded: what it says
    mask: jax.Array  # [N, L] bool
    reward: jax.Array  # [N] float32, for what was just said
    done: jax.Array  # [N] bool: the conversation is over, and nothing is said any more


class TextGame(Protocol):
    """A batch of conversations. A frozen, hashable value; its methods are pure, and rows independent."""

    @property
    def name(self) -> str:
        """Name in messages and logs."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of all that is said."""

    @property
    def prompt_length(self) -> int:
        """`P`: tokens of the first prompt, at most."""

    @property
    def response_length(self) -> int:
        """`R`: tokens that a model may say in a turn, the one that ends it included."""

    @property
    def reply_length(self) -> int:
        """`L`: tokens that the game says in a turn, at most."""

    @property
    def turns(self) -> int:
        """How often the model speaks, at most."""

    def sample(self, keys: jax.Array, split: Split = "train") -> Problem:
        """Conversations to begin, one a key; `answer` is the state of the first turn."""

    def reply(self, state: Any, tokens: jax.Array, mask: jax.Array) -> Reply:
        """Answers what a model said, `[N, R]`."""


class Message(NamedTuple):
    """A model's message in one turn."""

    tokens: jax.Array  # [N, R] int32, right-padded
    mask: jax.Array  # [N, R] bool
    about: Any = ()  # pytree of [N, R]: values of each token, such as its log-probability


class Transcript(NamedTuple):
    """Whole conversations, left-padded to `T = P + turns (R + L)` tokens."""

    tokens: jax.Array  # [N, T] int32
    mask: jax.Array  # [N, T] bool, True at tokens of anybody
    said: jax.Array  # [N, T] bool, True at those of the model: what a loss counts
    about: Any  # pytree of [N, T], 0 where the model did not speak
    reward: Reward  # all turns together; its parts are the turns
    turns: jax.Array  # [N] int32, how often the model spoke


def replied(game: TextGame, state: Any, tokens: jax.Array, mask: jax.Array) -> Reply:
    """What a game replies to `[N, R]`, whose shapes and dtypes are checked."""
    reply, count = game.reply(state, tokens, mask), len(tokens)
    if not isinstance(reply, Reply):
        raise FdgError(
            f"game '{game.name}': reply gives a value of type {kind_of(reply)}: return"
            " envs.text.Reply(state, tokens, mask, reward, done)"
        )
    if jax.tree.map(jnp.shape, reply.state) != jax.tree.map(jnp.shape, state):
        raise FdgError(
            f"game '{game.name}': reply gives a state unlike the one it takes: keep its structure and shapes"
        )
    words = (count, game.reply_length)
    _check(game, "reply", reply, tokens=(words, "int32"), mask=(words, "bool"))
    _check(game, "reply", reply, reward=((count,), "float32"), done=((count,), "bool"))
    return reply


def sampled(game: TextGame, keys: jax.Array, split: Split = "train") -> Problem:
    """Conversations to begin, one a key, whose shapes and dtypes are checked."""
    problem, count = game.sample(keys, split), len(keys)
    if not isinstance(problem, Problem) or not isinstance(problem.prompts, Prompts):
        raise FdgError(
            f"game '{game.name}': sample gives a value of type {kind_of(problem)}: return"
            " envs.text.Problem(envs.text.Prompts(tokens, mask), answer)"
        )
    words = (count, game.prompt_length)
    _check(game, "sample", problem.prompts, tokens=(words, "int32"), mask=(words, "bool"))
    for leaf in jax.tree.leaves(problem.answer):
        if jnp.shape(leaf)[:1] != (count,):
            raise FdgError(
                f"game '{game.name}': sample gives an answer of shape {_shape(jnp.shape(leaf), count)},"
                " expected the leading axis N"
            )
    return problem


def _check(game: TextGame, method: str, found: Any, **expected: tuple[tuple[int, ...], str]) -> None:
    """That fields are arrays of these shapes and dtypes, whose first axis is N."""
    for name, (shape, dtype) in expected.items():
        value = getattr(found, name)
        whose = f"game '{game.name}': {method} gives {name}"
        if not isinstance(value, jax.Array | np.ndarray):
            raise FdgError(f"{whose} of type {kind_of(value)}: give an array")
        if value.shape != shape:
            count = shape[0]
            raise FdgError(f"{whose} of shape {_shape(value.shape, count)}, expected {_shape(shape, count)}")
        if value.dtype != dtype:
            raise FdgError(f"{whose} of dtype {value.dtype}, expected {dtype}")


def _shape(shape: tuple[int, ...], count: int) -> str:
    """A shape whose first axis is N, where it is that of the batch.

    >>> _shape((8, 1), 8), _shape((8,), 8), _shape((), 8)
    ('(N, 1)', '(N,)', '()')
    """
    return str(shape).replace(f"({count},", "(N,", 1)


def is_game(env: Any) -> bool:
    """Whether a task answers what is said, and does not only judge it."""
    return callable(getattr(env, "reply", None)) and callable(getattr(env, "sample", None))


def is_text(env: Any) -> bool:
    """Whether algorithms of language models take it: a task of text, or a game."""
    return isinstance(env, TextTask) or is_game(env)


def unfinished(env: Any) -> str | None:
    """Says which methods and attributes a game or a problem of text lacks; None of anything else."""
    if isinstance(env, type | TextTask) or hasattr(env, "reset") or hasattr(env, "step"):
        return None
    for kind in (TextGame, TextProblem):
        needed = [name for name in vars(kind) if not name.startswith("_")]
        missing = [name for name in needed if not hasattr(env, name)]
        is_problem = kind is TextProblem and not {"draw", "prompt"} & set(missing)
        if missing and (is_problem or len(missing) < len(needed) / 2):
            return (
                f"a {kind.__name__} without {listed(missing, 'and')}: it has {listed(needed, 'and')}"
                f" (envs.text.{kind.__name__})"
            )
    return None


def play(
    game: TextGame, problem: Problem, speak: Callable[[Prompts, int], Message], pad: int | None = None
) -> Transcript:
    """Plays conversations to their end.

    Args:
      game: what answers.
      problem: of `game.sample`.
      speak: the model: from the conversation so far, `[N, T']` left-padded with `T' = P + turn (R + L)`, and
        the number of the turn, to its message.
      pad: the token of places that hold nothing; the tokenizer's.

    Returns:
      See `Transcript`. In conversations that are over, nothing is said.
    """
    pad = game.tokenizer.pad if pad is None else pad
    context, state = problem.prompts, problem.answer
    count = context.tokens.shape[0]
    over, turns = jnp.zeros(count, jnp.bool_), jnp.zeros(count, jnp.int32)
    known: tuple[jax.Array, Any] | None = None  # who said each token, and what is known of it
    rewards: dict[str, jax.Array] = {}
    for turn in range(game.turns):
        spoken = speak(context, turn)
        mask = spoken.mask & ~over[:, None]
        reply = functools.partial(replied, game) if is_game(game) else game.reply
        answer = reply(state, jnp.where(mask, spoken.tokens, pad), mask)
        heard = answer.mask & ~(over | answer.done)[:, None]
        rewards[f"turn {turn + 1}"] = jnp.where(over, 0.0, answer.reward)
        state = _where(over, state, answer.state)
        new = mask, spoken.about
        known = _silent(new, context.mask.shape) if known is None else known
        rows = (
            _joined(context.tokens, spoken.tokens, answer.tokens),
            jax.tree.map(_joined, known, new, _silent(new, heard.shape)),
        )
        (tokens, known), filled = _left_padded(rows, _joined(context.mask, mask, heard))
        context = Prompts(jnp.where(filled, tokens, pad), filled)
        turns, over = turns + ~over, over | answer.done
    assert known is not None
    total = sum(rewards.values(), jnp.zeros(count))
    return Transcript(context.tokens, context.mask, *known, Reward(total, rewards), turns)


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=1)


def _silent(known: Any, shape: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(shape, leaf.dtype), known)


def _where(rows: jax.Array, a: Any, b: Any) -> Any:
    """Of two pytrees, the first in some rows and the second in the others."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y), a, b)


def _left_padded(rows: Any, mask: jax.Array) -> tuple[Any, jax.Array]:
    """Arrays `[N, W]` without the places that the mask leaves out, which come first instead as zeros."""
    order = jnp.argsort(mask, axis=1, stable=True)
    filled = jnp.take_along_axis(mask, order, axis=1)

    def moved(row: jax.Array) -> jax.Array:
        return jnp.where(filled, jnp.take_along_axis(row, order, axis=1), jnp.zeros((), row.dtype))

    return jax.tree.map(moved, rows), filled
