"""How much one reads to understand an algorithm: `python -m tools.algorithm_sizes [ALGORITHM ...]`.

For each algorithm: files and lines of `algos/` that its file imports, directly or through others; the same
with the values that settings name and its text does not (`algos.registry.OPTIONS`), wherever one of these
files asks for them; and how many classes it is derived from. Then how many classes declare a setting (a
flag), or annotate a field of any kind, by its name. The registry and the tables of presets are not followed.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import algos
from algos.registry import OPTIONS

_ROOT = Path(__file__).parents[1]
_NOT_FOLLOWED = ("algos", "algos.registry", "algos.presets")


def main(names: list[str]) -> None:
    """Prints both tables."""
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
    """How many files and lines one opens, following imports within `algos/`, and maybe values, too."""
    files: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        file = _file(name)
        if file is None or name in files or name in _NOT_FOLLOWED:
            continue
        files[name] = file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                left += [one.name for one in node.names]
            elif values and isinstance(node, ast.Call) and ast.unparse(node.func) == "registry.option":
                left.append(OPTIONS[ast.literal_eval(node.args[0])])
    return len(files), sum(len(file.read_text().splitlines()) for file in files.values())


def _file(module: str) -> Path | None:
    if module.partition(".")[0] != "algos":
        return None
    path = _ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def annotated() -> tuple[Counter[str], Counter[str]]:
    """How many classes of `algos/` declare a setting, and annotate a field of any kind, by its name."""
    settings: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    for file in (_ROOT / "algos").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        fields[line.target.id] += 1
                        settings[line.target.id] += _is_setting(line.value)
    return settings, fields


def _is_setting(default: ast.expr | None) -> bool:
    """Whether a field's default is that of a setting, which the command line takes."""
    if not isinstance(default, ast.Call):
        return False
    name = ast.unparse(default.func)
    return name in ("hyperparameter", "own_value") or any(k.arg == "metadata" for k in default.keywords)


if __name__ == "__main__":
    main(sys.argv[1:])
