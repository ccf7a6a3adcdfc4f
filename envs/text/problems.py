"""Problems about numbers with one right answer, such as sums and sorting.

Each takes a few lines; see `CONTRIBUTING.md` for how to write one.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from envs.text.characters import (
    Text,
    backwards,
    character,
    concatenate,
    literal,
    number,
    numbers,
    zero_padded,
)
from envs.text.drawing import check_integer, check_num_problems, uniform
from envs.text.expressions import evaluate
from envs.text.task import OneAnswer
from fdg.arguments import check_options
from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class _Operation(OneAnswer):
    """Two numbers and an operation; `12+34=` asks for `46`."""

    digits: int = 2  # maximum number of digits of each number
    padded: bool = False  # zero-pad the numbers to `digits` digits, `07+05=`
    # write the answer reversed, `64`, so that each digit of a sum follows from two digits and a carry (Lee et
    # al. 2023, arXiv 2307.03381, section 3)
    reverse: bool = False
    smallest: int = 0  # the smallest number; 10 excludes one-digit numbers
    sign: ClassVar[str]
    name: ClassVar[str]
    question: ClassVar[str] = "Work this out. Answer with the number alone."
    commutes: ClassVar[bool] = False
    # the largest `digits`: all numbers must fit in the 9 digits that `number` writes
    max_digits: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_integer(self, "digits", 1, self.max_digits)
        check_integer(self, "smallest", 0, 10**self.digits - 1)
        check_num_problems(self, (10**self.digits - self.smallest) ** 2, "lower smallest, or use more digits")
        check_options(f"task 'text:{self.name}'", type(self), vars(self))

    @property
    def instruction(self) -> str:
        """The question, and the format of the answer."""
        return self.question + " Write it from its last character to its first." * self.reverse

    @property
    def prompt_length(self) -> int:
        """Two numbers, an operator and `=`."""
        return 2 * self.digits + 2

    @property
    def response_length(self) -> int:
        """A sign, and one digit more than the numbers have."""
        return self.digits + 2

    def draw(self, key: jax.Array) -> jax.Array:
        """Two numbers, `[2] int32`."""
        return uniform(key, (2,), self.smallest, 10**self.digits - 1)

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The right answer, `[] int32`."""
        raise NotImplementedError

    def prompt(self, content: jax.Array) -> Text:
        """`12+34=`."""
        a, b = (self._operand_text(content[i], self.digits) for i in range(2))
        return concatenate(a, literal(self.sign), b, literal("="))

    def _operand_text(self, value: jax.Array, digits: int) -> Text:
        return zero_padded(value, digits) if self.padded else number(value, min(9, digits + 1))

    def solution(self, content: jax.Array) -> Text:
        """`46`."""
        result = number(self.result(content[0], content[1]), min(9, self.response_length - 1))
        return backwards(result) if self.reverse else result

    def identity(self, content: jax.Array) -> jax.Array:
        """The two numbers, sorted if their order does not matter."""
        return jnp.sort(content) if self.commutes else content


class Addition(_Operation):
    """`12+34=` asks for `46`."""

    name, sign, commutes = "addition", "+", True

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The sum."""
        return a + b


class Subtraction(_Operation):
    """`12-34=` asks for `-22`."""

    name, sign = "subtraction", "-"

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The difference."""
        return a - b


class Multiplication(_Operation):
    """`12*34=` asks for `408`."""

    name, sign, commutes, max_digits = "multiplication", "*", True, 4

    @property
    def response_length(self) -> int:
        """Twice as many digits, and a sign."""
        return 2 * self.digits + 1

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product."""
        return a * b


class Division(_Operation):
    """`408/12=` asks for `34`; there is no remainder."""

    name, sign, max_digits = "division", "/", 4

    @property
    def prompt_length(self) -> int:
        """A product, a number, an operator and `=`."""
        return 3 * self.digits + 2

    def draw(self, key: jax.Array) -> jax.Array:
        """A product and one of its factors, `[2] int32`."""
        quotient, divisor = uniform(key, (2,), max(1, self.smallest), 10**self.digits - 1)
        return jnp.stack([quotient * divisor, divisor])

    def prompt(self, content: jax.Array) -> Text:
        """`408/12=`."""
        a, b = self._operand_text(content[0], 2 * self.digits), self._operand_text(content[1], self.digits)
        return concatenate(a, literal(self.sign), b, literal("="))

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The quotient."""
        return a // b


class Remainder(_Operation):
    """`47%5=` asks for `2`."""

    name, sign = "remainder", "%"

    def draw(self, key: jax.Array) -> jax.Array:
        """A number, and a positive number, `[2] int32`."""
        a, b = uniform(key, (2,), self.smallest, 10**self.digits - 1)
        return jnp.stack([a, jnp.maximum(b, 1)])

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The remainder."""
        return a % b


class Divisor(_Operation):
    """`12,18=` asks for `6`, the greatest common divisor."""

    name, sign, commutes = "divisor", ",", True
    question = "Find the greatest common divisor. Answer with the number alone."

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The greatest common divisor; that of 0 and a number is the number (Euclid)."""
        for _ in range(math.ceil(4.785 * self.digits) + 2):  # at most 4.785 steps per digit, plus 2 (Lamé)
            a, b = jnp.where(b == 0, a, b), jnp.where(b == 0, 0, a % jnp.maximum(b, 1))
        return a


