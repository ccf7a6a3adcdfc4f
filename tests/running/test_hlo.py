"""Collectives read from HLO text, which is written by hand in XLA's format."""

import pytest

from fdg.batch.collective import Collective
from fdg.running.hlo import read_collectives

PROGRAM = """\
HloModule jit_iterate, is_scheduled=true, entry_computation_layout={(f32[4,2]{1,0})->f32[4,2]{1,0}}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%fused.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %gathered = f32[4]{0} all-gather(%p), dimensions={0}, metadata={op_name="jit(iterate)/while/x"}
}

%trip.2 (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %inner = (s32[], f32[4]{0}) while(%s), condition=%test.3, body=%inner.4, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %f = f32[4]{0} fusion(%inner), kind=kLoop, calls=%fused.1
}

%test.3 (s: (s32[], f32[4])) -> pred[] {
  %s = (s32[], f32[4]{0}) parameter(0)
  ROOT %go = pred[] all-reduce(%s), to_apply=%sum
}

%inner.4 (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %r = bf16[3,5]{1,0} all-reduce-start(%s), to_apply=%sum, \
metadata={op_name="jit(iterate)/jit(fdg:learner:learn)/while/jit(fdg:gradient:gradient)/add"}
  ROOT %t = (s32[], f32[4]{0}) all-reduce-done(%r)
}

%yes (p: u8[6]) -> u8[6] {
  %p = u8[6]{0} parameter(0)
  ROOT %q = (u8[6]{0}, c64[2]{0}) all-to-all(%p)
}

%no (p: u8[6]) -> u8[6] {
  %p = u8[6]{0} parameter(0)
  ROOT %q = u8[6]{0} collective-permute(%p)
}

%unused (p: u8[6]) -> u8[6] {
  %p = u8[6]{0} parameter(0)
  ROOT %q = u8[6]{0} reduce-scatter(%p)
}

ENTRY %main (x: f32[4,2]) -> f32[4,2] {
  %x = f32[4,2]{1,0} parameter(0)
  // no instruction
  %y = u8[6]{0} conditional(%x), branch_computations={%yes, %no}
  %z = (s32[], f32[4]{0}) while(%x), condition=%test.3, body=%trip.2, \
backend_config={"known_trip_count":{"n":"3"}}
  %w = (s32[], f32[4]{0}) while(%x), condition=%test.3, body=%inner.4
  ROOT %out = f32[4,2]{1,0} add(%x, %x), metadata={op_name="all-reduce"}
}
"""

LEARN = "jit(iterate)/jit(fdg:learner:learn)/while/jit(fdg:gradient:gradient)/add"


def test_program():
    """A loop of 5 trips within one of 3 runs 15 times; a loop of unknown length counts as one trip."""
    gradient = ("all-reduce", 30, ("learn", "gradient"), LEARN)  # 15 numbers of 2 bytes
    assert [(c.kind, c.bytes, c.calls, c.fragments, c.op_name) for c in read_collectives(PROGRAM)] == [
        ("all-to-all", 6 + 2 * 8, 1, (), ""),
        ("collective-permute", 6, 1, (), ""),
        ("all-reduce", 1, 3, (), ""),
        ("all-reduce", 1, 15, (), ""),
        (*gradient[:2], 15, *gradient[2:]),
        ("all-gather", 16, 3, (), "jit(iterate)/while/x"),
        ("all-reduce", 1, 1, (), ""),
        (*gradient[:2], 1, *gradient[2:]),
    ]


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("f32[0,7]{1,0}", 0),
        ("f64[2,3]{1,0}", 48),
        ("pred[9]{0}", 9),
        ("c128[2]{0}", 32),
        ("s4[7]{0}", 4),  # two to a byte
        ("f8e4m3fn[5]{0}", 5),
        ("bf16[5]{0:T(8,128)(2,1)}", 10),
        ("(u32[2]{0}, (f16[3]{0}, s64[]))", 8 + 6 + 8),
        ("token[]", 0),
    ],
)
def test_sizes(shape, size):
    text = f"ENTRY %main (x: f32[]) -> f32[] {{\n  ROOT %r = {shape} all-reduce(%x)\n}}\n"
    assert read_collectives(text) == (Collective("all-reduce", size, 1),)


@pytest.mark.parametrize(
    ("attribute", "names"),
    [
        ("to_apply=%inner", 1),
        ("calls=%inner", 1),
        ("true_computation=%inner, false_computation=%inner", 2),
        ("branch_computations={%inner, %inner, %inner}", 3),
        ("called_computations={inner}", 1),
        ("control-predecessors={%inner}", 0),  # runs after it, but does not call it
    ],
)
def test_called_computations(attribute, names):
    text = (
        "%inner (x: f32[]) -> f32[] {\n  ROOT %r = f32[] reduce-scatter(%x)\n}\n\n"
        f"ENTRY %main (x: f32[]) -> f32[] {{\n  ROOT %r = f32[] call(%x), {attribute}\n}}\n"
    )
    assert read_collectives(text) == (Collective("reduce-scatter", 4, 1),) * names


def test_fragment_called_within_itself_is_named_once():
    path = "jit(f)/jit(fdg:actor:act)/vmap(jit(fdg:actor:act))/jit(fdg:critic:value.2)/dot"
    text = (
        "ENTRY %main (x: f32[]) -> f32[] {\n"
        f'  ROOT %r = f32[] collective-broadcast(%x), metadata={{op_name="{path}"}}\n}}\n'
    )
    assert [c.fragments for c in read_collectives(text)] == [("act", "value.2")]


@pytest.mark.parametrize("text", ["", "HloModule empty {\n}\n", "%alone (x: f32[]) -> f32[] {\n}\n"])
def test_text_without_an_entry_has_no_collectives(text):
    assert read_collectives(text) == ()
