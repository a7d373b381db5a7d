"""Top-k with the predictor ``codes``: the basis a prompt makes, and which blocks have codes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, PredictorConfig, Rope, Sequence, SwapConfig, TopK
from hsswap.bf16 import from_float32, to_float32
from hsswap.driver.base import Stream
from hsswap.driver.operations import AppendWork
from hsswap.errors import BlockIOError, ClosedError, ConfigError, DeviceError
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.predictor import CodesPredictor
from tests.swap_cases import Case, random_case
from tests.test_topk import check_row

LAYERS, CHUNK = 2, 250
DIMS = ModelDims.uniform(layers=LAYERS, q_heads=4, kv_heads=2, head_dim=32, rope=Rope(100.0))
TOKENS = 1500
TOP_K = TopK(6, cache_factor=3, stand_in=False)


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(DIMS, TOKENS, seed=41)


def config(host_slots: int = 96, sequences: int = 1, ratio: float = 1 / 8) -> SwapConfig:
    slots = 64 + sequences * (2 + 2 * TOP_K.cache_blocks(16))
    return SwapConfig(
        DIMS,
        capacity_tokens=sequences * (TOKENS + 64),
        device_slots=slots,
        host_slots=host_slots,
        max_sequences=sequences,
        tile_tokens=256,
        predictor=PredictorConfig("codes", metadata_ratio=ratio, context_tokens=2000),
    )


def predictor_of(swap: HighSpeedSwap) -> CodesPredictor:
    assert isinstance(swap.predictor, CodesPredictor)
    return swap.predictor


async def prefill(
    sequence: Sequence, case: Case, tokens: int, *, chunk: int = CHUNK
) -> list[np.ndarray]:
    """In chunks, all layers of each; what layer 0 gives."""
    outs = []
    for first in range(0, tokens, chunk):
        part = slice(first, min(tokens, first + chunk))
        for layer in range(LAYERS):
            await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
            result = await sequence.attend(layer, case.queries[layer][part], exact=True)
            await result.done()
            if layer == 0:
                outs.append(np.asarray(result.out))
    return outs


async def step(sequence: Sequence, case: Case, row: int) -> tuple[np.ndarray, np.ndarray]:
    """One decode step; chosen blocks and output of layer 1."""
    chosen = np.empty((0, 0), np.int32)
    for layer in range(LAYERS):
        part = slice(row, row + 1)
        await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
        result = await sequence.attend(layer, case.queries[layer][part])
        await result.done()
        assert result.chosen is not None
        assert isinstance(result.out, np.ndarray)
        assert ((result.left_out_mass > 0) & (result.left_out_mass < 1)).all()
        check_row(case, layer, row, result.out, result.chosen)
        chosen = result.chosen
    return chosen, np.asarray(result.out)


def missing(swap: HighSpeedSwap, sequence: Sequence) -> list[int]:
    """Blocks of a sequence that still have no code, in each layer."""
    indices = (sequence.ids & np.int64(0xFFFFFFFF))[: sequence.length // 16]
    return [len(predictor_of(swap).missing(layer, indices)) for layer in range(LAYERS)]


async def test_a_prompt_makes_the_basis_and_all_its_blocks_get_codes(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, 1010)
        assert not predictor_of(swap).ready  # fewer than 1,024
        await prefill_on(sequence, case, 1010, 1100)
        assert swap.calibration is not None
        await swap.calibration.basis()
        assert predictor_of(swap).version == 1
        before = missing(swap, sequence)
        assert min(before) > 0  # they came before the basis
        await step(sequence, case, 1100)
        assert missing(swap, sequence) == [0, 0]
        reads = swap.statistics().misses
        await step(sequence, case, 1101)
        assert predictor_of(swap).version == 1
        assert swap.statistics().misses - reads < 2 * 2 * 6
        assert missing(swap, sequence) == [0, 0]


async def prefill_on(sequence: Sequence, case: Case, first: int, stop: int) -> None:
    for layer in range(LAYERS):
        part = slice(first, stop)
        await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
        result = await sequence.attend(layer, case.queries[layer][part], exact=True)
        await result.done()


async def test_what_prefill_gives_does_not_depend_on_the_predictor(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        with_codes = await prefill(sequence, case, 1200)
    plain = replace(config(), predictor=None)
    async with HighSpeedSwap.open(plain, io=MemoryIO()) as swap, swap.sequence() as sequence:
        without = await prefill(sequence, case, 1200)
    assert all((a == b).all() for a, b in zip(with_codes, without, strict=True))


@pytest.mark.parametrize("tokens", [400, 1200])
async def test_a_needle_is_found(case: Case, tokens: int) -> None:
    """Also with a basis that had to be made of a short prompt."""
    wide = to_float32(case.keys[0])
    wide[200] = 4 * to_float32(case.queries[0][tokens, 0])  # of head 0's group
    keys = [from_float32(wide), case.keys[1]]
    changed = replace(case, keys=keys)
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, changed, tokens)
        part = slice(tokens, tokens + 1)
        await sequence.append(0, keys[0][part], case.values[0][part])
        result = await sequence.attend(0, case.queries[0][part])
        await result.done()
        assert result.chosen is not None
        assert 200 // 16 in result.chosen[0]
        assert predictor_of(swap).version == 1


async def test_without_queries_and_with_too_few_tokens(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        for layer in range(LAYERS):  # nobody asks: keys alone make the basis
            await sequence.append(layer, case.keys[layer][:700], case.values[layer][:700])
        await step(sequence, case, 700)
        assert predictor_of(swap).version == 1
    few = TopK(1, cache_factor=2)
    small = ModelDims(DIMS.groups, block_size=4)
    async with (
        HighSpeedSwap.open(
            replace(config(), dims=small, device_slots=600, host_slots=400), io=MemoryIO()
        ) as swap,
        swap.sequence(top_k=few) as sequence,
    ):
        # Layer 1 has shown nothing: no basis; blocks rank by what was attended, then by age.
        await sequence.append(0, case.keys[0][:400], case.values[0][:400])
        result = await sequence.attend(0, case.queries[0][399:400])
        await result.done()
        assert not predictor_of(swap).ready
        assert result.chosen is not None
        assert (result.chosen[:, -33:] == np.arange(67, 100)).all()


async def test_the_same_whatever_the_host_tier_holds(case: Case) -> None:
    runs = []
    for host_slots in (32, 64, 1000):
        async with (
            HighSpeedSwap.open(config(host_slots), io=MemoryIO()) as swap,
            swap.sequence(top_k=TOP_K) as sequence,
        ):
            await prefill(sequence, case, 1200)
            runs.append([await step(sequence, case, row) for row in range(1200, 1206)])
    for other in runs[1:]:
        for (chosen, out), (chosen2, out2) in zip(runs[0], other, strict=True):
            assert (chosen == chosen2).all()
            assert (out == out2).all()


async def test_reused_ids_carry_no_old_code(case: Case) -> None:
    async with HighSpeedSwap.open(config(), io=MemoryIO()) as swap:
        async with swap.sequence(top_k=TOP_K) as sequence:
            await prefill(sequence, case, 1200)
            await step(sequence, case, 1200)
            first = set((sequence.ids & 0xFFFFFFFF).tolist())
        async with swap.sequence() as plain:  # an exact sequence encodes nothing
            await plain.append(0, case.keys[1][:800], case.values[1][:800])
            indices = plain.ids & np.int64(0xFFFFFFFF)
            assert set(indices.tolist()) <= first
            assert len(predictor_of(swap).missing(0, indices)) == len(indices)
        async with swap.sequence(top_k=TOP_K) as sequence:  # the basis serves the next prompt
            await prefill(sequence, case, 600)
            assert missing(swap, sequence) == [0, 0]
            await step(sequence, case, 600)
            assert predictor_of(swap).version == 1


async def test_a_fork_uses_the_same_codes(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config(sequences=2), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, 1200)
        async with sequence.fork() as fork:
            chosen, out = await step(sequence, case, 1200)
            chosen2, out2 = await step(fork, case, 1200)
            assert (chosen == chosen2).all()
            assert (out == out2).all()
        await sequence.truncate(900)
        again = await step(sequence, case, 900)
        assert again[0].shape == chosen.shape


async def test_rows_that_a_thread_shows_as_a_basis_begins_are_not_in_it(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They came between the look whether copies are on their way and the beginning, and went into
    samples that were being read.
    """
    async with HighSpeedSwap.open(config(), io=MemoryIO()) as swap:
        sequence, calibration = swap.sequence(top_k=TOP_K), swap.calibration
        assert calibration is not None
        await prefill(sequence, case, 100)
        until, on_their_way = swap.prefetcher.until, []

        async def until_and_more(condition: Callable[[], bool]) -> None:
            await until(condition)
            for layer in range(LAYERS):
                part = slice(100, 110)
                assert sequence.try_append(layer, case.keys[layer][part], case.values[layer][part])
            on_their_way.append(len(calibration._copies))

        with monkeypatch.context() as patched:
            patched.setattr(swap.prefetcher, "until", until_and_more)
            await calibration.basis()
        assert on_their_way == [0]
        assert predictor_of(swap).ready


