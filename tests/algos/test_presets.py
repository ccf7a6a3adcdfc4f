"""Presets: each is valid, the most specific one is used, and the command line reports it."""

import dataclasses
import json
import typing

import pytest

import algos
import envs
from algos import presets
from algos.presets import Entry
from fdg.commands.cli import train_main
from fdg.commands.parse import parse as parse_words
from fdg.errors import FdgError
from fdg.training.recorder import ConstantReturns, LargeUpdates

ENTRIES = [
    (algos.get(name).__name__, key)
    for name in algos.names("environments")
    for key in presets.names(algos.get(name).__name__)
]


def parse(words):
    return parse_words(words.split(), "train", "")


@pytest.mark.parametrize(("algorithm", "key"), ENTRIES)
def test_presets_are_valid(algorithm, key, monkeypatch):
    """Every field exists with a valid value, and sizes divide, on CPU and GPU."""
    cls = getattr(algos, algorithm)
    agents = getattr(cls, "several_agents", False)
    action_spaces = typing.cast(tuple, cls.action_spaces)
    env = envs.make("probe:agents" if agents else "probe:value")
    if not agents and envs.Discrete not in action_spaces:
        env = envs.vectorize(_Continuous())
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr("jax.default_backend", lambda platform=platform: platform)
        preset = presets.named(algorithm, key)
        tuned = cls(env=env, **preset.values)
        assert preset.source and tuned.num_iterations > 1, "a run of one iteration learns nothing"


_VECTOR, _MOTORS = envs.Box(-1.0, 1.0, (3,)), envs.Box(-1.0, 1.0, (2,))


@dataclasses.dataclass(frozen=True)
class _Continuous:
    """Vector observations and actions. Its spaces, not its name, decide which preset applies."""

    name: str = "continuous"
    observation_space: typing.Any = _VECTOR
    action_space: typing.Any = _MOTORS
    max_episode_steps: typing.ClassVar[int] = 5

    def reset(self, key):
        raise NotImplementedError

    def step(self, key, state, action):
        raise NotImplementedError


_CONTINUOUS = _Continuous()


def test_most_specific_preset(monkeypatch):
    family, pattern, exact = (Entry(name, {"discount": 0.1}) for name in ("family", "pattern", "exact"))
    table = {"brax": family, "brax:ant:*": pattern, "brax:ant:spring": exact}
    monkeypatch.setattr(presets.physics, "PRESETS", {"PPO": table})
    names = ("brax:hopper", "brax:ant", "brax:ant:mjx", "brax:ant:spring")
    found = [presets.find("PPO", name) for name in names]
    assert [preset.source for preset in found] == ["family", "family", "pattern", "exact"]


def test_continuous_control_normalises_observations():
    for name in ("envpool:Hopper-v4", "gymnasium:Ant-v5", "brax:hopper", "playground:CheetahRun"):
        for algorithm in ("PPO", "A2C", "A3C", "IMPALA"):
            assert presets.of(algorithm, name)["normalize_observation"], (algorithm, name)
    for algorithm in ("SAC", "TD3"):
        assert presets.of(algorithm, "brax:hopper") == {"normalize_observation": True}
        assert presets.of(algorithm, "envpool:Hopper-v4") == {}
    env = envs.vectorize(_Continuous())
    assert algos.make("ppo", env).normalize_observation
    assert not algos.PPO(env=env).normalize_observation
    assert presets.find("PPO", "probe:value", envs.make("probe:value")) is None


