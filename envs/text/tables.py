"""Ready-made problems: rows of a file, or of the package `reasoning-gym`."""

import dataclasses
import functools
import hashlib
import importlib
import os
import zlib
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.text import columns, files
from envs.text.characters import Text
from envs.text.drawing import check_integer, check_num_problems, is_held_out, uniform
from envs.text.encoding import Ragged
from envs.text.host_reward import HostReward
from envs.text.rows import Row
from envs.text.task import exact
from fdg.errors import FdgError, one_line
from fdg.reading import read_bytes, stamp

FILES = ("path", "test_path")  # fields that are paths of files


@dataclasses.dataclass(frozen=True)
class Table:
    """Samples rows; an eighth of the problems is held out, by a hash of their text."""

    instruction: str = ""
    name: ClassVar[str]
    _too_few_fix: ClassVar[str] = "give more of them"

    def __post_init__(self) -> None:
        check_num_problems(self, len({row.text for row in self.rows}), self._too_few_fix, fewest=2)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All problems and their answers."""
        raise NotImplementedError

    @property
    def held_out(self) -> np.ndarray:
        """Held-out rows, `[rows] bool`: an eighth of the problems, at least one."""
        return _held_out_eighth(self.rows)

    @property
    def unanswered(self) -> str | None:
        """The location of a row without an answer; None if there is none."""
        return None

    @property
    def alphabet(self) -> str:
        """The characters that a tokenizer needs."""
        return "".join(sorted({c for row in self.rows for c in row.text + (row.answer or "")}))

    @property
    def prompt_length(self) -> int:
        """The length of the longest problem."""
        return max(len(row.text.encode()) for row in self.rows)

    @property
    def response_length(self) -> int:
        """The length of the longest answer."""
        return max(len((row.answer or "").encode()) for row in self.rows)

    def draw(self, key: jax.Array) -> jax.Array:
        """The index of a row, `[1] int32`."""
        return uniform(key, (1,), 0, len(self.rows) - 1)

    def prompt(self, content: jax.Array) -> Text:
        """The problem."""
        return _texts_of(self.rows, is_answer=False).text(content[0])

    def solution(self, content: jax.Array) -> Text:
        """Its answer; empty if there is none."""
        return _texts_of(self.rows, is_answer=True).text(content[0])

    def identity(self, content: jax.Array) -> jax.Array:
        """A hash of the problem's text: rows with the same text are in the same split."""
        return jnp.asarray(_hashes(self.rows))[content]

    def score(self, content: jax.Array, response: Text) -> dict[str, jax.Array]:
        """1 for exactly the answer."""
        answered = jnp.asarray(np.array([row.answer is not None for row in self.rows]))[content[0]]
        return {name: part * answered for name, part in exact(self, content, response).items()}


@functools.lru_cache(maxsize=16)
def _texts_of(rows: tuple[Row, ...], is_answer: bool) -> Ragged:
    return Ragged.of([((row.answer or "") if is_answer else row.text).encode() for row in rows], np.uint8)


@functools.lru_cache(maxsize=16)
def _hashes(rows: tuple[Row, ...]) -> np.ndarray:
    return np.array([zlib.crc32(row.text.encode()) for row in rows], np.uint32).view(np.int32)


@functools.lru_cache(maxsize=16)
def _held_out_eighth(rows: tuple[Row, ...]) -> np.ndarray:
    """As `Table.held_out`, `[rows] bool`."""
    hashes = _hashes(rows)
    held_out = np.asarray(jax.vmap(is_held_out)(jnp.asarray(hashes)[:, None]))
    if held_out.all() or not held_out.any():  # this can happen with few problems
        held_out = hashes == hashes.min()
    return held_out


