"""Every public function names an invalid argument in a one-line error.

The functions come from `fdg.__all__`, their arguments from signatures. `VALID` says by argument name which
values are valid, independently of the annotations that the functions check.
"""

import dataclasses
import inspect
import math
from typing import Protocol, TypeVar
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from fdg.arguments import check_arguments
from fdg.errors import FdgError
from fdg.training import evaluation, exporting, fit, playing, run, sweeping
from tests import tiny
from tests.stream import test_engine

VALUES = [None, 0, -1, 3, 1.5, math.nan, True, "word", "", "\0", b"x", [], [1], (1,), {}, {"a": 1}, object()]
VALUES += [len, int, np.zeros(2), 10**30, "x" * 3000]
INTEGERS = "total_steps seed num_seeds eval_every eval_episodes checkpoint_every exploit_every trials rounds"
INTEGERS += " n count model agent episodes fps max_steps iterations limit_mb trips"
SWITCHES = "resume tensorboard progress live_plot halving trust exact whole_along_batch apart optional greedy"
TEXTS = "out start_from wandb mlflow path directory role name format a b run"
VALID = {
    **dict.fromkeys(INTEGERS.split(), lambda v: type(v) is int and abs(v) < 10**18),
    **dict.fromkeys(SWITCHES.split(), lambda v: type(v) is bool),
    **dict.fromkeys(TEXTS.split(), lambda v: isinstance(v, str) and "\0" not in v),
    "checkpoint": lambda v: type(v) is int or (isinstance(v, str) and "\0" not in v),
    **dict.fromkeys(("stop_at", "stop_after"), lambda v: (type(v) is int and v < 10**18) or v == 1.5),
    "devices": lambda v: (type(v) is int and v == 3) or v in ([], (1,), {}),
    "function": callable,
    "in_axes": lambda v: True,  # checked at the call
    "out_axes": lambda v: True,
    "parameters": lambda v: v in (None, [], {}),
    "on_nan": lambda v: False,
    "policy": lambda v: False,
    "algorithm": lambda v: False,
    "state": lambda v: False,
    "engine": lambda v: False,
    "graph": lambda v: False,
    "env": lambda v: False,
    "callbacks": lambda v: v == [],
    "tolerance": lambda v: type(v) in (int, float) and abs(v) < 10**18,
    "values": lambda v: False,
    "runs": lambda v: False,
    "labels": lambda v: v in ([], (), {}),
    "random": lambda v: v is None or isinstance(v, dict),
    "source": lambda v: False,
    **dict.fromkeys("slots batch micro_batches ahead group prefills".split(), lambda v: type(v) is int),
    "order": lambda v: False,
    "condition": lambda v: False,
    "late": lambda v: False,
}


def is_valid(name, value, default):
    if isinstance(value, np.ndarray):
        return name.endswith("_axes")
    return (value is None and default is None) or VALID[name](value)


class Accepted(Exception):
    """All arguments passed the checks."""


@pytest.fixture(scope="module", autouse=True)
def _stop_after_checks():
    def accept(*_, **__):
        raise Accepted

    with (
        mock.patch.object(fit, "carry_out", accept),
        mock.patch.object(sweeping, "carry_out_search", accept),
        mock.patch.object(evaluation, "evaluate", accept),
        mock.patch.object(playing, "play", accept),
        mock.patch.object(exporting, "export", accept),
        mock.patch.object(run, "Acting", accept),
    ):
        yield


WALK = tiny.Walk()
GRAPH = fdg.trace(WALK)
PPO = algos.PPO(env=envs.make("CartPole-v1"), num_envs=4, num_steps=2, hidden=(4,), total_steps=160)
# Valid arguments of each name in `fdg.__all__`; None for names that users do not call.
CALLS = {
    "trace": {},
    "place": {"algorithm": GRAPH, "policy": policies.GPUOnly(), "devices": 1},
    "compile": {"algorithm": WALK, "policy": policies.GPUOnly(), "graph": GRAPH},
    "fit": {"algorithm": WALK, "total_steps": 64},
    "sweep": {"algorithm": PPO, "values": {"learning_rate": [1e-3, 1e-2]}},
    "search": {"algorithm": PPO, "values": {"num_envs": [2, 4]}, "trials": 2},
    "load": {"path": "nowhere"},
    "load_exported": {"path": "nowhere"},
    "diff": {"a": "nowhere", "b": "nowhere"},
    "compare": {"runs": ["nowhere"]},
    "agents": {"algorithm": test_engine.Walk(), "n": 2},
    "record": {"run": "nowhere", "path": "recording.npz"},
    "profile": {"engine": None, "state": None},
    "Stream": {"source": test_engine.Walk(), "slots": 4, "batch": 4},
    "expect_trips": {"condition": jnp.bool_(True), "trips": 4},
    "host_devices": {},
    "keep_programs": {},
    "fragment": {"role": "actor"},
    "rowwise": {"function": len},
    "in_bfloat16": {"function": len},
    "Group": {"name": "a", "devices": (0,)},
    **dict.fromkeys(
        ["FDG", "Edge", "Engine", "Plan", "Policy", "Profile", "Program", "Run", "Source", "Sweep"]
    ),
    **dict.fromkeys(["FdgError", "FdgWarning", "GraphError", "PlanError", "RunError", "UnknownNameError"]),
}
RUN_METHODS = ("actor", "acting", "evaluate", "play", "export")
ENGINE_METHODS = ("init", "run", "start")