def test_preset_by_spaces():
    """DQN on MiniGrid uses `grid`. SAC on MuJoCo keeps its defaults; probes have no presets."""
    grid_space = envs.Box(0.0, 10.0, (7, 7, 3), "uint8")
    grid = dataclasses.replace(_CONTINUOUS, observation_space=grid_space, action_space=envs.Discrete(7))
    assert presets.find("DQN", "envpool:MiniGrid-Empty-5x5-v0", grid).name == "grid"
    assert presets.find("PPO", "envpool:MiniGrid-Empty-5x5-v0", grid).name == "minigrid"
    assert presets.find("DQN", "envpool:MiniGrid-Empty-5x5-v0") is None
    assert presets.find("TD3", "gymnasium:BipedalWalker-v3", _CONTINUOUS).name == "continuous-control"
    for algorithm, name in (
        ("SAC", "envpool:Hopper-v4"),
        ("PPO", "probe:continuous"),
    ):
        assert presets.find(algorithm, name, _CONTINUOUS) is None
    rescue = dataclasses.replace(_CONTINUOUS, observation_space=envs.Box(-1.0, 1.0, (2, 3, 128)))
    assert presets.find("PPO", "my.module:rescue", rescue).name == "continuous-control"
    assert presets.find("PPO", "envpool:Jumanji/SearchAndRescue-v0", rescue).name == "jumanji"


def test_no_statistics_for_categories():
    """For integer codes and categories, presets do not set `normalize_observation`, which would raise."""
    coded = envs.Dict({"map": envs.Box(0.0, 4.0, (9, 9), "int32"), "step": envs.Discrete(9)})
    sokoban = dataclasses.replace(_CONTINUOUS, observation_space=coded, action_space=envs.Discrete(4))
    values = presets.of("PPO", "envpool:Sokoban-v0", sokoban)
    assert values["normalize_reward"] and "normalize_observation" not in values
    assert presets.of("PPO", "envpool:Sokoban-v0")["normalize_observation"]


def test_preset_flag():
    named = parse("--env Pendulum-v1 --preset continuous-control --num-envs 16")
    assert named.algorithm.num_steps == 256 and named.algorithm.num_envs == 16
    assert named.record["preset_name"] == "continuous-control"
    without = parse("--env Pendulum-v1 --preset none")
    assert without.algorithm == algos.PPO(env=envs.make("Pendulum-v1"))
    assert without.record["preset_name"] is None and without.record["preset"] == {}


def test_show_preset_flag(capsys):
    assert train_main("--env Pendulum-v1 --show-preset".split()) == 0
    said = capsys.readouterr().out
    assert "preset Pendulum-v1 of ppo" in said and "docs/settings.md" in said
    assert ["discount", "0.95", "(default:", "0.99)"] in [line.split() for line in said.splitlines()]
    assert train_main("--env CartPole-v1 --show-preset".split()) == 0
    assert "no preset of ppo for CartPole-v1" in capsys.readouterr().out
    assert train_main("--env Pendulum-v1 --preset none --show-preset".split()) == 0
    said = capsys.readouterr().out
    assert "preset none of ppo for Pendulum-v1" in said and "learning_rate" in said and "num_envs" in said
    assert train_main(["--env", "Pendulum-v1", "--preset", "mujocco"]) == 2
    assert "unknown preset of PPO 'mujocco': did you mean 'mujoco'" in capsys.readouterr().err


def test_resume_keeps_settings(tmp_path):
    job = parse("--env Pendulum-v1 --preset none")
    (tmp_path / "config.json").write_text(json.dumps(dict(job.config), allow_nan=False))
    again = parse(f"--resume {tmp_path}")
    assert again.algorithm == job.algorithm and again.algorithm.num_envs == 4
    with pytest.raises(FdgError, match="--preset minatar: --resume continues with the settings of a run"):
        parse(f"--resume {tmp_path} --preset minatar")
    with pytest.raises(FdgError, match="--preset minatar: --config and --from start from the settings"):
        parse(f"--config {tmp_path / 'config.json'} --preset minatar")


class Written(algos.PPO):
    """An algorithm with its own presets."""

    @classmethod
    def preset(cls, env_name, env=None):
        return {"discount": 0.5}


