"""Environments run without their plotting libraries, which are imported on first use."""

import subprocess
import sys
import textwrap


def run(code):
    """Runs code in a new process; returns its output."""
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout


def test_step_imports_no_plotting_library():
    output = run(
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
    assert output.splitlines() == ["['gymnax']", "True", "True"]
