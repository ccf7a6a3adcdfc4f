"""Problems of one right answer: sums, sorting, counting. Each is a few lines; `CONTRIBUTING.md` shows how to
write another.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs.text.characters import Text, character, concatenate, literal, number, numbers
from envs.text.expressions import evaluate
from envs.text.task import exact
from fdg.errors import FdgError

_FEWEST = 64  # problems there have to be, so that an eighth can be held out


def whole_number(problem: Any, field: str, low: int, high: int) -> int:
    """The value of a field, which has to be an integer within bounds.

    Raises:
      FdgError: it is not.
    """
    value = getattr(problem, field)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FdgError(
            f"task 'text:{problem.name}': {field}={value!r} must be an integer from {low} to {high}"
        )
    return value


def enough(problem: Any, count: float, fix: str) -> None:
    """Raises an `FdgError` where there are too few problems to hold some out."""
    if count < _FEWEST:
        raise FdgError(
            f"task 'text:{problem.name}': there are only {int(count)} such problems, too few to hold"
            f" some out: {fix}"
        )


def uniform(key: jax.Array, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    """Integers from `low` to `high`, both included, `[*shape] int32`."""
    count = high + 1 - low
    if count > 2**16:
        return jax.random.randint(key, shape, low, high + 1, jnp.int32)
    # One draw of bits, where `randint` makes two: the bias, below 2e-5, is nothing to notice.
    return low + (jax.random.bits(key, shape, jnp.uint32) % count).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Operation:
    """Two numbers and what becomes of them; `12+34=` asks for `46`."""

    digits: int = 2
    sign: ClassVar[str]
    name: ClassVar[str]
    instruction: ClassVar[str] = "Work this out. Answer with the number alone."
    commutes: ClassVar[bool] = False
    longest: ClassVar[int] = 8  # digits that int32 can take

    def __post_init__(self) -> None:
        whole_number(self, "digits", 1, self.longest)
        enough(self, 10 ** (2 * self.digits), "use digits=1 or more")

    @property
    def prompt_length(self) -> int:
        """Two numbers, with a sign each, an operator and `=`."""
        return 2 * (self.digits + 1) + 2

    @property
    def response_length(self) -> int:
        """A number."""
        return self.digits + 2

    def draw(self, key: jax.Array) -> jax.Array:
        """Two numbers, `[2] int32`."""
        return uniform(key, (2,), 0, 10**self.digits - 1)

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The right answer, `[] int32`."""
        raise NotImplementedError

    def prompt(self, content: jax.Array) -> Text:
        """`12+34=`."""
        digits = min(9, self.digits + 1)
        a, b = (number(content[i], digits) for i in range(2))
        return concatenate(a, literal(self.sign), b, literal("="))

    def solution(self, content: jax.Array) -> Text:
        """`46`."""
        return number(self.result(content[0], content[1]), min(9, self.response_length - 1))

    def identity(self, content: jax.Array) -> jax.Array:
        """The two numbers, in any order where that does not matter."""
        return jnp.sort(content) if self.commutes else content

    def score(self, content: jax.Array, response: Text) -> dict[str, jax.Array]:
        """1 for the number."""
        return exact(self, content, response)


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

    name, sign, commutes, longest = "multiplication", "*", True, 4

    @property
    def response_length(self) -> int:
        """Twice as many digits, and a sign."""
        return 2 * self.digits + 1

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product."""
        return a * b


class Division(_Operation):
    """`408/12=` asks for `34`; there is no remainder."""

    name, sign, longest = "division", "/", 4

    @property
    def prompt_length(self) -> int:
        """A product, a number, an operator and `=`; each number with a sign."""
        return 3 * self.digits + 4

    def draw(self, key: jax.Array) -> jax.Array:
        """A product and one of its factors, `[2] int32`."""
        other, divisor = uniform(key, (2,), 1, 10**self.digits - 1)
        return jnp.stack([other * divisor, divisor])

    def prompt(self, content: jax.Array) -> Text:
        """`408/12=`."""
        a, b = number(content[0], 2 * self.digits), number(content[1], self.digits)
        return concatenate(a, literal(self.sign), b, literal("="))

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The quotient."""
        return a // b


class Remainder(_Operation):
    """`47%5=` asks for `2`."""

    name, sign = "remainder", "%"

    def draw(self, key: jax.Array) -> jax.Array:
        """A number, and one that is at least 1, `[2] int32`."""
        a, b = uniform(key, (2,), 0, 10**self.digits - 1)
        return jnp.stack([a, jnp.maximum(b, 1)])

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """What is left."""
        return a % b


