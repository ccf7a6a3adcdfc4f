"""What a run can be told while it trains: that nothing has been found to learn from."""

import math
from collections.abc import Iterable

from fdg.training.statistics import digits

_PART = 10  # of the run: so much has to have passed
_VALUES = 3  # mean returns of iterations: one alone is always the same as itself
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
