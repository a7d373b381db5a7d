"""A sequence made shorter, made two, or made ready for more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hsswap.arguments import checked_length
from hsswap.driver.base import Stream
from hsswap.errors import ArgumentError
from hsswap.forking import Cut, enqueue_copy, enqueue_restore
from hsswap.loads import Blocks
from hsswap.retiring import Resident
from hsswap.sequence_state import SequenceState
from hsswap.tiers import I32

if TYPE_CHECKING:
    from hsswap.sequence import Sequence


class Reshaping(SequenceState):
    """The calls of :class:`hsswap.Sequence` that move its end, or share what it has."""

    async def reserve(self, tokens: int) -> None:
        """Take block ids and host slots for ``tokens`` more tokens in every layer.

        Appends of so many rows then need nothing that others could hold: :meth:`try_append` takes
        them. What is not used stays until :meth:`truncate` or :meth:`close`.

        Raises OutOfBlocks, or OutOfSlots with the number needed: nothing was taken then.
        """
        self._swap.check_loop()
        with self._exclusive("reserve"):
            config = self._swap.config
            longest = config.capacity_blocks * config.dims.block_size
            tokens = checked_length(tokens, longest, what="tokens")
            with self._all_or_nothing():
                await self._reserve_until([cache.length + tokens for cache in self._layers])

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Ids and slots that are reserved inside go back when it fails; earlier ones stay."""
        ids, slots = len(self.ids), self._reservation.counts()
        try:
            yield
        except BaseException:
            with self._swap.lock:
                if not self._swap.closed:
                    self._reservation.abandon(but=slots)
                    self._swap.drop_ids(self.ids[ids:])  # nothing has used them yet
                    self._set_ids(self.ids[:ids])
            raise

    async def _reserve_until(self, lengths: list[int]) -> None:
        """Take ids, and in each layer host slots for the blocks that are full at a length.

        Inside :meth:`_all_or_nothing`.
        """
        await self._when_room(
            lambda: self._hold_ids(self._swap.config.dims.blocks_of(max(lengths)))
        )
        wanted: list[Blocks] = []
        for cache, length in zip(self._layers, lengths, strict=True):
            first = cache.length // cache.pool.block_size
            stop = length // cache.pool.block_size
            count = self._reservation.missing(cache.layer, stop - first)
            wanted.append(Blocks(cache.pool, cache.layer, self._indices[stop - count : stop]))
        await self._reservation.add(wanted)

    async def truncate(self, length: int, *, stream: object | None = None) -> None:
        """Forget all but the first ``length`` tokens of every layer: rejected speculation.

        What follows is as if the others had never been there, bit for bit. A block that is cut
        inside comes back into its active slot, from disk if it has to. Layers that are shorter stay
        as they are. Results handed out before stay valid. Ids, slots and reservations are given
        back behind the work that uses them.

        Raises ArgumentError for a length out of range. BlockIOError for a cut block that cannot be
        read, DeviceError for a launch that is refused, and cancellation, may leave some layers cut:
        only :meth:`truncate`, to the same length or less, or :meth:`close` can follow then.
        """
        self._swap.check_loop()
        with self._exclusive("truncate"):
            raw_stream = self._swap.stream_of(stream)
            wanted, cuts = self._cuts(length)
            if not cuts and self._cut_to is None:
                return
            restores = [cut.to_restore(self._indices) for cut in cuts]
            self._swap.prefetcher.plan(self.number, [b for b in restores if b is not None])
            with self._cutting(wanted, cuts, raw_stream) as freed:
                for cut, blocks in zip(cuts, restores, strict=True):
                    loaded = None
                    if blocks is not None:
                        loaded = (await self._swap.prefetcher.load(blocks)).slots
                    with self._swap.lock:
                        self._swap.check_open()
                        freed.append(self._cut_layer(cut, loaded, raw_stream))

    def try_truncate(self, length: int, *, stream: object | None = None) -> bool:
        """Like :meth:`truncate`, from any thread, but False where a block must come from disk."""
        with self._swap.lock, self._exclusive("truncate"):
            raw_stream = self._swap.stream_of(stream)
            wanted, cuts = self._cuts(length)
            if not cuts and self._cut_to is None:
                return True
            slots: list[I32 | None] = []
            for cut in cuts:
                blocks = cut.to_restore(self._indices)
                slots.append(None if blocks is None else blocks.loaded())
                if blocks is not None and slots[-1] is None:
                    return False
            self._swap.mailbox.post(lambda: self._plan([]))
            with self._cutting(wanted, cuts, raw_stream) as freed:
                for cut, held in zip(cuts, slots, strict=True):
                    if held is not None:
                        cut.cache.pool.tier.lease(held)
                    freed.append(self._cut_layer(cut, held, raw_stream))
            return True

    def fork(self, *, stream: object | None = None) -> Sequence:
        """Another sequence with the same tokens so far; both go on as they like.

        Full blocks are shared, on disk and in the host tier; the block being filled is copied on
        the device. Never waits; the work is enqueued on ``stream``, behind this sequence's.

        Raises what :meth:`HighSpeedSwap.sequence` raises, and ArgumentError in the middle of a step
        (when some layers have more full blocks than others): nothing was changed then. DeviceError
        when a launch is refused.
        """
        swap = self._swap
        with swap.lock, self._exclusive("fork"):
            raw_stream = swap.stream_of(stream)
            full = {cache.length // cache.pool.block_size for cache in self._layers}
            if len(full) > 1:
                raise ArgumentError(
                    f"fork while layers have {min(full)} to {max(full)} full blocks; append to all"
                )
            fork = swap.sequence(top_k=self.top_k)
            fork._set_ids(swap.share_ids(self.ids[: full.pop()]))
            try:
                with self._ordered(raw_stream):
                    for source, target in zip(self._layers, fork._layers, strict=True):
                        enqueue_copy(swap.device, raw_stream, source, target)
            except BaseException as error:
                fork._broken = error
                swap.mailbox.post(lambda: swap.retiring.close_soon(fork))
                raise
            finally:
                fork._last, fork._unrecorded = self._last, self._unrecorded
            return fork

    def _cuts(self, length: object) -> tuple[int, list[Cut]]:
        longest = self.length if self._cut_to is None else self._cut_to
        wanted = checked_length(length, longest)
        return wanted, [Cut(cache, wanted) for cache in self._layers if cache.length > wanted]

    @contextmanager
    def _cutting(self, length: int, cuts: list[Cut], stream: Stream) -> Iterator[list[Resident]]:
        """Layers are being cut; who adds what they leave to the list has it given back.

        What fails before the first layer changed has changed nothing; afterwards ``_cut_to`` says
        that the others are still to be cut.
        """
        freed: list[Resident] = []
        lost = self._cut_to is not None or any(cut.lost_full for cut in cuts)
        try:
            with self._ordered(stream):
                yield freed
            self._cut_to = None
        except BaseException:
            if self._unrecorded is None and freed:
                self._let_go(length, freed, lost=False)
            elif freed:  # no event says when they are used no more: the next one does
                self._behind += [unused.give_back for unused in freed]
            raise
        self._let_go(length, freed, lost=lost)

    def _let_go(self, length: int, freed: list[Resident], *, lost: bool) -> None:
        """Give device slots back, and with ``lost`` the ids of what changed."""
        assert self._last is not None
        with self._swap.lock:
            if self._swap.closed:
                return
            keep = length // self._swap.config.dims.block_size if lost else len(self.ids)
            if lost:
                self._reservation.abandon()
            dropped = self.ids[keep:]
            self._set_ids(self.ids[:keep])
            self._swap.retiring.later(self.number, dropped, freed, self._last[1])

    def _cut_layer(self, cut: Cut, host_slots: I32 | None, stream: Stream) -> Resident:
        """Cut one layer; ``host_slots`` ``[1]`` is leased and holds the block that is reopened."""
        swap, cache = self._swap, cut.cache
        if cut.lost_full and self._top_k_layers:
            self._top_k_layers[cache.layer].reset()  # its units are by block number
        if cache.lessons is not None:
            cache.lessons.cut(cut.length)
        if host_slots is not None:
            pool, slots = cache.pool, host_slots
            try:
                enqueue_restore(swap.device, stream, cache, slots)
            except BaseException:
                swap.release_now(pool, slots)
                raise
            self._cut_to = cut.length  # what was active is overwritten
            try:
                swap.release_after(stream.record(), pool, slots)
            except BaseException:
                self._behind.append(lambda: swap.release_now(pool, slots))
                raise
        self._cut_to = cut.length
        return Resident(cache.pool, cache.group_layer, cut.apply())
