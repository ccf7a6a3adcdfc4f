"""Settings of peers' scripts as short text: `NAME=value NAME=value`."""

import ast
import contextlib
from typing import Any


def settings(*texts: str, **further: Any) -> dict[str, Any]:
    """Parses settings; later ones replace earlier ones. A value that is no Python literal stays text.

    >>> settings("LR=5e-4 ANNEAL_LR=True", "LR=1e-3", ENV_NAME="CartPole-v1")
    {'LR': 0.001, 'ANNEAL_LR': True, 'ENV_NAME': 'CartPole-v1'}
    """
    values: dict[str, Any] = {}
    for setting in " ".join(texts).split():
        name, _, value = setting.partition("=")
        values[name] = value
        with contextlib.suppress(ValueError, SyntaxError):
            values[name] = ast.literal_eval(value)
    return {**values, **further}


# Settings of PureJaxRL's scripts, and of JaxMARL's, which are derived from them.
PPO = (
    "LR=2.5e-4 NUM_STEPS=128 UPDATE_EPOCHS=4 NUM_MINIBATCHES=4 GAMMA=0.99 GAE_LAMBDA=0.95 CLIP_EPS=0.2"
    " ENT_COEF=0.01 VF_COEF=0.5 MAX_GRAD_NORM=0.5 ACTIVATION=tanh ANNEAL_LR=True"
)
# From purejaxql's config/alg: settings of all files, then those of pqn_cartpole.yaml and pqn_minatar.yaml.
PQN = (
    "EPS_START=1.0 EPS_FINISH=0.05 EPS_DECAY=0.1 NORM_TYPE=layer_norm MAX_GRAD_NORM=10 LR_LINEAR_DECAY=True"
    " GAMMA=0.99"
)
PQN_CARTPOLE = (
    "NUM_ENVS=32 NUM_STEPS=64 NUM_MINIBATCHES=16 NUM_EPOCHS=4 HIDDEN_SIZE=256 NUM_LAYERS=2 LR=1e-4"
    " REW_SCALE=0.1 LAMBDA=0.95 EPS_FINISH=0.2 EPS_DECAY=0.2"
)
PQN_MINATAR = "NUM_ENVS=128 NUM_STEPS=32 NUM_MINIBATCHES=32 NUM_EPOCHS=2 LR=5e-4 LAMBDA=0.65"
