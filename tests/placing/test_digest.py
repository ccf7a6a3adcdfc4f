"""Digests of plans: equal in processes with the same trace, otherwise they name the part that differs."""

import dataclasses

import jax
import numpy as np

import fdg
import policies
from fdg.placing.digest import digests
from tests.tiny import Pupil


@dataclasses.dataclass(frozen=True)
class Varied(Pupil):
    """`Pupil` with further settings."""

    factor: float = 0.1
    offset: tuple[float, ...] = (0.0, 0.0, 0.0)
    callback: bool = False

    def init(self, key):
        return super().init(key)

    def iterate(self, state):
        state, metrics = super().iterate(state)
        # A captured array is a constant of the jaxpr, whose text shows only its shape.
        return {**state, "weight": state["weight"] + np.asarray(self.offset, np.float32)}, metrics

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, weight, slope):
        if self.callback:
            weight = jax.pure_callback(lambda x: x, weight, weight)
        return weight - self.factor * slope


def differing(one, two, first=None, second=None):
    pairs = (one, first or policies.GPUOnly()), (two, second or policies.GPUOnly())
    a, b = (digests(fdg.place(algorithm, policy, 2 if first else 1)) for algorithm, policy in pairs)
    return [name for name in a if a[name] != b[name]]


def test_digests_name_what_differs():
    assert differing(Varied(), Varied()) == []
    assert differing(Varied(callback=True), Varied(callback=True)) == []  # each lambda has another address
    # `update` is nested in `learn`.
    assert differing(Varied(), Varied(factor=0.2))[:2] == ["fragment 'learn'", "fragment 'update'"]
    expected = ["constants", "code between fragments"]
    assert differing(Varied(), Varied(offset=(0.0, 1e-7, 0.0))) in (expected, expected[1:])
    coarse, fine = policies.SingleLearnerCoarse(actors=1), policies.SingleLearnerFine(workers=1)
    assert differing(Pupil(), Pupil(), coarse, fine)[0] == "policy"
    assert "schedule" in differing(Pupil(), Pupil(), coarse, fine)
