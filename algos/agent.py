"""What every algorithm here answers to the command line: presets, the length of a run, and common checks."""

from typing import Any, ClassVar

from algos import presets
from algos.hyperparameters import require, require_positive, require_within
from envs import Environment, num_agents


class Agent:
    """Base of the algorithms of this package; a user's own needs none.

    A subclass is a frozen dataclass with at least the fields annotated here, and calls `_check_common` when
    constructed.

    Attributes:
      action_spaces: the kinds of action space that it can act in.
      several_agents: whether its environments are those of several agents, or of one.
    """

    action_spaces: ClassVar[tuple[type, ...]]
    several_agents: ClassVar[bool] = False

    env: Environment
    num_envs: int  # stepped together
    num_steps: int  # of each environment in one iteration
    total_steps: int  # of all environments in the whole run
    learning_rate: float
    discount: float
    hidden: tuple[int, ...] | None  # widths of the layers

    @classmethod
    def preset(cls, env_name: str) -> dict[str, Any]:
        """Field values found good for an environment; empty where the defaults are."""
        return presets.of(cls.__name__, env_name)

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps, all environments together."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run: all that fit in `total_steps`, and at least one."""
        return max(1, self.total_steps // self.steps_per_iteration)

    def _check_common(self) -> None:
        """Raises an `FdgError` where a field that all algorithms have is out of range."""
        require_positive(self, "num_envs", "num_steps", "total_steps", "learning_rate")
        require_within(self, 0, 1, "discount")
        require(
            self,
            all(width > 0 for width in self.hidden or ()),
            f"hidden={self.hidden}: widths are above zero",
        )
        agents = num_agents(self.env)
        require(
            self,
            (agents is not None) == self.several_agents,
            f"'{self.env.name}' is an environment of one agent: use PPO or another algorithm of one"
            if agents is None
            else f"'{self.env.name}' is an environment of {agents} agents: use IPPO or MAPPO",
        )
        space = self.env.action_space
        require(self, isinstance(space, self.action_spaces), f"cannot act in the action space {space}")
