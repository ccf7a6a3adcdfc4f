"""Other names that flags are known by elsewhere: `--lr`, `--gamma`, `--total-timesteps`."""

from collections.abc import Mapping, Sequence
from typing import Any

# By flag. Collected from the command lines of CleanRL, Stable-Baselines3, RLlib and PureJaxRL.
ALIASES: dict[str, tuple[str, ...]] = {
    "algo": ("algorithm", "alg"),
    "env": ("environment", "env-id", "env-name"),
    "seed": ("random-seed",),
    "num_seeds": ("seeds", "n-seeds"),
    "out": ("output", "out-dir", "output-dir", "run-dir", "logdir", "log-dir"),
    "devices": ("num-devices", "n-devices"),
    "total_steps": ("total-timesteps", "timesteps", "steps", "num-timesteps"),
    "num_envs": ("n-envs", "envs", "num-environments"),
    "num_steps": ("n-steps", "rollout-length", "unroll-length"),
    "num_epochs": ("n-epochs", "update-epochs", "epochs"),
    "num_minibatches": ("n-minibatches", "minibatches"),
    "learning_rate": ("lr", "step-size"),
    "anneal_learning_rate": ("anneal-lr",),
    "discount": ("gamma",),
    "gae_lambda": ("lambda", "lam"),
    "clip_ratio": ("clip-range", "clip-eps", "clip-epsilon", "clip-coef"),
    "entropy_coefficient": ("ent-coef", "entropy-coef", "entropy-cost"),
    "value_coefficient": ("vf-coef", "value-coef", "vf-cost"),
    "max_grad_norm": ("max-gradient-norm", "grad-clip"),
    "batch_size": ("minibatch-size",),
    "buffer_size": ("replay-size",),
    "target_rate": ("tau",),
    "activation": ("activation-fn",),
    "checkpoint_every": ("save-every",),
    "eval_episodes": ("n-eval-episodes", "num-eval-episodes"),
}


def with_memory(words: Sequence[str], early: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """PPO with a `--memory` is `recurrent_ppo`: the words, and what was read of them, that say so.

    Args:
      words: of a command line, normalised.
      early: what was read of them so far; without `algo`, that of an earlier run or a file stays.

    >>> with_memory(["--memory", "lstm"], {})
    (['--memory', 'lstm', '--algo', 'recurrent_ppo'], {'algo': 'recurrent_ppo'})
    >>> with_memory([], {})
    ([], {})
    >>> with_memory(["--memory=lstm"], {"algo": "ippo"})
    (['--memory=lstm'], {'algo': 'ippo'})
    """
    remembers = any(
        word.partition("=")[0] == "--memory" and (word.partition("=")[2] or after).lower() != "none"
        for word, after in zip(words, (*words[1:], ""), strict=False)  # of no words, none
    )
    goes_on = any(name in early for name in ("resume", "config", "start_from"))
    named = early.get("algo", None if goes_on else "ppo")
    if not remembers or named != "ppo":
        return list(words), dict(early)
    return [*words, "--algo", "recurrent_ppo"], {**early, "algo": "recurrent_ppo"}
