"""``hsswap generate --speculate``: tokens in bursts of rounds (:mod:`hsswap.rounds`)."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hsswap.bf16 import F32
from hsswap.commands.decoding import (
    Decoder,
    Model,
    Run,
    Speculated,
    Step,
    SwapAttention,
    must_read_blocks,
)
from hsswap.commands.verify import AttentionVerifier
from hsswap.driver import open_device
from hsswap.errors import DeviceError, HsswapError
from hsswap.models import Llama
from hsswap.rounds import (
    Admission,
    Burst,
    Drafter,
    NgramDrafter,
    RoundStream,
    SequenceStart,
)
from hsswap.rounds.host_target import EarlyExitDrafter, HostTarget
from hsswap.sync import BlockingSequence, BlockingSwap

EXIT_SHARE = 0.3
"""Part of the layers that an early exit runs, rounded up: 9 of SmolLM2's 30."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What ``--speculate``, ``--draft`` and ``--rounds`` ask for."""

    drafter: str
    k: int
    rounds: int


class SwappedSequence:
    """:class:`hsswap.rounds.host_target.HostSequence` of a NumPy Llama whose cache is swapped.

    With a ``verifier`` every pass is checked when it ends; ``verify_s`` is what that took.
    """

    def __init__(
        self,
        model: Llama,
        sequence: BlockingSequence,
        attention: SwapAttention,
        verifier: AttentionVerifier | None = None,
    ) -> None:
        self.verify_s = 0.0
        self._model, self._sequence, self._attention = model, sequence, attention
        self._verifier = verifier
        self._exit_layers = math.ceil(EXIT_SHARE * model.config.layers)

    def truncate(self, length: int) -> None:
        """See the protocol."""
        if self._sequence.length > length:
            self._sequence.truncate(length)
            if self._verifier is not None:
                self._verifier.truncate(length)

    def verify(self, tokens: Sequence[int], position: int) -> F32:
        """See the protocol."""
        logits = self._model.forward(
            tokens, position, self._attention, all_logits=True, rows_apart=True
        )
        self._check()
        return logits

    def exit_early(self, token: int, position: int) -> F32:
        """See the protocol."""
        logits = self._model.forward([token], position, self._attention, layers=self._exit_layers)
        self._check()
        return logits

    def _check(self) -> None:
        if self._verifier is not None:
            start = time.perf_counter()
            self._verifier.check()
            self.verify_s += time.perf_counter() - start


class Running(NamedTuple):
    """A round stream, and how this thread waits for its coroutines."""

    stream: RoundStream
    wait: Callable[[Coroutine[Any, Any, Any]], Any]


class SpeculativeDecoder(Decoder, ABC):
    """A :class:`Decoder` whose tokens come in bursts. They are the same, bit for bit."""

    def __init__(
        self,
        model: Model,
        swap: BlockingSwap,
        sequence: BlockingSequence,
        attention: SwapAttention,
        speculation: Speculation,
        *,
        verifier: AttentionVerifier | None = None,
        checkpoint: Callable[[], None],
    ) -> None:
        super().__init__(model, swap, attention, verifier=verifier, checkpoint=checkpoint)
        self._speculation, self._sequence = speculation, sequence
        self._vocab_size = model.config.vocab_size

    @abstractmethod
    def _opened(self, last: int, stops: int) -> AbstractContextManager[Running]:
        """A stream for a sequence of ``last`` tokens at most; the block's end closes it."""

    @abstractmethod
    def _verify_s(self) -> float:
        """Seconds that verification took in rounds so far."""

    def _rest(
        self, run: Run, prompt: list[int], count: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        asked = self._speculation
        run.speculated = Speculated(asked.drafter, asked.k, asked.rounds)
        last = len(prompt) + count - 1  # the last token's K and V are not needed
        with self._opened(last, len(stop_ids)) as running:
            start = SequenceStart(prompt, run.tokens[-1], last)
            running.wait(running.stream.start([start], sorted(stop_ids)))
            yield from self._bursts(run, running)
        if self._sequence.length > run.context_tokens - 1:
            self._sequence.truncate(run.context_tokens - 1)

    def _bursts(self, run: Run, running: Running) -> Iterator[int]:
        stream, bursts = running.stream, running.stream.bursts()
        assert run.speculated is not None
        counts, since, verified_s = self._swap.statistics(), time.perf_counter(), 0.0
        while (burst := self._next(running, bursts)) is not None:
            before, counts = counts, self._swap.statistics()
            start, since = since, time.perf_counter()
            already_s, verified_s = verified_s, self._verify_s()
            seconds = since - start - (verified_s - already_s)
            tokens, run.speculated.acceptance = burst.tokens[0], stream.acceptance
            run.speculated.why = run.speculated.why or burst.why
            run.decode_s += seconds
            run.steps += Step.between(before, counts, seconds).shared_by(len(tokens))
            for _ in range(burst.rounds):
                self._count_must_read(run, self._swap.config, run.context_tokens - 1)
            for token in tokens:
                run.tokens.append(token)
                yield token
            if burst.errors[0] is not None:
                raise burst.errors[0]
            self._checkpoint()

    def _next(self, running: Running, bursts: AsyncIterator[Burst]) -> Burst | None:
        async def following() -> Burst | None:
            return await anext(bursts, None)

        try:
            burst: Burst | None = running.wait(following())
            return burst
        except DeviceError as error:
            self._checkpoint()  # a signal ended the pass
            if isinstance(error.__cause__, HsswapError):
                raise error.__cause__ from error
            raise


class HostSpeculativeDecoder(SpeculativeDecoder):
    """With a :class:`~hsswap.models.Llama` in NumPy."""

    def __init__(self, model: Llama, *given: Any, **options: Any) -> None:
        super().__init__(model, *given, **options)
        self._swapped = SwappedSequence(model, self._sequence, self._attention, self._verifier)

    def _verify_s(self) -> float:
        return self._swapped.verify_s

    @contextmanager
    def _opened(self, last: int, stops: int) -> Iterator[Running]:
        asked, sequence = self._speculation, self._swapped
        with (
            asyncio.Runner() as runner,
            open_device("host") as device,
            HostTarget(
                *(device, [sequence]),
                k=asked.k,
                vocab_size=self._vocab_size,
                admission=self._admit,
            ) as target,
        ):
            drafter: Drafter = NgramDrafter(device)
            if asked.drafter == "early-exit":
                drafter = EarlyExitDrafter([sequence])
            stream = RoundStream(
                *(device, target, drafter),
                k=asked.k,
                rounds=asked.rounds,
                history_tokens=last + 1,
                stops=stops,
            )
            try:
                yield Running(stream, runner.run)
            finally:
                runner.run(stream.close())

    def _admit(self, rounds: int, under_way: int, ends: Sequence[int]) -> Admission:
        """One round at a time where a pass must read from disk: whoever reads may have to wait, and
        is to see each token then.
        """
        blocks = must_read_blocks(self._swap.config, ends[0])
        if not blocks:
            return Admission(rounds)
        return Admission(
            0 if under_way else 1,
            f"{blocks} blocks are only on disk at the end; more --slots or --host-slots help",
        )
