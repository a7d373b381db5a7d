"""Codes of a layer in which two queries find each its own blocks, for A3."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.bench.cases import BLOCK_SIZE, tensor_from
from hsswap.bf16 import F32
from hsswap.codec import PAGE_BLOCKS, PLANE_BITS, HeadCodec
from hsswap.config import LayerGroup
from hsswap.driver.codes_operations import LayerCodes, row_bytes_of, table_bytes
from hsswap.predictor.bits import allocate_bits

PLANES = 8
"""Of 16 bits a token and KV head: 1/32 of K and V at 128 dims."""

PLANTED_DIMS = 3
"""Dims of most bits: what both queries look for, the first one alone, and the second one alone."""

PLANTED_LOGIT = 40.0
LEVEL_NOISE = 0.02
"""Weight of every other level, of at most 15."""


def make_codec(dim: int, rng: np.random.Generator) -> HeadCodec:
    """Bits as for a spectrum that falls with power 1.5; the query's side is orthonormal."""
    bits = allocate_bits([(1 + np.arange(dim, dtype=np.float64)) ** -1.5], PLANES)[0]
    bits = bits[bits > 0]
    basis = np.linalg.qr(rng.standard_normal((dim, len(bits))))[0].astype(np.float32)
    zeros = np.zeros((dim, len(bits)), np.float32)
    return HeadCodec(zeros, zeros[0], basis, zeros[:, 0], bits)


def make_queries(codec: HeadCodec, heads: int, rng: np.random.Generator) -> F32:
    """Two queries ``[2, heads, dk]``: of planted levels each counts its own as PLANTED_LOGIT."""
    weights = rng.standard_normal((2, heads, len(codec.bits))) * LEVEL_NOISE
    most = 2.0 ** codec.bits[:PLANTED_DIMS] - 1
    weights[..., :PLANTED_DIMS] = 0
    weights[..., 0] = PLANTED_LOGIT / most[0]
    for turn in range(2):
        weights[turn, :, 1 + turn] = PLANTED_LOGIT / most[1 + turn]
    queries: F32 = (weights @ codec.query.T).astype(np.float32)
    return queries


def make_codes(
    group: LayerGroup,
    codec: HeadCodec,
    blocks: int,
    planted: tuple[NDArray[np.int64], ...],
    generator: Any,
    keep: list[Any],
) -> LayerCodes:
    """Random codes of ``blocks`` blocks on the GPU.

    Those of ``planted[d]`` have a token whose level of dim d is the largest there is; all others
    have less than a quarter of it.
    """
    import torch

    codecs = (codec,) * group.kv_heads
    shape = (-(-blocks // PAGE_BLOCKS), PAGE_BLOCKS, row_bytes_of(codecs, BLOCK_SIZE))
    pages = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
    words = pages.view(torch.int16).view(-1, group.kv_heads, PLANES, BLOCK_SIZE)
    for dim, rows in enumerate(planted):
        for at in np.flatnonzero(codec.dim_of == dim).tolist():
            bit = int(np.array(1 << at % PLANE_BITS, np.uint16).view(np.int16))
            if codec.bit_of[at] >= codec.bits[dim] - 2:
                words[:, :, at // PLANE_BITS] &= ~bit
            words[torch.from_numpy(rows).cuda(), :, at // PLANE_BITS, 3] |= bit
    tables = torch.from_numpy(table_bytes(codecs).copy()).cuda()
    keep += [pages, tables]
    listed = tuple(tensor_from(page, "u8") for page in pages)
    return LayerCodes(codecs, tensor_from(tables, "u8"), listed, group, BLOCK_SIZE)
