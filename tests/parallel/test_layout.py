"""Flat buffers: every element of every parameter lies in exactly one slice, aligned, and all slices are equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.profiling import Parameter
from weft.sharding.layout import ALIGNMENT, FlatLayout, flat_layouts

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
parameters = st.lists(shapes, min_size=1, max_size=8).map(
    lambda found: tuple(Parameter(f"p{i}", shape) for i, shape in enumerate(found))
)
degrees = st.integers(1, 9)


@given(parameters, degrees)
def test_slices_cover_each_parameter_exactly_once_and_in_order(given_: tuple[Parameter, ...], degree: int) -> None:
    layout = FlatLayout(given_, degree)
    position = dict.fromkeys((p.name for p in given_), 0)
    for index in range(degree):
        parts = list(layout.parts(index))
        assert [part.parameter for part in parts] == list(given_)
        for part in parts:
            if part.stop > part.start:
                assert part.start == position[part.parameter.name]
                position[part.parameter.name] = part.stop
    assert position == {p.name: p.numel for p in given_}


@given(parameters, degrees)
def test_a_part_lies_where_the_whole_buffer_has_it(given_: tuple[Parameter, ...], degree: int) -> None:
    layout = FlatLayout(given_, degree)
    starts = dict(zip((p.name for p in given_), layout.starts, strict=True))
    for index in range(degree):
        used: set[int] = set()
        for part in layout.parts(index):
            places = range(part.offset, part.offset + part.stop - part.start)
            assert all(0 <= place < layout.slice_numel for place in places)
            assert used.isdisjoint(places)
            used.update(places)
            if part.stop > part.start:
                assert index * layout.slice_numel + part.offset == starts[part.parameter.name] + part.start


@given(parameters, degrees)
def test_parameters_and_slices_start_aligned_and_padding_is_small(given_: tuple[Parameter, ...], degree: int) -> None:
    layout = FlatLayout(given_, degree)
    assert all(start % ALIGNMENT == 0 for start in layout.starts)
    assert layout.slice_numel % ALIGNMENT == 0
    assert layout.slice_numel * degree == layout.numel
    content = sum(p.numel for p in given_)
    assert content <= layout.numel < content + ALIGNMENT * (len(given_) + degree)


@given(st.lists(st.tuples(shapes, st.booleans()), max_size=8), degrees)
def test_trained_and_frozen_parameters_never_share_a_buffer(found: list[tuple[tuple[int, ...], bool]], d: int) -> None:
    given_ = [Parameter(f"p{i}", shape, trainable) for i, (shape, trainable) in enumerate(found)]
    layouts = flat_layouts(given_, d)
    assert len(layouts) == len({p.trainable for p in given_})
    assert all(len({p.trainable for p in layout.parameters}) == 1 for layout in layouts)
    assert sorted(p.name for layout in layouts for p in layout.parameters) == sorted(p.name for p in given_)


def test_a_small_layout_by_hand() -> None:
    layout = FlatLayout((Parameter("a", (3,)), Parameter("b", (2, 5)), Parameter("c", ())), 2)
    assert layout.starts == (0, 8, 24)
    assert (layout.numel, layout.slice_numel) == (32, 16)
    first, second = list(layout.parts(0)), list(layout.parts(1))
    assert [(part.start, part.stop, part.offset) for part in first] == [(0, 3, 0), (0, 8, 8), (0, 0, 0)]
    assert [(part.start, part.stop, part.offset) for part in second] == [(3, 3, 0), (8, 10, 0), (0, 1, 8)]
