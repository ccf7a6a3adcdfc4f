"""Hints while a run trains: that nothing is there to learn from, or too much is changed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fdg.training.statistics import digits

_PART = 10  # of the run: so much has to have passed
_VALUES = 3  # mean returns of iterations: one alone is always the same as itself
_FIRST = 10  # iterations in which a policy that begins well is still near where it began
_FAR = 1.0  # nats of `approx_kl`; a clipped update is 0.01 or so away
_COLLAPSED = 0.05  # of the entropy at first
_EXPLORE = "more exploration (--entropy-coefficient, --epsilon-end)"
_ADVICE = f"try another --algo or --preset, more --num-envs, or {_EXPLORE}"


class Unchanged:
    """Notices an environment whose episodes have all returned the same for a tenth of the run.

    A car that never gets up its hill, a door that is never found: the return stays at its worst, gradients
    are those of noise, and more of the same settings will not change it.

    Args:
      num_iterations: of the whole run.
      start: iterations that were done before; a resumed run is not told again.
      advice: what may help; None for what helps most algorithms.
      after: iterations to look at; None for a tenth of the run.
    """

    def __init__(
        self, num_iterations: int, start: int = 0, advice: str | None = None, after: int | None = None
    ):
        self._after = math.ceil(num_iterations / _PART) if after is None else after
        self._done = start >= self._after
        self._advice = advice or _ADVICE
        self._count, self._lowest, self._highest = 0, math.inf, -math.inf

    def look(self, iteration: int, env_steps: int, returns: Iterable[float]) -> str | None:
        """A line to print, once; None where there is nothing to say.

        Args:
          iteration: how many are done.
          env_steps: environment steps until then.
          returns: episode returns of the iterations since the last call; those that are no number are of
            iterations in which no episode ended.
        """
        for value in returns:
            if math.isfinite(value):
                self._count += 1
                self._lowest, self._highest = min(self._lowest, value), max(self._highest, value)
        if self._done or iteration < self._after or self._count < _VALUES:
            return None
        self._done = True
        if self._lowest < self._highest:
            return None
        return (
            f"hint: after {env_steps:,} steps every episode has returned {digits(self._lowest)[0]}, so there"
            f" is nothing to learn from yet: {self._advice}"
        )


class Astray:
    """Notices updates that are too large: in its first iterations a policy leaves what it began as.

    One update of a good checkpoint by a step size, or a batch, that is another network's undoes it. Then
    `approx_kl` is far above that of a clipped update, or the entropy is all but gone and nothing was gained.

    Args:
      learning_rate: of the run, which the line names; None where it has none.
    """

    def __init__(self, learning_rate: Any = None):
        self._rate = "" if learning_rate is None else f" than {learning_rate:g}"
        self._done = False
        self._first: Mapping[str, Any] = {}

    def look(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """A line to print, once; None where there is nothing to say.

        Args:
          rows: metrics of the iterations since the last call.
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
        if kl > _FAR:
            return f"approx_kl is {kl:.3g}, so the policy is far from the one that sampled"
        gained = row.get("episode_return", 0.0) > self._first.get("episode_return", 0.0)
        if 0 <= entropies[1] < _COLLAPSED * entropies[0] and not gained:
            return (
                f"the entropy has fallen from {entropies[0]:.3g} to {entropies[1]:.3g} and nothing was gained"
            )
        return None
