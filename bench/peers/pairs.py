"""What is compared: each pair a task, a peer's settings, and the flags of fdg that make it the same work."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Pair:
    """One row.

    Attributes:
      peer: a name in `bench.peers.peers.PEERS`.
      task: what is trained, for people: algorithm, environment.
      size: environments stepped together.
      flags: of `python -m fdg.train`, apart from `--num-envs` and `--total-steps`.
      config: of the peer's driver.
      steps: environment steps of a round; a round takes some seconds.
      at_least: the ratio of speeds that is asked for.
      equal: what is the same on both sides.
      driver: a module in `bench/peers/drivers/`; the peer's name if empty.
    """

    peer: str
    task: str
    size: int
    flags: tuple[str, ...]
    config: Mapping[str, Any]
    steps: int
    at_least: float
    equal: str
    driver: str = ""

    @property
    def name(self) -> str:
        """As the command line takes it, and as it stands in the results."""
        return f"{self.peer}/{self.task}/{self.size}".replace(" ", "-")

    @property
    def our_flags(self) -> list[str]:
        """A whole command line of `python -m fdg.train`."""
        return [*self.flags, "--num-envs", str(self.size), "--total-steps", str(self.steps)]


_PUREJAXRL = {
    "LR": 2.5e-4,
    "NUM_STEPS": 128,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ANNEAL_LR": True,
    "DEBUG": False,
}


def _purejaxrl(env: str, size: int, steps: int, at_least: float) -> Pair:
    minatar = env.endswith("MinAtar")
    changed = {"LR": 5e-3, "NUM_MINIBATCHES": 8, "ACTIVATION": "relu"} if minatar else {}
    return Pair(
        peer="purejaxrl",
        task=f"PPO {env}",
        size=size,
        flags=("--env", env),
        config={
            "script": "ppo",
            "config": {
                **_PUREJAXRL,
                **changed,
                "ENV_NAME": env,
                "NUM_ENVS": size,
                "TOTAL_TIMESTEPS": steps,
            },
        },
        steps=steps,
        at_least=at_least,
        equal=f"128 steps, 4 epochs, {8 if minatar else 4} minibatches, two towers of 64x64, Adam, "
        f"{'flat observations, ReLU' if minatar else 'tanh'}; all other settings fdg's defaults",
    )


def _purejaxrl_continuous(
    env: str, name: str, size: int, num_steps: int, epochs: int, minibatches: int, steps: int
) -> Pair:
    return Pair(
        peer="purejaxrl",
        task=f"PPO {env}",
        size=size,
        flags=(
            *("--env", env, "--hidden", "256", "256", "--activation", "tanh"),
            *("--num-steps", str(num_steps), "--num-epochs", str(epochs)),
            *("--num-minibatches", str(minibatches)),
            *("--normalize-observation", "true", "--normalize-reward", "true"),
        ),
        config={
            "script": "ppo_continuous_action",
            "config": {
                **_PUREJAXRL,
                "LR": 3e-4,
                "ENT_COEF": 0.0,
                "ANNEAL_LR": False,
                "NORMALIZE_ENV": True,
                "ENV_NAME": name,
                "NUM_ENVS": size,
                "NUM_STEPS": num_steps,
                "UPDATE_EPOCHS": epochs,
                "NUM_MINIBATCHES": minibatches,
                "TOTAL_TIMESTEPS": steps,
            },
        },
        steps=steps,
        at_least=1.5,
        equal=f"{num_steps} steps, {epochs} epochs, {minibatches} minibatches, two towers of 256x256 tanh, "
        "observations and rewards normalised",
    )


PAIRS = {
    pair.name: pair
    for pair in (
        _purejaxrl("CartPole-v1", 4, 500_000, 1.3),
        _purejaxrl("CartPole-v1", 64, 507_904, 2.0),
        _purejaxrl("CartPole-v1", 256, 524_288, 3.0),
        _purejaxrl("CartPole-v1", 1024, 524_288, 3.0),
        _purejaxrl("CartPole-v1", 4096, 1_048_576, 3.0),
        _purejaxrl("Breakout-MinAtar", 64, 327_680, 1.6),
        _purejaxrl("Breakout-MinAtar", 1024, 393_216, 2.5),
        _purejaxrl_continuous("Pendulum-v1", "Pendulum-v1", 16, 64, 10, 8, 65_536),
        _purejaxrl_continuous("Pendulum-v1", "Pendulum-v1", 2048, 10, 4, 32, 122_880),
        _purejaxrl_continuous("brax:inverted_pendulum", "inverted_pendulum", 64, 64, 4, 8, 65_536),
        _purejaxrl_continuous("brax:inverted_pendulum", "inverted_pendulum", 2048, 10, 4, 32, 122_880),
    )
}
