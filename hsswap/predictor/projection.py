"""The seed's predictor: keys times one random matrix, a row a token.

Inner products survive a random projection of enough columns (Johnson and Lindenstrauss 1984; used
for KV blocks by KVSwap, arXiv 2511.11907, with a matrix from data). The matrix is ``[head_dim,
rank]``, entries N(0, 1 / head_dim) as in the seed, BF16, the same for all layers and heads of a
group. NumPy's PCG64 draws it, so it is not the seed's own matrix of the same number.
"""

from __future__ import annotations

import numpy as np

from hsswap.bf16 import U16, from_float32
from hsswap.config import LayerGroup, PredictorConfig
from hsswap.driver.operations import (
    I32,
    BlockPool,
    EncodeWork,
    ProjectionCodes,
    ScoreWork,
)
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError


def projection_matrix(config: PredictorConfig, head_dim: int) -> U16:
    """The matrix P ``[head_dim, rank]``, BF16 codes; the same for the same seed."""
    random = np.random.Generator(np.random.PCG64(config.seed))
    values = random.standard_normal((head_dim, config.rank)) * head_dim**-0.5
    return from_float32(values.astype(np.float32))


class ProjectionPredictor:
    """Codes of one layer group and the work that makes and reads them.

    ``memory`` is device memory of :meth:`code_bytes`, ``ids`` the store's number of block ids;
    code rows are found by block index, so a freed and reused id is overwritten by its new owner
    before it can be scored.
    """

    def __init__(
        self,
        config: PredictorConfig,
        group: LayerGroup,
        block_size: int,
        ids: int,
        memory: Tensor,
        matrix: Tensor,
    ) -> None:
        shape = (group.layers, ids, group.kv_heads, block_size, config.rank)
        if memory.shape != shape:
            raise ArgumentError(f"predictor memory has shape {memory.shape}; {shape} is needed")
        self._codes = [
            ProjectionCodes(memory.row(layer), matrix, group) for layer in range(group.layers)
        ]

    @staticmethod
    def code_shape(
        config: PredictorConfig, group: LayerGroup, block_size: int, ids: int
    ) -> tuple[int, ...]:
        """``[layers, ids, kv_heads, block_size, rank]``, BF16."""
        return (group.layers, ids, group.kv_heads, block_size, config.rank)

    def encode_work(
        self, group_layer: int, blocks: BlockPool, host_slots: I32, indices: I32
    ) -> EncodeWork:
        """Work that encodes full blocks out of host slots."""
        return EncodeWork(self._codes[group_layer], blocks, host_slots, indices)

    def score_work(
        self, group_layer: int, queries: Tensor, indices: I32 | Tensor, scores: Tensor
    ) -> ScoreWork:
        """Work that scores blocks for ``queries`` ``[Q, dk]`` into ``scores`` ``[H, B]``."""
        return ScoreWork(self._codes[group_layer], queries, indices, scores)
