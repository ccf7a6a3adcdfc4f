"""The registry of public classes agrees with the imports for type checkers and with the modules."""

import ast
from pathlib import Path

import algos
from algos import registry

SOURCE = ast.parse(Path(algos.__file__).read_text())


def test_type_checking_imports_match_registry():
    block = next(node for node in SOURCE.body if isinstance(node, ast.If))
    imported = {one.name: each.module for each in block.body for one in each.names}
    assert imported == registry.MODULES
    assert set(registry.MODULES) <= set(algos.__all__) & set(dir(algos))


def test_classes_are_in_registered_modules():
    for name, module in registry.MODULES.items():
        assert getattr(algos, name).__module__ == module
    assert set(registry.MODULES) >= {*registry.IN_ENVIRONMENTS.values(), *registry.OF_TEXT.values()}
