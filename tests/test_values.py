"""Settings and plans are frozen dataclasses; policies compare and hash by their fields."""

import dataclasses
import importlib
import pkgutil

import pytest
from flax import linen as nn

import algos
import fdg
import policies

# Mutable by design: filled or rewritten during a computation.
MUTABLE = {"_Transfer", "Recorder", "Scope", "Operation", "Loop", "Region", "Opened", "Block", "Rewritten"}
MUTABLE |= {"Versioned", "_StartedProcess", "Program", "_Session", "_Search"}


def classes(package):
    """Yields (name, class) of all dataclasses in a package."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            is_ours = isinstance(value, type) and value.__module__ == module.__name__
            if is_ours and dataclasses.is_dataclass(value) and not issubclass(value, nn.Module):
                yield f"{found.name}.{name}", value


ALL = dict(item for package in (algos, policies, fdg) for item in classes(package))


def test_dataclasses_are_frozen():
    mutable = [name for name, found in ALL.items() if not found.__dataclass_params__.frozen]
    assert [name for name in mutable if name.split(".")[-1] not in MUTABLE] == []


@pytest.mark.parametrize("name", sorted(n for n in ALL if n.startswith("policies.")))
def test_policies_compare_and_hash_by_fields(name):
    fields = [f for f in dataclasses.fields(ALL[name]) if f.default is not dataclasses.MISSING]
    a, b = ALL[name](), ALL[name]()
    assert a == b and hash(a) == hash(b) and len(fields) == len(dataclasses.fields(ALL[name]))
