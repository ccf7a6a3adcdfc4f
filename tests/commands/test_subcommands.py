"""`fdg COMMAND`, or `python -m fdg COMMAND`."""

from fdg.__main__ import main


def test_help_lists_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ("train", "plan", "launch", "evaluate", "play", "plot"))
    assert "trains an algorithm" in text
    assert main([]) == 2 and main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("fdg ")


def test_commands_receive_their_arguments(capsys):
    assert main(["plan", "--env", "CartPole-v2"]) == 2
    assert "did you mean 'CartPole-v1'?" in capsys.readouterr().err
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'trian': did you mean 'train'?")
    assert main(["sweep"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'sweep': write fdg train --sweep ")
