"""The whole plan of one small iteration, worked out by hand."""

import jax.numpy as jnp

import fdg
import policies


class Small:
    """`judge` waits for `learn`; `count` waits for nothing, and only `judge` for `count`."""

    def init(self, key):
        return {"w": jnp.float32(0.5), "x": jnp.arange(4.0)}

    def iterate(self, state):
        count = fdg.fragment("actor", name="count")(lambda x: x + 1)
        learn = fdg.fragment("learner", (None, 0), None, name="learn")(lambda w, a: w + jnp.mean(a))
        judge = fdg.fragment("actor", (0, None), name="judge")(lambda x, w: x * w)
        w = learn(state["w"], jnp.exp(state["x"]))
        return {"w": w, "x": judge(count(state["x"]), w)}, {}


def test_what_is_ready_waits_to_be_one_program_and_what_is_outside_goes_to_who_uses_it():
    """The exponential is computed by the learners: only `w` [] and `x` [4] move, `w` to two actors."""
    plan = fdg.place(Small(), policies.SingleLearnerCoarse(actors=2, learners=1), 3)
    programs = [(each.group, each.fragments) for each in plan.programs]
    assert programs == [("learners", ("learn",)), ("actors", ("count", "judge"))]
    moved = [(each.where, each.bytes_per_iteration) for each in plan.movements if each.how == "transfer"]
    assert moved == [("learners -> actors", 2 * 4), ("actors -> learners", 4 * 4)]
