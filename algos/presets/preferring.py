"""What a class has that begins with the settings found good for an environment."""

from typing import Any

from algos import presets


class HasPresets:
    """Base of the algorithms of this package, as far as settings go."""

    @classmethod
    def preset(cls, env_name: str, env: Any = None) -> dict[str, Any]:
        """Field values found good for an environment; empty where the defaults are.

        Those of a subclass that somebody else wrote are those of the algorithm that it is based on.

        Args:
          env_name: as `envs.make` knows it.
          env: the environment, whose spaces count where its name says nothing.
        """
        return presets.of(cls.based_on(), env_name, env)

    @classmethod
    def based_on(cls) -> str:
        """Name of the algorithm of this package that it is, or is derived from."""
        ours = __name__.partition(".")[0]
        return next(kind for kind in cls.__mro__ if kind.__module__.partition(".")[0] == ours).__name__
