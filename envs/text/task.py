"""`TextTask`: samples text problems and scores responses in compiled programs.

A `TextProblem` (see `envs/text/problems.py`) is one problem: it samples content, writes it, and scores an
answer. A task adds a batch, a tokenizer, a split into training and held-out problems, and optionally a user's
reward.

Shapes: `N` problems, `P` tokens of a prompt, `R` tokens of a response.
"""

import dataclasses
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.environment import check_keys
from envs.text import codec
from envs.text.characters import Text, concatenate, equal, stripped, when
from envs.text.drawing import check_integer, is_held_out, uniform
from envs.text.encoding import EncodedProblems, earlier_turns_masks, encode_problems
from envs.text.host_reward import HostReward
from envs.text.prompts import Prompts
from envs.text.rows import Message, Row, as_json
from envs.text.tokenizers import COMMON, CharacterTokenizer, Tokenizer
from fdg.arguments import check_members, check_takes, checked_names, quoted
from fdg.errors import FdgError, FdgWarning

Split: TypeAlias = Literal["train", "test"]

# fields of `TextTask` that `envs.make` can set
OPTIONS = ("max_response", "system", "template_arguments", "table_size")

_TOKENS_WITHOUT_ANSWERS = 64  # tokens of a response if no row has an answer
_MAX_DRAWS = 1024  # maximum number of draws until one is in the wanted split


class Problem(NamedTuple):
    """A batch of problems."""

    prompts: Prompts
    answer: Any  # pytree, every leaf [N, ...]: an argument of `TextTask.reward`


class Demonstration(NamedTuple):
    """Questions with a right answer each, for imitation."""

    prompts: Prompts
    responses: jax.Array  # [N, R] int32, right-padded, the stop token included
    mask: jax.Array  # [N, R] bool


class Reward(NamedTuple):
    """The rewards of responses."""

    total: jax.Array  # [N] float32, the sum of the parts
    parts: dict[str, jax.Array]  # each [N] float32
    given: jax.Array | None = None  # [N] bool: True for responses with a reward; None: all


class TextProblem(Protocol):
    """One problem, written by a user: a frozen, hashable value with pure methods, without a batch.

    `draw` returns its *content*: any pytree of arrays with constant shapes.
    """

    @property
    def name(self) -> str:
        """Name in messages and logs."""

    @property
    def instruction(self) -> str:
        """Text before a problem, for a language model."""

    @property
    def prompt_length(self) -> int:
        """Maximum number of characters of a problem."""

    @property
    def response_length(self) -> int:
        """Maximum number of characters of an answer, without the stop token."""

    def draw(self, key: jax.Array) -> Any:
        """Samples the content of one problem with one key."""

    def prompt(self, content: Any) -> Text:
        """The problem as text."""

    def solution(self, content: Any) -> Text:
        """A right answer."""

    def identity(self, content: Any) -> jax.Array:
        """`[K] int32`: the problem's identity. Problems with equal identities are in the same split."""

    def score(self, content: Any, response: Text) -> dict[str, jax.Array]:
        """Scores a complete response: parts `[] float32` by name; the reward is their sum."""


_METHOD_ARGUMENTS = {  # arguments of the methods of a `TextProblem`
    "draw": ("key",),
    "prompt": ("content",),
    "solution": ("content",),
    "identity": ("content",),
    "score": ("content", "response"),
}


def exact(problem: Any, content: Any, response: Text) -> dict[str, jax.Array]:
    """The usual score: 1 for exactly the solution, apart from leading and trailing blanks."""
    right = equal(stripped(response), stripped(problem.solution(content)))
    return {"correct": right.astype(jnp.float32)}


class OneAnswer:
    """Base class of problems with one right answer, which scores 1; the content is the identity."""

    def identity(self, content: Any) -> jax.Array:
        """The content."""
        return content

    def score(self, content: Any, response: Text) -> dict[str, jax.Array]:
        """1 for the answer."""
        return exact(self, content, response)


