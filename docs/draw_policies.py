"""Regenerates the plans in docs/policies.md and README.md: `python -m docs.draw_policies`, in the root.

A plan in a document has a picture (optional), the command or Python code that makes it, and its output:

    ![...](images/policies/central.svg)

    ```sh
    python -m fdg.plan --policy central --devices 4
    ```

    ```text
    Central(workers=None, servers=1, staleness=0) places PPO on 4 devices
    ...
    ```

With Python code, the picture shows its variable `plan`. `tests/test_documents.py` compares the pictures and
texts in the documents with the results of this module.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
POLICIES = ROOT / "docs" / "policies.md"

_SHOWN = re.compile(
    r"(?:!\[[^\]]*\]\((?P<picture>[^)]+\.svg)\)\s+)?"
    r"```(?P<language>sh|python)\n(?P<source>[^`]*?)\n```"
    r"(?:\s+```text\n(?P<text>.*?)```)?",
    re.DOTALL,
)


def shown(text: str) -> Iterator[tuple[re.Match[str], str, str]]:
    """Yields for each plan of a document: its match in the text, its output, its SVG ("" without picture).

    The Python code of a document runs in order, as one program.
    """
    namespace: dict = {}
    for match in _SHOWN.finditer(text):
        if match["language"] == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(match["source"], "policies.md", "exec"), namespace)
            plan, printed = namespace.get("plan"), output.getvalue().rstrip("\n")
        elif match["text"] is not None and match["source"].startswith("python -m fdg.plan "):
            plan = _plan_of_command(match["source"])
            printed = str(plan)
        else:
            continue
        yield match, printed, plan._repr_svg_() if match["picture"] else ""


def _plan_of_command(command: str):
    """The plan that a command `python -m fdg.plan ...` prints."""
    import fdg
    from fdg.commands.parse import parse

    job = parse(command.split()[3:], "python -m fdg.plan", "")
    return fdg.place(job.algorithm, job.policy, job.devices, job.agents)


def readme_plan() -> str:
    """The plan below README's first example, as text."""
    import algos
    import envs
    import fdg
    import policies

    return str(fdg.place(algos.make("ppo", envs.make("CartPole-v1"), num_envs=16), policies.GPUOnly(), 8))


def main() -> None:
    """Rewrites the plans and pictures of `docs/policies.md`, and the plan in `README.md`."""
    readme = ROOT / "README.md"
    old_plan = re.compile(r"(?<=```\n)GPUOnly\(\) places PPO on 8 devices\n.*?(?=\n```)", re.DOTALL)
    readme.write_text(old_plan.sub(lambda _: readme_plan(), readme.read_text()))
    text = document = POLICIES.read_text()
    for match, printed, drawing in shown(text):
        if match["text"] is not None:
            block = match[0].replace(f"```text\n{match['text']}```", f"```text\n{printed}\n```")
            document = document.replace(match[0], block)
        if match["picture"]:
            path = POLICIES.parent / match["picture"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(drawing + "\n")
    POLICIES.write_text(document)


if __name__ == "__main__":
    main()
