"""Lengths that the device holds, one a layer and sequence, and tables of where they are.

A rollback kernel walks such a table and moves every length (``kv_len_ptr_table`` of memra's
``round_stream.rs``). Lengths never move in memory while their cache lives, so a table stays valid
as long, and graphs that were captured with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Closeable, Device
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import ArgumentError


class LayerLengths(Closeable):
    """Tokens of each layer's cache as int32 ``[batch]`` tensors, zero at first.

    ``with_kv[i]``: whether layer i has a cache of its own; one that shares another's, or has a
    state in place of one, has no length.
    """

    def __init__(self, device: Device, with_kv: Sequence[bool], *, batch: int = 1) -> None:
        if batch < 1 or not with_kv:
            raise ArgumentError(f"{len(with_kv)} layers for a batch of {batch}; 1 and more of each")
        self.batch = batch
        self._buffer = device.allocate(4 * batch * len(with_kv))
        self.of_layer: list[Tensor | None] = [
            tensor_in(self._buffer, "i32", (batch,), offset_bytes=4 * batch * layer)
            if has
            else None
            for layer, has in enumerate(with_kv)
        ]

    def close(self) -> None:
        """Free the memory. Twice is fine."""
        self._buffer.close()


class PointerTable(Closeable):
    """``pointers`` int64 ``[batch, rows]`` in memory that the device reads: addresses of int32."""

    def __init__(self, device: Device, table: NDArray[np.int64]) -> None:
        # Mapped host memory: a few words, read by one launch a round, filled without a copy call.
        self._buffer = device.allocate_host(max(8, table.nbytes))
        self.pointers = tensor_in(self._buffer, "i64", table.shape)
        self.pointers.array()[...] = table

    def close(self) -> None:
        """Free the memory. Twice is fine."""
        self._buffer.close()


def kv_len_ptr_table(
    device: Device, lengths: LayerLengths, pos_ctr: Tensor | None = None
) -> PointerTable:
    """Where the lengths of all layers are: a row a layer, 0 for a layer without one.

    With ``pos_ctr`` int32 ``[batch]`` one row more, the position counter's, so that one launch
    moves it too.
    """
    return kv_len_ptr_table_range(device, lengths, range(len(lengths.of_layer)), pos_ctr)


def kv_len_ptr_table_range(
    device: Device, lengths: LayerLengths, layers: range, pos_ctr: Tensor | None = None
) -> PointerTable:
    """The same of some neighbouring layers: those of one pipeline stage, so that a kernel on its
    device sees no address of another's.

    Raises ArgumentError for layers that are not there, and for a counter of another batch.
    """
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= len(lengths.of_layer):
        raise ArgumentError(
            f"layers {layers} of {len(lengths.of_layer)}; give a range of neighbours within them"
        )
    counters = lengths.of_layer[layers.start : layers.stop]
    if pos_ctr is not None:
        counters = [*counters, pos_ctr]
    return PointerTable(device, addresses_of(counters, lengths.batch))


def addresses_of(counters: Sequence[Tensor | None], batch: int) -> NDArray[np.int64]:
    """Where counters int32 ``[batch]`` are: ``[batch, len(counters)]``, 0 for None.

    Raises ArgumentError for a counter of another kind or batch.
    """
    table = np.zeros((batch, len(counters)), np.int64)
    for row, counter in enumerate(counters):
        if counter is None:
            continue
        if counter.shape != (batch,) or counter.dtype != "i32":
            raise ArgumentError(
                f"a counter is {counter.dtype} {counter.shape}; i32 {(batch,)} is needed"
            )
        table[:, row] = counter.address + 4 * np.arange(batch)
    return table