@checked_names
@dataclasses.dataclass(frozen=True)
class TextTask:
    """A batch of problems; a frozen value without arrays, with traceable methods.

    Attributes:
      problem: the problem.
      tokenizer: a `CharacterTokenizer` or `HuggingFaceTokenizer`.
      host_reward: replaces the problem's own score, on the host.
      max_response: maximum tokens of a response; None: those of the longest answer.
      system: the system message of a language model.
      template_arguments: arguments of the tokenizer's chat template, a mapping such as `{"enable_thinking":
        False}`, or its JSON; stored as JSON.
      table_size: number of problems that are sampled, once, if the tokenizer is a library's and the problem
        has no rows (`envs/text/encoding.py`). With a `CharacterTokenizer`, the number is unlimited.
    """

    problem: Any  # a TextProblem
    tokenizer: Any = dataclasses.field(default_factory=lambda: CharacterTokenizer(COMMON))  # a Tokenizer
    host_reward: HostReward | None = None
    max_response: int | None = None
    system: str = ""
    template_arguments: Any = ""
    table_size: int = 8192

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "template_arguments",
            as_json(
                self.template_arguments, f"task '{self.name}': template_arguments", {"enable_thinking": False}
            ),
        )
        for method, arguments in _METHOD_ARGUMENTS.items():
            if callable(function := getattr(self.problem, method, None)):
                check_takes(function, arguments, f"{method} of problem '{self.problem.name}'")
        check_members(
            f"task '{self.name}': tokenizer",
            self.tokenizer,
            ("vocab_size", "pad", "stops", "encode", "decode", "encode_rows"),
            "give one that has, such as envs.text.HuggingFaceTokenizer(DIR)",
        )
        if not isinstance(self.system, str):
            raise FdgError(f"task '{self.name}': system={quoted(self.system)} must be a text")
        if self.max_response is not None and self.max_response < 1:
            raise FdgError(f"task '{self.name}': max_response={self.max_response} must be at least 1")
        check_integer(self.problem, "table_size", 64, 1 << 24, self.table_size)

    @property
    def name(self) -> str:
        """The name for `envs.make`."""
        return f"text:{self.problem.name}"

    @property
    def overrides(self) -> tuple[tuple[str, Any], ...]:
        """The arguments of `envs.make` for this task besides its name: fields that differ from defaults."""
        fields = dataclasses.fields(self.problem) if dataclasses.is_dataclass(self.problem) else ()
        values = [
            (field.name, getattr(self.problem, field.name), field.default) for field in fields if field.init
        ]
        options = [field for field in dataclasses.fields(self) if field.name in OPTIONS]
        values += [(field.name, getattr(self, field.name), field.default) for field in options]
        return tuple((name, value) for name, value, default in values if value != default)

    @property
    def prompt_length(self) -> int:
        """`P`: tokens of the longest prompt."""
        table = self._encoded_table
        return self.problem.prompt_length + 1 if table is None else table.prompts.longest

    @property
    def response_length(self) -> int:
        """`R`: tokens of the longest response, including the stop token; 64 if no row has an answer."""
        if self.max_response is not None:
            return self.max_response
        if self._encoded_table is None:
            return self.problem.response_length + 1
        sides = getattr(self.problem, "sides", (self.problem,))  # both answers of a preference must fit
        return max(self._table_of(side).answers.longest for side in sides) or _TOKENS_WITHOUT_ANSWERS

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self.tokenizer.stops

    def with_tokenizer(self, tokenizer: Tokenizer, max_response: int | None = None) -> "TextTask":
        """The same problems for another model's tokenizer.

        Raises:
          FdgError: the tokenizer has no token for some character of the problems.
        """
        task = dataclasses.replace(self, tokenizer=tokenizer, max_response=max_response or self.max_response)
        sides, missing = getattr(self.problem, "sides", (self.problem,)), None
        needed = "".join(getattr(side, "alphabet", COMMON) for side in sides)
        if isinstance(tokenizer, CharacterTokenizer):
            missing = next((c for c in needed if c not in tokenizer.alphabet), None)
        elif not hasattr(self.problem, "rows"):
            token = codec.token_of_code(tokenizer)
            missing = next((c for c in "".join(needed.split()) if c.isascii() and token[ord(c)] < 0), None)
        if missing is not None:
            raise FdgError(
                f"task '{self.name}': no token of its tokenizer is the single character {missing!r}: use"
                " another tokenizer or task, or train from the start on data with that character"
            )
        return task

    def with_reward(
        self, function: Any, max_response: int | None = None, weights: Sequence[float] = ()
    ) -> "TextTask":
        """The same problems, scored by a Python function of text, or by several (`HostReward`).

        Raises:
          FdgError: a function needs columns that the rows do not have.
        """
        judge = function if isinstance(function, HostReward) else HostReward(function, weights)
        judge.check(self)
        return dataclasses.replace(self, host_reward=judge, max_response=max_response or self.max_response)

    @property
    def num_rows(self) -> int | None:
        """The number of a file's training rows; None if problems are sampled."""
        table = self._encoded_table if hasattr(self.problem, "rows") else None
        return None if table is None else int(np.sum(~table.held_out))

    @property
    def num_held_out(self) -> int | None:
        """The number of a file's held-out rows; None if problems are sampled."""
        return None if self.num_rows is None else len(self.problem.rows) - self.num_rows

    def sample(self, keys: jax.Array, split: Split = "train", numbers: jax.Array | None = None) -> Problem:
        """Samples one problem per key.

        The splits are disjoint: a problem's identity determines its split.

        Args:
          keys: `[N]` typed PRNG keys.
          split: "train" or "test".
          numbers: `[N]` int32 from 0, indices of a file's rows within the split; replaces random rows.

        Returns:
          `prompts` (tokens and mask `[N, P]`, left-padded) and `answer`, for `reward`.
        """
        content = self.draw(keys, split, numbers)
        prompts = self.prompts(content)
        if self.host_reward is None:
            return Problem(prompts, content)
        return Problem(prompts, {"content": content, "prompt": prompts.tokens, "prompt_mask": prompts.mask})

    def demonstration(
        self, keys: jax.Array, split: Split = "train", numbers: jax.Array | None = None
    ) -> Demonstration:
        """Problems with a right answer each; arguments as in `sample`, which returns the same problems."""
        content = self.draw(keys, split, numbers)
        return Demonstration(self.prompts(content), *self.solutions(content))

    def draw(self, keys: jax.Array, split: Split = "train", numbers: jax.Array | None = None) -> Any:
        """Samples contents of problems, one per key `[N]`, every leaf `[N, ...]`.

        They are arguments of `prompts`, `solutions` and `drawn_content`, and without a `host_reward` also of
        `reward`. If problems are encoded in a table, a content is the index of a row, `[] int32`.

        The arguments are those of `sample`.
        """
        if split not in ("train", "test"):
            raise FdgError(f"task '{self.name}': split={split!r} must be 'train' or 'test'")
        check_keys(self.name, keys)
        is_test, table = split == "test", self._encoded_table
        if table is not None:
            rows = np.flatnonzero(table.held_out == is_test).astype(np.int32)
            if numbers is None:
                numbers = jax.vmap(lambda key: uniform(key, (), 0, len(rows) - 1))(keys)
            return jnp.asarray(rows)[numbers % len(rows)]

        def draw_one(key: jax.Array) -> Any:
            def must_redraw(carry: tuple[jax.Array, Any]) -> jax.Array:
                count, content = carry
                fits = is_held_out(self.problem.identity(content)) == is_test
                return (count == 0) | (~fits & (count < _MAX_DRAWS))

            def redraw(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                count, _ = carry
                return count + 1, self.problem.draw(jax.random.fold_in(key, count))

            shapes = jax.eval_shape(self.problem.draw, key)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return jax.lax.while_loop(must_redraw, redraw, (jnp.int32(0), zeros))[1]

        return jax.vmap(draw_one)(keys)

    def prompts(self, content: Any) -> Prompts:
        """The prompts of contents."""
        return Prompts(*jax.vmap(self._encode_prompt)(content))

    def said_before(self, content: Any) -> jax.Array:
        """Mask of the assistant's tokens from earlier turns in the prompts: `[N, P] bool`."""
        if not hasattr(self.problem, "rows"):
            return jnp.zeros((jax.tree.leaves(content)[0].shape[0], self.prompt_length), bool)
        ragged = earlier_turns_masks(self.problem, self.tokenizer, self.system, self.template_arguments)
        row = functools.partial(ragged.row, width=self.prompt_length, filler=0, left_padded=True)
        return jax.vmap(lambda i: row(i)[0] > 0)(content)

    def solutions(self, content: Any) -> tuple[jax.Array, jax.Array]:
        """A right answer to each problem: tokens `[N, R] int32`, right-padded, and their mask."""
        return jax.vmap(self._encode_answer)(content)

    def reward(self, answer: Any, tokens: jax.Array, mask: jax.Array) -> Reward:
        """The rewards of responses. A response without a stop token gets 0.

        Args:
          answer: from `sample`.
          tokens: `[N, R] int32`.
          mask: `[N, R] bool`, True up to and including the stop token.
        """
        if self.host_reward is not None:
            prompts, drawn = (answer["prompt"], answer["prompt_mask"]), self.drawn_content(answer["content"])
            return Reward(*self.host_reward.call(self, prompts, (tokens, mask), drawn))
        parts = jax.vmap(self._score)(answer, tokens, mask)
        return Reward(sum(parts.values(), jnp.zeros(tokens.shape[0])), parts)

    def texts(self, tokens: Any, mask: Any) -> list[str]:
        """Decodes concrete rows of tokens, for reports and functions on the host."""
        return decode_rows(self.tokenizer, tokens, mask)

    def prompts_of(self, problems: Sequence[str | Sequence[Message]], longest: int | None = None) -> Prompts:
        """Prompts from your own problems, texts or messages, as wide as those of `sample`.

        Args:
          problems: `N` of them.
          longest: maximum number of tokens, in place of that of `sample`.

        Raises:
          FdgError: no list of prompts; a prompt is too long, or has a character without a token.
        """
        if not isinstance(problems, list | tuple) or not problems or not all(map(_is_problem, problems)):
            raise FdgError(
                f"prompts={quoted(problems)}: give a list of texts or of lists of messages, as in"
                ' ["1+1="] or [[{"role": "user", "content": "1+1="}]]'
            )
        ids = [prompt for prompt, _ in self._encode([Row(_as_row_prompt(problem)) for problem in problems])]
        width = self.prompt_length
        if longest is not None:
            needed = max(map(len, ids))
            width = min(longest, width if needed <= width else -(-needed // 64) * 64)
        fix = "shorten it, or make a task of longer problems"
        return Prompts(*self._pad("prompt", problems, ids, width, fix, left_padded=True))

    def responses_of(
        self, texts: Sequence[str], problems: Sequence[str | Sequence[Message]] | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Your own responses: tokens `[N, R] int32`, right-padded to `response_length`, and their mask, bool.

        Args:
          texts: the `N` responses.
          problems: the `N` prompts that they answer, as in `prompts_of`, since a tokenizer may encode a text
            differently after another text. None: empty prompts.

        Raises:
          FdgError: a response is too long, or has a character without a token.
        """
        rows = [
            Row(_as_row_prompt(p), text) for p, text in zip(problems or [""] * len(texts), texts, strict=True)
        ]
        ids = [[*answer, *self.stop_tokens[:1]] for _, answer in self._encode(rows)]
        fix = "shorten it, or give the task a max_response"
        return self._pad("response", texts, ids, self.response_length, fix)

    def _pad(
        self, kind: str, texts: Sequence[Any], ids: list[list[int]], width: int, fix: str, left_padded=False
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens and mask `[N, width]`; raises an `FdgError`, which ends with `fix`, if a row is longer."""
        tokens = np.full((len(ids), width), self.tokenizer.pad, np.int32)
        mask = np.zeros(tokens.shape, np.bool_)
        for i, row in enumerate(ids):
            if len(row) > width:
                raise FdgError(
                    f"{kind} {i} {texts[i]!r:.60} has {len(row)} tokens, and task '{self.name}' allows"
                    f" {width}: {fix}"
                )
            place = slice(width - len(row), width) if left_padded else slice(len(row))
            tokens[i, place], mask[i, place] = row, True
        return jnp.asarray(tokens), jnp.asarray(mask)

    def _encode(self, rows: Sequence[Row]) -> list[tuple[list[int], list[int]]]:
        arguments = json.loads(self.template_arguments or "{}")
        return self.tokenizer.encode_rows(rows, self.problem.instruction, self.system, arguments)

    def try_out(self) -> None:
        """Calls a user's reward once (see `HostReward`), and warns of held-out prompts that are trained on.

        Called before training and before compiling. The warning is an `FdgWarning`.
        """
        if shared := getattr(self.problem, "shared", None):
            warnings.warn(shared, FdgWarning, stacklevel=2)
        if self.host_reward is not None:
            self.host_reward.try_out(self)

    @property
    def _encoded_table(self) -> EncodedProblems | None:
        """The table of the encoded problems; None if compiled programs encode each problem."""
        if isinstance(self.tokenizer, CharacterTokenizer) and not hasattr(self.problem, "rows"):
            return None
        return self._table_of(self.problem)

    def _table_of(self, problem: Any) -> EncodedProblems:
        return encode_problems(problem, self.tokenizer, self.system, self.template_arguments, self.table_size)

    def _encode_prompt(self, content: Any) -> tuple[jax.Array, jax.Array]:
        table, width, pad = self._encoded_table, self.prompt_length, self.tokenizer.pad
        if table is not None:
            return table.prompts.row(content, width, pad, left_padded=True)
        text, before = self.problem.prompt(content), (self.tokenizer.bos,)
        return codec.encode(self.tokenizer, text, width, before, left_padded=True)

    def _encode_answer(self, content: Any) -> tuple[jax.Array, jax.Array]:
        table, width, stop = self._encoded_table, self.response_length, self.stop_tokens[:1]
        if table is not None:
            return table.answers.row(content, width, self.tokenizer.pad)
        return codec.encode(self.tokenizer, self.problem.solution(content), width, after=stop)

    def _score(self, content: Any, tokens: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """The parts of one response's reward; 0 without a stop token."""
        problem = self.drawn_content(content)
        room = jax.eval_shape(self.problem.solution, problem).codes.shape[0] + 16
        response, finished = codec.decode(self.tokenizer, tokens, mask, room)
        table = self._encoded_table
        if table is not None and table.decoded is not None:
            # An answer's tokens may decode to another text. A response with that text counts as the answer.
            right = equal(stripped(response), stripped(table.decoded.text(content)))
            response = concatenate(when(right, self.problem.solution(problem)), when(~right, response))
        scores = self.problem.score(problem, response)
        return {name: jnp.where(finished, part, 0).astype(jnp.float32) for name, part in scores.items()}

    def drawn_content(self, content: Any) -> Any:
        """The content that the problem itself drew, for a result of `draw`."""
        table = self._encoded_table
        return (
            content
            if table is None
            else jax.tree.map(lambda leaf: jnp.asarray(leaf)[content], table.contents)
        )


def decode_rows(tokenizer: Tokenizer, tokens: Any, mask: Any) -> list[str]:
    """The texts of concrete rows of tokens `[N, R]`, where the mask is True."""
    rows = np.asarray(tokens)
    # a model's vocabulary may be larger than the tokenizer's
    is_shown = np.asarray(mask) & (rows < tokenizer.vocab_size)
    return [tokenizer.decode(row[shown].tolist()) for row, shown in zip(rows, is_shown, strict=True)]


def _is_problem(value: Any) -> bool:
    """True for a text or messages."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return isinstance(value, str) or (is_list and all(map(_is_message, value)))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and getattr(value.get("content"), "ndim", 0) == 0


def _as_row_prompt(problem: str | Sequence[Message]) -> str | tuple[Message, ...]:
    return problem if isinstance(problem, str) else tuple(problem)