def fault(function, given, name, value, may_be_valid):
    """What is wrong with the error for this value of argument `name`, or None."""
    try:
        function(**{**given, name: value})
    except (FdgError, Accepted) as error:
        text = str(error)
        if isinstance(error, Accepted):
            return None if may_be_valid else "it is accepted"
        if "\n" in text or len(text) > 1100:
            return f"not one short line: {text:.200}"
        shown = type(value).__name__ if not isinstance(value, type) else value.__name__
        named = any(word in text for word in (name, function.__name__, shown, repr(value)[:20], "'a'"))
        return None if named or may_be_valid else f"it is not named: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if may_be_valid else "it is accepted"


def faults(function, given):
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for value in VALUES:
            valid = is_valid(parameter.name, value, parameter.default)
            wrong = fault(function, given, parameter.name, value, valid)
            if wrong:
                found[f"{function.__name__}({parameter.name}={value!s:.20})"] = wrong
    return found


def test_calls_cover_all_public_names():
    assert set(CALLS) == set(fdg.__all__)


@pytest.mark.parametrize("name", [name for name, given in CALLS.items() if given is not None])
def test_invalid_argument(name, tmp_path, monkeypatch, devices):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fdg.running.program_cache.jax.config.update", lambda *_: None)
    assert faults(getattr(fdg, name), CALLS[name]) == {}


@pytest.mark.parametrize("method", RUN_METHODS)
def test_invalid_argument_of_run_method(method):
    assert faults(getattr(fdg.Run(PPO, None, 0), method), {}) == {}


def test_invalid_argument_of_engine_method(devices):
    engine = fdg.compile(WALK, policies.GPUOnly(), devices[:1])
    with (
        mock.patch.object(engine, "_make_leaves", side_effect=Accepted),
        mock.patch.object(engine._execution, "compile"),
    ):
        for method in ENGINE_METHODS:
            assert faults(getattr(engine, method), {} if method == "init" else {"state": None}) == {}


@pytest.mark.parametrize(
    "name",
    ["single_learner_coarse", "Auto"]
    + [pytest.param(name, marks=pytest.mark.whole) for name in policies.names() if name[:3] != "sin"]
    + [pytest.param("single_learner_fine", marks=pytest.mark.whole)],
)
def test_invalid_policy_field(name):
    """Values of another type are refused, those of the field's type only if they do not fit."""
    kind = policies.Auto if name == "Auto" else policies.get(name)
    graph = fdg.trace(tiny.Pupil())

    def place(**fields):
        policy = kind(**fields)
        if name != "Auto":  # which has no method `place`
            fdg.place(graph, policy, 4)

    place()
    place.__name__ = kind.__name__
    found = {}
    for field in dataclasses.fields(kind):
        for value in VALUES:
            if field.name == "parameters":
                may_be_valid = is_valid(field.name, value, field.default)
            else:  # a switch is not checked
                may_be_valid = field.type is bool or isinstance(value, field.type)
            wrong = fault(place, {}, field.name, value, may_be_valid)
            if wrong:
                found[f"{field.name}={value!s:.20}"] = wrong
    assert found == {}


@pytest.mark.parametrize("number", [np.int64(3), np.array(3)])
def test_numpy_integers_are_accepted(number):
    with pytest.raises(Accepted):
        fdg.fit(WALK, total_steps=64, seed=number)
    with pytest.raises(FdgError, match=r"fit\(total_steps=64\.0\): give an integer or None: write 64$"):
        fdg.fit(WALK, total_steps=64.0)


def test_invalid_value_has_same_error_as_flag():
    with pytest.raises(FdgError, match=r"^num_seeds=0: it must be at least 1$"):
        fdg.fit(WALK, total_steps=64, num_seeds=0)


def test_protocols_and_type_variables_are_not_checked():
    class Speaks(Protocol):
        def say(self) -> str: ...

    kind = TypeVar("kind")

    def act(who: Speaks, what: kind, often: kind | None = None) -> kind:
        check_arguments(act, {"who": who, "what": what, "often": often})
        return what

    # Annotations that name local classes cannot be resolved in the module.
    act.__annotations__.update(who=Speaks, what=kind, often=kind | None)
    assert act(3, "x", 2) == "x"


# Names per package that users call with keyword arguments.
PUBLIC = {
    fdg: "FDG Edge Group Plan Profile Run agents compile host_devices place search sweep fit load trace",
    algos: "Actor Bonus Explorer Network Normalizer PPO RecurrentNetwork ReplayBuffer SelfPlay get make",
    algos.networks: "convolutional gru lstm mlp simba transformer",
    algos.language: "DecoderConfig Sampling generate",
    envs: "ActionRepeat Alike Box Dict Discrete FrameStack HideObservations MultiDiscrete TimeAware Tuple"
    " Wrapper check make register vectorize",
    envs.games: "Against Greedy HexGame LineGame Trained Turns Uniform connect_four gomoku match tic_tac_toe",
    envs.text: "Calculator CharacterTokenizer Guess HostReward HuggingFaceTokenizer TextTask",
    policies: "Auto Central Colocated GPUOnly Split auto fsdp get",
}


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in PUBLIC.items() for name in names.split()]
)
def test_unknown_argument(package, name):
    with pytest.raises(FdgError) as caught:
        getattr(package, name)(nonsense=1)
    text = str(caught.value)
    assert "nonsense" in text or "is missing: " in text, text
