"""`Prompts`: the questions that tasks write and networks read."""

from typing import NamedTuple

import jax


class Prompts(NamedTuple):
    """Left-padded questions.

    Attributes:
      tokens: [N, P] int32, left-padded.
      mask: [N, P] bool, False for padding.
    """

    tokens: jax.Array
    mask: jax.Array
