"""Evaluates arithmetic expressions of integers, such as `(3+5)*7`, in one pass over the characters.

The pass keeps two numbers for each open parenthesis: the sum so far, and the product that the next number
joins. Values are exact fractions; an expression with a value above 30 bits is invalid.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envs.text.characters import Text

_DEPTH = 8  # maximum nesting of parentheses, plus 1
_LIMIT = 2.0**30


class Value(NamedTuple):
    """The value of an expression."""

    valid: jax.Array  # [] bool: well-formed, no division by zero, no overflow
    numerator: jax.Array  # [] int32
    denominator: jax.Array  # [] int32, positive
    uses_all: jax.Array  # [] bool: it uses the given numbers, each once

    def equals(self, target: jax.Array) -> jax.Array:
        """True where the expression is valid and equals `target`, `[] bool`."""
        same = self.numerator.astype(jnp.float32) == target.astype(jnp.float32) * self.denominator
        return self.valid & same & (self.numerator == target * self.denominator)


class _Level(NamedTuple):
    """The state of one open parenthesis; in `_Pass` every field is `[_DEPTH]`."""

    sum_top: jax.Array  # the sum so far
    sum_bottom: jax.Array
    term_top: jax.Array  # the product so far, with its sign
    term_bottom: jax.Array
    divides: jax.Array  # bool: the next number divides the product instead of multiplying it


class _Pass(NamedTuple):
    levels: _Level
    depth: jax.Array
    expects_operand: jax.Array  # bool: a number, "(" or a sign must follow
    in_number: jax.Array  # bool: the previous character was a digit
    number: jax.Array  # the digits so far
    is_used: jax.Array  # [K] bool, which of the given numbers
    valid: jax.Array
    uses_given: jax.Array


def evaluate(text: Text, allowed: jax.Array | None = None) -> Value:
    """Evaluates an expression of non-negative integers, `+ - * /` and parentheses; `-` may be a sign.

    The text has no blanks. It must use the numbers `allowed`, `[K] int32`, each once (None: any numbers).

    >>> from envs.text.characters import literal
    >>> value = evaluate(literal("(1+5)*7/4"), jnp.array([7, 5, 4, 1]))
    >>> bool(value.valid), int(value.numerator), int(value.denominator), bool(value.uses_all)
    (True, 42, 4, True)
    >>> [bool(evaluate(literal(text)).valid) for text in ("1+", "2)", "3/0", "1 1", "-2*3")]
    [False, False, False, False, True]
    """
    numbers = jnp.zeros(0, jnp.int32) if allowed is None else allowed
    initial = _Pass(
        _Level(
            jnp.zeros(_DEPTH, jnp.int32),
            jnp.ones(_DEPTH, jnp.int32),
            jnp.ones(_DEPTH, jnp.int32),
            jnp.ones(_DEPTH, jnp.int32),
            jnp.zeros(_DEPTH, jnp.bool_),
        ),
        depth=jnp.int32(0),
        expects_operand=jnp.bool_(True),
        in_number=jnp.bool_(False),
        number=jnp.int32(0),
        is_used=jnp.zeros(numbers.shape, jnp.bool_),
        valid=jnp.bool_(True),
        uses_given=jnp.bool_(True),
    )
    # A final step with code 0 closes a number at the end of the text.
    codes = jnp.concatenate([text.codes, jnp.zeros(1, jnp.int32)])
    is_inside = jnp.arange(codes.shape[0]) <= text.length

    def step(state: _Pass, item: tuple[jax.Array, jax.Array]) -> tuple[_Pass, None]:
        code, is_valid = item
        next_state = _read_character(state, code, numbers)
        return jax.tree.map(lambda a, b: jnp.where(is_valid, a, b), next_state, state), None

    final, _ = jax.lax.scan(step, initial, (codes, is_inside))
    numerator, denominator, fits = _add(_level_at(final.levels, jnp.int32(0)))
    valid = final.valid & fits & ~final.expects_operand & (final.depth == 0)
    uses_all = final.uses_given & jnp.all(final.is_used)
    return Value(valid, numerator, denominator, valid & uses_all)


def _read_character(state: _Pass, code: jax.Array, allowed: jax.Array) -> _Pass:
    """The state after one character; the first non-digit closes a number."""
    is_digit = (code >= ord("0")) & (code <= ord("9"))
    after_number = _close_number(state, allowed)
    before_operator = jax.tree.map(
        lambda a, b: jnp.where(state.in_number & ~is_digit, a, b), after_number, state
    )

    appended = state.number * 10 + (code - ord("0"))
    with_digit = state._replace(
        number=jnp.where(state.in_number, appended, code - ord("0")),
        in_number=jnp.bool_(True),
        valid=state.valid & state.expects_operand & (state.number < 10**8),
    )
    after_operator = _apply_operator(before_operator._replace(in_number=jnp.bool_(False)), code)
    return jax.tree.map(lambda a, b: jnp.where(is_digit, a, b), with_digit, after_operator)


def _close_number(state: _Pass, allowed: jax.Array) -> _Pass:
    """Multiplies the open product by the number that ended, and marks the number as used."""
    is_match = (allowed == state.number) & ~state.is_used
    is_first_match = is_match & (jnp.cumsum(is_match) == 1)
    levels, fits = _multiply(state.levels, state.depth, state.number, jnp.int32(1))
    return state._replace(
        levels=levels,
        expects_operand=jnp.bool_(False),
        is_used=state.is_used | is_first_match,
        valid=state.valid & fits,
        uses_given=state.uses_given & jnp.any(is_match),
    )


def _apply_operator(state: _Pass, code: jax.Array) -> _Pass:
    """The state after a character other than a digit."""
    is_code = {name: code == ord(name) for name in "+-*/()"}
    level = _level_at(state.levels, state.depth)
    add_top, add_bottom, add_fits = _add(level)
    needs_operand, has_operand = state.expects_operand, ~state.expects_operand
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
    levels = _set_level(state.levels, state.depth, new_level)
    zero, one = jnp.int32(0), jnp.int32(1)
    opened = _set_level(state.levels, state.depth + 1, _Level(zero, one, one, one, jnp.bool_(False)))
    inner, inner_fits = _multiply(state.levels, state.depth - 1, add_top, add_bottom)
    for condition, changed in ((opens, opened), (closes, inner)):
        levels = jax.tree.map(lambda a, b, condition=condition: jnp.where(condition, a, b), changed, levels)
    is_valid = sum_sign | negation | product | opens | closes | ends
    fits = jnp.where(sum_sign | closes, add_fits, True) & jnp.where(closes, inner_fits, True)
    return state._replace(
        levels=levels,
        depth=state.depth + opens.astype(jnp.int32) - closes.astype(jnp.int32),
        expects_operand=jnp.where(ends | closes, state.expects_operand, True),
        valid=state.valid & is_valid & fits,
    )


def _level_at(levels: _Level, depth: jax.Array) -> _Level:
    return jax.tree.map(lambda x: jnp.take(x, jnp.clip(depth, 0, _DEPTH - 1)), levels)


def _set_level(levels: _Level, depth: jax.Array, level: _Level) -> _Level:
    is_selected = jnp.arange(_DEPTH) == depth
    return jax.tree.map(lambda x, new: jnp.where(is_selected, new, x), levels, level)


def _add(level: _Level) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum plus the open product as a fraction, and whether it is below 2^30."""
    left, left_fits = _checked_product(level.sum_top, level.term_bottom)
    right, right_fits = _checked_product(level.term_top, level.sum_bottom)
    bottom, bottom_fits = _checked_product(level.sum_bottom, level.term_bottom)
    fits = left_fits & right_fits & bottom_fits
    return left + right, bottom, fits & (jnp.abs(left.astype(jnp.float32) + right) < _LIMIT)


def _multiply(
    levels: _Level, depth: jax.Array, top: jax.Array, bottom: jax.Array
) -> tuple[_Level, jax.Array]:
    """Multiplies or divides the product at `depth` by a fraction; also whether the result is defined and
    below 2^30.
    """
    level = _level_at(levels, depth)
    sign = jnp.where(level.divides & (top < 0), -1, 1)
    factor = jnp.where(level.divides, sign * bottom, top)
    divisor = jnp.where(level.divides, sign * top, bottom)
    new_top, top_fits = _checked_product(level.term_top, factor)
    new_bottom, bottom_fits = _checked_product(level.term_bottom, divisor)
    changed = level._replace(term_top=new_top, term_bottom=new_bottom, divides=jnp.bool_(False))
    return _set_level(levels, depth, changed), top_fits & bottom_fits & (divisor != 0)


def _checked_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The product, or 0 on overflow, and whether it is below 2^30."""
    fits = jnp.abs(a.astype(jnp.float32) * b.astype(jnp.float32)) < _LIMIT
    return jnp.where(fits, a * b, 0), fits
