"""brax's PPO trainer on a task of MuJoCo Playground, called as Playground's `train_jax_ppo.py` calls it.

Configuration: `{"env", "steps", "train"}`, the latter as its `brax_ppo_config` gives it. Each round compiles
anew. A return is that of the 128 episodes of the trainer's own last evaluation, with drawn actions.
"""

from typing import Any

from bench.peers.drivers.brax import with_device_put_replicated
from bench.peers.serve import Stopwatch


def prepare(config: dict[str, Any]):
    """Loads the task; compiling is the trainer's own business."""
    from brax.training.agents.ppo import train
    from mujoco_playground import registry, wrapper

    with_device_put_replicated()

    def one_round(seed: int) -> dict[str, Any]:
        said: list[tuple[int, dict[str, Any]]] = []
        with Stopwatch() as watch:
            train.train(
                environment=registry.load(config["env"], config_overrides={"impl": "jax"}),
                num_timesteps=config["steps"],
                num_evals=2,  # before and after
                seed=seed,
                progress_fn=lambda steps, metrics: said.append((steps, metrics)),
                wrap_env_fn=wrapper.wrap_for_brax_training,
                **config["train"],
            )
        steps, metrics = said[-1]
        returned = float(metrics["eval/episode_reward"])
        return {"steps": int(steps), "seconds": watch.seconds, "return": returned}

    return one_round, {"compile_seconds": 0.0}
