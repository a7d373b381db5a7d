"""The whole swap on a GPU: the same bits whatever is in which tier, and every output verified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as Chunks
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, Sequence, SwapConfig, TopK
from hsswap.bf16 import from_float32, to_float32
from hsswap.commands.verify import AttentionVerifier
from hsswap.driver import open_device
from hsswap.driver.base import Stream
from hsswap.driver.cuda import CudaDevice
from hsswap.driver.tensor import tensor_in
from tests.driver import oracle
from tests.swap_cases import MIXED, SMALL, U16, Case, chunks_of, config_for, random_case
from tests.test_codes_predictor import DIMS, config

pytestmark = pytest.mark.gpu

WIDE = ModelDims.uniform(layers=2, q_heads=16, kv_heads=4, head_dim=128)
# Tokens on both sides of spans and tiles, and for WIDE prefill chunks that use tensor maps.
CASES = {"small": (SMALL, 800), "mixed": (MIXED, 700), "wide": (WIDE, 2600)}


@pytest.fixture(scope="module", autouse=True)
def kept_context() -> Iterator[None]:
    """Keeps the GPU's context, so that opening a device again takes milliseconds."""
    with open_device("cuda:0"):
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    dims, tokens = CASES[request.param]
    return random_case(dims, tokens, seed=5)


def on_gpu(config: SwapConfig, folder: Path | None = None) -> SwapConfig:
    io = "memory" if folder is None else "posix"
    return replace(config, device="cuda:0", io=io, directory=folder)


async def feed(
    swap: HighSpeedSwap,
    sequence: Sequence,
    case: Case,
    chunks: Chunks[int],
    *,
    stream: Stream | None = None,
    verifier: AttentionVerifier | None = None,
) -> list[U16]:
    """Append and attend chunk by chunk, layer by layer; all output rows of each layer."""
    groups = [case.dims.group(layer) for layer in range(case.dims.layers)]
    outputs = [np.empty((case.tokens, g.q_heads, g.value_dim), np.uint16) for g in groups]
    start = 0
    for rows in chunks:
        part = slice(start, start + rows)
        for layer in range(case.dims.layers):
            group = groups[layer]
            k, v, q = (array[layer][part] for array in (case.keys, case.values, case.queries))
            shape = (rows, group.q_heads, group.value_dim)
            await sequence.append(layer, k, v, stream=stream)
            with swap.device.allocate_host(2 * int(np.prod(shape))) as memory:
                out = tensor_in(memory, "bf16", shape)
                out.array()[...] = 0x7FC0  # NaN
                result = await sequence.attend(layer, q, out, stream=stream)
                await result.done()
                outputs[layer][part] = out.array()
            if verifier is not None:
                verifier.record(layer, q, k, v, outputs[layer][part], result.chosen)
        start += rows
    return outputs


async def run(
    case: Case, config: SwapConfig, chunks: Chunks[int], *, top_k: TopK | None = None
) -> list[U16]:
    """One sequence through a swap of its own, each output verified."""
    verifier = AttentionVerifier(case.dims)
    async with HighSpeedSwap.open(config) as swap, swap.sequence(top_k=top_k) as sequence:
        device = cast(CudaDevice, swap.device)
        loaded = set(device._modules._functions)
        outputs = await feed(swap, sequence, case, chunks, verifier=verifier)
        await swap.flush()
        assert swap.statistics().write_errors == 0
        assert set(device._modules._functions) == loaded  # none was compiled on the loop
    verifier.check(lambda: None)
    assert verifier.failures == []
    return outputs


@pytest.fixture(scope="module")
def wanted(case: Case) -> list[U16]:
    """Everything resident, all rows at once."""
    config = config_for(case, tile_tokens=1024, extra_device=3000, extra_host=3000)
    return asyncio.run(run(case, on_gpu(config), [case.tokens]))


@pytest.mark.parametrize(
    ("tile", "look_ahead", "rows"), [(1024, True, 2100), (1024, False, 130), (2048, True, 7)]
)
async def test_tiers_tiles_and_chunks_change_no_bit(
    case: Case, wanted: list[U16], tmp_path: Path, tile: int, look_ahead: bool, rows: int
) -> None:
    config = config_for(case, tile_tokens=tile, look_ahead=look_ahead)
    prompt = case.tokens - 30
    chunks = [*chunks_of(prompt, max(rows, prompt // 8)), *[1] * 13, *chunks_of(17, min(rows, 5))]
    outputs = await run(case, on_gpu(config, tmp_path / "store"), chunks)
    for ours, theirs in zip(outputs, wanted, strict=True):
        assert (ours == theirs).all()


async def test_sequences_side_by_side_on_streams_of_their_own(
    case: Case, wanted: list[U16]
) -> None:
    config = on_gpu(config_for(case, sequences=4, tile_tokens=1024, extra_host=40))
    chunks = [*chunks_of(case.tokens - 12, 500), *[1] * 12]
    async with HighSpeedSwap.open(config) as swap:
        sequences = [swap.sequence() for _ in range(4)]
        streams = [swap.device.stream() for _ in sequences]
        results = await asyncio.gather(
            *(
                feed(swap, sequence, case, chunks, stream=stream)
                for sequence, stream in zip(sequences, streams, strict=True)
            )
        )
        for sequence, stream in zip(sequences, streams, strict=True):
            await sequence.close()
            stream.close()
    for outputs in results:
        for ours, theirs in zip(outputs, wanted, strict=True):
            assert (ours == theirs).all()


@pytest.mark.parametrize("late_mass", [0.0, 0.02])
@pytest.mark.parametrize("name", ["small", "wide"])
async def test_top_k_attends_what_it_says(name: str, late_mass: float) -> None:
    dims, tokens = CASES[name]
    case = random_case(dims, tokens, seed=6)
    top_k = TopK(k=4, late_mass=late_mass)
    extra = dims.layers * top_k.cache_blocks(dims.block_size)
    config = config_for(case, tile_tokens=1024, extra_device=extra)
    await run(case, on_gpu(config), [tokens - 40, *[1] * 40], top_k=top_k)


async def test_a_prompts_last_rows_teach_what_they_teach_on_the_host() -> None:
    """Single rows behind a prompt of 1,100 tokens, with what stands in for blocks left out."""
    plain = random_case(DIMS, 1110, seed=51)
    values = [to_float32(one) for one in plain.values]
    for one in values:
        one[:16] -= 20  # what is left out is not like the first block
    case = replace(plain, values=[from_float32(one) for one in values])
    chunks = [250] * 4 + [100] + [1] * 10
    outs = {}
    for device in ("host", "cuda:0"):
        for stand_in in (True, False):
            # On a GPU a tile has 64 blocks and more, and the ring two of them.
            settings = replace(
                config(), device=device, io="memory", device_slots=256, host_slots=256
            )
            top_k = TopK(6, cache_factor=3, stand_in=stand_in)
            async with HighSpeedSwap.open(settings) as swap, swap.sequence(top_k=top_k) as sequence:
                fed = await feed(swap, sequence, case, chunks)
            outs[device, stand_in] = np.stack([oracle.decode(one[1100:]) for one in fed])
    assert oracle.relative_error(outs["cuda:0", True], outs["cuda:0", False]) > 0.05
    for stand_in in (True, False):
        found, wanted = outs["cuda:0", stand_in], outs["host", stand_in]
        assert oracle.relative_error(found, wanted) < 2.0**-7
