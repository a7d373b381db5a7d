"""What can be proved of the share left out, from how far codes are from their keys.

A logit from codes is off by q . r, r being the key less what its code stands for, and at most by
|q'| |r'| (Cauchy-Schwarz), where q' = q M^-1/2 and r' = r M^1/2 and M is the queries' second
moment: as tight as queries of that moment allow. A block's greatest |r'| would
take two bytes; the mass of the blocks left out is then at most that of their codes times
exp(|q'| |r'|). The bench states how near the truth that comes.
"""

from __future__ import annotations

import numpy as np

from hsswap.bench.predictor_view import BLOCK, Bool, LayerView
from hsswap.bf16 import F32
from hsswap.codec import HeadCodec, levels_of
from hsswap.predictor.basis import FLOOR
from hsswap.rope import F64


def certified_share(view: LayerView, codecs: list[HeadCodec], seen: F32, chosen: Bool) -> F32:
    """The share left out at most ``[H, S]``, mean over the query heads of a KV head.

    ``seen`` ``[N, H, G, d]``: queries that M is taken of; ``chosen`` ``[H, S, B]``.
    """
    rest = view.candidates() & ~chosen
    found = np.empty(chosen.shape[:2], np.float32)
    for head, codec in enumerate(codecs):
        root, inverse = _roots(seen[:, head].reshape(-1, seen.shape[-1]))
        keys, queries = view.keys[head], view.queries[head]
        scale = keys.shape[-1] ** -0.5
        coarse = codec.centre + levels_of(codec, keys).astype(np.float32) @ codec.query.T
        off = np.linalg.norm((keys * scale - coarse) @ root, axis=-1)
        whole = len(off) // BLOCK
        worst = off[: whole * BLOCK].reshape(whole, BLOCK).max(1)
        logits = queries @ coarse[: whole * BLOCK].T
        best = logits.max(-1, keepdims=True)
        mass = np.exp(logits - best).reshape(*logits.shape[:2], whole, BLOCK).sum(-1)
        most = np.log(mass) + best + np.linalg.norm(queries @ inverse, axis=-1)[..., None] * worst
        with np.errstate(over="ignore"):
            out = np.where(rest[head], np.exp(most - view.total_lse[head][..., None]), 0).sum(-1)
        held = 1 - np.where(rest[head], view.query_mass()[head], 0).sum(-1)
        found[head] = (1 / (1 + held / np.maximum(out, np.finfo(np.float32).tiny))).mean(0)
    return found


def _roots(queries: F32) -> tuple[F64, F64]:
    """M^1/2 and M^-1/2 of the second moment of rows ``[N, d]``, with the basis' floor."""
    moment = queries.T.astype(np.float64) @ queries / len(queries)
    values, vectors = np.linalg.eigh(moment)
    values = np.maximum(values, 0) + FLOOR * np.trace(moment) / len(moment)
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T
