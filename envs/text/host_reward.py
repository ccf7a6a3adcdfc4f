"""`HostReward`: Python functions on text as a reward, called from compiled programs once for each batch."""

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from envs.text.rows import Row
from fdg.arguments import checked_names
from fdg.errors import FdgError, HostError, listed, nearest, own_frame, raised, text_of

RewardFunction = Callable[..., Sequence[float | None]]

# Arguments of a function in addition to columns; `completions` is TRL's name.
_STANDARD_NAMES = ("prompts", "responses", "completions", "answers")
_POSITIONAL_NAMES = (("prompts", "prompt"), ("responses", "response", "completion"), ("answers", "answer"))
_TRIAL_SIZE = 3  # responses in a trial call
# columns that these names would shadow
_SHADOWED_COLUMNS = {"prompt", "completion", "response", *_STANDARD_NAMES}


@checked_names
@dataclasses.dataclass(frozen=True)
class HostReward:
    """A weighted sum of reward functions.

    Its fragment cannot be split over devices, as for environments on the host: give the role `reward` its own
    device, `policies.Colocated(rewards=1)`. Functions may not use JAX.

    A function returns `N` numbers, or None for no opinion, which counts as 0; a response without any opinion
    is not learned from. It takes any of these by name, all lists of `N`; or three arguments with other names:
    prompts, responses, answers.

    - `prompts`: the prompts of a file's rows (texts or chat messages); for sampled problems, text.
    - `responses`: as text; `completions` as in TRL: messages if the prompt is.
    - `answers`: from a file, as text (None if a row has none); else the problem's content, as NumPy arrays.
    - any column of a file's rows by name; `**columns` takes all.

    Attributes:
      function: a function, or a tuple of functions.
      weights: a number for each function; empty: 1 for each.

    Raises:
      FdgError: not a function, or a different number of weights.
    """

    function: RewardFunction | tuple[RewardFunction, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.function, list):
            object.__setattr__(self, "function", tuple(self.function))
        object.__setattr__(self, "weights", tuple(self.weights))
        for function in self.functions:
            if isinstance(function, type):
                name = function.__name__
                raise FdgError(f"reward {name} is a class: give an instance, {name}(), or a function")
            if not callable(function):
                raise FdgError(
                    f"HostReward({function!r:.60}): give a function of prompts, responses, answers"
                )
        if not self.functions or len(self.weights) not in (0, len(self.functions)):
            raise FdgError(
                f"HostReward has {len(self.functions)} functions and {len(self.weights)} weights: give one"
                " weight per function, or none"
            )
        if not all(isinstance(weight, int | float) and math.isfinite(weight) for weight in self.weights):
            raise FdgError(f"HostReward: weights={self.weights!r:.60} must be finite numbers")

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """All functions."""
        return self.function if isinstance(self.function, tuple) else (self.function,)

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names, for metrics; equal ones are numbered."""
        base_names = [
            getattr(function, "__name__", type(function).__name__).strip("<>") for function in self.functions
        ]
        counts = [base_names[:i].count(name) for i, name in enumerate(base_names)]
        return tuple(f"{name}_{n + 1}" if n else name for name, n in zip(base_names, counts, strict=True))

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
        calls = self._bound_functions(task)
        shape = jax.ShapeDtypeStruct((responses[0].shape[0], len(calls)), jnp.float32)
        values = io_callback(_Callback(calls), shape, prompts, responses, content)
        has_opinion = ~jnp.isnan(values)
        values = jnp.where(has_opinion, values, 0.0)
        parts = {function.name: values[:, i] for i, function in enumerate(calls)}
        weighted = [
            w * part for w, part in zip(self.weights or [1.0] * len(parts), parts.values(), strict=True)
        ]
        return sum(weighted[1:], weighted[0]), parts, jnp.any(has_opinion, axis=1)

    def check(self, task: Any) -> None:
        """Raises for a function that needs columns that the task's rows do not have.

        Raises:
          FdgError: a function needs columns that the rows do not have.
        """
        names = dict.fromkeys((*_STANDARD_NAMES, *_column_names(task.problem)), ())
        for pair in zip(self.functions, self.names, strict=True):
            _BoundFunction(*pair, task).arguments(names)

    def check_by_calling(self, task: Any) -> None:
        """Calls the functions once, on right answers and an empty one, so that errors are found before
        compiling.

        Raises:
          FdgError: a function needs columns that the rows do not have.
          HostError: a function raised, or returned NaN, or a wrong number of results.
        """

        def problems(keys: jax.Array) -> Any:
            content = task.draw(keys)
            return task.prompts(content), task.solutions(content), task.own(content)

        draw: Any = jax.jit(problems)
        prompts, (tokens, mask), content = jax.tree.map(
            np.asarray, draw(jax.random.split(jax.random.key(0), _TRIAL_SIZE))
        )
        draw.clear_cache()  # a backend with live arrays cannot be restarted
        is_empty = np.arange(_TRIAL_SIZE)[:, None] == _TRIAL_SIZE - 1
        _Callback(self._bound_functions(task))(prompts, (tokens, mask & ~is_empty), content)

    def _bound_functions(self, task: Any) -> tuple["_BoundFunction", ...]:
        self.check(task)
        return tuple(_BoundFunction(*pair, task) for pair in zip(self.functions, self.names, strict=True))


@dataclasses.dataclass(frozen=True)
class _Callback:
    """The callback of a program. A value, so that equal tasks share compiled programs."""

    calls: tuple["_BoundFunction", ...]

    @property
    def __name__(self) -> str:
        return " and ".join(function.__name__ for function in self.calls)

    def __call__(self, prompts: Any, responses: Any, content: Any) -> np.ndarray:
        task = self.calls[0].task
        prompt_texts, response_texts = task.texts(*prompts), task.texts(*responses)
        arrays = jax.tree.map(np.asarray, content)
        contents = [jax.tree.map(lambda leaf, i=i: leaf[i], arrays) for i in range(len(response_texts))]
        rows = [
            _row_of_problem(task, row_content, text)
            for row_content, text in zip(contents, prompt_texts, strict=True)
        ]
        columns = [call(rows, response_texts, prompt_texts) for call in self.calls]
        return np.stack(columns, axis=1)


@dataclasses.dataclass(frozen=True)
class _BoundFunction:
    """One function, and how to call it."""

    function: RewardFunction
    name: str
    task: Any

    @property
    def __name__(self) -> str:
        return f"reward '{self.name}' of task '{self.task.name}'"

    def __call__(self, rows: Sequence[Row], responses: list[str], prompts: list[str]) -> np.ndarray:
        """The function's results, NaN for None: `[N]` float32."""
        values: dict[str, list[Any]] = {
            name: [copy.deepcopy(row.columns.get(name)) for row in rows]
            for name in _column_names(self.task.problem)
        }
        values["prompts"] = [copy.deepcopy(_plain_prompt(row.prompt)) for row in rows]
        values["responses"] = list(responses)
        values["completions"] = [_as_messages(row, text) for row, text in zip(rows, responses, strict=True)]
        values["answers"] = [row.answer for row in rows]
        args, kwargs = self.arguments(values)
        try:
            results = self.function(*args, **kwargs)
            if not hasattr(results, "__len__"):
                raise HostError(
                    f"{self.__name__} gave {results!r:.60}: return a list of {len(responses)} numbers"
                )
            numbers = [math.nan if value is None else float(value) for value in results]
        except HostError:
            raise
        except (Exception, SystemExit) as error:
            i = _failed_response(error, responses, prompts)
            label = (
                f"for {responses[i]!r:.60}, prompt {prompts[i]!r:.60}" if responses else "for no responses"
            )
            raise HostError(f"{self.__name__} raised {raised(error)} {label}") from error
        if len(numbers) != len(responses):
            raise HostError(
                f"{self.__name__} gave {len(numbers)} numbers for {len(responses)} responses: return one for"
                " each"
            )
        with np.errstate(over="ignore"):
            rewards = np.asarray(numbers, np.float32)
        has_value = np.array([value is not None for value in results], bool)
        for i in np.flatnonzero(~np.isfinite(rewards) & has_value).tolist():
            raise HostError(
                f"{self.__name__} gave {numbers[i]} for {responses[i]!r:.60}, prompt {prompts[i]!r:.60}:"
                " return a finite number, or None for no reward (it is stored as float32)"
            )
        return rewards

    def arguments(self, available: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The function's positional and keyword arguments."""
        positional = [available[name] for name in ("prompts", "responses", "answers")]
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a C function without signature
            return positional, {}
        kinds = {parameter.kind for parameter in parameters}
        if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
            return positional, {}
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p for p in named if p.default is p.empty]
        unknown = [p.name for p in required if p.name not in available]
        if not unknown:
            names = (
                available
                if inspect.Parameter.VAR_KEYWORD in kinds
                else [p.name for p in named if p.name in available]
            )
            return [], {name: available[name] for name in names}
        is_positional = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in required)
        if is_positional and _are_positional([p.name for p in required], available):
            return positional, {}
        suggestions = nearest(unknown[0], available, 1)
        hint = f": did you mean {suggestions[0]!r}?" if suggestions else "."
        raise FdgError(
            f"{self.__name__} takes {unknown[0]!r}, but there is no such column{hint} It can take"
            f" {listed(available, 'and')}, by these names, or three arguments in this order: prompts,"
            " responses, answers"
        )


