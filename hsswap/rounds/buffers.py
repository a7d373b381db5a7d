"""The device memory of a round stream: what a burst's kernels read and write, and its drain.

As ``StreamBufs`` and ``drain_ring`` of memra's ``round_stream.rs``, for a batch of sequences. All
of it is made once and keeps its address, so that captured graphs stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Closeable, Device, Event, Stream
from hsswap.driver.round_operations import NO_TOKEN, CopyWork, RoundRules, SetWork
from hsswap.driver.sampling_operations import Sampling
from hsswap.driver.tensor import Memory, Tensor, tensor_in
from hsswap.errors import ArgumentError, DeviceError, shown
from hsswap.rounds.choosing import GREEDY, Choice

OUTBOXES = 2
"""Bursts whose results may be on their way: one that drains, and the next one."""

Layout = dict[str, tuple[str, tuple[int, ...]]]


def check_tokens(tokens: object, what: str, limit: int = NO_TOKEN) -> None:
    """Raise ArgumentError for what is no list of whole numbers from 0 to under ``limit``."""
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise ArgumentError(f"{what} are no list of whole numbers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"{what} are no list of whole numbers")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < limit:
        raise ArgumentError(f"{what} are {array.min()} to {array.max()}; give 0 to {limit - 1}")


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """Where one sequence begins: ``tokens`` whose K and V count (a prompt), the ``pending`` token
    after them (None: there is none, and ``last_pred`` is the model's choice), the ``capacity``: no
    row of K and V is committed at this position or behind it, and how it chooses.
    """

    tokens: Sequence[int]
    pending: int | None
    capacity: int
    last_pred: int = 0
    choice: Choice = GREEDY

    def __post_init__(self) -> None:
        """Raises ArgumentError for what is no token or capacity."""
        pending = () if self.pending is None else (self.pending,)
        check_tokens(self.tokens, "tokens")
        check_tokens((*pending, self.last_pred), "pending and last_pred")
        if not isinstance(self.choice, Choice):
            raise ArgumentError(f"choice is {shown(self.choice)}; give a Choice")
        capacity = self.capacity
        whole = isinstance(capacity, int | np.integer) and not isinstance(capacity, bool)
        if not whole or not 0 <= capacity < 1 << 31:
            raise ArgumentError(f"capacity is {shown(capacity)}; give a whole number of tokens")


@dataclass(frozen=True, slots=True)
class Drained:
    """What a burst left: of each sequence its new tokens in order, flags, position, and pending
    token; ``tally`` ``[batch, 3]``: rounds, drafts used and drafts accepted since the start.
    """

    tokens: list[list[int]]
    flags: list[int]
    positions: list[int]
    pending: list[int]
    tally: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Published:
    """A burst's results on their way to the host: an outbox, and the event behind the copy."""

    outbox: int
    event: Event


class StreamBufs(Closeable):
    """Buffers of bursts of at most ``m_rounds`` rounds of ``k`` drafts, for ``batch`` sequences.

    Tensors ``[batch, ...]``, zero at first: ``drafts`` u32 ``[2k]``, ``vtok`` and ``preds`` u32
    ``[k + 1]``, ``brk`` and ``acc`` u32 ``[2]``, ``pend`` and ``last_pred`` u32, ``pos_ctr`` and
    ``pos_start`` int32, ``ring`` u32 ``[m_rounds * (k + 1) + 1]`` with its count first, ``depth``
    u32 ``[1]``, ``history`` u32 ``[history_tokens]``, ``capacity`` int32, ``flags`` u32,
    ``stop_tokens`` u32 ``[max(1, stops)]``, ``tally`` u32 ``[3]``; ``sampling`` is a record.

    Raises ArgumentError for a size that is none, DeviceError when there is no memory.
    """

    def __init__(
        self,
        device: Device,
        k: int,
        m_rounds: int,
        *,
        batch: int = 1,
        history_tokens: int = 1,
        stops: int = 0,
    ) -> None:
        sizes = {"k": k, "m_rounds": m_rounds, "batch": batch, "history_tokens": history_tokens}
        for name, value in {**sizes, "stops": stops}.items():
            least, whole = int(name != "stops"), isinstance(value, int)
            if not whole or isinstance(value, bool) or not least <= value < 1 << 31:
                raise ArgumentError(
                    f"{name} is {shown(value)}; a whole number from {least} to 2**31 - 1"
                )
        self.k, self.m_rounds, self.batch = k, m_rounds, batch
        self._kernels = device.round_kernels()
        # What a drain brings to the host comes first, so that one copy takes it.
        self._reported: Layout = {
            "ring": ("u32", (batch, m_rounds * (k + 1) + 1)),
            "flags": ("u32", (batch,)),
            "pos_ctr": ("i32", (batch,)),
            "pend": ("u32", (batch,)),
            "tally": ("u32", (batch, 3)),
        }
        self._layout: Layout = {
            **self._reported,
            "drafts": ("u32", (batch, 2 * k)),
            "vtok": ("u32", (batch, k + 1)),
            "preds": ("u32", (batch, k + 1)),
            "brk": ("u32", (batch, 2)),
            "acc": ("u32", (batch, 2)),
            "last_pred": ("u32", (batch,)),
            "pos_start": ("i32", (batch,)),
            "depth": ("u32", (batch, 1)),
            "history": ("u32", (batch, history_tokens)),
            "capacity": ("i32", (batch,)),
            "stop_tokens": ("u32", (batch, max(1, stops))),
            "temperature": ("f32", (batch,)),
            "top_k": ("u32", (batch,)),
            "top_p": ("f32", (batch,)),
            "min_p": ("f32", (batch,)),
            "seed": ("u32", (batch, 2)),
        }
        self._report_words, words = _words(self._reported), _words(self._layout)
        self._buffer = device.allocate(4 * words)
        try:
            self._inbox = device.allocate_host(4 * words)
            self._outboxes = device.allocate_host(4 * OUTBOXES * self._report_words)
        except BaseException:
            self.close()
            raise
        self._free_outboxes = list(range(OUTBOXES))
        self._whole = tensor_in(self._buffer, "u32", (words,))
        self._report = tensor_in(self._buffer, "u32", (self._report_words,))
        of = _split(self._buffer, self._layout)
        self.ring, self.flags, self.tally = of["ring"], of["flags"], of["tally"]
        self.pos_ctr, self.pos_start, self.capacity = of["pos_ctr"], of["pos_start"], of["capacity"]
        self.pend, self.last_pred, self.depth = of["pend"], of["last_pred"], of["depth"]
        self.drafts, self.vtok, self.preds = of["drafts"], of["vtok"], of["preds"]
        self.brk, self.acc = of["brk"], of["acc"]
        self.history, self.stop_tokens = of["history"], of["stop_tokens"]
        self.sampling = Sampling(
            of["temperature"], of["top_k"], of["top_p"], of["min_p"], of["seed"]
        )

    def rules(self, vocab_size: int) -> RoundRules:
        """Flags and stop tokens, with the model's vocabulary."""
        return RoundRules(self.flags, self.stop_tokens, vocab_size)

    def check_starts(self, sequences: object, vocab_size: int, *, greedy: bool) -> None:
        """Raise ArgumentError for sequences that cannot begin; ``greedy``: none may be sampled."""
        if not isinstance(sequences, list | tuple):
            raise ArgumentError(f"sequences is a {type(sequences).__name__}; give a list")
        room = self.history.shape[1]
        for sequence in sequences:
            if not isinstance(sequence, SequenceStart):
                raise ArgumentError(f"{shown(sequence)} is no SequenceStart")
            pending = () if sequence.pending is None else (sequence.pending,)
            check_tokens(sequence.tokens, "tokens", vocab_size)
            check_tokens((*pending, sequence.last_pred), "pending and last_pred", vocab_size)
            if not len(sequence.tokens) <= sequence.capacity < room:
                raise ArgumentError(
                    f"a capacity of {sequence.capacity} for a sequence of {len(sequence.tokens)} "
                    f"tokens; it must be as many or more, and under history_tokens ({room})"
                )
            if sequence.choice.temperature and greedy:
                raise ArgumentError(
                    "a temperature in a greedy stream; give RoundOptions(choosing=Choosing.SAMPLE)"
                )

    def check_sizes(self, sequences: Sequence[SequenceStart], stop_tokens: Sequence[int]) -> None:
        """Raise ArgumentError for more sequences or stop tokens than there is room for."""
        stops = self.stop_tokens.shape[1]
        check_tokens(stop_tokens, "stop tokens")
        if len(sequences) != self.batch:
            raise ArgumentError(f"{len(sequences)} sequences for a batch of {self.batch}")
        if len(stop_tokens) > stops:
            raise ArgumentError(f"{len(stop_tokens)} stop tokens; there is room for {stops}")

    async def start(
        self, stream: Stream, sequences: Sequence[SequenceStart], stop_tokens: Sequence[int] = ()
    ) -> None:
        """Set everything for sequences that begin, one for each place of the batch.

        No burst may be under way. ``depth`` becomes k. Raises ArgumentError when there are more
        sequences, tokens or stop tokens than there is room for.
        """
        self.check_sizes(sequences, stop_tokens)
        room = self.history.shape[1]
        image = {name: t.array() for name, t in _split(self._inbox, self._layout).items()}
        for array in image.values():
            array[...] = 0
        image["stop_tokens"][...] = NO_TOKEN
        image["stop_tokens"][:, : len(stop_tokens)] = list(stop_tokens)
        image["depth"][...] = self.k
        for s, sequence in enumerate(sequences):
            known = [*sequence.tokens, *([] if sequence.pending is None else [sequence.pending])]
            if len(known) > room:
                raise ArgumentError(f"{len(known)} tokens; the history has room for {room}")
            image["history"][s, : len(known)] = known
            image["pos_ctr"][s] = image["pos_start"][s] = len(sequence.tokens)
            image["pend"][s] = NO_TOKEN if sequence.pending is None else sequence.pending
            image["last_pred"][s] = sequence.last_pred
            image["capacity"][s] = sequence.capacity
            choice = sequence.choice
            image["temperature"][s], image["top_k"][s] = choice.temperature, choice.top_k
            image["top_p"][s], image["min_p"][s] = choice.top_p, choice.min_p
            image["seed"][s] = choice.seed & 0xFFFFFFFF, choice.seed >> 32
        source = tensor_in(self._inbox, "u32", self._whole.shape)
        self._kernels.copy_add(stream, CopyWork(source, self._whole))
        await stream.record().wait()

    def begin(self, stream: Stream) -> None:
        """Empty the ring, for a burst that follows on the stream."""
        self._kernels.set_word(stream, SetWork(self.ring, 0, 0))

    def publish(self, stream: Stream) -> Published:
        """Copy ring, flags, positions, pending tokens and tallies to the host, behind a burst.

        The next burst may be enqueued at once. Raises DeviceError when no burst published before
        has been drained.
        """
        if not self._free_outboxes:
            raise DeviceError(f"{OUTBOXES} bursts wait to be drained; drain one first")
        outbox = self._free_outboxes[-1]
        target = tensor_in(
            self._outboxes,
            "u32",
            (self._report_words,),
            offset_bytes=4 * outbox * self._report_words,
        )
        self._kernels.copy_add(stream, CopyWork(self._report, target))
        published = Published(outbox, stream.record())
        self._free_outboxes.pop()
        return published

    async def drain_ring(self, published: Published) -> Drained:
        """Wait for a burst and read what it left: the one time that the host sees a value of it.

        Raises DeviceError when the burst failed.
        """
        await published.event.wait()
        first = 4 * published.outbox * self._report_words
        of = _split(self._outboxes, self._reported, first)
        arrays: dict[str, NDArray[Any]] = {name: t.array() for name, t in of.items()}
        counts, ring = arrays["ring"][:, 0].tolist(), arrays["ring"]
        if max(counts) >= ring.shape[1]:
            raise DeviceError(f"a ring of {ring.shape[1] - 1} tokens says it holds {max(counts)}")
        drained = Drained(
            [ring[s, 1 : 1 + count].tolist() for s, count in enumerate(counts)],
            arrays["flags"].tolist(),
            arrays["pos_ctr"].tolist(),
            arrays["pend"].tolist(),
            arrays["tally"].copy(),
        )
        self._free_outboxes.append(published.outbox)
        return drained

    def close(self) -> None:
        """Free the memory. Work on it must have ended. Twice is fine."""
        for name in ("_buffer", "_inbox", "_outboxes"):
            if hasattr(self, name):
                getattr(self, name).close()


def _words(layout: Layout) -> int:
    return sum(math.prod(shape) for _, shape in layout.values())


def _split(memory: Memory, layout: Layout, first_byte: int = 0) -> dict[str, Tensor]:
    """Tensors of 4-byte words, one after the other."""
    tensors = {}
    for name, (dtype, shape) in layout.items():
        tensors[name] = tensor_in(memory, dtype, shape, offset_bytes=first_byte)
        first_byte += 4 * int(np.prod(shape, dtype=np.int64))
    return tensors
