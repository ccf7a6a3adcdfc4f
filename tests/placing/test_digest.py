"""Digests of plans: alike in every process that traces the same, and telling where one does not."""

import dataclasses

import jax
import numpy as np

import fdg
import policies
from fdg.placing.digest import digests
from tests.tiny import Pupil


@dataclasses.dataclass(frozen=True)
class Varied(Pupil):
    """Another pupil in one respect."""

    factor: float = 0.1
    offset: tuple[float, ...] = (0.0, 0.0, 0.0)
    asks: bool = False

    def init(self, key):
        return super().init(key)

    def iterate(self, state):
        state, metrics = super().iterate(state)
        # A captured array: a constant of the jaxpr, whose text says no more than its shape.
        return {**state, "weight": state["weight"] + np.asarray(self.offset, np.float32)}, metrics

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, weight, slope):
        if self.asks:
            weight = jax.pure_callback(lambda x: x, weight, weight)
        return weight - self.factor * slope


def differing(one, two, first=None, second=None):
    pairs = (one, first or policies.GPUOnly()), (two, second or policies.GPUOnly())
    a, b = (digests(fdg.place(algorithm, policy, 2 if first else 1)) for algorithm, policy in pairs)
    return [name for name in a if a[name] != b[name]]


def test_what_differs_is_named():
    assert differing(Varied(), Varied()) == []
    assert differing(Varied(asks=True), Varied(asks=True)) == []  # a lambda has another address each time
    # `update` is nested in `learn`.
    assert differing(Varied(), Varied(factor=0.2))[:2] == ["fragment 'learn'", "fragment 'update'"]
    whole = ["constants", "code between fragments"]
    assert differing(Varied(), Varied(offset=(0.0, 1e-7, 0.0))) in (whole, whole[1:])
    coarse, fine = policies.SingleLearnerCoarse(actors=1), policies.SingleLearnerFine(workers=1)
    assert differing(Pupil(), Pupil(), coarse, fine)[0] == "policy"
    assert "schedule" in differing(Pupil(), Pupil(), coarse, fine)
