"""Maps names of other libraries to fdg's: flags, arguments, algorithms, methods, such as `lr` and `ddqn`."""

import re
from collections.abc import Mapping
from typing import Any

# fdg's name -> names in CleanRL, Stable-Baselines3, RLlib, PureJaxRL and TRL, spelled as flags. Flags accept
# these names silently, so they must have the same meaning and unit. Other names are in `_FIXES`.
ALIASES: dict[str, tuple[str, ...]] = {
    "algo": ("algorithm", "alg"),
    "env": ("environment", "env-id", "env-name"),
    "seed": ("random-seed",),
    "num_seeds": ("seeds", "n-seeds"),
    "out": ("output", "out-dir", "output-dir", "run-dir", "logdir", "log-dir"),
    "devices": ("num-devices", "n-devices"),
    "total_steps": ("total-timesteps", "timesteps", "steps", "num-timesteps"),
    "num_envs": ("n-envs", "envs", "num-environments"),
    "num_steps": ("n-steps", "rollout-length", "unroll-length", "rollout-fragment-length"),
    "num_epochs": ("n-epochs", "update-epochs", "epochs", "num-sgd-iter"),
    "num_minibatches": ("n-minibatches", "minibatches"),
    "learning_rate": ("lr", "step-size"),
    "anneal_learning_rate": ("anneal-lr",),
    "discount": ("gamma",),
    "gae_lambda": ("lambda", "lam"),
    "clip_ratio": ("clip-range", "clip-eps", "clip-epsilon", "clip-coef", "clip-param"),
    "entropy_coefficient": ("ent-coef", "entropy-coef", "entropy-cost", "entropy-coeff"),
    "value_coefficient": ("vf-coef", "value-coef", "vf-cost", "vf-loss-coeff"),
    "max_grad_norm": ("max-gradient-norm", "grad-clip"),
    "batch_size": ("minibatch-size",),
    "buffer_size": ("replay-size",),
    "target_rate": ("tau",),
    "activation": ("activation-fn", "fcnet-activation"),
    "checkpoint_every": ("save-every",),
    "eval_every": ("evaluation-interval",),
    "clip_value": ("clip-vloss",),
    "normalize_advantage": ("norm-adv",),
    "epsilon_start": ("start-e", "exploration-initial-eps"),
    "epsilon_end": ("end-e", "exploration-final-eps"),
    "target_noise": ("target-policy-noise",),
    "target_noise_clip": ("noise-clip",),
    "policy_delay": ("policy-frequency",),
    "atoms": ("n-atoms",),
    "quantiles": ("n-quantiles",),
    "value_min": ("v-min",),
    "value_max": ("v-max",),
    "hidden": ("fcnet-hiddens",),
    "model": ("model-name-or-path", "model-name"),
    "dtype": ("torch-dtype",),
    "remat": ("gradient-checkpointing",),
    "lora_rank": ("lora-r",),
    "group_size": ("num-generations",),
    "max_response": ("max-completion-length", "max-new-tokens"),
    "kl_coefficient": ("beta", "kl-coef", "kl-coeff"),
    "clip_high": ("epsilon-high",),
    "warmup": ("warmup-steps",),
    "eval_episodes": ("n-eval-episodes", "num-eval-episodes", "evaluation-duration"),
}


def ours(name: str) -> str | None:
    """fdg's name for another library's `name`, in any spelling; None if there is none.

    >>> ours("total_timesteps"), ours("lr"), ours("learning_rate")
    ('total_steps', 'learning_rate', None)
    """
    return _FDG_NAMES.get(_normalised(name))


def instead(name: str) -> str | None:
    """The fix for a setting of another library that has no counterpart in fdg, or None.

    >>> instead("policy_kwargs")
    'the network is set by --hidden and --activation, or by --network module:name'
    """
    return _FIXES.get(_normalised(name))


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").strip("-")


def variant(name: str) -> str | None:
    """The fix for an algorithm that in fdg is a setting of another algorithm, or None.

    >>> variant("ddqn")
    'use dqn with double=True: --algo dqn --double true'
    """
    fix = VARIANTS.get(_normalised(name), "")
    if isinstance(fix, str):
        return fix or None
    algo, settings = fix
    flags = "".join(f" --{key.replace('_', '-')} {str(value).lower()}" for key, value in settings.items())
    fields = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return f"use {algo}{fields and f' with {fields}'}: --algo {algo}{flags}"


