"""hsswap's own predictors as selectors of the bench: ``codes`` and ``projection``."""

from __future__ import annotations

import numpy as np

from hsswap.bench.predictor_selectors import rounded
from hsswap.bench.predictor_traces import BASIS_TOKENS, Trace
from hsswap.bench.predictor_view import BLOCK, LayerView, best_groups, in_groups
from hsswap.bf16 import F32, to_float32
from hsswap.codec import HeadCodec, corrected, levels_of, shares
from hsswap.config import PredictorConfig
from hsswap.predictor import projection_matrix
from hsswap.predictor.calibration import QUERY_STEP, SINK_TOKENS, HeadSamples, calibrate

RATIOS = {1 / 64: "1/64", 1 / 43: "1/43", 1 / 32: "1/32", 1 / 21: "1/21", 1 / 16: "1/16"}
"""Bytes of codes by bytes of K and V."""


class Codes:
    """The predictor ``codes``, learning from the first 1,024 tokens.

    ``other``: the trace of another text to learn from instead. ``queries``: False learns from keys
    alone, as for a caller that shows no queries of the prompt. ``remembers``: False leaves out what
    attention shows of earlier predictions' errors. The first row tested remembers nothing.
    """

    group_tokens = BLOCK
    metadata_bytes: float | None = None

    def __init__(
        self,
        ratio: float,
        *,
        other: Trace | None = None,
        queries: bool = True,
        remembers: bool = True,
    ) -> None:
        self.name = f"codes {RATIOS[ratio]}"
        self.name += ", learned from another kind of text" if other else ""
        self.name += "" if queries else ", no queries"
        self.name += "" if remembers else ", no memory"
        self.remembers = remembers
        self._ratio, self._other, self._queries = ratio, other, queries
        self._learned = ""
        self.codecs: list[list[HeadCodec]] = []

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``; a trace learned from already costs nothing."""
        if self._learned == trace.name:
            return
        self._learned = trace.name
        source = self._other or trace
        samples = [
            sample for layer in range(trace.layers) for sample in self._samples(source, layer)
        ]
        codecs = calibrate(samples, self._ratio, trace.sizes.length)
        heads = len(codecs) // trace.layers
        self.codecs = [codecs[first : first + heads] for first in range(0, len(codecs), heads)]
        self.metadata_bytes = float(np.mean([codec.block_bytes(BLOCK) for codec in codecs]))

    def _samples(self, trace: Trace, layer: int) -> list[HeadSamples]:
        keys = to_float32(trace.keys(layer)[SINK_TOKENS:BASIS_TOKENS]).astype(np.float64)
        queries = to_float32(trace.basis_queries(layer)[SINK_TOKENS::QUERY_STEP])
        rows, heads, dim = len(queries), keys.shape[1], keys.shape[2]
        grouped = queries.astype(np.float64).reshape(rows, heads, -1, dim)
        at = np.arange(SINK_TOKENS, BASIS_TOKENS)
        return [
            HeadSamples(
                keys=keys[:, head],
                positions=at,
                queries=grouped[:, head] if self._queries else None,
                query_positions=at[::QUERY_STEP] if self._queries else None,
                rope=trace.rope,
                logit_scale=dim**-0.5,
                value_dim=dim,
            )
            for head in range(heads)
        ]

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``: predicted shares of the attention."""
        return self.scores_of_guess(view, view, k)

    def scores_of_guess(self, guess: LayerView, view: LayerView, k: int) -> F32:
        """Shares for approximate queries, with what attention of the true ones showed before."""
        candidates = view.candidates()
        heads, rows = len(view.keys), len(candidates)
        scores = np.empty((heads, rows, candidates.shape[1]), np.float32)
        for head, codec in enumerate(self.codecs[view.layer]):
            mass = self._log_mass(codec, view, head)
            asked = mass if guess is view else self._log_mass(codec, guess, head)
            true = view.block_lse(head) if self.remembers else None
            correction = np.zeros_like(mass[:, 0])
            for row in range(rows):
                resident = guess.resident_lse[head, :, row]
                scores[head, row] = shares(asked[:, row] + correction, resident)
                if true is None:
                    continue
                own = scores[head, row]
                if guess is not view:
                    own = shares(mass[:, row] + correction, view.resident_lse[head, :, row])
                chosen = best_groups(own[None, None], candidates[row : row + 1], k)[0, 0]
                seen = np.full_like(correction, np.nan)
                chosen = chosen[chosen >= 0]
                seen[:, chosen] = true[:, row, chosen]
                correction = corrected(correction, mass[:, row], seen)
        return scores

    @staticmethod
    def _log_mass(codec: HeadCodec, view: LayerView, head: int) -> F32:
        """``[G, S, B]``, as ``hsswap.codec.logits_of`` of packed codes, in one product; -inf for
        what is no candidate.
        """
        levels = levels_of(codec, view.keys[head]).astype(np.float32)
        queries = view.queries[head]
        logits = (queries @ codec.query) @ levels.T + (queries @ codec.centre)[..., None]
        # As hsswap.codec.log_mass, but the greatest logit of a row is taken off and not that of a
        # block, and sums are products, for NumPy is slow along short axes; the least become -inf.
        logits = logits.reshape(*queries.shape[:2], -1)
        best = logits.max(-1, keepdims=True)
        np.exp(logits - best, out=logits)
        with np.errstate(divide="ignore"):
            mass = np.log(in_groups(logits) @ np.ones(BLOCK, np.float32)) + best
        return np.where(view.candidates(), mass, np.float32(-np.inf))


class Projection:
    """The predictor ``projection``: the seed's random matrix, largest product of all."""

    group_tokens = BLOCK
    remembers = False

    def __init__(self, rank: int) -> None:
        self.name = f"projection, rank {rank}"
        self.metadata_bytes: float | None = 2.0 * BLOCK * rank
        self._rank = rank
        self.matrix: F32 = np.empty((0, 0), np.float32)

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``."""
        config = PredictorConfig(rank=self._rank)
        self.matrix = to_float32(projection_matrix(config, trace.keys(0).shape[2]))

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        codes = rounded(view.keys @ self.matrix)  # [H, T, r]
        queries = view.queries @ self.matrix
        heads, group, rows, rank = queries.shape
        flat: F32 = queries.reshape(heads, group * rows, rank)
        logits: F32 = flat @ codes.swapaxes(1, 2)
        best: F32 = in_groups(logits.reshape(heads, group, rows, -1)).max((1, 4))
        return best
