"""`TextTask`: problems in words, and what answers are worth; written, read and judged in compiled programs.

A `TextProblem` (see `envs/text/problems.py`) is one problem: how its content is drawn, how it is written,
how an answer is scored. A task puts a batch, a tokenizer, the division into training and held-out problems,
and perhaps a reward of one's own around it.

Letters in shapes: `N` problems, `P` tokens of a prompt, `R` tokens of a response.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.environment import check_keys
from envs.text import codec
from envs.text.characters import Text, equal, stripped
from envs.text.host_reward import HostReward
from envs.text.prompts import Prompts
from envs.text.tokenizers import COMMON, CharacterTokenizer, Tokenizer
from fdg.errors import FdgError

Split: TypeAlias = Literal["train", "test"]

_HELD_OUT = 8  # one problem in so many is held out
_DRAWS = 1024  # until one of the wanted split comes up, at most


class Problem(NamedTuple):
    """A batch of problems."""

    prompts: Prompts
    answer: Any  # pytree, every leaf [N, ...]: what `TextTask.reward` needs to know


class Demonstration(NamedTuple):
    """Questions with a right answer each, for learning by imitation."""

    prompts: Prompts
    responses: jax.Array  # [N, R] int32, right-padded, the stop token included
    mask: jax.Array  # [N, R] bool


class Reward(NamedTuple):
    """What responses are worth."""

    total: jax.Array  # [N] float32, the sum of the parts
    parts: dict[str, jax.Array]  # each [N] float32


class TextProblem(Protocol):
    """One problem; what a user writes. A frozen, hashable value with pure methods, without a batch.

    What `draw` gives is its *content*: any pytree of arrays, of shapes that do not change.
    """

    @property
    def name(self) -> str:
        """Name in messages and logs."""

    @property
    def instruction(self) -> str:
        """What a model of language is told in front of a problem."""

    @property
    def prompt_length(self) -> int:
        """Characters of a problem, at most."""

    @property
    def response_length(self) -> int:
        """Characters of an answer, at most, without the token that ends it."""

    def draw(self, key: jax.Array) -> Any:
        """The content of one problem, from one key."""

    def prompt(self, content: Any) -> Text:
        """The problem in words."""

    def solution(self, content: Any) -> Text:
        """A right answer."""

    def identity(self, content: Any) -> jax.Array:
        """`[K] int32`: what makes it this problem. Two with equal numbers are both held out, or neither."""

    def score(self, content: Any, response: Text) -> dict[str, jax.Array]:
        """What a complete response is worth, in parts `[] float32` by name; the reward is their sum."""


def exact(problem: Any, content: Any, response: Text) -> dict[str, jax.Array]:
    """The usual score: 1 for just the solution, blanks around it aside."""
    return {"correct": equal(stripped(response), problem.solution(content)).astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class TextTask:
    """Problems by the batch; a frozen value that holds no arrays, whose methods trace.

    Attributes:
      problem: what is asked.
      tokenizer: a `CharacterTokenizer` or `HuggingFaceTokenizer`.
      host_reward: judges in place of the problem's own score, on the host.
      max_response: tokens of a response; None: what the longest answer takes.
    """

    problem: Any  # a TextProblem
    tokenizer: Any = dataclasses.field(default_factory=lambda: CharacterTokenizer(COMMON))  # a Tokenizer
    host_reward: HostReward | None = None
    max_response: int | None = None

    def __post_init__(self) -> None:
        if self.max_response is not None and self.max_response < 1:
            raise FdgError(f"task '{self.name}': max_response={self.max_response} must be at least 1")

    @property
    def name(self) -> str:
        """Name that `envs.make` knows it by."""
        return f"text:{self.problem.name}"

    @property
    def overrides(self) -> tuple[tuple[str, Any], ...]:
        """What `envs.make` takes beside the name to make this task: the parameters that are not the usual
        ones.
        """
        fields = dataclasses.fields(self.problem) if dataclasses.is_dataclass(self.problem) else ()
        given = [(field.name, getattr(self.problem, field.name), field.default) for field in fields]
        given.append(("max_response", self.max_response, None))
        return tuple((name, value) for name, value, usual in given if value != usual)

    @property
    def prompt_length(self) -> int:
        """`P`: tokens of the longest prompt."""
        before, after = self._frame
        return len(before) + self.problem.prompt_length + len(after)

    @property
    def response_length(self) -> int:
        """`R`: tokens of the longest response, the token that ends it included."""
        return self.max_response or self.problem.response_length + 1

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens after which a response is over."""
        return self.tokenizer.stops

    def with_tokenizer(self, tokenizer: Tokenizer, max_response: int | None = None) -> "TextTask":
        """The same problems for another model.

        Raises:
          FdgError: no token of it is some character that the problems need.
        """
        changed = dataclasses.replace(
            self, tokenizer=tokenizer, max_response=max_response or self.max_response
        )
        token, needed = tokenizer.token_of_code(), getattr(self.problem, "alphabet", COMMON)
        missing = [c for c in needed if token[ord(c)] < 0]
        if missing:
            raise FdgError(
                f"task '{self.name}': no token of its tokenizer is just the character {missing[0]!r}"
            )
        return changed

    def with_reward(self, function: Any, max_response: int | None = None) -> "TextTask":
        """The same problems, judged by a Python function on text; see `HostReward`."""
        judge = function if isinstance(function, HostReward) else HostReward(function)
        return dataclasses.replace(self, host_reward=judge, max_response=max_response or self.max_response)

    def sample(self, keys: jax.Array, split: Split = "train") -> Problem:
        """Draws one problem a key.

        Problems of the two splits are never the same: which one a problem belongs to follows from its
        identity.

        Args:
          keys: `[N]` typed PRNG keys.
          split: "train" or "test".

        Returns:
          `prompts` (tokens and mask `[N, P]`, left-padded) and `answer`, for `reward`.
        """
        content = self.draw(keys, split)
        prompts = self.prompts(content)
        if self.host_reward is None:
            return Problem(prompts, content)
        return Problem(prompts, {"content": content, "prompt": prompts.tokens, "prompt_mask": prompts.mask})

    def demonstration(self, keys: jax.Array, split: Split = "train") -> Demonstration:
        """Problems with a right answer each, `[N]` keys as for `sample`, which draws the same ones."""
        content = self.draw(keys, split)
        return Demonstration(self.prompts(content), *self.solutions(content))

    def draw(self, keys: jax.Array, split: Split = "train") -> Any:
        """Contents of problems, one a key `[N]`, every leaf `[N, ...]`: what `prompts` and `solutions`
        write.
        """
        if split not in ("train", "test"):
            raise FdgError(f"task '{self.name}': split={split!r} must be 'train' or 'test'")
        check_keys(self.name, keys)
        held_out = split == "test"

        def one(key: jax.Array) -> Any:
            def unfit(carry: tuple[jax.Array, Any]) -> jax.Array:
                count, content = carry
                fits = _is_held_out(self.problem.identity(content)) == held_out
                return (count == 0) | (~fits & (count < _DRAWS))

            def again(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                count, _ = carry
                return count + 1, self.problem.draw(jax.random.fold_in(key, count))

            shapes = jax.eval_shape(self.problem.draw, key)
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return jax.lax.while_loop(unfit, again, (jnp.int32(0), nothing))[1]

        return jax.vmap(one)(keys)

    def prompts(self, content: Any) -> Prompts:
        """The problems of `draw` in words."""
        return Prompts(*jax.vmap(self._prompt)(content))

    def solutions(self, content: Any) -> tuple[jax.Array, jax.Array]:
        """A right answer to each problem of `draw`: tokens `[N, R] int32`, right-padded, and their mask."""
        return jax.vmap(self._response)(content)

    def reward(self, answer: Any, tokens: jax.Array, mask: jax.Array) -> Reward:
        """What responses are worth. One that does not end within its `R` tokens is worth nothing.

        Args:
          answer: of `sample`.
          tokens: `[N, R] int32`.
          mask: `[N, R] bool`, True up to the stop token and at it.
        """
        if self.host_reward is not None:
            return self._judged(answer, tokens, mask, self.host_reward)
        parts = jax.vmap(self._score)(answer, tokens, mask)
        return Reward(sum(parts.values(), jnp.zeros(tokens.shape[0])), parts)

    def texts(self, tokens: Any, mask: Any) -> list[str]:
        """Rows of tokens that have been computed as text, for reports and functions on the host."""
        rows, shown = np.asarray(tokens), np.asarray(mask)
        shown = shown & (rows < self.tokenizer.vocab_size)  # a model may have more rows than the tokenizer
        return [self.tokenizer.decode(row[at].tolist()) for row, at in zip(rows, shown, strict=True)]

    def prompts_of(self, texts: list[str]) -> Prompts:
        """Prompts of problems that somebody wrote, as wide as those of `sample`.

        Raises:
          FdgError: one is longer than the longest problem, or has a character without a token.
        """
        before, after = self._frame
        tokens = np.full((len(texts), self.prompt_length), self.tokenizer.pad, np.int32)
        mask = np.zeros(tokens.shape, np.bool_)
        for i, text in enumerate(texts):
            ids = [*before, *self.tokenizer.encode(text), *after]
            if len(ids) > self.prompt_length:
                raise FdgError(
                    f"prompt {i} {text!r:.60} has {len(ids)} tokens, and task '{self.name}' has room for"
                    f" {self.prompt_length}: shorten it, or make a task of longer problems"
                )
            tokens[i, self.prompt_length - len(ids) :], mask[i, self.prompt_length - len(ids) :] = ids, True
        return Prompts(jnp.asarray(tokens), jnp.asarray(mask))

    def responses_of(self, texts: list[str]) -> tuple[jax.Array, jax.Array]:
        """Responses that somebody wrote, as those of `solutions`: tokens `[N, R] int32`, and their mask.

        Raises:
          FdgError: one is longer than the longest response, or has a character without a token.
        """
        tokens = np.full((len(texts), self.response_length), self.tokenizer.pad, np.int32)
        mask = np.zeros(tokens.shape, np.bool_)
        for i, text in enumerate(texts):
            ids = [*self.tokenizer.encode(text), *self.stop_tokens[:1]]
            if len(ids) > self.response_length:
                raise FdgError(
                    f"response {i} {text!r:.60} has {len(ids)} tokens, and task '{self.name}' has room for"
                    f" {self.response_length}: shorten it, or give the task a max_response"
                )
            tokens[i, : len(ids)], mask[i, : len(ids)] = ids, True
        return jnp.asarray(tokens), jnp.asarray(mask)

    @property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _frame(self.tokenizer, self.problem.instruction)

    def _prompt(self, content: Any) -> tuple[jax.Array, jax.Array]:
        text, (before, after) = self.problem.prompt(content), self._frame
        return codec.written(self.tokenizer, text, self.prompt_length, before, after, left_padded=True)

    def _response(self, content: Any) -> tuple[jax.Array, jax.Array]:
        text, stop = self.problem.solution(content), self.stop_tokens[:1]
        return codec.written(self.tokenizer, text, self.response_length, after=stop)

    def _score(self, content: Any, tokens: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        response, finished = codec.read(self.tokenizer, tokens, mask)
        scores = self.problem.score(content, response)
        return {name: jnp.where(finished, part, 0).astype(jnp.float32) for name, part in scores.items()}

    def _judged(self, answer: Any, tokens: jax.Array, mask: jax.Array, judge: HostReward) -> Reward:
        total = judge.call(self, (answer["prompt"], answer["prompt_mask"]), (tokens, mask), answer["content"])
        return Reward(total, {judge.name: total})


def _is_held_out(identity: jax.Array) -> jax.Array:
    """Whether a problem is of the eighth that is held out: by a hash of its numbers (murmur3's mixing)."""
    count = identity.shape[0]
    odd = (np.arange(1, count + 1, dtype=np.uint64) * 0x9E3779B1 % 2**32).astype(np.uint32) | 1
    mixed = _mix(identity.astype(jnp.uint32) + jnp.uint32(0x85EBCA6B))
    return _mix(jnp.sum(mixed * odd, dtype=jnp.uint32)) % _HELD_OUT == 0


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@functools.cache
def _frame(tokenizer: Any, instruction: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before, after = tokenizer.frame(instruction)
    return tuple(before), tuple(after)
