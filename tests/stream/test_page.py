"""The example of docs/streaming.md."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()


def test_example_prints_the_documented_output(capsys):
    (block,) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block[0], "streaming.md", "exec"), {})
    assert capsys.readouterr().out == block[1]
