"""``hsswap bench decode``: its synthetic traces, its count of waits, and one small run."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, PredictorConfig, SwapConfig
from hsswap.__main__ import main
from hsswap.bench import decode
from hsswap.bench.decode import MODEL_8B, MODEL_SMALL, SIZES, SMALL, config_of
from hsswap.bench.decode_arms import counted_waits, learn_once
from hsswap.bench.synthetic import HostMaker, Shape, make_trace, traits_of
from hsswap.bf16 import from_float32
from hsswap.codec import HeadCodec
from hsswap.predictor import CodesPredictor
from hsswap.predictor.codes import Learned
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


async def learned_by(layers: int, traces: int) -> tuple[Learned, tuple[HeadCodec, ...]]:
    """What a prompt teaches where layer n has trace n % 2, and what the predictor then uses."""
    tokens, heads = 1088, 2
    dims = ModelDims.uniform(layers=layers, q_heads=4, kv_heads=heads, head_dim=16)
    config = SwapConfig(
        dims, 2048, device_slots=512, host_slots=512, tile_tokens=256, io="memory",
        predictor=PredictorConfig("codes"),
    )  # fmt: skip
    seen: list[Learned] = []
    async with HighSpeedSwap.open(config) as swap, swap.sequence(top_k=TopK(4)) as sequence:
        calibration = swap.calibration
        assert calibration is not None
        learn_once(calibration, traces)
        learn = calibration._learn

        def learn_and_tell(with_queries: bool) -> Learned:
            seen.append(learn(with_queries))
            return seen[0]

        calibration._learn = learn_and_tell  # type: ignore[method-assign]
        for layer in range(layers):
            trace = make_trace(HostMaker(layer % 2), Shape(4, heads, 16, tokens, 2, tokens), 0)
            rows = (from_float32(part) for part in (trace.keys, trace.values))
            await sequence.append(layer, *rows)
            result = await sequence.attend(layer, from_float32(trace.prompt), exact=True)
            await result.done()
        await calibration.basis()
        assert isinstance(swap.predictor, CodesPredictor)
        return seen[0], swap.predictor.codecs


async def test_layers_with_the_same_trace_share_what_is_learned() -> None:
    (alone, _), (shared, used) = await learned_by(2, traces=8), await learned_by(5, traces=2)
    assert used == shared.codecs
    assert len(alone.codecs) == len(alone.stand_ins) == 4
    assert len(shared.codecs) == len(shared.stand_ins) == 10
    assert alone.stand_ins[0].scale.any()
    for number in range(10):  # bit for bit as if the other layers were not there
        for one, other in (
            (shared.codecs[number], alone.codecs[number % 4]),
            (shared.stand_ins[number], alone.stand_ins[number % 4]),
        ):
            for field in fields(other):
                assert np.array_equal(getattr(one, field.name), getattr(other, field.name))
    assert not np.array_equal(alone.codecs[0].encode, alone.codecs[2].encode)


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
        so_far = len(waits)
        event.synchronize()
        assert len(waits) == so_far <= 4
        stream.close()


@pytest.mark.parametrize("predictor", ["projection", "codes"])
def test_a_small_run_on_the_host(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    predictor: str,
) -> None:
    out = tmp_path / "decode.json"
    monkeypatch.setattr(decode, "machine", count().__next__)  # one second is not the next
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
