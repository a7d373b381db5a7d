"""The ranges of the codes' quantisers, and the codec of a head made of its basis.

Dims of three bits and more reach from the 0.02nd to the 99.98th percentile of the samples: keys far
out are those that win, and cutting the leading dims at 3 sigma cost 11 points of recall. Dims of
one and two bits hold little and take the range of least squared error (Lloyd 1982, with the levels
kept equally far apart so that a logit is linear in the level: 1 % more error at two bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.codec import HeadCodec
from hsswap.predictor.basis import HeadBasis
from hsswap.rope import F64

PERCENTILES = (0.02, 99.98)
COARSE_BITS = 2
WIDTHS = np.arange(0.6, 6.01, 0.1)
"""Ranges tried for coarse dims, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Level u of a dim stands for ``low + step (u + 1/2)``; both ``[m]`` float64."""

    low: F64
    step: F64


def quantiser_of(samples: F64, bits: NDArray[np.uint8]) -> Quantiser:
    """Ranges for code dims from samples ``[S, m]`` in the basis; ``bits`` ``[m]``, 1 and more."""
    levels = 1 << bits.astype(np.int64)
    low, high = np.percentile(samples, PERCENTILES, axis=0)
    for dim in np.flatnonzero(bits <= COARSE_BITS).tolist():
        low[dim], high[dim] = _least_error(samples[:, dim], int(levels[dim]))
    # A dim without any spread still needs cells that are not empty.
    tiny = 1e-6 * np.maximum(1, np.abs(low))
    return Quantiser(low, np.maximum(high - low, tiny) / levels)


def _least_error(samples: F64, levels: int) -> tuple[float, float]:
    """The range of :data:`WIDTHS` whose levels are nearest to the samples by mean square."""
    mean, spread = samples.mean(), max(samples.std(), 1e-30)
    z = np.sort((samples - mean) / spread)
    sums = np.concatenate(([0.0], np.cumsum(z)))
    step = WIDTHS[:, None] / levels
    between = (np.arange(1, levels) - levels / 2) * step  # where levels meet
    first = np.searchsorted(z, between)
    ends = np.pad(first, ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(z))))
    counts, totals = np.diff(ends), np.diff(sums[ends])
    level = (np.arange(levels) - levels / 2 + 0.5) * step
    # The sum of (z - level)^2, without that of z^2, which is the same for every width.
    error = (counts * np.square(level) - 2 * totals * level).sum(1)
    half = float(WIDTHS[error.argmin()] / 2 * spread)
    return mean - half, mean + half


def codec_of(
    basis: HeadBasis, bits: NDArray[np.uint8], samples: F64, logit_scale: float
) -> HeadCodec:
    """The codec of one KV head.

    ``bits`` ``[dk]`` from :func:`~hsswap.predictor.bits.allocate_bits`; ``samples`` ``[S, dk]`` are
    keys, spread over the context as :func:`~hsswap.predictor.basis.rotated_samples` does.
    """
    kept = np.flatnonzero(bits)
    encode, query = basis.encode[:, kept], basis.query[:, kept]
    ranges = quantiser_of((samples - basis.mean) @ encode, bits[kept])
    middle = ranges.low + ranges.step / 2
    return HeadCodec(
        encode=(encode / ranges.step).astype(np.float32),
        bias=(-(basis.mean @ encode + ranges.low) / ranges.step).astype(np.float32),
        query=(query * ranges.step * logit_scale).astype(np.float32),
        centre=((basis.mean + query @ middle) * logit_scale).astype(np.float32),
        bits=bits[kept],
    )
