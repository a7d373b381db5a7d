"""How many bits each code dim gets: one threshold over all layers, heads and dims.

A bit more for a Gaussian dim of variance v lowers its squared error by v (D(b) - D(b + 1)), D the
least distortion of a scalar quantiser of b bits (Max 1960). Giving out the bits by falling gain is
the reverse water-filling of rate-distortion theory (Cover and Thomas, section 10.3.3), since gains
fall with b. Variances are those of the logits, so that heads compare with each other: a head that
matches exact tokens has a flat spectrum and gets many bits; equal bits for all heads cost 19 of 42
recalled digits on a small Llama.

An error counts in part by how large it is and in part by how large the head's logits are: a head
whose logits spread wide is sure of its tokens with a coarser code, too. So a head's variances are
divided by the root of their sum, half way between the two. KL at 1/32 on ten texts of that
Llama: 0.033 as they are, 0.022 so, less on each of the ten (on the four that are in no table, by
which this was chosen, 0.031 and 0.022); recall is the same. At 1/64 there is no difference.

A head's bits come in whole planes of 16: what a token's codes are padded to anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hsswap.codec import MAX_BITS, PLANE_BITS
from hsswap.errors import ArgumentError
from hsswap.rope import F64

DISTORTION = np.array([1, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.000640])
"""Of the best quantiser of 0 to 6 bits for a Gaussian of variance 1 (Max 1960, table I)."""


def allocate_bits(variances: Sequence[F64], planes_in_all: int) -> list[NDArray[np.uint8]]:
    """Bits of each dim ``[dk]`` for each head, from its logit variances ``[dk]``, any order.

    ``planes_in_all``: planes of 16 bits a token to give out. Every head gets one or more and at
    most six bits a dim. Raises ArgumentError for fewer planes than heads.
    """
    if planes_in_all < len(variances):
        raise ArgumentError(f"{planes_in_all} planes for {len(variances)} heads; one each at least")
    step = -np.diff(DISTORTION)
    owners, gains, dims = [], [], []
    for head, variance in enumerate(variances):
        total = variance.sum()
        gain = np.outer(variance / np.sqrt(total) if total > 0 else variance, step).ravel()
        order = np.argsort(-gain, kind="stable")
        whole = len(order) // PLANE_BITS * PLANE_BITS
        gains.append(gain[order[:whole]].reshape(-1, PLANE_BITS).sum(1))
        dims.append(order[:whole] // MAX_BITS)
        owners.append(np.full(len(gains[-1]), head))
        gains[-1][0] = np.inf  # the first plane of every head
    owner, gain = np.concatenate(owners), np.concatenate(gains)
    taken = np.argsort(-gain, kind="stable")[:planes_in_all]
    planes = np.bincount(owner[taken], minlength=len(variances))
    return [
        np.bincount(dim[: n * PLANE_BITS], minlength=len(variance)).astype(np.uint8)
        for dim, n, variance in zip(dims, planes.tolist(), variances, strict=True)
    ]
