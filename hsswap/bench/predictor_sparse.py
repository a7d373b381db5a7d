"""End to end: the model over the last tokens of a context with sparse attention in every layer.

All rows of the window run through a layer together. With the tokens given (teacher forcing) that is
the same as one step after the other: a row's attention needs K and V of the rows before it in the
same layer, which the layer below has just computed from their own sparse outputs. The prompt is
dense, and so is its K and V.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hsswap.bench.predictor_selectors import Selector
from hsswap.bench.predictor_traces import Trace
from hsswap.bench.predictor_view import BLOCK, Bool, LayerView, best_groups
from hsswap.bf16 import F32, U16, from_float32, to_float32
from hsswap.models import Llama

RUN_ROWS = 8


class EndToEnd(NamedTuple):
    """``kl``: mean KL divergence from the dense logits, nats; ``kl_error``: its standard error,
    from the means of :data:`RUN_ROWS` rows that follow each other, since neighbours are alike.
    ``nats``: mean loss of the true tokens. ``digits_right`` of ``digits``: planted digits that the
    greatest logit names.
    """

    kl: float
    kl_error: float
    nats: float
    digits_right: int
    digits: int


class SparseAttention:
    """``hsswap.models.Attention``: residents and the best ``k`` groups of a selector.

    The cache begins as the first ``first`` tokens of a trace.
    """

    def __init__(self, trace: Trace, selector: Selector, k: int, first: int) -> None:
        self._trace, self._selector, self._k, self._first = trace, selector, k, first

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        """As of ``Attention``, for all rows of the window at once."""
        trace, first = self._trace, self._first
        every_key = np.concatenate([trace.keys(layer)[:first], keys])
        every_value = np.concatenate([trace.values(layer)[:first], values])
        view = LayerView.of(layer, queries, every_key, first)
        window = trace.windows[layer]
        if window is not None:
            return self._dense(view, every_value, window)
        chosen = self.chosen(view)
        size = self._selector.group_tokens
        tokens = np.repeat(chosen, size, axis=-1)
        allowed = np.zeros((*tokens.shape[:2], len(every_key)), np.bool_)
        allowed[..., : tokens.shape[2]] = tokens
        allowed |= view.resident
        weights = np.where(allowed[:, None], view.weights, np.float32(0))
        weights /= weights.sum(-1, keepdims=True)
        heads, group, rows, length = weights.shape
        v = np.ascontiguousarray(to_float32(every_value).transpose(1, 0, 2))
        out = (weights.reshape(heads, group * rows, length) @ v).reshape(heads, group, rows, -1)
        out = self._selector.made_up(view, chosen, out)
        return from_float32(out.transpose(2, 0, 1, 3).reshape(queries.shape))

    @staticmethod
    def _dense(view: LayerView, values: U16, window: int) -> U16:
        """Attention over the last ``window`` tokens, of a layer where nothing is chosen."""
        token = np.arange(len(values))
        near = token > view.lengths[:, None] - 1 - window
        weights = np.where(near, view.logits, np.float32(-np.inf))
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads, group, rows, length = weights.shape
        v = np.ascontiguousarray(to_float32(values).transpose(1, 0, 2))
        out = (weights.reshape(heads, group * rows, length) @ v).reshape(heads, group, rows, -1)
        return from_float32(out.transpose(2, 0, 1, 3).reshape(rows, heads * group, -1))

    def chosen(self, view: LayerView) -> Bool:
        """Groups chosen ``[H, S, B]``."""
        size = self._selector.group_tokens
        count = self._k * BLOCK // size
        best = best_groups(self._selector.scores(view, count), view.candidates(size), count)
        groups = np.zeros((*best.shape[:2], view.keys.shape[1] // size + 1), np.bool_)
        np.put_along_axis(groups, best, True, -1)  # -1: the column that is left out
        return groups[..., :-1]


def run_sparse(model: Llama, trace: Trace, selector: Selector, k: int, rows: int) -> EndToEnd:
    """The last ``rows`` tokens of the trace's context, with k blocks a KV head (or as many tokens
    in the selector's own groups).
    """
    length = trace.sizes.length
    first = length - rows
    attention = SparseAttention(trace, selector, k, first)
    tokens = trace.context.tokens
    logits = model.forward(tokens[first:length], first, attention, all_logits=True)
    return compare_logits(trace, logits)


def compare_logits(trace: Trace, logits: F32) -> EndToEnd:
    """Logits of the last rows, two or more, of a trace's context against the dense ones."""
    rows, length = len(logits), trace.sizes.length
    ours, dense = _log_softmax(logits), _log_softmax(trace.logits()[-rows:])
    first = length - rows
    targets = np.array(trace.context.tokens[first + 1 : length + 1])
    digits = np.array([first + row + 1 in trace.context.digits for row in range(rows)])
    right = logits.argmax(1) == targets
    divergence = (np.exp(dense) * (dense - ours)).sum(1)
    size = RUN_ROWS if rows >= 2 * RUN_ROWS else 1
    runs = divergence[: rows // size * size].reshape(-1, size).mean(1)
    return EndToEnd(
        kl=float(divergence.mean()),
        kl_error=float(runs.std(ddof=1) / len(runs) ** 0.5),
        nats=float(-ours[np.arange(rows), targets].mean()),
        digits_right=int(right[digits].sum()),
        digits=int(digits.sum()),
    )


def _log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(1, keepdims=True)
    result: F32 = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
