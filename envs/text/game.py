"""Conversations: environments that answer text with text, such as tools; transcripts of model and game.

A `TextGame` is played in turns. `play` alternates between a model and the game, and records who said each
token: a model learns only from its own.

    prompt            said        reply       said     reply
    17*23-5=  model: ?17*23   tool: 391,  model: 386  (over)
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
    """A game's reply; every field has the leading axis `N`."""

    state: Any  # for the next turn
    tokens: jax.Array  # [N, L] int32, right-padded: the reply
    mask: jax.Array  # [N, L] bool
    reward: jax.Array  # [N] float32, for the model's last message
    done: jax.Array  # [N] bool: the conversation is over


class TextGame(Protocol):
    """A batch of conversations. A frozen, hashable value; its methods are pure, and rows independent."""

    @property
    def name(self) -> str:
        """Name in messages and logs."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the conversation."""

    @property
    def prompt_length(self) -> int:
        """`P`, the maximum number of tokens of the first prompt."""

    @property
    def response_length(self) -> int:
        """`R`, the maximum number of the model's tokens in a turn, including the stop token."""

    @property
    def reply_length(self) -> int:
        """`L`, the maximum number of the game's tokens in a turn."""

    @property
    def turns(self) -> int:
        """The model's maximum number of turns."""

    def sample(self, keys: jax.Array, split: Split = "train") -> Problem:
        """Starts conversations, one per key; `answer` is the state of the first turn."""

    def reply(self, state: Any, tokens: jax.Array, mask: jax.Array) -> Reply:
        """Replies to the model's messages, `[N, R]`."""


class Message(NamedTuple):
    """A model's message in one turn."""

    tokens: jax.Array  # [N, R] int32, right-padded
    mask: jax.Array  # [N, R] bool
    about: Any = ()  # pytree of [N, R]: values of each token, such as its log-probability


class Transcript(NamedTuple):
    """Whole conversations, left-padded to `T = P + turns (R + L)` tokens."""

    tokens: jax.Array  # [N, T] int32
    mask: jax.Array  # [N, T] bool, True at all tokens
    said: jax.Array  # [N, T] bool, True at the model's tokens, which a loss counts
    about: Any  # pytree of [N, T], 0 outside the model's tokens
    reward: Reward  # the sum over turns; its parts are the turns
    turns: jax.Array  # [N] int32, the model's turns


def checked_reply(game: TextGame, state: Any, tokens: jax.Array, mask: jax.Array) -> Reply:
    """The game's reply to `[N, R]`, with checked shapes and dtypes."""
    reply, count = game.reply(state, tokens, mask), len(tokens)
    if not isinstance(reply, Reply):
        raise FdgError(
            f"game '{game.name}': reply gives a value of type {kind_of(reply)}: return"
            " envs.text.Reply(state, tokens, mask, reward, done)"
        )
    if jax.tree.map(jnp.shape, reply.state) != jax.tree.map(jnp.shape, state):
        raise FdgError(
            f"game '{game.name}': reply returns a state of another structure or shape than it takes: keep"
            " both"
        )
    token_shape = (count, game.reply_length)
    _check_fields(game, "reply", reply, tokens=(token_shape, "int32"), mask=(token_shape, "bool"))
    _check_fields(game, "reply", reply, reward=((count,), "float32"), done=((count,), "bool"))
    return reply


def checked_sample(game: TextGame, keys: jax.Array, split: Split = "train") -> Problem:
    """Starts conversations, one per key, with checked shapes and dtypes."""
    problem, count = game.sample(keys, split), len(keys)
    if not isinstance(problem, Problem) or not isinstance(problem.prompts, Prompts):
        raise FdgError(
            f"game '{game.name}': sample gives a value of type {kind_of(problem)}: return"
            " envs.text.Problem(envs.text.Prompts(tokens, mask), answer)"
        )
    token_shape = (count, game.prompt_length)
    _check_fields(game, "sample", problem.prompts, tokens=(token_shape, "int32"), mask=(token_shape, "bool"))
    for leaf in jax.tree.leaves(problem.answer):
        if jnp.shape(leaf)[:1] != (count,):
            raise FdgError(
                f"game '{game.name}': sample gives an answer of shape {_shape(jnp.shape(leaf), count)},"
                " expected a first axis of N, one row for each key"
            )
    return problem


