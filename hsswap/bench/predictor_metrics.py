"""Figures of a choice of blocks, layer by layer: recall, mass, and error of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hsswap.bench.predictor_view import BLOCK, I64, LayerView, best_groups, in_groups
from hsswap.bf16 import F32


class Figures(NamedTuple):
    """Means over rows and KV heads.

    ``recall``: share of the k blocks of greatest true mass that were chosen. ``mass``: true mass
    of the chosen over that of those k. ``error``: relative L2 error of the outputs of a KV head's
    queries against attention over everything.
    """

    recall: float
    mass: float
    error: float

    @classmethod
    def mean(cls, figures: Sequence[Figures]) -> Figures:
        """Of several layers or contexts, all counting the same."""
        return cls(*(float(value) for value in np.mean(figures, axis=0)))


class Truth:
    """What a layer's attention is made of, by block, so that every choice is a sum of parts."""

    def __init__(self, view: LayerView, values: F32) -> None:
        """``values``: float32 ``[H, T, d]``."""
        self.view = view
        heads, group, rows, length = view.weights.shape
        weights = view.weights.reshape(heads, group * rows, length)
        blocks = in_groups(weights).swapaxes(1, 2)
        whole = length // BLOCK * BLOCK
        parts = blocks @ values[:, :whole].reshape(heads, -1, BLOCK, values.shape[2])
        self._parts = parts.reshape(heads, -1, group, rows, values.shape[2])
        self._output = (weights @ values).reshape(heads, group, rows, -1)
        kept = np.where(view.resident, view.weights, np.float32(0))
        self._resident_mass = kept.sum(-1)
        self._resident = (kept.reshape(weights.shape) @ values).reshape(self._output.shape)
        self._query_mass = view.query_mass()
        self._mass = view.mass()

    def figures(self, scores: F32, k: int) -> Figures:
        """Those of the k best blocks by ``scores`` ``[H, S, B]``."""
        candidates = self.view.candidates()
        return self._of(best_groups(scores, candidates, k), best_groups(self._mass, candidates, k))

    def _of(self, ours: I64, best: I64) -> Figures:
        hits = ours[..., :, None] == best[..., None, :]
        recall = (hits & (best >= 0)[..., None, :]).any(-1).sum(-1) / np.maximum(
            (best >= 0).sum(-1), 1
        )
        held = _taken(self._mass, ours).sum(-1)
        most = _taken(self._mass, best).sum(-1)
        mass = held / np.maximum(most, np.finfo(np.float32).tiny)
        output = self._attended(ours)
        off = np.sqrt(((output - self._output) ** 2).sum((1, 3)))
        norm = np.sqrt((self._output**2).sum((1, 3)))
        return Figures(float(recall.mean()), float(mass.mean()), float((off / norm).mean()))

    def _attended(self, chosen: I64) -> F32:
        """Output ``[H, G, S, d]`` of the residents and the chosen ``[H, S, k]``."""
        heads, rows, _ = chosen.shape
        head = np.arange(heads)[:, None, None]
        row = np.arange(rows)[:, None]
        there = chosen >= 0
        # [H, S, k, G, d] and [H, S, k, G]
        parts = self._parts[head, chosen, :, row] * there[..., None, None]
        mass = self._query_mass[head, :, row, chosen] * there[..., None]
        total = self._resident_mass + mass.sum(2).transpose(0, 2, 1)
        output: F32 = self._resident + parts.sum(2).transpose(0, 2, 1, 3)
        output /= total[..., None]
        return output


def _taken(mass: F32, chosen: I64) -> F32:
    """``mass`` ``[H, S, B]`` of the chosen ``[H, S, k]``; 0 where there is none."""
    taken = np.take_along_axis(mass, np.maximum(chosen, 0), -1)
    return np.where(chosen >= 0, taken, np.float32(0))
