"""A tiny model with real attention: K, V and Q from tokens, positions and the layer before.

Its rows are computed one by one, so that a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

import hsswap
from hsswap.bf16 import from_float32, to_float32
from hsswap.config import ModelDims
from hsswap.driver.base import Graph, Stream
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.rounds.waiting_steps import Steps
from tests.rounds.models import enqueue

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 4, 2, 16, 2, 11
DIMS = ModelDims.uniform(
    layers=LAYERS, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, block_size=16
)
_rng = np.random.default_rng(17)
_EMBED = _rng.standard_normal((VOCAB, HEADS * DIM)).astype(np.float32)
_PLACE = _rng.standard_normal((64, HEADS * DIM)).astype(np.float32)
_WIDE = (HEADS + 2 * KV_HEADS) * DIM
_LAYER = [
    (_rng.standard_normal((HEADS * DIM, _WIDE)) / 4).astype(np.float32) for _ in range(LAYERS)
]
_HEAD = _rng.standard_normal((HEADS * DIM, VOCAB)).astype(np.float32)


def projected(x: F32, layer: int) -> tuple[U16, U16, U16]:
    """Q ``[rows, HEADS, DIM]``, K and V ``[rows, KV_HEADS, DIM]`` of ``[rows, HEADS * DIM]``."""
    wide = np.concatenate([x[r : r + 1] @ _LAYER[layer] for r in range(len(x))])
    codes = from_float32(wide).reshape(len(x), -1, DIM)
    return codes[:, :HEADS], codes[:, HEADS : HEADS + KV_HEADS], codes[:, HEADS + KV_HEADS :]


def embedded(tokens: Sequence[int], position: int) -> F32:
    """The first layer's input."""
    places = (position + np.arange(len(tokens))) % len(_PLACE)
    return np.asarray(_EMBED[list(tokens)] + _PLACE[places], np.float32)


def logits_of(x: F32) -> F32:
    """``[rows, VOCAB]``."""
    return np.concatenate([x[r : r + 1] @ _HEAD for r in range(len(x))])


class Rows:
    """The model over captured steps: a RowsModel of the host device."""

    def __init__(self, rows: int) -> None:
        self._x = np.zeros((rows, HEADS * DIM), np.float32)
        self._q = np.zeros((rows, HEADS, DIM), np.uint16)
        self._k = np.zeros((rows, KV_HEADS, DIM), np.uint16)
        self._v = np.zeros((rows, KV_HEADS, DIM), np.uint16)
        self._out = np.zeros((rows, HEADS, DIM), np.uint16)

    def __call__(
        self,
        stream: Stream,
        steps: Sequence[Steps],
        tokens: Tensor,
        logits: Tensor,
        *,
        layers: int | None = None,
    ) -> None:
        """See :class:`hsswap.rounds.RowsModel`: one sequence after the other."""
        for s, mine in enumerate(steps):
            self._enqueue(stream, mine, tokens.row(s), logits.row(s), layers)

    def _enqueue(
        self, stream: Stream, steps: Steps, tokens: Tensor, logits: Tensor, layers: int | None
    ) -> None:
        length, rows = steps.length, tokens.shape[0]
        x, out = self._x[:rows], self._out[:rows]
        q, k, v = self._q[:rows], self._k[:rows], self._v[:rows]
        given = [tensor_of(each, "bf16", each.shape, "rows") for each in (q, k, v, out)]

        def begin() -> None:
            legal = np.minimum(tokens.array(), VOCAB - 1).tolist()
            x[:] = embedded(legal, int(length.array()[0]))

        def project(layer: int) -> None:
            q[:], k[:], v[:] = projected(x, layer)

        def add() -> None:
            x[:] += to_float32(out).reshape(x.shape)

        def end() -> None:
            logits.array()[:] = logits_of(x)

        enqueue(stream, "embed", begin)
        for layer in range(layers or LAYERS):
            enqueue(stream, "project", partial(project, layer))
            # As tensors: that is what a model on a GPU gives.
            steps.append(layer, given[1], given[2], stream=stream)
            steps.attend(layer, given[0], given[3], stream=stream)
            enqueue(stream, "add", add)
        enqueue(stream, "head", end)

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """See :class:`hsswap.rounds.RowsModel`."""
        with stream.capture() as graph:
            enqueue()
        return graph


async def run_rows(sequence: hsswap.Sequence, tokens: Sequence[int], position: int) -> F32:
    """The same by plain calls: logits of every row."""
    x = embedded(tokens, position)
    for layer in range(LAYERS):
        q, k, v = (np.ascontiguousarray(part) for part in projected(x, layer))
        await sequence.append(layer, k, v)
        result = await sequence.attend(layer, q)
        await result.done()
        x = x + to_float32(np.asarray(result.out)).reshape(x.shape)
    return logits_of(x)
