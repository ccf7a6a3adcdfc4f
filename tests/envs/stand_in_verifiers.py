"""A stub of `verifiers.v1` with what the adapter uses, for tests without the package.

`write(folder)` writes the stub package. `tests/envs/test_verifiers.py` also runs with the real package.
"""

PACKAGE = """
import asyncio
import importlib
import types


class State:
    pass


class TaskConfig:
    pass


class TaskTimeout:
    def __init__(self, scoring=None):
        self.scoring = scoring


class TaskData:
    model_fields = dict.fromkeys(("idx", "prompt", "system_prompt", "image", "timeout"))

    def __init__(self, **given):
        self.__dict__.update({**dict.fromkeys(self.model_fields), "timeout": TaskTimeout(), **given})

    @property
    def prompt_text(self):
        return self.prompt if isinstance(self.prompt, str) else " ".join(m.content for m in self.prompt)

    def model_dump(self, exclude):
        return {name: value for name, value in vars(self).items() if name not in exclude}


class Task:
    NEEDS_CONTAINER = False
    key = hash = None
    __class_getitem__ = classmethod(lambda cls, _: cls)

    def __init__(self, data, config=None):
        self.data, self.config = data, config

    async def setup(self, trace, runtime):
        pass

    async def finalize(self, trace, runtime):
        pass

    @classmethod
    def toolsets(cls, config):
        return []

    def plugged_judges(self):
        return []

    def hooks(self, kind):
        return [getattr(self, name) for name in dir(self) if hasattr(getattr(self, name), "weight")]

    async def score(self, trace):
        functions = self.hooks("reward")
        try:
            found = await asyncio.gather(*(one(trace) for one in functions))
            trace.reward = sum(float(x) * one.weight for one, x in zip(functions, found))
        except Exception as error:
            raise RuntimeError("task") from error


def reward(function=None, weight=1.0):
    def mark(function):
        function.weight = weight
        return function

    return mark if function is None else mark(function)


class TasksetConfig:
    id = ""
    task = TaskConfig()

    @classmethod
    def model_validate(cls, given):
        made = cls()
        for name, value in given.items():
            if not hasattr(cls, name):
                raise ValueError(f"{name}: extra inputs are not permitted")
            setattr(made, name, value)
        return made


class Taskset:
    bounded = True
    config_type = TasksetConfig

    def __class_getitem__(cls, kinds):
        return type(cls.__name__, (cls,), {"config_type": kinds[1]}) if isinstance(kinds, tuple) else cls

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def toolsets(cls, config):
        return []


class EnvConfig:
    pass


class HarnessConfig:
    pass


class Harness:
    __class_getitem__ = classmethod(lambda cls, _: cls)


class SingleAgentEnv:
    pass


class Env:
    __class_getitem__ = classmethod(lambda cls, _: cls)


def _exported(name, kind):
    module = importlib.import_module(name)
    return next((x for x in map(vars(module).get, module.__all__) if issubclass(x, kind)), None)


def taskset_config_type(name):
    return _exported(name, Taskset).config_type


def load_taskset(config):
    return _exported(config.id, Taskset)(config)


def intercept(function):
    function.intercept = True
    return function


def default_harness_id(name):
    return name if _exported(name, Harness) else "bash"


def environment_class(name):
    return _exported(name, Env) or SingleAgentEnv


class _Message(types.SimpleNamespace):
    def model_dump(self, exclude_none):
        return {"role": self.role, "content": self.content}


def UserMessage(content):
    return _Message(role="user", content=content)


def SystemMessage(content):
    return _Message(role="system", content=content)


def AssistantMessage(content):
    return _Message(role="assistant", content=content)


class Trace(types.SimpleNamespace):
    @property
    def last_reply(self):
        return [node.message for node in self.nodes if node.sampled][-1].content.strip()

    @property
    def messages(self):
        return [node.message for node in self.nodes]


MessageNode = TraceTask = AgentInfo = AgentConfig = types.SimpleNamespace
"""


def write(folder):
    """Writes the package into a folder."""
    package = folder / "verifiers" / "v1"
    package.mkdir(parents=True)
    (folder / "verifiers" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(PACKAGE)
    (package / "state.py").write_text("from verifiers.v1 import State\n\nstate_cls = lambda kind: State\n")
