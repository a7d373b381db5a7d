"""What ``hsswap bench predictor`` compares: rules that rank blocks, each from its paper.

All see exactly the same queries and the same resident tokens. What a method keeps of a key is
rounded to BF16. Where a paper leaves open how the query heads of a KV head share one choice, the
better way of those named beside the rule is taken.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hsswap.bench.predictor_traces import Trace
from hsswap.bench.predictor_view import BLOCK, Bool, LayerView, in_groups
from hsswap.bf16 import F32, from_float32, to_float32


class Selector(Protocol):
    """A rule. ``learn`` comes first, ``scores`` for layers in order.

    ``group_tokens``: tokens that are chosen together. ``metadata_bytes``: bytes kept for 16 tokens
    and one KV head in the mean of all layers, known once it has learned; None for a control that
    no system could be. ``remembers``: whether scores depend on k. ``choice_of``: the method of the
    same choice, if one differs only in what is made of it.
    """

    name: str
    group_tokens: int
    metadata_bytes: float | None
    remembers: bool
    choice_of: str | None

    def learn(self, trace: Trace) -> None:
        """Take from the prompt what the rule learns; never from the tested window."""

    def scores(self, view: LayerView, k: int) -> F32:
        """``[H, S, B]``: a higher score is a better block; -inf: never. Only candidates count.

        ``k``: how many blocks a row attends, for rules that learn from what was attended.
        """

    def made_up(self, view: LayerView, chosen: Bool, out: F32) -> F32:
        """Outputs ``[H, G, S, d]`` over the ``chosen`` groups ``[H, S, B]`` and the residents, with
        what the method puts in the place of the rest. The view is that of the last scores.
        """


class Plain:
    """A rule that learns nothing."""

    group_tokens = BLOCK
    metadata_bytes: float | None = None
    remembers = False
    choice_of: str | None = None

    def learn(self, trace: Trace) -> None:
        """Nothing."""

    def made_up(self, view: LayerView, chosen: Bool, out: F32) -> F32:
        """As of ``Selector``: nothing is."""
        return out


class Oracle(Plain):
    """The true mass."""

    name = "oracle"

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        return view.mass()


class ExactLogits(Plain):
    """True keys, but KVSwap's rule: largest mean logit. What a rule without a softmax costs."""

    name = "exact logits"

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        mean = view.logits.mean(1)
        best: F32 = in_groups(mean).max(-1)
        return best


class LastStep(Plain):
    """The true mass of the row before: what perfect knowledge of the past is worth."""

    name = "last step"

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        mass = view.mass()
        before = np.empty_like(mass)
        before[:, 1:] = mass[:, :-1]
        before[:, 0] = np.arange(mass.shape[-1])  # nothing is known yet: the latest
        return before


