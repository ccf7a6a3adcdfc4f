"""Random command lines: flags that there are and that there are not, with values good, bad and absurd."""

import random
from collections.abc import Callable
from typing import Any

from fdg.commands.aliases import ALIASES

NUMBERS = (
    *("0", "1", "2", "3", "7", "8", "16", "64", "-1", "1.5", "1e3", "1e-3", "-1e-3", ".5", "0x10", "1_000"),
    *("1e400", "-1e400", "inf", "-inf", "nan", "4294967295", "4294967296", "9223372036854775808", "1" * 5000),
)
WORDS = (
    *("", " ", "--", "-", "none", "None", "true", "no", "maybe", "ppo", "PPO", "all", "each", "fast", "{}"),
    *("{{}}", "[1]", "a=b", "=", "?", "a?b=c", "/dev/null", "\x00", "\udcff", "ünï", "x" * 3000),
)
ENVIRONMENTS = (
    *(
        "CartPole-v1",
        "Pendulum-v1",
        "probe:value",
        "probe:memory",
        "Breakout-MinAtar",
        "CartPole-v2",
        "cartpole",
    ),
    *("CartPole-v1?gravity=9.0", "CartPole-v1?gravity=", "CartPole-v1?max_steps_in_episode=0"),
    *("CartPole-v1?max_steps_in_episode=1e400", "CartPole-v1?max_steps_in_episode=99999999999999999999"),
    *("CartPole-v1?gravity={{}}", "CartPole-v1?gravity=[1]", "CartPole-v1?gravity=(1,", "CartPole-v1?=3"),
    *("CartPole-v1?{{}}", "probe:memory?delay=0", "probe:memory?delay=-1", "probe:memory?delay={{}}"),
    *("gymnasium:", "gymnasium:Nothing-v0", "envpool:", "brax:", "brax:nothing", "nowhere:maze"),
)
ALGORITHMS = (
    *("ppo", "PPO", "dqn", "sac", "a2c", "recurrent_ppo", "ippo", "pppo", "nowhere:Mine", "tests.tiny:", ":"),
    *(
        "tests.tiny:Walk",
        "tests.tiny:Pupil",
        "tests.tiny:Silent",
        "tests.tiny:Endless",
        "json:loads",
        "a:b:c",
    ),
)
POLICIES = ("gpu_only", "GPUOnly", "multi_learner", "single_learner_coarse", "central", "gpu_onyl", "Group")
NUMERIC = (
    *("num_envs", "num_steps", "total_steps", "learning_rate", "discount", "num_epochs", "num_minibatches"),
    *(
        "hidden",
        "clip_ratio",
        "max_grad_norm",
        "batch_size",
        "buffer_size",
        "updates_per_step",
        "memory_size",
    ),
    *("sequence_length", "burn_in", "scale", "widths", "width", "num_updates", "learning_starts", "n_step"),
    *("devices", "seed", "num_seeds", "eval_episodes", "checkpoint_every", "staleness", "actors", "learners"),
    *("workers", "servers", "model_parallel", "eval_every", "stop_at"),
)
OTHER = (
    *(
        "activation",
        "shuffle",
        "clip_value",
        "no-clip-value",
        "normalize_reward",
        "on_nan",
        "label",
        "drifts",
    ),
    *(
        "parameters",
        "xla_options",
        "trust",
        "from",
        "config",
        "resume",
        "out",
        "hel",
        "qqq",
        "num_env",
        "learning-rat",
        "",
    ),
)


def draw_words(draw: random.Random) -> list[str]:
    """A command line of up to seven flags, most of them right and some not."""
    words: list[str] = []
    for _ in range(draw.randrange(7)):
        name, values = draw.choice(
            [
                ("env", ENVIRONMENTS),
                ("algo", ALGORITHMS),
                ("policy", POLICIES),
                *[(draw.choice(NUMERIC), NUMBERS)] * 6,
                (draw.choice(OTHER), (*WORDS, *NUMBERS)),
            ]
        )
        if draw.random() < 0.1:
            name = draw.choice(ALIASES.get(name, (name,)))
        if draw.random() < 0.15:
            values = WORDS
        option = f"--{name}" if draw.random() < 0.5 else f"--{name.replace('_', '-')}"
        value = draw.choice(values)
        shape = draw.random()
        if shape < 0.45:
            words += [option, value]
        elif shape < 0.9:
            words.append(f"{option}={value}")
        elif shape < 0.95:
            words.append(option)
        else:
            words.append(value)
    return words


def outcome(command: Callable[[list[str]], int], words: list[str], capsys: Any) -> str | None:
    """What is wrong with how a command took a command line; None if nothing is."""
    capsys.readouterr()
    try:
        status = command(words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    if status == 0:
        return f"it says {said}" if said else None
    if status != 2 or len(said) != 1 or not said[0].startswith("error: ") or len(said[0]) > 1500:
        return f"status {status}, {len(said)} lines: {said[:3]}"
    return None
