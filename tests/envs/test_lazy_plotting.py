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


def test_what_is_needed_while_a_module_is_imported_is_imported_and_no_more(tmp_path):
    """Not at all what is absent, until it is used; what is imported already stays."""
    (tmp_path / "lacking.py").write_text(
        "import absent.pyplot as plt\nfrom absent import colors\nfrom absent.axes import Axes as axes\n"
        "def draw():\n    return colors.to_rgb('k')\n"
    )
    (tmp_path / "drawer.py").write_text(
        "import matplotlib.colors as colors\nimport matplotlib.axes._axes as axes\nimport seaborn\n"
        "from matplotlib import ticker\n"
        "class Picture:\n    def draw(self, ax: axes.Axes | None):\n"
        "        return colors.to_rgb('k'), ticker.Locator\n"
    )
    said = run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from envs.lazy_plotting import undrawn
        with undrawn("absent"):
            import lacking
        try:
            lacking.draw()
        except ModuleNotFoundError as error:
            print(error)
        with undrawn():
            import drawer
        print("matplotlib.axes" in sys.modules, "seaborn" in sys.modules)
        print(drawer.Picture().draw(None)[0], drawer.seaborn.__name__)
        import matplotlib
        with undrawn():
            import matplotlib.colors
            print(sys.modules["matplotlib"] is matplotlib, hasattr(matplotlib.colors, "ListedColormap"))
        """
    )
    assert said.splitlines() == [
        "No module named 'absent'", "True False", "(0.0, 0.0, 0.0) seaborn", "True True"
    ]  # fmt: skip