class Random(Plain):
    """Blocks at random."""

    name = "random"
    metadata_bytes: float | None = 0.0

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        heads, _, rows, _ = view.queries.shape
        random = np.random.default_rng(view.layer)
        return random.random((heads, rows, view.keys.shape[1] // BLOCK), np.float32)


class ResidentOnly(Plain):
    """No block at all."""

    name = "resident only"
    metadata_bytes: float | None = 0.0

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        heads, _, rows, _ = view.queries.shape
        return np.full((heads, rows, view.keys.shape[1] // BLOCK), -np.inf, np.float32)


class MeanKey(Plain):
    """Mean key of a block (ShadowKV's landmarks, arXiv 2410.21465).

    The larger softmax over blocks of the group's query heads.
    """

    name = "mean key"

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``."""
        self.metadata_bytes = 2.0 * trace.keys(0).shape[2]

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        means = rounded(view.key_blocks.mean(2))
        best: F32 = _shares(view, _dots(view, means)).max(1)
        return best


class Quest(Plain):
    """Least and greatest key of a block by channel (Quest, arXiv 2406.10774).

    The bound ``sum_i max(q_i m_i, q_i M_i)``; over the group its maximum, or the sum of the
    softmaxes over blocks.
    """

    def __init__(self, *, softmax: bool) -> None:
        self.name = "Quest, softmax" if softmax else "Quest"
        self._softmax = softmax

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``."""
        self.metadata_bytes = 4.0 * trace.keys(0).shape[2]

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        blocks = view.key_blocks
        low, high = blocks.min(2), blocks.max(2)
        q = view.queries
        # max(q m, q M) is q M where q is positive and q m where it is not.
        bound = _dots(view, high, np.maximum(q, 0)) + _dots(view, low, np.minimum(q, 0))
        joined: F32 = _shares(view, bound).sum(1) if self._softmax else bound.max(1)
        return joined


class ArkVale(Plain):
    """Cuboid of a block (ArkVale, NeurIPS 2024): centre c, mean absolute deviation r by channel.

    ``q c + |q| r``; over the group the sum of the softmaxes over blocks.
    """

    name = "ArkVale"

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``."""
        self.metadata_bytes = 4.0 * trace.keys(0).shape[2]

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        blocks = view.key_blocks
        centre = rounded((blocks.min(2) + blocks.max(2)) / 2)
        spread = rounded(np.abs(blocks - centre[:, :, None]).mean(2))
        value = _dots(view, centre) + _dots(view, spread, np.abs(view.queries))
        joined: F32 = _shares(view, value).sum(1)
        return joined


class KvSwap(Plain):
    """KVSwap's rule (arXiv 2511.11907): the layer's keys of all heads in ``r`` common dims.

    Singular vectors of keys side by side, mean kept, learned offline; queries averaged over all
    heads, greatest token of a group, one choice for all heads. ``sigma = H d / r``. ``offline``:
    other text; None: the prompt's own keys, which the paper does not have.
    """

    def __init__(self, sigma: int, offline: Trace | None, *, group_tokens: int = BLOCK) -> None:
        self.name = f"KVSwap, sigma {sigma}" + ("" if offline else ", own keys")
        if group_tokens != BLOCK:
            self.name += f", groups of {group_tokens}"
        self.group_tokens = group_tokens
        self.metadata_bytes: float | None = None
        self._sigma, self._offline = sigma, offline
        self._vectors: dict[int, F32] = {}

    def learn(self, trace: Trace) -> None:
        """As of ``Selector``."""
        source = self._offline or trace
        self._vectors = {}
        for layer in trace.ranked:
            keys = to_float32(source.keys(layer)[: source.sizes.length - source.sizes.window])
            flat = keys.reshape(len(keys), -1)
            width = flat.shape[1]
            vectors = np.linalg.eigh(flat.T.astype(np.float64) @ flat)[1]
            rank = width // self._sigma
            best = vectors[:, ::-1][:, :rank].astype(np.float32)
            self._vectors[layer] = rounded(best).reshape(*keys.shape[1:], rank)
        heads = trace.keys(0).shape[1]
        self.metadata_bytes = BLOCK * 2.0 * rank / heads

    def scores(self, view: LayerView, k: int) -> F32:
        """As of ``Selector``."""
        vectors = self._vectors[view.layer]  # [H, d, r]
        low = rounded((view.keys @ vectors).sum(0))  # [T, r]
        query = (view.queries.mean(1) @ vectors).mean(0)  # [S, r]
        logits = query @ low.T
        groups = in_groups(logits, self.group_tokens).max(-1)
        return np.broadcast_to(groups, (len(view.keys), *groups.shape))


def rounded(values: F32) -> F32:
    """To BF16 and back."""
    return to_float32(from_float32(values))


def _dots(view: LayerView, summaries: F32, queries: F32 | None = None) -> F32:
    """Scaled products of queries ``[H, G, S, d]`` and ``[H, B, d]``: ``[H, G, S, B]``."""
    q = view.queries if queries is None else queries
    flat: F32 = q.reshape(len(q), -1, q.shape[-1]) * np.float32(q.shape[-1] ** -0.5)
    dots: F32 = flat @ summaries.swapaxes(1, 2)
    return dots.reshape(*q.shape[:3], -1)


def _shares(view: LayerView, values: F32) -> F32:
    """Softmax over the candidates ``[H, G, S, B]``."""
    usable = np.where(view.candidates(), values, np.float32(-np.inf))
    shares: F32 = np.exp(usable - usable.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return shares
