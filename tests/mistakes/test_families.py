"""Families of mistakes: each test tries all members of a table or class, or random ones."""

import ast
import dataclasses
import errno
import functools
import itertools
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.language import DecoderConfig, peft, weights
from algos.values import Network
from envs.codesign import reading
from envs.text import TextTask
from envs.text.tokenizer_folders import tokenizer_of
from fdg import aliases, kinds
from fdg.commands.base_config import base_of
from fdg.commands.cluster_file import cluster_from
from fdg.commands.flags import JobFlags
from fdg.errors import FdgError, FdgWarning, NoAttributeError
from fdg.files import check_writable
from fdg.training import space
from fdg.training.settings import GROUPS
from tests.mistakes.environments import Corridor
from tests.training.trained import fitted, small

ENV = envs.make("CartPole-v1")
PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))
HYPERPARAMETERS = {field.name for name in algos.names() for field in dataclasses.fields(algos.get(name))}
FIELDS = HYPERPARAMETERS | {field.name for group in GROUPS.values() for field in dataclasses.fields(group)}


def parser_of(algo="ppo", env=None):
    return JobFlags.of(algos.get(algo), policies.GPUOnly).parser()


def refused(do, kind=FdgError):
    with pytest.raises(kind) as caught:
        do()
    text = str(caught.value)
    assert isinstance(caught.value, FdgError) and "\n" not in text and len(text) < 400, text
    return text


# --- names of other libraries ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_know_names_of_other_libraries(page):
    """Each setting on a `coming-from` page maps to fdg's name on that page, or to a fix."""
    none = "brax chosen completion config messages prompt rejected vmap check_env".split()
    words = r"`(?:--)?([a-z][a-z0-9_-]*|[A-Z][A-Z_]*)(?:=[^`]*)?`"
    found = []
    for row in (row.split("|")[1:-1] for row in page.read_text().splitlines() if row.startswith("| ")):
        cells = [re.findall(words, cell) for cell in row]
        theirs, ours = cells[-2:] if len(row) == 3 and page.stem == "stable-baselines3" else cells[:2]
        theirs += [name for name in re.findall(r" --([a-z][a-z-]+)", row[0]) if name not in FIELDS]
        known = [name for name in theirs if name not in none]
        pairs = zip(known, ours if len(ours) == len(known) else [None] * len(known), strict=True)
        for name, meant in [*pairs]:
            same = name.lower().replace("-", "_") in FIELDS or aliases.instead(name)
            assert same or (aliases.ours(name) if meant is None else aliases.ours(name) == meant), name
        found += known
    for theirs, ours in re.findall(r"`(\w+)` (?:is )?`(\w+)`[,.]", page.read_text()):
        assert aliases.ours(theirs) == ours and ours in FIELDS, theirs
    assert len(found) >= 5


def test_fixes_of_aliases_name_existing_flags():
    by_alias = [alias for names in aliases.ALIASES.values() for alias in names]
    assert aliases.ALIASES.keys() <= FIELDS and len(set(by_alias)) == len(by_alias)
    written = {option for algo in algos.names() for option in parser_of(algo).options()}
    for name, fix in aliases._FIXES.items():
        flags = {f"--{flag}" for flag in re.findall(r"--([a-z][\w-]*)", fix)}
        assert flags <= {*written, "--config", "--resume"}, name


@pytest.mark.parametrize(
    ("algo", "words", "field", "value"),
    [
        ("grpo", "--num-generations 4", "group_size", 4),
        ("grpo", "--beta 0.04 --max_completion_length 32", "kl_coefficient", 0.04),
        ("dpo", "--beta 0.2", "beta", 0.2),
        ("sft", "--model-name-or-path here --lora_r 8", "model", "here"),
        ("ppo", "--clip-param 0.3", "clip_ratio", 0.3),
        ("dqn", "--start-e 0.9", "epsilon_start", 0.9),
    ],
)
def test_aliases_are_accepted(algo, words, field, value):
    from fdg.commands.flags import normalise

    assert parser_of(algo).parse_strictly(normalise(words.split()))[field] == value


