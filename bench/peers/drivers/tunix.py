"""Drives google-tunix's GRPO learners (0.1.7, JAX) with a checkpoint and problems from the configuration.

Training is one call of `train`, in its own thread. A round is `iterations` (configuration) of its iterations.
Between rounds, training waits in a function that it calls once per iteration: the reward function of
`GRPOLearner`, or the data iterator of the agentic learner.

Configuration: the keys that `trl.py` describes. With `"lag"`, the agentic learner trains on one device and
generates on another, with parameters at most `lag` updates old.
"""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params
from tunix.rl import rl_cluster
from tunix.rl.agentic import agentic_grpo_learner as agentic
from tunix.rl.agentic import utils
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from bench.peers.drivers.characters import share_of_answer, tokenizer_of
from bench.peers.serve import Rounds


class SyncLock(utils.RolloutSyncLock):
    """tunix's lock between rollouts and weight syncs, without its deadlock.

    In tunix 0.1.7, a rollout that starts while a sync waits blocks the event loop, on which the rollouts run
    that the sync waits for. Here it may start as long as others run.
    """

    def acquire_rollout(self) -> None:
        with self._mutex:
            while self._weight_syncs > 0 or (self._weight_syncs_waiting > 0 and not self._rollouts):
                self._can_rollout.wait()
            self._rollouts += 1


class JoinedMessages:
    """A chat template that joins the messages; their contents are strings or arrays of one string."""

    def parse(self, messages: Any, **_: Any) -> str:
        return "".join(str(np.ravel(message["content"])[0]) for message in messages)


def prepare(config: dict[str, Any]):
    """Builds the learner, and trains to the end of the first round.

    Returns:
      A function that trains the next round and returns its figures; facts, with the first round's figures.
    """
    config |= json.loads(Path(config["problems"]).read_text())  # the problems replace their file's name
    settings = config["trl"]
    group = settings["num_generations"]
    prompts = settings["per_device_train_batch_size"] // group
    lag, run = config.get("lag"), config.get("run")
    mesh, generation_mesh = (
        jax.sharding.Mesh(np.array(device).reshape(1, 1), ("fsdp", "tp"))
        for device in (jax.devices()[0], jax.devices()[-1])
    )
    folder = config["model"]
    with mesh:
        actor = params.create_model_from_safe_tensors(folder, model_config(folder), mesh, jnp.float32)
    prompt_length = max(len(prompt) for prompt, _ in config["problems"]) + 1
    response_length = settings["max_completion_length"]
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=tokenizer_of(config["alphabet"]),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={**dict.fromkeys(rl_cluster.Role, mesh), rl_cluster.Role.ROLLOUT: generation_mesh},
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(settings["max_grad_norm"]),
                    optax.adamw(settings["learning_rate"]),
                ),
                eval_every_n_steps=1_000_000,
                max_steps=1_000_000,
                checkpoint_root_directory=run,
                checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=2),
                mini_batch_size=prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=response_length,
                max_prompt_length=prompt_length,
                kv_cache_size=prompt_length + response_length + 1,
                temperature=1.0,
                top_p=1.0,
                return_logprobs=lag is not None,
            ),
        ),
    )
    rounds = Rounds()
    iterations = config["iterations"]
    rewards: list[float] = []
    call_numbers, round_start = itertools.count(1), [time.perf_counter()]  # of `reward`; seconds

    def end_round(updates: int) -> None:
        seconds = time.perf_counter() - round_start[0]
        if run:
            leaves = jax.tree.leaves(nnx.state(cluster.actor_trainer.model))
            np.save(Path(run, "parameters.npy"), np.concatenate([np.ravel(leaf) for leaf in leaves]))
        figures = {"steps": prompts * group * iterations, "updates": updates, "seconds": seconds}
        rounds.end({**figures, "return": sum(rewards) / len(rewards)})
        rewards.clear()
        rounds.wait()
        round_start[0] = time.perf_counter()

    def reward(prompts: list[str], completions: list[str], answer: Any, **_: Any) -> list[float]:
        pairs = zip(completions, np.ravel(answer), strict=True)
        batch_rewards = [share_of_answer(text, str(expected)) for text, expected in pairs]
        rewards.extend(batch_rewards)
        if lag is None and (updates := next(call_numbers)) % iterations == 0:
            end_round(updates)
        return batch_rewards

    common_arguments = {"num_generations": group, "num_iterations": 1, "beta": 0.0}
    if lag is None:
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cluster,
            algo_config=grpo_learner.GRPOConfig(**common_arguments),
            reward_fns=reward,
        )
    else:
        learner = agentic.GRPOLearner(
            rl_cluster=cluster,
            algo_config=agentic.GRPOConfig(
                **common_arguments,
                max_response_length=response_length,
                off_policy_steps=lag,
                max_concurrency=prompts * group,
            ),
            reward_fns=reward,
            chat_parser=JoinedMessages(),
        )
        learner._rollout_sync_lock = SyncLock()
    steps_before = cluster.global_steps

    def batches():
        problems = itertools.cycle(config["problems"])
        for number in itertools.count():
            if lag is not None:  # lag + 1 batches are taken before the first update, then one after each
                finished = number - lag
                if finished > steps_before and finished % iterations == 0:
                    end_round(finished)
            batch = list(itertools.islice(problems, prompts))
            yield {
                "prompts": np.array([f"<bos>{prompt}" for prompt, _ in batch]),
                "answer": np.array([answer for _, answer in batch]),
            }

    def train() -> None:
        with mesh:
            learner.train(batches())

    first = rounds.start(train)

    return rounds.next, {"compile_seconds": first["seconds"], "first": first}


def model_config(folder: str) -> llama.ModelConfig:
    """tunix's settings of the network in a checkpoint, from its `config.json`."""
    config = json.loads(Path(folder, "config.json").read_text())
    return llama.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=int(config["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
