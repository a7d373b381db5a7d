"""Prefixes found again: in the same swap, in the next process, by forks, after faults."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsswap
from hsswap import (
    ArgumentError,
    BlockIOError,
    ClosedError,
    ConfigError,
    CorruptBlock,
    HighSpeedSwap,
    OutOfSlots,
    PredictorConfig,
    SwapConfig,
    calibrating,
)
from hsswap.driver.host_ops import block_views
from hsswap.io.ids import INDEX_MASK
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from tests.branches import TOP_K, Branch
from tests.swap_cases import SMALL, config_for, random_case
from tests.swap_watch import turns, watched

CASE = random_case(SMALL, 900, seed=41)
TOKENS = np.arange(900) * 7 % 501
"""What the rows of a case are as tokens."""


def config_of(*, sequences: int = 3, extra_host: int = 0, capacity: int = 2400) -> SwapConfig:
    return config_for(CASE, sequences=sequences, capacity=capacity, extra_host=extra_host)


async def stored(swap: HighSpeedSwap, tokens: int) -> None:
    """Rows 0 to ``tokens`` of the case, committed and closed."""
    branch = Branch(swap.sequence(), CASE)
    await branch.append([*range(tokens)])
    assert await branch.sequence.commit(TOKENS[:tokens]) == tokens // 16 * 16
    await branch.sequence.close()


async def reopened(swap: HighSpeedSwap, tokens: np.ndarray) -> Branch:
    """A branch that begins with what is stored of these tokens, which are those of the case."""
    sequence = await swap.open_prefix(tokens)
    return Branch(sequence, CASE, [*range(sequence.length)])


@pytest.mark.parametrize("extra", [0, 300])
async def test_a_prefix_is_not_computed_or_written_again(extra: int) -> None:
    async with watched(config_of(extra_host=extra)) as swap:
        await stored(swap, 600)
        before = swap.statistics()
        assert before.host_slots_used == 0
        branch = await reopened(swap, np.append(TOKENS[:500], [5] * 40))
        assert len(branch.rows) == 496
        await branch.append([*range(500, 530)])
        await branch.check()
        await swap.flush()
        written = swap.statistics().blocks_written - before.blocks_written
        assert written == 3 * (526 // 16 - 496 // 16)


async def test_it_is_there_in_the_next_process(tmp_path: Path) -> None:
    config = replace(config_of(), directory=tmp_path / "store", persist=True, fingerprint="m")
    async with HighSpeedSwap.open(config) as swap:
        await stored(swap, 400)
    assert (tmp_path / "store").exists()
    async with HighSpeedSwap.open(config) as swap:
        branch = await reopened(swap, TOKENS)
        assert len(branch.rows) == 400
        await branch.check()
        await branch.append([*range(400, 450)])
        await branch.check()
        twice = await reopened(swap, TOKENS[:33])
        assert len(twice.rows) == 32
        await twice.check()
    with pytest.raises(ConfigError, match="fingerprint"):
        await HighSpeedSwap.create(replace(config, fingerprint="other"))


async def test_top_k_over_a_stored_prefix_is_as_over_rows() -> None:
    config = config_for(
        CASE, sequences=2, capacity=2400, extra_device=2 * 3 * TOP_K.cache_blocks(16)
    )
    # The basis of the other predictor would be made of other rows.
    config = replace(config, predictor=PredictorConfig("projection"))
    async with watched(config) as swap:
        await stored(swap, 560)
        outputs = []
        for sequence in (
            await swap.open_prefix(TOKENS[:560], top_k=TOP_K),
            swap.sequence(top_k=TOP_K),
        ):
            branch = Branch(sequence, CASE, [*range(sequence.length)])
            await branch.append([*range(sequence.length, 561)])
            result = await sequence.attend(2, CASE.queries[2][560:561])
            await result.done()
            assert result.chosen is not None
            outputs.append(np.asarray(result.out))
            await sequence.close()
        assert (outputs[0] == outputs[1]).all()


async def test_branches_of_a_prefix_change_nothing_of_it() -> None:
    async with watched(config_of()) as swap:
        await stored(swap, 320)
        first = await reopened(swap, TOKENS)
        second = first.fork()
        await first.truncate(300)
        await first.append([*range(700, 760)])
        await second.append([*range(800, 830)])
        assert await first.sequence.commit(TOKENS[:310]) == 304
        await swap.flush()
        for branch in (first, second, await reopened(swap, TOKENS)):
            await branch.check()


async def test_kept_blocks_give_way_oldest_prefix_first() -> None:
    async with watched(config_of(capacity=700)) as swap:
        await stored(swap, 480)
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(200, 600)])
        await branch.check()
        left = await reopened(swap, TOKENS)
        assert 0 < len(left.rows) <= 304
        await left.check()


async def test_a_corrupt_block_is_an_error_and_is_not_found_again() -> None:
    flip = Fault(FaultKind.FLIP, only="read", at=0, count=200, bit=9)
    async with watched(config_of(), flip) as swap:
        await stored(swap, 320)
        branch = await reopened(swap, TOKENS)
        with pytest.raises(CorruptBlock):
            await branch.answers(1)
        assert len((await reopened(swap, TOKENS)).rows) < 320
        with pytest.raises(CorruptBlock, match="compute it again"):
            await branch.sequence.commit(TOKENS[:320])
        assert len((await reopened(swap, TOKENS)).rows) < 320


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EINTR, errno.EACCES, errno.ETIMEDOUT]
)
async def test_what_could_not_be_read_for_once_is_still_there(number: int) -> None:
    """A fault of the way to the bytes says nothing about them."""
    once = Fault(FaultKind.ERRNO, only="read", at=3, count=4, errno=number)
    async with watched(config_of(), once) as swap:
        await stored(swap, 320)
        branch = await reopened(swap, TOKENS)
        for _ in range(8):
            with suppress(BlockIOError):
                await branch.answers(1)
                break
        await branch.check()
        assert len((await reopened(swap, TOKENS)).rows) == 320
        assert swap.store_statistics().errors > 0


async def test_what_cannot_be_written_is_not_committed() -> None:
    full = Fault(FaultKind.ERRNO, only="write", at=0, count=300, errno=errno.ENOSPC)
    async with watched(config_of(extra_host=200), full) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(330)])
        with pytest.raises(BlockIOError):
            await branch.sequence.commit(TOKENS[:330])
        assert len((await reopened(swap, TOKENS)).rows) == 0
        for _ in range(20):
            try:
                await branch.sequence.commit(TOKENS[:330])
            except BlockIOError:
                continue
            break
        assert len((await reopened(swap, TOKENS)).rows) == 320


async def test_others_blocks_that_cannot_be_written_are_not_told() -> None:
    spot = config_of().dims.block_bytes(config_of().dims.groups[0]) * np.array([32, 64])
    once = Fault(FaultKind.ERRNO, only="write", count=40, errno=errno.ENOSPC)
    bad = Fault(FaultKind.ERRNO, only="write", count=None, offsets=(int(spot[0]), int(spot[1])))
    async with watched(config_of(extra_host=200), once, bad) as swap:
        branch, other = (Branch(swap.sequence(), CASE) for _ in range(2))
        await branch.append([*range(330)])
        await other.append([*range(100)])
        assert other.sequence.ids[0] & INDEX_MASK == 32
        await swap.writes.settle()
        assert swap.statistics().write_errors > 6
        assert await branch.sequence.commit(TOKENS[:330]) == 320
        with pytest.raises(BlockIOError):
            await other.sequence.commit(TOKENS[:100])


async def test_bad_tokens_are_refused_before_anything_changes() -> None:
    async with watched(config_of(sequences=1)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(40)])
        for wrong in (TOKENS[:41], np.ones(3), np.ones((2, 2), int), ["a"]):
            with pytest.raises(ArgumentError, match="tokens"):
                await branch.sequence.commit(wrong)
        assert await branch.sequence.commit([]) == 0
        assert await branch.sequence.commit(TOKENS[:40]) == 32
        with pytest.raises(OutOfSlots):
            await swap.open_prefix(TOKENS)
        await branch.sequence.close()
        with pytest.raises(ClosedError):
            await branch.sequence.commit(TOKENS[:16])
        with pytest.raises(ArgumentError, match="tokens"):
            await swap.open_prefix(np.ones(3))


def test_a_store_that_stays_needs_a_place() -> None:
    with pytest.raises(ConfigError, match="directory"):
        replace(config_of(), persist=True)
    with pytest.raises(ConfigError, match="disk_bytes"):
        replace(config_of(), disk_bytes=0)
    with pytest.raises(ConfigError, match="fingerprint"):
        replace(config_of(), fingerprint=3)  # type: ignore[arg-type]


async def test_opening_that_is_cancelled_gives_everything_back() -> None:
    config = config_for(CASE, sequences=2, capacity=2400, extra_device=3 * TOP_K.cache_blocks(16))
    async with watched(config) as swap:
        await stored(swap, 560)
        for moment in range(8):
            call = asyncio.ensure_future(swap.open_prefix(TOKENS, top_k=TOP_K))
            await turns(moment)
            call.cancel()
            await asyncio.wait([call])
            if not call.cancelled():
                await call.result().close()
            await swap.retiring.ended()
        await (await swap.open_prefix(TOKENS, top_k=TOP_K)).close()


async def test_a_swap_that_closes_waits_for_an_opening_that_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which reads no host memory any more: it could be gone."""
    gate = Gate()
    config = config_for(CASE, sequences=2, capacity=2400, extra_device=3 * TOP_K.cache_blocks(16))
    config = replace(config, predictor=PredictorConfig())
    held = Fault(FaultKind.HOLD, only="read", gate=gate)
    async with watched(config, held, close_sequences=False) as swap:
        await stored(swap, 560)
        looks: list[bool] = []

        def look(*blocks: Any) -> Any:
            looks.append(swap.closed)
            return block_views(*blocks)

        monkeypatch.setattr(calibrating, "block_views", look)
        opening = asyncio.ensure_future(swap.open_prefix(TOKENS, top_k=TOP_K))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        closing = asyncio.ensure_future(swap.close())
        await turns(20)
        gate.opened.set()
        await closing
        assert opening.done()
        assert isinstance(opening.exception(), ClosedError)
        assert not any(looks)


def test_blocking_callers_have_the_same_calls() -> None:
    with hsswap.blocking(config_of(), io=MemoryIO()) as swap:
        with swap.sequence() as sequence:
            for layer in range(3):
                sequence.append(layer, CASE.keys[layer][:100], CASE.values[layer][:100])
            assert sequence.commit(TOKENS[:100]) == 96
        with swap.open_prefix(TOKENS[:90]) as sequence:
            assert sequence.length == 80
