"""Query rows of attention in fixed padded tiles, so that no row's result depends on another row.

BLAS rounds by the shape of a product and by the place of a row in it (OpenBLAS 0.3.31, AVX2 and
AVX-512: of 16 equal rows, the 7th and later differ from the first). So every product has one shape
(``tile_rows`` x dim x span), whatever the number of rows of a call, and a row's place in its tile
follows from the number of tokens it sees and nothing else. Layout of the rows of a
sequence, group size 3, row 0 seeing 7 tokens (its place is 7 mod 5 = 2)::

    | tile 0: -  -  r0 r1 r2 | tile 1: r3 r4 ... |      5 places a tile, 3 heads a place, 1 row of
    |<-------- 16 rows ----->|                          zeros: 16 rows in each product
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

# Rows of a product are a multiple of this. One thread of OpenBLAS takes 147 us for 24 products of
# 16 rows x 64 x 256 and 98 us for 8 rows (EPYC, AVX-512): 8 would speed decode up by a sixth and
# slow prefill down by a half, where 16 rows are within a fifth of what 48 reach on one thread.
ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Where the query rows of a call are. Letters as in :mod:`hsswap.driver.operations`.

    ``tiles`` tiles a sequence, of ``places`` places of G rows each; ``tile_rows`` rows of a product
    (M). ``places`` ``low`` to ``high`` of a tile
    hold rows of some sequence; only they are worked on outside the products. ``seen_end`` and
    ``seen_start`` ``[S, tiles, high - low]``: the row at a place sees tokens from start to end; a
    place without a row repeats its neighbour. ``index``: a pair that picks the rows of ``[S, R]``
    out of ``[S, tiles * places]``.
    """

    sequences: int
    rows: int
    heads: int
    group_size: int
    tiles: int
    places: int
    tile_rows: int
    index: tuple[I64, I64]
    low: int
    high: int
    seen_end: I64
    seen_start: I64

    @classmethod
    def plan(
        cls, lengths: I64, rows: int, heads: int, group_size: int, window: int | None
    ) -> RowTiles:
        """Lay out ``rows`` rows of each sequence; the last one sees ``lengths`` tokens."""
        places = max(1, ROW_MULTIPLE // group_size)
        tile_rows = -(-places * group_size // ROW_MULTIPLE) * ROW_MULTIPLE
        offset = (lengths - (rows - 1)) % places
        last = int(offset.max()) + rows
        tiles = -(-last // places)
        low, high = (int(offset.min()), last) if tiles == 1 else (0, places)
        place = np.arange(tiles * places).reshape(tiles, places)[:, low:high]
        row = np.minimum(np.maximum(place - offset[:, None, None], 0), rows - 1)
        end = lengths[:, None, None] - (rows - 1 - row)
        start = np.zeros_like(end) if window is None else end - window
        index = (np.arange(len(lengths))[:, None], offset[:, None] + np.arange(rows))
        return cls(
            len(lengths), rows, heads, group_size, tiles, places, tile_rows, index, low, high,
            end, start,
        )  # fmt: skip

    @property
    def worked_rows(self) -> slice:
        """The rows of a product that are worked on."""
        return slice(self.low * self.group_size, self.high * self.group_size)

    def spread(self, values: F32, out: F32) -> None:
        """Write ``values`` ``[S, R, Q, ...]`` to tiles ``out`` ``[S, H, tiles, rows, ...]``.

        ``out`` covers the worked rows; places without a row become zero.
        """
        tail = values.shape[3:]
        padded = np.zeros((self.sequences, self.tiles * self.places, *values.shape[2:]), np.float32)
        padded[self.index] = values
        shape = (self.sequences, self.tiles, self.places, self.heads, self.group_size, *tail)
        tiled = padded.reshape(shape)[:, :, self.low : self.high]
        target = out.reshape(self._worked_shape(tail))
        target[...] = tiled.transpose(0, 3, 1, 2, 4, *range(5, tiled.ndim))

    def collect(self, tiled: F32) -> F32:
        """The dual of :meth:`spread`: ``[S, H, tiles, rows, ...]`` to ``[S, R, Q, ...]``."""
        tail = tiled.shape[4:]
        shape = (self.sequences, self.tiles, self.places, self.heads, self.group_size, *tail)
        padded = np.empty(shape, np.float32)
        source = tiled.reshape(self._worked_shape(tail))
        order = (0, 2, 3, 1, 4, *range(5, source.ndim))
        padded[:, :, self.low : self.high] = source.transpose(order)
        flat = padded.reshape(
            self.sequences, self.tiles * self.places, self.heads * self.group_size, *tail
        )
        taken: F32 = flat[self.index]
        return taken

    def _worked_shape(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        return (
            self.sequences, self.heads, self.tiles, self.high - self.low, self.group_size, *tail
        )  # fmt: skip
