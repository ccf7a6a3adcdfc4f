"""Errors that a user can act on: what was wrong, where, the values, and the fix, on one line."""

import difflib
from collections.abc import Iterable


class FdgError(ValueError):
    """Anything a user asked for that cannot be done; the command line prints it without a traceback."""


class GraphError(FdgError):
    """A fragmented dataflow graph that breaks one of its invariants."""


class PlanError(FdgError):
    """A policy that cannot be carried out on the given devices."""


class HostError(FdgError):
    """Code on the host that a running program called has failed: it ends the run, with exit status 1."""


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
