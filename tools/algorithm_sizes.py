"""Counts the code to read for an algorithm: `python -m tools.algorithm_sizes [ALGORITHM ...]`.

For each algorithm, this prints the numbers of files and lines of `algos/` that its file imports, directly or
indirectly; the same numbers with modules that are imported only when a setting selects them
(`algos.registry.OPTIONS`); and the number of its base classes. Imports of the registry and of presets are not
followed. Then this prints how many classes of `algos/` declare each setting (a field with a flag) and each
annotated field.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import algos
from algos.registry import OPTIONS
from bench.harness import ROOT

_NOT_FOLLOWED = ("algos", "algos.registry", "algos.presets")


def main(names: list[str]) -> None:
    print(f"{'algorithm':<14} files  lines  with options  bases")
    for name in names or ["ppo", "dqn", "sac", "grpo"]:
        cls = algos.get(name)
        sizes = [_count_reachable(cls.__module__, follow_options) for follow_options in (False, True)]
        (files, lines), (all_files, all_lines) = sizes
        print(f"{name:<14} {files:5}  {lines:5}  {all_files:5}, {all_lines:5}  {len(cls.__mro__) - 1:5}")
    settings, fields = count_declarations()
    for kind, counts in (("setting", settings), ("field", fields)):
        print(f"\nclasses   {kind}")
        for name, count in counts.most_common(15):
            print(f"{count:7}   {name}")


def _count_reachable(module: str, follow_options: bool) -> tuple[int, int]:
    """The number of files and lines reached by imports in `algos/`.

    `follow_options`: also follow modules that code selects with `registry.option`.
    """
    files: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        file = _source_file(name)
        if file is None or name in files or name in _NOT_FOLLOWED:
            continue
        files[name] = file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                pending += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                pending += [alias.name for alias in node.names]
            elif (
                follow_options and isinstance(node, ast.Call) and ast.unparse(node.func) == "registry.option"
            ):
                pending.append(OPTIONS[ast.literal_eval(node.args[0])])
    return len(files), sum(len(file.read_text().splitlines()) for file in files.values())


def _source_file(module: str) -> Path | None:
    if module.partition(".")[0] != "algos":
        return None
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def count_declarations() -> tuple[Counter[str], Counter[str]]:
    """How many classes of `algos/` declare each setting, and each annotated field."""
    settings: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    for file in (ROOT / "algos").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        fields[line.target.id] += 1
                        settings[line.target.id] += _is_setting(line.value)
    return settings, fields


def _is_setting(default: ast.expr | None) -> bool:
    """Whether a field is a setting, judged by the expression of its default."""
    if not isinstance(default, ast.Call):
        return False
    name = ast.unparse(default.func)
    return name in ("hyperparameter", "own_value") or any(x.arg == "metadata" for x in default.keywords)


if __name__ == "__main__":
    main(sys.argv[1:])
