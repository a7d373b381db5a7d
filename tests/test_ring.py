"""Tiles of the ring: cut at whole spans, nothing lost, and parts of what is missing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsswap.ring import parts_of, tapered
from hsswap.tiers import Tile


def tiles(start: int, stops: list[int]) -> list[Tile]:
    edges = [start, *stops]
    return [Tile(*both) for both in zip(edges, stops, strict=False)]


@given(
    st.integers(1, 8), st.integers(1, 4), st.integers(0, 3), st.integers(1, 9), st.integers(0, 99)
)
def test_ends_are_short_and_every_cut_is_at_a_span(
    span: int, spans: int, skipped: int, count: int, short: int
) -> None:
    """``count`` tiles of some spans; the last may lack blocks."""
    tile = span * spans
    start = skipped * tile
    last = start + count * tile - short % tile
    before = tiles(start, [*range(start + tile, start + count * tile, tile), last])
    after = tapered(before, span)
    assert after[0].start == start
    assert after[-1].stop == last
    assert all(a.stop == b.start for a, b in pairwise(after))
    assert all(t.start < t.stop and t.start % span == 0 for t in after)
    if count < 3:
        assert after == before
    else:
        assert len(after) <= count + 2
        assert after[0].stop - after[0].start == span
        assert after[-1].stop - after[-1].start < 2 * span


def test_missing_blocks_by_tile() -> None:
    missing = np.array([0, 1, 5, 6, 7, 8], np.intp)
    parts = parts_of(tiles(100, [104, 105, 108, 110]), missing)
    assert [missing[part].tolist() for part in parts] == [[0, 1], [], [5, 6, 7], [8]]
