"""Reading a compiled program."""

from tests.support import benchmarks

hlo = benchmarks.load("hlo")
Counted, count, parts = hlo.Counted, hlo.count, hlo.parts

HLO = """
%body (x: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = (s32[], f32[4]{0}) parameter(0)
  %a = f32[4]{0} get-tuple-element(%x), index=1
  %f = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"7"}
  %r = f32[4]{0} all-reduce(%f), to_apply=%sum
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %r)
}

%known (x: (s32[], f32[4])) -> pred[] {
  %n = s32[]{:T(128)} constant(5)
  %x = (s32[], f32[4]{0}) parameter(0)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%unknown (x: (s32[], f32[4])) -> pred[] {
  %x = (s32[], f32[4]{0}) parameter(0)
  ROOT %more = pred[] fusion(%x), kind=kLoop, calls=%fused
}

ENTRY %main.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %c = (f32[2]{0}, /*index=1*/f32[2]{0}) fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1"}
  %w0 = (s32[], f32[4]{0}) while(%c), condition=%unknown, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %w1 = (s32[], f32[4]{0}) while(%w0), condition=%known, body=%body
  %w2 = (s32[], f32[4]{0}) while(%w1), condition=%unknown, body=%body
  ROOT %b = f32[4]{0} bitcast(%w2)
}
"""


def test_loops_count_as_often_as_they_turn():
    """3 turns said by the compiler, 5 that the condition tells, and one of a loop that may take any number."""
    turns = 3 + 5 + 1
    assert count(HLO) == Counted(kernels=1 + 2 * turns + 1, cycles=1 + 7 * turns, reductions=turns, sizes={16: turns})


def test_launches_are_split_by_loop_and_kind():
    outside, *loops = parts(HLO)
    assert outside == (1, {"elementwise": 1 + 1 + 2})  # and the loop of unknown length, with its condition
    assert loops == [(3, {"elementwise": 2 * 3}), (5, {"elementwise": 2 * 5})]
    assert sum(sum(kinds.values()) for _, kinds in parts(HLO)) == count(HLO).kernels


def test_kinds_are_by_name():
    text = """
ENTRY %main.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %gemm_fusion_dot.3 = f32[4]{0} fusion(%p), kind=kCustom, calls=%fused
  %input_add_reduce_fusion = f32[4]{0} fusion(%p), kind=kInput, calls=%fused
  %loop_dynamic_update_slice_fusion.1 = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  %wrapped_slice.2 = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %copy.7 = f32[4]{0} copy(%p)
}
"""
    assert parts(text) == [(1, {"products": 1, "sums": 1, "writes": 1, "slices": 1, "copies": 1})]


def test_several_arrays_are_reduced_at_once():
    text = """
ENTRY %main.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %r = (f32[64,64]{1,0}, f32[]) all-reduce(%p, %p), to_apply=%sum
  ROOT %s = (bf16[8]{0}, s32[3]{0}) all-reduce-start(%p, %p), to_apply=%sum
}
"""
    assert count(text).sizes == {4 * 64 * 64 + 4: 1, 2 * 8 + 4 * 3: 1}
