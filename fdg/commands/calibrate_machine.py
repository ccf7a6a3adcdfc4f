"""`python -m fdg.calibrate`: measures this machine's rates and stores them for the cost model."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fdg import files
from fdg.commands.cli import Command
from fdg.commands.flags import Flag
from fdg.cores import usable_cores
from fdg.costs import machine
from fdg.costs.calibration import calibrate
from fdg.costs.hardware import RATES, SHARES, TIMES
from fdg.costs.machine import Calibration
from fdg.costs.overheads import OVERHEADS
from fdg.costs.program_time import SHARES_AFTER_FUSION
from fdg.errors import FdgError
from fdg.running.host_devices import make_host_devices
from fdg.showing.words import quantity, table
from fdg.training.reference_jobs import REFERENCE_JOBS, fit_to_jobs, time_reference_jobs

FLAGS = (
    Flag(
        "out",
        str | None,
        None,
        "the file to write, or to --show (None: in the user's cache directory, where fdg reads it)",
    ),
    Flag("disturbed", bool, False, "save the figures even if other programs used the machine"),
    Flag("show", bool, False, "print the stored calibration, and measure nothing"),
)
_ABOUT = "Measures this machine's rates in about five minutes. Run nothing else on it during this time."


def _calibrate(flags: dict[str, Any]) -> None:
    """Measures, writes the file and prints the figures."""
    make_host_devices(max(2, usable_cores()))
    devices = jax.local_devices()
    out = Path(flags["out"]) if flags["out"] else machine.path_of(devices[0].device_kind)
    if out is None:
        raise FdgError("there is no home directory to save a calibration in: give --out FILE")
    if flags["show"]:
        result = machine.read(out)
        machine.check_machine(result, out)
        print(calibration_table(result))
        return
    is_regular = not out.exists() or out.is_file() or out.is_dir()  # neither a device nor a pipe
    try:
        if is_regular:
            files.check_writable(out)
    except FdgError as error:
        raise FdgError(f"{error}: give --out FILE") from None

    def report(line: str) -> None:
        print(f"measuring: {line}", flush=True)

    def time_jobs() -> Mapping[str, float]:
        times = time_reference_jobs(REFERENCE_JOBS, devices, report)
        return {job.key: seconds for job, seconds in times.items()}

    result = fit_to_jobs(calibrate(devices, report, time_jobs))
    print(calibration_table(result))
    if result.is_disturbed and not flags["disturbed"]:
        raise FdgError(
            f"calibrate: other programs used this machine at the same time: repeats of a measurement differ"
            f" by {result.noise:.0%}, at most {machine.MAX_NOISE:.0%} is allowed; nothing was saved: repeat"
            f" the command once the machine is idle, or with --disturbed true"
        )
    text = json.dumps(result.as_json(), indent=1) + "\n"
    if is_regular:
        with files.writing(out) as file:
            file.write(text.encode())
    else:
        out.write_text(text)
    print(f"\nin {result.seconds:.0f} s; written to {out}")


main = Command("python -m fdg.calibrate", _ABOUT, FLAGS, _calibrate)


def calibration_table(calibration: Calibration) -> str:
    """The figures of a calibration, and the parameters that were fitted to reference jobs, as tables."""
    rows = []
    figures = dict(calibration.kind.figures)
    # `inside`: the link between devices of a process; `between`: the link between processes.
    for place, link in (("inside", calibration.inside), ("between", calibration.between)):
        figures.update({f"{place}: {name}": getattr(link, name) for name in ("latency", "bandwidth", "call")})
    for name, figure in figures.items():
        quantity_name = name.rpartition(": ")[2]
        if quantity_name in TIMES or quantity_name in ("latency", "call"):
            scale, unit = (1e9, "ns") if figure.value < 1e-6 else (1e6, "us")
            value = quantity(figure.value * scale, unit)
        elif name in SHARES:
            value = f"{figure.value:.0%}"
        else:
            value = quantity(figure.value, RATES[name].unit if name in RATES else "B/s")
        rows.append((name, value, f"{figure.spread:.0%}", figure.source))
    lines = table(["rate", "value", "spread", "source"], rows, numeric=(1, 2))
    kind = calibration.kind
    if kind.shares_after_fusion is None or kind.overheads is None:
        return "\n".join(lines)
    default_overheads = dataclasses.asdict(OVERHEADS[kind.platform])
    fitted_rows = [
        (f"{group}: {name}", f"{value:.3g}", f"{defaults[name]:.3g}")
        for group, defaults, values in (
            ("after fusion", SHARES_AFTER_FUSION[kind.platform], kind.shares_after_fusion),
            ("overhead", default_overheads, dataclasses.asdict(kind.overheads)),
        )
        for name, value in values.items()
        if value != defaults[name]
    ]
    head = [f"fitted to {len(calibration.jobs)} jobs", "here", f"default of a {kind.platform}"]
    return "\n".join([*lines, "", *table(head, fitted_rows, numeric=(1, 2))])
