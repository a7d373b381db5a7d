"""Settings of the wrong kind or of absurd size: a typed error, before or while a swap is opened."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest

from hsswap import HighSpeedSwap, LayerGroup, ModelDims, PredictorConfig, SwapConfig, TopK
from hsswap.driver import open_device
from hsswap.errors import HsswapError
from hsswap.io.memory import MemoryIO

DIMS = ModelDims.uniform(layers=1, q_heads=2, kv_heads=1, head_dim=8)
STRANGE = [-(2**70), -1, 0, 2**31, 2**40, 2**70, 1.5, float("nan"), float("inf"), "x", None, True]
GOOD: dict[type, dict[str, Any]] = {
    LayerGroup: {"layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 8},
    ModelDims: {"groups": DIMS.groups, "block_size": 16},
    PredictorConfig: {"rank": 32, "seed": 1},
    TopK: {"k": 3, "cache_factor": 2},
    SwapConfig: {"dims": DIMS, "capacity_tokens": 64, "device_slots": 140, "host_slots": 140},
}
INTEGERS = {
    LayerGroup: ("layers", "q_heads", "kv_heads", "head_dim", "value_dim", "aux_bytes"),
    ModelDims: ("block_size",),
    PredictorConfig: ("rank", "seed"),
    TopK: ("k", "cache_factor"),
    SwapConfig: ("capacity_tokens", "device_slots", "host_slots", "max_sequences", "tile_tokens"),
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_the_others_change_one_setting_of_is_taken(kind: type) -> None:
    kind(**GOOD[kind])


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in INTEGERS.items() for name in names]
)
@pytest.mark.parametrize("value", [1.5, float("nan"), "x", None, True, 16.0])
def test_what_is_no_whole_number_is_refused(kind: type, name: str, value: object) -> None:
    with pytest.raises(HsswapError, match=f"{name} is"):
        kind(**{**GOOD[kind], name: value})


@pytest.mark.parametrize("name", ["window", "scale", "soft_cap", "dtype"])
@pytest.mark.parametrize("value", STRANGE)
def test_optional_settings_have_typed_errors(name: str, value: object) -> None:
    with suppress(HsswapError):
        LayerGroup(**{**GOOD[LayerGroup], name: value})


@pytest.mark.parametrize(
    "name",
    ["device_slots", "host_slots", "max_sequences", "dims", "predictor", "device", "io"],
)
async def test_a_swap_opens_or_says_why_not(name: str) -> None:
    for value in STRANGE:
        device = open_device("host") if name != "device" else None
        with suppress(HsswapError):
            config = SwapConfig(**{**GOOD[SwapConfig], name: value})
            io = MemoryIO() if name != "io" else None
            async with HighSpeedSwap.open(config, io=io, device=device) as swap:
                with suppress(HsswapError):
                    swap.sequence(top_k=TopK(2**40))
        if device is not None:
            device.close()
            assert device.live_count == 0


HUGE = [10**400, -(10**400), 10**5000, Fraction(10**400), Fraction(10**5000), [0] * 10**5]


@pytest.mark.parametrize("value", HUGE, ids=range(len(HUGE)))
def test_what_no_message_can_hold_is_refused_in_few_words(value: object) -> None:
    for kind, good in GOOD.items():
        for field in fields(kind):
            if field.name in ("groups", "directory"):
                continue
            with pytest.raises(HsswapError) as refused:
                kind(**{**good, field.name: value})
            assert len(str(refused.value)) < 200, field.name


@pytest.mark.parametrize("value", [1e39, -1e39, 1e300])
def test_logits_are_float32(value: float) -> None:
    for name in ("scale", "soft_cap"):
        with pytest.raises(HsswapError, match=f"{name} is .*float32"):
            LayerGroup(**{**GOOD[LayerGroup], name: value})
    with pytest.raises(HsswapError, match=r"soft_cap is .*float32"):
        LayerGroup(**{**GOOD[LayerGroup], "soft_cap": 1e-40})
    LayerGroup(**{**GOOD[LayerGroup], "scale": -3e38, "soft_cap": 3e38})


@pytest.mark.parametrize("name", ["directory", "fingerprint", "device", "io"])
def test_text_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(HsswapError, match=f"{name} is '.ud800'"):
        SwapConfig(**{**GOOD[SwapConfig], name: "\ud800"})


def test_names_that_cannot_be_folders_are_refused() -> None:
    for name in ("a\0b", ""):
        with pytest.raises(HsswapError, match="cannot be a path"):
            SwapConfig(**{**GOOD[SwapConfig], "directory": name})
    SwapConfig(**{**GOOD[SwapConfig], "directory": "caf\udce9"})  # bytes that are no UTF-8
