"""Documentation matches the code: README, printed plans, notebooks, pages for users of other libraries."""

import ast
import builtins
import dataclasses
import re
from pathlib import Path

import jax
import matplotlib
import matplotlib.pyplot as plt
import pytest

import algos
import envs
import fdg
import policies
from docs import draw_policies
from fdg.commands.cli import plan_main, train_main
from tests.lazy_module import LazyModule

nbformat, interactive = LazyModule("nbformat"), LazyModule("IPython.core.interactiveshell")
pylab, capture = LazyModule("IPython.core.pylabtools"), LazyModule("IPython.utils.capture")

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CODE = ("algos", "bench", "docs", "envs", "fdg", "policies", "tests", "tools")


def test_readme_code_runs(capsys, monkeypatch, devices):
    """Runs all blocks as one program on one device."""
    monkeypatch.setattr(jax, "devices", lambda backend=None: devices[:1])
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["metrics"]["norm"].shape == (5,)
    assert "FDG of Tiny" in capsys.readouterr().out


@pytest.mark.parametrize("package", [algos, envs, fdg, policies], ids=lambda package: package.__name__)
def test_reference_lists_all_public_names(package):
    page = (ROOT / "docs" / "reference" / f"{package.__name__}.md").read_text()
    listed = set(re.findall(rf"^::: {package.__name__}\.(\w+)$", page, re.MULTILINE))
    for members in re.findall(r"members: \[(.*)\]", page):
        listed.update(members.split(", "))
    assert set(package.__all__) <= listed


def test_architecture_page_lists_all_modules():
    """Every folder and top-level file of `fdg`."""
    named = set(re.findall(r"`(\w+\.py|\w+/)`", (ROOT / "docs" / "architecture.md").read_text()))
    modules = {f"{path.parent.name}/" for path in (ROOT / "fdg").glob("*/__init__.py")}
    modules |= {path.name for path in (ROOT / "fdg").glob("*.py") if path.name != "__init__.py"}
    assert modules <= named | {"algos/", "envs/"}, modules - named


@pytest.mark.parametrize("name", algos.names("environments"))
def test_algorithm_tests_cite_source_of_loss(name):
    tests = (ROOT / "tests" / "algos" / f"test_{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(tests))
    assert re.search(r"arXiv\s\d{4}\.\d{5}", docstring), "which paper"
    assert re.search(r"equation|section|algorithm \w?\d|appendix", docstring), "which line of it"


def test_files_have_at_most_500_lines():
    """A longer file has more than one purpose."""
    files = [f for folder in CODE for f in (ROOT / folder).rglob("*.py")]
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert len(files) > 500 and {f: n for f, n in lengths.items() if n > 500} == {}


def test_readme_plan():
    plan = draw_policies.readme_plan()
    assert f"```\n{plan}\n```" in README, plan


def test_policy_plans_and_drawings(capsys):
    """`python -m docs.draw_policies` regenerates them."""
    text, commands = draw_policies.POLICIES.read_text(), 0
    for match, printed, drawing in draw_policies.shown(text):
        if match["text"] is not None:
            assert match["text"] == printed + "\n", printed
        if match["picture"]:
            assert (ROOT / "docs" / match["picture"]).read_text() == drawing + "\n", match["picture"]
        if match["language"] == "sh":
            commands += 1
            if commands == 1:  # the others are parsed the same way
                assert plan_main(match["source"].split()[3:]) == 0
                assert capsys.readouterr().out.endswith(f"\n\n{printed}\n")
    assert commands == 8
    for name in policies.names():
        assert re.search(rf"--policy {name}\b", text) and f"## `{policies.get(name).__name__}`" in text


@pytest.fixture
def shell(monkeypatch, tmp_path, host_devices):
    """An in-process IPython shell: a kernel would repeat all imports and compilations."""
    monkeypatch.setattr(fdg, "host_devices", lambda count: None)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    shell = interactive.InteractiveShell.instance()
    shell.display_formatter.active_types = shell.display_formatter.format_types
    pylab.select_figure_formats(shell, {"png"})
    yield shell
    interactive.InteractiveShell.clear_instance()
    vars(builtins).pop("__IPYTHON__", None)  # Jumanji detects notebooks by this name
    plt.close("all")
    matplotlib.use(before)


def run_notebook(shell, name, **overrides):
    """Runs the cells of a notebook in order; returns printed text and MIME types of displayed outputs.

    `overrides` replaces the notebook's assignments to these names.
    """
    printed, mimes = [], set()
    for cell in nbformat.read(ROOT / "notebooks" / name, as_version=4).cells:
        source = cell.source
        for assigned, value in overrides.items():
            source = re.sub(rf"^{assigned} = .*$", f"{assigned} = {value}", source, flags=re.MULTILINE)
        if cell.cell_type != "code":
            continue
        with capture.capture_output() as captured, jax.numpy_rank_promotion("allow"):
            result = shell.run_cell(source)
            result.raise_error()
        printed.append(captured.stdout)
        mimes |= {kind for output in captured.outputs for kind in output.data}
        mimes |= set(shell.display_formatter.format(result.result)[0]) if result.result is not None else set()
    return "\n".join(printed), mimes


def test_quickstart_notebook(shell):
    """Runs with three iterations; the notebook itself compares the parameters of its runs."""
    printed, mimes = run_notebook(shell, "quickstart.ipynb", ITERATIONS="3")
    assert printed.count("largest difference of any parameter") == 2
    assert "image/svg+xml" in mimes
    assert plt.get_fignums()


@pytest.mark.parametrize("name", ["cleanrl", "purejaxrl", "stable-baselines3", "trl"])
def test_coming_from_pages_name_existing_flags_and_fields(name, capsys):
    """Flags in fdg's table columns, and hyperparameters in code blocks."""
    text = (ROOT / "docs" / "coming-from" / f"{name}.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert train_main(["--help"]) == 0
    fields = {field.name for each in algos.names() for field in dataclasses.fields(algos.get(each))}
    flags = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out)) | {f.replace("_", "-") for f in fields}
    ours = " ".join(row.split("|")[2] for row in text.splitlines() if row.startswith("| "))
    assert set(re.findall(r"(?<= |`)--([a-z-]+)", re.sub(r"fdg\.(play|export)[^`]*", "", ours))) <= flags
    for call in re.findall(r"algos\.[A-Z]\w+\((.*)\)", code):
        assert set(re.findall(r"(\w+)=", call)) <= fields, call
