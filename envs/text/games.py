"""Two multi-turn games: guessing a number, and arithmetic with a calculator tool."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs.text import codec
from envs.text.characters import Text, concatenate, equal, literal, number, stripped, when
from envs.text.drawing import check_integer, uniform
from envs.text.expressions import evaluate
from envs.text.game import Reply
from envs.text.problems import Arithmetic
from envs.text.prompts import Prompts
from envs.text.task import Problem, Split, TextTask
from envs.text.tokenizers import CharacterTokenizer
from fdg.arguments import checked_names


@checked_names
@dataclasses.dataclass(frozen=True)
class Guess:
    """`0-99?` asks to guess a number; the game replies `more,` or `less,` to each guess.

    The reward is 1 for the right number, within `turns` guesses.

    Attributes:
      largest: the largest number; the smallest is 0.
      turns: maximum number of guesses.
    """

    largest: int = 99
    turns: int = 7
    name: ClassVar[str] = "guess"
    tokenizer: ClassVar[CharacterTokenizer] = CharacterTokenizer()
    reply_length: ClassVar[int] = 5

    def __post_init__(self) -> None:
        check_integer(self, "largest", 1, 9999)
        check_integer(self, "turns", 1, 32)

    @property
    def prompt_length(self) -> int:
        """A begin token, and `0-99?`."""
        return len(str(self.largest)) + 4

    @property
    def response_length(self) -> int:
        """A number, and an end token."""
        return len(str(self.largest)) + 1

    def sample(self, keys: jax.Array, split: Split = "train") -> Problem:
        """Numbers to guess. Both splits draw from all numbers, independently of each other."""
        salt = {"train": 0, "test": 1}[split]
        targets = jax.vmap(lambda key: uniform(jax.random.fold_in(key, salt), (), 0, self.largest))(keys)
        encoded = codec.encode(
            self.tokenizer,
            literal(f"0-{self.largest}?"),
            self.prompt_length,
            before=(self.tokenizer.bos,),
            left_padded=True,
        )
        prompts = Prompts(*[jnp.broadcast_to(part, (keys.shape[0], self.prompt_length)) for part in encoded])
        return Problem(prompts, targets)

    def reply(self, state: jax.Array, tokens: jax.Array, mask: jax.Array) -> Reply:
        """Replies `more,` or `less,`, or ends the conversation; `state [N]` is the numbers to guess."""

        def reply_one(target: jax.Array, tokens: jax.Array, mask: jax.Array) -> tuple[Any, ...]:
            text, _ = codec.decode(self.tokenizer, tokens, mask)
            guess = evaluate(text)
            is_too_high = guess.valid & (guess.numerator > target * guess.denominator)
            hint = concatenate(when(is_too_high, literal("less,")), when(~is_too_high, literal("more,")))
            is_right = guess.equals(target)
            return *codec.encode(self.tokenizer, hint, self.reply_length), is_right

        reply_tokens, reply_mask, is_right = jax.vmap(reply_one)(state, tokens, mask)
        return Reply(state, reply_tokens, reply_mask, is_right.astype(jnp.float32), is_right)


@checked_names
@dataclasses.dataclass(frozen=True)
class Calculator:
    """`17*23-5=` with a tool: `?17*23` gets the reply `391,`.

    The reply is `?,` if the message is not an expression, or if its value is no integer or has more than
    `reply_length - 2` digits. A message without a question mark in front is the answer, and ends the
    conversation; the reward is 1 if it is right.

    Attributes:
      terms: number of numbers.
      digits: digits of each number.
      turns: maximum number of the model's messages, the answer included.
    """

    terms: int = 3
    digits: int = 2
    turns: int = 3
    name: ClassVar[str] = "calculator"
    tokenizer: ClassVar[CharacterTokenizer] = CharacterTokenizer()

    def __post_init__(self) -> None:
        check_integer(self, "turns", 1, 16)
        Arithmetic(self.terms, self.digits)

    @property
    def task(self) -> TextTask:
        """The problems, without the tool."""
        return TextTask(Arithmetic(self.terms, self.digits), self.tokenizer)

    @property
    def prompt_length(self) -> int:
        """The prompt length of the problems."""
        return self.task.prompt_length

    @property
    def response_length(self) -> int:
        """A question mark, the whole expression, and an end token."""
        return self.task.problem.prompt_length + 1

    @property
    def reply_length(self) -> int:
        """A number, a sign and a comma."""
        return self.task.problem.response_length + 1

    def sample(self, keys: jax.Array, split: Split = "train") -> Problem:
        """Problems and their answers."""
        return self.task.sample(keys, split)

    def reply(self, state: Any, tokens: jax.Array, mask: jax.Array) -> Reply:
        """Replies with the tool's result, or ends the conversation."""
        problem = self.task.problem

        def reply_one(content: Any, tokens: jax.Array, mask: jax.Array) -> tuple[Any, ...]:
            text, ended = codec.decode(self.tokenizer, tokens, mask)
            calls_tool = text.codes[0] == ord("?")
            value = evaluate(Text(jnp.roll(text.codes, -1).at[-1].set(0), text.length - 1))
            quotient, digits = value.numerator // value.denominator, self.reply_length - 2
            is_integer = value.valid & (value.numerator % value.denominator == 0)
            is_shown = is_integer & (jnp.abs(quotient) < 10**digits)
            result_text = number(quotient, digits)
            result = concatenate(when(is_shown, result_text), when(~is_shown, literal("?")), literal(","))
            is_right = ended & ~calls_tool & equal(stripped(text), problem.solution(content))
            return *codec.encode(self.tokenizer, result, self.reply_length), is_right, ~calls_tool

        reply_tokens, reply_mask, is_right, done = jax.vmap(reply_one)(state, tokens, mask)
        return Reply(state, reply_tokens, reply_mask, is_right.astype(jnp.float32), done)
