"""The engine of ``hsswap bench rounds`` on a GPU: the torch model over captured steps of a swap."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import hsswap
from hsswap.bench.rounds_arms import Idle, Setting, Way
from hsswap.commands.decoding import dims_of
from hsswap.commands.speculating import EXIT_SHARE
from hsswap.config import SwapConfig
from hsswap.driver.base import Closeable, Device
from hsswap.driver.round_operations import ArgmaxWork, CopyWork, SetWork, TokenRingWork
from hsswap.driver.tensor import tensor_in
from hsswap.models.torch_llama import STEP_ROWS, TorchLlama
from hsswap.models.torch_rounds import TorchRows
from hsswap.models.torch_step import captured
from hsswap.rounds import (
    Drafter,
    Graph,
    NgramDrafter,
    SequenceStart,
    StepsEarlyExit,
    StepsTarget,
    Stream,
)

TILE_TOKENS = 1024


class WatchedGraph(Graph):
    """A graph whose launches are between two of the device's events while ``watch`` is a list."""

    def __init__(self, graph: Graph, torch_stream: Any) -> None:
        self._graph, self._torch_stream = graph, torch_stream
        self.watch: list[tuple[Any, Any]] | None = None

    def launch(self, stream: Stream) -> None:
        """See :class:`Graph`."""
        if self.watch is None:
            self._graph.launch(stream)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._torch_stream)
        self._graph.launch(stream)
        end.record(self._torch_stream)
        self.watch.append((start, end))

    @property
    def closed(self) -> bool:
        """See :class:`Graph`."""
        return self._graph.closed

    def close(self) -> None:
        """See :class:`Graph`."""
        self._graph.close()


