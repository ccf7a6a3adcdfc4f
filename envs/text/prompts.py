"""`Prompts`: batches of tokenized prompts, which tasks return and networks take."""

from typing import NamedTuple

import jax


class Prompts(NamedTuple):
    """Left-padded prompts.

    Attributes:
      tokens: [N, P] int32, left-padded.
      mask: [N, P] bool, False for padding.
    """

    tokens: jax.Array
    mask: jax.Array
