"""Sizes, refusals and plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap.config import LayerGroup, ModelDims, PredictorConfig, SwapConfig
from hsswap.errors import ConfigError, HsswapError
from hsswap.rope import Rope

SMOLLM2 = ModelDims.uniform(layers=30, q_heads=9, kv_heads=3, head_dim=64)


def test_bytes_of_smollm2() -> None:
    group = SMOLLM2.groups[0]
    assert SMOLLM2.unit_bytes(group) == 4096
    assert SMOLLM2.block_bytes(group) == 12288
    assert SMOLLM2.id_bytes == 30 * 12288
    assert group.group_size == 3
    assert group.logit_scale == 64**-0.5


def test_odd_dims_are_padded_to_pages() -> None:
    dims = ModelDims((LayerGroup(1, 4, 2, 80, 72, aux_bytes=6),), block_size=16)
    group = dims.groups[0]
    assert dims.unit_bytes(group) == 16 * (80 + 72) * 2 + 6
    assert dims.block_bytes(group) == 12288  # 2 * 4870 = 9740 bytes


def test_layers_are_numbered_through_the_groups() -> None:
    dims = ModelDims((LayerGroup(2, 4, 2, 64), LayerGroup(3, 4, 1, 128)))
    assert [dims.group_index(layer) for layer in range(5)] == [0, 0, 1, 1, 1]
    for layer in (-1, 5):
        with pytest.raises(ConfigError, match="out of range"):
            dims.group(layer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"q_heads": 5}, "multiple of kv_heads"),
        ({"head_dim": 12}, "head_dim is 12"),
        ({"head_dim": 264}, "head_dim is 264"),
        ({"value_dim": 4}, "value_dim is 4"),
        ({"dtype": "int3"}, "known: bf16"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"aux_bytes": -2}, "aux_bytes"),
        ({"aux_bytes": 3}, "aux_bytes"),
    ],
)
def test_bad_groups_are_refused(change: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64}
    with pytest.raises(ConfigError, match=words):
        LayerGroup(**{**good, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [0, 3, 512, -16])
def test_bad_block_sizes_are_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        ModelDims((LayerGroup(1, 1, 1, 8),), block_size)


def test_no_groups_no_model() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ModelDims(())


@pytest.mark.parametrize("value", ["8", 8.0, None])
def test_sizes_are_whole_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        LayerGroup(1, 1, 1, value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"host_slots is .*whole number"):
        SwapConfig(SMOLLM2, 2048, 512, value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"device_bytes is .*whole number"):
        SwapConfig.plan(SMOLLM2, 2048, value, 1 << 30)  # type: ignore[arg-type]
    assert SwapConfig(SMOLLM2, np.int64(2048), 512, 512).capacity_tokens == 2048  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 129])
def test_rank_has_limits(rank: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        PredictorConfig(rank=rank)


def test_too_few_slots_say_how_many_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"device_slots is 157; 158 are needed"):
        SwapConfig(SMOLLM2, 2048, device_slots=157, host_slots=128)
    with pytest.raises(ConfigError, match=r"host_slots is 127; 128 are needed"):
        SwapConfig(SMOLLM2, 2048, device_slots=158, host_slots=127)
    with pytest.raises(ConfigError, match=r"device_slots is 158; 218 are needed"):
        SwapConfig(SMOLLM2, 2048, device_slots=158, host_slots=128, max_sequences=3)


@pytest.mark.parametrize("tile_tokens", [0, 100, 300])
def test_tiles_are_whole_spans(tile_tokens: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 256"):
        SwapConfig(SMOLLM2, 2048, 512, 512, tile_tokens=tile_tokens)


@pytest.mark.parametrize(
    "change", [{"capacity_tokens": 0}, {"capacity_tokens": 1 << 40}, {"io_threads": 0}]
)
def test_other_refusals(change: dict[str, int]) -> None:
    good = {"capacity_tokens": 2048, "device_slots": 512, "host_slots": 512}
    with pytest.raises(HsswapError):
        SwapConfig(SMOLLM2, **{**good, **change})  # type: ignore[arg-type]


groups = st.builds(
    lambda layers, kv_heads, ratio, dk, dv: LayerGroup(layers, kv_heads * ratio, kv_heads, dk, dv),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(1, 32).map(lambda n: 8 * n),
    st.integers(1, 32).map(lambda n: 8 * n),
)


@given(
    st.lists(groups, min_size=1, max_size=3),
    st.integers(0, 8).map(lambda n: 2**n),
    st.integers(1, 200_000),
    st.integers(0, 1 << 34),
    st.integers(0, 1 << 34),
    st.sampled_from([None, PredictorConfig(), PredictorConfig(rank=128)]),
    st.integers(1, 4),
)
def test_a_plan_keeps_within_its_bytes(
    layer_groups: list[LayerGroup],
    block_size: int,
    tokens: int,
    device_bytes: int,
    host_bytes: int,
    predictor: PredictorConfig | None,
    sequences: int,
) -> None:
    dims = ModelDims(tuple(layer_groups), block_size)
    options = {"predictor": predictor, "max_sequences": sequences}
    most = SwapConfig.plan(dims, tokens, 1 << 60, 1 << 60, **options)  # type: ignore[arg-type]
    try:
        config = SwapConfig.plan(
            dims,
            tokens,
            device_bytes,
            host_bytes,
            **options,  # type: ignore[arg-type]
        )
    except ConfigError:
        ring = 2 * dims.span_blocks * len(dims.groups)
        slot = max(g.kv_heads * dims.unit_bytes(g) for g in layer_groups)
        block = max(dims.block_bytes(g) for g in layer_groups)
        need = (ring + sequences * dims.layers) * slot + most.code_bytes
        assert device_bytes < need or host_bytes < ring * block
        return
    assert config.device_slots <= most.device_slots
    indices = range(len(layer_groups))
    used = sum(
        config.device_slots_of(i) * layer_groups[i].kv_heads * dims.unit_bytes(layer_groups[i])
        for i in indices
    )
    assert used <= device_bytes
    used += config.code_bytes
    assert used <= device_bytes
    used = sum(config.host_slots_of(i) * dims.block_bytes(layer_groups[i]) for i in indices)
    assert used <= host_bytes
    assert sum(config.device_slots_of(i) for i in indices) <= config.device_slots
    assert config.capacity_blocks * block_size >= tokens


def test_codes_take_whole_pages_and_no_more_than_their_share() -> None:
    predictor = PredictorConfig("codes", metadata_ratio=1 / 32)
    config = SwapConfig(SMOLLM2, 8192, 900, 100, tile_tokens=256, predictor=predictor)
    tokens = 8192  # two pages
    assert config.code_bytes == 4 * 2 * 90 * tokens  # 64 bits a token and head
    wider = SwapConfig(SMOLLM2, 8193, 900, 100, tile_tokens=256, predictor=predictor)
    assert wider.code_bytes == config.code_bytes * 3 // 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "guess"}, "kind 'guess' is unknown"),
        ({"metadata_ratio": 0.5}, "metadata_ratio is 0.5"),
        ({"metadata_ratio": float("nan")}, "finite"),
        ({"context_tokens": 0}, "context_tokens is 0"),
    ],
)
def test_predictor_settings_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PredictorConfig(**wrong)
    with pytest.raises(ConfigError, match="32 RoPE dims do not fit heads of 16"):
        LayerGroup(1, 2, 1, 16, rope=Rope(dims=32))


def test_a_tile_holds_a_span_of_the_device() -> None:
    dims = ModelDims.uniform(layers=2, q_heads=4, kv_heads=2, head_dim=64)
    config = SwapConfig(dims, 4096, 400, 400, device="cuda:0", tile_tokens=256)
    assert config.tile_tokens == config.span_tokens == 1024
    assert SwapConfig(dims, 4096, 400, 400, tile_tokens=256).tile_tokens == 256
    with pytest.raises(ConfigError, match="130 are needed"):
        SwapConfig(dims, 4096, 129, 400, device="cuda:0", tile_tokens=256)
    unit = dims.block_bytes(dims.groups[0])
    planned = SwapConfig.plan(dims, 4096, 140 * unit, 140 * unit, device="cuda:0")
    assert (planned.tile_tokens, planned.device) == (1024, "cuda:0")
    with pytest.raises(ConfigError, match="two tiles of 1024"):
        SwapConfig.plan(dims, 4096, 140 * unit, 100 * unit, device="cuda:0")
