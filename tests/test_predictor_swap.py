"""The plans that ``hsswap bench predictor --through-swap`` decodes with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hsswap.bench.predictor_swap import eighth_plan
from hsswap.config import ModelDims, PredictorConfig
from hsswap.topk import TopK

SMOLLM2 = ModelDims.uniform(layers=30, q_heads=9, kv_heads=3, head_dim=64)


@pytest.mark.parametrize("most", [False, True])
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_device_and_host_slots_together_are_an_eighth(
    tmp_path: Path, tokens: int, most: bool
) -> None:
    """The whole cache in blocks, over 8, and no block more."""
    plan = eighth_plan(SMOLLM2, tokens, tmp_path, most=most)
    cache = SMOLLM2.layers * SMOLLM2.blocks_of(tokens)
    assert plan.config.device_slots + plan.config.host_slots == cache // 8


def test_the_most_is_the_largest_k_that_these_slots_are_enough_for(tmp_path: Path) -> None:
    """One block a KV head more would need more device slots than there are."""
    default = eighth_plan(SMOLLM2, 8192, tmp_path, most=False).top_k
    plan = eighth_plan(SMOLLM2, 8192, tmp_path, most=True)
    assert default is not None
    assert plan.top_k is not None
    assert plan.top_k.k > default.k == 15

    def needed(top_k: TopK) -> int:
        ring = 2 * plan.config.tile_tokens // SMOLLM2.block_size
        a_layer = 1 + top_k.cache_blocks(SMOLLM2.block_size)
        return ring + SMOLLM2.layers * a_layer

    assert needed(plan.top_k) <= plan.config.device_slots
    assert needed(replace(plan.top_k, k=plan.top_k.k + 1)) > plan.config.device_slots


@pytest.mark.parametrize("most", [False, True])
def test_the_share_of_codes_changes_nothing_else(tmp_path: Path, most: bool) -> None:
    plan = eighth_plan(SMOLLM2, 8192, tmp_path, most=most)
    wider = eighth_plan(SMOLLM2, 8192, tmp_path, most=most, codes=16)
    assert wider.config == replace(plan.config, predictor=PredictorConfig(metadata_ratio=1 / 16))
    assert wider.top_k == plan.top_k


def test_a_short_context_gets_two_tiles_all_the_same(tmp_path: Path) -> None:
    """An eighth of 2,048 tokens is less than exact prefill needs."""
    plan = eighth_plan(SMOLLM2, 2048, tmp_path, most=True)
    assert plan.config.host_slots == 2 * plan.config.tile_tokens // SMOLLM2.block_size
    assert plan.top_k is not None
    assert plan.top_k.k == 4
