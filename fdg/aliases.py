"""Names that flags and arguments have in other libraries: `lr`, `gamma`, `total_timesteps`."""

# By our name, as flags are written: from CleanRL, Stable-Baselines3, RLlib and PureJaxRL.
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


def ours(name: str) -> str | None:
    """Our name of what other libraries call `name`, in any spelling; None if there is none.

    >>> ours("total_timesteps"), ours("lr"), ours("learning_rate")
    ('total_steps', 'learning_rate', None)
    """
    return _OURS.get(name.lower().replace("_", "-"))


_OURS = {alias: known for known, aliases in ALIASES.items() for alias in aliases}