def test_variant_names_algorithm_and_settings():
    for name, found in aliases.VARIANTS.items():
        text = refused(lambda name=name: algos.get(name.replace("-", "_")))
        if isinstance(found, str):
            assert found in text
            continue
        algo, settings = found
        words = text.partition(f": --algo {algo}")[2].split()
        parsed = parser_of(algo).parse_strictly(words)
        assert parsed == settings and len(words) == 2 * len(settings)


def test_class_of_variant():
    assert refused(lambda: algos.DDQN, NoAttributeError).endswith(": --algo dqn --double true")
    assert not hasattr(algos, "Nothing") and not hasattr(algos, "no.thing")


# --- words of a command line ---


def test_invalid_flag_values():
    parser = parser_of()
    for action in parser._actions:
        if action.nargs is None and action.type is not None and action.option_strings:
            option = action.option_strings[0]
            value = "a" if action.choices is None and action.metavar == "NAME" else "1"
            if action.metavar and action.metavar.startswith("{"):
                value = action.metavar[1:-1].split(",")[0]
            text = refused(lambda option=option, value=value: parser.parse_strictly([option, value, value]))
            assert f"{option} takes one value, not 2 ('{value} {value}'): " in text
            again = refused(
                lambda option=option, value=value: parser.parse_strictly([f"{option}={value}", "b"])
            )
            assert f"{option} takes one value, not 2" in again
    for words, fix in {
        "--seed 0 1 2": "--num-seeds 3 trains 3 agents in one program",
        "--learning-rate 1e-3 1e-4": "--sweep learning_rate=1e-3,1e-4 tries several",
        "--num-steps 64 128": "--optuna N --search num_steps=64,128 tries several",
        "--env a b": "give one value, and start a run for each further value, and blanks are 'in quotes'",
        "--seed 0,1,2": "'0,1,2' is not an integer: --num-seeds 3",
        "--num-steps [64,128]": "--search num_steps=64,128",
        "--devices cpu": "JAX_PLATFORMS=cpu uses none",
        "--devices many": "all processes together): write --devices 1",
        "--num-envs lots": "(environments stepped together): write --num-envs 4",
    }.items():
        assert fix in refused(lambda words=words: parser.parse_strictly(words.split()))


def test_numbers_with_suffixes_and_units():
    rng = random.Random(0)
    scales = {
        "k": 1e3,
        "K": 1e3,
        "M": 1e6,
        "m": 1e6,
        "B": 1e9,
        "G": 1e9,
        "GB": 1e9,
        "GiB": 2**30,
        " TB/s": 1e12,
    }
    scales |= {"%": 0.01, "s": 1, " ms": 1e-3, "h": 3600, " Gbit/s": 1.25e8, " million": 1e6, "_000": 1e3}
    for _ in range(300):
        number, (unit, scale) = rng.randint(1, 999), rng.choice(list(scales.items()))
        expected = number * scale
        kind = rng.choice([float, float | None] + [int, int | None] * (expected == int(expected)))
        fix = kinds.number_fix(f"{number}{unit}", kind)
        assert fix.startswith(": write "), (number, unit)
        for written in fix.removeprefix(": write ").split(" or "):
            assert kinds.reader(kind)(written) == pytest.approx(expected, rel=1e-5)
            assert kinds.matches(ast.literal_eval(written), kind)  # in Python, too
    for word, kind in (
        ("many", int),
        ("5 bananas", int),
        ("", float),
        ("1,2", int),
        ("10%", int),
        ("1 2", int),
    ):
        assert kinds.number_fix(word, kind) == ""
    for word in ("5e5", "500_000", "500000", "5E5", "500000.0"):
        assert parser_of().parse_strictly(["--total-steps", word])["total_steps"] == 500_000
    text = refused(lambda: parser_of().parse_strictly(["--total-steps", "500k"]))
    assert text == "--total-steps: '500k' is not an integer: write 500_000"
    assert refused(lambda: fdg.fit(small(), total_steps="500k")).endswith("write 500_000")
    assert refused(lambda: small(num_envs="4k")).endswith("write 4_000")


