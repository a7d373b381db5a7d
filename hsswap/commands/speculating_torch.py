"""``hsswap generate --speculate`` with the model in torch: rounds over captured steps."""

from __future__ import annotations

import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hsswap import HighSpeedSwap
from hsswap.commands.speculating import EXIT_SHARE, Running, SpeculativeDecoder
from hsswap.commands.verify import AttentionVerifier
from hsswap.driver.base import Device
from hsswap.models.torch_llama import TorchLlama
from hsswap.models.torch_rounds import RowsAttention, TorchRows
from hsswap.rounds import (
    Drafter,
    NgramDrafter,
    RoundOptions,
    RoundStream,
    Steps,
    StepsEarlyExit,
    StepsTarget,
    Stream,
)


class TorchSpeculativeDecoder(SpeculativeDecoder):
    """On torch's current stream. With a verifier rounds are not captured, and wait for the GPU."""

    def __init__(self, model: TorchLlama, *given: Any, **options: Any) -> None:
        super().__init__(model, *given, **options)
        self._torch_model = model
        self._verifying: VerifiedRows | None = None

    def _verify_s(self) -> float:
        return 0.0 if self._verifying is None else self._verifying.verify_s

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._swap.run(lambda _: work)

    @contextmanager
    def _opened(self, last: int, stops: int) -> Iterator[Running]:
        asked, swap, model = self._speculation, self._swap, self._torch_model
        handle = model.arrays.stream
        torch_stream = None if handle is None else torch.cuda.current_stream()
        rows = TorchRows(model, torch_stream)
        if self._verifier is not None:
            self._verifying = rows = VerifiedRows(model, torch_stream, self._verifier, last)
        device = swap.run(_device_of)
        with device.stream(handle) as stream:
            target = StepsTarget(
                *(device, stream, [self._sequence.awaitable], rows),
                k=asked.k,
                vocab_size=self._vocab_size,
            )
            exit_layers = math.ceil(EXIT_SHARE * model.config.layers)
            try:
                with StepsEarlyExit(device, target, rows, layers=exit_layers) as early_exit:
                    drafter: Drafter = early_exit
                    if asked.drafter == "ngram":
                        drafter = NgramDrafter(device)
                    rounds = RoundStream(
                        *(device, target, drafter),
                        k=asked.k,
                        rounds=asked.rounds,
                        history_tokens=last + 1,
                        stops=stops,
                        options=RoundOptions(captured=handle is not None and not self._verifying),
                        stream=stream,
                    )
                    try:
                        yield Running(rounds, self._wait)
                    finally:
                        self._wait(rounds.close())
            finally:
                self._wait(target.close())


async def _device_of(swap: HighSpeedSwap) -> Device:
    return swap.device


class VerifiedRows(TorchRows):
    """Every pass is waited for and checked; rows from position ``last`` on are nobody's.

    ``verify_s`` is what checking took.
    """

    def __init__(
        self, model: TorchLlama, torch_stream: Any, verifier: AttentionVerifier, last: int
    ) -> None:
        super().__init__(model, torch_stream)
        self.verify_s = 0.0
        self._verifier, self._end = verifier, last

    def __call__(self, *given: Any, **more: Any) -> None:
        """See :class:`hsswap.rounds.RowsModel`."""
        super().__call__(*given, **more)
        start = time.perf_counter()
        self._verifier.check()
        self.verify_s += time.perf_counter() - start

    def attention(self, stream: Stream, steps: Sequence[Steps], rows: int) -> RowsAttention:
        """See :class:`TorchRows`."""
        position = int(self.lengths(steps)[0])  # waits for the rounds in front
        self._verifier.truncate(position)
        checked = max(0, min(rows, self._end - position))
        return _Recorded(self._model, stream, steps, rows, self._verifier, checked)


class _Recorded(RowsAttention):
    """The first ``checked`` rows of each call go to the verifier."""

    def __init__(self, *given: Any) -> None:
        *passed, self._verifier, self._checked = given
        super().__init__(*passed)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`RowsAttention`."""
        out = super().attend(layer, queries, keys, values)
        if self._checked:
            given = (array[: self._checked] for array in (queries, keys, values, out))
            self._verifier.record(layer, *map(self._arrays.on_host, given))
        return out
