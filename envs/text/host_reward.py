"""`HostReward`: Python functions on text as a reward, called from compiled programs once for each batch."""

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from envs.text.rows import Row
from fdg.arguments import checked_names, quoted
from fdg.errors import FdgError, HostError, listed, nearest, raised, text_of, user_frame
from fdg.kinds import matches

RewardFunction = Callable[..., Sequence[float | None]]  # see `HostReward`

# Arguments of a function besides columns; `completions` is TRL's name.
_ARGUMENTS = ("prompts", "responses", "completions", "answers")
# Accepted names of the three parameters of a function that takes them by position.
_POSITIONAL_NAMES = (("prompts", "prompt"), ("responses", "response", "completion"), ("answers", "answer"))
_TRIAL_SIZE = 3  # responses in a trial
_LARGEST = float(np.finfo(np.float32).max)  # weight
_SHADOWED_COLUMNS = {"prompt", "completion", "response", *_ARGUMENTS}  # columns that these names would shadow


@checked_names
@dataclasses.dataclass(frozen=True)
class HostReward:
    """A weighted sum of reward functions.

    The fragment that calls the functions cannot be split over devices: give the role `reward` its own device,
    `policies.Colocated(rewards=1)`. Functions may not use JAX.

    A function returns `N` values: numbers, or None for no opinion, which counts as 0. A response on which no
    function has an opinion is not learned from. A function's parameters are any of these names, each a list
    of `N`; or three other names, for prompts, responses and answers in this order.

    - `prompts`: texts, or messages if a file's rows have messages.
    - `responses`: texts; `completions`: the same, as in TRL as messages if the prompts are messages.
    - `answers`: texts of a file, None where a row has none; else the problems' contents, as NumPy arrays.
    - the name of any column of a file; `**columns` takes all columns.

    Attributes:
      function: a function, or a tuple of functions.
      weights: a number for each function; empty: 1 for each.

    Raises:
      FdgError: not a function, or a different number of weights.
    """

    function: RewardFunction | tuple[RewardFunction, ...]
    weights: Sequence[float] = ()

    def __post_init__(self) -> None:
        if isinstance(self.function, list):
            object.__setattr__(self, "function", tuple(self.function))
        if not np.iterable(self.weights) or isinstance(self.weights, str):
            raise FdgError(
                f"HostReward: weights={quoted(self.weights)} must be a list, with a number for each function"
            )
        object.__setattr__(self, "weights", tuple(self.weights))
        for function in self.functions:
            if isinstance(function, type):
                name = function.__name__
                raise FdgError(f"reward {name} is a class: give an instance, {name}(), or a function")
            if not callable(function):
                raise FdgError(
                    f"HostReward({quoted(function)}): give a function of prompts, responses, answers"
                )
        if not self.functions or len(self.weights) not in (0, len(self.functions)):
            raise FdgError(
                f"HostReward: number of functions {len(self.functions)}, of weights {len(self.weights)}: give"
                " one weight per function"
            )
        if not all(
            (isinstance(weight, int) or matches(weight, float)) and abs(weight) <= _LARGEST
            for weight in self.weights
        ):
            raise FdgError(f"HostReward: weights={quoted(self.weights)} must be finite numbers (float32)")
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """All functions."""
        return self.function if isinstance(self.function, tuple) else (self.function,)

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names, for metrics; equal names are numbered."""
        base = [getattr(f, "__name__", type(f).__name__).strip("<>") for f in self.functions]
        earlier_counts = [base[:i].count(name) for i, name in enumerate(base)]
        return tuple(f"{name}_{n + 1}" if n else name for name, n in zip(base, earlier_counts, strict=True))

    def call(
        self,
        task: Any,
        prompts: tuple[jax.Array, jax.Array],
        responses: tuple[jax.Array, jax.Array],
        content: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        """The rewards of a batch; see `TextTask.reward`.

        Returns:
          The weighted sum, each function's result by name (all `[N] float32`), and True where any function
          had an opinion (`[N] bool`).

        Raises:
          FdgError: a function needs columns that the rows do not have.
          HostError: (in the program) a function raised, or returned NaN, or not `N` numbers.
        """
        functions = self._named_functions(task)
        shape = jax.ShapeDtypeStruct((responses[0].shape[0], len(functions)), jnp.float32)
        scores = io_callback(_Callback(functions), shape, prompts, responses, content)
        has_opinion = ~jnp.isnan(scores)
        scores = jnp.where(has_opinion, scores, 0.0)
        parts = {function.name: scores[:, i] for i, function in enumerate(functions)}
        weighted = [
            w * part for w, part in zip(self.weights or [1.0] * len(parts), parts.values(), strict=True)
        ]
        return sum(weighted[1:], weighted[0]), parts, jnp.any(has_opinion, axis=1)

    def check(self, task: Any) -> None:
        """Checks that the task's rows have the columns that the functions need.

        Raises:
          FdgError: a function needs columns that the rows do not have.
        """
        self._named_functions(task)

    def try_out(self, task: Any) -> None:
        """Calls the functions once, on right answers and an empty answer: finds errors before compiling.

        Raises:
          FdgError: a function needs columns that the rows do not have.
          HostError: a function raised, or returned NaN, or a wrong number of results.
        """

        def problems(keys: jax.Array) -> Any:
            content = task.draw(keys)
            return task.prompts(content), task.solutions(content), task.drawn_content(content)

        draw_problems: Any = jax.jit(problems)
        prompts, (tokens, mask), content = jax.tree.map(
            np.asarray, draw_problems(jax.random.split(jax.random.key(0), _TRIAL_SIZE))
        )
        draw_problems.clear_cache()  # it holds arrays, and a backend with live arrays cannot be restarted
        is_empty = np.arange(_TRIAL_SIZE)[:, None] == _TRIAL_SIZE - 1
        _Callback(self._named_functions(task))(prompts, (tokens, mask & ~is_empty), content)

    def _named_functions(self, task: Any) -> tuple["_NamedFunction", ...]:
        pairs = zip(self.functions, self.names, strict=True)
        functions = tuple(_NamedFunction(*pair, task) for pair in pairs)
        available = dict.fromkeys((*_ARGUMENTS, *_columns(task.problem)), ())
        for function in functions:
            function.arguments(available)  # raises if a column is missing
        return functions


@dataclasses.dataclass(frozen=True)
class _Callback:
    """Calls all functions from a program. A value, so that equal tasks share compiled programs."""

    functions: tuple["_NamedFunction", ...]

    @property
    def __name__(self) -> str:
        return " and ".join(function.__name__ for function in self.functions)

    def __call__(self, prompts: Any, responses: Any, content: Any) -> np.ndarray:
        task = self.functions[0].task
        prompt_texts, texts = task.texts(*prompts), task.texts(*responses)
        arrays = jax.tree.map(np.asarray, content)
        contents = [jax.tree.map(lambda leaf, i=i: leaf[i], arrays) for i in range(len(texts))]
        table = getattr(task.problem, "rows", None)  # else a row has the problem's prompt and content
        rows = [
            Row(text, item) if table is None else table[int(item[0])]
            for item, text in zip(contents, prompt_texts, strict=True)
        ]
        columns = [function(rows, texts, prompt_texts) for function in self.functions]
        return np.stack(columns, axis=1)


@dataclasses.dataclass(frozen=True)
class _NamedFunction:
    """One function, and how to call it."""

    function: RewardFunction
    name: str
    task: Any

    @property
    def __name__(self) -> str:
        return f"reward '{self.name}' of task '{self.task.name}'"

    def __call__(self, rows: Sequence[Row], texts: list[str], prompt_texts: list[str]) -> np.ndarray:
        """The function's results, NaN for None."""
        available: dict[str, list[Any]] = {
            name: [copy.deepcopy(row.columns.get(name)) for row in rows]
            for name in _columns(self.task.problem)
        }
        available["prompts"] = [
            row.prompt if isinstance(row.prompt, str) else [copy.deepcopy(dict(m)) for m in row.prompt]
            for row in rows
        ]
        available["responses"] = list(texts)
        available["completions"] = [  # as in TRL: messages if the prompt has messages
            text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        available["answers"] = [row.answer for row in rows]
        positional, keywords = self.arguments(available)
        try:
            result = self.function(*positional, **keywords)
            is_no_list = isinstance(result, str | bytes | bytearray | Mapping | Set)
            if is_no_list or not hasattr(result, "__len__"):
                raise HostError(
                    f"{self.__name__} gave {quoted(result)}: return a list of {len(texts)} numbers"
                )
            numbers = [math.nan if value is None else float(value) for value in result]
        except HostError:
            raise
        except (Exception, SystemExit) as error:
            i = _index_of_failed(error, texts, prompt_texts)
            raise HostError(
                f"{self.__name__} raised {raised(error)} for {_describe_pair(texts, prompt_texts, i)}"
            ) from error
        if len(numbers) != len(texts):
            raise HostError(
                f"{self.__name__} gave {len(numbers)} numbers for {len(texts)} responses: return one for each"
            )
        with np.errstate(over="ignore"):
            rewards = np.asarray(numbers, np.float32)
        is_given = np.array([value is not None for value in result], bool)
        for i in np.flatnonzero(~np.isfinite(rewards) & is_given).tolist():
            raise HostError(
                f"{self.__name__} gave {numbers[i]} for {_describe_pair(texts, prompt_texts, i)}:"
                " return a finite number, or None for no reward (it is stored as float32)"
            )
        return rewards

    def arguments(self, available: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The function's positional and keyword arguments, from the lists that are `available` by name.

        Raises:
          FdgError: the function takes a name that is not available.
        """
        positional = [available[name] for name in ("prompts", "responses", "answers")]
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a C function without signature
            return positional, {}
        kinds = {parameter.kind for parameter in parameters}
        if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
            return positional, {}
        wanted = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p for p in wanted if p.default is p.empty]
        unknown = [p.name for p in required if p.name not in available]
        if not unknown:
            names = (
                available
                if inspect.Parameter.VAR_KEYWORD in kinds
                else [p.name for p in wanted if p.name in available]
            )
            return [], {name: available[name] for name in names}
        is_positional = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in required)
        if is_positional and _are_positional_names([p.name for p in required], available):
            return positional, {}
        near = nearest(unknown[0], available, 1)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise FdgError(
            f"{self.__name__} takes {unknown[0]!r}, but there is no such column{hint} It can take"
            f" {listed(available, 'and')}, by these names, or three arguments in this order: prompts,"
            " responses, answers"
        )


def _are_positional_names(names: Sequence[str], available: Iterable[str]) -> bool:
    """True if three names mean prompts, responses and answers, and none is a misspelt column."""
    if len(names) != len(_POSITIONAL_NAMES):
        return False
    available = {_singular(name) for name in available}
    return all(
        name in accepted or _singular(name) not in available
        for name, accepted in zip(names, _POSITIONAL_NAMES, strict=True)
    )


def _singular(name: str) -> str:
    """A name without the difference between singular and plural."""
    return name.lower().removesuffix("s")


@functools.lru_cache(maxsize=16)
def _columns(problem: Any) -> tuple[str, ...]:
    """Names of the columns that a function can use."""
    names = {name: None for row in getattr(problem, "rows", ()) for name in row.columns}
    return tuple(name for name in names if name not in _SHADOWED_COLUMNS)


def _describe_pair(texts: Sequence[str], prompt_texts: Sequence[str], i: int) -> str:
    """Response `i` and its prompt, for messages."""
    return f"the response {texts[i]!r:.60} to the prompt {prompt_texts[i]!r:.60}" if texts else "no responses"


def _index_of_failed(error: BaseException, responses: Sequence[str], prompt_texts: Sequence[str]) -> int:
    """The index of the response that a function processed when it raised; 0 if it is unknown.

    The index follows from the function's variables; or from the error's text, because Python 3.12 and later
    do not keep the variables of a comprehension.
    """
    frame = user_frame(error)
    variables = [] if frame is None else list(frame[0].f_locals.values())
    for texts in (responses, prompt_texts):
        for i, text in enumerate(texts):
            if any(value is text for value in variables):
                return i
    for texts in (responses, prompt_texts):
        matches = [i for i, text in enumerate(texts) if repr(text) in text_of(error)]
        if len(matches) == 1:
            return matches[0]
    return 0
