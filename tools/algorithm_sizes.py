"""How much code one reads to understand an algorithm: `python -m tools.algorithm_sizes [ALGORITHM ...]`.

For each algorithm, this prints the files and lines of `algos/` that its file imports, directly or indirectly;
the same with implementations that only settings name (`algos.registry.OPTIONS`); and its number of base
classes. Then it prints how many classes declare each setting (a flag), and how many annotate each field. It
does not follow the registry and the tables of presets.
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
    print(f"{'algorithm':<14} files  lines  with values  bases")
    for name in names or ["ppo", "dqn", "sac", "grpo"]:
        cls = algos.get(name)
        (files, lines), (more, in_all) = (_opened(cls.__module__, values) for values in (False, True))
        print(f"{name:<14} {files:5}  {lines:5}  {more:4}, {in_all:5}  {len(cls.__mro__) - 1:5}")
    settings, fields = annotated()
    for kind, counts in (("setting", settings), ("field", fields)):
        print(f"\nclasses   {kind}")
        for name, count in counts.most_common(15):
            print(f"{count:7}   {name}")


def _opened(module: str, values: bool) -> tuple[int, int]:
    """The number of files and lines reached by imports in `algos/`; `values`: and by values of settings."""
    files: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        file = _file(name)
        if file is None or name in files or name in _NOT_FOLLOWED:
            continue
        files[name] = file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif values and isinstance(node, ast.Call) and ast.unparse(node.func) == "registry.option":
                todo.append(OPTIONS[ast.literal_eval(node.args[0])])
    return len(files), sum(len(file.read_text().splitlines()) for file in files.values())


def _file(module: str) -> Path | None:
    if module.partition(".")[0] != "algos":
        return None
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def annotated() -> tuple[Counter[str], Counter[str]]:
    """How many classes of `algos/` declare each setting, and how many annotate each field."""
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
    """Whether a field is a setting, by its default."""
    if not isinstance(default, ast.Call):
        return False
    name = ast.unparse(default.func)
    return name in ("hyperparameter", "own_value") or any(k.arg == "metadata" for k in default.keywords)


if __name__ == "__main__":
    main(sys.argv[1:])
