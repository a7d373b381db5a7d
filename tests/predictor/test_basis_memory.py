"""Where a basis lies on the device: every layer's tables on 16 bytes, whatever lies before them."""

from __future__ import annotations

import numpy as np

from hsswap.codec import HeadCodec
from hsswap.config import LayerGroup, ModelDims
from hsswap.driver.host import HostDevice
from hsswap.predictor.codes import CodesPredictor, Learned
from hsswap.predictor.stand_in import StandIn


def codec(dim: int, seed: int) -> HeadCodec:
    """One plane of 16 bits."""
    random = np.random.default_rng(seed)
    encode, query = random.standard_normal((2, dim, 4)).astype(np.float32)
    centre, bias = random.standard_normal(dim).astype(np.float32), np.ones(4, np.float32)
    return HeadCodec(encode, bias, query, centre, np.full(4, 4, np.uint8))


def test_tables_of_every_layer_begin_on_16_bytes() -> None:
    """Nine query heads, and nine times 24 dims, are no whole 16 bytes."""
    dims = ModelDims((LayerGroup(3, 9, 3, 16, 24), LayerGroup(2, 5, 1, 8)))
    groups = [
        dims.group(layer) for layer in range(dims.layers) for _ in range(dims.group(layer).kv_heads)
    ]
    codecs = tuple(codec(group.head_dim, seed) for seed, group in enumerate(groups))
    stand_ins = tuple(
        StandIn(
            np.full(g.group_size, i, np.float32),
            np.full((g.group_size, g.value_dim), i, np.float32),
        )
        for i, g in enumerate(groups)
    )
    with HostDevice() as device:
        predictor = CodesPredictor(dims, 100, device)
        predictor.install(predictor.prepare(Learned(codecs, stand_ins)))
        at = 0
        for layer, own in enumerate(predictor._layers):
            assert own.tables is not None
            assert own.stand_in is not None
            assert own.tables.address % 16 == 0
            heads = dims.group(layer).kv_heads
            wanted = np.concatenate([one.value for one in stand_ins[at : at + heads]])
            np.testing.assert_array_equal(own.stand_in[1].array(), wanted)
            at += heads
        predictor.close()
