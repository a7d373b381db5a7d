"""A model over captured steps of a swap's sequences: a verify that no host takes part in.

Lengths and tables are the device's (:meth:`hsswap.Sequence.captured`), so rounds can be captured
and issued ahead, on every device. Every block of the sequences is held in the device or the host
tier meanwhile; where they do not fit, rounds go one by one, and their passes read from disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

import numpy as np

import hsswap.sequence
from hsswap.captured import MOST_ROWS, CapturedSteps
from hsswap.driver.base import Device, Graph, Stream
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import ArgumentError, OutOfBlocks, OutOfSlots
from hsswap.loop import in_thread
from hsswap.rounds.buffers import StreamBufs
from hsswap.rounds.contracts import Admission, Target
from hsswap.rounds.lengths import addresses_of
from hsswap.rounds.waiting_steps import Steps, WaitingSteps

SESSION_TOKENS = 512
"""Tokens for which steps are opened at a time, where there is room: opening waits for the device
and makes graphs anew."""


class RowsModel(Protocol):
    """The engine's model."""

    def __call__(
        self,
        stream: Stream,
        steps: Sequence[Steps],
        tokens: Tensor,
        logits: Tensor,
        *,
        layers: int | None = None,
    ) -> None:
        """Enqueue a pass over ``tokens`` u32 ``[batch, rows]``, a row a sequence of ``steps``, the
        first of its tokens at position ``length``.

        K and V of each layer go to ``append``, queries to ``attend`` of their sequence; ``logits``
        float32 ``[batch, rows, vocab_size]`` is written, behind the first ``layers`` layers (None:
        all). What is used must keep its address. Positions of the last rows may lie behind the
        sequence's end, and their attention be left out. A drafter's token may be NO_TOKEN: any
        legal one will do.
        """
        ...

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """A graph of what ``enqueue()`` puts on the stream; a framework has memory of its own."""
        ...


