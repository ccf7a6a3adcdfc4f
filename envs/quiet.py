"""Packages that talk: while they are imported, and while they work."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator

import jax


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


@contextlib.contextmanager
def tolerantly() -> Iterator[None]:
    """For code of others that is being traced: ranks may be promoted, and no warning of JAX is heard."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        yield


@contextlib.contextmanager
def mujoco_quietly() -> Iterator[None]:
    """Without MuJoCo's own warnings, which it would print, and write to a file in the working directory."""
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
