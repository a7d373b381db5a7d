"""A model in NumPy as target and drafter: its passes run on a stream of the host device.

The worker of the stream may wait, for a disk for one, where a GPU could not: what makes a round
stream is that nobody else has to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Closeable, Device, Stream
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_stream import HostStream
from hsswap.driver.round_operations import NO_TOKEN
from hsswap.driver.tensor import tensor_in
from hsswap.errors import ArgumentError
from hsswap.rounds.buffers import StreamBufs
from hsswap.rounds.contracts import Admission, Drafter, Target

F32 = NDArray[np.float32]


class HostSequence(Protocol):
    """One sequence of a model with its K and V. Only a stream's worker calls it."""

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on, in every layer that has them."""
        ...

    def verify(self, tokens: Sequence[int], position: int) -> F32:
        """Run ``tokens`` from ``position`` on: logits ``[rows, vocab_size]``, each row as if it had
        come alone, bit for bit. The sequence has ``position`` tokens before.
        """
        ...

    def exit_early(self, token: int, position: int) -> F32:
        """Logits ``[vocab_size]`` behind one token, by the first layers alone."""
        ...


class HostTarget(Target, Closeable):
    """``sequences`` of one model, of which ``k + 1`` rows are verified at a time.

    ``admission`` answers :meth:`admit` (None: every round is admitted).
    """

    def __init__(
        self,
        device: Device,
        sequences: Sequence[HostSequence],
        *,
        k: int,
        vocab_size: int,
        admission: Callable[[int, int, Sequence[int]], Admission] | None = None,
    ) -> None:
        if k < 1 or not sequences:
            raise ArgumentError(f"{len(sequences)} sequences and {k} drafts; 1 or more of each")
        self.vocab_size = vocab_size
        self._sequences = sequences
        self._admission = admission
        shape = (len(sequences), k + 1, vocab_size)
        self._buffer = device.allocate_host(4 * int(np.prod(shape)))
        self.logits = tensor_in(self._buffer, "f32", shape)

    def verify(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Target`. Filler is left out: what it leads to is read by nobody."""
        enqueue(stream, "verify", lambda: self._verify(bufs))

    async def admit(
        self, rounds: int, under_way: int, ends: Sequence[int], capacities: Sequence[int]
    ) -> Admission:
        """See :class:`Target`. Room is made by the passes themselves, which may wait."""
        if self._admission is None:
            return Admission(rounds)
        return self._admission(rounds, under_way, ends)

    async def settle(self, positions: Sequence[int]) -> None:
        """See :class:`Target`. The cache writes blocks behind as they fill."""

    def close(self) -> None:
        """Free the logits. Twice is fine."""
        self._buffer.close()

    def _verify(self, bufs: StreamBufs) -> None:
        logits, flags = self.logits.array(), bufs.flags.array()
        for s, sequence in enumerate(self._sequences):
            rows = int(bufs.brk.array()[s].sum())
            if rows and not flags[s]:
                position = int(bufs.pos_start.array()[s])
                sequence.truncate(position)
                tokens = bufs.vtok.array()[s, :rows].tolist()
                logits[s, :rows] = sequence.verify(tokens, position)


class EarlyExitDrafter(Drafter):
    """Drafts with the first layers of the target itself, and its head.

    No weights and no cache beside the target's: a draft's K and V of these layers are those that
    the verify will write again (as in Draft & Verify, J. Zhang et al., 2309.08168).
    """

    def __init__(self, sequences: Sequence[HostSequence]) -> None:
        self._sequences = sequences

    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Drafter`."""
        enqueue(stream, "early exit", lambda: self._draft(bufs))

    def _draft(self, bufs: StreamBufs) -> None:
        drafts = bufs.drafts.array()
        drafts[:, ::2], drafts[:, 1::2] = NO_TOKEN, 0
        for s, sequence in enumerate(self._sequences):
            token, position = int(bufs.pend.array()[s]), int(bufs.pos_ctr.array()[s])
            room = int(bufs.capacity.array()[s]) - position - 1
            if bufs.flags.array()[s] or token == NO_TOKEN or room < 1:
                continue
            sequence.truncate(position)
            for j in range(min(bufs.k, room, int(bufs.depth.array()[s, 0]))):
                logits = sequence.exit_early(token, position + j)
                token = int(np.argmax(logits))
                with np.errstate(over="ignore"):
                    probability = 1 / np.exp(logits - logits[token]).sum(dtype=np.float32)
                drafts[s, 2 * j] = token
                drafts[s, 2 * j + 1] = np.float32(probability).view(np.uint32)


def enqueue(stream: Stream, name: str, function: Callable[[], None]) -> None:
    """Run a function on a host stream, in order. Raises ArgumentError for another device's."""
    if not isinstance(stream, HostStream):
        raise ArgumentError(f"{name}: {stream!r} is no stream of the host device")

    def run(work: None, scratch: Scratch) -> None:
        function()

    stream.enqueue(name, run, None)