# --- methods, places and values ---


def test_methods_of_other_libraries():
    algorithm = small()
    engine = fdg.compile(algorithm, policies.GPUOnly(), 1)
    for name in ("fit", "train", "predict", "save", "load", "export"):
        assert "fdg." in refused(lambda name=name: getattr(algorithm, name)), name
    commands = "pack", "collect", "plot", "compare", "diff"
    for name in ("fit", "train", "learn", "act", "predict", "save", "load", *commands):
        assert refused(lambda name=name: getattr(fdg.Run, name)).startswith(f"Run has no {name}: write ")
    for name in ("fit", "train", "learn", "step", "evaluate", "predict", "save"):
        assert refused(lambda name=name: getattr(engine, name)).startswith(f"Engine has no {name}: write ")
    for do in (
        lambda: algorithm.learn(total_timesteps=1000),
        lambda: algorithm.learn(1000),
        lambda: algorithm.update(),
    ):
        assert "to train, write fdg.fit(algorithm, total_steps=N)" in refused(do)
    assert "write run.policy(observation)" in refused(lambda: algorithm.act([0.0]))
    assert "unknown argument of evaluate 'env'" in refused(lambda: algorithm.evaluate(env=ENV))


def test_exchanged_arguments():
    algorithm, policy = small(), policies.GPUOnly()
    for do in (lambda: fdg.compile(policy, algorithm), lambda: fdg.place(policy, algorithm)):
        assert refused(do).endswith("is an algorithm, not a policy: exchange the two arguments")
    assert "is a policy, not an algorithm" in refused(lambda: fdg.trace(policy))
    file = Path("cluster.toml")
    for devices in (str(file), file):
        text = refused(lambda devices=devices: fdg.place(algorithm, policy, devices))
        assert "give a number (8) or a list" in text and "fdg plan --cluster FILE" in text
    assert "did you mean 'devices'?" in refused(lambda: fdg.place(algorithm, policy, num_devices=2))


def test_long_values_are_truncated():
    value = repr(small()) + repr({f"key_{i}": list(range(i)) for i in range(30)})
    for message in (f"{value} is no policy: write this", f"give another (not {value}): write this"):
        text = str(FdgError(message))
        assert len(text) < 1100 and text.endswith("write this")
    assert len(str(FdgError(f"{small()!r} is none: write this"))) < 120
    assert str(FdgError("x(" * 4000)) and str(FdgError("f([)]" * 99))


def test_graphs_and_plans_are_frozen():
    graph = fdg.trace(small())
    for value, word, field in (
        (graph, "graph", "name"),
        (fdg.place(graph, policies.GPUOnly(), 1), "plan", "idle"),
    ):
        text = refused(lambda value=value, field=field: setattr(value, field, ()))
        assert f"does not change: write {word} = dataclasses.replace({word}, {field}=())" in text


@pytest.mark.parametrize("value", [small(), *(policies.get(name)() for name in policies.names())], ids=repr)
def test_algorithms_and_policies_are_frozen(value):
    for field in (field for field in dataclasses.fields(value) if field.init):
        now = getattr(value, field.name)
        text = refused(
            lambda name=field.name, now=now: setattr(value, name, now), dataclasses.FrozenInstanceError
        )
        assert re.search(rf" = dataclasses.replace\((algorithm|policy), {field.name}=", text)
    assert "unknown field of" in refused(lambda: setattr(value, "nothing", 1), AttributeError)


def test_user_algorithm_is_frozen():
    @dataclasses.dataclass(frozen=True)
    class Mine(algos.PPO):
        rate: float = 0.1

    mine = Mine(env=ENV)
    assert "Mine does not change: write" in refused(lambda: setattr(mine, "rate", 1.0))
    assert dataclasses.replace(mine, rate=1.0).rate == 1.0