def _are_positional(names: Sequence[str], columns: Iterable[str]) -> bool:
    """True if three names mean prompts, responses and answers, and none is a misspelt column."""
    if len(names) != len(_POSITIONAL_NAMES):
        return False
    singular_columns = {_singular(name) for name in columns}
    return all(
        name in meanings or _singular(name) not in singular_columns
        for name, meanings in zip(names, _POSITIONAL_NAMES, strict=True)
    )


def _singular(name: str) -> str:
    """A name without the difference between singular and plural."""
    return name.lower().removesuffix("s")


@functools.lru_cache(maxsize=16)
def _column_names(problem: Any) -> tuple[str, ...]:
    """Names of the columns that a function can use."""
    names = {name: None for row in getattr(problem, "rows", ()) for name in row.columns}
    return tuple(name for name in names if name not in _SHADOWED_COLUMNS)


def _row_of_problem(task: Any, content: Any, prompt_text: str) -> Row:
    """The file's row of a problem, or a row made of its text and content."""
    rows = getattr(task.problem, "rows", None)
    return Row(prompt_text, content) if rows is None else rows[int(content[0])]


def _failed_response(error: BaseException, responses: Sequence[str], prompts: Sequence[str]) -> int:
    """The response that a function processed when it raised; else the first.

    Found by the local variables of the raising frame, else by the text in the error's message: since Python
    3.12 a comprehension leaves no locals.
    """
    frame = own_frame(error)
    variables = [] if frame is None else list(frame[0].f_locals.values())
    for texts in (responses, prompts):
        for i, text in enumerate(texts):
            if any(value is text for value in variables):
                return i
    for texts in (responses, prompts):
        mentioned = [i for i, text in enumerate(texts) if repr(text) in text_of(error)]
        if len(mentioned) == 1:
            return mentioned[0]
    return 0


def _plain_prompt(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _as_messages(row: Row, response: str) -> Any:
    return response if isinstance(row.prompt, str) else [{"role": "assistant", "content": response}]
