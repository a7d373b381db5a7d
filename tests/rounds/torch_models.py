"""The table's target and its drafters (:mod:`tests.rounds.models`) as torch work on a device: a GPU
runs them without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hsswap.driver.base import Closeable, Device, Graph, Stream
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.models.torch_rounds import TorchGraph
from hsswap.models.torch_step import captured, on_device
from hsswap.rounds import (
    Admission,
    Drafter,
    LayerLengths,
    NgramDrafter,
    StreamBufs,
    Target,
    addresses_of,
)
from tests.rounds.models import ORDER

NONE = -1  # NO_TOKEN as int32


class Place:
    """Where torch works: ``torch_stream`` of a GPU; None: on the CPU, at once, in turns with the
    round stream.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch_stream: Any = None if name == "cpu" else torch.cuda.Stream(name)

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        """Behind what is on the stream."""
        if self.torch_stream is None:
            stream.synchronize()
            work()
            return
        with torch.cuda.stream(self.torch_stream):
            work()

    def words(self, tensor: Tensor) -> torch.Tensor:
        """The same memory, u32 as int32."""
        return on_device(replace(tensor, dtype="i32"), self.name)


def logits_behind(last: torch.Tensor, counts: torch.Tensor, vocab: int) -> torch.Tensor:
    """``models.logits_after``: ``last`` int64 ``[..., ORDER]`` of which ``counts`` ``[...]`` are
    there, the others in front; float32 ``[..., vocab]``.
    """
    mixed = torch.ones_like(counts)
    for i in range(ORDER):
        following = (mixed * 1_000_003 + last[..., i] + 1) % ((1 << 31) - 1)
        mixed = torch.where(counts >= ORDER - i, following, mixed)
    places = torch.arange(vocab, device=last.device) * 40_503
    spread = (mixed[..., None] ^ places) * 2_654_435_761
    return ((spread >> 12) % 4096).float() / 512


