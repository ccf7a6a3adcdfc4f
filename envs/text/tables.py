"""Problems that are there already: lines of a file, or those of the package `reasoning-gym`."""

import dataclasses
import functools
import importlib
import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from envs.text.characters import Text
from envs.text.drawing import enough, uniform, whole_number
from envs.text.host_reward import HostReward
from envs.text.rows import Row
from envs.text.task import exact
from fdg.errors import FdgError, one_line

_PROBLEM, _ANSWER = ("problem", "question", "prompt"), ("answer", "solution", "response")


@dataclasses.dataclass(frozen=True)
class _Table:
    """Problems one of which is drawn; which are held out follows from their words."""

    instruction: str = ""
    name: ClassVar[str]

    def __post_init__(self) -> None:
        enough(self, len(self.rows), "give more of them")

    @property
    def rows(self) -> tuple[Row, ...]:
        """All problems and their answers."""
        raise NotImplementedError

    @property
    def alphabet(self) -> str:
        """The characters that a tokenizer has to have."""
        return "".join(sorted({c for row in self.rows for c in row.text + (row.answer or "")}))

    @property
    def prompt_length(self) -> int:
        """Of the longest problem."""
        return max(len(row.text.encode()) for row in self.rows)

    @property
    def response_length(self) -> int:
        """Of the longest answer."""
        return max(len((row.answer or "").encode()) for row in self.rows)

    def draw(self, key: jax.Array) -> jax.Array:
        """The number of a row, `[1] int32`."""
        return uniform(key, (1,), 0, len(self.rows) - 1)

    def prompt(self, content: jax.Array) -> Text:
        """The problem."""
        return _of(_table(self.rows, False), content)

    def solution(self, content: jax.Array) -> Text:
        """Its answer."""
        return _of(_table(self.rows, True), content)

    def identity(self, content: jax.Array) -> jax.Array:
        """A hash of the problem's words, so that one that is there twice is in one split."""
        return jnp.asarray(_hashes(self.rows))[content]

    def score(self, content: jax.Array, response: Text) -> dict[str, jax.Array]:
        """1 for just the answer."""
        return exact(self, content, response)


def _of(table: tuple[np.ndarray, np.ndarray], content: jax.Array) -> Text:
    codes, lengths = (jnp.asarray(part) for part in table)
    return Text(codes[content[0]].astype(jnp.int32), lengths[content[0]])


@functools.lru_cache(maxsize=16)
def _table(rows: tuple[Row, ...], answers: bool) -> tuple[np.ndarray, np.ndarray]:
    texts = [((row.answer or "") if answers else row.text).encode() for row in rows]
    codes = np.zeros((len(texts), max(1, *map(len, texts))), np.uint8)
    for code, text in zip(codes, texts, strict=True):
        code[: len(text)] = list(text)
    return codes, np.array([len(text) for text in texts], np.int32)


@functools.lru_cache(maxsize=16)
def _hashes(rows: tuple[Row, ...]) -> np.ndarray:
    return np.array([zlib.crc32(row.text.encode()) for row in rows], np.uint32).view(np.int32)


@dataclasses.dataclass(frozen=True)
class File(_Table):
    """Problems of a file, an object a line: `{"problem": "1+1=", "answer": "2"}`.

    Attributes:
      path: of the file; `question` or `prompt`, and `solution` or `response`, are taken too.
      instruction: what a model of language is told in front of each.
    """

    path: str = ""
    name: ClassVar[str] = "file"

    @property
    def rows(self) -> tuple[Row, ...]:
        """All lines."""
        return _read(self.path)


@functools.lru_cache(maxsize=16)
def _read(path: str) -> tuple[Row, ...]:
    if not path:
        raise FdgError("task 'text:file': give its file, as in text:file?path=problems.jsonl")
    try:
        if not pathlib.Path(path).is_file():  # a pipe or a device never ends
            raise FdgError(f"task 'text:file': '{path}' is no file")
        lines = pathlib.Path(path).read_text().splitlines()
    except FdgError:
        raise
    except (OSError, ValueError) as error:
        raise FdgError(f"task 'text:file': '{path}' cannot be read: {one_line(error)}") from error
    rows = []
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise FdgError(f"task 'text:file': line {i} of '{path}' is no JSON: {one_line(error)}") from error
        rows.append(Row(_entry(found, _PROBLEM, path, i), _entry(found, _ANSWER, path, i), found))
    return tuple(rows)


def _entry(found: Any, names: Sequence[str], path: str, line: int) -> str:
    name = next((name for name in names if isinstance(found, Mapping) and name in found), None)
    if name is None:
        raise FdgError(
            f"task 'text:file': line {line} of '{path}' has no '{names[0]}': write"
            f' {{"problem": "...", "answer": "..."}}'
        )
    return str(found[name])


@dataclasses.dataclass(frozen=True)
class ReasoningGym(_Table):
    """Problems of the package `reasoning-gym` (Stojanovski et al., arXiv 2505.24760), which judges them.

    Attributes:
      dataset: which of its data sets ("leg_counting", "chain_sum", ...), with its usual configuration.
      size: how many problems are made.
      seed: of which.
      instruction: what a model of language is told in front of each.
    """

    dataset: str = "chain_sum"
    size: int = 1000
    seed: int = 0
    name: ClassVar[str] = "reasoning_gym"

    def __post_init__(self) -> None:
        whole_number(self, "size", 1, 1_000_000)
        whole_number(self, "seed", 0, 2**31 - 1)
        super().__post_init__()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All of its questions and answers."""
        return _rows_of(self.dataset, self.size, self.seed)

    @property
    def host_reward(self) -> HostReward:
        """The data set's own score of an answer."""
        return HostReward(_Scored(self.dataset, self.size, self.seed))


@dataclasses.dataclass(frozen=True)
class _Scored:
    """What a data set says of answers; a value, so that equal tasks share their programs."""

    dataset: str
    size: int
    seed: int

    @property
    def __name__(self) -> str:
        return self.dataset

    def __call__(self, prompts: list[str], responses: list[str], answers: list[Any]) -> list[float]:
        data = _dataset(self.dataset, self.size, self.seed)
        rows = zip(responses, answers, strict=True)
        return [data.score_answer(answer=said.strip(), entry=data[int(row[0])]) for said, row in rows]


@functools.lru_cache(maxsize=4)
def _dataset(name: str, size: int, seed: int) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise FdgError(f"task 'text:reasoning_gym': pip install reasoning-gym ({one_line(error)})") from error
    try:
        return package.create_dataset(name, size=size, seed=seed)
    except Exception as error:  # of whatever the package raises
        raise FdgError(f"task 'text:reasoning_gym': dataset '{name}': {one_line(error)}") from error


@functools.lru_cache(maxsize=16)
def _rows_of(name: str, size: int, seed: int) -> tuple[Row, ...]:
    data = _dataset(name, size, seed)
    entries = (data[i] for i in range(size))
    return tuple(Row(str(entry["question"]), str(entry["answer"]), entry) for entry in entries)
