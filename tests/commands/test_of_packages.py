"""Commands of installed packages: a package is a module and the metadata that an installer would write."""

import importlib
import sys

import pytest

from fdg.__main__ import main

_MODULE = """
import pathlib
pathlib.Path(__file__).with_suffix(".imported").touch()
def main(words):
    print("greeted", *words)
    return 4
def silent(words): pass
def wrong(words): return "fine"
def leaves(words): raise SystemExit("no such greeting")
def refuses(words):
    from fdg.errors import FdgError
    raise FdgError("greeting 'x': say hello")
nothing = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package whose commands are given as NAME = "MODULE:FUNCTION"."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def add(package, source=_MODULE, **commands):
        (tmp_path / f"{package}.py").write_text(source)
        folder = tmp_path / f"{package}-1.5.dist-info"
        folder.mkdir()
        lines = [f"{name} = {value}" for name, value in commands.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[fdg.commands]", *lines]) + "\n")
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\nSummary: Greets from {package}.\n"
        (folder / "METADATA").write_text(about)
        importlib.invalidate_caches()
        return tmp_path / f"{package}.imported"

    yield add
    for name in ("greeter", "other"):
        sys.modules.pop(name, None)


def test_a_package_adds_a_command_that_is_imported_when_it_is_named(install, capsys):
    imported = install("greeter", greet="greeter:main", hush="greeter:silent")
    assert main(["--help"]) == 0
    assert "  greet      of greeter 1.5: Greets from greeter.\n" in capsys.readouterr().out
    assert main(["gret"]) == 2
    assert "did you mean 'greet'?" in capsys.readouterr().err
    assert main(["--version"]) == 0 and main(["plan", "--env", "CartPole-v2"]) == 2
    assert not imported.exists()
    capsys.readouterr()
    assert main(["greet", "--loud", "2"]) == 4
    assert capsys.readouterr().out == "greeted --loud 2\n"
    assert imported.exists() and main(["hush"]) == 0


def test_a_name_that_fdg_only_hints_at_can_be_a_package_s_command(install, capsys):
    install("greeter", search="greeter:main")
    assert main(["search"]) == 4 and "greeted" in capsys.readouterr().out


def test_what_is_wrong_with_a_command_is_one_line(install, capsys):
    commands = {
        "absent": "greeter:missing",
        "number": "greeter:nothing",
        "wrong": "greeter:wrong",
        "refuses": "greeter:refuses",
        "leaves": "greeter:leaves",
        "module": "greeter_of_yore:main",
        "train": "greeter:main",
        "twice": "greeter:main",
    }
    install("greeter", **commands)
    install("other", "import sys; sys.exit('bye')", twice="other:main", ends="other:main")
    said = {}
    for name in [*commands, "ends"]:
        if name != "train":
            assert main([name]) == (1 if name == "leaves" else 2)
            said[name] = capsys.readouterr().err
    assert all(text.count("\n") == 1 for text in said.values())
    begins = "error: command '{}' of greeter 1.5: importing {} fails ("
    assert said["absent"].startswith(begins.format("absent", "greeter:missing") + "AttributeError: ")
    assert said["module"].startswith(begins.format("module", "greeter_of_yore:main") + "ModuleNotFoundError")
    assert "greeter:nothing is int, not a function" in said["number"]
    assert "it returned 'fine': a command returns its exit status" in said["wrong"]
    assert said["refuses"] == "error: greeting 'x': say hello\n" and said["leaves"] == "no such greeting\n"
    assert "by greeter 1.5 and other 1.5: uninstall all of them but one" in said["twice"]
    assert "importing other:main fails (SystemExit: bye): install what it needs" in said["ends"]
    main(["--help"])
    shown = capsys.readouterr().out
    assert "train      of greeter 1.5: not used, since fdg has a command of this name" in shown
    assert "twice      of greeter 1.5 and other 1.5: not used, since they have the same name" in shown
    assert main(["train", "--env", "CartPole-v2"]) == 2
    assert "unknown environment" in capsys.readouterr().err
