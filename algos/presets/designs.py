"""Co-design: an episode is a design of about twenty decisions, and pays at its end."""

from typing import Any

from algos.presets.entry import Entry

# About 5,000 designs. With a tenth of this bonus for entropy all seeds stayed with the first design that met
# the specs.
_ON_POLICY: dict[str, Any] = {
    "total_steps": 100_000,
    "num_envs": 50,
    "num_steps": 20,
    "num_epochs": 4,
    "num_minibatches": 5,
    "learning_rate": 1e-3,
    "discount": 1.0,
    "gae_lambda": 1.0,
    "entropy_coefficient": 0.1,
    "normalize_reward": True,
}

PRESETS: dict[str, dict[str, Entry]] = {
    "PPO": {
        "codesign": Entry("chosen among three settings on seeds 500 to 502; docs/codesign.md", _ON_POLICY)
    },
    "RecurrentPPO": {
        "codesign": Entry(
            "PPO's, and sequences of ten steps; not tuned", {**_ON_POLICY, "sequence_length": 10}
        )
    },
    "DQN": {
        "codesign": Entry(
            "returns of whole episodes, normalised layers; not tuned",
            {
                "total_steps": 100_000,
                "num_envs": 64,
                "learning_starts": 5_000,
                "learning_rate": 1e-3,
                "discount": 1.0,
                "n_step": 20,
                "layer_norm": True,
            },
        )
    },
}
