"""Names that flags and arguments have in other libraries: `lr`, `gamma`, `total_timesteps`."""

import re

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


def instead(name: str) -> str | None:
    """What to do here for a setting of other libraries that has no counterpart; None if it is not known.

    >>> instead("policy_kwargs")
    'the network is that of --hidden and --activation, or of --network module:name'
    """
    return _INSTEAD.get(name.lower().strip("-").replace("_", "-"))


def not_a_policy(name: object) -> str | None:
    """What to do here with a policy network of Stable-Baselines3; None if it is none.

    >>> not_a_policy("MlpPolicy")
    "'MlpPolicy' is a network, which follows from the observation here: leave it out"
    >>> not_a_policy("gpu_only")
    """
    if not isinstance(name, str) or not _NETWORKS.fullmatch(name):
        return None
    return f"{name!r} is a network, which follows from the observation here: leave it out"


_NETWORKS = re.compile(r"(Mlp|Cnn|MultiInput)(Lstm|LnLstm|Ln)?Policy", re.IGNORECASE)
_DEVICES = (
    "JAX takes the accelerators that there are: --devices N says how many, JAX_PLATFORMS=cpu takes none"
)
_TRACKER = "--wandb PROJECT logs to Weights & Biases, --tensorboard true to files in the run directory"
_NETWORK = "the network is that of --hidden and --activation, or of --network module:name"
_SAVED = "every run is saved in its directory, --out RUN: fdg.load(RUN) and --resume RUN take it from there"
_DATA = "a file of data is the environment: --env text:file?path=FILE (text:preferences?path=FILE of pairs)"
_HELD_OUT = "a held-out file goes with the environment: --env 'text:file?path=FILE&test_path=FILE'"
_MINIBATCHES = "--num-minibatches N makes minibatches of num_envs * num_steps / N samples"
_UPDATES = "--updates-per-step R is gradient steps for each step of an environment"
_INSTEAD = {
    **dict.fromkeys(("device", "cuda", "use-cuda", "gpu", "gpus", "num-gpus", "accelerator"), _DEVICES),
    **dict.fromkeys(("track", "use-wandb", "wandb-project-name", "wandb-project", "wandb-entity"), _TRACKER),
    **dict.fromkeys(("tensorboard-log", "report-to"), _TRACKER),
    **dict.fromkeys(("policy-kwargs", "net-arch", "policy-type"), _NETWORK),
    **dict.fromkeys(("save-model", "save-path", "load-path", "load", "model-path"), _SAVED),
    **dict.fromkeys(("dataset", "dataset-name", "train-dataset", "train-file", "data", "data-path"), _DATA),
    **dict.fromkeys(("eval-dataset", "test-dataset", "validation-file", "test-file"), _HELD_OUT),
    "policy": f"{_NETWORK}; a distribution policy is one of the run: fit(algorithm, policy)",
    "capture-video": "fdg.play RUN films what was trained",
    "render": "fdg.play RUN films what was trained",
    "verbose": "a run prints how it goes; in Python progress=False prints nothing",
    "eval-freq": "--eval-every N counts iterations",
    "eval-env": "--eval-every N evaluates in environments of the same name",
    "n-eval-envs": "--eval-every N evaluates 16 episodes side by side",
    "schedule": "--anneal-learning-rate true lets the step size fall linearly to zero",
    "torch-deterministic": "a run is a function of its seed",
    **dict.fromkeys(("batch-size", "minibatch-size"), _MINIBATCHES),
    **dict.fromkeys(("gradient-steps", "train-freq"), _UPDATES),
    **dict.fromkeys(("config-path", "config-name"), "--config FILE takes a run's config.json"),
    "num-workers": "--num-envs N steps so many environments together; --env-workers N are processes for them",
}
_OURS = {alias: known for known, aliases in ALIASES.items() for alias in aliases}
