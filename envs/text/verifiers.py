"""Environments of `verifiers` (github.com/PrimeIntellect-ai/verifiers, 0.4 or newer) as text tasks.

There, an environment is an installed package with a `Taskset`: a task has a prompt, and methods (`@reward`)
that score a trace of what the model did with it. Here, the prompts are the rows of a task, and a response is
scored as a trace with that one answer. Reward methods are coroutines; those of a batch run concurrently, on
an event loop in a separate thread.

Supported are environments in which the model answers once and is scored by its answer. Refused are those that
run a program around the model: several turns or agents (their own `Env`), tools, containers.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from envs.text.drawing import check_integer
from envs.text.host_reward import HostReward
from envs.text.rows import Row, as_json
from envs.text.tables import Table
from fdg.errors import FdgError, HostError, listed, one_line, raised

PREFIX = "verifiers:"  # `verifiers:NAME` is `text:verifiers?environment=NAME`

_ENDLESS_SIZE = 1000  # the number of tasks that are used of an endless set
_INSTALL = "pip install 'verifiers>=0.4'"


@dataclasses.dataclass(frozen=True)
class Verifiers(Table):
    """Tasks of an environment of the package `verifiers`, which also scores responses.

    Attributes:
      environment: the name of an installed environment, which is imported.
      arguments: its settings, fields of its `TasksetConfig`: a mapping, or its JSON; stored as JSON.
      size: how many tasks to use, from the first on; None: all, or 1,000 if they never end.
      instruction: text before each prompt, for a language model.
    """

    environment: str = ""
    arguments: Any = ""
    size: int | None = None
    name: ClassVar[str] = "verifiers"

    def __post_init__(self) -> None:
        what = f"task 'text:{self.name}'"
        if not isinstance(self.environment, str) or not self.environment:
            raise FdgError(f"{what}: environment={self.environment!r:.60}: give a name, {PREFIX}NAME")
        example = {"split": "train"}
        object.__setattr__(self, "arguments", as_json(self.arguments, f"{what}: arguments", example))
        if self.size is not None:
            check_integer(self, "size", 1, 10_000_000)
        super().__post_init__()

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row per task: its prompt, and as columns its data and `idx`, its index in the environment."""
        return _rows(*self._key)

    @property
    def unanswered(self) -> str | None:
        """The location of the first task without a text `answer` in its data; None if all have one."""
        return next((row.where for row in self.rows if row.answer is None), None)

    @property
    def host_reward(self) -> HostReward:
        """The environment's own score."""
        return HostReward(self)

    @property
    def __name__(self) -> str:
        return self.environment

    def __call__(self, responses: list[str], idx: list[int]) -> list[float]:
        """The scores of responses, as a reward function."""
        tasks = _tasks(*self._key)
        coroutines = [self._score(tasks[i], response) for i, response in zip(idx, responses, strict=True)]
        return asyncio.run_coroutine_threadsafe(_gather_scores(coroutines), _event_loop()).result()

    @property
    def _key(self) -> tuple[str, str, int | None]:
        """The arguments of `_rows` and `_tasks`."""
        return self.environment, self.arguments, self.size

    async def _score(self, task: Any, text: str) -> float:
        """The score of one response `text`."""
        trace = _completed_trace(task, text)
        try:
            async with asyncio.timeout(task.data.timeout.scoring):
                await task.score(trace)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # `verifiers` wraps what a reward raises, and asyncio its cancellation.
            cause = error if isinstance(error, TimeoutError) else error.__cause__ or error
            raise HostError(
                f"reward of environment '{self.environment}' raised {raised(cause)} for the response"
                f" {text!r:.60} to the prompt {task.data.prompt_text!r:.60}"
            ) from error
        return trace.reward


async def _gather_scores(coroutines: Sequence[Coroutine[Any, Any, float]]) -> list[float]:
    """The results of all coroutines; raises the error of the first that failed, after all have ended."""
    results: list[Any] = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):  # the first in the order of the batch, not of time
            raise result
    return results


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One event loop, in its own thread, for all calls: clients of judges may keep connections open."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # `sys.exit` in a task leaves `run_forever` too; the task's caller gets the error
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name="verifiers", daemon=True).start()
    return loop


def _completed_trace(task: Any, response: str) -> Any:
    """A completed trace of the task's prompt and one response."""
    vf = _package()
    data = task.data
    prompt_messages = (
        [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    )
    if data.system_prompt:
        prompt_messages = [vf.SystemMessage(content=data.system_prompt), *prompt_messages]
    messages = [*prompt_messages, vf.AssistantMessage(content=response)]
    nodes = [
        vf.MessageNode(message=message, parent=i - 1 if i else None, sampled=i == len(prompt_messages))
        for i, message in enumerate(messages)
    ]
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        state=importlib.import_module("verifiers.v1.state").state_cls(type(task))(),
        nodes=nodes,
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )


