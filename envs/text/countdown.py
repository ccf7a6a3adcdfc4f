"""Countdown: reach a target from a few numbers, each used once (the game of TinyZero's experiments)."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from envs.text.characters import Text, character, concatenate, literal, number, numbers, stripped, when
from envs.text.drawing import check_integer, uniform
from envs.text.expressions import evaluate
from fdg.errors import FdgError

_SIGNS = "+-*/"  # indexed by `Content.signs`


class Content(NamedTuple):
    """A problem and its solution: `((n0 op n1) op n2) ...`."""

    shown: jax.Array  # [K] int32, the numbers in displayed order
    target: jax.Array  # [] int32
    steps: jax.Array  # [K] int32, the numbers in the solution's order
    signs: jax.Array  # [K - 1] int32, indices in "+-*/"


@dataclasses.dataclass(frozen=True)
class Countdown:
    """`5,3,7=56?` asks for an expression such as `(5+3)*7`.

    Every problem has a solution that applies one operation after another, with positive integers as
    intermediate results. An answer may be any expression that uses each number once and equals the target;
    its intermediate results may be fractions. `score` is 1 for such an expression, and 0.1 for an expression
    of the numbers with another value.
    """

    count: int = 3  # number of numbers
    largest: int = 20  # largest number
    target: int = 100  # the largest target
    name: ClassVar[str] = "countdown"
    instruction: ClassVar[str] = (
        "Make the number after = from the numbers before it. Use each once, with + - * / and parentheses."
        " Answer with the expression alone."
    )

    def __post_init__(self) -> None:
        check_integer(self, "count", 2, 6)
        check_integer(self, "largest", 9, 999)
        check_integer(self, "target", 10, 9999)
        if self.target < 2 * self.largest:
            raise FdgError(
                f"task 'text:countdown': target={self.target} must be at least twice largest={self.largest}"
            )

    @property
    def prompt_length(self) -> int:
        """Maximum number of characters: the numbers with their separators, and the target with `?`."""
        return self.count * (self._digits + 1) + len(str(self.target)) + 1

    @property
    def response_length(self) -> int:
        """Maximum number of characters: numbers, signs, and parentheses.

        It allows twice as many parentheses as the longest solution has, and at least 4.
        """
        return self.count * self._digits + (self.count - 1) + 4 * max(1, self.count - 2)

    @property
    def _digits(self) -> int:
        return len(str(self.largest))

    def draw(self, key: jax.Array) -> Content:
        """Samples numbers, and operations that reach a target."""
        numbers_key, signs_key, order_key = jax.random.split(key, 3)
        steps = uniform(numbers_key, (self.count,), 1, self.largest)
        weights = jax.random.uniform(signs_key, (self.count - 1, 4))
        value, signs = steps[0], []
        for i in range(1, self.count):
            n = steps[i]
            possible = jnp.stack(
                [value + n <= self.target, value > n, value * n <= self.target, value % n == 0]
            )
            sign = jnp.argmax(jnp.where(possible, weights[i - 1], -1.0)).astype(jnp.int32)
            value = jnp.stack([value + n, value - n, value * n, value // n])[sign]
            signs.append(sign)
        order = jnp.argsort(jax.random.uniform(order_key, (self.count,)))
        return Content(steps[order], value, steps, jnp.stack(signs))

    def prompt(self, content: Content) -> Text:
        """`5,3,7=56?`."""
        shown = numbers(content.shown, self._digits)
        return concatenate(shown, literal("="), number(content.target, len(str(self.target))), literal("?"))

    def solution(self, content: Content) -> Text:
        """The sampled operations, with the necessary parentheses."""
        signs = jnp.array([ord(sign) for sign in _SIGNS], jnp.int32)
        text = number(content.steps[0], self._digits)
        is_sum = jnp.bool_(False)
        for i in range(1, self.count):
            sign = content.signs[i - 1]
            needs_parentheses = is_sum & (sign >= 2)
            text = concatenate(
                when(needs_parentheses, literal("(")), text, when(needs_parentheses, literal(")"))
            )
            text = concatenate(text, character(signs[sign]), number(content.steps[i], self._digits))
            is_sum = sign < 2
        return text

    def identity(self, content: Content) -> jax.Array:
        """The sorted numbers and the target: problems that differ only in the order of numbers are equal."""
        return jnp.append(jnp.sort(content.shown), content.target)

    def score(self, content: Content, response: Text) -> dict[str, jax.Array]:
        """1 for reaching the target, 0.1 for an expression of the numbers with another value."""
        value = evaluate(stripped(response), content.shown)
        correct = value.uses_all & value.equals(content.target)
        return {
            "correct": jnp.where(correct, 1.0, 0.0),
            "format": jnp.where(value.uses_all & ~correct, 0.1, 0.0),
        }