@dataclasses.dataclass(frozen=True)
class _FileTable(Table):
    """Rows of a file, followed by those of a held-out file.

    A relative path is relative to the current folder, and stored as absolute.
    """

    path: str = ""
    test_path: str = ""
    _kind: ClassVar[Literal["row", "chosen", "rejected"]]  # what is read of each row
    _columns: ClassVar[tuple[str, ...]] = ()  # fields that name columns
    _too_few_fix: ClassVar[str] = "give more of them, or a file of others (test_path=)"
    # A hash of each file's bytes: tasks with other rows, or another split of them, are not equal.
    digest: str = dataclasses.field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        for field in FILES:
            path = getattr(self, field)
            if not isinstance(path, str | os.PathLike) or (field == "path" and not path):
                raise FdgError(
                    f"task 'text:{self.name}': {field}={path!r:.60} is not a file: give one, as in"
                    f" text:{self.name}?path=data.jsonl"
                )
            object.__setattr__(self, field, os.path.abspath(path) if path else "")
        try:
            object.__setattr__(self, "digest", self._contents.digest)
        except FdgError as error:
            raise FdgError(f"task 'text:{self.name}': {error}") from None
        if not self.test_path:
            super().__post_init__()

    @property
    def files(self) -> dict[str, str]:
        """The task's files, by field."""
        return {name: getattr(self, name) for name in FILES if getattr(self, name)}

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows of the file, followed by those of the held-out file."""
        return self._contents.rows

    @property
    def held_out(self) -> np.ndarray:
        """The rows of the held-out file; without one, an eighth of the problems."""
        return np.arange(len(self.rows)) >= self._contents.num_trained if self.test_path else super().held_out

    @property
    def unanswered(self) -> str | None:
        """The location of the first row without an answer; of the first row if every answer is empty."""
        return self._contents.unanswered

    @property
    def shared(self) -> str | None:
        """A sentence about held-out prompts that are also trained on; None if there are none."""
        return self._contents.shared

    @functools.cached_property
    def _contents(self) -> "_FileContents":
        """The contents of the files when the task was made. `digest` identifies them, so this is no field."""
        names = [getattr(self, column) for column in self._columns]
        stamps = stamp(self.path), stamp(self.test_path)
        return _load(self._kind, self.path, self.test_path, *names, stamps=stamps)


class _FileContents(NamedTuple):
    """The contents of files."""

    rows: tuple[Row, ...]
    num_trained: int  # rows of the first file
    shared: str | None  # a sentence about held-out prompts that are also trained on
    unanswered: str | None
    digest: str


@dataclasses.dataclass(frozen=True)
class File(_FileTable):
    """Problems of a file with their answers.

    Attributes:
      path: a file with one JSON object per line (`{"prompt": "1+1=", "completion": "2"}`), a list of such
        objects, or CSV (`.csv`, `.tsv`). See `envs/text/columns.py` for the columns.
      test_path: a file of held-out problems; empty: an eighth of the problems of `path`.
      prompt_column, answer_column: other names of these columns.
      instruction: text before each problem, for a language model.
    """

    prompt_column: str = ""
    answer_column: str = ""
    name: ClassVar[str] = "file"
    _kind: ClassVar[Literal["row"]] = "row"
    _columns: ClassVar[tuple[str, ...]] = ("prompt_column", "answer_column")


@dataclasses.dataclass(frozen=True)
class Preferences(_FileTable):
    """Pairs of answers to each prompt of a file; the preferred one is the problem's answer.

    Attributes:
      path: a file with rows of `prompt`, `chosen` and `rejected`, as for `File`.
      test_path: a file of held-out pairs; empty: those of an eighth of the prompts of `path`.
      instruction: text before each problem, for a language model.
    """

    name: ClassVar[str] = "preferences"
    _kind: ClassVar[Literal["chosen", "rejected"]] = "chosen"

    @property
    def sides(self) -> tuple["Preferences", "Preferences"]:
        """The prompts with their preferred answers, and with their rejected ones."""
        files = self.instruction, self.path, self.test_path
        return Preferences(*files), _Rejected(*files)


class _Rejected(Preferences):
    """The prompts with their rejected answers."""

    _kind = "rejected"


@functools.lru_cache(maxsize=16)
def _load(kind: str, path: str, test_path: str, *names: str, stamps: tuple[Any, ...]) -> _FileContents:
    """The rows of files; `kind` is that of `_FileTable`. A changed file has another stamp."""
    answers = '"answer": "2"' if kind == "row" else '"chosen": "2", "rejected": "3"'
    example = f'{{"prompt": "1+1=", {answers}}}'
    records = [files.read(file, example) if file else [] for file in (path, test_path)]
    for file, file_rows in zip((path, test_path), records, strict=True):
        if file and not file_rows:
            raise FdgError(f"{file}: has no rows: write one object a line")
    if kind == "row":
        split_rows = [[columns.row(x, *names) for x in file_rows] for file_rows in records]
    else:
        split_rows = [[columns.pair(x)[kind == "rejected"] for x in file_rows] for file_rows in records]
    rows = [row for file_rows in split_rows for row in file_rows]
    trained_prompts, held_out_prompts = ({row.text for row in file_rows} for file_rows in split_rows)
    shared = None
    if trained_prompts & held_out_prompts:
        shared = (
            f"{len(trained_prompts & held_out_prompts)} of the {len(held_out_prompts)} held-out prompts of"
            f" {test_path} are in {path} too: an evaluation on them says little"
        )
    no_answers = not any((row.answer or "").strip() for row in split_rows[0])
    unanswered = next((_place_without_answer(row) for row in rows if no_answers or row.answer is None), None)
    digests = (hashlib.sha256(read_bytes(file, 1 << 30)).hexdigest() for file in (path, test_path) if file)
    return _FileContents(tuple(rows), len(split_rows[0]), shared, unanswered, " ".join(digests))


def _place_without_answer(row: Row) -> str:
    """The file and line of a row without an answer, and why a conversation has none."""
    if row.answer is not None:  # an empty answer, as in all rows
        return f"{row.where}, like every other row"
    last = row.prompt[-1] if isinstance(row.prompt, tuple) else None
    if last is None:
        return row.where
    return f"{row.where}: 'messages' ends with role '{last['role']}', not 'assistant'"


@dataclasses.dataclass(frozen=True)
class ReasoningGym(Table):
    """Problems of the package `reasoning-gym` (Stojanovski et al., arXiv 2505.24760), which scores answers.

    Attributes:
      dataset: one of its data sets ("leg_counting", "chain_sum", ...), with its default configuration.
      size: number of problems.
      seed: the data set's seed.
      instruction: text before each problem, for a language model.
    """

    dataset: str = "chain_sum"
    size: int = 1000
    seed: int = 0
    name: ClassVar[str] = "reasoning_gym"

    def __post_init__(self) -> None:
        check_integer(self, "size", 1, 1_000_000)
        check_integer(self, "seed", 0, 2**31 - 1)
        super().__post_init__()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All questions and answers."""
        return _dataset_rows(self.dataset, self.size, self.seed)

    @property
    def host_reward(self) -> HostReward:
        """The data set's own score."""
        return HostReward(self)

    @property
    def __name__(self) -> str:
        return self.dataset

    def __call__(self, responses: list[str], entry: list[Any]) -> list[float]:
        """The scores of responses, as a reward function."""
        data = _dataset(self.dataset, self.size, self.seed)
        return [data.score_answer(answer=r.strip(), entry=e) for r, e in zip(responses, entry, strict=True)]


@functools.lru_cache(maxsize=4)
def _dataset(name: str, size: int, seed: int) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise FdgError(
            f"task 'text:reasoning_gym' needs reasoning-gym: pip install reasoning-gym ({one_line(error)})"
        ) from error
    try:
        return package.create_dataset(name, size=size, seed=seed)
    except Exception as error:  # the package may raise anything
        raise FdgError(
            f"task 'text:reasoning_gym': dataset '{name}' cannot be made: {one_line(error)}"
        ) from error


@functools.lru_cache(maxsize=16)
def _dataset_rows(name: str, size: int, seed: int) -> tuple[Row, ...]:
    """The rows of a data set of `reasoning-gym`."""
    data = _dataset(name, size, seed)
    entries = (data[i] for i in range(size))
    return tuple(Row(str(entry["question"]), str(entry["answer"]), {"entry": entry}) for entry in entries)
