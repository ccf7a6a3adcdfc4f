"""Problems about strings with one right answer: words, bits, binary numbers."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from envs.text.characters import Text, character, concatenate, literal, number
from envs.text.drawing import check_integer, check_num_problems, uniform
from envs.text.task import OneAnswer


@dataclasses.dataclass(frozen=True)
class _WordProblem(OneAnswer):
    """A word of random letters, `cab=`, and a question about it."""

    length: int = 6  # of the word
    letters: int = 26  # number of different letters
    name: ClassVar[str]
    instruction: ClassVar[str]

    def __post_init__(self) -> None:
        check_integer(self, "length", 2, 256)
        check_integer(self, "letters", 2, 26)
        check_num_problems(
            self, float(self.letters) ** min(self.length, 20), "use a larger length, or more letters"
        )

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

    def _word(self, codes: jax.Array) -> Text:
        return Text(codes, jnp.int32(self.length))


class Copying(_WordProblem):
    """`cab=` asks for `cab`."""

    name, instruction = "copying", "Repeat the word. Answer with it alone."

    def solution(self, content: jax.Array) -> Text:
        """The word."""
        return self._word(content)


class Reversal(_WordProblem):
    """`cab=` asks for `bac`."""

    name, instruction = "reversal", "Write the word backwards. Answer with it alone."

    def solution(self, content: jax.Array) -> Text:
        """The word backwards."""
        return self._word(content[::-1])


class Counting(_WordProblem):
    """`abca?a=` asks for `2`: how often the letter after the question mark occurs in the word."""

    name, instruction = (
        "counting",
        "Count how often the letter after ? is in the word. Answer with the number.",
    )

    @property
    def prompt_length(self) -> int:
        """The word, the letter, `?` and `=`."""
        return self.length + 3

    @property
    def response_length(self) -> int:
        """A number, with a sign."""
        return len(str(self.length)) + 1

    def draw(self, key: jax.Array) -> jax.Array:
        """The word and one of its letters, `[length + 1] int32`."""
        word_key, place_key = jax.random.split(key)
        word = super().draw(word_key)
        return jnp.append(word, word[uniform(place_key, (), 0, self.length - 1)])

    def prompt(self, content: jax.Array) -> Text:
        """`abca?a=`."""
        return concatenate(self._word(content[:-1]), literal("?"), character(content[-1]), literal("="))

    def solution(self, content: jax.Array) -> Text:
        """The count."""
        return number(jnp.sum(content[:-1] == content[-1]), len(str(self.length)))


@dataclasses.dataclass(frozen=True)
class Parity(OneAnswer):
    """`1011=` asks for `1`: the parity of the ones."""

    length: int = 8  # number of bits
    name: ClassVar[str] = "parity"
    instruction: ClassVar[str] = "Is the number of ones odd? Answer with 1 if it is, else with 0."
    response_length: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_integer(self, "length", 2, 256)
        check_num_problems(self, 2.0**self.length, "use length=6 or more")

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


@dataclasses.dataclass(frozen=True)
class Binary(OneAnswer):
    """`13=` asks for `1101`."""

    bits: int = 10  # of the largest number
    name: ClassVar[str] = "binary"
    instruction: ClassVar[str] = "Write the number in binary. Answer with its digits alone."

    def __post_init__(self) -> None:
        check_integer(self, "bits", 6, 29)

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
        """Its binary digits, without leading zeros."""
        num_bits = jnp.maximum(jnp.sum(content[0] >= 2 ** jnp.arange(self.bits)), 1)
        places = jnp.arange(self.bits)
        bits = content[0] >> jnp.clip(num_bits - 1 - places, 0) & 1
        return Text(
            jnp.where(places < num_bits, ord("0") + bits, 0).astype(jnp.int32), num_bits.astype(jnp.int32)
        )
