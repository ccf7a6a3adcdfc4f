"""Eight host devices, strict shapes: set here, before JAX starts its backends."""

import os

# A count given by the caller would contradict the one below.
os.environ["XLA_FLAGS"] = " ".join(
    flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag
)

import jax
import pytest

import fdg

fdg.host_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # starts the backends: from here on no --devices flag that a test gives changes the number


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Compiled programs of one module would otherwise stay in memory until the last."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """Eight CPU devices, also on a machine whose default devices are accelerators."""
    return jax.devices("cpu")[:8]


@pytest.fixture
def host_devices(monkeypatch, devices) -> list[jax.Device]:
    """Has commands find eight CPU devices, whatever the machine's default devices are."""
    monkeypatch.setattr(jax, "devices", lambda backend=None: devices)
    return devices