class TorchTable(Target, Closeable):
    """:class:`tests.rounds.models.TableTarget`: K and V are tokens at the lengths of two layers."""

    def __init__(
        self, device: Device, place: Place, k: int, batch: int, *, vocab: int, room: int
    ) -> None:
        self.vocab_size, self._place, self._rows = vocab, place, k + 1
        self.lengths = LayerLengths(device, [True, False, True], batch=batch)
        self.length_addresses = addresses_of(self.lengths.of_layer, batch)
        self._buffer = device.allocate(4 * batch * (k + 1) * vocab)
        self.logits = tensor_in(self._buffer, "f32", (batch, k + 1, vocab))
        self._cache = torch.full((2, batch, room + k + 1), NONE, device=place.name)

    def hold_tokens(self, stream: Stream, prompts: Sequence[Sequence[int]]) -> None:
        """As after a prefill of the prompts; lengths go there when a stream starts."""
        longest = max(map(len, prompts))
        filled = torch.tensor([[*p, *[NONE] * (longest - len(p))] for p in prompts])

        def hold() -> None:
            self._cache[:, :, :longest] = filled.to(self._place.name)

        self._place.run(stream, hold)

    def verify(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Target`."""
        self._place.run(stream, lambda: self._verify(bufs))

    def _verify(self, bufs: StreamBufs) -> None:
        words = self._place.words
        vtok, real = words(bufs.vtok).long(), words(bufs.brk).sum(1)
        rows = torch.arange(self._rows, device=vtok.device)
        counters = [words(t).long()[:, None] for t in self.lengths.of_layer if t is not None]
        for cache, counter in zip(self._cache, counters, strict=True):
            cache.scatter_(1, counter + rows, vtok)
        ends = torch.where(rows % 2 == 0, counters[0], counters[1]) + rows + 1
        places = ends[..., None] - ORDER + torch.arange(ORDER, device=vtok.device)
        flat = places.clamp(min=0).flatten(1)
        seen = [cache.gather(1, flat).view_as(places) for cache in self._cache]
        last = torch.where((rows % 2 == 0)[:, None], seen[0], seen[1])
        made = logits_behind(last, ends, self.vocab_size)
        made.masked_fill_((rows >= real[:, None])[..., None], float("nan"))
        on_device(self.logits, self._place.name).copy_(made)

    def capture(
        self, stream: Stream, enqueue: Callable[[], None], skipping: Callable[[Graph], Graph]
    ) -> Graph:
        """See :class:`Target`."""
        with torch.cuda.stream(self._place.torch_stream):
            graph = captured(enqueue, keep=True)
        return skipping(TorchGraph(graph, self._place.torch_stream, stream.take_captured()))

    async def admit(
        self, rounds: int, under_way: int, ends: Sequence[int], capacities: Sequence[int]
    ) -> Admission:
        """See :class:`Target`."""
        return Admission(rounds)

    async def settle(self, positions: Sequence[int]) -> None:
        """See :class:`Target`."""

    def close(self) -> None:
        """Free the memory."""
        self.lengths.close()
        self._buffer.close()


class TorchGuess(Drafter):
    """The drafters of ``models.guesses`` by name, one a sequence, with numbers mixed from position
    and slot in place of random ones, and probabilities from 0.3 on. Sequences whose kind is "ngram"
    have the drafts of an n-gram drafter.
    """

    def __init__(
        self, device: Device, place: Place, kinds: Sequence[str], vocab: int, seed: int
    ) -> None:
        self._place, self._vocab, self._seed = place, vocab, seed
        self._ngram = NgramDrafter(device)
        self._whose = {
            kind: torch.tensor([each == kind for each in kinds], device=place.name)
            for kind in sorted(set(kinds))
        }

    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Drafter`."""
        if "ngram" in self._whose:
            self._ngram.draft(stream, bufs)
        self._place.run(stream, lambda: self._draft(bufs))

    def _draft(self, bufs: StreamBufs) -> None:
        words = self._place.words
        pos, history = words(bufs.pos_ctr).long(), words(bufs.history).long()
        known = pos + (words(bufs.pend) != NONE)
        places = known[:, None] - ORDER + torch.arange(ORDER, device=pos.device)
        last = history.gather(1, places.clamp(min=0))
        drafts = words(bufs.drafts)
        length = self._mixed(pos, 99) % (bufs.k + 1)
        for j in range(bufs.k):
            right = logits_behind(last, known + j, self._vocab).argmax(1)
            last = torch.cat([last[:, 1:], right[:, None]], 1)
            number = self._mixed(pos, j)
            probability = 0.3 + 0.7 * ((number >> 4) % 1024).float() / 1024
            for kind, mine in self._whose.items():
                if kind != "ngram":
                    token = self._token(kind, right, number, length > j).int()
                    drafts[:, 2 * j] = torch.where(mine, token, drafts[:, 2 * j])
                    bits = probability.view(torch.int32)
                    drafts[:, 2 * j + 1] = torch.where(mine, bits, drafts[:, 2 * j + 1])

    def _token(
        self, kind: str, right: torch.Tensor, number: torch.Tensor, within: torch.Tensor
    ) -> torch.Tensor:
        """Drafts of one slot by one kind, for every sequence."""
        match kind:
            case "perfect":
                return right
            case "adversarial":
                return (right + 1) % self._vocab
            case "random":
                return number % self._vocab
            case "often":
                return torch.where(number % 10 < 8, right, (number >> 8) % self._vocab)
        assert kind == "short"
        return torch.where(within, right, torch.full_like(right, NONE))

    def _mixed(self, pos: torch.Tensor, slot: int) -> torch.Tensor:
        """Numbers under 2**31 ``[batch]``, of positions, sequences and the slot."""
        s = torch.arange(len(pos), device=pos.device)
        mixed = pos * 7919 + s * 104_729 + slot * 1_299_709 + self._seed * 15_485_863 + 1
        for _ in range(3):
            mixed = (mixed * 48_271 + (mixed >> 7)) % ((1 << 31) - 1)
        return mixed
