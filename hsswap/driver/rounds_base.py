"""The kernels of speculative rounds, which every device has: ``device.round_kernels()``.

As operations of a :class:`~hsswap.driver.base.Device` they are enqueued on a stream and return at
once, check their arguments before (ArgumentError, or ClosedError for memory that was closed), and
read and write tensors when they run, in the order of the stream. So M rounds can be enqueued
without the host seeing any of their values.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hsswap.driver import round_checks
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


W = TypeVar("W")


class Enqueue(Protocol):
    """How a device takes an operation: ``check(work)`` at once, then ``function``, which is of a
    kind that the device knows, for what the check returned.
    """

    def __call__(
        self, stream: Stream, name: str, check: Callable[[W], W], function: Any, work: W
    ) -> None: ...


class RoundKernels:
    """One method a kernel; the records say what it does. A device gives how it enqueues, and a
    module that has under the name of each method what is enqueued.
    """

    def __init__(self, enqueue: Enqueue, functions: ModuleType) -> None:
        self._enqueue, self._functions = enqueue, functions

    def _put(self, stream: Stream, name: str, check: Callable[[W], W], work: W) -> None:
        self._enqueue(stream, name, check, getattr(self._functions, name), work)

    def pack_tok_p(self, stream: Stream, work: PackWork) -> None:
        """One draft and its probability into the round's drafts."""
        self._put(stream, "pack_tok_p", round_checks.pack, work)

    def tok_map_u32(self, stream: Stream, work: MapWork) -> None:
        """Tokens of a draft head's vocabulary to the target's, in place."""
        self._put(stream, "tok_map_u32", round_checks.map_tokens, work)

    def spec_assemble_verify(self, stream: Stream, work: AssembleWork) -> None:
        """The rows that a round verifies; also the guards of vocabulary and capacity."""
        self._put(stream, "spec_assemble_verify", round_checks.assemble, work)

    def spec_accept_greedy_dc(self, stream: Stream, work: AcceptWork) -> None:
        """How many drafts stand, and the token after them; also the stop tokens."""
        self._put(stream, "spec_accept_greedy_dc", round_checks.accept, work)

    def spec_seed_gather(self, stream: Stream, work: SeedWork) -> None:
        """The hidden state at the last committed row."""
        self._put(stream, "spec_seed_gather", round_checks.seed, work)

    def spec_rollback_stream(self, stream: Stream, work: RollbackWork) -> None:
        """Position and lengths of all layers to what was committed."""
        self._put(stream, "spec_rollback_stream", round_checks.rollback, work)

    def spec_ring_commit(self, stream: Stream, work: CommitWork) -> None:
        """Emitted tokens into the ring; the last one is pending."""
        self._put(stream, "spec_ring_commit", round_checks.commit, work)

    def spec_adapt_k(self, stream: Stream, work: AdaptWork) -> None:
        """The depth of the next round from what this one accepted."""
        self._put(stream, "spec_adapt_k", round_checks.adapt, work)

    def spec_round_end(self, stream: Stream, work: RoundEndWork) -> None:
        """Accept, seed, rollback, commit and adapt, in one launch."""
        self._put(stream, "spec_round_end", round_checks.round_end, work)

    def plain_tok_ring(self, stream: Stream, work: TokenRingWork) -> None:
        """Plain decode's token into its ring."""
        self._put(stream, "plain_tok_ring", round_checks.token_ring, work)

    def argmax(self, stream: Stream, work: ArgmaxWork) -> None:
        """The likeliest token of each row of logits, and its probability."""
        self._put(stream, "argmax", round_checks.argmax, work)

    def pos_iota_i32(self, stream: Stream, work: IotaWork) -> None:
        """Positions of the rows of a verify."""
        self._put(stream, "pos_iota_i32", round_checks.iota, work)

    def copy_add(self, stream: Stream, work: CopyWork) -> None:
        """Words from one tensor to another, with a number added."""
        self._put(stream, "copy_add", round_checks.copy, work)

    def set_word(self, stream: Stream, work: SetWork) -> None:
        """One word of every sequence, from the launch's arguments."""
        self._put(stream, "set_word", round_checks.set_word, work)

    def ngram_draft(self, stream: Stream, work: NgramWork) -> None:
        """Drafts by looking the last tokens up in the sequence's own."""
        self._put(stream, "ngram_draft", round_checks.ngram, work)

    def sample(self, stream: Stream, work: SampleWork) -> None:
        """A token of each row of logits, at random."""
        self._put(stream, "sample", round_checks.sample, work)

    def reject(self, stream: Stream, work: RejectWork) -> None:
        """Choices of a verify by which drafts are accepted with the right probability."""
        self._put(stream, "reject", round_checks.reject, work)
