"""hsswap's own predictors as selectors of the bench: ``codes`` and ``projection``."""

from __future__ import annotations

from typing import Literal, TypeVar

import numpy as np

from hsswap.bench.predictor_lessons import taught
from hsswap.bench.predictor_selectors import Plain, Selector, rounded
from hsswap.bench.predictor_traces import BASIS_TOKENS, Trace
from hsswap.bench.predictor_view import BLOCK, Bool, LayerView, best_groups, in_groups
from hsswap.bf16 import F32, to_float32
from hsswap.codec import HeadCodec, corrected, levels_of, shares
from hsswap.config import PredictorConfig
from hsswap.predictor import projection_matrix
from hsswap.predictor.calibration import (
    QUERY_STEP,
    SINK_TOKENS,
    HeadSamples,
    calibrate,
    stand_ins,
)
from hsswap.predictor.stand_in import StandIn, with_stand_in

RATIOS = {1 / 64: "1/64", 1 / 43: "1/43", 1 / 32: "1/32", 1 / 21: "1/21", 1 / 16: "1/16"}
"""Bytes of codes by bytes of K and V."""


class Codes(Plain):
    """The predictor ``codes``, learning from the first 1,024 tokens.

    ``other``: the trace of another text to learn from instead. ``queries``: False learns from keys
    alone, as for a caller that shows no queries of the prompt. ``remembers``: False leaves out what
    attention shows of earlier predictions' errors. The first row tested remembers nothing.
    ``stand_in``: what makes up for what is left out: learned from the prompt's last rows, or as
    where there are none, from its first 1,024 tokens, or nothing.
    """

    def __init__(
        self,
        ratio: float,
        *,
        other: Trace | None = None,
        queries: bool = True,
        remembers: bool = True,
        stand_in: Literal["last rows", "first tokens", "none"] = "last rows",
    ) -> None:
        self.name = f"codes {RATIOS[ratio]}"
        self.name += ", learned from another kind of text" if other else ""
        self.name += "" if queries else ", no queries"
        self.name += "" if remembers else ", no memory"
        if stand_in != "last rows":
            self.choice_of = self.name
            self.name += f", stand-in: {stand_in}"
        self.remembers = remembers
        self._from = stand_in
        self._ratio, self._other, self._queries = ratio, other, queries
        self._trace: Trace | None = None
        self.codecs: dict[int, list[HeadCodec]] = {}
        self._stand_ins: dict[int, list[StandIn]] = {}
        self._k = 0
        self._shares = np.empty((0, 0, 0), np.float32)
        self._log_masses: list[F32] = []

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``; a trace learned from already costs nothing."""
        if self._trace is not None and self._trace.name == trace.name:
            return
        self._trace = trace
        samples = samples_of(self._other or trace, with_queries=self._queries)
        codecs = calibrate(samples, self._ratio, trace.sizes.length)
        self.codecs = by_layer(codecs, trace)
        if self._from == "first tokens":
            self._stand_ins = by_layer(stand_ins(samples), trace)
        self.metadata_bytes = float(np.mean([codec.block_bytes(BLOCK) for codec in codecs]))

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``: predicted shares of the attention."""
        self._k = k
        return self.scores_of_guess(view, view, k)

    def left_out(self, chosen: Bool, view: LayerView) -> F32:
        """The predicted share left out ``[H, S]`` of the view last scored: without corrections,
        which are known of what was attended only.
        """
        rest = view.candidates() & ~chosen
        share: F32 = np.where(rest, self._shares, np.float32(0)).sum(-1)
        return share

    def made_up(self, view: LayerView, chosen: Bool, out: F32) -> F32:
        """As of ``Selector``."""
        if self._from == "none":
            return out
        predicted = np.exp(np.stack(self._log_masses) - view.total_lse[..., None])
        rest = np.where(chosen[:, None], np.float32(0), predicted).sum(-1)
        held = np.where(chosen[:, None], view.query_mass(), np.float32(0)).sum(-1)
        held += np.exp(view.resident_lse - view.total_lse)
        assert self._trace is not None
        if self._from == "first tokens":
            own = self._stand_ins[view.layer]
        else:
            own = taught(self._trace, view.layer, view.first, self.scores, self._k)
        return made_up(out, rest / (rest + held), own)

    def scores_of_guess(self, guess: LayerView, view: LayerView, k: int) -> F32:
        """Shares for approximate queries, with what attention of the true ones showed before."""
        candidates = view.candidates()
        heads, rows = len(view.keys), len(candidates)
        scores = np.empty((heads, rows, candidates.shape[1]), np.float32)
        self._shares = np.empty_like(scores)
        self._log_masses = []
        for head, codec in enumerate(self.codecs[view.layer]):
            mass = self._log_mass(codec, view, head)
            asked = mass if guess is view else self._log_mass(codec, guess, head)
            self._log_masses.append(asked)
            self._shares[head] = _plain_shares(asked, guess.resident_lse[head])
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


