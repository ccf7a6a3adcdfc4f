"""The documentation site: code blocks print the shown output, commands parse, formulas and links work."""

import re
import shlex

import pytest
from latex2mathml.converter import convert

import algos
import envs
import fdg
from docs import pages, site_hooks
from fdg.commands.parse import parse

DOCUMENTS = sorted(path for path in pages.DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", pages.pages(), ids=lambda path: path.stem)
def test_code_of_page(page):
    assert pages.differences(page, train=pages.trains(page)) == []


def test_differing_output_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```python\nprint(4)\n```\n")
    assert pages.differences(page, train=False) == ["page.md:2 prints\n2\n"]


def test_commands_parse():
    """All `train` and `plan` commands that need no earlier run or optional package."""
    documents = [
        path for path in DOCUMENTS if path.name not in ("results.md", "performance.md")
    ]  # commands of past versions
    lines = {
        line.strip()
        for document in documents
        for block in pages.blocks(document.read_text(), "sh")
        for line in block.code.replace("\\\n", " ").splitlines()
    }
    seen = 0
    for line in lines:
        command = re.match(r"\S*python -m (fdg\.train|fdg\.plan)\b", line)
        words = shlex.split(line[command.end() :], comments=True) if command else []
        if command is None or _needs_other_files_or_packages(words):
            continue
        try:
            parse(words if "--devices" in words else [*words, "--devices", "1"], command[1], "")
        except fdg.FdgError as error:  # a placeholder for a directory
            assert "no such" in str(error), line
        seen += 1
    assert seen > 20


def _needs_other_files_or_packages(words: list[str]) -> bool:
    elsewhere = {
        "--resume",
        "--from",
        "--config",
        "--help",
        "--cluster",
        "--distributed",
        "--policy=auto",
        "--lengths",
    }
    modules = any(
        ":" in word and word.partition(":")[0] in ("my.module", "mine", "thermostat") for word in words
    )
    packages = ("envpool:", "gymnasium:", "ray:", "brax:", "MPE_", "HeuristicEnemySMAX", "verifiers:")
    host = any(word.startswith(packages) for word in words)
    return (
        bool(elsewhere & set(words)) or modules or host or "auto" in words or "--coordinator-address" in words
    )


def test_formulas_render():
    """The MathML has no backslash: unknown commands would stay as text."""
    formulas = []
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
        formulas += re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
        formulas += re.findall(r"(?<!\$)\$(?!\$)([^$\n]+)\$(?!\$)", text)
    assert len(formulas) > 40
    for formula in formulas:
        assert "\\" not in convert(formula), formula


def test_links_out_of_docs():
    assert site_hooks._page_of("CONTRIBUTING.md") == "contributing.md"
    assert site_hooks._outside("decisions/001-x.md", "../../fdg/engine.py") == "fdg/engine.py"
    assert site_hooks._outside("how-to/policy.md", "../policies.md#staleness") is None
    assert site_hooks._outside("index.md", "https://arxiv.org/abs/2210.00882") is None


def test_every_algorithm_is_documented():
    overview = (pages.DOCS / "algorithms.md").read_text()
    of_text = (pages.DOCS / "rlhf.md").read_text() if (pages.DOCS / "rlhf.md").exists() else ""
    for name in algos.names():
        assert f"`{name}`" in overview + of_text or f"--algo {name}" in of_text, name


@pytest.mark.parametrize("page", sorted((pages.DOCS / "algorithms").glob("*.md")), ids=lambda path: path.stem)
def test_algorithm_page_has_formulas_source_and_curve(page):
    """The page shows the learning curve if its image exists (from `python -m bench.learning`)."""
    text = page.read_text()
    source = algos.get(page.stem).__module__.replace(".", "/")
    assert "$$" in text and f"{source}.py" in text
    curve = re.search(r"!\[Learning curve[^\]]*\]\(([^)]+)\)", text)
    assert (page.parent / curve[1]).is_file() if curve else True
    assert curve or not list((pages.DOCS / "images" / "learning").glob(f"{page.stem}-*.png"))


def test_contributing_skeletons():
    text = (pages.DOCS.parent / "CONTRIBUTING.md").read_text()
    names: dict = {}
    exec("from fdg.batch.rules.result import *; import envs; from envs import *", names)
    exec("from typing import *; import jax.numpy as jnp; from fdg import jaxprs", names)
    exec("from fdg.jax_internals import ClosedJaxpr", names)
    for block in pages.blocks(text, "python"):
        exec(block.code, names)
    one = algos.make("a2c", envs.make("CartPole-v1"), num_envs=4)
    groups = fdg.place(one, names["HalfAndHalf"](), 4).groups
    assert [(group.name, group.devices) for group in groups] == [("actors", (0, 1)), ("learners", (2, 3))]
    envs.check(envs.make("corridor", length=3))
    assert names["Mine"](env=envs.make("CartPole-v1")).updates_per_iteration == 1
    assert {*names["RULES"]} == {"tile"}


def test_citation_version():
    text = (pages.DOCS.parent / "CITATION.cff").read_text()
    assert f"\nversion: {fdg.__version__}\n" in text
