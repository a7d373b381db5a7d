"""What stands in for blocks left out, as a swap learns it from a prompt's last rows.

The same as :mod:`hsswap.lessons`: rows of the prompt, which are never tested, choose once more when
its first new token is there. The blocks of the last 128 tokens are those of that time, so that
earlier rows see fewer of their own last tokens for certain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hsswap.bench.predictor_traces import Trace
from hsswap.bench.predictor_view import (
    BLOCK,
    I64,
    RECENT_BLOCKS,
    LayerView,
    best_groups,
    in_groups,
)
from hsswap.bf16 import F32, from_float32, to_float32
from hsswap.fitting import LESSON_SPAN, LESSON_STEP, fitted, sums_of
from hsswap.predictor.stand_in import StandIn


@dataclass(frozen=True)
class LessonView(LayerView):
    """Rows :data:`LESSON_STEP` apart up to the last before position ``stop``."""

    stop: int

    @classmethod
    def of_prompt(cls, trace: Trace, layer: int, stop: int) -> LessonView:
        """The last rows of the tokens before ``stop``."""
        queries, keys = trace.lesson_queries(layer, stop), trace.keys(layer)[:stop]
        view = LayerView.of(layer, queries, keys, stop - LESSON_SPAN)
        rows = (view.queries[:, :, ::LESSON_STEP], view.logits[:, :, ::LESSON_STEP])
        return cls(layer, view.first, view.keys, *rows, stop)

    @cached_property
    def lengths(self) -> I64:
        """As of ``LayerView``."""
        return self.first + 1 + LESSON_STEP * np.arange(self.queries.shape[2])

    @cached_property
    def cuts(self) -> I64:
        """As of ``LayerView``: that of the first row behind the prompt, for all."""
        cut = ((self.stop + 1) // BLOCK - RECENT_BLOCKS) * BLOCK
        return np.full(self.queries.shape[2], max(cut, BLOCK))


Scores = Callable[[LayerView, int], F32]
"""A method's own ``[H, S, B]``."""


def taught(trace: Trace, layer: int, stop: int, scores: Scores, k: int) -> list[StandIn]:
    """Of each KV head, by the method's own choices of ``k`` blocks for the rows before ``stop``."""
    view = LessonView.of_prompt(trace, layer, stop)
    values = np.ascontiguousarray(to_float32(trace.values(layer)[:stop]).transpose(1, 0, 2))
    best = best_groups(scores(view, k), view.candidates(), k)
    chosen = np.zeros((*best.shape[:2], len(in_groups(values[0].T)[0]) + 1), np.bool_)
    np.put_along_axis(chosen, best, True, -1)  # -1: the column that is left out
    attended = np.repeat(chosen[..., :-1], BLOCK, axis=-1)
    attended = np.pad(attended, ((0, 0), (0, 0), (0, stop - attended.shape[2]))) | view.resident
    learned = []
    for weights, kept, own in zip(view.weights, attended, values, strict=True):
        full = to_float32(from_float32(weights @ own))  # [G, N, d], as the attend has given it
        part = np.where(kept, weights, np.float32(0))
        held = part.sum(-1)
        near = (part @ own) / held[..., None]
        by_row = (one.swapaxes(0, 1) for one in (near, full, np.maximum(1 - held, 0)))
        scale, value = fitted(sums_of(*by_row))
        learned.append(StandIn(scale.astype(np.float32), value.astype(np.float32)))
    return learned
