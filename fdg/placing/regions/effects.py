"""Orders side effects by a token that is passed from one operation to the next.

`send` and `recv` below share no array, so two groups could run them in any order. Therefore each operation
with an effect takes a token as an input and returns the next token; loops and the iteration carry it:

    a = act(x)           t0 = token
    send(a)              t1 = send(t0, a)      # workers
    y = recv()           t2, y = recv(t1)      # learners: the token (four bytes) is sent to another group

So the order of effects becomes a data dependency, and later passes need no special case for effects.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fdg import jaxprs
from fdg.errors import PlanError
from fdg.fragment import FragmentMark
from fdg.placing.policy import Group

START = np.uint32(0)  # the initial value of the token


@functools.cache
def _unordered_effects() -> tuple[type, ...]:
    """JAX's types of effects that need no order: unordered prints, and mutable arrays (`jax.new_ref`)."""

    def with_unordered_effects(x):
        jax.debug.print("{}", x)
        memory = jax.new_ref(x)
        memory[...] = memory[...] + 1
        return memory[...]

    traced = jaxprs.open_jaxpr(jax.make_jaxpr(with_unordered_effects)(jnp.zeros(())))
    return tuple({type(effect) for eqn in traced.eqns for effect in eqn.effects})


def has_effect(eqn: core.JaxprEqn) -> bool:
    """Whether an equation has a side effect whose order matters.

    The order of two kinds does not matter: unordered prints, and accesses of a program's mutable arrays.
    """
    return any(not isinstance(effect, _unordered_effects()) for effect in eqn.effects)


def thread_token(eqn: core.JaxprEqn, token: core.Var) -> tuple[core.JaxprEqn, core.Var]:
    """Adds a token to an equation, as an input and an output; returns (equation, next token)."""
    operands = list(dict.fromkeys(jaxprs.variables(eqn.invars)))
    results = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    run = core.jaxpr_as_fun(jaxprs.build(operands, results, [eqn]))

    def with_token(token, *operands):
        return token + np.uint32(1), *run(*operands)

    next_token = core.Var(token.aval)
    return jaxprs.traced_equation(jax.jit(with_token), [token, *operands], [next_token, *results]), next_token


# --- unsupported effects ---


def host_calls_and_effects(
    equations: Sequence[core.JaxprEqn], where: str = "code between fragments"
) -> Iterator[str]:
    """Descriptions of a program's calls that run Python on the host or have a side effect.

    Examples are an environment on the host, `io_callback`, `pure_callback`, or a foreign function
    (`jax.ffi.ffi_call`) with a side effect. Unordered prints do not count. A description has the call's name
    and the fragment around it, or `where` for calls outside fragments.
    """
    for eqn in equations:
        mark = FragmentMark.of(eqn)
        place = where if mark is None else f"fragment '{mark.name}' ({mark.role})"
        inner_calls = [
            call for body in jaxprs.bodies(eqn) for call in host_calls_and_effects(body.jaxpr.eqns, place)
        ]
        if inner_calls:
            yield from inner_calls
        elif has_effect(eqn) or (callable(eqn.params.get("callback")) and not eqn.effects):
            yield f"{_callee(eqn)} in {place}"


def _callee(eqn: core.JaxprEqn) -> str:
    """The name of the function that an equation calls."""
    function = eqn.params.get("callback")
    if function is None:
        return str(eqn.params.get("target_name", eqn.primitive.name))
    function = getattr(function, "callback_func", function)
    return str(getattr(function, "__name__", type(function).__name__))


def check_one_device(equations: Sequence[core.JaxprEqn], group: Group, policy: Any, num_devices: int) -> None:
    """Raises `PlanError` if a group with host calls has several devices; a call needs the whole batch."""
    call = next(host_calls_and_effects(equations), None)
    if call is None or len(group) == 1:
        return
    fix = (
        f"use {group.name}=1"
        if hasattr(policy, group.name)
        else "use one device, or a policy that gives it its own device: policies.Environments(workers=1) for"
        " environments, policies.Colocated(rewards=1) for rewards"
    )
    raise PlanError(
        f"{policy} on {num_devices} devices: {call} runs on the host, and cannot be split over the"
        f" {len(group)} devices of group '{group.name}': {fix}"
    )


def check_one_agent(equations: Sequence[core.JaxprEqn], agents: int) -> None:
    """Raises `PlanError` if a program of several agents has host calls."""
    if agents == 1:
        return
    for call in host_calls_and_effects(equations):
        raise PlanError(
            f"num_seeds={agents}: {call} runs on the host, which supports one agent only: start one run for"
            " each seed, or each point of a sweep"
        )


def check_one_process(
    programs: Iterable[tuple[Group, Sequence[core.JaxprEqn]]], process_of: Callable[[int], int], policy: Any
) -> None:
    """Raises a `PlanError` if side effects are in several processes, which cannot order them.

    `process_of` gives the index of a device's process.
    """
    calls: dict[int, str] = {}
    for group, equations in programs:
        effects = [eqn for eqn in equations if has_effect(eqn)]
        if not effects:
            continue
        call = next(host_calls_and_effects(effects), effects[0].primitive.name)
        calls.setdefault(process_of(group.devices[0]), f"{call} ({group.name})")
    if len(calls) > 1:
        (first, first_call), (second, second_call) = list(calls.items())[:2]
        raise PlanError(
            f"{policy} puts effects into several processes, which have no common order: {first_call}"
            f" into process {first}, {second_call} into process {second}: place both in one group, or in one"
            f" process"
        )
