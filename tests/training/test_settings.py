"""The settings of a job: JSON, ranges, flags and resume, for each field of their dataclasses."""

import dataclasses
import inspect
import json
import random
import typing
from pathlib import Path
from typing import ClassVar, Literal, get_args, get_origin

import pytest

import fdg
from fdg.commands.flags import JobFlags, Words, flags_of, normalise
from fdg.commands.parse import parse
from fdg.errors import FdgError
from fdg.kinds import from_json, to_json
from fdg.training import description, settings
from fdg.training.settings import GROUPS, Names, Settings
from tests.commands.any_flags import draw_words

KEPT = settings.kept_settings(Names, Settings)
FILE = Path("run", "config.json")


def values_of(kind, field):
    """Valid values of a setting."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    words = [one for one in get_args(kind) if get_origin(one) is Literal]
    plain = (set(get_args(kind)) or {kind}) - {type(None), *words}
    least, most = field.metadata.get("least", 0), field.metadata.get("most", 10**9)
    integers = [least, most, random.Random(field.name).randint(least, most)]
    by_kind = {int: integers, float: [-1.5, 3.0, float("inf")], bool: [True, False], str: ["a", "none", "3"]}
    optional = [None] if type(None) in get_args(kind) else []
    return [*by_kind[plain.pop()], *optional, *(value for one in words for value in get_args(one))]


@pytest.mark.parametrize("name", KEPT)
def test_settings_json_round_trip(name):
    field, kind = KEPT[name]
    for value in values_of(kind, field):
        text = json.dumps({name: to_json(value)}, allow_nan=False)
        found = settings.read_settings(FILE, json.loads(text))
        assert found == {name: value} and type(found[name]) is type(value)
    wrong = [{}, [1, 2], ["a"], *([] if "str" in str(kind) else ["a", "3"])]
    wrong += [] if "bool" in str(kind) else [True]
    wrong += [] if "int" in str(kind) or "float" in str(kind) else [3]
    for value in wrong:
        with pytest.raises(FdgError, match=f"run/config.json has {name} = .*, which is not "):
            settings.read_settings(FILE, {name: value})


@pytest.mark.parametrize("name", [name for name in KEPT if "least" in KEPT[name][0].metadata])
def test_out_of_range_numbers_are_refused(name):
    bounds = KEPT[name][0].metadata
    option = f"--{name.replace('_', '-')}"
    for value, bound in [(bounds["least"] - 1, "at least"), (bounds.get("most", 10**30) + 1, "at most")]:
        if value > 10**30:
            continue
        with pytest.raises(FdgError, match=f"{option} {value}: it must be {bound}"):
            settings.check_range(name, value)
        if "most" in bounds:
            with pytest.raises(FdgError, match=f"has {name} = {value}, which is not a whole number from"):
                settings.read_settings(FILE, {name: value})
    settings.check_range(name, bounds["least"])
    settings.check_range(name, None)


def test_resume_may_not_change_what_is_computed():
    before = dict.fromkeys(KEPT, "before") | {
        "hyperparameters": {"rate": 1},
        "policy_fields": {"actors": 2},
    }
    refused = {name for name in KEPT if settings.contradiction(before, {name: "now"})}
    names = {"algo", "env", "staleness", "lag", "seed", "num_seeds", "sweep", "exploit_every", "search"} | {
        "self_play"
    }
    assert refused == names
    assert settings.contradiction(before, {"hyperparameters": {"rate": 2}}) == ("rate", 1, 2)
    assert settings.contradiction(before, {"rate": 2}) == ("rate", 1, 2)
    assert settings.contradiction(before, {"actors": 3}) is None
    assert settings.contradiction(before, {"policy_fields": {"learners": 3}}) is None
    assert settings.contradiction(before, before) is None


def test_fit_arguments_match_the_settings():
    hints, fields = typing.get_type_hints(fdg.fit), Settings.__dataclass_fields__
    kinds = typing.get_type_hints(Settings)
    own = {"total_steps", "devices", "out"}  # differ in Python
    shared = [name for name in inspect.signature(fdg.fit).parameters if name in fields and name not in own]
    assert {"seed", "eval_every", "stop_at", "wandb"} <= {*shared}
    for name in shared:
        assert hints[name] == kinds[name], name
        assert inspect.signature(fdg.fit).parameters[name].default == fields[name].default, name


def test_changed_job_updates_its_configuration():
    """The changed job equals one parsed from a command line with the new flags."""
    words = "--env probe:value --devices 2 --total-steps 4096"
    job = parse(f"{words} --policy gpu_only --num-envs 4".split(), "", "")
    other = parse(f"{words} --policy single_learner_coarse --staleness 1 --num-envs 8".split(), "", "")
    changed = job.changed(other.algorithm, other.policy, {"policy_asked": "auto"}, devices_chosen=2)
    assert changed.algorithm == other.algorithm and changed.policy == other.policy
    assert changed.config == {**other.config, "devices_chosen": 2, "policy_asked": "auto"}
    assert list(changed.described) == [*job.described, "policy_asked"]


def test_each_setting_is_a_flag():
    text = " ".join(JobFlags(has_total_steps=True).parser().format_help().split())
    for flag in (flag for group in GROUPS.values() for flag in flags_of(group)):
        assert flag.option in text and flag.help.split(" (None: ")[0][:20] in text
    assert "--devices-chosen" not in text


def test_two_parsers_match_one():
    """Random command lines: one parser of all flags, against one of settings and one of the rest."""

    def outcome(read):
        try:
            return read()
        except (FdgError, SystemExit) as error:  # --help exits
            return str(error)

    all_flags = JobFlags.of(fdg.algos.PPO, fdg.policies.GPUOnly).parser()
    settings_only, agreed = JobFlags().parser(add_help=False), 0
    for seed in range(150):
        argv = draw_words(random.Random(seed))
        expected = outcome(lambda argv=argv: all_flags.parse_strictly(normalise(argv)))
        if isinstance(expected, str):
            continue

        def by_two_parsers(argv=argv):
            words = Words(argv)
            first = words.take(settings_only)
            return {**first, **all_flags.parse_strictly(words.remaining)}

        assert outcome(by_two_parsers) == expected, argv
        agreed += 1
    assert agreed > 20


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (tuple[int, ...] | None, (64, 64)),
        (tuple[int, ...] | None, ()),
        (tuple[float, ...], (0.5, 1.0)),
        (tuple[str, ...], ("a", "b")),
        (float, float("-inf")),
        (str, "inf"),
        (Literal["a", 3], 3),
        (bool | None, False),
    ],
)
def test_field_json_round_trip(kind, value):
    found = from_json(kind, json.loads(json.dumps(to_json(value))))
    assert found == value and type(found) is type(value)


@dataclasses.dataclass(frozen=True)
class Mine:
    """An algorithm with an annotation that cannot be resolved at run time."""

    thing: "Nowhere | None" = None  # noqa: F821
    rate: float = 1
    steps_per_iteration: ClassVar[int] = 1

    def init(self, key):
        return key

    def iterate(self, state):
        return state, {}


def test_fields_without_a_flag_are_read_from_the_file(tmp_path):
    """A field of unresolvable type stays in the configuration, also when the run is resumed."""
    config = description.describe(Mine(rate=2), fdg.policies.GPUOnly())
    (tmp_path / "config.json").write_text(json.dumps({**config, "total_steps": 8, "devices_chosen": 1}))
    words = ["--resume", str(tmp_path), "--trust", "--devices", "2"]
    job = parse(words, "train", "")
    assert job.algorithm == Mine(rate=2) and job.config["hyperparameters"] == {"thing": None, "rate": 2}
    assert (job.devices, job.devices_chosen, job.num_iterations, job.out) == (2, None, 8, tmp_path)
    assert parse(words[:3], "train", "").devices_chosen == 1
    assert parse([*words[:3], "--out", "none"], "train", "").out == tmp_path
    with pytest.raises(FdgError, match="unknown flag '--rate'"):
        parse([*words, "--rate", "3"], "train", "")
    (tmp_path / "config.json").write_text(json.dumps({**config, "hyperparameters": {"speed": 1}}))
    with pytest.raises(FdgError, match=r"config.json has 'speed' in hyperparameters, which .*:Mine lacks"):
        fdg.load(tmp_path, trust=True)
