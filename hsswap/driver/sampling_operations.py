"""Arguments of the kernels that choose tokens at random, for speculative rounds and plain steps.

Random numbers are counted, not drawn: Philox4x32-10 (J. K. Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC11) of the key ``seed[s]`` and the counter ``(index, block, purpose, 0)``,
where ``index`` is the position in the sequence of the token that is chosen. So a token's numbers do
not depend on rounds, drafts or neighbours. With ``word`` one of the four words of a result:

    u(word) = min((float32(word) + 0.5) * 2**-32, 1 - 2**-24)
    race    = argmax over v of  log w(v) - log(-log1p(-u(word v % 4 of block v // 4)))

The race chooses v with probability w(v) / sum(w) (Gumbel's maximum, as exponentials that race for
the smallest). Of equals the lowest v.

A row's *weights* are those of x = logits / temperature, NaN aside: w(v) = exp(x(v) - max x) where v
is kept, else 0. Kept are, in this order, the ``top_k`` largest, then the largest whose share of the
weights kept so far first reaches ``top_p`` (v is kept while those above it have less than
``top_p``), then those with w(v) >= ``min_p``. Equal ones are kept or left out together, the largest
is always kept. At temperature 0 only the likeliest, of equals the lowest, has a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hsswap.driver.tensor import Tensor


class Purpose(IntEnum):
    """What a random number is for: the third word of its counter."""

    TARGET = 0  # the race that chooses a token; also a drafter's, if it is to agree
    ACCEPT = 1  # whether a draft stands; block 0, word 0
    RESIDUAL = 2  # the race for the token in place of a draft that does not stand
    DRAFT = 3  # the race of a drafter whose draft will be accepted or rejected


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each sequence chooses: ``temperature``, ``top_p`` (1: all) and ``min_p`` (0: all) float32
    ``[S]``, ``top_k`` u32 ``[S]`` (0: all), ``seed`` u32 ``[S, 2]``.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


@dataclass(frozen=True, slots=True)
class SampleWork:
    """A token of each row by the race, for index ``position[s] + plus + r`` and ``purpose``.

    ``logits`` float32 ``[S, R, V]``, ``position`` int32 ``[S]``, ``tokens`` u32 ``[S, R]``; a row
    of NaN gives NO_TOKEN. ``probabilities`` float32 ``[S, R]``, if not None: w(token) / sum(w).
    ``distribution`` float32 ``[S, R, V]``, if not None: w / sum(w), zeros for a row of NaN.
    """

    logits: Tensor
    sampling: Sampling
    position: Tensor
    plus: int
    purpose: Purpose
    tokens: Tensor
    probabilities: Tensor | None = None
    distribution: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RejectWork:
    """Speculative sampling (Y. Leviathan et al., 2211.17192; C. Chen et al., 2302.01318) as the
    choices that AcceptWork compares with the drafts.

    ``logits`` float32 ``[S, K + 1, V]``, ``vtok`` u32 ``[S, K + 1]``, ``brk`` u32 ``[S, 2]``,
    ``pos_start`` int32 ``[S]``, ``preds`` u32 ``[S, K + 1]`` written. Row r chooses for index
    ``pos_start + r + 1``; p is its distribution, and where a draft d follows it (draft ``j = r + 1
    - base``, under ``brk[0]``) q is ``draft_distribution[s, j]`` float32 ``[S, K, V]``, or, where
    that is None, certainty of d.

    The choice is d if u * q(d) < p(d) with u of ACCEPT; else the race over w = max(0, p - q) with
    RESIDUAL's numbers (d, if that is 0 everywhere). A row without a draft behind it races over p
    with TARGET's. A row of NaN gives NO_TOKEN. Rows from ``brk[0] + base`` on may hold anything.
    """

    logits: Tensor
    sampling: Sampling
    pos_start: Tensor
    vtok: Tensor
    brk: Tensor
    preds: Tensor
    draft_distribution: Tensor | None = None
