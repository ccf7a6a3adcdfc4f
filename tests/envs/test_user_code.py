"""User environments by module and by entry point, and errors."""

import importlib.metadata
import itertools
import textwrap

import pytest

import algos
import envs
from envs import probe, registry, user_code
from fdg.errors import FdgError, UnknownNameError
from tests.refusing import refuses

_numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes a user module into the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"own_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write


IMPORTS = "import envs\nfrom envs import probe\n"


def test_factory_class_and_value(module):
    name = module(
        IMPORTS + "def make(size=3): return probe.Memory(size)\nready = envs.vectorize(probe.Value())"
    )
    assert envs.make(f"{name}:make", size=2) == envs.make("probe:memory", delay=2)
    assert envs.make(f"{name}:probe.Memory", delay=2) == envs.make("probe:memory", delay=2)
    assert envs.make(f"{name}:ready") == envs.make("probe:value")
    assert envs.name_with_parameters(envs.make(f"{name}:make", size=5)) == f"{name}:make?size=5"
    assert envs.parse(f"{name}:make?size=5") == (f"{name}:make", {"size": 5})
    assert envs.name_with_parameters(envs.make("CartPole-v1")) is None


@pytest.mark.parametrize(
    ("text", "name", "overrides", "message"),
    [
        ("", "MODULE:maze", {}, "unknown environment in MODULE 'maze'"),
        ("def mace(): pass", "MODULE:maze", {}, "did you mean 'mace'"),
        (
            "".join(f"def f{i}(): pass\n" for i in range(14)),
            "MODULE:maze",
            {},
            r"\(known: f0, f1, f10, .*f9\)",
        ),
        (
            "import nowhere_at_all",
            "MODULE:maze",
            {},
            r"importing MODULE fails: ModuleNotFoundError: No .*nowhere_at_all.*\(MODULE.py, line 1\)",
        ),
        ("x = 1\nx.y", "MODULE:maze", {}, r"importing MODULE fails: AttributeError: .*\(MODULE.py, line 2\)"),
        ("int('x')", "MODULE:maze", {}, r"importing MODULE fails: ValueError: .*\(MODULE.py, line 1\)"),
        (
            "import envs\nmaze = envs.make('CartPol-v1')",
            "MODULE:maze",
            {},
            r"importing MODULE fails: UnknownNameError: unknown environment 'CartPol-v1'.*MODULE.py, line 2",
        ),
        ("raise SystemExit(2)", "MODULE:maze", {}, "importing MODULE fails: SystemExit: 2 "),
        ("", ".MODULE:maze", {}, "there is no module '.MODULE'"),
        ("def maze(): pass", "MODULE:maze", {}, "returned None: return the environment"),
        ("def maze(): return 3", "MODULE:maze", {}, "environment int.* has no name"),
        (
            "def maze(): return 1 / 0",
            "MODULE:maze",
            {},
            r"cannot be made: ZeroDivisionError: division by zero \(MODULE.py, line 1\)",
        ),
        ("def maze(): pass", "MODULE:maze", {"n": 3}, "unknown parameter of maze .n. .known: none"),
        ("maze = 3", "MODULE:maze", {}, "is of type int: name a class, a function or an environment"),
        ("", "MODULE.py:maze", {}, "there is no module 'MODULE.py': write MODULE:maze"),
        ("", "no_such_module:maze", {}, "there is no module 'no_such_module': run from the folder"),
        ("", "MODULE:", {}, "no name follows the colon"),
    ],
)
def test_errors_are_one_line(module, text, name, overrides, message):
    mine = module(text)
    with refuses(match=message.replace("MODULE", mine)):
        envs.make(name.replace("MODULE", mine), **overrides)


@pytest.mark.parametrize("attribute", ["name", "observation_space", "action_space", "max_episode_steps"])
@pytest.mark.parametrize("vectorized", [False, True])
def test_failing_property_is_named(attribute, vectorized):
    def fails(self):
        raise ValueError("no\nspace")

    cls = type("Maze", (probe.Memory,), {"__post_init__": vars, attribute: property(fails)})
    with refuses(f"its {attribute} cannot be read, line ", "ValueError: no space: correct the property"):
        algos.DQN(env=envs.vectorize(cls()) if vectorized else cls())


def test_sources_are_not_modules():
    with pytest.raises(UnknownNameError, match="did you mean 'brax:ant'"):
        envs.make("brax:antt")
    assert envs.trust_reason("brax:antt", {}) is None and envs.trust_reason("envpool:A-v5", {}) is None


class _EntryPoint:
    def __init__(self, name, value):
        self.name, self.value, self.dist = name, "mazes:make", None
        self._value = value

    def load(self):
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def test_entry_points(monkeypatch):
    points = [
        _EntryPoint("Maze-v0", probe.Memory),
        _EntryPoint("Broken-v0", ImportError("no numbers")),
        _EntryPoint("CartPole-v1", 3),
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points if group == user_code.ENTRY_POINTS else []
    )
    user_code.entry_points.cache_clear()
    try:
        assert "Maze-v0" in envs.names() and envs.trust_reason("Maze-v0", {}) is None
        assert envs.make("Maze-v0", delay=2) == envs.make("probe:memory", delay=2)
        assert envs.make("CartPole-v1") == registry._BUILT_IN["CartPole-v1"]()
        with pytest.raises(FdgError, match="mazes:make registers it as mazes:make, which cannot be imported"):
            envs.make("Broken-v0")
        with pytest.raises(UnknownNameError, match="did you mean 'Maze-v0'"):
            envs.make("Maze-v1")
    finally:
        monkeypatch.undo()
        user_code.entry_points.cache_clear()
