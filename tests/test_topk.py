"""Top-k mode: exact over what is chosen, a cache that hits, and the mass it says it left out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from hsswap import HighSpeedSwap, LayerGroup, ModelDims, SwapConfig, TopK
from hsswap.bf16 import from_float32, to_float32
from hsswap.config import PredictorConfig
from hsswap.errors import ArgumentError, BlockIOError, ConfigError
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.predictor import projection_matrix
from hsswap.sequence import Sequence
from tests.driver import oracle
from tests.swap_cases import Case, check_chosen, random_case

DIMS = ModelDims.uniform(layers=2, q_heads=4, kv_heads=2, head_dim=32)
TOKENS = 1200
TOP_K = TopK(6, cache_factor=3)
PINNED = TOP_K.pinned_blocks(16)


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(DIMS, TOKENS, seed=31)


def config(host_slots: int = 96, rank: int = 32) -> SwapConfig:
    slots = 64 + 2 + 2 * TOP_K.cache_blocks(16)
    return SwapConfig(
        DIMS,
        capacity_tokens=TOKENS + 64,
        device_slots=slots,
        host_slots=host_slots,
        tile_tokens=256,
        predictor=PredictorConfig("projection", rank=rank),
    )


async def prefill(sequence: Sequence, case: Case, tokens: int) -> None:
    for layer in range(2):
        await sequence.append(layer, case.keys[layer][:tokens], case.values[layer][:tokens])


def check_row(
    case: Case, layer: int, row: int, out: np.ndarray, chosen: np.ndarray | list[np.ndarray]
) -> None:
    """Promise 1 over exactly the chosen blocks and the block being filled."""
    full = (row + 1) // 16
    for head in range(DIMS.group(layer).kv_heads):
        blocks = [*chosen[head].tolist(), *([full] if (row + 1) % 16 else [])]
        check_chosen(case, layer, head, row, blocks, out)


@pytest.mark.parametrize("window", [40, 500])
async def test_a_window_with_the_projection(window: int) -> None:
    """By a call, behind a look ahead, and captured: no more than the window, and no error."""
    group = LayerGroup(1, 4, 2, 32, window=window)
    case = random_case(ModelDims((group,)), TOKENS, seed=32)
    settings = replace(config(), dims=case.dims)
    async with (
        HighSpeedSwap.open(settings, io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await sequence.append(0, case.keys[0][:1000], case.values[0][:1000])
        row = case.queries[0][999:1000]
        assert await sequence.look_ahead(0, row) >= 0
        result = await sequence.attend(0, row)
        await result.done()
        out = np.asarray(result.out)
        assert result.chosen is not None
        for head, chosen in enumerate(result.chosen):
            blocks = [*chosen[chosen >= 0].tolist(), 62]
            tokens = np.concatenate([np.arange(b * 16, min(b * 16 + 16, 1000)) for b in blocks])
            tokens, part = tokens[tokens >= 1000 - window], slice(head * 2, head * 2 + 2)
            keys, values = (x[0][tokens][:, head : head + 1] for x in (case.keys, case.values))
            heads = oracle.Heads(2, group.logit_scale)
            wanted = oracle.attend(row[:, part], keys, values, len(tokens), heads)
            error = oracle.relative_error(oracle.decode(out[:, part]), wanted.exact)
            assert error <= wanted.tolerance()
        async with sequence.captured(1) as steps:
            steps.append(0, case.keys[0][1000:1001], case.values[0][1000:1001])
            captured = np.full((1, 4, 32), 0x7FC0, np.uint16)
            steps.attend(0, case.queries[0][1000:1001], captured)
            await asyncio.to_thread(steps.stream.synchronize)
        assert np.isfinite(to_float32(captured)).all()


async def test_attention_over_the_chosen_blocks_is_exact(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, 1000)
        for row in range(1000, 1040):
            for layer in range(2):
                part = slice(row, row + 1)
                await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                result = await sequence.attend(layer, case.queries[layer][part])
                await result.done()
                assert result.chosen is not None
                assert isinstance(result.out, np.ndarray)
                full = (row + 1) // 16
                assert result.chosen.shape == (2, PINNED + 6)
                assert (np.diff(result.chosen) > 0).all()
                assert (result.chosen[:, 0] == 0).all()
                assert (result.chosen[:, -8:] == np.arange(full - 8, full)).all()
                assert ((result.left_out_mass > 0) & (result.left_out_mass < 1)).all()
                check_row(case, layer, row, result.out, result.chosen)


async def test_a_needle_is_found_and_the_mass_left_out_is_small(case: Case) -> None:
    """One old token answers the query almost alone; a projection of full rank must find it."""
    wide = to_float32(case.keys[0])
    wide[200] = 9 * to_float32(case.queries[0][1100, 0])  # of head 0's group
    keys = from_float32(wide)
    async with (
        HighSpeedSwap.open(config(rank=128), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await sequence.append(0, keys[:1101], case.values[0][:1101])
        result = await sequence.attend(0, case.queries[0][1100:1101])
        await result.done()
        assert result.chosen is not None
        assert 200 // 16 in result.chosen[0]
        assert result.left_out_mass[0] < 0.05


async def test_what_was_chosen_stays_in_device_slots(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, 1008)
        first = await sequence.attend(0, case.queries[0][1007:1008])
        await first.done()
        before = swap.statistics()
        again = await sequence.attend(0, case.queries[0][1007:1008])
        await again.done()
        after = swap.statistics()
        assert (np.asarray(first.out) == np.asarray(again.out)).all()
        assert after.misses + after.host_hits == before.misses + before.host_hits
        assert after.device_hits > before.device_hits


async def test_few_blocks_are_attended_exactly(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, 16 * (PINNED + 6) + 5)
        result = await sequence.attend(0, case.queries[0][:1])
        await result.done()
        assert result.chosen is None
        assert (result.left_out_mass == 0).all()


async def test_exact_on_request_and_for_several_rows(case: Case) -> None:
    async with HighSpeedSwap.open(config(host_slots=64), io=MemoryIO()) as swap:
        async with swap.sequence(top_k=TOP_K) as sequence:
            await prefill(sequence, case, TOKENS)
            asked = await sequence.attend(0, case.queries[0][-1:], exact=True)
            many = await sequence.attend(0, case.queries[0][-9:])
            await asked.done()
            await many.done()
            with pytest.raises(ArgumentError, match="one query row at a time"):
                await sequence.attend(0, case.queries[0][-2:], exact=False)
        async with swap.sequence() as sequence:
            await prefill(sequence, case, TOKENS)
            exact = await sequence.attend(0, case.queries[0][-9:])
            await exact.done()
        assert (np.asarray(many.out) == np.asarray(exact.out)).all()
        assert (np.asarray(asked.out) == np.asarray(exact.out)[-1:]).all()


async def test_the_result_does_not_depend_on_the_host_tier(case: Case) -> None:
    outputs = []
    for host_slots in (32, 64, 1000):
        async with (
            HighSpeedSwap.open(config(host_slots), io=MemoryIO()) as swap,
            swap.sequence(top_k=TOP_K) as sequence,
        ):
            await prefill(sequence, case, 1000)
            rows = []
            for row in range(1000, 1020):
                part = slice(row, row + 1)
                await sequence.append(0, case.keys[0][part], case.values[0][part])
                result = await sequence.attend(0, case.queries[0][part])
                await result.done()
                rows.append(np.asarray(result.out))
            outputs.append(np.concatenate(rows))
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] == outputs[2]).all()


@pytest.mark.parametrize("kind", [FaultKind.ERRNO, FaultKind.FLIP])
async def test_a_failed_read_does_not_leave_a_wrong_unit_in_the_cache(
    case: Case, kind: FaultKind
) -> None:
    """Select has already announced units that then did not arrive: they must not be trusted."""
    bad = Fault(kind, count=8, only="read", bit=3)
    async with (
        HighSpeedSwap.open(config(host_slots=32), io=MemoryIO([bad])) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, 1009)
        await swap.flush()
        failures = 0
        for _ in range(20):
            try:
                result = await sequence.attend(0, case.queries[0][1008:1009])
            except BlockIOError:
                failures += 1
                continue
            await result.done()
            break
        assert failures
        assert result.chosen is not None
        check_row(case, 0, 1008, np.asarray(result.out), result.chosen)


@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_cancellation_at_any_step_leaves_no_wrong_unit(case: Case, steps: int) -> None:
    async with (
        HighSpeedSwap.open(config(host_slots=32), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, 1009)
        attending = asyncio.ensure_future(sequence.attend(0, case.queries[0][1008:1009]))
        for _ in range(steps):
            await asyncio.sleep(0)
        attending.cancel()
        await asyncio.wait([attending])
        result = await sequence.attend(0, case.queries[0][1008:1009])
        await result.done()
        assert result.chosen is not None
        check_row(case, 0, 1008, np.asarray(result.out), result.chosen)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="k is 0"):
        TopK(0)
    with pytest.raises(ConfigError, match="cache_factor is 0"):
        TopK(1, cache_factor=0)


def test_the_projection_is_the_same_for_the_same_seed_and_keeps_inner_products() -> None:
    one = projection_matrix(PredictorConfig(rank=64, seed=5), 128)
    assert (one == projection_matrix(PredictorConfig(rank=64, seed=5), 128)).all()
    assert (one != projection_matrix(PredictorConfig(rank=64, seed=6), 128)).any()
    values = to_float32(one)
    assert abs(values.std() - 128**-0.5) < 0.004
    assert abs(values.mean()) < 0.004
