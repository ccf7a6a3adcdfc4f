"""What the choice rests on: each rate halved in turn, and whether another policy would be chosen then."""

import dataclasses
from collections.abc import Callable, Sequence

from fdg.costs.choosing import Choice
from fdg.costs.hardware import RATES, SIZES, TIMES, Cluster, Figure
from fdg.showing.words import table


@dataclasses.dataclass(frozen=True)
class Halved:
    """A rate at half of what it is.

    Attributes:
      rate: its name; "" for all as they are.
      seconds: of an iteration of the policy that was chosen with all rates as they are.
      chosen: the policy that is chosen now, and on how many devices.
      best_seconds: of an iteration of that one.
    """

    rate: str
    seconds: float
    chosen: str
    best_seconds: float

    @property
    def loses(self) -> float:
        """By how much the first choice is slower than the new one; 0 where it stays."""
        return self.seconds / self.best_seconds - 1


def sensitivity(choose: Callable[[Cluster], Choice], cluster: Cluster) -> tuple[Halved, ...]:
    """Chooses again with each rate made half as good.

    Args:
      choose: the choice on a cluster, such as `lambda cluster: policies.auto(algorithm, cluster)`.
      cluster: with its rates as they are.
    """
    first = choose(cluster)
    kept = str(first.candidate), first.devices
    rates = [name for name, value in _rates(cluster).items() if name not in SIZES and value > 0]
    found = [Halved("", first.seconds, _named(first), first.seconds)]
    for rate in rates:
        choice = choose(_halved(cluster, rate))
        same = [row.seconds for row in choice.rows if (str(row.candidate), row.candidate.devices) == kept]
        found.append(Halved(rate, min(same, default=float("inf")), _named(choice), choice.seconds))
    return tuple(found)


_LINKS = ("inside", "between")


def _rates(cluster: Cluster) -> dict[str, float]:
    """Of a cluster, by name, also those that are taken; of its links as "inside/latency" and so on."""
    known = dict.fromkeys([name for name in RATES if not name.startswith("product/")])
    found = {name: cluster.kind.rate(name) for name in {**known, **cluster.kind.figures}}
    for word in _LINKS:
        for name in ("latency", "bandwidth", "call"):
            found[f"{word}/{name}"] = getattr(getattr(cluster, word), name).value
    return found


def _halved(cluster: Cluster, name: str) -> Cluster:
    """The cluster with one of its rates half as good; times double."""
    word, _, part = name.partition("/")
    value = _rates(cluster)[name]
    figure = Figure(value * 2 if name in TIMES or part in ("latency", "call") else value / 2)
    if word in _LINKS:
        return dataclasses.replace(
            cluster, **{word: dataclasses.replace(getattr(cluster, word), **{part: figure})}
        )
    kind = dataclasses.replace(cluster.kind, figures={**cluster.kind.figures, name: figure})
    return dataclasses.replace(cluster, kind=kind)


def _named(choice: Choice) -> str:
    return f"{choice.policy} on {choice.devices}"


def shown(halved: Sequence[Halved]) -> str:
    """As a table, the most telling first."""
    first, *others = halved
    others.sort(key=lambda one: (-one.loses, -one.seconds))
    rows = [("as they are", f"{first.seconds * 1e3:.4g} ms", "", first.chosen, "")]
    for one in others:
        change = f"{one.seconds / first.seconds - 1:+.1%}"
        loses = f"{one.loses:.1%}" if one.chosen != first.chosen else "stays"
        rows.append((one.rate, f"{one.seconds * 1e3:.4g} ms", change, one.chosen, loses))
    header = ["half the rate", "first choice takes", "change", "chosen then", "first choice loses"]
    return "\n".join(table(header, rows, numeric=(1, 2)))