def _package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise FdgError(f"task 'text:verifiers': {_INSTALL} ({one_line(error)})") from error


@functools.lru_cache(maxsize=4)
def _tasks(environment: str, arguments: str, size: int | None) -> tuple[Any, ...]:
    """An environment's tasks, all of which this module supports.

    Raises:
      FdgError: the environment cannot be loaded, takes no such arguments, or is not supported.
    """
    vf = _package()
    what = f"verifiers' environment '{environment}'"
    try:
        settings = {**json.loads(arguments or "{}"), "id": environment}
        taskset = vf.load_taskset(vf.taskset_config_type(environment).model_validate(settings))
        count = size or (None if taskset.bounded else _ENDLESS_SIZE)
        tasks = tuple(itertools.islice(taskset, count))
        reason = _reason_not_supported(vf, environment, taskset, tasks)
    except (Exception, SystemExit) as error:  # the environment's code may raise anything
        raise FdgError(f"{what} cannot be loaded: {raised(error)}{_hint_for_old_modules(error)}") from error
    if reason is not None:
        raise FdgError(f"{what} {reason}")
    return tasks


def _hint_for_old_modules(error: BaseException) -> str:
    """The fix for a module that was written for `verifiers` before 0.4; empty for other errors."""
    if isinstance(error, AttributeError) and ("__all__" in str(error) or "'verifiers'" in str(error)):
        return (
            ": environments for verifiers before 0.4 (load_environment) are not supported: export a Taskset"
        )
    return ""


def _reason_not_supported(vf: Any, environment: str, taskset: Any, tasks: Sequence[Any]) -> str | None:
    """Why an environment is not supported; None if it is."""
    if not tasks:
        return "has no tasks"
    first, task_class, env_class = tasks[0], type(tasks[0]), vf.environment_class(environment)
    if env_class is not vf.SingleAgentEnv:
        return (
            f"plays several turns or agents ({env_class.__name__}.run), which call a model over HTTP: use"
            " an environment in which the model answers once"
        )
    if vf.default_harness_id(environment) == environment:
        return "has a harness of its own, which runs a program around the model: use one without"
    if any(hasattr(x, "intercept") for kind in task_class.__mro__ for x in vars(kind).values()):
        return "rewrites prompts or responses (@intercept): use an environment that only scores responses"
    if task_class.toolsets(first.config) or type(taskset).toolsets(taskset.config):
        return "gives the model tools: use an environment in which the model answers once, by text"
    if task_class.NEEDS_CONTAINER or first.data.image:
        return "needs a container, and responses are scored in this process"
    runtime_users = [
        name for name in ("setup", "finalize") if getattr(task_class, name) is not getattr(vf.Task, name)
    ]
    reward_functions = [*first.hooks("reward"), *(judge.score for judge in first.plugged_judges())]
    for function in reward_functions:
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            runtime_users.append(function.__name__)
    if runtime_users:
        return (
            f"runs programs ({listed(runtime_users, 'and')} take a runtime), and responses are scored in this"
            " process"
        )
    return None if reward_functions else "has no reward (a method marked @verifiers.v1.reward)"


@functools.lru_cache(maxsize=4)
def _rows(environment: str, arguments: str, size: int | None) -> tuple[Row, ...]:
    """The prompts of an environment's tasks as rows."""
    base_fields = set(_package().TaskData.model_fields)
    rows = []
    for i, task in enumerate(_tasks(environment, arguments, size)):
        where = f"verifiers' environment '{environment}', task {i}"
        columns = {**task.data.model_dump(exclude=base_fields), "idx": i}
        answer = columns.get("answer")
        text = answer if isinstance(answer, str) else None
        rows.append(Row(_prompt(task.data, where), text, columns, where))
    return tuple(rows)


def _prompt(data: Any, where: str) -> str | tuple[Mapping[str, Any], ...]:
    """The prompt of a task: a text, or messages; raises an `FdgError` if it is empty or has images."""
    if not data.prompt:
        raise FdgError(f"{where}: has no prompt: tasks in which the user is simulated are not supported")
    if isinstance(data.prompt, str) and not data.system_prompt:
        return data.prompt
    text = data.prompt
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else [_message(m) for m in text]
    if any(part["type"] != "text" for m in messages for part in m["content"] if isinstance(part, dict)):
        raise FdgError(f"{where}: its prompt has images, but only text is supported")
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return (*system, *messages)


def _message(message: Any) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    return {**fields, "content": fields.get("content", "")}
