"""Importing environments without the libraries that they draw with."""

import subprocess
import sys
import textwrap


def run(code):
    """The output of a fresh process, in which nothing is imported yet."""
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout


def test_a_step_imports_no_drawing_and_drawing_works_afterwards():
    said = run(
        """
        import sys
        import jax, envs
        env = envs.make("Pong-misc").single
        jax.eval_shape(lambda key: env.reset(key), jax.random.key(0))
        print(sorted({"matplotlib", "seaborn", "pandas", "gymnax"} & sys.modules.keys()))
        from gymnax.environments.misc import pong
        import matplotlib.colors
        print(pong.colors.ListedColormap is matplotlib.colors.ListedColormap)
        print(pong.plt.subplots is __import__("matplotlib.pyplot").pyplot.subplots)
        """
    )
    assert said.splitlines() == ["['gymnax']", "True", "True"]