def test_read_only_file_system(tmp_path, monkeypatch):
    from fdg.training.run_directory import check_free

    monkeypatch.setattr(os, "access", lambda *_: False)  # root can write despite file modes
    assert f"no permission to write in {tmp_path}" in refused(
        lambda: check_writable(tmp_path / "policy.onnx")
    )
    monkeypatch.setattr(os, "statvfs", lambda *_: SimpleNamespace(f_flag=os.ST_RDONLY))
    for check in (check_writable, check_free):
        text = refused(lambda check=check: check(tmp_path / "new" / "policy.onnx"))
        assert text.endswith(f"{os.strerror(errno.EROFS)}: give another path")


def test_units_of_settings_named_with_units():
    """`latency_ms` suggests 5 for `5ms` and 0.005 for `5us`; unknown units are named."""
    rng, seconds = random.Random(1), {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    for _ in range(200):
        number, given, own = rng.randint(1, 999), rng.choice([*seconds]), rng.choice(["ns", "us", "ms"])
        fix = kinds.number_fix(f"{number}{given}", float, f"latency_{own}")
        written = float(fix.removeprefix(": write ").split(" or ")[0])
        assert written == pytest.approx(number * seconds[given] / seconds[own], rel=1e-5)
    for unit in ("mJ", "mm2", "euros", "req"):
        number = f"{rng.randint(1, 999)} {unit}"
        assert kinds.number_fix(number, float, "price") == ("" if unit == "mm2" else without_unit(unit))
    assert kinds.number_fix("3 uJ", float, "energy_uj") == ": write 3"
    spec = {"task": [{"name": "a", "space": "resnet9"}], "specs": {"latency_ms": "5ms"}}
    assert refused(lambda: reading.from_dict(spec)).endswith(
        "latency_ms is '5ms'; give a number above 0: write 5"
    )
    text = refused(lambda: envs.make("gymnasium:CartPole-v1", timeout="2min"))
    assert text.endswith("timeout='2min' must be a number: write 120")


def without_unit(unit):
    return f": write the number alone, without '{unit}'"


def test_inconsistent_clusters():
    rng = random.Random(2)
    for _ in range(200):
        hosts, each, devices = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 40)
        given = {"hosts": hosts, "devices_per_host": each, "devices": devices}
        content = {name: given[name] for name in rng.choice([(*given,), (*given,)[1:]])} | {"kind": "H100"}
        agree = devices == hosts * each if "hosts" in content else devices % each == 0
        if agree:
            assert cluster_from(content).devices == devices
        else:
            assert f"devices = {devices}, but" in refused(lambda content=content: cluster_from(content))
    assert cluster_from({"devices": 4, "kind": "H100"}).devices == 4
    for straggling in (1.5, 2, 20):
        wrong = {"hosts": 1, "kind": "H100", "straggling": straggling}
        assert f"for {straggling}% write" in refused(lambda wrong=wrong: cluster_from(wrong))


# --- environments ---


def corridor(**members):
    return envs.vectorize(dataclasses.dataclass(frozen=True)(type("Own", (Corridor,), members))())


@pytest.mark.parametrize("names", [*itertools.permutations(("key", "state", "action"))], ids="-".join)
def test_step_arguments_in_another_order(names):
    """Also with argument names of other libraries."""
    for spelled in ({}, {"key": "rng", "state": "env_state"}, {"key": "_key", "action": "actions"}):
        exec(f"def step(self, {', '.join(spelled.get(name, name) for name in names)}): ...", made := {})
        if names == ("key", "state", "action"):
            assert corridor(step=made["step"])
        else:
            text = refused(lambda made=made: corridor(step=made["step"]))
            assert text.endswith("is called with (key, state, action): let it take these, in this order")


@pytest.mark.parametrize("first", [True, False], ids=["init", "apply"])
def test_network_arguments_in_another_order(first):
    init, apply = (lambda key, observation: {}), (lambda parameters, observation: None)
    wrong = Network(lambda obs, key: {}, apply) if first else Network(init, lambda observation, params: None)
    text = refused(lambda: fdg.trace(small(network=wrong)))
    assert f"{'init' if first else 'apply'} of network takes (" in text and "in this order" in text


