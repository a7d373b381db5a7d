"""The kernels of speculative rounds, which every device has: ``device.round_kernels()``.

As operations of a :class:`~hsswap.driver.base.Device` they are enqueued on a stream and return at
once, check their arguments before (ArgumentError, or ClosedError for memory that was closed), and
read and write tensors when they run, in the order of the stream. So M rounds can be enqueued
without the host seeing any of their values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hsswap.driver.round_operations import (
    AcceptWork,
    AdaptWork,
    ArgmaxWork,
    AssembleWork,
    CommitWork,
    CopyWork,
    IotaWork,
    MapWork,
    NgramWork,
    PackWork,
    RollbackWork,
    RoundEndWork,
    SeedWork,
    SetWork,
    TokenRingWork,
)
from hsswap.driver.sampling_operations import RejectWork, SampleWork

if TYPE_CHECKING:
    from hsswap.driver.base import Stream


class RoundKernels(ABC):
    """One method a kernel; the records say what it does."""

    @abstractmethod
    def pack_tok_p(self, stream: Stream, work: PackWork) -> None:
        """One draft and its probability into the round's drafts."""

    @abstractmethod
    def tok_map_u32(self, stream: Stream, work: MapWork) -> None:
        """Tokens of a draft head's vocabulary to the target's, in place."""

    @abstractmethod
    def spec_assemble_verify(self, stream: Stream, work: AssembleWork) -> None:
        """The rows that a round verifies; also the guards of vocabulary and capacity."""

    @abstractmethod
    def spec_accept_greedy_dc(self, stream: Stream, work: AcceptWork) -> None:
        """How many drafts stand, and the token after them; also the stop tokens."""

    @abstractmethod
    def spec_seed_gather(self, stream: Stream, work: SeedWork) -> None:
        """The hidden state at the last committed row."""

    @abstractmethod
    def spec_rollback_stream(self, stream: Stream, work: RollbackWork) -> None:
        """Position and lengths of all layers to what was committed."""

    @abstractmethod
    def spec_ring_commit(self, stream: Stream, work: CommitWork) -> None:
        """Emitted tokens into the ring; the last one is pending."""

    @abstractmethod
    def spec_adapt_k(self, stream: Stream, work: AdaptWork) -> None:
        """The depth of the next round from what this one accepted."""

    @abstractmethod
    def spec_round_end(self, stream: Stream, work: RoundEndWork) -> None:
        """Accept, seed, rollback, commit and adapt, in one launch."""

    @abstractmethod
    def plain_tok_ring(self, stream: Stream, work: TokenRingWork) -> None:
        """Plain decode's token into its ring."""

    @abstractmethod
    def argmax(self, stream: Stream, work: ArgmaxWork) -> None:
        """The likeliest token of each row of logits, and its probability."""

    @abstractmethod
    def pos_iota_i32(self, stream: Stream, work: IotaWork) -> None:
        """Positions of the rows of a verify."""

    @abstractmethod
    def copy_add(self, stream: Stream, work: CopyWork) -> None:
        """Words from one tensor to another, with a number added."""

    @abstractmethod
    def set_word(self, stream: Stream, work: SetWork) -> None:
        """One word of every sequence, from the launch's arguments."""

    @abstractmethod
    def ngram_draft(self, stream: Stream, work: NgramWork) -> None:
        """Drafts by looking the last tokens up in the sequence's own."""

    @abstractmethod
    def sample(self, stream: Stream, work: SampleWork) -> None:
        """A token of each row of logits, at random."""

    @abstractmethod
    def reject(self, stream: Stream, work: RejectWork) -> None:
        """Choices of a verify by which drafts are accepted with the right probability."""
