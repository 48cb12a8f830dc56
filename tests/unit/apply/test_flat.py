"""The arithmetic of flat memory: every element of every parameter has one place, whatever the sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.apply.data.flat import ALIGNMENT, FlatLayout

SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 7), st.booleans())
def test_every_element_lies_in_one_segment(numels: list[int], num_shards: int, keep_whole: bool) -> None:
    layout = FlatLayout(numels, num_shards, keep_whole=keep_whole)
    places: dict[int, set[int]] = {index: set() for index in range(len(numels))}
    taken: set[int] = set()
    for shard in range(num_shards):
        for span in layout.spans(shard):
            assert span.offset >= 0
            assert span.offset + span.numel <= layout.segment_numel
            elements = set(range(span.start, span.stop))
            assert not elements & places[span.index]
            places[span.index] |= elements
            memory = set(range(span.offset, span.offset + span.numel))
            at = {shard * layout.segment_numel + place for place in memory}
            assert at == {layout.offsets[span.index] + element for element in elements}
            assert not at & taken
            taken |= at
    assert [len(found) for found in places.values()] == numels
    assert layout.numel == layout.segment_numel * num_shards


@given(SIZES, st.integers(1, 7), st.booleans())
def test_ends_are_those_of_the_parameters_joined(numels: list[int], num_shards: int, keep_whole: bool) -> None:
    layout = FlatLayout(numels, num_shards, keep_whole=keep_whole)
    assert sorted(layout.order) == list(range(len(numels)))
    joined = [(index, element) for index in layout.order for element in range(numels[index])]
    start = 0
    for shard, end in enumerate(layout.ends()):
        held = [(s.index, e) for s in layout.spans(shard) for e in range(s.start, s.stop)]
        assert joined[start:end] == held
        start = end
    assert start == len(joined)


@given(SIZES, st.integers(1, 7))
def test_whole_parameters_are_never_cut(numels: list[int], num_shards: int) -> None:
    layout = FlatLayout(numels, num_shards, keep_whole=True)
    spans = [span for shard in range(num_shards) for span in layout.spans(shard)]
    assert all((span.start, span.stop) == (0, numels[span.index]) for span in spans)


@given(SIZES, st.integers(1, 7))
def test_even_segments_waste_little(numels: list[int], num_shards: int) -> None:
    layout = FlatLayout(numels, num_shards, keep_whole=False)
    assert layout.numel <= sum(numels) + ALIGNMENT * (len(numels) + num_shards)