def not_a_policy(name: object) -> str | None:
    """The fix if the name of a Stable-Baselines3 policy network was given as a policy, or None.

    >>> not_a_policy("MlpPolicy")
    "'MlpPolicy' is a network, which follows from the observation here: leave it out"
    >>> not_a_policy("gpu_only")
    """
    if not isinstance(name, str) or not _NETWORKS.fullmatch(name):
        return None
    return f"{name!r} is a network, which follows from the observation here: leave it out"


# Method of other libraries' models -> the fix.
METHOD_FIXES: Mapping[str, str] = {
    **dict.fromkeys(("learn", "update", "train", "fit"), "to train, write fdg.fit(algorithm, total_steps=N)"),
    **dict.fromkeys(
        ("act", "predict", "sample"),
        "to act, write run.policy(observation), of the run that fdg.fit(algorithm, total_steps=N) returns",
    ),
    "set_env": "to change it, write dataclasses.replace(algorithm, env=env)",
    "step": "to step environments, write algorithm.env.step(keys, state, actions)",
}

_INDEPENDENT_FIX = "for independent agents use --algo ippo; --algo mappo has a common critic"
_MASK_FIX = "masks need no separate algorithm: --algo ppo reads the part 'action_mask' of observations"
_R2D2_SETTINGS = {"memory": "lstm", "double": True, "dueling": True, "n_step": 5, "priority_exponent": 0.9}


def _same_fix(fix: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), fix)


def _nearest_fix(algo: str) -> str:
    return f"fdg does not have it: the nearest is --algo {algo}"


# Normalised name of an algorithm that fdg lacks -> (fdg's algorithm, settings of it), or the fix as text.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]] | str] = {
    **_same_fix(("dqn", {"double": True}), "ddqn double-dqn dqn-double"),
    **_same_fix(("dqn", {"dueling": True}), "dueling-dqn dueling dqn-dueling"),
    **_same_fix(("dqn", {"double": True, "dueling": True}), "d3qn dueling-ddqn dueling-double-dqn"),
    **_same_fix(("dqn", {"priority_exponent": 0.6}), "per per-dqn dqn-per prioritized-dqn apex"),
    **_same_fix(("dqn", {"n_step": 3}), "n-step-dqn nstep-dqn dqn-n-step"),
    **_same_fix(("c51", {"double": True, "dueling": True, "n_step": 3, "priority_exponent": 0.5}), "rainbow"),
    **_same_fix(("c51", {}), "categorical-dqn distributional-dqn"),
    **_same_fix(("qr_dqn", {}), "qrdqn quantile-dqn"),
    **_same_fix(("recurrent_ppo", {"memory": "lstm"}), "ppo-lstm lstm-ppo recurrentppo rppo ppo-atari-lstm"),
    **_same_fix(("recurrent_ppo", {"memory": "gru"}), "ppo-gru ppo-rnn gru-ppo rnn-ppo"),
    **_same_fix(("recurrent_ppo", {"memory": "transformer"}), "ppo-transformer ppo-trxl gtrxl"),
    **_same_fix(("dqn", {"memory": "lstm"}), "drqn dqn-lstm lstm-dqn dqn-rnn"),
    **_same_fix(("dqn", _R2D2_SETTINGS), "r2d2"),
    **_same_fix(("sac", {"memory": "gru"}), "recurrent-sac sac-gru sac-rnn rsac"),
    **_same_fix(("sac", {"replay": "hindsight"}), "her sac-her her-sac"),
    **_same_fix(
        "it wraps an algo: --algo ppo --self-play size=4, or algos.SelfPlay(algos.PPO(env=game))", "self-play"
    ),
    **_same_fix(_MASK_FIX, "maskable-ppo maskableppo masked-ppo ppo-mask ppo-masked ppo-masking"),
    **_same_fix(("ppo", {"rnd": True}), "ppo-rnd rnd"),
    **_same_fix(("ppo", {}), "ppo2 ppo-clip ppo-discrete ppo-continuous ppo-continuous-action ppo-atari"),
    **_same_fix(("ppo", {}), "ppo-atari-envpool proximal-policy-optimization"),
    **_same_fix(("td3", {"policy_delay": 1, "target_noise": 0.0}), "ddpg ddpg-continuous-action"),
    **_same_fix(("td3", {"atoms": 51}), "d4pg"),
    **_same_fix(("fast_td3", {}), "fasttd3"),
    **_same_fix(("sac", {"torso": "simba", "atoms": 101}), "simba simbav2 simba-v2"),
    **_same_fix(_nearest_fix("fast_td3"), "fastsac fast-sac flashsac"),
    **_same_fix(
        "sac needs Box actions: for Discrete ones use --algo dqn, qr_dqn or pqn", "sac-discrete discrete-sac"
    ),
    **_same_fix(("a2c", {"gae_lambda": 1.0}), "reinforce vpg policy-gradient actor-critic"),
    **_same_fix(_nearest_fix("ppo"), "trpo ppg"),
    **_same_fix(_nearest_fix("a2c"), "acktr acer"),
    **_same_fix(_nearest_fix("impala"), "appo"),
    **_same_fix(_nearest_fix("qr_dqn"), "iqn fqf"),
    **_same_fix(_INDEPENDENT_FIX, "ia2c maa2c independent-ppo multi-agent-ppo multi-agent-a2c maddpg iac"),
    **_same_fix(("td3_bc", {}), "td3bc td3plusbc"),
    **_same_fix(_nearest_fix("iql"), "awac awr crr"),
    **_same_fix(("bc", {}), "behaviour-cloning behavior-cloning behavioral-cloning imitation"),
    **_same_fix(_nearest_fix("bc"), "gail airl dt decision-transformer"),
    **_same_fix(("alphazero", {}), "alpha-zero az gumbel-alphazero"),
    **_same_fix(("muzero", {}), "mu-zero gumbel-muzero"),
    **_same_fix(_nearest_fix("muzero"), "efficientzero stochastic-muzero sampled-muzero"),
    **_same_fix(_nearest_fix("alphazero"), "mcts"),
    **{
        spelling: ("grpo", {"variant": name})
        for name in ("rloo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "reinforce_plus_plus")
        for spelling in (name.replace("_", "-"), name.replace("_", ""), name.replace("_plus_plus", "++"))
    },
    **_same_fix(("ppo_rlhf", {}), "rlhf ppo-lm ppo-text"),
    **_same_fix(("dpo", {"preference": "ipo"}), "ipo"),
    **_same_fix(("dpo", {"respondent": "policy"}), "online-dpo"),
    **_same_fix(_nearest_fix("dpo"), "kto orpo simpo cpo"),
    **_same_fix(("reward_model", {}), "rm reward"),
}