class Divisor(_Operation):
    """`12,18=` asks for `6`, the greatest common divisor."""

    name, sign, commutes = "divisor", ",", True
    instruction = "Find the greatest common divisor. Answer with the number alone."

    def result(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Their greatest common divisor; that of 0 and a number is the number (Euclid)."""
        for _ in range(math.ceil(4.785 * self.digits) + 2):  # Lamé: five steps a digit are enough
            a, b = jnp.where(b == 0, a, b), jnp.where(b == 0, 0, a % jnp.maximum(b, 1))
        return a


class Comparison(_Operation):
    """`12?34=` asks for `<`."""

    name, sign = "comparison", "?"
    instruction = "Compare the two numbers. Answer with <, = or > alone."

    def solution(self, content: jax.Array) -> Text:
        """`<`, `=` or `>`."""
        return character(ord("=") + jnp.sign(content[0] - content[1]))

    @property
    def response_length(self) -> int:
        """One character."""
        return 1


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """`3+4*2-10=` asks for `1`: products before sums.

    Attributes:
      terms: how many numbers.
      digits: of each.
    """

    terms: int = 3
    digits: int = 1
    name: ClassVar[str] = "arithmetic"
    instruction: ClassVar[str] = "Work this out. Answer with the number alone."

    def __post_init__(self) -> None:
        whole_number(self, "terms", 2, 8)
        whole_number(self, "digits", 1, 4)
        if self.terms * self.digits > 9:
            raise FdgError(
                f"task 'text:arithmetic': the product of terms={self.terms} numbers of digits={self.digits}"
                " may have more than 9 digits: use fewer"
            )

    @property
    def prompt_length(self) -> int:
        """Numbers, each with a sign, operators between them, and `=`."""
        return self.terms * (self.digits + 2)

    @property
    def response_length(self) -> int:
        """A number."""
        return 1 + min(9, self.terms * self.digits)

    def draw(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Numbers `[terms]` and operators `[terms - 1]`, from 0: plus, minus, times."""
        of_numbers, of_operators = jax.random.split(key)
        values = uniform(of_numbers, (self.terms,), 0, 10**self.digits - 1)
        return values, uniform(of_operators, (self.terms - 1,), 0, 2)

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
        """Its value."""
        return number(evaluate(self.expression(content)).numerator, self.response_length - 1)

    def identity(self, content: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Numbers and operators."""
        return jnp.concatenate(content)

    def score(self, content: tuple[jax.Array, jax.Array], response: Text) -> dict[str, jax.Array]:
        """1 for the number."""
        return exact(self, content, response)


@dataclasses.dataclass(frozen=True)
class _OfNumbers:
    """Several numbers, `3,1,2=`, and a question about them."""

    length: int = 5
    digits: int = 1
    name: ClassVar[str]
    instruction: ClassVar[str]

    def __post_init__(self) -> None:
        whole_number(self, "length", 2, 64)
        whole_number(self, "digits", 1, 8)
        fix = "use a larger length, or digits"
        enough(self, math.comb(10**self.digits + self.length - 1, self.length), fix)

    @property
    def prompt_length(self) -> int:
        """Numbers, each with a sign, and what stands behind each."""
        return self.length * (self.digits + 2)

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

    def score(self, content: jax.Array, response: Text) -> dict[str, jax.Array]:
        """1 for the answer."""
        return exact(self, content, response)


class Sorting(_OfNumbers):
    """`3,1,2=` asks for `1,2,3`."""

    name, instruction = "sorting", "Sort the numbers from the least to the largest. Answer with them alone."

    @property
    def response_length(self) -> int:
        """As many numbers."""
        return self.length * (self.digits + 2) - 1

    def solution(self, content: jax.Array) -> Text:
        """The numbers in order."""
        return numbers(jnp.sort(content), self.digits)


class Maximum(_OfNumbers):
    """`3,1,2=` asks for `3`."""

    name, instruction = "maximum", "Find the largest number. Answer with it alone."

    def solution(self, content: jax.Array) -> Text:
        """The largest."""
        return number(jnp.max(content), self.digits)


class Total(_OfNumbers):
    """`3,1,2=` asks for `6`."""

    name, instruction = "total", "Add all the numbers. Answer with the sum alone."

    @property
    def response_length(self) -> int:
        """At most two digits more, and a sign."""
        return min(9, self.digits + 2) + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self, "digits", 1, 7)

    def solution(self, content: jax.Array) -> Text:
        """The sum."""
        return number(jnp.sum(content), self.response_length - 1)


@dataclasses.dataclass(frozen=True)
class _OfLetters:
    """A word of random letters, `cab=`, and a question about it.

    Attributes:
      length: of the word.
      letters: how many of the alphabet's there are to draw from.
    """

    length: int = 6
    letters: int = 26
    name: ClassVar[str]
    instruction: ClassVar[str]

    def __post_init__(self) -> None:
        whole_number(self, "length", 2, 256)
        whole_number(self, "letters", 2, 26)
        enough(self, float(self.letters) ** min(self.length, 20), "use a larger length, or more letters")

    @property
    def prompt_length(self) -> int:
        """The word, and `=`."""
        return self.length + 1

    @property
    def response_length(self) -> int:
        """As long as the word."""
        return self.length

    def draw(self, key: jax.Array) -> jax.Array:
        """The word's codes, `[length] int32`."""
        return ord("a") + uniform(key, (self.length,), 0, self.letters - 1)

    def prompt(self, content: jax.Array) -> Text:
        """`cab=`."""
        return concatenate(self._word(content), literal("="))

    def solution(self, content: jax.Array) -> Text:
        """The right answer."""
        raise NotImplementedError

    def identity(self, content: jax.Array) -> jax.Array:
        """The word."""
        return content

    def score(self, content: jax.Array, response: Text) -> dict[str, jax.Array]:
        """1 for the answer."""
        return exact(self, content, response)

    def _word(self, codes: jax.Array) -> Text:
        return Text(codes, jnp.int32(self.length))


class Copying(_OfLetters):
    """`cab=` asks for `cab`."""

    name, instruction = "copying", "Repeat the word. Answer with it alone."

    def solution(self, content: jax.Array) -> Text:
        """The word."""
        return self._word(content)


class Reversal(_OfLetters):
    """`cab=` asks for `bac`."""

    name, instruction = "reversal", "Write the word backwards. Answer with it alone."

    def solution(self, content: jax.Array) -> Text:
        """The word backwards."""
        return self._word(content[::-1])


class Counting(_OfLetters):
    """`abca?a=` asks for `2`: how often the letter behind the question mark is in the word."""

    name, instruction = (
        "counting",
        "Count how often the letter after ? is in the word. Answer with the number.",
    )

    @property
    def prompt_length(self) -> int:
        """The word, the letter, and two signs."""
        return self.length + 3

    @property
    def response_length(self) -> int:
        """A number, with a sign."""
        return len(str(self.length)) + 1

    def draw(self, key: jax.Array) -> jax.Array:
        """The word and one of its letters, `[length + 1] int32`."""
        of_word, of_place = jax.random.split(key)
        word = super().draw(of_word)
        return jnp.append(word, word[uniform(of_place, (), 0, self.length - 1)])

    def prompt(self, content: jax.Array) -> Text:
        """`abca?a=`."""
        return concatenate(self._word(content[:-1]), literal("?"), character(content[-1]), literal("="))

    def solution(self, content: jax.Array) -> Text:
        """How often."""
        return number(jnp.sum(content[:-1] == content[-1]), len(str(self.length)))


@dataclasses.dataclass(frozen=True)
class Parity:
    """`1011=` asks for `1`: whether the number of ones is odd.

    Attributes:
      length: how many bits.
    """

    length: int = 8
    name: ClassVar[str] = "parity"
    instruction: ClassVar[str] = "Is the number of ones odd? Answer with 1 if it is, else with 0."
    response_length: ClassVar[int] = 2

    def __post_init__(self) -> None:
        whole_number(self, "length", 2, 256)
        enough(self, 2.0**self.length, "use length=6 or more")

    @property
    def prompt_length(self) -> int:
        """The bits, and `=`."""
        return self.length + 1

    def draw(self, key: jax.Array) -> jax.Array:
        """The bits, `[length] int32`."""
        return uniform(key, (self.length,), 0, 1)

    def prompt(self, content: jax.Array) -> Text:
        """`1011=`."""
        return concatenate(Text(ord("0") + content, jnp.int32(self.length)), literal("="))

    def solution(self, content: jax.Array) -> Text:
        """0 or 1."""
        return number(jnp.sum(content) % 2, 1)

    def identity(self, content: jax.Array) -> jax.Array:
        """The bits."""
        return content

    def score(self, content: jax.Array, response: Text) -> dict[str, jax.Array]:
        """1 for the bit."""
        return exact(self, content, response)


@dataclasses.dataclass(frozen=True)
class Binary:
    """`13=` asks for `1101`.

    Attributes:
      bits: of the largest number.
    """

    bits: int = 10
    name: ClassVar[str] = "binary"
    instruction: ClassVar[str] = "Write the number in binary. Answer with its digits alone."

    def __post_init__(self) -> None:
        whole_number(self, "bits", 6, 29)

    @property
    def prompt_length(self) -> int:
        """A number with a sign, and `=`."""
        return len(str(2**self.bits)) + 2

    @property
    def response_length(self) -> int:
        """The bits."""
        return self.bits

    def draw(self, key: jax.Array) -> jax.Array:
        """A number, `[1] int32`."""
        return uniform(key, (1,), 0, 2**self.bits - 1)

    def prompt(self, content: jax.Array) -> Text:
        """`13=`."""
        return concatenate(number(content[0], len(str(2**self.bits))), literal("="))

    def solution(self, content: jax.Array) -> Text:
        """Its binary digits, without zeros in front."""
        used = jnp.maximum(jnp.sum(content[0] >= 2 ** jnp.arange(self.bits)), 1)
        places = jnp.arange(self.bits)
        bits = content[0] >> jnp.clip(used - 1 - places, 0) & 1
        return Text(jnp.where(places < used, ord("0") + bits, 0).astype(jnp.int32), used.astype(jnp.int32))

    def identity(self, content: jax.Array) -> jax.Array:
        """The number."""
        return content

    def score(self, content: jax.Array, response: Text) -> dict[str, jax.Array]:
        """1 for the digits."""
        return exact(self, content, response)
