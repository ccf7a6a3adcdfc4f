"""Jaxprs: reading them (`read`), counting (`count`), rewriting (`rewrite`), interpreting (`interpret`)."""

from fdg.jaxprs.count import equation_count, equation_flops, flops_of, largest_cost
from fdg.jaxprs.interpret import bind, control_flow, evaluate_jaxpr, run_bodies
from fdg.jaxprs.read import (
    Body,
    as_call,
    bodies,
    build,
    bytes_of,
    call_of,
    closed_bodies,
    constants_of,
    inner_jaxprs,
    is_identity,
    is_jaxpr,
    is_literal,
    open_jaxpr,
    placeholder,
    renamed,
    require_arrays,
    scan_sizes,
    shapes_of,
    traced_equation,
    variables,
    walk,
    with_bodies,
    with_jaxpr,
    with_new_bodies,
)
from fdg.jaxprs.rewrite import (
    Inside,
    Rewriter,
    all_branches,
    copy_equations,
    inline,
    inputs_read,
    lowered,
    may_run_all_branches,
    rewrite,
    rewrite_blocks,
    traced,
    without_dead_code,
)
