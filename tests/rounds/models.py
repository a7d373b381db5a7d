"""A target whose next token is a hash of the last tokens, and drafters of every character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Buffer, Closeable, Device, Stream
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_stream import HostStream
from hsswap.driver.round_operations import NO_TOKEN
from hsswap.driver.tensor import tensor_in
from hsswap.rounds import (
    Admission,
    Drafter,
    LayerLengths,
    RoundOptions,
    StreamBufs,
    Target,
    addresses_of,
)

ORDER = 3
"""Tokens that decide about the next one."""

DRAFTERS = ("perfect", "adversarial", "random", "often", "short", "ngram")
OPTIONS = (
    RoundOptions(),
    RoundOptions(p_min=0.5),
    RoundOptions(p_min=0.7, p_min_first=True),
    RoundOptions(adapt_from=1),
    RoundOptions(p_min=0.4, adapt_from=2),
)


def logits_after(
    tokens: Sequence[int] | NDArray[np.int64], vocab: int, key: int = 0
) -> NDArray[np.float32]:
    """``[vocab]``, from the last tokens and ``key`` alone; all multiples of one number below 1."""
    mixed = key + 1
    for token in tokens[-ORDER:]:
        mixed = (mixed * 1_000_003 + int(token) + 1) % ((1 << 31) - 1)
    spread = (mixed ^ (np.arange(vocab, dtype=np.uint64) * 40_503)) * 2_654_435_761
    return ((spread >> np.uint64(12)) % 4096).astype(np.float32) / np.float32(512)


def greedy(
    prompt: Sequence[int], count: int, vocab: int, stops: Sequence[int] = (), key: int = 0
) -> list[int]:
    """Plain decoding: ``count`` tokens after the prompt, fewer behind a stop token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(np.argmax(logits_after(tokens, vocab, key))))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def enqueue(stream: Stream, name: str, function: Callable[[], None]) -> None:
    """Run a function in the order of a host stream."""
    assert isinstance(stream, HostStream)

    def run(work: None, scratch: Scratch) -> None:
        function()

    stream.enqueue(name, run, None)


class TableTarget(Target, Closeable):
    """Its K and V is the token itself, written at the length that its own layer's counter says, so
    that a wrong rollback gives wrong tokens. The layer between has no cache.
    """

    def __init__(
        self, device: Device, k: int, prompts: Sequence[Sequence[int]], *, vocab: int, room: int
    ) -> None:
        batch = len(prompts)
        self.vocab_size, self.k = vocab, k
        self.lengths = LayerLengths(device, [True, False, True], batch=batch)
        self.length_addresses = addresses_of(self.lengths.of_layer, batch)
        self._buffer: Buffer = device.allocate_host(4 * batch * (k + 1) * vocab)
        self.logits = tensor_in(self._buffer, "f32", (batch, k + 1, vocab))
        self.cache = np.full((2, batch, room + k + 1), -1, np.int64)
        self.key = 0
        self.always: NDArray[np.float32] | None = None
        self.bad_at: int | None = None
        self.passes = self.issued = 0
        self.admitted: list[list[int]] = []
        self.settled: list[list[int]] = []
        self.most_rounds = 1 << 30
        self.hold: Callable[[], None] | None = None
        self.hold_tokens(prompts)

    def hold_tokens(self, prompts: Sequence[Sequence[int]]) -> None:
        """As after a prefill of the prompts."""
        for s, prompt in enumerate(prompts):
            self.cache[:, s, : len(prompt)] = prompt
            for tensor in self.lengths.of_layer:
                if tensor is not None:
                    tensor.array()[s] = len(prompt)

    def verify(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Target`."""
        self.issued += 1
        enqueue(stream, "table verify", lambda: self._verify(bufs))

    def _verify(self, bufs: StreamBufs) -> None:
        if self.hold is not None:
            self.hold()
        self.passes += 1
        vtok, brk, logits = bufs.vtok.array(), bufs.brk.array(), self.logits.array()
        logits[...] = np.nan
        counters = [t.array() for t in self.lengths.of_layer if t is not None]
        assert vtok.max() < self.vocab_size  # as an embedding's index would be
        for s in range(len(vtok)):
            rows = self.k + 1
            for cache, counter in zip(self.cache, counters, strict=True):
                cache[s, counter[s] : counter[s] + rows] = vtok[s]
            for r in range(int(brk[s].sum())):
                end = int(counters[r % 2][s]) + r + 1
                logits[s, r] = logits_after(self.cache[r % 2, s, :end], self.vocab_size, self.key)
                if self.always is not None:
                    logits[s, r] = self.always
                if self.bad_at is not None and end > self.bad_at:
                    logits[s, r] = np.nan

    async def admit(
        self, rounds: int, under_way: int, ends: Sequence[int], capacities: Sequence[int]
    ) -> Admission:
        """See :class:`Target`."""
        self.admitted.append(list(ends))
        why = "the table says so" if self.most_rounds < rounds else ""
        return Admission(min(rounds, max(0, self.most_rounds - under_way)), why)

    async def settle(self, positions: Sequence[int]) -> None:
        """See :class:`Target`."""
        self.settled.append(list(positions))

    def close(self) -> None:
        """Free the memory."""
        self.lengths.close()
        self._buffer.close()


Guess = Callable[[list[int], int], list[int]]
"""From a sequence's tokens and k: as many drafts as it likes, -1 for a slot that is not written."""


class GuessDrafter(Drafter):
    """Drafts by a function of the tokens so far, with random probabilities from 0.3 on."""

    def __init__(self, guess: Guess, seed: int = 0) -> None:
        self._guess = guess
        self._rng = np.random.default_rng(seed)

    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Drafter`."""
        enqueue(stream, "guess", lambda: self._draft(bufs))

    def _draft(self, bufs: StreamBufs) -> None:
        drafts = bufs.drafts.array()
        for s, pos in enumerate(bufs.pos_ctr.array().tolist()):
            known = pos + int(bufs.pend.array()[s] != NO_TOKEN)
            tokens = bufs.history.array()[s, :known].tolist()
            guessed = self._guess(tokens, bufs.k)
            for j in range(bufs.k):
                token = guessed[j] if j < len(guessed) else NO_TOKEN
                if token >= 0:
                    p = np.float32(self._rng.uniform(0.3, 1.0))
                    drafts[s, 2 * j : 2 * j + 2] = token, p.view(np.uint32)


def guesses(vocab: int, seed: int) -> dict[str, Guess]:
    """By name: a perfect drafter, one that is always wrong, a random one, one that is often right,
    and one of changing length.
    """
    rng = np.random.default_rng(seed)

    def perfect(tokens: list[int], k: int) -> list[int]:
        return greedy(tokens, k, vocab)

    def adversarial(tokens: list[int], k: int) -> list[int]:
        return [(t + 1) % vocab for t in perfect(tokens, k)]

    def random(known: list[int], k: int) -> list[int]:
        tokens: list[int] = rng.integers(0, vocab, k).tolist()
        return tokens

    def often(tokens: list[int], k: int) -> list[int]:
        return [t if rng.random() < 0.8 else int(rng.integers(vocab)) for t in perfect(tokens, k)]

    def short(tokens: list[int], k: int) -> list[int]:
        return perfect(tokens, int(rng.integers(0, k + 1)))

    return {g.__name__: g for g in (perfect, adversarial, random, often, short)}
