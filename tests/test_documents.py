"""What the documents say is so: README's code and plan, and the notebook from top to bottom."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import algos
import policies
from docs import draw_policies
from fdg.commands.cli import plan_main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_readme_code_runs(capsys):
    """The blocks in order, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["metrics"]["norm"].shape == (5,)
    assert "FDG of Tiny" in capsys.readouterr().out


def test_the_map_of_the_engine_names_its_rooms():
    """Every folder of the engine, and every file that stands beside them."""
    named = set(re.findall(r"`(\w+\.py|\w+/)`", (ROOT / "docs" / "architecture.md").read_text()))
    rooms = {f"{path.parent.name}/" for path in (ROOT / "fdg").glob("*/__init__.py")}
    rooms |= {path.name for path in (ROOT / "fdg").glob("*.py") if path.name != "__init__.py"}
    assert rooms <= named | {"algos/", "envs/"}, rooms - named


@pytest.mark.parametrize("name", algos.names("environments"))
def test_the_tests_of_an_algorithm_say_where_its_loss_comes_from(name):
    tests = (ROOT / "tests" / "algos" / f"test_{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(tests))
    assert re.search(r"arXiv\s\d{4}\.\d{5}", docstring), "which paper"
    assert re.search(r"equation|section|algorithm \w?\d|appendix", docstring), "which line of it"


def test_readme_plan_is_the_printed_one():
    plan = draw_policies.readme_plan()
    assert f"```\n{plan}\n```" in README, plan


def test_the_plans_and_pictures_of_the_policies(capsys):
    """`python -m docs.draw_policies` makes them again."""
    text, commands = draw_policies.POLICIES.read_text(), 0
    for match, printed, drawing in draw_policies.shown(text):
        if match["text"] is not None:
            assert match["text"] == printed + "\n", printed
        if match["picture"]:
            assert (ROOT / "docs" / match["picture"]).read_text() == drawing + "\n", match["picture"]
        if match["language"] == "sh":
            commands += 1
            assert plan_main(match["source"].split()[3:]) == 0
            assert capsys.readouterr().out.endswith(f"\n\n{printed}\n")
    assert commands == 7
    for name in policies.names():
        assert f"--policy {name} " in text and f"## `{policies.get(name).__name__}`" in text


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # which other tests' imports set, and Jupyter would obey
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    text = "\n".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "largest difference of any parameter" in text
    drawn = {
        kind
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
    }
    assert {"image/svg+xml", "image/png"} <= drawn
