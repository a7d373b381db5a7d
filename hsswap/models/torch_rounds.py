"""The Llama in torch as target of speculative rounds on a GPU, and as early-exit drafter.

A round's passes run on one torch stream, which is the round stream's too, and are captured with the
rest of the round in one CUDA graph. Every verify has k + 1 rows, so that a row's matrix products
are the same whatever the round accepts; a plain decode with equal bits has as many rows, of which
all but the first are filler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from hsswap.models.torch_llama import TorchLlama
from hsswap.models.torch_step import StepAttention, captured, on_device
from hsswap.rounds import Graph, Steps, Stream, Tensor


class TorchRows:
    """The model as :class:`hsswap.rounds.RowsModel`, on ``torch_stream``."""

    def __init__(self, model: TorchLlama, torch_stream: Any) -> None:
        self._model, self._torch_stream = model, torch_stream
        self._last = model.config.context_tokens - 1

    def __call__(
        self,
        stream: Stream,
        steps: Steps,
        tokens: Tensor,
        logits: Tensor,
        *,
        layers: int | None = None,
    ) -> None:
        """See :class:`hsswap.rounds.RowsModel`."""
        model, rows = self._model, tokens.shape[0]
        with torch.cuda.stream(self._torch_stream):
            # A drafter's "no token" is -1 here.
            ids = on_device(replace(tokens, dtype="i32"), model.device).clamp(min=0)
            length = on_device(steps.length, model.device)
            places = torch.arange(rows, dtype=torch.int32, device=model.device)
            positions = (length + places).clamp(max=self._last)
            hidden = model.hidden(
                ids, positions, StepAttention(model, cast(Any, steps)), layers=layers
            )
            on_device(logits, model.device).copy_(model.logits(hidden))

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """See :class:`hsswap.rounds.RowsModel`."""
        with torch.cuda.stream(self._torch_stream):
            return TorchGraph(captured(enqueue), self._torch_stream)


class TorchGraph(Graph):
    """A CUDA graph that torch captured, so that torch's memory in it is its own."""

    def __init__(self, graph: Any, torch_stream: Any) -> None:
        self._graph, self._torch_stream = graph, torch_stream

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
