"""What a top-k sequence learns from its own exact attention for what later steps leave out.

Of the last rows that attended everything, a prompt's end as a rule, some are kept: their queries,
outputs and logsumexps. The first step of top-k after them begins with a step for each of these rows
again, as top-k would have made it, so that what a choice lacks is known for them;
:mod:`hsswap.fitting` fits what stands in. It is of the text at hand, at its own length, where what
a basis brings (:mod:`hsswap.predictor.stand_in`) is of the first 1,024 tokens. The same steps fill
the unit cache with what the next ones are likely to choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsswap.carving import carve, words_of
from hsswap.config import LayerGroup
from hsswap.driver.base import Device, Stream
from hsswap.driver.choice_operations import LearnWork
from hsswap.driver.operations import AppendWork, AttentionState, BlockPool, UnitPool
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.fitting import LESSON_ROWS, LESSON_SPAN, LESSON_STEP
from hsswap.pools import GroupPool, lse_behind

NO_SLOT = np.full(1, -1, np.int32)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A row again: ``queries`` ``[1, Q, dk]``, how many tokens it sees, output ``[1, Q, dv]`` and
    logsumexp ``[1, Q]`` of attention over all of them, and room for the output of its step.
    """

    queries: Tensor
    length: int
    full: Tensor
    full_lse: Tensor
    out: Tensor


class Lessons:
    """Rows of exact attention of one (sequence, layer), and what was learned from them.

    Made and closed by the layer's :class:`~hsswap.topk.TopKLayer`. Under the swap's lock.
    """

    def __init__(self, device: Device, pool: GroupPool) -> None:
        """Raises DeviceError when there is no memory."""
        group = pool.group
        self._pool = pool
        # Rows lie as units do: for each query head queries in the place of K, outputs in that of V.
        heads, dims = group.q_heads, (group.head_dim, group.value_dim)
        self._group = LayerGroup(1, heads, heads, *dims, dtype=group.dtype)
        unit_bytes = 2 * LESSON_ROWS * sum(dims)
        shapes = {
            "rows": ("u8", (heads, unit_bytes)),
            "lse": ("f32", (LESSON_SPAN, heads)),
            "sums": ("f32", (heads, 2 * group.value_dim + 3)),
            "scale": ("f32", (heads,)),
            "value": ("f32", (heads, group.value_dim)),
            "out": ("u8", (heads, 2 * group.value_dim)),
        }
        self._memory, self._tensors = carve(device.allocate, shapes)
        self._end = 0  # tokens that the last row saw
        self._next = LESSON_ROWS  # the row that is due; all have taught
        self._is_fitted = False
        self._lse: Tensor | None = None

    def takes(self, rows: int) -> bool:
        """Whether exact attention of so many rows is kept; its logsumexp is needed then."""
        return rows >= LESSON_SPAN

    def logsumexp(self, state: AttentionState, lse: Tensor | None) -> Tensor:
        """Where an exact attend that ends from ``state`` is to write its rows' logsumexp
        ``[1, rows, Q]``: ``lse``, contiguous, or behind the state.
        """
        self._lse = lse_behind(state) if lse is None else lse
        return self._lse

    def keep(
        self, device: Device, stream: Stream, length: int, queries: Tensor, out: Tensor
    ) -> None:
        """Copy some of the last rows of that attend, of a layer that has ``length`` tokens.

        ``queries`` ``[rows, Q, dk]``, ``out`` ``[rows, Q, dv]``. Before anything else is enqueued.
        """
        assert self._lse is not None
        lse, self._lse = self._lse.row(0), None
        self._next = LESSON_ROWS
        first, stop = queries.shape[0] - LESSON_SPAN, queries.shape[0]
        memory, heads = self._tensors["rows"], self._group.q_heads
        block_bytes = BlockPool(memory, self._group, LESSON_ROWS).block_bytes
        strides = contiguous_strides((0, block_bytes), 1)
        no_blocks = Tensor(
            memory.address, (0, block_bytes), strides, "u8", memory.on_device, memory
        )
        device.append(
            stream,
            AppendWork(
                keys=queries.every(LESSON_STEP, first, LESSON_ROWS),
                values=out.every(LESSON_STEP, first, LESSON_ROWS),
                first_offset=0,
                units=UnitPool(memory, self._group, LESSON_ROWS),
                device_slots=np.arange(heads, dtype=np.int32)[None],
                blocks=BlockPool(no_blocks, self._group, LESSON_ROWS),
                host_slots=NO_SLOT,
            ),
        )
        kept = words_of(self._tensors["lse"])
        device.copy_words(stream, CopyWork(words_of(lse.rows(first, stop)), kept))
        self._end, self._next = length, 0

    @property
    def due(self) -> Lesson | None:
        """The row that a step is to be made for, if one is due."""
        if self._next == LESSON_ROWS:
            return None
        behind = (LESSON_ROWS - 1 - self._next) * LESSON_STEP
        dims = (self._group.head_dim, self._group.value_dim)
        queries = self._row(0, dims[0])
        full = self._row(LESSON_ROWS * dims[0], dims[1])
        lse = self._tensors["lse"].every(LESSON_STEP, self._next * LESSON_STEP, 1)
        return Lesson(queries, self._end - behind, full, lse, self._out())

    def learn(self, device: Device, stream: Stream, lesson: Lesson, state: AttentionState) -> None:
        """Launch what a row teaches whose attention over its choice is in ``state``."""
        tensors = self._tensors
        device.learn(
            stream,
            LearnWork(
                state=state,
                full=lesson.full,
                full_lse=lesson.full_lse,
                begin=self._next == 0,
                sums=tensors["sums"],
                scale=tensors["scale"],
                value=tensors["value"],
            ),
        )
        self._next += 1
        self._is_fitted = True

    @property
    def learned(self) -> tuple[Tensor, Tensor] | None:
        """Scale ``[Q]`` and value ``[Q, dv]``, once a row has taught."""
        return (self._tensors["scale"], self._tensors["value"]) if self._is_fitted else None

    def cut(self, length: int) -> None:
        """Tokens from ``length`` on are taken back: rows that saw them teach no more."""
        if length < self._end:
            self._next = LESSON_ROWS

    def close(self) -> None:
        """Free the memory; nothing enqueued may use it."""
        self._memory.close()

    def _out(self) -> Tensor:
        """Where a step's output goes, which nobody reads ``[1, 1, Q, dv]``."""
        memory, group = self._tensors["out"], self._group
        shape = (1, 1, group.q_heads, group.value_dim)
        strides = contiguous_strides(shape, 2)
        return Tensor(memory.address, shape, strides, group.dtype, memory.on_device, memory)

    def _row(self, offset: int, dims: int) -> Tensor:
        """The row that is due, ``[1, Q, dims]``, from an element of a unit on."""
        memory = self._tensors["rows"]
        strides = (2 * dims, memory.strides[0], 2)
        address = memory.address + 2 * (offset + self._next * dims)
        shape = (1, self._group.q_heads, dims)
        return Tensor(address, shape, strides, self._group.dtype, memory.on_device, memory)
