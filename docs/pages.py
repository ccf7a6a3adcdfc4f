"""Runs the Python code on pages of the documentation: `python -m docs.pages [--write] [PAGE ...]`.

The Python blocks of a page run in order, as one program, in an empty folder. A text block directly below a
block has its output: `tests/test_site.py` compares it with the actual output, and `--write` replaces it.
Training ends after `STEPS` steps, because this checks that the code runs, not that it learns. In the tests,
and with `--quick`, most pages only trace and place their trainings, because compilation takes long.
"""

import argparse
import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import re
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import fdg
import policies
from fdg.processes import distributed
from fdg.training.fit import fit as train_and_keep
from fdg.training.run import Run
from fdg.training.search import allows_integer, check_search
from fdg.training.space import make_grid, make_space
from fdg.training.sweep import Sweep

DOCS = Path(__file__).parent
STEPS = 1_024

_BLOCK = re.compile(r"^```(?P<language>python|sh|text)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_TOTAL_STEPS = re.compile(r"(?<=\btotal_steps=)[\d_]+")
# `docs/draw_policies.py` runs the first page; the second needs Transformers and its own runs: run it by hand.
_NOT_RUN_HERE = {"policies.md", "how-to/language_data.md"}
# Pages that train in the tests, too, because they read run directories.
_TRAINED = {"using.md", "coming-from/stable-baselines3.md", "how-to/network.md"}


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code in a page.

    Attributes:
      code: the source text.
      line: number of its first line in the page.
      printed: its output according to the page; None if no text block is directly below it.
    """

    code: str
    line: int
    printed: str | None


def blocks(page: str, language: str) -> Iterator[Block]:
    """Yields the blocks of a language, `python` or `sh`, in a page's text."""
    matches = list(_BLOCK.finditer(page))
    for block, following in itertools.zip_longest(matches, matches[1:]):
        if block["language"] != language:
            continue
        has_output = following is not None and following["language"] == "text"
        has_output = has_output and not page[block.end() : following.start()].strip()
        line = page.count("\n", 0, block.start("code")) + 1
        yield Block(block["code"], line, following["code"] if has_output else None)


def pages() -> list[Path]:
    """The paths of all pages that have Python code and run here."""
    paths = sorted(path for path in DOCS.rglob("*.md") if str(path.relative_to(DOCS)) not in _NOT_RUN_HERE)
    return [path for path in paths if any(blocks(path.read_text(), "python"))]


def run(path: Path, train: bool = True) -> list[tuple[Block, str]]:
    """Runs a page in a new folder; returns its Python blocks, each with its actual output.

    Errors of the code are raised, with the page as the traceback's file.

    Args:
      path: path of the page.
      train: whether `fdg.fit` trains; if not, it returns untrained agents and writes no files (`_untrained`).
    """
    namespace: dict = {"__name__": "page"}
    outputs = []
    replacements = {} if train else {"fit": _untrained, "sweep": _untrained_sweep, "search": _no_search}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        _quiet(),
        contextlib.ExitStack() as stack,
    ):
        for name, function in replacements.items():
            stack.enter_context(mock.patch.object(fdg, name, function))
        for block in blocks(path.read_text(), "python"):
            code = "\n" * (block.line - 1) + _TOTAL_STEPS.sub(str(STEPS), block.code)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, str(path), "exec"), namespace)
            outputs.append((block, output.getvalue()))
    return outputs


def _untrained(*arguments: Any, **named: Any) -> Run:
    """Replaces `fdg.fit`: traces and places, but compiles nothing; the agents' state is zeros and keys."""
    bound = inspect.signature(train_and_keep).bind(*arguments, **named).arguments
    algorithm, num_seeds = bound["algorithm"], bound.get("num_seeds")
    fdg.place(algorithm, bound.get("policy") or policies.GPUOnly(), 1, num_seeds)
    shapes = jax.eval_shape(algorithm.init, jax.random.key(0))
    agents_axis = () if num_seeds is None else (num_seeds,)

    def zeros_or_keys(x: Any) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), agents_axis + x.shape)
        return jnp.zeros(agents_axis + x.shape, x.dtype)

    return Run(algorithm, jax.tree.map(zeros_or_keys, shapes), 0, agents=num_seeds, finished=False)


def _untrained_sweep(
    algorithm: Any, values: Any, *, num_seeds: int = 1, out: str = "sweep", **named: Any
) -> Run:
    """Replaces `fdg.sweep`: each agent has its hyperparameters; the first point is recorded as the best."""
    sweep = Sweep(algorithm, make_grid(values), num_seeds, named.get("exploit_every"))
    run = _untrained(sweep, num_seeds=sweep.agents)
    run.state = run.state._replace(hyperparameters=sweep.starts(0, sweep.agents)[1])
    run.path = Path(out)
    run.path.mkdir(parents=True)
    (run.path / "sweep.json").write_text(json.dumps({"best": {"agents": list(sweep.agents_of(0))}}))
    return run


def _no_search(algorithm: Any, values: Any, *, trials: int, **named: Any) -> types.SimpleNamespace:
    """Replaces `fdg.search`: checks the values; the best run is an untrained one of the given algorithm."""
    check_search(algorithm, make_space(values, lambda name: allows_integer(algorithm, name)))
    return types.SimpleNamespace(best=_untrained(algorithm), trials=())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In this context, progress is hidden, JAX promotes ranks, and process-wide settings do not change."""
    with (
        contextlib.redirect_stderr(io.StringIO()),
        jax.numpy_rank_promotion("allow"),
        mock.patch.object(fdg, "host_devices"),
        mock.patch.object(distributed, "initialize"),
    ):
        yield


def trains(path: Path) -> bool:
    """Whether a page trains in the tests, too."""
    return str(path.resolve().relative_to(DOCS)) in _TRAINED


def differences(path: Path, train: bool) -> list[str]:
    """Runs a page; returns a text for each block whose output differs from the page."""
    return [
        f"{path.name}:{block.line} prints\n{printed}"
        for block, printed in run(path, train)
        if block.printed is not None and block.printed != printed
    ]


def write(path: Path, train: bool) -> None:
    """Runs a page, and replaces the text blocks below its Python blocks by the actual output."""
    text = path.read_text()
    for block, printed in run(path, train):
        if block.printed is not None:
            old = f"```python\n{block.code}```\n\n```text\n{block.printed}```"
            assert text.count(old) == 1, f"{path}:{block.line}"
            text = text.replace(old, f"```python\n{block.code}```\n\n```text\n{printed}```")
    path.write_text(text)


def main() -> None:
    """Runs the named pages, or all pages; prints differences and CPU seconds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="paths of pages (default: all)")
    parser.add_argument("--write", action="store_true", help="write the output into the pages")
    parser.add_argument("--quick", action="store_true", help="as in the tests: most pages do not train")
    arguments = parser.parse_args()
    fdg.host_devices(8)
    for page in arguments.pages or pages():
        start = time.process_time()
        path = page.resolve()
        train = not arguments.quick or trains(path)
        if arguments.write:
            write(path, train)
        for difference in differences(path, train) if not arguments.write else ():
            print(difference)
        print(f"{page}: {time.process_time() - start:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
