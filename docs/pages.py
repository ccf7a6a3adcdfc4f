"""Runs the code of the pages: `python -m docs.pages [--write] [PAGE ...]`, from the root.

The Python blocks of a page run in order, as one program, in an empty folder. A block of text right below
one is what it prints; `--write` writes that into the page, and `tests/test_site.py` compares it. Training
is cut to `STEPS` steps: pages show runs that learn something, and it has to be seen here only that they
run. In the suite most of the pages' trainings are traced and placed but not compiled (`--quick`), for a
compilation takes as long as all else on the page; `python -m docs.pages` trains in all of them.
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
_LENGTH = re.compile(r"(?<=\btotal_steps=)[\d_]+")
# Run by `docs/draw_policies.py`, which draws as well; by hand, as it needs its runs and Transformers.
_ELSEWHERE = {"policies.md", "how-to/language_data.md"}
# What these show needs a run directory.
_TRAINED = {"using.md", "coming-from/stable-baselines3.md"}


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code, of a page.

    Attributes:
      code: as printed.
      line: of the page, where it begins.
      printed: what stands right below as its output; None for nothing.
    """

    code: str
    line: int
    printed: str | None


def blocks(page: str, language: str) -> Iterator[Block]:
    """The blocks of a language, `python` or `sh`, in a page's text."""
    found = list(_BLOCK.finditer(page))
    for block, following in itertools.zip_longest(found, found[1:]):
        if block["language"] != language:
            continue
        below = following is not None and following["language"] == "text"
        below = below and not page[block.end() : following.start()].strip()
        line = page.count("\n", 0, block.start("code")) + 1
        yield Block(block["code"], line, following["code"] if below else None)


def pages() -> list[Path]:
    """Those with Python in them that `run` takes."""
    found = sorted(path for path in DOCS.rglob("*.md") if str(path.relative_to(DOCS)) not in _ELSEWHERE)
    return [path for path in found if any(blocks(path.read_text(), "python"))]


def run(path: Path, train: bool = True) -> list[tuple[Block, str]]:
    """Runs a page, in a new folder; each of its blocks, and what it printed.

    Raises whatever the code raises, with the page as the file of the traceback.

    Args:
      path: of the page.
      train: whether `fdg.fit` does; else it gives untrained agents (`_untrained`), and writes nothing.
    """
    names: dict = {"__name__": "page"}
    done = []
    instead = {} if train else {"fit": _untrained, "sweep": _untrained_sweep, "search": _no_search}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        _quiet(),
        contextlib.ExitStack() as stack,
    ):
        for name, function in instead.items():
            stack.enter_context(mock.patch.object(fdg, name, function))
        for block in blocks(path.read_text(), "python"):
            code = "\n" * (block.line - 1) + _LENGTH.sub(str(STEPS), block.code)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, str(path), "exec"), names)
            done.append((block, output.getvalue()))
    return done


def _untrained(*arguments: Any, **named: Any) -> Run:
    """What `fdg.fit` checks and traces, with agents whose state is all zeros; no program is made."""
    asked = inspect.signature(train_and_keep).bind(*arguments, **named).arguments
    algorithm, num_seeds = asked["algorithm"], asked.get("num_seeds")
    fdg.place(algorithm, asked.get("policy") or policies.GPUOnly(), 1, num_seeds)
    shapes = jax.eval_shape(algorithm.init, jax.random.key(0))
    agents = () if num_seeds is None else (num_seeds,)

    def nothing(x: Any) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), agents + x.shape)
        return jnp.zeros(agents + x.shape, x.dtype)

    return Run(algorithm, jax.tree.map(nothing, shapes), 0, agents=num_seeds, finished=False)


def _untrained_sweep(
    algorithm: Any, values: Any, *, num_seeds: int = 1, out: str = "sweep", **named: Any
) -> Run:
    """The same of `fdg.sweep`: each agent has its hyperparameters, and the first point is called the best."""
    sweep = Sweep(algorithm, make_grid(values), num_seeds, named.get("exploit_every"))
    run = _untrained(sweep, num_seeds=sweep.agents)
    run.state = run.state._replace(hyperparameters=sweep.starts(0, sweep.agents)[1])
    run.path = Path(out)
    run.path.mkdir(parents=True)
    (run.path / "sweep.json").write_text(json.dumps({"best": {"agents": list(sweep.agents_of(0))}}))
    return run


def _no_search(algorithm: Any, values: Any, *, trials: int, **named: Any) -> types.SimpleNamespace:
    """What `fdg.search` checks; its best is an untrained run of the algorithm as it is."""
    check_search(algorithm, make_space(values, lambda name: allows_integer(algorithm, name)))
    return types.SimpleNamespace(best=_untrained(algorithm), trials=())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress on the screen, no strict rules for shapes, nothing that concerns the whole process."""
    with (
        contextlib.redirect_stderr(io.StringIO()),
        jax.numpy_rank_promotion("allow"),
        mock.patch.object(fdg, "host_devices"),
        mock.patch.object(distributed, "initialize"),
    ):
        yield


def trains(path: Path) -> bool:
    """Whether a page's trainings are carried out in the suite too."""
    return str(path.resolve().relative_to(DOCS)) in _TRAINED


def differences(path: Path, train: bool) -> list[str]:
    """Runs a page; where it prints something else than stands there."""
    return [
        f"{path.name}:{block.line} prints\n{printed}"
        for block, printed in run(path, train)
        if block.printed is not None and block.printed != printed
    ]


def write(path: Path, train: bool) -> None:
    """Writes what the blocks of a page print below them, where there is a block of text for it."""
    text = path.read_text()
    for block, printed in run(path, train):
        if block.printed is not None:
            old = f"```python\n{block.code}```\n\n```text\n{block.printed}```"
            assert text.count(old) == 1, f"{path}:{block.line}"
            text = text.replace(old, f"```python\n{block.code}```\n\n```text\n{printed}```")
    path.write_text(text)


def main() -> None:
    """Runs the pages named, or all; says how long each took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument("--write", action="store_true", help="write what is printed into the pages")
    parser.add_argument("--quick", action="store_true", help="as in the suite: only some of the pages train")
    arguments = parser.parse_args()
    fdg.host_devices(8)
    for page in arguments.pages or pages():
        start = time.process_time()
        path = page.resolve()
        train = not arguments.quick or trains(path)
        if arguments.write:
            write(path, train)
        for wrong in differences(path, train) if not arguments.write else ():
            print(wrong)
        print(f"{page}: {time.process_time() - start:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
