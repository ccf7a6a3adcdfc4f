"""`Prompts`: what is asked, as tasks write it and networks read it."""

from typing import NamedTuple

import jax


class Prompts(NamedTuple):
    """Questions, each of which ends at the last place.

    Attributes:
      tokens: [N, P] int32, left-padded.
      mask: [N, P] bool, where there is a token.
    """

    tokens: jax.Array
    mask: jax.Array