def test_non_boolean_termination_flags():
    def step_returning(reward, *flags):
        return lambda self, key, state, action: (state, jnp.zeros(1), reward, *flags)

    half = jnp.float32(0.5)
    for flags in ((half, False), (False, half), (1.0, False), (False, jnp.bfloat16(1))):
        env = corridor(step=step_returning(1.0, *flags))
        with pytest.warns(FdgWarning, match="of which any number but 0 counts as true: give a bool"):
            fdg.trace(algos.A2C(env=env))
    for reward in (True, jnp.bool_(False)):
        env = corridor(step=step_returning(reward, half, False))
        assert "a bool as reward: return five" in refused(lambda env=env: fdg.trace(algos.A2C(env=env)))


@pytest.mark.parametrize(
    ("space", "seen"),
    [
        (envs.Discrete(5), np.int32(5)),
        (envs.Discrete(5), np.int32(-1)),
        (envs.MultiDiscrete((2, 3)), np.array([1, 3], np.int32)),
        (envs.Box(0, 9, (2,), "int32"), np.array([0, 10], np.int32)),
        (envs.Box(0, 9, (1,), "uint8"), np.array([10], np.uint8)),
        (envs.Box(-1.0, 1.0, (1,)), np.array([1.5], np.float32)),
    ],
    ids=str,
)
def test_observation_outside_space(space, seen):
    env = corridor(
        observation_space=space,
        reset=lambda self, key: (jnp.float32(0), jnp.asarray(seen)),
        step=lambda self, key, state, action: (state, jnp.asarray(seen), 1.0, False, False),
    )
    text = refused(lambda: envs.check(env, steps=3))
    assert f"is outside its space: from {seen.min():g} to {seen.max():g} in" in text


@pytest.mark.parametrize(
    "options", [{}, {"frame_stack": 2}, {"time_aware": True}, {"action_repeat": 2}], ids=str
)
def test_environments_are_frozen(options):
    env = envs.make("CartPole-v1", **options)
    fields = [field.name for field in dataclasses.fields(env) if field.init]
    for field in fields:
        text = refused(lambda field=field: setattr(env, field, 1), dataclasses.FrozenInstanceError)
        assert f"write env = dataclasses.replace(env, {field}=1)" in text
    text = refused(lambda: setattr(env, "max_episode_steps", 3), dataclasses.FrozenInstanceError)
    assert f"its max_episode_steps is computed from {fields[0]}" in text and text.endswith(
        "create another env with dataclasses.replace"
    )


# --- runs and searches ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("runs") / "run", small("a2c", hidden=(8,)), iterations=2)


def test_wrong_files_and_checkpoints_of_run(run, tmp_path):
    config = run.path / "config.json"
    others = {one for one in run.path.rglob("*.json") if one != config}
    assert len(others) >= 2
    for file in others:
        text = refused(lambda file=file: base_of({"config": str(file)}))
        near = config if file.parent == run.path else "the config.json of a run directory"
        assert text == f"{file} is not the configuration of a run: give {near}"
    text = refused(lambda: fdg.load(run.path, checkpoint=3))
    assert text.endswith("has no such checkpoint: give 1, 2 or 'last'")
    assert "leave out --member" in refused(lambda: run.member(seed=0))
    earlier = tmp_path / "earlier" / "config.json"
    earlier.parent.mkdir()
    earlier.write_text(json.dumps({**json.loads(config.read_text()), "eval_every": 5, "stop_at": 9.0}))
    for given, kept in (
        ({"start_from": str(earlier.parent)}, (None, None)),
        ({"config": str(earlier)}, (5, 9)),
    ):
        assert tuple(base_of(given)[1][name] for name in ("eval_every", "stop_at")) == kept
    assert "'best'" in refused(lambda: run.member("bset"))
    assert "leave out the other arguments" in refused(lambda: run.member("best", seed=0))
    onnx = run.path / "policy.onnx"
    onnx.write_bytes(b"\x08\x08")
    assert f"onnxruntime.InferenceSession('{onnx}') runs an ONNX" in refused(lambda: fdg.load_exported(onnx))