class Comparison(_Operation):
    """`12?34=` asks for `<`."""

    name, sign = "comparison", "?"
    question = "Compare the two numbers. Answer with <, = or > alone."

    def solution(self, content: jax.Array) -> Text:
        """`<`, `=` or `>`."""
        return character(ord("=") + jnp.sign(content[0] - content[1]))

    @property
    def response_length(self) -> int:
        """One character."""
        return 1


@dataclasses.dataclass(frozen=True)
class Arithmetic(OneAnswer):
    """`3+4*2-10=` asks for `1`: products before sums."""

    terms: int = 3  # number of numbers
    digits: int = 1  # digits of each
    name: ClassVar[str] = "arithmetic"
    instruction: ClassVar[str] = "Work this out. Answer with the number alone."

    def __post_init__(self) -> None:
        check_integer(self, "terms", 2, 8)
        check_integer(self, "digits", 1, 4)
        if self.terms * self.digits > 9:
            raise FdgError(
                f"task 'text:arithmetic': the product of terms={self.terms} numbers of digits={self.digits}"
                " may have more than 9 digits: use fewer"
            )

    @property
    def prompt_length(self) -> int:
        """Numbers, operators between them, and `=`."""
        return self.terms * (self.digits + 1)

    @property
    def response_length(self) -> int:
        """A number."""
        return 1 + min(9, self.terms * self.digits)

    def draw(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Numbers `[terms]` and operators `[terms - 1]`: 0 plus, 1 minus, 2 times."""
        numbers_key, operators_key = jax.random.split(key)
        values = uniform(numbers_key, (self.terms,), 0, 10**self.digits - 1)
        return values, uniform(operators_key, (self.terms - 1,), 0, 2)

    def expression(self, content: tuple[jax.Array, jax.Array]) -> Text:
        """`3+4*2-10`."""
        values, operators = content
        signs = jnp.array([ord(sign) for sign in "+-*"], jnp.int32)
        parts = [number(values[0], self.digits)]
        for i in range(1, self.terms):
            parts += [character(signs[operators[i - 1]]), number(values[i], self.digits)]
        return concatenate(*parts)

    def prompt(self, content: tuple[jax.Array, jax.Array]) -> Text:
        """The expression, and `=`."""
        return concatenate(self.expression(content), literal("="))

    def solution(self, content: tuple[jax.Array, jax.Array]) -> Text:
        """The expression's value."""
        return number(evaluate(self.expression(content)).numerator, self.response_length - 1)

    def identity(self, content: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Numbers and operators."""
        return jnp.concatenate(content)


@dataclasses.dataclass(frozen=True)
class _NumbersProblem(OneAnswer):
    """Several numbers, `3,1,2=`, and a question about them."""

    length: int = 5  # number of numbers
    digits: int = 1  # maximum number of digits of each
    name: ClassVar[str]
    instruction: ClassVar[str]

    def __post_init__(self) -> None:
        check_integer(self, "length", 2, 64)
        check_integer(self, "digits", 1, 8)
        fix = "use a larger length, or digits"
        check_num_problems(self, math.comb(10**self.digits + self.length - 1, self.length), fix)

    @property
    def prompt_length(self) -> int:
        """Numbers and separators."""
        return self.length * (self.digits + 1)

    @property
    def response_length(self) -> int:
        """A number, with a sign."""
        return self.digits + 1

    def draw(self, key: jax.Array) -> jax.Array:
        """The numbers, `[length] int32`."""
        return uniform(key, (self.length,), 0, 10**self.digits - 1)

    def prompt(self, content: jax.Array) -> Text:
        """`3,1,2=`."""
        return concatenate(numbers(content, self.digits), literal("="))

    def solution(self, content: jax.Array) -> Text:
        """The right answer."""
        raise NotImplementedError

    def identity(self, content: jax.Array) -> jax.Array:
        """The numbers in any order."""
        return jnp.sort(content)


class Sorting(_NumbersProblem):
    """`3,1,2=` asks for `1,2,3`."""

    name, instruction = "sorting", "Sort the numbers from the least to the largest. Answer with them alone."

    @property
    def response_length(self) -> int:
        """The same numbers, and separators."""
        return self.length * (self.digits + 1) - 1

    def solution(self, content: jax.Array) -> Text:
        """The numbers in order."""
        return numbers(jnp.sort(content), self.digits)


class Maximum(_NumbersProblem):
    """`3,1,2=` asks for `3`."""

    name, instruction = "maximum", "Find the largest number. Answer with it alone."

    def solution(self, content: jax.Array) -> Text:
        """The largest number."""
        return number(jnp.max(content), self.digits)


class Total(_NumbersProblem):
    """`3,1,2=` asks for `6`."""

    name, instruction = "total", "Add all the numbers. Answer with the sum alone."

    @property
    def response_length(self) -> int:
        """At most two more digits, and a sign."""
        return min(9, self.digits + 2) + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "digits", 1, 7)

    def solution(self, content: jax.Array) -> Text:
        """The sum."""
        return number(jnp.sum(content), self.response_length - 1)
