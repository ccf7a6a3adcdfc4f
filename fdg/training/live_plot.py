"""The learning curve of a run in a notebook, redrawn during training."""

import io
import time
from typing import Any

from fdg.training.curves import draw_run
from fdg.training.recorder import Report

_SECONDS = 2.0  # between pictures, at least; drawing one takes a tenth of a second


class LivePlot:
    """A callback of `fdg.fit` that keeps one output of the cell up to date."""

    def __init__(self, num_iterations: int):
        self._num_iterations = num_iterations
        self._rows: list[dict[str, Any]] = []
        self._drawn_at = -_SECONDS
        self._handle: Any = None

    def __call__(self, report: Report) -> None:
        """Adds the rows of a report, and redraws at most every `_SECONDS`."""
        self._rows.extend(dict(row) for row in report.rows)
        now = time.monotonic()
        if now - self._drawn_at < _SECONDS and report.iteration < self._num_iterations:
            return
        self._drawn_at = now
        from IPython.display import Image, display

        picture = io.BytesIO()
        draw_run(
            self._rows, f"iteration {report.iteration:,} of {report.num_iterations:,}", None, picture, 80
        )
        image = Image(data=picture.getvalue(), format="png")
        if self._handle is None:
            self._handle = display(image, display_id=True)
        else:
            self._handle.update(image)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    import sys

    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
