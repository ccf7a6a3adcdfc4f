"""Evaluates arithmetic expressions of integers, such as `(3+5)*7`, in one pass over the characters.

The pass keeps two values for each open parenthesis: the sum so far, and the product so far, which is not yet
added. Values are exact fractions; an expression is invalid if a numerator or denominator exceeds 30 bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envs.text.characters import Text

_DEPTH = 8  # maximum nesting of parentheses, plus 1
_LIMIT = 2.0**30  # numerators and denominators must be smaller


class Value(NamedTuple):
    """The value of an expression."""

    valid: jax.Array  # [] bool: well-formed, no division by zero, no overflow
    numerator: jax.Array  # [] int32
    denominator: jax.Array  # [] int32, positive
    uses_all: jax.Array  # [] bool: it uses the allowed numbers, each once

    def equals(self, target: jax.Array) -> jax.Array:
        """True where the expression is valid and equals `target`, `[] bool`."""
        same = self.numerator.astype(jnp.float32) == target.astype(jnp.float32) * self.denominator
        return self.valid & same & (self.numerator == target * self.denominator)


class _Level(NamedTuple):
    """The state of one open parenthesis; in `_Pass` every field is `[_DEPTH]`."""

    sum_top: jax.Array  # numerator of the sum so far
    sum_bottom: jax.Array  # its denominator
    term_top: jax.Array  # numerator of the product so far, with its sign
    term_bottom: jax.Array  # its denominator
    divides: jax.Array  # bool: the next number divides the product


class _Pass(NamedTuple):
    """The state of the pass over the characters."""

    levels: _Level
    depth: jax.Array  # number of open parentheses
    operand_next: jax.Array  # bool: a number, "(" or a sign must follow
    in_number: jax.Array  # bool: the previous character was a digit
    number: jax.Array  # the digits so far
    used: jax.Array  # [K] bool, which of the allowed numbers
    valid: jax.Array  # bool: no error so far
    uses_allowed: jax.Array  # bool: no other numbers so far


def evaluate(text: Text, allowed: jax.Array | None = None) -> Value:
    """Evaluates an expression of non-negative integers, `+ - * /` and parentheses; `-` may be a sign.

    A text with blanks is invalid. `allowed`, `[K] int32`: the numbers to use, each once; None: any numbers.

    >>> from envs.text.characters import literal
    >>> value = evaluate(literal("(1+5)*7/4"), jnp.array([7, 5, 4, 1]))
    >>> bool(value.valid), int(value.numerator), int(value.denominator), bool(value.uses_all)
    (True, 42, 4, True)
    >>> [bool(evaluate(literal(text)).valid) for text in ("1+", "2)", "3/0", "1 1", "-2*3")]
    [False, False, False, False, True]
    """
    numbers = jnp.zeros(0, jnp.int32) if allowed is None else allowed
    start = _Pass(
        _Level(
            jnp.zeros(_DEPTH, jnp.int32),
            jnp.ones(_DEPTH, jnp.int32),
            jnp.ones(_DEPTH, jnp.int32),
            jnp.ones(_DEPTH, jnp.int32),
            jnp.zeros(_DEPTH, jnp.bool_),
        ),
        depth=jnp.int32(0),
        operand_next=jnp.bool_(True),
        in_number=jnp.bool_(False),
        number=jnp.int32(0),
        used=jnp.zeros(numbers.shape, jnp.bool_),
        valid=jnp.bool_(True),
        uses_allowed=jnp.bool_(True),
    )
    # A final step with code 0 closes a number at the end of the text.
    codes = jnp.concatenate([text.codes, jnp.zeros(1, jnp.int32)])
    within_text = jnp.arange(codes.shape[0]) <= text.length

    def step(state: _Pass, item: tuple[jax.Array, jax.Array]) -> tuple[_Pass, None]:
        code, is_read = item
        new = _read_character(state, code, numbers)
        return jax.tree.map(lambda a, b: jnp.where(is_read, a, b), new, state), None

    end, _ = jax.lax.scan(step, start, (codes, within_text))
    top, bottom, fits = _add_product(_level_at(end.levels, jnp.int32(0)))
    valid = end.valid & fits & ~end.operand_next & (end.depth == 0)
    uses_all = end.uses_allowed & jnp.all(end.used)
    return Value(valid, top, bottom, valid & uses_all)


def _read_character(state: _Pass, code: jax.Array, allowed: jax.Array) -> _Pass:
    """The state after one character; the first non-digit closes a number."""
    is_digit = (code >= ord("0")) & (code <= ord("9"))
    closed = _close_number(state, allowed)
    after_number = jax.tree.map(lambda a, b: jnp.where(state.in_number & ~is_digit, a, b), closed, state)

    with_next_digit = state.number * 10 + (code - ord("0"))
    with_digit = state._replace(
        number=jnp.where(state.in_number, with_next_digit, code - ord("0")),
        in_number=jnp.bool_(True),
        valid=state.valid & state.operand_next & (state.number < 10**8),
    )
    other = _read_operator(after_number._replace(in_number=jnp.bool_(False)), code)
    return jax.tree.map(lambda a, b: jnp.where(is_digit, a, b), with_digit, other)


def _close_number(state: _Pass, allowed: jax.Array) -> _Pass:
    """Multiplies the product so far by the number that ended, and marks the number as used."""
    matching = (allowed == state.number) & ~state.used
    first = matching & (jnp.cumsum(matching) == 1)
    levels, fits = _multiply(state.levels, state.depth, state.number, jnp.int32(1))
    return state._replace(
        levels=levels,
        operand_next=jnp.bool_(False),
        used=state.used | first,
        valid=state.valid & fits,
        uses_allowed=state.uses_allowed & jnp.any(matching),
    )


def _read_operator(state: _Pass, code: jax.Array) -> _Pass:
    """The state after a character other than a digit."""
    is_code = {name: code == ord(name) for name in "+-*/()"}
    level = _level_at(state.levels, state.depth)
    add_top, add_bottom, add_fits = _add_product(level)
    needs_operand, has_operand = state.operand_next, ~state.operand_next
    sum_sign = (is_code["+"] | is_code["-"]) & has_operand
    negation = is_code["-"] & needs_operand
    product = (is_code["*"] | is_code["/"]) & has_operand
    opens = is_code["("] & needs_operand & (state.depth < _DEPTH - 1)
    closes = is_code[")"] & has_operand & (state.depth > 0)
    ends = code == 0

    summed = _Level(
        add_top, add_bottom, jnp.where(is_code["-"], -1, 1), jnp.ones_like(add_top), jnp.bool_(False)
    )
    negated = level._replace(term_top=-level.term_top)
    multiplied = level._replace(divides=is_code["/"])
    new_level = level
    for condition, changed in ((sum_sign, summed), (negation, negated), (product, multiplied)):
        new_level = jax.tree.map(
            lambda a, b, condition=condition: jnp.where(condition, a, b), changed, new_level
        )
    levels = _with_level(state.levels, state.depth, new_level)
    zero, one = jnp.int32(0), jnp.int32(1)
    opened = _with_level(state.levels, state.depth + 1, _Level(zero, one, one, one, jnp.bool_(False)))
    inner, inner_fits = _multiply(state.levels, state.depth - 1, add_top, add_bottom)
    for condition, changed in ((opens, opened), (closes, inner)):
        levels = jax.tree.map(lambda a, b, condition=condition: jnp.where(condition, a, b), changed, levels)
    is_allowed = sum_sign | negation | product | opens | closes | ends
    fits = jnp.where(sum_sign | closes, add_fits, True) & jnp.where(closes, inner_fits, True)
    return state._replace(
        levels=levels,
        depth=state.depth + opens.astype(jnp.int32) - closes.astype(jnp.int32),
        operand_next=jnp.where(ends | closes, state.operand_next, True),
        valid=state.valid & is_allowed & fits,
    )


def _level_at(levels: _Level, depth: jax.Array) -> _Level:
    return jax.tree.map(lambda x: jnp.take(x, jnp.clip(depth, 0, _DEPTH - 1)), levels)


def _with_level(levels: _Level, depth: jax.Array, level: _Level) -> _Level:
    here = jnp.arange(_DEPTH) == depth
    return jax.tree.map(lambda x, new: jnp.where(here, new, x), levels, level)


def _add_product(level: _Level) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum plus the product so far: numerator, denominator, and whether they are below the limit."""
    left, left_fits = _checked_product(level.sum_top, level.term_bottom)
    right, right_fits = _checked_product(level.term_top, level.sum_bottom)
    bottom, bottom_fits = _checked_product(level.sum_bottom, level.term_bottom)
    fits = left_fits & right_fits & bottom_fits
    return left + right, bottom, fits & (jnp.abs(left.astype(jnp.float32) + right) < _LIMIT)


def _multiply(
    levels: _Level, depth: jax.Array, top: jax.Array, bottom: jax.Array
) -> tuple[_Level, jax.Array]:
    """Multiplies or divides the product at `depth` by a fraction; also returns whether it is valid."""
    level = _level_at(levels, depth)
    sign = jnp.where(level.divides & (top < 0), -1, 1)
    factor = jnp.where(level.divides, sign * bottom, top)
    divisor = jnp.where(level.divides, sign * top, bottom)
    new_top, top_fits = _checked_product(level.term_top, factor)
    new_bottom, bottom_fits = _checked_product(level.term_bottom, divisor)
    changed = level._replace(term_top=new_top, term_bottom=new_bottom, divides=jnp.bool_(False))
    return _with_level(levels, depth, changed), top_fits & bottom_fits & (divisor != 0)


def _checked_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The product and whether it is below the limit; if it is not, 0."""
    fits = jnp.abs(a.astype(jnp.float32) * b.astype(jnp.float32)) < _LIMIT
    return jnp.where(fits, a * b, 0), fits
