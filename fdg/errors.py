"""Errors that a user can act on: what was wrong, where, the values, and the fix, on one line."""

import difflib
import logging
import re
from collections.abc import Iterable


class FdgError(ValueError):
    """Anything a user asked for that cannot be done; the command line prints it without a traceback."""


class GraphError(FdgError):
    """A fragmented dataflow graph that breaks one of its invariants."""


class PlanError(FdgError):
    """A policy that cannot be carried out on the given devices."""


class HostError(FdgError):
    """Code on the host that a running program called has failed: it ends the run, with exit status 1.

    JAX raises no more than its text, at the end of the traceback in its own error: see `host_error`.
    """


# The last line of that traceback.
_HOST_ERROR = re.compile(rf"^(?:[\w.]+\.)?{HostError.__name__}: (.+)", re.MULTILINE)


def host_error(error: BaseException) -> HostError | None:
    """The `HostError` that JAX's error of a running program quotes; None if it quotes none.

    >>> host_error(RuntimeError("INTERNAL: Traceback ...\\nfdg.errors.HostError: step raised ValueError: no"))
    HostError('step raised ValueError: no')
    """
    found = _HOST_ERROR.search(str(error))
    return HostError(found[1]) if found else None


def one_line(error: BaseException) -> str:
    """An exception of somebody else's as one line.

    >>> one_line(ValueError("a\\n  b")), one_line(KeyError())
    ('ValueError: a b', 'KeyError: no message')
    """
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


def _is_no_host_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HostError))


# JAX logs the traceback of whatever a function on the host raises, and then raises it: once is enough.
for _logger in ("jax._src.callback", "jax._src.debugging"):
    logging.getLogger(_logger).addFilter(_is_no_host_error)


class UnknownNameError(FdgError):
    """A name that no registry holds."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Error for an unknown `name` of some `kind` ("environment", "policy"), with the nearest known name.

    >>> print(unknown_name("policy", "gpu_onyl", ["gpu_only", "central"]))
    unknown policy 'gpu_onyl': did you mean 'gpu_only'? (known: central, gpu_only)
    """
    names = sorted(known)
    folded = {candidate.lower(): candidate for candidate in names}
    nearest = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    hint = f"did you mean '{folded[nearest[0]]}'? " if nearest else ""
    return UnknownNameError(f"unknown {kind} '{name}': {hint}(known: {', '.join(names)})")
