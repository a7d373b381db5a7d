"""The directions in which a KV head's keys matter to its queries.

Names and shapes, for one KV head (G query heads, dk dims, T tokens):

| function | takes | gives |
|---|---|---|
| ``rotated_samples`` | keys ``[T, dk]``, positions ``[T]`` | the same, elsewhere ``[4 T, dk]`` |
| ``second_moments`` | keys ``[T, dk]``, queries ``[T, G, dk]`` or None | :class:`Moments` |
| ``basis_of`` | :class:`Moments`, logit scale | :class:`HeadBasis`: ``encode``, ``query`` |

The expected square of the error that a coarse key k' makes in a logit, E[(q . (k - k'))^2], is
tr(Sq C) for the queries' second moment Sq and the errors' C. It is least per kept number in the
eigenvectors W of Sq^1/2 Ck Sq^1/2: keys are coded as (k - mean) Sq^1/2 W and queries as
q Sq^-1/2 W, whose products are q . (k - mean). Without queries Sq is the identity and the mean 0:
the uncentred PCA of Loki (arXiv 2406.02542).

A prompt's first tokens stand at early positions only, where slow pairs of RoPE have hardly turned:
a basis of them as they are is useless later (recall 0.28 to 0.40 instead of 0.74 on a small Llama).
So samples are turned back and on to random positions of the whole context, queries to its later
half, since late queries see the most keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ArgumentError
from hsswap.rope import F64, Rope, turn

TURNS = 4
"""Random positions each sample is turned to."""

FLOOR = 0.02
"""Of the mean eigenvalue of Sq, added to all. A prompt's beginning holds few queries that look for
an exact token: at 0.001 a small Llama recalled 47 of 54 planted digits at 1/32, at 0.02 52."""

LEAST_MOMENT = 1e-30
"""Queries under it are as good as none: a head that only fills up a tensor has zeros."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Float64 ``key_mean`` ``[dk]``, ``key_covariance`` and ``query_moment`` ``[dk, dk]``; without
    queries the mean is 0, the covariance uncentred and ``query_moment`` None.
    """

    key_mean: F64
    key_covariance: F64
    query_moment: F64 | None


@dataclass(frozen=True, slots=True)
class HeadBasis:
    """``mean`` ``[dk]``, matrices ``encode`` and ``query`` ``[dk, dk]`` (a column a code dim) and
    ``variance`` ``[dk]``: what each code dim adds to the variance of the logits, falling.
    """

    mean: F64
    encode: F64
    query: F64
    variance: F64


def rotated_samples(
    vectors: F64,
    positions: NDArray[np.int64],
    rope: Rope | None,
    first: int,
    stop: int,
    random: np.random.Generator,
) -> F64:
    """``vectors`` ``[T, ..., dk]`` at :data:`TURNS` random positions from ``first`` to ``stop``.

    Returns ``[TURNS T, ..., dk]``; without a rope the vectors themselves, once.
    """
    if rope is None:
        return vectors
    parts = []
    for _ in range(TURNS):
        to = random.integers(first, max(stop, first + 1), vectors.shape[:-1])
        at = positions.reshape(-1, *[1] * (vectors.ndim - 2))
        parts.append(turn(vectors, to - at, rope))
    return np.concatenate(parts)


def second_moments(
    keys: F64,
    queries: F64 | None,
    positions: NDArray[np.int64],
    rope: Rope | None,
    context_tokens: int,
    seed: int,
    query_positions: NDArray[np.int64] | None = None,
) -> Moments:
    """Moments of one KV head from keys ``[T, dk]`` and its group's queries ``[N, G, dk]``.

    ``positions`` ``[T]``: where the keys stand, ``query_positions`` ``[N]`` (default: the same).
    The first positions of a prompt are outliers (attention sinks) and are better left out. Samples
    are spread over ``context_tokens`` positions. Raises ArgumentError for fewer than 2 keys.
    """
    if len(keys) < 2:
        raise ArgumentError(f"moments of {len(keys)} keys; 2 and more are needed")
    random = np.random.Generator(np.random.PCG64(seed))
    spread = rotated_samples(keys, positions, rope, 0, context_tokens, random)
    dims = keys.shape[-1]
    if queries is None:
        return Moments(np.zeros(dims), spread.T @ spread / len(spread), None)
    at = positions if query_positions is None else query_positions
    turned = rotated_samples(queries, at, rope, context_tokens // 2, context_tokens, random)
    rows = turned.reshape(-1, dims)
    mean = spread.mean(0)
    centred = spread - mean
    return Moments(mean, centred.T @ centred / len(centred), rows.T @ rows / len(rows))


def basis_of(moments: Moments, logit_scale: float) -> HeadBasis:
    """The basis of one KV head, code dims by falling variance of the logits."""
    covariance = moments.key_covariance
    dims = len(covariance)
    moment = moments.query_moment
    if moment is None or np.trace(moment) < LEAST_MOMENT:
        root = inverse = np.eye(dims)
    else:
        floor = FLOOR * np.trace(moment) / dims
        values, vectors = np.linalg.eigh(moment + floor * np.eye(dims))
        values = np.maximum(values, floor / 2)
        root = (vectors * np.sqrt(values)) @ vectors.T
        inverse = (vectors / np.sqrt(values)) @ vectors.T
    variance, directions = np.linalg.eigh(root @ covariance @ root)
    order = np.argsort(-variance, kind="stable")
    directions = directions[:, order]
    return HeadBasis(
        moments.key_mean,
        root @ directions,
        inverse @ directions,
        np.maximum(variance[order], 0) * logit_scale**2,
    )
