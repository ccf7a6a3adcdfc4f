"""Presets for physics: MuJoCo, brax, and the DeepMind Control Suite."""

from algos.presets.control import ACTOR_CRITICS, FAST_ON_CPU, NORMALIZING_OFF_POLICY
from algos.presets.control import PRESETS as _CONTROL
from algos.presets.entry import Entry

# With CleanRL's initial standard deviation of 1, most half-cheetahs learn to slide on their backs (1,700).
_MUJOCO = _CONTROL["PPO"]["continuous-control"].with_changes(
    "an initial standard deviation of exp(-1), tried on seeds 500 and 501; docs/settings.md",
    initial_log_std=-1.0,
)

_ON_CPU = {"num_envs": 64, "num_steps": 256, "num_minibatches": 32}

# PPO here lacks a fixed reward scale, a squashed Gaussian, and separate critic widths, which brax's PPO has.
# PureJaxRL's choices replace them: rewards scaled by their running deviation, no entropy bonus, two layers of
# 256. An iteration has as many steps as brax's: `batch_size * num_minibatches * unroll_length`.
_ANT = Entry(
    "brax's notebooks/training.ipynb, with PureJaxRL's choices for what PPO here lacks; not tuned",
    {
        "total_steps": 25_000_000,
        "num_envs": 4096,
        "num_steps": 80,
        "num_epochs": 4,
        "num_minibatches": 32,
        "learning_rate": 3e-4,
        "anneal_learning_rate": False,
        "discount": 0.97,
        "clip_ratio": 0.3,
        "clip_value": False,
        "entropy_coefficient": 0.0,
        "max_grad_norm": 1.0,
        "hidden": (256, 256),
        "activation": "silu",
        "normalize_observation": True,
        "normalize_reward": True,
    },
    _ON_CPU,
)
_BRAX = _ANT.with_changes("2,048 environments", num_envs=2048, total_steps=50_000_000)
_HALFCHEETAH = _BRAX.with_changes("its halfcheetah", num_steps=160, num_epochs=8, discount=0.95)
_HUMANOID = _BRAX.with_changes("its humanoid", num_steps=160, num_epochs=8)
_HUMANOIDSTANDUP = _BRAX.with_changes(
    "its humanoidstandup", num_steps=240, num_epochs=8, learning_rate=6e-4, total_steps=100_000_000
)
_REACHER = _BRAX.with_changes("its reacher", num_steps=200, num_epochs=8, discount=0.95)
_PUSHER = _BRAX.with_changes("its pusher", num_steps=120, num_minibatches=16, num_epochs=8, discount=0.95)
_INVERTED_DOUBLE_PENDULUM = _BRAX.with_changes("its inverted_double_pendulum", total_steps=20_000_000)
_INVERTED_PENDULUM = Entry(
    "chosen on three seeds; docs/settings.md",
    {
        "total_steps": 2_000_000,
        "num_envs": 64,
        "num_steps": 64,
        "num_minibatches": 8,
        "learning_rate": 1e-3,
        "entropy_coefficient": 0.0,
        "normalize_observation": True,
    },
)

_CONTROL_SUITE = Entry(
    "MuJoCo Playground's config/dm_control_suite_params.py, rewards scaled by their deviation, not by 10",
    {
        **_ANT.values,
        "total_steps": 60_000_000,
        "num_envs": 2048,
        "num_steps": 480,
        "num_epochs": 16,
        "learning_rate": 1e-3,
        "discount": 0.995,
        "entropy_coefficient": 1e-2,
    },
    on_cpu={"num_envs": 64, "num_steps": 256, "num_epochs": 8},
)


def _brax_entries(task: str, entry: Entry) -> dict[str, Entry]:
    """The keys of a task of brax, with every physics engine, each with this entry."""
    return {f"brax:{task}": entry, f"brax:{task}:*": entry}


def _suite_entries(task: str, entry: Entry) -> dict[str, Entry]:
    """The keys of a task of the Control Suite, in both implementations, each with this entry."""
    return {f"playground:{task}": entry, f"envpool:{task}-v1": entry}


