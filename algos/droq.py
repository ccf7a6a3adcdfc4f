"""DroQ (Hiraoka, Imagawa, Hashimoto, Onishi and Tsuruoka 2022, ICLR, arXiv 2110.02034).

REDQ with two critics in place of ten: dropout and layer normalisation make each of them an ensemble.
"""

import dataclasses
from typing import ClassVar

from algos.ensembles import Ensemble
from algos.redq import REDQ


@dataclasses.dataclass(frozen=True)
class DroQ(REDQ):
    """DroQ for continuous actions within bounds.

    Defaults are those of the paper: a hidden layer of a critic is dense, then dropout of 0.01, layer
    normalisation and ReLU, in the target critics too; 20 gradient steps for each environment step; but for
    four environments that are stepped together.

    Raises:
      FdgError: (construction) a field out of range, or actions without bounds.

    >>> import envs
    >>> DroQ(env=envs.make("Pendulum-v1")).num_critics
    2
    """

    presets_of: ClassVar[str] = "DroQ"

    ensemble = Ensemble(num_critics=2, critic_layer_norm=True, dropout=0.01)
