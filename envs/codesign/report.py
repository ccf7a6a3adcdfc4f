"""Results of a search as text and files: report, designs, and descriptions for other tools."""

import collections
import csv
import dataclasses
import functools
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from envs.codesign import cost, exports, templates
from envs.codesign.exports import Chip
from envs.codesign.found import Designs
from envs.codesign.problem import Problem, Scheduled, Specs, improved_schedule, positions
from fdg import files
from fdg.errors import FdgError
from fdg.showing.words import table

# Where accuracies come from, by `Problem.accuracy`.
_ACCURACY_SOURCES = {
    "table": "measured before, by training each network",
    "train": "candidate networks trained in this search",
    "supernet": "candidate networks of a supernet, with shared weights",
    "surrogate": "a formula, NOT MEASURED",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a search."""

    problem: Problem  # defines the specs
    best: Designs  # scalars; it meets all specs, if any evaluated design does
    front: Designs  # the Pareto front, [points]
    samples: int  # evaluated designs
    seconds: float  # of this process, compiling included
    # (designs, score, violation) over time, from the first design on whose decisions are all made
    curve: tuple[tuple[int, float, float], ...]
    # the least latency, energy and area, each minimised alone; None if the best design meets all specs
    least: Specs | None
    path: Path  # the run directory
    caught: int | None = None  # the signal that ended it early; None for none

    @property
    def is_feasible(self) -> bool:
        """True if the best design meets all specs."""
        return bool(self.best.violation == 0)

    @functools.cached_property
    def scheduled(self) -> Scheduled:
        """The schedule of the best design, improved by moves that save energy and add no latency."""
        specs = self.problem.specs._replace(latency_cycles=float(self.best.latency_cycles))
        return improved_schedule(dataclasses.replace(self.problem, specs=specs), self.best.choices)

    @functools.cached_property
    def layers(self) -> list[dict[str, Any]]:
        """A row for each layer: placement, times, costs, and what bounds its latency (`cost.BOUNDS`)."""
        names, _, schedule, costs = self.scheduled
        subs = np.asarray(schedule.sub_accelerator)
        on_chosen = {key: np.asarray(x)[np.arange(len(subs)), subs] for key, x in costs._asdict().items()}
        return [
            {
                "layer": name,
                "sub_accelerator": int(subs[index]),
                "start_cycle": int(schedule.start_cycle[index]),
                "end_cycle": int(schedule.end_cycle[index]),
                "macs": int(on_chosen["macs"][index]),
                "latency_cycles": int(on_chosen["latency_cycles"][index]),
                "energy_uj": float(on_chosen["energy_pj"][index]) * 1e-6,
                "utilization": float(on_chosen["utilization"][index]),
                "onchip_bytes": float(on_chosen["onchip_bytes"][index]),
                "offchip_bytes": float(on_chosen["offchip_bytes"][index]),
                "bound": cost.BOUNDS[int(on_chosen["bound"][index])],
            }
            for index, name in enumerate(names)
        ]

    @functools.cached_property
    def chips(self) -> list[Chip]:
        """The best design's sub-accelerators; an absent one has 0 rows."""
        _, chosen = positions(self.problem, jnp.asarray(self.best.choices))
        subs, templates = self.problem.chips.subs(), self.problem.chips.templates
        result = []
        for index in np.asarray(chosen).tolist():
            fields = {name: value[index].item() for name, value in subs._asdict().items()}
            result.append(Chip(**{**fields, "template": templates[int(fields["template"])]}))
        return result

    def __str__(self) -> str:
        return text(self)


@dataclasses.dataclass(frozen=True)
class Amount:
    """A quantity as it is printed: a field of `Specs`, converted to a unit."""

    field: str
    unit: str
    factor: float  # a value of the field, times this, is in `unit`

    def __str__(self) -> str:
        return self.field.rpartition("_")[0]


def amounts(problem: Problem) -> tuple[Amount, ...]:
    """Latency, energy and area with their printed units: us, uJ and mm2."""
    return (
        Amount("latency_cycles", "us", 1e6 / problem.technology.clock_hz),
        Amount("energy_pj", "uJ", 1e-6),
        Amount("area_mm2", "mm2", 1.0),
    )


def text(outcome: Outcome) -> str:
    """The command's output: design, specs, bounds of layers, accuracies, samples."""
    if not math.isfinite(outcome.best.violation):
        return f"no design is complete after {outcome.samples:,} samples: give more"
    if not any(map(math.isfinite, outcome.problem.specs)):
        head = "no specs are given"
    else:
        head = "meets the specs" if outcome.is_feasible else "NO DESIGN MEETS THE SPECS; the nearest one"
    lines = [f"best of {outcome.samples:,} designs, {outcome.seconds:.1f} s: {head}", ""]
    lines += table(["", "design", "spec", ""], _cost_rows(outcome))
    lines += [f"  accuracy of {name}: {value}" for name, value in _accuracies(outcome.problem, outcome.best)]
    lines += [f"  score, their weighted sum: {float(outcome.best.score):.4f}", ""]
    lines += [f"  {name}: {value}" for name, value in _choice_lines(outcome.problem, outcome.best)]
    counts = collections.Counter(row["bound"] for row in outcome.layers)
    lines += ["", f"  layers bound by {', '.join(f'{name} {counts[name]}' for name in cost.BOUNDS)}"]
    if outcome.least is not None:
        lines += ["", *(f"  {line}" for line in explain_infeasible(outcome))]
    return "\n".join(lines)


def explain_infeasible(outcome: Outcome) -> list[str]:
    """Explains that no design meets the specs: the least violation, and each spec's least value."""
    assert outcome.least is not None
    lines = [f"least violation: the specs are exceeded by {as_percent(float(outcome.best.violation))} in all"]
    for amount, least in zip(amounts(outcome.problem), outcome.least, strict=True):
        spec = getattr(outcome.problem.specs, amount.field)
        if math.isfinite(spec):
            reach = "within" if least <= spec else "ABOVE"
            lines.append(
                f"{amount} alone: the least that was reached is {_format_number(least * amount.factor)} "
                f"{amount.unit}, {reach} the spec of {_format_number(spec * amount.factor)} {amount.unit}"
            )
    return lines


def _cost_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """Rows of the printed table: amount, the best design's value, its spec, and the share of the spec."""
    rows: list[tuple[str, ...]] = []
    for amount in amounts(outcome.problem):
        value, spec = getattr(outcome.best, amount.field), getattr(outcome.problem.specs, amount.field)
        has_spec = math.isfinite(spec)
        limit = f"{_format_number(spec * amount.factor)} {amount.unit}" if has_spec else "none"
        share = f"{as_percent(float(value / spec))} of it" if has_spec else ""
        share += " EXCEEDED" if has_spec and value > spec else ""
        rows.append((str(amount), f"{_format_number(value * amount.factor)} {amount.unit}", limit, share))
    return rows


def as_percent(ratio: float) -> str:
    """A ratio in per cent, or as a factor if it is large."""
    return f"{ratio:.1%}" if ratio < 10 else f"{ratio:,.0f} times"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


def _accuracies(problem: Problem, design: Designs) -> list[tuple[str, str]]:
    """Each task's name, and its accuracy with its source."""
    rows = []
    for task, value in zip(problem.tasks, np.atleast_1d(design.accuracy), strict=True):
        source = _ACCURACY_SOURCES[problem.accuracy] if task.decisions else "as its file says"
        rows.append((task.name, "unknown" if math.isnan(value) else f"{value:.4f} ({source})"))
    return rows


def chosen_options(problem: Problem, design: Designs) -> dict[str, Any]:
    """The chosen option of each decision by name, without absent sub-accelerators."""
    chosen = {
        decision.name: decision.options[index]
        for decision, index in zip(problem.decisions(), np.asarray(design.choices).tolist(), strict=True)
    }
    pes = {name: x for name, x in chosen.items() if re.fullmatch("sub-accelerator .*: pes", name)}
    absent = [name.removesuffix("pes") for name, value in pes.items() if not value]  # prefixes of names
    return {name: value for name, value in chosen.items() if not name.startswith(tuple(absent))}


def _choice_lines(problem: Problem, design: Designs) -> list[tuple[str, str]]:
    """One line for each task's and each sub-accelerator's options."""
    parts: dict[str, list[str]] = {}
    for name, value in chosen_options(problem, design).items():
        owner, _, decision = name.rpartition(": ")
        parts.setdefault(owner, []).append(f"{decision} {value}")
    return [(owner, ", ".join(choices)) for owner, choices in parts.items()]


def design_row(problem: Problem, design: Designs) -> dict[str, Any]:
    """A design as plain values: options, costs with units, accuracies, score and violation."""
    costs = {
        f"{amount}_{amount.unit.lower()}": float(getattr(design, amount.field)) * amount.factor
        for amount in amounts(problem)
    }
    accuracy = {
        f"accuracy {task.name}": x for task, x in zip(problem.tasks, design.accuracy.tolist(), strict=True)
    }
    return {
        **chosen_options(problem, design),
        "latency_cycles": int(design.latency_cycles),
        **costs,
        **accuracy,
        "score": float(design.score),
        "violation": float(design.violation),
        "meets_specs": bool(design.violation == 0),
    }


def write(outcome: Outcome, folder: Path, pictures: Sequence[str]) -> list[Path]:
    """Writes report, designs and files for other tools into an existing folder; returns their paths.

    `pictures` are the file names of pictures in the report.
    """
    problem, best = outcome.problem, outcome.best
    texts = _tool_files(outcome)
    missing = texts.pop("missing", "")
    texts["best.json"] = json.dumps(_to_json_types(_summary(outcome)), indent=1) + "\n"
    written = []
    for name, content in texts.items():
        files.write(folder / name, content.encode())
        written.append(folder / name)
    front = [Designs(*(x[index] for x in outcome.front)) for index in range(len(outcome.front.score))]
    others = [design for design in front if not np.array_equal(design.choices, best.choices)]
    rows = [{"is_best": design is best, **design_row(problem, design)} for design in (best, *others)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = csv.DictWriter(file := io.StringIO(newline=""), keys, restval="")
    lines.writeheader()
    lines.writerows(rows)
    files.write(folder / "designs.csv", file.getvalue().encode())
    files.write(folder / "report.md", _markdown(outcome, texts, missing, pictures).encode())
    return [folder / "report.md", folder / "designs.csv", *written]


def _summary(outcome: Outcome) -> dict[str, Any]:
    """The content of `best.json`."""
    problem = outcome.problem
    return {
        "problem": problem.name,
        "meets_specs": outcome.is_feasible,
        "specs": problem.specs._asdict(),
        "design": design_row(problem, outcome.best),
        "choices": outcome.best.choices.tolist(),
        "accuracy_source": problem.accuracy,
        "least_reached_alone": outcome.least._asdict() if outcome.least else None,
        "samples": outcome.samples,
        "seconds": round(outcome.seconds, 2),
        "layers": outcome.layers,
    }


def _to_json_types(value: Any) -> Any:
    """Converts to JSON types; infinity and NaN, which JSON lacks, become None."""
    if isinstance(value, Mapping):
        return {key: _to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_types(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tool_files(outcome: Outcome) -> dict[str, str]:
    """Files for ZigZag, three per sub-accelerator, and for MAESTRO. If there are none, `missing` says why."""
    scheduled = outcome.scheduled
    subs = np.asarray(scheduled.schedule.sub_accelerator).tolist()
    files: dict[str, str] = {}
    try:
        for index in dict.fromkeys(sorted(subs)):
            sub_layers = [layer for layer, sub in zip(scheduled.layers, subs, strict=True) if sub == index]
            if any(layer.has_weights for layer in sub_layers):
                zigzag_files = exports.zigzag(sub_layers, outcome.chips[index], outcome.problem.technology)
                suffix = "" if not files else f"-{index}"
                files[f"zigzag{suffix}.yaml"] = zigzag_files["accelerator"]
                files[f"zigzag{suffix}-mapping.yaml"] = zigzag_files["mapping"]
                files[f"zigzag{suffix}-workload.yaml"] = zigzag_files["workload"]
        chosen = [outcome.chips[index] for index in subs]
        files["maestro.m"] = exports.maestro(
            list(zip(scheduled.names, scheduled.layers, chosen, strict=True))
        )
    except FdgError as error:
        return {"missing": f"None: {error}."}
    return files


def _markdown(outcome: Outcome, files: Mapping[str, str], missing: str, pictures: Sequence[str]) -> str:
    """The content of `report.md`; `missing` says why there are no `files` for other tools, else ""."""
    schedule = outcome.scheduled.schedule
    lines = [
        f"# Co-design of {outcome.problem.name}",
        "",
        "```text",
        text(outcome),
        "```",
        "",
        *_assumptions(outcome),
        "",
        "## Layers",
        "",
        f"After moves of layers that save energy, the schedule ends after {int(schedule.latency_cycles):,}"
        f" cycles, with {float(schedule.energy_pj) * 1e-6:.4g} uJ.",
        "",
        *_markdown_table(
            ["layer", "on", "start", "cycles", "MACs", "utilisation", "uJ", "bound by"],
            [
                [
                    row["layer"],
                    str(row["sub_accelerator"]),
                    f"{row['start_cycle']:,}",
                    f"{row['latency_cycles']:,}",
                    f"{row['macs']:,}",
                    f"{row['utilization']:.1%}",
                    f"{row['energy_uj']:.4g}",
                    row["bound"],
                ]
                for row in outcome.layers
            ],
        ),
        "",
        *(line for name in pictures for line in (f"![{name}]({name})", "")),
        "## For other tools",
        "",
        missing or _TOOLS.format(", ".join(f"`{name}`" for name in files if name.startswith("zigzag"))),
    ]
    return "\n".join(lines) + "\n"


_TOOLS = """{} are for ZigZag 3.9 (`pip install zigzag-dse six`), three per sub-accelerator:

```python
from zigzag.api import get_hardware_performance_zigzag as run

print(run("zigzag-workload.yaml", "zigzag.yaml", "zigzag-mapping.yaml", opt="latency")[:2])
```

`maestro.m` is in MAESTRO's language. It has not been run."""


def _assumptions(outcome: Outcome) -> list[str]:
    """Says which PEs have assumed areas, and the chip's area without the assumption."""
    technology = outcome.problem.technology
    assumed = sorted({sub.template for sub in outcome.chips if sub.rows and sub.template in ("shi", "rs")})
    if not assumed:
        return []
    extra_mm2 = sum(
        sub.rows * sub.columns * (templates.get(sub.template).pe_mm2(technology) - technology.pe_mm2)
        for sub in outcome.chips
        if sub.template in assumed
    )
    return [
        f"That PEs of {' and '.join(assumed)} are larger than those of `dla` is an assumption: with those of "
        f"`dla` the chip would have {float(outcome.best.area_mm2) - extra_mm2:.4g} mm2."
    ]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[*(cell.replace("|", "\\|") for cell in row)] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]