def test_subclass_overrides_presets():
    job = parse(f"--algo {__name__}:Written")
    assert job.algorithm.discount == 0.5
    with pytest.raises(FdgError, match="Written has no named presets"):
        parse(f"--algo {__name__}:Written --preset minatar")
    assert parse(f"--algo {__name__}:Written --preset none").algorithm.discount == 0.99


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ([[-200.0, -200.0], [-200.0]], True),
        ([[-200.0, -200.0], [-199.0]], False),
        ([[-200.0], [-200.0]], False),  # too few episodes
        ([[float("nan")], [float("nan")]], False),  # no episode has ended
        ([[float("nan"), 0.0], [0.0, 0.0]], True),
    ],
)
def test_constant_returns_hint(returns, said):
    hint = ConstantReturns(num_iterations=20)
    assert hint.check(1, 500, returns[0]) is None
    line = hint.check(2, 1000, returns[1])
    assert (line is not None) == said
    assert not said or "after 1,000 steps every episode has returned" in line
    assert not said or hint.check(3, 1500, [returns[0][0]]) is None, "said once"


def test_constant_returns_hint_waits_for_episodes():
    hint = ConstantReturns(num_iterations=20)
    assert all(hint.check(i, 500 * i, [float("nan")]) is None for i in range(1, 9))
    assert hint.check(9, 4500, [-200.0, -200.0]) is None
    assert "after 5,000 steps" in hint.check(10, 5000, [-200.0])


def test_constant_returns_hint_has_advice():
    said = [
        ConstantReturns(num_iterations=20, advice=advice).check(2, 1000, [0.0, 0.0, 0.0])
        for advice in (None, algos.GRPO.advice_without_rewards)
    ]
    assert "try another --algo" in said[0] and "--algo sft" in said[1] and "--num-envs" not in said[1]


def test_constant_returns_hint_after_resume():
    hint = ConstantReturns(num_iterations=20, start=2)
    assert hint.check(3, 1500, [-1.0]) is None


def rows(**columns):
    return [
        {"iteration": i, **dict(zip(columns, values, strict=True))}
        for i, values in enumerate(zip(*columns.values(), strict=True), 1)
    ]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (rows(approx_kl=[0.01, 0.5, 0.02]), None),
        (
            rows(approx_kl=[0.01, 194.3, 3.0]),
            ["in iteration 2 approx_kl is 194", "--learning-rate than 0.01"],
        ),
        (rows(approx_kl=[0.0] * 10 + [50.0]), None),  # only early iterations are checked
        (
            rows(entropy=[2.0, 1.9, 0.05], episode_return=[0.5, 0.6, 0.4]),
            ["fallen from 2 to 0.05", "--preset"],
        ),
        (rows(entropy=[2.0, 1.9, 0.05], episode_return=[0.5, 0.6, 0.9]), None),  # the return improves
        (rows(entropy=[0.006, 0.002, 0.01]), None),
        (rows(entropy=[-1.0, -9.0, -20.0]), None),  # of a continuous distribution
        (rows(loss=[1e9]), None),
    ],
)
def test_large_updates_hint(metrics, words):
    messages = (
        LargeUpdates(0.01).check(metrics),
        next(
            filter(None, map(check_by_row := LargeUpdates(0.01).check, [[row] for row in metrics])),
            None,
        ),
    )
    assert messages[0] == messages[1] and (messages[0] is not None) == bool(words)
    assert all(word in messages[0] for word in words or ())
    assert not words or check_by_row(metrics) is None, "said once"


def test_subclass_inherits_presets():
    @dataclasses.dataclass(frozen=True)
    class Subclass(algos.PPO):
        extra: float = 1.0

    assert Subclass.preset("Pendulum-v1") == algos.PPO.preset("Pendulum-v1") != {}
    assert algos.MAPPO.preset("MPE_simple_spread_v3") != algos.IPPO.preset("MPE_simple_spread_v3")
    assert algos.RecurrentPPO.preset("MountainCar-v0") == {} != algos.PPO.preset("MountainCar-v0")