class StepsTarget(Target):
    """``sequences`` of one swap, verified ``k + 1`` rows at a time by ``model``.

    ``device`` and ``stream`` are the swap's device and the round stream's stream. The sequences
    must not be used otherwise until :meth:`close`, which has to come before theirs and behind the
    round stream's; then they have the tokens that were settled last. ``steps``: those open now.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        sequences: Sequence[hsswap.sequence.Sequence],
        model: RowsModel,
        *,
        k: int,
        vocab_size: int,
        session_tokens: int = SESSION_TOKENS,
    ) -> None:
        if not 1 <= k < MOST_ROWS or not sequences:
            raise ArgumentError(
                f"{len(sequences)} sequences and {k} drafts; 1 or more sequences, 1 to "
                f"{MOST_ROWS - 1} drafts"
            )
        self.vocab_size = vocab_size
        self._device, self._k, self._session_tokens = device, k, session_tokens
        self._stream, self._sequences, self._model = stream, sequences, model
        self.steps: Sequence[Steps] = ()
        self._captured: list[CapturedSteps] = []
        self._waiting: list[WaitingSteps] = []
        self._why = ""
        self._sessions = AsyncExitStack()
        self._positions = [sequence.length for sequence in sequences]
        batch = len(sequences)
        logits = batch * (k + 1) * vocab_size
        self._buffer = device.allocate(4 * (logits + batch))
        self.logits = tensor_in(self._buffer, "f32", (batch, k + 1, vocab_size))
        self._lengths = tensor_in(self._buffer, "i32", (batch,), offset_bytes=4 * logits)

    def verify(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Target`."""
        for waiting in self._waiting:
            waiting.rewind(stream)
        self._model(stream, self.steps, bufs.vtok, self.logits)

    def capture(
        self, stream: Stream, enqueue: Callable[[], None], skipping: Callable[[Graph], Graph]
    ) -> Graph:
        """See :class:`Target`."""
        return skipping(self._model.capture(stream, enqueue))

    async def admit(
        self, rounds: int, under_way: int, ends: Sequence[int], capacities: Sequence[int]
    ) -> Admission:
        """See :class:`Target`. Steps are opened for more tokens when those they have run out.

        Where the tiers cannot hold every block of the sequences, one round is admitted at a time,
        whose passes may wait for the disk. Raises OutOfBlocks.
        """
        if self._captured and all(map(_holds, self._captured, self._positions, ends)):
            return Admission(rounds)
        if under_way:
            return Admission(0, self._why)
        if not self._waiting:
            try:
                await self._reopen_steps(ends, capacities)
            except OutOfSlots as error:
                self._why = f"not every block fits into memory: {error}"
                self._wait_from_now_on()
            else:
                return Admission(rounds)
        for s, waiting in enumerate(self._waiting):
            position = self._positions[s]
            waiting.begin(position, min(ends[s], position + self._k + 1))
            # Drafts stand at it too, before there is a rollback. The first launch may compile.
            await in_thread(partial(waiting.set_length, self._stream))
        return Admission(1, self._why, waits=True)

    def check_start(self, positions: Sequence[int]) -> None:
        """See :class:`Target`."""
        layers = range(self._sequences[0]._swap.config.dims.layers)
        for s, (sequence, position) in enumerate(zip(self._sequences, positions, strict=True)):
            held = self._positions[s]  # steps that are open hold drafts behind it, too
            if not (self._captured or self._waiting):
                held = min(map(sequence.layer_length, layers))
            if position > held:
                raise ArgumentError(
                    f"sequence {s} is to start behind {position} tokens and holds K and V of "
                    f"{held}; append the others first"
                )

    async def settle(self, positions: Sequence[int]) -> None:
        """See :class:`Target`. A start may go back; behind blocks that are final steps are opened
        again then.
        """
        self._positions = list(positions)
        for steps, position in zip(self._captured, positions, strict=False):
            if position >= steps.least_length:
                steps.settle(position)

    async def close(self) -> None:
        """Give the sequences back, cut to what was settled, and free the logits. Twice is fine."""
        await self._close_steps()
        self._waiting = []
        self._buffer.close()

    async def _reopen_steps(self, ends: Sequence[int], capacities: Sequence[int]) -> None:
        """Steps up to ``ends``, or as much further as there is use and room for. Raises OutOfSlots,
        OutOfBlocks.
        """
        await self._close_steps()
        more = self._session_tokens
        while True:
            further = [
                max(end, min(position + more, capacity))
                for end, position, capacity in zip(ends, self._positions, capacities, strict=True)
            ]
            try:
                await self._open_steps(further)
            except (OutOfBlocks, OutOfSlots):
                if further == list(ends):
                    raise
                more //= 2
            else:
                return

    async def _open_steps(self, ends: Sequence[int]) -> None:
        """Of all sequences, or of none."""
        try:
            await self._open_each(ends)
        except BaseException:
            await self._close_steps()
            raise

    async def _open_each(self, ends: Sequence[int]) -> None:
        for sequence, end in zip(self._sequences, ends, strict=True):
            opened = sequence.captured(end - sequence.length, rows=self._k + 1, stream=self._stream)
            self._captured.append(await self._sessions.enter_async_context(opened))
        addresses = [addresses_of([steps.length], 1) for steps in self._captured]
        self.length_addresses = np.concatenate(addresses)
        self.steps = self._captured

    async def _close_steps(self) -> None:
        """Sequences go on at their positions, which may be before where steps were opened: blocks
        that were full there are let go, not written over.
        """
        for steps, position in zip(self._captured, self._positions, strict=False):
            steps.finish(max(position, steps.least_length))
        self._captured, self.steps, self.length_addresses = [], (), None
        await self._sessions.aclose()
        for sequence, position in zip(self._sequences, self._positions, strict=True):
            if not sequence.closed and sequence.length > position:
                await sequence.truncate(position, stream=self._stream)

    def _wait_from_now_on(self) -> None:
        """Sequences only grow: what does not fit now never will."""
        loop = asyncio.get_running_loop()
        self._waiting = [
            WaitingSteps(self._device, sequence, self._lengths.rows(s, s + 1), loop)
            for s, sequence in enumerate(self._sequences)
        ]
        self.steps = self._waiting
        self.length_addresses = addresses_of([self._lengths], len(self._sequences))


def _holds(steps: CapturedSteps, position: int, end: int) -> bool:
    """Whether rounds from a position to an end write only what these steps hold."""
    return steps.least_length <= position and end <= steps.most_length
