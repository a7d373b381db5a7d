"""What a round stream needs of a model and of a drafter.

Both *enqueue*: they return at once, and their work reads device memory when it runs, behind what
was enqueued before. So a round can be enqueued, or captured into a graph, before the one in front
of it has run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Graph, Stream
from hsswap.driver.tensor import Tensor
from hsswap.rounds.buffers import StreamBufs


@dataclass(frozen=True, slots=True)
class Admission:
    """How many more rounds may be issued now, and where that is fewer than asked for, why.

    ``waits``: enqueuing them may wait for a disk, so it can be neither captured nor hurried.
    """

    rounds: int
    why: str = ""
    waits: bool = False


class Target(ABC):
    """The model that decides, for a batch of sequences with their K and V.

    ``vocab_size``; ``logits`` float32 ``[batch, k + 1, vocab_size]``, for the one k that it is made
    for; ``hidden`` ``[batch, k + 1, width]`` float32 or BF16, the states that a drafter may
    be seeded with, or None; ``length_addresses`` int64 ``[batch, N]``: of each sequence, the
    addresses of the int32 that rollbacks must move beside the position
    (:func:`~hsswap.rounds.lengths.addresses_of`), or None.
    """

    vocab_size: int
    logits: Tensor
    hidden: Tensor | None = None
    length_addresses: NDArray[np.int64] | None = None

    @abstractmethod
    def verify(self, stream: Stream, bufs: StreamBufs) -> None:
        """Enqueue a pass over ``bufs.vtok`` ``[batch, k + 1]``, row r at ``pos_start + r``.

        Row r of ``logits`` (and of ``hidden``) is what follows it; its K and V replace whatever is
        at its position. Row r must come out the same, bit for bit, as from a plain step with the
        same tokens before it. Rows from ``brk[0] + brk[1]`` on are filler: nothing is read of what
        they lead to, and their positions may lie behind the sequence's end.
        """

    @abstractmethod
    async def admit(
        self, rounds: int, under_way: int, ends: Sequence[int], capacities: Sequence[int]
    ) -> Admission:
        """Make room for the K and V of ``rounds`` rounds more; how many of them may be issued.

        ``under_way`` rounds are not drained yet; with none at least one round is admitted, with
        some 0 means that they must be drained first. ``ends`` and ``capacities``: of each sequence,
        the position that none of all these will pass, and the one that no round ever will. Raises
        what the cache raises when there is no room for one round.

        ``length_addresses`` may change here, while nothing is under way.
        """

    def capture(
        self, stream: Stream, enqueue: Callable[[], None], skipping: Callable[[Graph], Graph]
    ) -> Graph:
        """A graph of what ``enqueue()`` puts on the stream: a round, with :meth:`verify` in it.

        ``skipping`` makes of it, and takes over, a graph that is passed over once no sequence runs.
        """
        with stream.capture() as graph:
            enqueue()
        return skipping(graph)

    def check_start(self, positions: Sequence[int]) -> None:  # noqa: B027 -- nothing is known
        """Raise ArgumentError where the cache is known to lack K and V in front of ``positions``,
        at which sequences are to start. Nothing has changed then.
        """

    @abstractmethod
    async def settle(self, positions: Sequence[int]) -> None:
        """A burst has drained, or sequences start: K and V in front of ``positions`` are final.

        They may be written behind. Later rounds may be under way.
        """


class Drafter(ABC):
    """Who guesses what the target will say."""

    @abstractmethod
    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """Enqueue ``bufs.k`` drafts into ``bufs.drafts`` (:class:`PackWork` says how).

        Readable meanwhile: ``pend``, ``pos_ctr``, ``history``. A draft of NO_TOKEN ends them early;
        a slot that is not written is an error that halts the sequence.
        """

    def seed(self) -> Tensor | None:
        """Where the target's hidden state at the last committed row goes, ``[batch, width]``."""
        return None

    def distribution(self) -> Tensor | None:
        """What each draft was drawn from, float32 ``[batch, k, vocab_size]``, for rejection; None:
        drafts are not drawn.
        """
        return None