def _check_fields(game: TextGame, method: str, result: Any, **expected: tuple[tuple[int, ...], str]) -> None:
    """Checks that fields are arrays of these shapes and dtypes, with first axis N."""
    for name, (shape, dtype) in expected.items():
        value = getattr(result, name)
        subject = f"game '{game.name}': {method} gives {name}"
        if not isinstance(value, jax.Array | np.ndarray):
            raise FdgError(f"{subject} of type {kind_of(value)}: give an array")
        if value.shape != shape:
            count = shape[0]
            raise FdgError(
                f"{subject} of shape {_shape(value.shape, count)}, expected {_shape(shape, count)}"
            )
        if value.dtype != dtype:
            raise FdgError(f"{subject} of dtype {value.dtype}, expected {dtype}")


def _shape(shape: tuple[int, ...], count: int) -> str:
    """A shape, written with N for the batch axis.

    >>> _shape((8, 1), 8), _shape((8,), 8), _shape((), 8)
    ('(N, 1)', '(N,)', '()')
    """
    return str(shape).replace(f"({count},", "(N,", 1)


def is_game(env: Any) -> bool:
    """True if an environment replies to text; a text task only scores it."""
    return callable(getattr(env, "reply", None)) and callable(getattr(env, "sample", None))


def is_text(env: Any) -> bool:
    """True for tasks of language models: text tasks and games."""
    return isinstance(env, TextTask) or is_game(env)


def missing_members(env: Any) -> str | None:
    """The end of an error message if a game or problem lacks methods or attributes; else None."""
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
    game: TextGame,
    problem: Problem,
    speak: Callable[[Prompts, int], Message],
    pad: int | None = None,
    reply: Callable[..., Reply] | None = None,
) -> Transcript:
    """Plays conversations to their end.

    Args:
      game: the game.
      problem: from `game.sample`.
      speak: the model: maps the conversation so far, `[N, T']` left-padded with `T' = P + turn (R + L)`, and
        the turn's number to a message.
      pad: the padding token; None: the tokenizer's.
      reply: computes the game's replies; None: `game.reply`, checked.

    Returns:
      See `Transcript`. Finished conversations get no more tokens.
    """
    pad = game.tokenizer.pad if pad is None else pad
    reply = reply or functools.partial(checked_reply, game)
    context, state = problem.prompts, problem.answer
    count = context.tokens.shape[0]
    over, turns = jnp.zeros(count, jnp.bool_), jnp.zeros(count, jnp.int32)
    annotations: tuple[jax.Array, Any] | None = None  # True at the model's tokens, and their `about`
    rewards: dict[str, jax.Array] = {}
    for turn in range(game.turns):
        message = speak(context, turn)
        mask = message.mask & ~over[:, None]
        answer = reply(state, jnp.where(mask, message.tokens, pad), mask)
        reply_mask = answer.mask & ~(over | answer.done)[:, None]
        rewards[f"turn {turn + 1}"] = jnp.where(over, 0.0, answer.reward)
        state = _select_rows(over, state, answer.state)
        new = mask, message.about
        annotations = _zeros(new, context.mask.shape) if annotations is None else annotations
        rows = (
            _concatenate(context.tokens, message.tokens, answer.tokens),
            jax.tree.map(_concatenate, annotations, new, _zeros(new, reply_mask.shape)),
        )
        (tokens, annotations), filled = _compact(rows, _concatenate(context.mask, mask, reply_mask))
        context = Prompts(jnp.where(filled, tokens, pad), filled)
        turns, over = turns + ~over, over | answer.done
    assert annotations is not None
    total = sum(rewards.values(), jnp.zeros(count))
    return Transcript(context.tokens, context.mask, *annotations, Reward(total, rewards), turns)


def _concatenate(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=1)


def _zeros(annotations: Any, shape: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(shape, leaf.dtype), annotations)


def _select_rows(rows: jax.Array, a: Any, b: Any) -> Any:
    """The rows of pytree `a` where `rows` is True, of `b` elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y), a, b)


def _compact(rows: Any, mask: jax.Array) -> tuple[Any, jax.Array]:
    """Moves the entries of arrays `[N, W]` where the mask is True to the right; zeros fill the front."""
    order = jnp.argsort(mask, axis=1, stable=True)
    filled = jnp.take_along_axis(mask, order, axis=1)

    def compact_row(row: jax.Array) -> jax.Array:
        return jnp.where(filled, jnp.take_along_axis(row, order, axis=1), jnp.zeros((), row.dtype))

    return jax.tree.map(compact_row, rows), filled
