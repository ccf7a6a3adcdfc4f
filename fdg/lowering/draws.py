"""Random numbers drawn before a loop, not in each of its trips: as many, and the same ones, in one go.

Of a loop over keys, one a trip,

    scan 128 trips { x; key: k = split key; u = uniform k[0]; r = uniform k[1]; x = step x u r }

the draws depend on the keys alone, and on nothing that is carried. They are taken out of the body, and made
for all keys together:

    us, rs = for all 128 keys: k = split key; u = uniform k[0]; r = uniform k[1]
    scan 128 trips { x; u, r: x = step x u r }

On a CPU a draw is a small loop of small operations, half of what a step of few environments consists of; on a
GPU each is a kernel to start. The bits are those of the loop, since threefry hashes each key by itself; draws
of other generators, which depend on the batch that a key is in, stay where they are.
"""

from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.ahead import Taker, take_ahead
from fdg.recall import Recall

# Of what is drawn for all trips of a loop: of more, the loop's own trips are the better ones.
MOST_BYTES = 64 << 20

_DRAWS = frozenset(
    "random_bits random_split random_fold_in random_gamma random_seed threefry2x32 random_clone".split()
)


_KNOWN: Recall[ClosedJaxpr] = Recall(most=256)


def draw_ahead(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The program with the draws of its scans taken out of them, at any depth.

    Args:
      jaxpr: a traced program, in the global view; one that was rewritten before is not again.
    """
    draws = Taker("draws", lambda eqn: eqn.primitive.name in _DRAWS, MOST_BYTES)
    return _KNOWN(jaxpr, MOST_BYTES, lambda: take_ahead(jaxpr, draws))
