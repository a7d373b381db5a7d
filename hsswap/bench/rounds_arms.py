"""The arms of ``hsswap bench rounds``: ways to decode the same prompts, and the host's engine.

Every arm makes the same tokens, which is checked at each run.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hsswap.commands.decoding import SwapAttention, dims_of
from hsswap.commands.speculating import SwappedSequence
from hsswap.config import SPAN_TOKENS, SwapConfig
from hsswap.driver import open_device
from hsswap.driver.base import Closeable, Device, Stream
from hsswap.driver.round_operations import NO_TOKEN, CopyWork
from hsswap.driver.tensor import tensor_in
from hsswap.errors import VerifyError
from hsswap.models import Llama
from hsswap.rounds import (
    Acceptance,
    Drafter,
    NgramDrafter,
    RoundOptions,
    RoundStream,
    SequenceStart,
    StreamBufs,
    Target,
)
from hsswap.rounds.host_target import EarlyExitDrafter, HostTarget
from hsswap.sync import blocking


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode: ``rounds`` a burst. Drafter "none": a token a round."""

    name: str
    rounds: int
    options: RoundOptions
    drafter: str = "ngram"


ADAPTIVE = RoundOptions(adapt_from=1)
WAYS = (
    Way("plain", 8, RoundOptions(), "none"),
    Way("eager", 1, RoundOptions(adapt_from=1, captured=False)),
    Way("read-back", 1, ADAPTIVE),
    Way("stream", 4, ADAPTIVE),
    Way("stream-8", 8, ADAPTIVE),
    Way("early-exit", 4, ADAPTIVE, "early-exit"),
)
"""``eager`` and ``read-back`` look at the result of each round, the others at that of a burst."""


@dataclass(slots=True)
class Told:
    """What an arm did in its last run, beside its time: host seconds are of the calling thread."""

    tokens: int = 0
    rounds: int = 0
    host_s: float = 0.0
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0, 0, 0))


class Engine(Protocol):
    """A model with prefilled sequences, which can go back to their prompts."""

    def rewind(self, way: Way) -> list[SequenceStart]:
        """Back to the prompts, for a run of ``way``; where each sequence starts then."""
        ...

    def plain(self) -> list[list[int]] | None:
        """The tokens of plain steps, by code without rounds; None: the engine has none."""
        ...

    def stream(self, way: Way) -> RoundStream:
        """A round stream over the sequences. The engine closes what is under it."""
        ...

    def round_s(self, way: Way) -> float | None:
        """Seconds of the device for a captured round of the way, all sequences; None: unknown."""
        ...