# Stable-Baselines3's names of policy networks.
_NETWORKS = re.compile(r"(Mlp|Cnn|MultiInput)(Lstm|LnLstm|Ln)?Policy", re.IGNORECASE)


def _parse_fixes(table: str) -> dict[str, str]:
    """Parses lines of names, each followed by an indented fix, to a fix by name."""
    fix_by_name: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", table.strip()):
        names, _, fix = entry.partition("\n")
        fix_by_name |= dict.fromkeys(names.split(), " ".join(fix.split()))
    return fix_by_name


# Settings of other libraries that have another meaning or unit in fdg, or no counterpart. A name that is a
# flag of some algorithms (such as batch-size) has its fix for the others here.
_FIXES = _parse_fixes("""
device cpu cuda use-cuda gpu gpus num-gpus accelerator num-learners num-gpus-per-learner
    JAX uses the accelerators that it finds: --devices N says how many, JAX_PLATFORMS=cpu uses none
track use-wandb wandb-project-name wandb-project wandb-entity tensorboard-log report-to
    --wandb PROJECT logs to Weights & Biases, --tensorboard true to files in the run directory
assistant-only-loss completion-only-loss train-on-inputs
    --loss-on assistant learns from every turn of the assistant, --loss-on answer from the last one
policy-kwargs net-arch policy-type
    the network is set by --hidden and --activation, or by --network module:name
save-model save-path load-path load model-path push-to-hub upload-model
    every run is saved in its directory, --out RUN: fdg.load(RUN) and --resume RUN read it
dataset dataset-name train-dataset train-file data data-path
    a file of data is the environment: --env text:file?path=FILE (for pairs, text:preferences?path=FILE)
eval-dataset test-dataset validation-file test-file
    a held-out file is a parameter of the environment: --env 'text:file?path=FILE&test_path=FILE'
batch-size minibatch-size sgd-minibatch-size
    --num-minibatches N makes minibatches of num_envs * num_steps / N samples
train-batch-size train-batch-size-per-learner
    an iteration takes num_envs * num_steps steps: --num-envs N, --num-steps N
gradient-steps train-freq train-frequency training-intensity
    --updates-per-step R is gradient steps for each step of an environment
target-network-frequency target-update-interval target-network-update-freq target-update-freq
    --target-period N counts gradient steps
policy-lr q-lr actor-lr critic-lr
    --learning-rate applies to actor and critics
alpha autotune
    the entropy's weight is learned: it starts at --initial-temperature A, for --target-entropy H
target-kl kl-target use-kl-loss
    --clip-ratio bounds an update; no update ends early by its KL
clip-range-vf vf-clip-param
    --clip-value true clips values like ratios
policy
    the network is set by --hidden and --activation, or by --network module:name; a distribution policy is
    an argument of the run: fit(algorithm, policy)
measure
    --policy auto:measure compiles and times the best three candidates
capture-video render
    fdg play RUN writes a video of the trained agent
verbose
    a run prints its progress; in Python progress=False prints nothing
eval-freq eval-steps eval-interval eval-strategy
    --eval-every N counts iterations
env-ids
    --env NAME is one environment: start another run for each further one
eval-env
    --eval-every N evaluates in environments of the same name
n-eval-envs per-device-eval-batch-size
    --eval-every N evaluates 16 episodes side by side
save-steps save-freq save-interval save-frequency save-strategy
    --checkpoint-every N counts iterations
logging-steps log-interval log-every log-freq logging-dir
    every iteration is recorded, in metrics.jsonl of the run directory
max-steps num-updates num-train-steps stop-iters max-iterations training-iterations
    --total-steps N counts environment steps (for language models: responses), not updates
num-train-epochs
    --total-steps N counts responses (demonstrations in SFT): rows times epochs
schedule lr-schedule lr-scheduler-type lr-decay
    --anneal-learning-rate true lets the step size fall linearly to zero
warmup-ratio
    --warmup N counts updates
torch-deterministic
    runs are deterministic: the seed determines all numbers
config-path config-name config-file
    --config FILE takes a run's config.json
num-workers num-env-runners num-rollout-workers num-envs-per-worker num-envs-per-env-runner
    --num-envs N steps N environments together; --env-workers N starts N processes for them
framework
    everything runs on JAX: leave it out
exp-name
    --out RUN is the run directory
use-gae
    --gae-lambda 1 uses returns without GAE
per-device-train-batch-size
    --num-prompts N counts the prompts of an iteration on all devices, --micro-batch N the responses
    learned from at a time
gradient-accumulation-steps
    --micro-batch N learns from N responses at a time
loss-type importance-sampling-level
    --variant sets the loss of GRPO (grpo, dr_grpo, dapo, gspo, gmpo, cispo, sapo, rloo), --preference that of
    DPO (sigmoid, ipo), --aggregation that of SFT
num-iterations
    --num-epochs N learns N times from each response; --total-steps N is the whole run
epsilon
    --clip-low E --clip-high E bound ratios of language models, --clip-ratio E those of PPO; --epsilon-end E
    is for exploration
bf16 fp16 mixed-precision amp half
    --dtype bfloat16 for language models, --precision bfloat16 for all other algorithms
load-in-4bit load-in-8bit quantization-config
    fdg has no quantised training: --dtype bfloat16 and --lora-rank N need less memory
use-peft peft-config lora
    --lora-rank N trains adapters in place of the model
use-vllm vllm-mode vllm-gpu-memory-utilization
    generation is part of the program: --slots N starts new responses in rows that have ended
reward-funcs reward-weights reward-function reward-fn
    your own reward is part of the task: --env mine:task, made by task.with_reward([f, g], weights=[1, 0.1])
max-length max-seq-length max-prompt-length max-tokens
    --max-response N bounds responses; a prompt is never cut
tools environment-factory
    write a tool as your own game, which answers each turn: --env mine:game
ref-model
    the reference is the model that training begins with: --model DIR
deepspeed fsdp fsdp-config distributed-backend strategy
    --policy says how a run is distributed over devices, --devices N over how many
""")
# Alias of a flag -> fdg's name.
_FDG_NAMES = {alias: fdg_name for fdg_name, aliases in ALIASES.items() for alias in aliases}
