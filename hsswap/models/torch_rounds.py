"""The Llama in torch as target of speculative rounds on a GPU, and as early-exit drafter.

A round's passes run on one torch stream, which is the round stream's too, and are captured with the
rest of the round in one CUDA graph. A model with ``least_rows`` of a whole verify (sequences times
K + 1) gives a row of it the bits of a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hsswap.models.torch_llama import TorchLlama
from hsswap.models.torch_step import captured, on_device
from hsswap.rounds import Graph, Steps, Stream, Tensor

MOST_BRANCHES = 8
"""Sequences whose attention runs side by side: kernels of a few rows leave most of a GPU idle."""


class TorchRows:
    """The model as :class:`hsswap.rounds.RowsModel`, on ``torch_stream``.

    None is for a model on the CPU: its passes run at once, in turns with the work of the round
    stream, and cannot be captured.
    """

    def __init__(self, model: TorchLlama, torch_stream: Any) -> None:
        self._model, self._torch_stream = model, torch_stream
        self._last = model.config.context_tokens - 1
        self._sides: list[Any] = []

    def __call__(
        self,
        stream: Stream,
        steps: Sequence[Steps],
        tokens: Tensor,
        logits: Tensor,
        *,
        layers: int | None = None,
    ) -> None:
        """See :class:`hsswap.rounds.RowsModel`."""
        model, rows = self._model, tokens.shape[1]
        with self._on_torch_stream():
            if self._torch_stream is None:
                stream.synchronize()
            # A drafter's "no token" is -1 here.
            ids = on_device(replace(tokens, dtype="i32"), model.device).clamp(min=0)
            places = torch.arange(rows, dtype=torch.int32, device=model.device)
            positions = (self.lengths(steps) + places).clamp(max=self._last)
            attention = self.attention(stream, steps, rows)
            hidden = model.hidden(ids.flatten(), positions.flatten(), attention, layers=layers)
            made = model.logits(hidden).view(len(steps), rows, -1)
            on_device(logits, model.device).copy_(made)

    def lengths(self, steps: Sequence[Steps]) -> torch.Tensor:
        """Tokens of each sequence before the pass: int32 ``[batch, 1]``."""
        return torch.stack([on_device(each.length, self._model.device) for each in steps])

    def attention(self, stream: Stream, steps: Sequence[Steps], rows: int) -> RowsAttention:
        """Of one pass."""
        wanted = 0 if self._torch_stream is None else min(len(steps), MOST_BRANCHES) - 1
        while len(self._sides) < wanted:  # in the first pass, which is no capture
            self._sides.append(torch.cuda.Stream(self._model.device))
        return RowsAttention(self._model, stream, steps, rows, self._sides[:wanted])

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """See :class:`hsswap.rounds.RowsModel`."""
        with self._on_torch_stream():
            graph = captured(enqueue, keep=True)
        return TorchGraph(graph, self._torch_stream, stream.take_captured())

    def _on_torch_stream(self) -> AbstractContextManager[Any]:
        if self._torch_stream is None:
            return nullcontext()
        streaming: AbstractContextManager[Any] = torch.cuda.stream(self._torch_stream)
        return streaming


class RowsAttention:
    """:class:`~hsswap.models.torch_llama.TorchAttention` of ``rows`` rows of each of ``steps``,
    which are appended behind its length and attended, and not counted. Sequences take turns on
    ``stream`` and the torch streams ``sides``.
    """

    def __init__(
        self,
        model: TorchLlama,
        stream: Stream,
        steps: Sequence[Steps],
        rows: int,
        sides: Sequence[Any] = (),
    ) -> None:
        self._arrays, self._stream, self._steps, self._rows = model.arrays, stream, steps, rows
        self._sides = sides

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`~hsswap.models.torch_llama.TorchAttention`."""
        arrays, rows = self._arrays, self._rows
        out = arrays.new((*queries.shape[:2], values.shape[2]))
        with self._side_by_side() as streams:
            for s, steps in enumerate(self._steps):
                mine, stream = slice(s * rows, (s + 1) * rows), streams[s % len(streams)]
                added = (arrays.for_swap(array[mine]) for array in (keys, values))
                steps.append(layer, *added, stream=stream)
                asked = (arrays.for_swap(array[mine]) for array in (queries, out))
                steps.attend(layer, *asked, stream=stream)
        if arrays.stream is None:
            self._stream.synchronize()
        return out

    @contextmanager
    def _side_by_side(self) -> Iterator[list[object]]:
        """Streams that begin behind torch's current one, which goes on behind them."""
        for side in self._sides:
            side.wait_stream(torch.cuda.current_stream())
        yield [self._stream, *(side.cuda_stream for side in self._sides)]
        for side in self._sides:
            torch.cuda.current_stream().wait_stream(side)


class TorchGraph(Graph):
    """A CUDA graph that torch captured, so that torch's memory in it is its own. ``reads``: what is
    closed with it.
    """

    def __init__(self, graph: Any, torch_stream: Any, reads: ExitStack) -> None:
        self._graph, self._torch_stream, self._reads = graph, torch_stream, reads

    @property
    def raw(self) -> int:
        """See :class:`Graph`."""
        return int(self._graph.raw_cuda_graph())

    def launch(self, stream: Stream) -> None:
        """See :class:`Graph`; on the torch stream that it was captured on."""
        with torch.cuda.stream(self._torch_stream):
            self._graph.replay()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._graph is None

    def close(self) -> None:
        """Free the graph and its memory. Twice is fine."""
        self._graph = None
        self._reads.close()
