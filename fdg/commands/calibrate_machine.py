"""The command `python -m fdg.calibrate`."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fdg import files
from fdg.commands.command import Command
from fdg.commands.flags import Flag
from fdg.cores import usable_cores
from fdg.costs import machine
from fdg.costs.calibration import calibrate
from fdg.costs.hardware import RATES, TIMES
from fdg.costs.machine import Calibration
from fdg.costs.overheads import OVERHEADS
from fdg.costs.program_time import JOINED
from fdg.errors import FdgError
from fdg.running.host_devices import make_host_devices
from fdg.showing.words import quantity, table
from fdg.training.reference_jobs import REFERENCE_JOBS, fitted_to_jobs, time_reference_jobs
from fdg.training.writable import check_writable, writing

FLAGS = (
    Flag(
        "out",
        str | None,
        None,
        "the file to write (None: in the user's cache directory, where it is looked for)",
    ),
    Flag(
        "disturbed", bool, False, "keep what was measured, even if other programs had the machine meanwhile"
    ),
    Flag("show", bool, False, "print the calibration that there is, and measure nothing"),
)


_ABOUT = "Measures this machine's rates, in about three minutes; keep it quiet meanwhile."


def _calibrate(given: dict[str, Any]) -> None:
    """Measures, writes the file and prints the figures."""
    make_host_devices(max(2, usable_cores()))
    devices = jax.local_devices()
    out = Path(given["out"]) if given["out"] else machine.path_of(devices[0].device_kind)
    if out is None:
        raise FdgError("there is no home directory to keep a calibration in: give --out FILE")
    if given["show"]:
        found = machine.read(out)
        machine.check_machine(found, out)
        print(calibration_table(found))
        return
    becomes_a_file = not out.exists() or out.is_file() or out.is_dir()  # a device or a pipe is written into
    try:
        if becomes_a_file:
            check_writable(out)
    except FdgError as error:
        raise FdgError(f"{error}: give --out FILE") from None

    def say(line: str) -> None:
        print(f"measuring: {line}", flush=True)

    def time_jobs() -> Mapping[str, float]:
        return {
            job.key: seconds for job, seconds in time_reference_jobs(REFERENCE_JOBS, devices, say).items()
        }

    found = fitted_to_jobs(calibrate(devices, say, time_jobs))
    print(calibration_table(found))
    if found.is_disturbed and not given["disturbed"]:
        raise FdgError(
            f"calibrate: other programs used this machine meanwhile: repeats of a measurement differ by"
            f" {found.unrest:.0%}, at most {machine.AT_MOST_UNREST:.0%} is allowed; nothing was saved: run it"
            f" again once the machine is idle, or with --disturbed true"
        )
    text = json.dumps(found.as_json(), indent=1) + "\n"
    if becomes_a_file:
        with writing(out):
            files.write(out.resolve(), text.encode())  # follow a link, do not replace it
    else:
        out.write_text(text)
    print(f"\nin {found.seconds:.0f} s; written to {out}")


main = Command("python -m fdg.calibrate", _ABOUT, FLAGS, _calibrate)


def calibration_table(calibration: Calibration) -> str:
    """The figures as a table."""
    rows = []
    figures = {**calibration.kind.figures}
    for word, link in (("inside", calibration.inside), ("between", calibration.between)):
        figures.update({f"{word}: {name}": getattr(link, name) for name in ("latency", "bandwidth", "call")})
    for name, figure in figures.items():
        last = name.rpartition(": ")[2]
        if last in TIMES or last in ("latency", "call"):
            scale, unit = (1e9, "ns") if figure.value < 1e-6 else (1e6, "us")
            value = quantity(figure.value * scale, unit)
        elif name in ("parallel", "convolution"):
            value = f"{figure.value:.0%}"
        else:
            value = quantity(figure.value, RATES.get(name, "B/s of a link").split()[0])
        rows.append((name, value, f"{figure.spread:.0%}", figure.source))
    lines = table(["rate", "value", "spread", "source"], rows, numeric=(1, 2))
    return "\n".join([*lines, *_fit_overheads(calibration)])


def _fit_overheads(calibration: Calibration) -> list[str]:
    """Overheads that were fitted to reference jobs."""
    kind = calibration.kind
    if kind.joined is None or kind.overheads is None:
        return []
    lost, here = dataclasses.asdict(OVERHEADS[kind.platform]), dataclasses.asdict(kind.overheads)
    rows = [
        (f"{word}: {name}", f"{value:.3g}", f"{usual[name]:.3g}")
        for word, usual, fitted in (("joined", JOINED[kind.platform], kind.joined), ("lost", lost, here))
        for name, value in fitted.items()
        if value != usual[name]
    ]
    head = [f"fitted to {len(calibration.jobs)} jobs", "here", f"a {kind.platform} elsewhere"]
    return ["", *table(head, rows, numeric=(1, 2))]
