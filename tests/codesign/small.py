"""A co-design problem that compiles quickly, and whose designs can all be enumerated."""

import itertools

import jax.numpy as jnp
import numpy as np

from envs.codesign import layers
from envs.codesign.problem import Problem, Specs
from envs.codesign.space import Chips, Decision, Task


def build(filters, depth):
    return [layers.convolution(3, filters, 8), *[layers.convolution(filters, filters, 8)] * depth]


TASK = Task("task", (Decision("filters", (4, 8)), Decision("depth", (0, 1))), build)
CHIPS = Chips(
    templates=("dla", "shi"), pes=(0, 64, 128), noc_bytes_per_cycle=(8, 16), buffer_kb=(4,),
    budget_pes=192, budget_noc_bytes_per_cycle=24,
)  # fmt: skip
PROBLEM = Problem((TASK,), CHIPS, specs=Specs(3_000, 3e5, 0.7), bounds=Specs(9_000, 4e6, 0.9))


def all_designs(problem=PROBLEM):
    """All designs within the budgets, enumerated in Python: [designs, decisions] int32."""
    decisions, chips = problem.decisions(), problem.chips
    first, found = len(decisions) - 4 * chips.subaccelerators, []
    for choices in itertools.product(*(range(len(one.options)) for one in decisions)):
        subs = [choices[i : i + 4] for i in range(first, len(choices), 4)]
        pes = [chips.pes[one[0]] for one in subs]
        noc = [chips.noc_bytes_per_cycle[one[2]] for one, used in zip(subs, pes, strict=True) if used]
        is_plain = all(used or not any(one[1:]) for one, used in zip(subs, pes, strict=True))
        fits = 0 < sum(pes) <= chips.budget_pes and sum(noc) <= chips.budget_noc_bytes_per_cycle
        if fits and is_plain:
            found.append(choices)
    return jnp.asarray(np.asarray(found, np.int32))
