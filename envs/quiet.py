"""Contexts that silence other packages, or relax the checks of JAX for their code."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppresses output and warnings, then restores the standard streams.

    Use it for imports of other packages only: JaxMARL prints which optional parts are missing and leaves the
    standard streams replaced; brax imports a package that warns of its deprecation.
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


@contextlib.contextmanager
def relaxed_checks() -> Iterator[None]:
    """Allows rank promotion and suppresses JAX's warnings while other packages' code is traced."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        yield


@contextlib.contextmanager
def mujoco_quietly() -> Iterator[None]:
    """Suppresses MuJoCo's warnings, which it prints and writes to a file in the working directory."""
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
