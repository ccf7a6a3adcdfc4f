"""A trained agent at work, one call an action: what `run.policy` is."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from envs.native import native
from fdg import jaxprs
from fdg.training.deployed import Deployed

_WITHIN = 1 << 20  # bytes of parameters that are part of a program


class Acting(Deployed):
    """A trained agent that answers to observations: NumPy arrays in, NumPy arrays out.

    It takes what `reset` and `step` of the environment's own library give, and answers what its `step` takes
    (`envs.native`). The first call compiles. What the agent remembers is kept from call to call, for as many
    environments as the last call had; `reset()`, or `start`, says that episodes begin.

    Args:
      algorithm: how it acts, and where (`actor`, `env`).
      state: the algorithm's own, of one agent.
      greedy: with the most probable action, else with one drawn as in training.
      seed: of what is drawn.
    """

    def __init__(self, algorithm: Any, state: Any, greedy: bool = True, seed: int = 0):
        self._native = native(algorithm.env)
        super().__init__(algorithm.env.name, self._native.observation, self._native.action)
        self.greedy = greedy
        self._algorithm, self._state = algorithm, state
        self._programs: dict[Any, Callable[..., Any]] = {}
        key = jax.random.key(seed)
        self._key, self._kind, self._calls = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key), 0

    def __call__(self, observation: Any, greedy: bool | None = None, start: Any = None) -> Any:
        """An action for an observation, or actions for a batch of them.

        Args:
          observation: as the environment gives it, of one, `[*obs]`, or of N, `[N, *obs]`; of several agents
            `[A, *obs]` or `[N, A, *obs]`. In parts, where the environment's are: a dictionary or tuple,
            arrays with a leading axis `N` in it for a batch; what only critics see may be left out. Where
            actions can be forbidden, its part `action_mask` says which, or an `envs.MaskedObservation` of
            an environment of JAX's; one without a mask allows all.
          greedy: None for what was said when this was made.
          start: bool, or `[N]` of them: an episode begins with this observation, so nothing of the last one
            is remembered. None: only if this is the first call (or the number of environments is another).

        Returns:
          The action as the environment takes it, in its own codes and parts: `[*action]` or `[N, *action]`
          (with agents: `A` first).

        Raises:
          FdgError: the observation is not one of the environment's, or is traced.
        """
        chosen = self.greedy if greedy is None else bool(greedy)

        def call(*given: Any) -> Any:
            program = self._programs.get((chosen, given[1] is None))
            if program is None:
                program = self._programs[chosen, given[1] is None] = self._compiled(chosen, given)
            return program(*given, self._key, np.uint32(self._calls))

        found = self._answer(observation, start, self._empty_memory, call)
        self._calls += 1
        return found

    def _empty_memory(self, count: int) -> Any:
        return self._native.kept(count), self._algorithm.actor(self._state).memory(count)

    def _compiled(self, greedy: bool, given: tuple[Any, ...]) -> Callable[..., Any]:
        """The program. Each of its arguments costs time at every call, so they are what acting reads alone.

        And where that is small, it is part of the program, which a larger one would take seconds to compile.
        """
        leaves, structure = jax.tree.flatten(self._state)

        def act(read, arrays, mask, memory, start, key, calls):
            state = jax.tree.unflatten(structure, [read.get(i, x) for i, x in enumerate(leaves)])
            keys = jax.random.fold_in(jax.random.wrap_key_data(key, impl=self._kind), calls)
            keys = jax.random.split(keys, start.shape[0])
            observation = self._native.encode(arrays, mask)
            kept, observation = self._native.see(memory[0], start, observation)
            action, held = self._algorithm.actor(state).act(memory[1], observation, start, keys, greedy)
            return self._native.decode(action), (kept, held)

        every = dict(enumerate(leaves))
        needed = jaxprs.inputs_read(jax.make_jaxpr(act)(every, *given, self._key, np.uint32(0)))
        read = {i: x for i, x in every.items() if needed[i]}
        if sum(x.nbytes for x in read.values()) <= _WITHIN:
            read = {}
        program = jax.jit(act)
        return lambda *given: program(read, *given)
