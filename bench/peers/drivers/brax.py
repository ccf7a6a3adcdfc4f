"""Drives brax's own PPO trainer (`brax.training.agents.ppo.train`).

A call of the trainer trains in epochs, and reports the speed of each. Here a round is an epoch; the first
epoch compiles. The call runs in a thread, in which the trainer's progress function waits for the next round.
Configuration: `{"env", "hidden", "steps", "train"}`; `hidden` has widths of layers, `steps` are those of a
round, `train` has arguments of the trainer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bench.peers.serve import Rounds, Stopwatch

_EPOCHS = 64  # more than there are rounds


def prepare(config: dict[str, Any]):
    """Starts the trainer, and waits until its first epoch ends; returns what `bench.peers.serve` needs."""
    from brax import envs
    from brax.training.agents.ppo import networks, train

    restore_device_put_replicated()
    hidden = tuple(config["hidden"])
    rounds = Rounds()

    def epoch_done(_: int, metrics: dict[str, Any]) -> None:
        seconds = config["steps"] / float(metrics["training/sps"])
        rounds.end({"steps": config["steps"], "seconds": seconds, "return": None})
        rounds.wait()

    def call() -> None:
        train.train(
            environment=envs.get_environment(config["env"]),
            num_timesteps=_EPOCHS * config["steps"],
            num_evals=_EPOCHS + 1,
            run_evals=False,  # evaluations take longer than training
            progress_fn=epoch_done,
            network_factory=functools.partial(
                networks.make_ppo_networks, policy_hidden_layer_sizes=hidden, value_hidden_layer_sizes=hidden
            ),
            **config["train"],
        )

    with Stopwatch() as watch:
        first = rounds.start(call)

    return rounds.next, {"compile_seconds": watch.seconds, "first": first}


def restore_device_put_replicated() -> None:
    """Defines a function that brax 0.14.2 calls and JAX 0.10 lacks, as JAX's migration guide writes it."""

    def replicated(tree: Any, devices: list[jax.Device]) -> Any:
        mesh = jax.sharding.Mesh(devices, "i")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        return jax.tree.map(lambda x: jax.device_put(jnp.stack([x] * len(devices)), sharding), tree)

    if not hasattr(jax, "device_put_replicated"):
        jax.device_put_replicated = replicated
