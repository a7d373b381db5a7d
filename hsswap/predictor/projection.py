"""Random projection: keys times one random matrix, a row a token.

Inner products survive a random projection of enough columns (Johnson and Lindenstrauss 1984; used
for KV blocks by KVSwap, arXiv 2511.11907, with a matrix from data). The matrix is ``[head_dim,
rank]``, entries N(0, 1 / head_dim), BF16, the same for all layers and heads of a
group. NumPy's PCG64 draws it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsswap.bf16 import U16, from_float32
from hsswap.config import ModelDims, PredictorConfig
from hsswap.driver.base import Buffer, Device
from hsswap.driver.operations import I32, BlockPool, EncodeWork, ProjectionCodes, ScoreWork
from hsswap.driver.tensor import tensor_in
from hsswap.predictor.base import I64, Predictor, ScoreRequest


def projection_matrix(config: PredictorConfig, head_dim: int) -> U16:
    """The matrix P ``[head_dim, rank]``, BF16 codes; the same for the same seed."""
    random = np.random.Generator(np.random.PCG64(config.seed))
    values = random.standard_normal((head_dim, config.rank)) * head_dim**-0.5
    return from_float32(values.astype(np.float32))


class ProjectionPredictor(Predictor):
    """Codes ``[ids, H, T, rank]`` BF16 of each layer, in memory for all ids at once."""

    remembers = False

    def __init__(self, config: PredictorConfig, dims: ModelDims, ids: int, device: Device) -> None:
        super().__init__(dims.layers, ids)
        self._memory: list[Buffer] = []
        self._codes: list[ProjectionCodes] = []
        try:
            for group in dims.groups:
                shape = (group.layers, ids, group.kv_heads, dims.block_size, config.rank)
                self._memory.append(device.allocate(2 * int(np.prod(shape))))
                codes = tensor_in(self._memory[-1], "bf16", shape)
                values = projection_matrix(config, group.head_dim)
                # Mapped host memory: small, read by every launch, and filled without a copy call.
                self._memory.append(device.allocate_host(values.nbytes))
                matrix = tensor_in(self._memory[-1], "bf16", values.shape)
                matrix.array()[...] = values
                of_layer = ProjectionCodes(codes, matrix, group)
                self._codes += [
                    replace(of_layer, codes=codes.row(layer)) for layer in range(group.layers)
                ]
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        return True

    def encode_work(
        self, layer: int, blocks: BlockPool, host_slots: I32, indices: I64
    ) -> EncodeWork:
        """See :meth:`Predictor.encode_work`."""
        return EncodeWork(self._codes[layer], blocks, host_slots, indices.astype(np.int32))

    def score_work(self, layer: int, request: ScoreRequest) -> ScoreWork:
        """See :meth:`Predictor.score_work`."""
        return ScoreWork(self._codes[layer], request.queries, request.code_index, request.scores)

    def close(self) -> None:
        """See :meth:`Predictor.close`."""
        for buffer in self._memory:
            buffer.close()
        self._memory.clear()
