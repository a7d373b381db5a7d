"""The Llama in torch as target of speculative rounds on a GPU, and as early-exit drafter.

A round's passes run on one torch stream, which is the round stream's too, and are captured with the
rest of the round in one CUDA graph. A model with ``least_rows`` of a whole verify (sequences times
K + 1) gives a row of it the bits of a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hsswap.models.torch_llama import TorchLlama
from hsswap.models.torch_step import captured, on_device
from hsswap.rounds import Graph, Steps, Stream, Tensor


class TorchRows:
    """The model as :class:`hsswap.rounds.RowsModel`, on ``torch_stream``.

    None is for a model on the CPU: its passes run at once, in turns with the work of the round
    stream, and cannot be captured.
    """

    def __init__(self, model: TorchLlama, torch_stream: Any) -> None:
        self._model, self._torch_stream = model, torch_stream
        self._last = model.config.context_tokens - 1

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
        return RowsAttention(self._model, stream, steps, rows)

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """See :class:`hsswap.rounds.RowsModel`."""
        with self._on_torch_stream():
            return TorchGraph(captured(enqueue, keep=True), self._torch_stream)

    def _on_torch_stream(self) -> AbstractContextManager[Any]:
        if self._torch_stream is None:
            return nullcontext()
        streaming: AbstractContextManager[Any] = torch.cuda.stream(self._torch_stream)
        return streaming


class RowsAttention:
    """:class:`~hsswap.models.torch_llama.TorchAttention` of ``rows`` rows of each of ``steps``, one
    sequence after the other: they are appended behind its length and attended, and not counted.
    """

    def __init__(
        self, model: TorchLlama, stream: Stream, steps: Sequence[Steps], rows: int
    ) -> None:
        self._arrays, self._stream, self._steps, self._rows = model.arrays, stream, steps, rows

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`~hsswap.models.torch_llama.TorchAttention`."""
        arrays, stream, rows = self._arrays, self._stream, self._rows
        out = arrays.new((*queries.shape[:2], values.shape[2]))
        for s, steps in enumerate(self._steps):
            mine = slice(s * rows, (s + 1) * rows)
            added = (arrays.for_swap(array[mine]) for array in (keys, values))
            steps.append(layer, *added, stream=stream)
            asked = (arrays.for_swap(array[mine]) for array in (queries, out))
            steps.attend(layer, *asked, stream=stream)
        if arrays.stream is None:
            stream.synchronize()
        return out


class TorchGraph(Graph):
    """A CUDA graph that torch captured, so that torch's memory in it is its own."""

    def __init__(self, graph: Any, torch_stream: Any) -> None:
        self._graph, self._torch_stream = graph, torch_stream

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
