"""`run.policy`: a trained agent, called once for each action."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from envs.native import native
from fdg import jaxprs
from fdg.training.deployed import Deployed

_MAX_EMBEDDED_BYTES = 1 << 20  # parameters up to this size become constants of the compiled program


class Acting(Deployed):
    """A trained agent that maps observations to actions, both NumPy arrays.

    Observations are as `reset` and `step` of the environment's library return them; actions are as its `step`
    takes them (`envs.native`). The first call compiles. The agent keeps its memory between calls, for as many
    environments as the last call had; `reset()` or `start` clears it where an episode begins.

    Args:
      algorithm: defines how to act (`actor`) and the environment (`env`).
      state: the algorithm's state of one agent.
      greedy: whether to take the most probable action, instead of sampling as in training.
      seed: seed for sampled actions.
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
          observation: as the environment returns it: `[*obs]` for one environment, `[N, *obs]` for N; for
            several agents `[A, *obs]` or `[N, A, *obs]`. If it is a dictionary or tuple, its arrays have the
            leading axis `N`; parts that only critics see may be missing. An action mask is its part
            `action_mask`, or, for environments in JAX, an `envs.MaskedObservation`; without a mask, all
            actions are allowed.
          greedy: overrides the `greedy` of this object; None keeps it.
          start: bool, or `[N]` bools: whether an episode begins with this observation, which clears the
            memory. None: only in the first call, and when the number of environments changes.

        Returns:
          The action as the environment takes it: `[*action]` or `[N, *action]`; with several agents
          `[A, *action]` or `[N, A, *action]`.

        Raises:
          FdgError: the observation does not match the environment, or is traced.
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
        """Compiles `act`. Each argument costs time at every call, so only leaves that it reads are arguments.

        Up to `_MAX_EMBEDDED_BYTES`, leaves become constants of the program instead; larger constants would
        take seconds to compile.
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
        if sum(x.nbytes for x in read.values()) <= _MAX_EMBEDDED_BYTES:
            read = {}
        program = jax.jit(act)
        return lambda *given: program(read, *given)
