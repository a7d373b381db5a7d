"""Top-k with the predictor ``codes`` on a GPU: it chooses what the host device chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, PredictorConfig, Rope, SwapConfig, TopK
from hsswap.driver.tensor import tensor_in
from hsswap.predictor import CodesPredictor
from tests.swap_cases import Case, chunks_of, random_case
from tests.test_swap_cuda import feed, kept_context

__all__ = ["kept_context"]  # a fixture of this file too

pytestmark = pytest.mark.gpu

DIMS = ModelDims.uniform(layers=2, q_heads=8, kv_heads=2, head_dim=64, rope=Rope(100.0))
TOKENS, STEPS = 1400, 24
TOP_K = TopK(8, cache_factor=3)


async def chosen_by(case: Case, device: str, block_size: int) -> list[np.ndarray]:
    dims = ModelDims(case.dims.groups, block_size)
    blocks = TOP_K.cache_blocks(block_size)
    config = SwapConfig(
        dims,
        capacity_tokens=TOKENS + 64,
        device_slots=2 * 1024 // block_size + 2 + 2 * blocks,
        host_slots=2 * 1024 // block_size + 40,
        tile_tokens=1024,
        device=device,
        io="memory",
        predictor=PredictorConfig("codes", metadata_ratio=1 / 8, context_tokens=2000),
    )
    prompt = TOKENS - STEPS
    cut = [[a[:prompt] for a in arrays] for arrays in (case.keys, case.values, case.queries)]
    async with HighSpeedSwap.open(config) as swap, swap.sequence(top_k=TOP_K) as sequence:
        await feed(swap, sequence, Case(dims, *cut), chunks_of(prompt, 300))
        assert swap.calibration is not None
        await swap.calibration.basis()
        assert isinstance(swap.predictor, CodesPredictor)
        assert swap.predictor.version == 1
        chosen = []
        for row in range(prompt, TOKENS):
            part = slice(row, row + 1)
            with swap.device.allocate_host(2 * 8 * 64) as memory:
                out = tensor_in(memory, "bf16", (1, 8, 64))
                for layer in range(2):
                    await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                    result = await sequence.attend(layer, case.queries[layer][part], out)
                    await result.done()
                    assert result.chosen is not None
                    chosen.append(result.chosen)
    return chosen


@pytest.mark.parametrize("block_size", [8, 16, 32])
async def test_the_same_blocks_as_on_the_host(block_size: int) -> None:
    case = random_case(DIMS, TOKENS, seed=9)
    on_host = await chosen_by(case, "host", block_size)
    on_gpu = await chosen_by(replace(case), "cuda:0", block_size)
    same = np.mean([np.isin(a[h], b[h]).mean() for a, b in zip(on_host, on_gpu, strict=True)
                    for h in range(2)])  # fmt: skip
    assert same > 0.99  # a level on a rounding boundary may differ
