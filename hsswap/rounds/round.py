"""One round, as work to enqueue: draft, assemble, verify, choose, accept and commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real

import numpy as np

from hsswap.driver.base import Closeable, Device, Event, Graph, Stream
from hsswap.driver.round_operations import (
    AcceptWork,
    AdaptWork,
    ArgmaxWork,
    AssembleWork,
    CommitWork,
    CopyWork,
    RollbackWork,
    RoundEndWork,
    RunningWork,
    SeedWork,
)
from hsswap.driver.sampling_operations import Purpose, RejectWork, SampleWork
from hsswap.errors import ArgumentError, DeviceError, shown
from hsswap.rounds.buffers import StreamBufs
from hsswap.rounds.choosing import Choosing
from hsswap.rounds.contracts import Drafter, Target
from hsswap.rounds.lengths import PointerTable, addresses_of


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """``p_min``: drafts end before one of less probability (0: never); with ``p_min_first`` also
    before the first, so that a round may draft nothing. ``adapt_from``: a round drafts one more
    than the last one accepted, and at least so many; None: always k. ``choosing``: what drafts are
    held against. ``captured``: from the second burst on a round is one graph.
    """

    p_min: float = 0.0
    p_min_first: bool = False
    adapt_from: int | None = None
    choosing: Choosing = Choosing.GREEDY
    captured: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.p_min, Real) or not 0.0 <= self.p_min <= 1.0:
            raise ArgumentError(f"p_min is {shown(self.p_min)}; a number from 0 to 1 is possible")
        whole = isinstance(self.adapt_from, Integral) and not isinstance(self.adapt_from, bool)
        if self.adapt_from is not None and not (whole and self.adapt_from >= 1):
            raise ArgumentError(f"adapt_from is {shown(self.adapt_from)}; 1 and more is possible")
        if not isinstance(self.choosing, Choosing):
            raise ArgumentError(f"choosing is {shown(self.choosing)}; give a Choosing")


class Round(Closeable):
    """The launches of a round over buffers that never move, so that they can be captured once."""

    def __init__(
        self,
        device: Device,
        bufs: StreamBufs,
        target: Target,
        drafter: Drafter,
        options: RoundOptions,
    ) -> None:
        rows = (bufs.batch, bufs.k + 1, target.vocab_size)
        if target.logits.shape != rows:
            raise ArgumentError(
                f"the target's logits are {target.logits.shape}; a batch of {bufs.batch} with "
                f"{bufs.k} drafts needs {rows}"
            )
        seed = drafter.seed()
        if seed is not None and target.hidden is None:
            raise ArgumentError("the drafter wants hidden states, and the target gives none")
        self._kernels, self._bufs = device.round_kernels(), bufs
        self._target, self._drafter = target, drafter
        moved = addresses_of([bufs.pos_ctr], bufs.batch)
        if target.length_addresses is not None:
            moved = np.concatenate([target.length_addresses, moved], axis=1)
        self._table = PointerTable(device, moved)
        rules = bufs.rules(target.vocab_size)
        self._start = CopyWork(bufs.pos_ctr, bufs.pos_start)
        self._assemble = AssembleWork(
            *(bufs.drafts, bufs.pend, bufs.vtok, bufs.brk, rules, bufs.pos_start),
            p_min=options.p_min,
            p_min_first=options.p_min_first,
            depth=bufs.depth,
            capacity=bufs.capacity,
        )
        self._choose = _choose(bufs, target, drafter, options.choosing)
        self._end = RoundEndWork(
            AcceptWork(
                *(bufs.preds, bufs.vtok, bufs.last_pred, bufs.brk, bufs.acc, rules, bufs.ring),
                tally=bufs.tally,
            ),
            RollbackWork(self._table.pointers, bufs.pos_start, bufs.acc, bufs.brk),
            CommitWork(
                *(bufs.vtok, bufs.acc, bufs.brk, bufs.ring, bufs.pend, bufs.flags),
                *(bufs.pos_start, bufs.history),
            ),
            seed=None
            if seed is None or target.hidden is None
            else SeedWork(target.hidden, seed, bufs.acc, bufs.brk, seed),
            adapt=None
            if options.adapt_from is None
            else AdaptWork(bufs.acc, bufs.depth, options.adapt_from, bufs.k),
        )

    def enqueue(self, stream: Stream) -> None:
        """All launches of one round, behind what the stream has."""
        self._kernels.copy_add(stream, self._start)
        self._drafter.draft(stream, self._bufs)
        self._kernels.spec_assemble_verify(stream, self._assemble)
        self._target.verify(stream, self._bufs)
        match self._choose:
            case ArgmaxWork() as work:
                self._kernels.argmax(stream, work)
            case SampleWork() as work:
                self._kernels.sample(stream, work)
            case RejectWork() as work:
                self._kernels.reject(stream, work)
        self._kernels.spec_round_end(stream, self._end)

    def reset(self, stream: Stream) -> None:
        """All lengths to where the sequences start, as if the round in front had done nothing."""
        self._kernels.spec_rollback_stream(stream, self._end.rollback)

    def close(self) -> None:
        """Free the table of lengths. Work on it must have ended. Twice is fine."""
        self._table.close()


def _choose(
    bufs: StreamBufs, target: Target, drafter: Drafter, choosing: Choosing
) -> ArgmaxWork | SampleWork | RejectWork:
    """The launch that makes ``preds``."""
    match choosing:
        case Choosing.GREEDY:
            return ArgmaxWork(target.logits, bufs.preds)
        case Choosing.SAMPLE:
            # Row r stands at pos_start + r and chooses for the position behind it.
            return SampleWork(
                *(target.logits, bufs.sampling, bufs.pos_start, 1, Purpose.TARGET, bufs.preds)
            )
        case Choosing.REJECT:
            return RejectWork(
                *(target.logits, bufs.sampling, bufs.pos_start, bufs.vtok, bufs.brk, bufs.preds),
                drafter.distribution(),
            )


@dataclass(frozen=True, slots=True)
class Launches:
    """``one()`` enqueues a round, up to ``most`` times. ``is_quick``: in microseconds, and without
    ever waiting.
    """

    one: Callable[[], None]
    is_quick: bool
    most: int


class Rounds(Closeable):
    """The round of a stream as something to launch: eagerly once, then as a graph.

    The eager round, which is a burst of its own, loads what a capture may not: modules, workspaces.
    The graph is passed over once every sequence has ended, or ``why_all_run`` says why not. When
    the target's lengths have moved, both are made anew. Raises ArgumentError where target, drafter
    and buffers do not fit.
    """

    def __init__(
        self,
        device: Device,
        bufs: StreamBufs,
        target: Target,
        drafter: Drafter,
        options: RoundOptions,
    ) -> None:
        self._make: Callable[[], Round] = partial(Round, device, bufs, target, drafter, options)
        self._device = device
        self._running = RunningWork(bufs.flags, bufs.pos_ctr, bufs.pend, bufs.capacity)
        self._target, self._captured, self._most = target, options.captured, bufs.m_rounds
        self._addresses = target.length_addresses
        self._round = self._make()
        self._graph: Graph | None = None
        self._has_run = False
        self.why_all_run = ""
        # What was made anew, and the stream's work that may still use it.
        self._retired: list[tuple[Event, Round, Graph | None]] = []

    def launches(self, stream: Stream, *, waits: bool) -> Launches:
        """What enqueues a round on the stream; blocks while something is made anew.

        ``waits``: a pass may wait, so it cannot be captured.
        """
        self._follow_target(stream)
        enqueue = partial(self._round.enqueue, stream)
        if waits or not (self._captured and self._has_run):
            self._has_run = True
            most = 1 if self._captured else self._most
            return Launches(enqueue, is_quick=False, most=most)
        if self._graph is None:
            self._graph = self._target.capture(stream, enqueue, self._skipping)
        return Launches(partial(self._graph.launch, stream), is_quick=True, most=self._most)

    def _skipping(self, graph: Graph) -> Graph:
        """``graph`` where a sequence runs; always, where the device takes no such graph: rounds
        behind an end then do nothing at the cost of a round.
        """
        try:
            return self._device.skipping(graph, self._running)
        except DeviceError as error:
            self.why_all_run = str(error)
            return graph

    def reset(self, stream: Stream) -> None:
        """See :meth:`Round.reset`: another stream of the target may have moved its lengths."""
        self._follow_target(stream)
        self._round.reset(stream)

    def _follow_target(self, stream: Stream) -> None:
        if self._target.length_addresses is self._addresses:
            return
        # The stream may still run rounds over the old table: it is freed once they have ended.
        retired, self._retired = self._retired, []
        for event, round_, graph in retired:
            if _has_ended(event):
                _free(round_, graph)
            else:
                self._retired.append((event, round_, graph))
        self._retired.append((stream.record(), self._round, self._graph))
        self._addresses = self._target.length_addresses
        self._round, self._graph = self._make(), None

    def close(self) -> None:
        """Free graphs and rounds. Work on them must have ended. Twice is fine."""
        for _, round_, graph in self._retired:
            _free(round_, graph)
        self._retired.clear()
        _free(self._round, self._graph)


def _has_ended(event: Event) -> bool:
    try:
        return event.is_done()
    except DeviceError:  # it failed, which is an end too
        return True


def _free(round_: Round, graph: Graph | None) -> None:
    if graph is not None:
        graph.close()
    round_.close()