class WatchedTarget(StepsTarget):
    """A target whose captured rounds are kept, by the way that runs. No block is final before the
    end: every run goes back to the prompts.
    """

    way = ""

    def __init__(self, *given: Any, torch_stream: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._torch_stream = torch_stream
        self.graphs: dict[str, WatchedGraph] = {}

    async def settle(self, positions: Sequence[int]) -> None:
        """See :class:`StepsTarget`."""
        self._positions = list(positions)

    def capture(
        self, stream: Stream, enqueue: Callable[[], None], skipping: Callable[[Graph], Graph]
    ) -> Graph:
        """See :class:`StepsTarget`."""
        graph = super().capture(stream, enqueue, skipping)
        self.graphs[self.way] = watched = WatchedGraph(graph, self._torch_stream)
        return watched


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
        self._exit_layers = math.ceil(EXIT_SHARE * model.config.layers)
        self._stream = swap.device.stream(torch_stream.cuda_stream)
        self._rows = TorchRows(model, torch_stream)
        self.closing = ExitStack()
        self.target = WatchedTarget(
            *(swap.device, self._stream, sequences, self._rows),
            k=k,
            vocab_size=model.config.vocab_size,
            session_tokens=max(start.capacity - len(start.tokens) for start in starts),
            torch_stream=torch_stream,
        )
        self._plain: PlainSteps | None = None

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
        # Plain steps, drafts and rounds have products of as many rows, and so the same bits.
        rows = max(STEP_ROWS, batch * (k + 1))
        model = TorchLlama(model.config, model.weights, least_rows=rows)
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
                engine.closing.close()
                await engine.target.close()

    def starts(self, way: Way) -> list[SequenceStart]:
        """See Engine; lengths go back when the stream starts."""
        self.target.way = way.name
        return self._starts

    async def plain(self) -> list[list[int]]:
        """See Engine."""
        await self.target.settle([len(start.tokens) for start in self._starts])
        capacities = [start.capacity for start in self._starts]
        await self.target.admit(1, 0, capacities, capacities)
        if self._plain is None or self._plain.steps is not self.target.steps:
            parts = (self._swap.device, self._stream, self.target, self._rows)
            self._plain = self.closing.enter_context(
                PlainSteps(*parts, self._starts, self._torch_stream)
            )
        return self._plain.run()

    def setting(self, way: Way) -> Setting:
        """See Engine."""
        device, batch = self._swap.device, len(self._starts)
        drafter: Drafter = NgramDrafter(device)
        if way.drafter == "early-exit":
            drafter = self.closing.enter_context(
                StepsEarlyExit(device, self.target, self._rows, layers=self._exit_layers)
            )
        history = max(start.capacity for start in self._starts) + 1
        return Setting(device, self._stream, self.target, drafter, self._k, batch, history)

    @contextmanager
    def watched(self, way: Way) -> Iterator[Callable[[], Idle | None]]:
        """See Engine: events of the device before and behind each launch."""
        graph = self.target.graphs.get(way.name)
        if graph is None:
            yield lambda: None
            return
        watch: list[tuple[Any, Any]] = []
        graph.watch = watch
        try:
            yield lambda: idle_of(watch)
        finally:
            graph.watch = None


def idle_of(watch: list[tuple[Any, Any]]) -> Idle:
    """From pairs of events around each round. Waits for them."""
    watch[-1][1].synchronize()
    took = np.array([start.elapsed_time(end) for start, end in watch])
    between = [before[1].elapsed_time(after[0]) for before, after in pairwise(watch)]
    # Rounds that were passed over are at the end, behind those that had something to do.
    busy = int(np.flatnonzero(took > took.max() / 2)[-1]) + 1
    idle_ms = float(np.sum(between[: busy - 1]))
    whole_ms = float(took[:busy].sum()) + idle_ms
    return Idle(1e3 * float(np.median(took[:busy])), idle_ms / whole_ms)


class PlainSteps(Closeable):
    """Greedy steps of all sequences at once, one graph a token, from ``starts`` on."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        target: StepsTarget,
        rows: TorchRows,
        starts: list[SequenceStart],
        torch_stream: Any,
    ) -> None:
        self.steps = target.steps
        self._kernels, self._stream, self._rows = device.round_kernels(), stream, rows
        self._starts, self._torch_stream = starts, torch_stream
        batch, self._count = len(starts), max(s.capacity - len(s.tokens) for s in starts)
        words = batch * (self._count + 3)
        self._buffer = device.allocate(4 * (words + batch * target.vocab_size))
        self._seen = device.allocate_host(4 * words)
        self._whole, self._copy = (
            tensor_in(memory, "u32", (words,)) for memory in (self._buffer, self._seen)
        )
        shape, at = (batch, 1, target.vocab_size), 4 * words
        self._logits = tensor_in(self._buffer, "f32", shape, offset_bytes=at)
        self._ring = tensor_in(self._buffer, "u32", (batch, self._count))
        at = 4 * batch * self._count
        self._tokens = tensor_in(self._buffer, "u32", (batch, 1), offset_bytes=at)
        self._flat = tensor_in(self._buffer, "u32", (batch,), offset_bytes=at)
        self._step = tensor_in(self._buffer, "i32", (batch,), offset_bytes=at + 4 * batch)
        self._entry = tensor_in(self._buffer, "i32", (batch,), offset_bytes=at + 8 * batch)
        self._graph: Any = None

    def run(self) -> list[list[int]]:
        """The tokens behind the pending ones; waits for them."""
        kernels, stream, batch = self._kernels, self._stream, len(self._starts)
        words = self._copy.array()
        words[:] = 0
        words[-3 * batch : -2 * batch] = [start.pending for start in self._starts]
        kernels.copy_add(stream, CopyWork(self._copy, self._whole))
        for steps, start in zip(self.steps, self._starts, strict=True):
            length = replace(steps.length, shape=(1, 1), strides=(4, 4))
            kernels.set_word(stream, SetWork(length, 0, len(start.tokens)))
        with torch.cuda.stream(self._torch_stream):
            for _ in range(self._count):
                if self._graph is not None:
                    self._graph.replay()
                else:  # eager once, which loads what a capture may not
                    self._enqueue()
                    self._graph = captured(self._enqueue)
        kernels.copy_add(stream, CopyWork(self._whole, self._copy))
        stream.synchronize()
        rows: list[list[int]] = words[: batch * self._count].reshape(batch, -1).tolist()
        return rows

    def _enqueue(self) -> None:
        kernels, stream = self._kernels, self._stream
        self._rows(stream, self.steps, self._tokens, self._logits)
        kernels.argmax(stream, ArgmaxWork(self._logits, self._tokens))
        kernels.plain_tok_ring(
            stream, TokenRingWork(self._flat, self._step, self._entry, self._ring)
        )
        kernels.copy_add(stream, CopyWork(self._step, self._step, 1))
        for steps in self.steps:
            steps.advance(1, stream=stream)

    def close(self) -> None:
        """Free everything; nothing runs."""
        self._graph = None
        self._buffer.close()
        self._seen.close()


def _prefill(model: TorchLlama, torch_stream: Any, prompt: list[int], attention: Prefilling) -> int:
    """The token behind a prompt; on a thread that is not the loop's."""
    with torch.cuda.stream(torch_stream):
        return int(model.prefill(prompt, attention).argmax())
