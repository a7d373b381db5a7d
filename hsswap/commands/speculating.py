"""``hsswap generate --speculate``: tokens in bursts of rounds (:mod:`hsswap.rounds`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from hsswap.bf16 import F32
from hsswap.commands.decoding import (
    Decoder,
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


class SpeculativeDecoder(Decoder):
    """A :class:`Decoder` whose tokens come in bursts. They are the same, bit for bit."""

    def __init__(
        self,
        model: Llama,
        swap: BlockingSwap,
        sequence: BlockingSequence,
        attention: SwapAttention,
        speculation: Speculation,
        *,
        verifier: AttentionVerifier | None = None,
        checkpoint: Callable[[], None],
    ) -> None:
        super().__init__(model, swap, attention, verifier=verifier, checkpoint=checkpoint)
        self._speculation = speculation
        self._vocab_size = model.config.vocab_size
        self._swapped = SwappedSequence(model, sequence, attention, verifier)

    def _rest(
        self, run: Run, prompt: list[int], count: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        asked, sequence = self._speculation, self._swapped
        run.speculated = Speculated(asked.drafter, asked.k, asked.rounds)
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
            last = len(prompt) + count - 1  # the last token's K and V are not needed
            stream = RoundStream(
                *(device, target, drafter),
                k=asked.k,
                rounds=asked.rounds,
                history_tokens=last + 1,
                stops=len(stop_ids),
            )
            try:
                start = SequenceStart(prompt, run.tokens[-1], last)
                runner.run(stream.start([start], sorted(stop_ids)))
                yield from self._bursts(run, stream, runner)
            finally:
                runner.run(stream.close())
            sequence.truncate(run.context_tokens - 1)

    def _bursts(self, run: Run, stream: RoundStream, runner: asyncio.Runner) -> Iterator[int]:
        bursts = stream.bursts()
        assert run.speculated is not None
        counts, since, verified_s = self._swap.statistics(), time.perf_counter(), 0.0
        while (burst := runner.run(self._next(bursts))) is not None:
            before, counts = counts, self._swap.statistics()
            start, since = since, time.perf_counter()
            already_s, verified_s = verified_s, self._swapped.verify_s
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

    async def _next(self, bursts: AsyncIterator[Burst]) -> Burst | None:
        try:
            return await anext(bursts, None)
        except DeviceError as error:
            self._checkpoint()  # a signal ended the pass
            if isinstance(error.__cause__, HsswapError):
                raise error.__cause__ from error
            raise

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
