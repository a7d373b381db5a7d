"""The engine of ``hsswap bench rounds`` on a GPU: the torch model over captured steps of a swap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import torch

import hsswap
from hsswap.bench.rounds_arms import NoDrafts, Way
from hsswap.commands.decoding import dims_of
from hsswap.config import SwapConfig
from hsswap.models.torch_llama import TorchLlama
from hsswap.models.torch_rounds import TorchRows
from hsswap.rounds import (
    Drafter,
    Graph,
    NgramDrafter,
    RoundStream,
    SequenceStart,
    StepsEarlyExit,
    StepsTarget,
    Stream,
)

TILE_TOKENS = 1024
EXIT_SHARE = 0.3
"""Part of the layers that an early exit runs."""

REPLAYS = 20
"""Rounds that are timed back to back."""


class CountedRows(TorchRows):
    """A model's rows whose captured rounds are kept, by the way that runs."""

    def __init__(self, model: TorchLlama, torch_stream: Any) -> None:
        super().__init__(model, torch_stream)
        self.way = ""
        self.graphs: dict[str, Graph] = {}

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """See :class:`TorchRows`."""
        self.graphs[self.way] = graph = super().capture(stream, enqueue)
        return graph


class Prefilling:
    """Attention of a model in a thread through a sequence's calls on the loop."""

    def __init__(self, model: TorchLlama, sequence: hsswap.Sequence) -> None:
        self._arrays, self._sequence = model.arrays, sequence
        self._loop = asyncio.get_running_loop()

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        """See :class:`hsswap.models.torch_llama.TorchAttention`."""
        arrays, stream = self._arrays, self._arrays.stream
        out = arrays.new((*queries.shape[:2], values.shape[2]))

        async def both() -> None:
            await self._sequence.append(layer, keys, values, stream=stream)
            await self._sequence.attend(layer, queries, out, stream=stream)

        asyncio.run_coroutine_threadsafe(both(), self._loop).result()
        return out


class TorchEngine:
    """See :class:`hsswap.bench.rounds_arms.Engine`. All ways share one target and its steps."""

    def __init__(
        self,
        swap: hsswap.HighSpeedSwap,
        model: TorchLlama,
        torch_stream: Any,
        sequences: Sequence[hsswap.Sequence],
        starts: list[SequenceStart],
        k: int,
    ) -> None:
        self._swap, self._torch_stream, self._starts, self._k = swap, torch_stream, starts, k
        self._layers = max(1, round(EXIT_SHARE * model.config.layers))
        self._stream = swap.device.stream(torch_stream.cuda_stream)
        self._rows = CountedRows(model, torch_stream)
        self.drafters = ExitStack()
        longest = max(start.capacity - len(start.tokens) for start in starts)
        self.target = StepsTarget(
            *(swap.device, self._stream, sequences, self._rows),
            k=k,
            vocab_size=model.config.vocab_size,
            session_tokens=longest,
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        model: TorchLlama,
        device: str,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        k: int,
    ) -> AsyncIterator[TorchEngine]:
        """A swap that holds everything in memory, the prompts prefilled."""
        dims, batch = dims_of(model.config), len(prompts)
        longest = max(map(len, prompts)) + tokens + TILE_TOKENS
        blocks = dims.layers * batch * dims.blocks_of(longest)
        ring = 2 * TILE_TOKENS // dims.block_size
        config = SwapConfig(
            dims,
            2 * batch * longest,
            device_slots=blocks + ring,
            host_slots=blocks + ring,
            max_sequences=batch,
            device=device,
            io="memory",
            tile_tokens=TILE_TOKENS,
        )
        torch_stream = torch.cuda.Stream(device)
        async with hsswap.HighSpeedSwap.open(config) as swap, AsyncExitStack() as opened:
            sequences, starts = [], []
            for prompt in prompts:
                sequence = await opened.enter_async_context(swap.sequence())
                attention = Prefilling(model, sequence)

                prefill = partial(_prefill, model, torch_stream, list(prompt), attention)
                first = await asyncio.to_thread(prefill)
                sequences.append(sequence)
                starts.append(SequenceStart(prompt, first, len(prompt) + tokens))
            engine = cls(swap, model, torch_stream, sequences, starts, k)
            try:
                yield engine
            finally:
                await engine.target.close()
                engine.drafters.close()

    def rewind(self, way: Way) -> list[SequenceStart]:
        """See :class:`Engine`; lengths go back when the stream starts."""
        self._rows.way = way.name
        return self._starts

    def plain(self) -> list[list[int]] | None:
        """None: the way without drafts is it."""
        return None

    def stream(self, way: Way) -> RoundStream:
        """See :class:`Engine`."""
        device, batch = self._swap.device, len(self._starts)
        drafter: Drafter
        match way.drafter:
            case "early-exit":
                drafter = self.drafters.enter_context(
                    StepsEarlyExit(device, self.target, self._rows, layers=self._layers)
                )
            case "ngram":
                drafter = NgramDrafter(device)
            case _:
                drafter = self.drafters.enter_context(NoDrafts(device, batch, self._k))
        return RoundStream(
            *(device, self.target, drafter),
            k=self._k,
            rounds=way.rounds,
            batch=batch,
            history_tokens=max(start.capacity for start in self._starts) + 1,
            options=way.options,
            stream=self._stream,
        )

    def round_s(self, way: Way) -> float | None:
        """See :class:`Engine`: a captured round, launched back to back. Its sequences have ended,
        which changes no launch.
        """
        graph = self._rows.graphs.get(way.name)
        if graph is None:
            return None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._torch_stream):
            graph.launch(self._stream)
            start.record()
            for _ in range(REPLAYS):
                graph.launch(self._stream)
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / REPLAYS


def _prefill(model: TorchLlama, torch_stream: Any, prompt: list[int], attention: Prefilling) -> int:
    """The token behind a prompt; on a thread that is not the loop's."""
    with torch.cuda.stream(torch_stream):
        return int(model.prefill(prompt, attention).argmax())
