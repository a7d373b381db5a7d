"""``hsswap bench decode``: its synthetic traces, its count of waits, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, SwapConfig
from hsswap.__main__ import main
from hsswap.bench.decode import MODEL_8B, MODEL_SMALL, SIZES, SMALL, config_of
from hsswap.bench.decode_arms import counted_waits
from hsswap.bench.synthetic import HostMaker, Shape, make_trace, traits_of
from hsswap.topk import TopK


def test_traces_have_the_statistics_of_a_real_model() -> None:
    shape = Shape(16, 4, 128, 8191, 64, 100)
    maker = HostMaker(1)
    trace = make_trace(maker, shape, 3)
    assert trace.keys.shape == (8191, 4, 128)
    assert trace.values.shape == (8191, 4, 128)
    assert trace.queries.shape == (64, 16, 128)
    assert trace.prompt.shape == (100, 16, 128)
    assert trace.keys.dtype == trace.queries.dtype == np.float32
    traits = traits_of(maker, shape, trace)
    # SmolLM2: 0.81-0.84, 0.72-0.76, 0.65-0.68, 0.57-0.77. Layers scatter.
    assert 0.78 < traits.query_cosine < 0.90
    assert 0.55 < traits.top_overlap < 0.85
    assert 0.50 < traits.resident_mass < 0.90
    assert 0.50 < traits.top_mass_of_rest < 0.85
    again = make_trace(HostMaker(1), shape, 3)
    assert (again.keys == trace.keys).all()
    assert not (make_trace(HostMaker(1), shape, 4).keys == trace.keys).all()


def test_a_tenth_of_the_cache_is_in_device_slots() -> None:
    for one in SIZES:
        blocks = one.tokens // 16
        assert 0.025 < one.k / blocks < 0.035
        assert 0.08 < TopK(one.k, one.cache_factor).cache_blocks(16) / blocks < 0.1
        config = config_of(MODEL_8B, one, "cuda:0")
        assert config.host_slots > MODEL_8B.layers * blocks
    assert config_of(MODEL_SMALL, SMALL[0], "host").max_sequences == 2


async def test_waits_are_counted() -> None:
    dims = ModelDims.uniform(layers=1, q_heads=2, kv_heads=1, head_dim=16)
    config = SwapConfig(dims, 512, device_slots=65, host_slots=64, tile_tokens=256, io="memory")
    async with HighSpeedSwap.open(config) as swap:
        stream = swap.device.stream()
        event = stream.record()
        with counted_waits(swap) as waits:
            event.synchronize()
            await stream.record().wait()
            stream.synchronize()
            stream.record()
        # A stream of the host device waits for an event of its own.
        assert waits[:3] == ["synchronize", "wait", "synchronize"]
        count = len(waits)
        event.synchronize()
        assert len(waits) == count <= 4
        stream.close()


@pytest.mark.parametrize("predictor", ["projection", "codes"])
def test_a_small_run_on_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], predictor: str
) -> None:
    out = tmp_path / "decode.json"
    words = ["bench", "decode", "--quick", "--device", "host", "--json", "--out", str(out)]
    assert main([*words, "--predictor", predictor]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert [row["id"] for row in found["rows"]] == ["D1", "D3", "D2a"]
    row = found["rows"][0]
    assert 0 <= row["missed_units_a_layer"] < 2 * (4 + 9)
    assert 0 < row["error_against_dense"] < 1
    assert row["trace"]["resident_mass"] > 0.5
    assert row["predictor"] == predictor
    assert main(["bench", "decode", "--quick", "--device", "host", "--tokens", "5"]) == 2
