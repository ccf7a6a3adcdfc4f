"""Hints during training: the return never changes, or updates are too large."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fdg.training.statistics import format_numbers

_PART = 10  # the check is made after 1 / _PART of the run
_MIN_RETURNS = 3  # mean returns of iterations that are needed before the check
_FIRST = 10  # iterations in which a good initial policy should change little
_LARGE_KL = 1.0  # nats of `approx_kl`; a clipped update has about 0.01
_COLLAPSED = 0.05  # fraction of the initial entropy
_EXPLORE = "more exploration (--entropy-coefficient, --epsilon-end)"
_ADVICE = f"try another --algo or --preset, more --num-envs, or {_EXPLORE}"


class ConstantReturns:
    """Detects that all episodes of the first tenth of a run have the same return.

    An example is a car that never reaches the top of its hill. The return stays at its worst value, gradients
    are noise, and longer training with the same settings will not help.

    Args:
      num_iterations: the iterations of the whole run.
      start: iterations before this call; a resumed run does not repeat the hint.
      advice: what the hint suggests; None for a suggestion that suits most algorithms.
      after: iterations before the check; None for a tenth of the run.
    """

    def __init__(
        self, num_iterations: int, start: int = 0, advice: str | None = None, after: int | None = None
    ):
        self._after = math.ceil(num_iterations / _PART) if after is None else after
        self._done = start >= self._after
        self._advice = advice or _ADVICE
        self._count, self._lowest, self._highest = 0, math.inf, -math.inf

    def look(self, iteration: int, env_steps: int, returns: Iterable[float]) -> str | None:
        """The hint as a line to print, once; else None.

        Args:
          iteration: the number of completed iterations.
          env_steps: environment steps so far.
          returns: mean episode return of each iteration since the last call; NaN if no episode ended.
        """
        for value in returns:
            if math.isfinite(value):
                self._count += 1
                self._lowest, self._highest = min(self._lowest, value), max(self._highest, value)
        if self._done or iteration < self._after or self._count < _MIN_RETURNS:
            return None
        self._done = True
        if self._lowest < self._highest:
            return None
        return (
            f"hint: after {env_steps:,} steps every episode has returned {format_numbers(self._lowest)[0]},"
            f" so there is nothing to learn from yet: {self._advice}"
        )


class LargeUpdates:
    """Detects updates that are too large, in the first iterations.

    One update with an unsuitable step size or batch size can ruin a good checkpoint. Then `approx_kl` is far
    above that of a clipped update, or the entropy collapses without a gain in return.

    Args:
      learning_rate: the learning rate of the run, for the message; None if it has none.
    """

    def __init__(self, learning_rate: Any = None):
        self._rate = "" if learning_rate is None else f" than {learning_rate:g}"
        self._done = False
        self._first: Mapping[str, Any] = {}

    def look(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The hint as a line to print, once; else None.

        Args:
          rows: the metrics of each iteration since the last call.
        """
        for row in rows:
            if self._done or row["iteration"] > _FIRST:
                return None
            self._first = self._first or row
            what = self._what(row)
            if what is not None:
                self._done = True
                return (
                    f"hint: in iteration {row['iteration']} {what}: updates are too large: give a smaller"
                    f" --learning-rate{self._rate}, more responses or steps to an update, or another --preset"
                )
        return None

    def _what(self, row: Mapping[str, Any]) -> str | None:
        kl, entropies = row.get("approx_kl", 0.0), [one.get("entropy", 0.0) for one in (self._first, row)]
        if kl > _LARGE_KL:
            return f"approx_kl is {kl:.3g}, so the policy is far from the one that sampled"
        gained = row.get("episode_return", 0.0) > self._first.get("episode_return", 0.0)
        if 0 <= entropies[1] < _COLLAPSED * entropies[0] and not gained:
            return (
                f"the entropy has fallen from {entropies[0]:.3g} to {entropies[1]:.3g} and nothing was gained"
            )
        return None
