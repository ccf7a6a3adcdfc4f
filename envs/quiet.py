"""Importing a package that talks while it is imported."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Neither output nor warnings, and afterwards the streams that were there before.

    For imports of other packages alone: JaxMARL prints which of its optional parts are missing, and leaves
    the output streams replaced; brax imports a package that warns of its end.
    """
    names = "stdout", "stderr", "__stdout__", "__stderr__"
    before = {name: getattr(sys, name) for name in names}
    for name in names:
        setattr(sys, name, io.StringIO())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in names:
            setattr(sys, name, before[name])
