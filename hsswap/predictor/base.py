"""The interface that all predictors keep: which work codes blocks, and which scores them.

A predictor of a swap has codes by layer and block index. Callers enqueue the work that it returns,
in the order of the sequence's stream, and tell it what they have enqueued; all under the swap's
lock. A block without a code is known to have none: one that came before the basis, one whose id was
freed and given out again, one that is read back after a restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.codes_operations import (
    Attended,
    EncodeCodesWork,
    Resident,
    ScoreCodesWork,
    ScoreMemory,
)
from hsswap.driver.operations import I32, BlockPool, EncodeWork, LeftOut, ScoreWork
from hsswap.driver.tensor import Tensor

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One query row ``[Q, dk]`` BF16 against a sequence's full blocks, to ``scores`` ``[H, B]``
    float32. ``code_index`` ``[B]`` is what :meth:`Predictor.code_index` gave, there or on the
    device. The rest is as in :class:`ScoreCodesWork`; a predictor that does not remember leaves
    ``uncorrected`` as it is.
    """

    queries: Tensor
    code_index: I32 | Tensor
    scores: Tensor
    resident: Resident
    memory: ScoreMemory
    first: bool
    last: Attended | None
    uncorrected: Tensor


class Predictor(ABC):
    """Codes of all layers of a swap."""

    remembers: bool
    """Whether scores use :class:`ScoreMemory`; else it may be of any size."""
    version = 0
    """How many bases there have been: with a new one no block has a code."""

    def __init__(self, layers: int, ids: int) -> None:
        self._coded = np.zeros((layers, ids), np.bool_)

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether blocks can be encoded: there is a basis, if one is needed."""

    @abstractmethod
    def encode_work(
        self, layer: int, blocks: BlockPool, host_slots: I32, indices: I64
    ) -> EncodeWork | EncodeCodesWork:
        """Work that encodes full blocks of block indices ``[n]`` out of host slots ``[n]``.

        The predictor must be ready. Raises DeviceError when there is no memory for their codes.
        """

    def code_index(self, layer: int, indices: I64) -> I32:
        """Where the codes of blocks of block indices ``[B]`` are, -1 for blocks that have none."""
        return np.where(self._coded[layer, indices], indices, -1).astype(np.int32)

    def hide(self, index: I32, blocks: int) -> None:
        """Do not rank the first blocks of such an index, which a window does not reach. The
        projection scores every block that it is given.
        """
        if self.remembers:
            index[:blocks] = -1

    @abstractmethod
    def score_work(self, layer: int, request: ScoreRequest) -> ScoreWork | ScoreCodesWork:
        """Work that scores blocks."""

    def left_out(
        self,
        layer: int,
        predicted: Tensor,
        chosen: Tensor,
        learned: tuple[Tensor, Tensor] | None = None,
    ) -> LeftOut | None:
        """What makes up for blocks that are not ``chosen`` ``[H, N]``, if anything does.

        ``predicted`` ``[Q, B]``: of :class:`ScoreMemory`, as score has just left it. ``learned``:
        scale ``[Q]`` and value ``[Q, dv]`` of the sequence's own, which go before the basis'.
        """
        return None

    def mark(self, layer: int, indices: I64) -> None:
        """The work that encodes these blocks is enqueued."""
        self._coded[layer, indices] = True

    def missing(self, layer: int, indices: I64) -> I64:
        """Which of these blocks have no code though they could: places in ``indices``."""
        if not self.ready:
            return np.empty(0, np.int64)
        return np.flatnonzero(~self._coded[layer, indices])

    def forget(self, indices: I64, layer: int | None = None) -> None:
        """What is under these block indices from now on, in one layer or all, is not coded yet."""
        self._coded[slice(None) if layer is None else layer, indices] = False

    @abstractmethod
    def close(self) -> None:
        """Free the memory; nothing enqueued may use it. Twice is fine."""
