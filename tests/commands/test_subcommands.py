"""`fdg COMMAND`, or `python -m fdg COMMAND`."""

from fdg.__main__ import main


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in ("train", "plan", "launch", "evaluate", "play", "plot"))
    assert "trains an algorithm" in said
    assert main([]) == 2 and main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("fdg ")


def test_a_command_gets_the_words_after_it(capsys):
    assert main(["plan", "--env", "CartPole-v2"]) == 2
    assert "did you mean 'CartPole-v1'?" in capsys.readouterr().err
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'trian': did you mean 'train'?")
    assert main(["sweep"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'sweep': write fdg train --sweep ")
