"""What the documents say is so: README's code and plan, and the notebook from top to bottom."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import algos
import envs
import fdg
import policies

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


def test_readme_plan_is_the_printed_one():
    algorithm = algos.make("ppo", envs.make("CartPole-v1"), num_envs=16)
    plan = str(fdg.place(algorithm, policies.GPUOnly(), 8))
    assert f"```\n{plan}\n```" in README, plan


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
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
