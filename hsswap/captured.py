"""Steps of a sequence that an engine captures in a graph: no call of them waits or looks back.

Between :meth:`Sequence.captured` and the end of its block every block of the sequence is in a
device slot, or in a leased host slot, and where the next rows go is settled. So appends and attends
are launches over tables that the device holds, at a counter that the device holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hsswap.arguments import checked_choice, checked_layer, checked_length, checked_rows, leading
from hsswap.captured_layer import CapturedLayer, TableMemory
from hsswap.captured_top_k import CapturedTopK
from hsswap.driver.base import Buffer, Stream
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import ArgumentError, ClosedError
from hsswap.pools import state_bytes, state_in

if TYPE_CHECKING:
    from hsswap.swap import HighSpeedSwap

MOST_ROWS = 16
"""Query rows of a captured attend: so few read host slots in place once."""


class CapturedSteps:
    """Launches that may be captured, once, and launched again for every step.

    :meth:`Sequence.captured` makes it. ``length``: i32 ``[1]`` in memory of the device, the tokens
    that every layer has before the step; the engine's kernels may read and write it. Every method
    here is a plain function that only enqueues, from any thread. All launches of one step, and all
    steps, must be in order: on one stream, or by the engine's events.
    """

    def __init__(
        self,
        swap: HighSpeedSwap,
        layers: list[CapturedLayer],
        memory: TableMemory,
        tokens: int,
        rows: int,
        stream: Stream,
        write: Callable[[CapturedSteps, int], None],
    ) -> None:
        """``write``: writes blocks behind, as many of those being filled."""
        self.stream = stream
        self.first_length = layers[0].cache.length
        self.most_length = self.first_length + tokens
        self.final_length = self.first_length
        self.written = 0
        """Blocks on their way to disk, of those that the steps fill."""
        self._write = write
        self._swap = swap
        self._layers = layers
        self._rows = rows
        self._memory = memory
        memory.add("counter", "i32", np.array([self.first_length], np.int32))
        self._state: Buffer | None = None
        self._open = True

    @property
    def length(self) -> Tensor:
        """Tokens of every layer before the step: i32 ``[1]``, in the device's memory."""
        self._check_open()
        return self._memory.tensor("counter")

    @property
    def least_length(self) -> int:
        """The shortest length that the steps can end at: blocks before it are final."""
        if not self.written:
            return self.first_length
        size = self._layers[0].cache.pool.block_size
        return (self._layers[0].held.first + self.written) * size

    @property
    def layers(self) -> list[CapturedLayer]:
        """Of the sequence. For it."""
        return self._layers

    def append(
        self, layer: int, keys: object, values: object, *, stream: object | None = None
    ) -> None:
        """Add rows behind the tokens that :attr:`length` counts.

        Arrays as :meth:`Sequence.append` takes them, at most ``rows`` rows; they are read at every
        launch. Rows beyond the tokens asked for are left out, and those of blocks that were full
        when the steps began; nothing says so.
        """
        with self._swap.lock:
            captured = self._layer(layer)
            rows = checked_rows(captured.cache, keys, values)
            self._check_rows(rows.count)
            raw_stream = self._swap.stream_of(stream)
            captured.append(raw_stream, self.length, rows)

    def attend(
        self,
        layer: int,
        queries: object,
        out: object,
        *,
        exact: bool = False,
        stream: object | None = None,
    ) -> None:
        """Attention of the rows just appended, which :attr:`length` does not count yet.

        Arrays as :meth:`Sequence.attend` takes them, at most ``rows`` rows; they are read and
        written at every launch. In a top-k sequence a single row attends what the predictor
        chooses, unless ``exact``: of the blocks that were full when the steps began, beside all
        that came later.
        """
        with self._swap.lock:
            captured = self._layer(layer)
            exactly = checked_choice(exact, "exact")
            pool = captured.cache.pool
            group, count = pool.group, leading(queries, "queries")
            self._check_rows(count)
            taken = tensor_of(
                queries, group.dtype, (count, group.q_heads, group.head_dim), "queries"
            )
            shape = (count, group.q_heads, group.value_dim)
            taken_out = tensor_of(out, group.dtype, shape, "out", written=True)
            pool.check_reachable(taken, "queries")
            pool.check_reachable(taken_out, "out")
            assert self._state is not None
            state = state_in(self._state, group, count)
            use = CapturedLayer.attend if exactly or count > 1 else type(captured).attend
            use(captured, self._swap.stream_of(stream), self.length, taken, state, taken_out)

    def left_out_mass(self, layer: int) -> Tensor | None:
        """The share of predicted mass that the layer's last top-k attend left out: f32
        ``[kv_heads]`` in the device's memory. None where attention is exact.
        """
        captured = self._layer(layer)
        return captured.left_out if isinstance(captured, CapturedTopK) else None

    def advance(self, rows: int, *, stream: object | None = None) -> None:
        """Count ``rows`` more tokens, or fewer: the end of a step."""
        with self._swap.lock:
            self._check_open()
            rows = checked_length(rows, self._rows, what="rows", least=-self.most_length)
            self._swap.check_open()
            copy = CopyWork(self.length, self.length, rows)
            self._swap.device.copy_words(self._swap.stream_of(stream), copy)

    def finish(self, length: int) -> None:
        """Say how many tokens every layer has once the launches so far have run.

        Of a captured decode loop the engine knows it; with speculation it is what a drain read. The
        sequence takes them over when the block of the steps ends. Raises ArgumentError for a length
        that the steps cannot have come to.
        """
        self._check_open()
        length = checked_length(length, self.most_length)
        if length < self.least_length:
            raise ArgumentError(
                f"length is {length}; {self.least_length} tokens are final: truncate the sequence "
                "afterwards"
            )
        self.final_length = length

    def settle(self, length: int) -> None:
        """Say how many tokens are final while the steps go on: launches that have run wrote them,
        and none will write them again. Blocks that they fill are written behind.

        The steps end no shorter than these blocks; without :meth:`finish` they end at ``length``.
        Not while the stream is captured. Raises ArgumentError as that does, DeviceError when a
        launch is refused.
        """
        with self._swap.lock:
            self._swap.check_open()
            self.finish(length)
            held, size = self._layers[0].held, self._layers[0].cache.pool.block_size
            filled = min(length // size, held.end) - held.first
            if filled > self.written:
                self._write(self, filled)
                self.written = filled

    def prepare(self) -> None:
        """Allocate; blocks. For the sequence."""
        device = self._swap.device
        self._memory.allocate(device)
        pools = {captured.cache.pool for captured in self._layers}
        self._state = device.allocate(max(state_bytes(pool.group, self._rows) for pool in pools))

    def begin(self) -> None:
        """Launch the copy of the tables. For the sequence."""
        copy = CopyWork(*self._memory.whole())
        self._swap.device.copy_words(self.stream, copy)

    def end(self) -> None:
        """Refuse every call from now on. For the sequence."""
        self._open = False

    def free(self) -> None:
        """Give the memory back; blocks. Nothing that was captured may be launched any more."""
        self._memory.close()
        if self._state is not None:
            self._state.close()

    def _layer(self, layer: int) -> CapturedLayer:
        self._check_open()
        self._swap.check_open()
        return self._layers[checked_layer(layer, len(self._layers))]

    def _check_rows(self, count: int) -> None:
        if count > self._rows:
            raise ArgumentError(
                f"{count} rows in a captured step that was opened for {self._rows}; open it with "
                f"rows={count}"
            )

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("the captured steps are over; open new ones with captured()")
