"""The table of public classes, and that a module is imported only on first use."""

import ast
from pathlib import Path

import algos
from algos import registry

SOURCE = ast.parse(Path(algos.__file__).read_text())


def test_type_checkers_see_the_classes_of_the_table():
    block = next(node for node in SOURCE.body if isinstance(node, ast.If))
    seen = {one.name: each.module for each in block.body for one in each.names}
    assert seen == registry.MODULES
    assert set(registry.MODULES) <= set(algos.__all__) & set(dir(algos))


def test_every_class_is_where_the_table_says():
    for name, module in registry.MODULES.items():
        assert getattr(algos, name).__module__ == module
    assert set(registry.MODULES) >= {*registry.IN_ENVIRONMENTS.values(), *registry.OF_TEXT.values()}
