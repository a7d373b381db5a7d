"""Where blocks lie, and how lists of them become runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap.config import DISK_ALIGNMENT, LayerGroup, ModelDims
from hsswap.io.layout import (
    MAX_RUN_SPANS,
    SEGMENT_IDS,
    SegmentLayout,
    plan_runs,
    segment_count,
    segment_of,
)
from hsswap.io.linux import IOV_MAX


@st.composite
def model_dims(draw: st.DrawFn) -> ModelDims:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        heads = draw(st.integers(1, 4))
        dim = 8 * draw(st.integers(1, 32))
        value_dim = 8 * draw(st.integers(1, 32))
        groups.append(LayerGroup(draw(st.integers(1, 3)), heads, heads, dim, value_dim))
    return ModelDims(tuple(groups), block_size=2 ** draw(st.integers(0, 8)))


@given(model_dims())
def test_blocks_of_a_segment_tile_its_file(dims: ModelDims) -> None:
    layout = SegmentLayout(dims)
    assert layout.segment_bytes == SEGMENT_IDS * dims.id_bytes
    ranges = sorted(
        (layout.offset(layer, index), layout.block_bytes[layer])
        for layer in range(dims.layers)
        for index in range(SEGMENT_IDS)
    )
    end = 0
    for offset, nbytes in ranges:
        assert offset == end  # no overlap, no hole
        assert offset % DISK_ALIGNMENT == 0
        end = offset + nbytes
    assert end == layout.segment_bytes


@given(model_dims(), st.integers(0, 2**32 - 2))
def test_neighbours_of_a_layer_adjoin(dims: ModelDims, index: int) -> None:
    layout = SegmentLayout(dims)
    for layer in range(dims.layers):
        step = layout.offset(layer, index + 1) - layout.offset(layer, index)
        if segment_of(index) == segment_of(index + 1):
            assert step == layout.block_bytes[layer]
        else:
            assert layout.offset(layer, index + 1) == layout.layer_offsets[layer]


@pytest.mark.parametrize(("capacity", "count"), [(1, 1), (256, 1), (257, 2), (2**32 - 1, 2**24)])
def test_segment_count(capacity: int, count: int) -> None:
    assert segment_count(capacity) == count
    assert segment_of(capacity - 1) == count - 1


@given(
    st.lists(st.integers(0, 700), max_size=200),
    st.integers(1, 40).map(lambda pages: pages * 4096),
    st.integers(4096, 400_000),
    st.integers(1, 64),
)
def test_runs_cover_the_list_exactly(
    indices: list[int], block_bytes: int, max_run_bytes: int, max_spans: int
) -> None:
    order, bounds = plan_runs(np.array(indices, np.int64), block_bytes, max_run_bytes, max_spans)
    assert sorted(order.tolist()) == list(range(len(indices)))
    assert bounds[0] == 0
    assert bounds[-1] == len(indices)
    for begin, end in itertools.pairwise(bounds.tolist()):
        run = [indices[position] for position in order[begin:end]]
        assert run == list(range(run[0], run[0] + len(run)))
        assert segment_of(run[0]) == segment_of(run[-1])
        assert len(run) <= max_spans
        assert len(run) == 1 or len(run) * block_bytes <= max_run_bytes


@given(st.permutations(range(40, 70)))
def test_order_of_the_list_does_not_change_the_runs(indices: list[int]) -> None:
    array = np.array(indices, np.int64)
    order, bounds = plan_runs(array, 12288, 16 * 12288)
    assert array[order].tolist() == list(range(40, 70))
    assert bounds.tolist() == [0, 15, 30]  # equal pieces, not 16 and 14


def test_equal_indices_stay_in_the_order_given() -> None:
    order, bounds = plan_runs(np.array([5, 4, 5, 4, 5]), 4096)
    assert order.tolist() == [1, 3, 0, 2, 4]
    assert bounds.tolist() == [0, 1, 3, 4, 5]


def test_runs_end_at_segments() -> None:
    _, bounds = plan_runs(np.arange(250, 520), 4096, 1 << 30)
    assert bounds.tolist() == [0, 6, 262, 270]


def test_a_run_fits_into_one_vectored_call() -> None:
    assert MAX_RUN_SPANS <= IOV_MAX
    assert SEGMENT_IDS <= IOV_MAX


def test_a_block_longer_than_the_limit_is_a_run() -> None:
    _, bounds = plan_runs(np.arange(3), 1 << 20, 1 << 18)
    assert bounds.tolist() == [0, 1, 2, 3]