def test_load_run_of_unregistered_environment(tmp_path):
    run = fitted(tmp_path / "run", algos.A2C(env=corridor(), num_envs=2), iterations=1)
    text = refused(lambda: fdg.load(run.path))
    assert "(a2c in an environment of its own, 'corridor', which envs.make does not know): give it" in text


def test_single_tuple_as_choice():
    wide = space.Choices("hidden", ((8, 8, 16, 16),))
    text = refused(lambda: space.check_choices((wide,), 2))
    assert "hidden=8,8,16,16 is one choice: write / between tuples, hidden=64,64/128" in text
    with pytest.warns(FdgWarning, match="is one choice"):
        space.check_choices((wide, space.Choices("num_steps", (8,))), 2)
    space.check_choices((space.Choices("hidden", ((8,), (16,))), space.Choices("num_steps", (8,))), 2)


def test_seed_outside_sweep():
    rng = random.Random(3)
    for _ in range(50):
        first, count = rng.randint(0, 9), rng.randint(1, 5)
        sweep = fdg.Sweep(small(), (("learning_rate", (0.1, 0.2)),), num_seeds=count)
        point = {"learning_rate": 0.2}
        for seed in (first - 1, first + count):
            text = refused(functools.partial(sweep.chosen, None, seed, point, first))
            assert text == f"no agent has seed={seed}: give one from {first} to {first + count - 1}"
        assert sweep.chosen(None, first + count - 1, point, first) == [2 * count - 1]


def test_run_in_place_of_hugging_face_folder(run):
    decoder = DecoderConfig.tiny(vocab_size=17)
    for read, options in (
        (lambda: weights.read_config(run.path), ""),
        (lambda: tokenizer_of(run.path), ""),
        (lambda: peft.read_config(run.path, decoder), "--format peft "),
    ):
        assert refused(read).endswith(f": fdg export {run.path} {options}--out DIR, and give DIR")


def orders(names, aliases=()):
    """Lambdas with these arguments in every wrong order, and one that lacks the first argument."""
    words = [dict(aliases).get(name, name) for name in names]
    wrong = [list(one) for one in itertools.permutations(words) if list(one) != words]
    return [eval(f"lambda {', '.join(one)}: None") for one in (*wrong, words[1:])]


def test_argument_order_of_user_functions():
    """Actors, recurrent networks, wrappers, problems and callbacks are checked before tracing."""
    order, fix = "in this order", "let it take these"
    act = ("memory", "observation", "start", "keys", "greedy")
    for wrong in orders(act, {"observation": "obs", "keys": "rng"}):
        text = refused(lambda wrong=wrong: algos.Actor(lambda count: (), wrong))
        assert text.startswith("act of algos.Actor takes (") and fix in text
    assert fix in refused(lambda: algos.Actor(lambda: (), lambda *given: None))
    for wrong in orders(("parameters", "memory", "observation", "start"))[:-1]:
        network = algos.RecurrentNetwork(lambda key, observation: {}, lambda count: (), wrong)
        text = refused(lambda network=network: fdg.trace(small("recurrent_ppo", network=network)))
        assert text.startswith("unroll of network takes (") and text.endswith(order)
    for wrong in orders(("kept", "observation")):
        cls = type("Mine", (envs.Wrapper,), {"after": staticmethod(wrong)})
        assert "after of wrapper Mine takes (" in refused(lambda cls=cls: cls(ENV))
    sorting = type(envs.make("text:sorting").problem)
    for wrong in orders(("content", "response")):
        cls = type("Own", (sorting,), {"score": staticmethod(wrong)})
        assert "score of problem 'sorting' takes (" in refused(lambda cls=cls: TextTask(cls()))
    text = refused(lambda: fdg.fit(small(), callbacks=[lambda run, report: None], total_steps=32))
    assert "takes (run, report), but is called with (report): let it take these" in text
