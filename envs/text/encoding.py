"""Encodes problems on the host, once, as tables from which programs select rows.

A tokenizer that merges characters encodes whole texts, with a library that runs on the host. On first use,
this module encodes all rows of a file, or else a fixed number of problems sampled with a fixed key.
"""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.text.characters import Text
from envs.text.codec import fit
from envs.text.drawing import is_held_out
from envs.text.rows import Row


class Ragged(NamedTuple):
    """Lists of numbers of any lengths, concatenated."""

    values: np.ndarray  # [total + 1], with a zero at the end
    starts: np.ndarray  # [rows + 1] int32

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]], dtype: Any) -> "Ragged":
        """Converts Python lists."""
        starts = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        return cls(np.fromiter(itertools.chain(*lists, [0]), dtype, int(starts[-1]) + 1), starts)

    @property
    def longest(self) -> int:
        """The length of the longest list."""
        return int(np.diff(self.starts).max(initial=0))

    def row(
        self, i: jax.Array, width: int, filler: int, left_padded: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """One list in traced code, `[width] int32`, and its mask: see `codec.fit`."""
        values, starts = jnp.asarray(self.values), jnp.asarray(self.starts)
        tokens, mask = fit(values, starts[i], starts[i + 1] - starts[i], width, filler, left_padded)
        return tokens.astype(jnp.int32), mask

    def text(self, i: jax.Array) -> Text:
        """One list, of bytes, as a text in traced code."""
        codes, is_used = self.row(i, max(1, self.longest), 0)
        return Text(codes, jnp.sum(is_used, dtype=jnp.int32))


class EncodedProblems(NamedTuple):
    """A task's problems in a tokenizer's tokens."""

    prompts: Ragged
    answers: Ragged  # each with its stop token; empty if there is no answer
    contents: Any  # pytree of arrays [rows, ...]: the problem's content
    held_out: np.ndarray  # [rows] bool
    # the answers' bytes decoded from tokens; None if they are the answers, apart from blanks around them
    decoded: Ragged | None


@functools.lru_cache(maxsize=16)
def encode_problems(problem: Any, tokenizer: Any, system: str, arguments: str, count: int) -> EncodedProblems:
    """Encodes the rows of a problem; if it has no `rows`, `count` problems that are sampled here.

    `arguments` are variables of the tokenizer's chat template, as JSON.
    """
    rows: Sequence[Row] | None = getattr(problem, "rows", None)

    def content_and_texts(content: Any) -> tuple[Any, ...]:
        texts = (problem.prompt(content), problem.solution(content)) if rows is None else ()
        return content, is_held_out(problem.identity(content)), texts

    # The tables are constants, so they are computed even if a caller is being traced.
    with jax.ensure_compile_time_eval():
        if rows is None:
            keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), count)
            arrays = jax.jit(jax.vmap(lambda key: content_and_texts(problem.draw(key))))(keys)
        else:
            arrays = jax.jit(jax.vmap(content_and_texts))(np.arange(len(rows), dtype=np.int32)[:, None])
        contents, held_out, texts = jax.tree.map(np.asarray, arrays)
        held_out = getattr(problem, "held_out", held_out)  # held-out rows may have a file of their own
    if rows is None:
        rows = [Row(prompt, answer) for prompt, answer in zip(*map(_to_strings, texts), strict=True)]
    prompts, answers, decoded = _encode_rows(
        tokenizer, rows, problem.instruction, system, json.loads(arguments or "{}")
    )
    is_lossy = any(
        text.strip() != (row.answer or "").strip() for row, text in zip(rows, decoded, strict=True)
    )
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    return EncodedProblems(
        Ragged.of(prompts, dtype),
        Ragged.of(answers, dtype),
        contents,
        held_out,
        Ragged.of([text.encode() for text in decoded], np.uint8) if is_lossy else None,
    )


@functools.lru_cache(maxsize=16)
def earlier_turns_masks(problem: Any, tokenizer: Any, system: str, arguments: str) -> Ragged:
    """For each row of a problem, a mask of the assistant's tokens in its prompt, 1 or 0."""
    settings = problem.instruction, system, json.loads(arguments or "{}")
    return Ragged.of(tokenizer.said_before(problem.rows, *settings), np.uint8)


def _to_strings(texts: Text) -> list[str]:
    codes = texts.codes.astype(np.uint8)
    return [bytes(row[:length]).decode() for row, length in zip(codes, texts.length, strict=True)]


def _encode_rows(
    tokenizer: Any, rows: Sequence[Row], instruction: str, system: str, arguments: Mapping[str, Any]
) -> tuple[Sequence[list[int]], Sequence[list[int]], Sequence[str]]:
    """For each row: the prompt's tokens; the answer's with its stop token; the answer's tokens decoded.

    Equal rows are encoded once.
    """
    row_keys = [
        (row.prompt, row.answer) if isinstance(row.prompt, str) and not row.template_arguments else id(row)
        for row in rows
    ]
    unique = dict(zip(row_keys, rows, strict=True))
    pairs = tokenizer.encode_rows([*unique.values()], instruction, system, arguments)
    encoded_by_key, stop = {}, tokenizer.stops[:1]
    for (key, row), (prompt, answer) in zip(unique.items(), pairs, strict=True):
        answer_with_stop = [] if row.answer is None else [*answer, *stop]
        encoded_by_key[key] = prompt, answer_with_stop, tokenizer.decode(answer)
    prompts, answers, decoded = zip(*(encoded_by_key[key] for key in row_keys), strict=True)
    return prompts, answers, decoded