def samples_of(trace: Trace, *, with_queries: bool = True) -> list[HeadSamples]:
    """What a swap sees of a trace's first 1,024 tokens, by layer and KV head."""
    return [
        sample
        for layer in trace.ranked
        for sample in _samples_of_layer(trace, layer, with_queries=with_queries)
    ]


def _samples_of_layer(trace: Trace, layer: int, *, with_queries: bool) -> list[HeadSamples]:
    keys = to_float32(trace.keys(layer)[:BASIS_TOKENS]).astype(np.float64)
    values = to_float32(trace.values(layer)[:BASIS_TOKENS]).astype(np.float64)
    queries = to_float32(trace.basis_queries(layer)[SINK_TOKENS::QUERY_STEP])
    rows, heads, dim = len(queries), keys.shape[1], keys.shape[2]
    grouped = queries.astype(np.float64).reshape(rows, heads, -1, dim)
    return [
        HeadSamples(
            keys=keys[:, head],
            values=values[:, head],
            positions=np.arange(BASIS_TOKENS),
            queries=grouped[:, head] if with_queries else None,
            query_positions=np.arange(SINK_TOKENS, BASIS_TOKENS, QUERY_STEP)
            if with_queries
            else None,
            rope=trace.rope,
            logit_scale=dim**-0.5,
            group_size=grouped.shape[2],
            value_dim=dim,
        )
        for head in range(heads)
    ]


T = TypeVar("T")


def by_layer(of_heads: list[T], trace: Trace) -> dict[int, list[T]]:
    """What there is one of for each KV head, as a list for each ranked layer."""
    heads = len(of_heads) // len(trace.ranked)
    return {
        layer: of_heads[number * heads : (number + 1) * heads]
        for number, layer in enumerate(trace.ranked)
    }


def made_up(out: F32, share: F32, stand_in: list[StandIn]) -> F32:
    """Outputs ``[H, G, S, d]`` with what stands in for shares left out ``[H, G, S]``."""
    by_row = out.transpose(0, 2, 1, 3)
    parts = zip(by_row, share.swapaxes(1, 2), stand_in, strict=True)
    return np.stack([with_stand_in(*part) for part in parts]).transpose(0, 2, 1, 3)


def _plain_shares(mass: F32, resident: F32) -> F32:
    """``[S, B]`` as ``hsswap.codec.shares``, of all rows at once: ``[G, S, B]``, ``[G, S]``."""
    best = np.maximum(mass.max(-1), resident)
    part: F32 = np.exp(mass - best[..., None])
    part /= (part.sum(-1) + np.exp(resident - best))[..., None]
    mean: F32 = part.mean(0)
    return mean


class MadeUp(Plain):
    """Another method whose left-out mass, which it is told, has a stand-in: what that alone is
    worth to any choice.
    """

    def __init__(self, chooser: Selector) -> None:
        self.name = f"{chooser.name}, stand-in"
        self.choice_of = chooser.name
        self.group_tokens = chooser.group_tokens
        self.remembers = chooser.remembers
        self._chooser = chooser
        self._trace: Trace | None = None
        self._k = 0

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``."""
        self._chooser.learn(trace)
        self.metadata_bytes = self._chooser.metadata_bytes
        self._trace = trace

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        self._k = k
        return self._chooser.scores(view, k)

    def made_up(self, view: LayerView, chosen: Bool, out: F32) -> F32:
        """As of ``Selector``."""
        rest = view.candidates() & ~chosen
        share: F32 = np.where(rest[:, None], view.query_mass(), np.float32(0)).sum(-1)
        assert self._trace is not None
        own = taught(self._trace, view.layer, view.first, self._chooser.scores, self._k)
        return made_up(out, share, own)


class Projection(Plain):
    """The predictor ``projection``: a random matrix, largest product of all."""

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