# By class name of the algorithm, then by key: a family, an environment, or a pattern (`algos.presets`).
# Playground repeats each action of PendulumSwingup four times: `playground:PendulumSwingup?action_repeat=4`.
PRESETS: dict[str, dict[str, Entry]] = {
    "PPO": {
        "mujoco": _MUJOCO,
        "brax": _BRAX,
        **_brax_entries("ant", _ANT),
        **_brax_entries("halfcheetah", _HALFCHEETAH),
        **_brax_entries("humanoid", _HUMANOID),
        **_brax_entries("humanoidstandup", _HUMANOIDSTANDUP),
        **_brax_entries("inverted_double_pendulum", _INVERTED_DOUBLE_PENDULUM),
        **_brax_entries("inverted_pendulum", _INVERTED_PENDULUM),
        **_brax_entries("pusher", _PUSHER),
        **_brax_entries("reacher", _REACHER),
        "control-suite": _CONTROL_SUITE,
        **_suite_entries("BallInCup", _CONTROL_SUITE.with_changes("its BallInCup", discount=0.95)),
        **_suite_entries("BallInCupCatch", _CONTROL_SUITE.with_changes("its BallInCup", discount=0.95)),
        **_suite_entries("FingerSpin", _CONTROL_SUITE.with_changes("its FingerSpin", discount=0.95)),
        **_suite_entries(
            "PendulumSwingup",
            _CONTROL_SUITE.with_changes(
                "its PendulumSwingup", num_epochs=4, on_cpu={**_CONTROL_SUITE.on_cpu, "num_epochs": 4}
            ),
        ),
    }
}
for _task in ("AcrobotSwingup", "AcrobotSwingupSparse", "SwimmerSwimmer6", "WalkerRun"):
    _longer = _CONTROL_SUITE.with_changes("a longer run", total_steps=100_000_000)
    PRESETS["PPO"].update(_suite_entries(_task, _longer))
for _algorithm, _entry in ACTOR_CRITICS.items():
    PRESETS[_algorithm] = {
        "mujoco": _entry.with_changes(
            "an initial standard deviation of exp(-1), as for PPO", initial_log_std=-1.0
        ),
        "brax": _entry,
        "control-suite": _entry,
    }
_FAST_TD3 = Entry(
    "FastTD3's hyperparams.py for CheetahRun, its example of the suite; smaller on a CPU, not tuned",
    {
        "num_envs": 1024,
        "total_steps": 102_400_000,
        "buffer_size": 10_485_760,
        "learning_starts": 10_240,
        "updates_per_step": 2 / 1024,
        "discount": 0.97,
        "n_step": 3,
        "value_min": -500.0,
        "value_max": 500.0,
        "smallest_noise": 0.1,
        "target_noise": 0.1,
    },
    on_cpu=FAST_ON_CPU,
)
# For fewer environments, on the host, and for MuJoCo's rewards (10 and more per step in HalfCheetah).
_FAST_TD3_ON_HOST = Entry(
    "FastTD3's fast_td3/hyperparams.py, CheetahRun, with 64 environments, a tenth of the samples and a wider"
    " grid; not tuned",
    {
        "num_envs": 64,
        "total_steps": 3_000_000,
        "buffer_size": 1_000_000,
        "batch_size": 4_096,
        "learning_starts": 5_000,
        "updates_per_step": 1 / 32,
        "n_step": 3,
        "value_min": -1_500.0,
        "value_max": 1_500.0,
        "smallest_noise": 0.1,
        "target_noise": 0.1,
    },
    on_cpu={**FAST_ON_CPU, "updates_per_step": 0.5},
)
PRESETS["FastTD3"] = {"control-suite": _FAST_TD3, "brax": _FAST_TD3, "mujoco": _FAST_TD3_ON_HOST}
_DEFAULTS = Entry("its defaults, with which CleanRL and Stable-Baselines3 Zoo train MuJoCo's tasks", {})
for _algorithm in ("SAC", "CrossQ", "TD3", "REDQ", "DroQ", "TQC"):
    PRESETS[_algorithm] = {
        "mujoco": _DEFAULTS,
        **dict.fromkeys(("brax", "control-suite"), NORMALIZING_OFF_POLICY),
    }