class HostEngine(ExitStack):
    """A NumPy Llama, ``prompts`` prefilled in a swap that holds everything in memory."""

    def __init__(self, model: Llama, prompts: Sequence[Sequence[int]], tokens: int, k: int) -> None:
        super().__init__()
        self._model, self._prompts, self._tokens, self._k = model, prompts, tokens, k
        dims = dims_of(model.config)
        longest = max(map(len, prompts)) + tokens + k + 1
        blocks = dims.layers * len(prompts) * (dims.blocks_of(longest) + 1)
        ring = 2 * SPAN_TOKENS // dims.block_size
        config = SwapConfig(
            dims,
            len(prompts) * dims.blocks_of(longest) * 2 * dims.block_size,
            device_slots=blocks + ring,
            host_slots=blocks + ring,
            max_sequences=len(prompts),
            tile_tokens=SPAN_TOKENS,
            io="memory",
        )
        swap = self.enter_context(blocking(config))
        self._device = self.enter_context(open_device("host"))
        self._sequences: list[SwappedSequence] = []
        self._attentions: list[SwapAttention] = []
        self._firsts: list[int] = []
        for prompt in prompts:
            sequence = self.enter_context(swap.sequence())
            attention = SwapAttention(sequence)
            self._firsts.append(int(model.prefill(prompt, attention).argmax()))
            self._attentions.append(attention)
            self._sequences.append(SwappedSequence(model, sequence, attention))

    def rewind(self, way: Way) -> list[SequenceStart]:
        """See :class:`Engine`."""
        starts = []
        for sequence, prompt, first in zip(
            self._sequences, self._prompts, self._firsts, strict=True
        ):
            sequence.truncate(len(prompt))
            starts.append(SequenceStart(prompt, first, len(prompt) + self._tokens))
        return starts

    def plain(self) -> list[list[int]]:
        """See :class:`Engine`."""
        made: list[list[int]] = []
        for start, attention in zip(self.rewind(WAYS[0]), self._attentions, strict=True):
            assert start.pending is not None
            tokens = [start.pending]
            for position in range(len(start.tokens), start.capacity):
                tokens.append(self._model.decode(tokens[-1], position, attention))
            made.append(tokens[1:])
        return made

    def round_s(self, way: Way) -> float | None:
        """See :class:`Engine`. A worker's time is not measured."""
        return None

    def stream(self, way: Way) -> RoundStream:
        """See :class:`Engine`."""
        target: Target = self.enter_context(
            HostTarget(
                self._device, self._sequences, k=self._k, vocab_size=self._model.config.vocab_size
            )
        )
        drafter: Drafter
        match way.drafter:
            case "early-exit":
                drafter = EarlyExitDrafter(self._sequences)
            case "ngram":
                drafter = NgramDrafter(self._device)
            case _:
                drafter = self.enter_context(NoDrafts(self._device, len(self._prompts), self._k))
        return RoundStream(
            *(self._device, target, drafter),
            k=self._k,
            rounds=way.rounds,
            batch=len(self._prompts),
            history_tokens=max(map(len, self._prompts)) + self._tokens + 1,
            options=way.options,
        )


class NoDrafts(Drafter, Closeable):
    """Drafts nothing, so that each round is a plain step with as many rows as a verify."""

    def __init__(self, device: Device, batch: int, k: int) -> None:
        self._kernels = device.round_kernels()
        self._buffer = device.allocate_host(8 * batch * k)
        self._none = tensor_in(self._buffer, "u32", (batch, 2 * k))
        self._none.array()[...] = NO_TOKEN

    def draft(self, stream: Stream, bufs: StreamBufs) -> None:
        """See :class:`Drafter`."""
        self._kernels.copy_add(stream, CopyWork(self._none, bufs.drafts))

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()


def arm_of(
    engine: Engine, way: Way, stream: RoundStream, expected: list[list[int]], told: Told
) -> Callable[[], Awaitable[float]]:
    """One run from the prompts: seconds a token. Raises VerifyError for other tokens than plain
    decoding makes.
    """

    async def run() -> float:
        starts = engine.rewind(way)
        await stream.start(starts)
        made: list[list[int]] = [[] for _ in starts]
        told.rounds = 0
        began, worked = time.perf_counter(), time.thread_time()
        async for burst in stream.bursts():
            told.rounds += burst.rounds
            for mine, tokens in zip(made, burst.tokens, strict=True):
                mine += tokens
        seconds = time.perf_counter() - began
        told.host_s = time.thread_time() - worked
        told.tokens = sum(map(len, made))
        told.acceptance = stream.acceptance
        if not any(expected):  # the first run is what all others are held to
            for wanted, mine in zip(expected, made, strict=True):
                wanted += mine
        if made != expected:
            pairs = enumerate(zip(made, expected, strict=True))
            places = [(s, _first_other(mine, plain)) for s, (mine, plain) in pairs if mine != plain]
            raise VerifyError(
                f"{way.name} makes other tokens than plain decoding (sequence, token: {places}); "
                "report it"
            )
        return seconds / told.tokens

    return run


def _first_other(mine: list[int], plain: list[int]) -> int:
    """Where two lists begin to differ."""
    return next((i for i, (a, b) in enumerate(zip(mine, plain, strict=False)) if a != b), -1)


def prompts_of(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens out of one text, each from another place."""
    text = np.resize(np.asarray(tokens), length + count)
    return [text[start : start + length].tolist() for start in range(count)]