async def test_a_prompt_that_ends_early_leaves_it_to_the_next(case: Case) -> None:
    async with HighSpeedSwap.open(config(), io=MemoryIO()) as swap:
        async with swap.sequence(top_k=TOP_K) as sequence:
            await prefill(sequence, case, 500)
        assert not predictor_of(swap).ready
        async with swap.sequence(top_k=TOP_K) as sequence:
            await prefill(sequence, case, 1200)
            await step(sequence, case, 1200)
            assert predictor_of(swap).version == 1


@pytest.mark.parametrize("kind", [FaultKind.ERRNO, FaultKind.FLIP])
async def test_a_block_that_cannot_be_read_has_no_code(case: Case, kind: FaultKind) -> None:
    bad = Fault(kind, count=4, only="read", bit=3)
    async with (
        HighSpeedSwap.open(config(host_slots=32), io=MemoryIO([bad])) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        for layer in range(LAYERS):
            await sequence.append(layer, case.keys[layer][:800], case.values[layer][:800])
        await swap.flush()
        failures = 0
        for _ in range(20):
            try:
                result = await sequence.attend(0, case.queries[0][799:800])
            except BlockIOError:
                failures += 1
                assert missing(swap, sequence)[0] > 0
                continue
            await result.done()
            break
        assert failures
        assert missing(swap, sequence)[0] == 0
        assert result.chosen is not None
        check_row(case, 0, 799, np.asarray(result.out), result.chosen)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
async def test_a_swap_closed_or_a_call_cancelled_while_the_basis_is_made(
    case: Case, turns: int
) -> None:
    async with HighSpeedSwap.open(config(), io=MemoryIO()) as swap:
        sequence = swap.sequence(top_k=TOP_K)
        for layer in range(LAYERS):
            await sequence.append(layer, case.keys[layer][:800], case.values[layer][:800])
        attending = asyncio.ensure_future(sequence.attend(0, case.queries[0][799:800]))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns % 2:
            attending.cancel()
            await asyncio.wait([attending])
            result = await sequence.attend(0, case.queries[0][799:800])
            await result.done()
            assert result.chosen is not None
            check_row(case, 0, 799, np.asarray(result.out), result.chosen)
    if not turns % 2:
        with pytest.raises((ClosedError, asyncio.CancelledError)):
            await attending


@pytest.mark.parametrize("call", ["append", "attend"])
async def test_a_refused_copy_of_samples_holds_up_nobody(
    case: Case, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with HighSpeedSwap.open(config(sequences=2), io=MemoryIO()) as swap:
        shown, other = swap.sequence(top_k=TOP_K), swap.sequence(top_k=TOP_K)
        if call == "attend":
            await shown.append(0, case.keys[0][:96], case.values[0][:96])
        enqueue = swap.device.append

        def full(stream: Stream, work: AppendWork) -> None:
            if work.blocks.memory.shape[0] != 96:  # no block of the swap's
                raise DeviceError("the stream is full; wait")
            enqueue(stream, work)

        with monkeypatch.context() as patch:
            patch.setattr(swap.device, "append", full)
            refused = (
                shown.append(0, case.keys[0][:96], case.values[0][:96])
                if call == "append"
                else shown.attend(0, case.queries[0][:96])
            )
            with pytest.raises(DeviceError, match="full"):
                await refused
        for layer in range(LAYERS):
            await other.append(layer, case.keys[layer][:800], case.values[layer][:800])
        async with asyncio.timeout(20):
            result = await other.attend(0, case.queries[0][799:800])
            await result.done()
        assert result.chosen is not None
        check_row(case, 0, 799, np.asarray(result.out), result.chosen)


async def test_the_next_process_scores_the_same(case: Case, tmp_path: Path) -> None:
    kept = replace(config(), directory=tmp_path / "store", persist=True, io="posix")
    tokens = np.arange(1200)
    async with HighSpeedSwap.open(kept) as swap:
        async with swap.sequence(top_k=TOP_K) as sequence:
            await prefill(sequence, case, 1200)
            await sequence.commit(tokens)
        async with await swap.open_prefix(tokens, top_k=TOP_K) as sequence:
            first = [await step(sequence, case, row) for row in range(1200, 1204)]
    async with HighSpeedSwap.open(kept) as swap:
        assert predictor_of(swap).version == 1  # before anything was seen
        async with await swap.open_prefix(tokens, top_k=TOP_K) as sequence:
            assert missing(swap, sequence) == [0, 0]
            again = [await step(sequence, case, row) for row in range(1200, 1204)]
    for (chosen, out), (chosen2, out2) in zip(first, again, strict=True):
        assert (chosen == chosen2).all()
        assert (out == out2).all()
    damaged = tmp_path / "store" / "predictor-basis.npz"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    async with HighSpeedSwap.open(kept) as swap:
        assert not predictor_of(swap).ready
    other = PredictorConfig("codes", metadata_ratio=1 / 16)
    async with HighSpeedSwap.open(replace(kept, predictor=other)) as swap:
        assert not predictor_of(swap).ready


async def test_a_bound_on_what_is_left_out_attends_fewer_blocks(case: Case) -> None:
    counts = []
    for bound in (0.0, 0.5, 0.9):
        top_k = replace(TOP_K, left_out_bound=bound, least_k=2)
        async with (
            HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
            swap.sequence(top_k=top_k) as sequence,
        ):
            await prefill(sequence, case, 1200)
            count = 0
            for row in range(1200, 1210):
                part = slice(row, row + 1)
                await sequence.append(0, case.keys[0][part], case.values[0][part])
                result = await sequence.attend(0, case.queries[0][part])
                await result.done()
                assert result.chosen is not None
                kept = [head[head >= 0] for head in result.chosen]
                for head, own in enumerate(kept):
                    full = len(own) == result.chosen.shape[1]
                    assert full or result.left_out_mass[head] <= bound
                    assert len(own) >= TOP_K.pinned_blocks(16) + 2
                    count += len(own)
                check_row(case, 0, row, np.asarray(result.out), kept)
            counts.append(count)
    assert counts[0] == 10 * 2 * (TOP_K.pinned_blocks(16) + TOP_K.k)
    assert counts[0] > counts[1] > counts[2]


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"left_out_bound is 1\.5"):
        TopK(4, left_out_bound=1.5)
    with pytest.raises(ConfigError, match="least_k is 5"):
        TopK(4, least_k=5)
