"""The calls on blocks named by id: offload, attend, count references, look inside."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
import pytest

import hsswap
from hsswap import (
    ArgumentError,
    BlockIOError,
    ClosedError,
    HighSpeedSwap,
    OutOfBlocks,
    SharedBlock,
    StaleBlockId,
    SwapConfig,
)
from hsswap.driver import open_device
from hsswap.driver.tensor import tensor_in
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.branches import alone
from tests.driver import oracle
from tests.swap_cases import MIXED, SMALL, Case, config_for, random_case
from tests.swap_watch import Linked, Stuck, turns, watched

CASE = random_case(SMALL, 700, seed=61)
OTHER = random_case(MIXED, 700, seed=62)


def config_of(case: Case, *, extra_device: int = 0, extra_host: int = 0) -> SwapConfig:
    return config_for(
        case, capacity=1600, extra_device=extra_device, extra_host=extra_host, sequences=2
    )


def block_of(case: Case, layer: int, number: int, valid: int) -> dict[str, object]:
    """K and V of one block as arguments; what is not valid is NaN."""
    size = case.dims.block_size
    arguments: dict[str, object] = {"valid_tokens": valid}
    for name, rows in (("k_block_host", case.keys[layer]), ("v_block_host", case.values[layer])):
        block = np.full((size, *rows.shape[1:]), 0x7FC0, np.uint16)
        block[:valid] = rows[number * size : number * size + valid]
        arguments[name] = block
    return arguments


async def offload(
    swap: HighSpeedSwap, case: Case, tokens: int, ids: list[int], first: int = 0
) -> None:
    """Offload the blocks of the first ``tokens`` rows from number ``first`` on, in all layers."""
    size = case.dims.block_size
    for number in range(first, -(-tokens // size)):
        if number == len(ids):
            ids.append(await swap.alloc_disk_block_id())
        valid = min(size, tokens - number * size)
        for layer in range(case.dims.layers):
            block = block_of(case, layer, number, valid)
            await swap.offload_block(layer=layer, block=ids[number], **block)  # type: ignore[arg-type]


async def attend(
    swap: HighSpeedSwap, case: Case, layer: int, ids: Several[int], row: int, **more: int
) -> np.ndarray:
    """One row's answer."""
    group = case.dims.group(layer)
    out = np.full((group.q_heads, group.value_dim), 0x7FC0, np.uint16)
    query = case.queries[layer][row]
    arguments = {"layer": layer, "seq_block_ids": ids, "q_dev": query, "output_dev": out}
    if more:
        call = swap.attend_layer_on_stream_with_q_pos(stream=None, **arguments, **more)
    else:
        call = swap.attend_layer(**arguments)
    await (await call).done()
    return out


async def give_back(swap: HighSpeedSwap, ids: list[int]) -> None:
    for block in ids:
        assert await swap.dec_disk_ref(block=block) == 0


@pytest.mark.parametrize("extra", [0, 90])
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("case", [CASE, OTHER])
async def test_a_list_of_blocks_is_attended_as_a_sequence(
    case: Case, linked: bool, extra: int
) -> None:
    wanted = await alone(case, [*range(700)])
    size = case.dims.block_size
    config = config_of(case, extra_device=extra, extra_host=extra)
    async with watched(config, device=Linked() if linked else None) as swap:
        ids: list[int] = []
        for tokens in (650, 651, 672, 673, 700):
            first = max(0, (tokens - 30) // size) if ids else 0
            await offload(swap, case, tokens, ids, first)
            for layer in range(case.dims.layers):
                got = await attend(swap, case, layer, ids, tokens - 1)
                assert (got == wanted[layer][tokens - 1]).all(), (layer, tokens)
        for row in (0, 5, 299, 640, 699):
            blocks, seen = ids[: row // size + 1], row % size + 1
            got = await attend(swap, case, 1, blocks, row, last_block_valid_slots=seen)
            assert (got == wanted[1][row]).all(), row
        await give_back(swap, ids)


async def test_a_block_that_grows_does_not_go_to_disk_at_every_token() -> None:
    async with watched(config_of(CASE, extra_host=20)) as swap:
        ids: list[int] = []
        for tokens in range(1, 33):
            await offload(swap, CASE, tokens, ids, (tokens - 1) // 16)
            await attend(swap, CASE, 0, ids, tokens - 1)
        await swap.flush()
        assert swap.statistics().blocks_written == 2 * 3
        await offload(swap, CASE, 40, ids, 2)
        await swap.flush()
        assert swap.statistics().blocks_written == 3 * 3
        got = await attend(swap, CASE, 2, ids, 39)
        assert (got == (await alone(CASE, [*range(40)]))[2][39]).all()
        await give_back(swap, ids)


async def test_device_pointers_with_strides_and_without_a_host_copy() -> None:
    wanted = await alone(CASE, [*range(16)])
    async with watched(config_of(CASE)) as swap:
        memory = swap.device.allocate(1 << 16)
        whole = tensor_in(memory, "bf16", (16, 2, 3, 32))
        wide = whole.array()
        wide[...] = 0x7FC0
        wide[:, :, 0, :16], wide[:, :, 1, 8:24] = CASE.keys[0][:16], CASE.values[0][:16]
        stream = swap.device.stream()
        block = await swap.alloc_disk_block_id()
        await swap.offload_block_on_stream(
            stream=stream,
            layer=0,
            block=block,
            k_block_dev=memory.address,
            v_block_dev=memory.address + 2 * 40,
            k_strides=(whole.strides[0], whole.strides[1], 2),
            v_strides=(whole.strides[0], whole.strides[1], 2),
        )
        flat = tensor_in(memory, "bf16", (8, 6, 16), offset_bytes=1 << 15)
        flat.array()[0] = CASE.queries[0][15]
        result = await swap.attend_layer_on_stream(
            stream=stream.handle,
            layer=0,
            seq_block_ids=np.array([block]),
            q_dev=flat.address,
            output_dev=flat.address + flat.strides[0],
        )
        await result.done()
        assert (flat.array()[1] == wanted[0][15]).all()
        assert await swap.dec_disk_ref(block=block) == 0
        await asyncio.to_thread(stream.close)
        await asyncio.to_thread(memory.close)


async def test_the_device_copy_is_taken_when_both_are_given() -> None:
    async with watched(config_of(CASE)) as swap:
        block = await swap.alloc_disk_block_id()
        host = block_of(CASE, 0, 0, 16)
        await swap.offload_block(
            layer=0,
            block=block,
            k_block_dev=host["k_block_host"],
            k_block_host=np.zeros((16, 2, 16), np.uint16),
            v_block_host=host["v_block_host"],
        )
        got = await attend(swap, CASE, 0, [block], 15)
        assert (got == (await alone(CASE, [*range(16)]))[0][15]).all()
        await give_back(swap, [block])


async def test_blocks_without_prediction_are_attended_as_usual() -> None:
    async with watched(config_of(CASE)) as swap:
        ids = [await swap.alloc_disk_block_id() for _ in range(3)]
        for number, block in enumerate(ids):
            await swap.offload_block_no_predict_on_stream(
                stream=None,
                layer=1,
                block=block,
                **block_of(CASE, 1, number, 16),  # type: ignore[arg-type]
            )
        got = await attend(swap, CASE, 1, ids, 47)
        group = CASE.dims.group(1)
        heads = oracle.Heads(group.group_size, group.logit_scale)
        exact = oracle.attend(CASE.queries[1][47:48], CASE.keys[1], CASE.values[1], 48, heads)
        assert oracle.relative_error(oracle.decode(got[None]), exact.exact) <= exact.tolerance()
        await give_back(swap, ids)


async def test_rewriting_a_block_is_seen_by_whoever_attends_later() -> None:
    """From a device slot, a host slot and disk alike; readers before it keep what they read."""
    for extra in (0, 60):
        async with watched(config_of(CASE, extra_device=extra, extra_host=extra)) as swap:
            ids: list[int] = []
            await offload(swap, CASE, 320, ids)
            streams = [swap.device.stream() for _ in range(2)]
            for number in (0, 7, 19):
                before = await attend(swap, CASE, 0, [ids[number]], 15)
                for source in (20, 21):
                    block = block_of(CASE, 0, source, 16)
                    await swap.offload_block_on_stream(
                        stream=streams[source % 2],
                        layer=0,
                        block=ids[number],
                        **block,  # type: ignore[arg-type]
                    )
                after = await attend(swap, CASE, 0, [ids[number]], 15)
                fresh = [await swap.alloc_disk_block_id()]
                await swap.offload_block(layer=0, block=fresh[0], **block)  # type: ignore[arg-type]
                same = await attend(swap, CASE, 0, fresh, 15)
                assert (after == same).all()
                assert (after != before).any()
                await give_back(swap, fresh)
            await give_back(swap, ids)
            for stream in streams:
                await asyncio.to_thread(stream.close)


async def test_a_slot_is_not_filled_again_under_its_reader() -> None:
    wanted = (await alone(CASE, [*range(8)]))[0][7]
    async with watched(config_of(CASE, extra_host=20)) as swap:
        block = await swap.alloc_disk_block_id()
        await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 0, 8))  # type: ignore[arg-type]
        stuck = Stuck(swap)
        out = np.full((6, 16), 0x7FC0, np.uint16)
        result = await swap.attend_layer_on_stream(
            stream=stuck.stream,
            layer=0,
            seq_block_ids=[block],
            q_dev=CASE.queries[0][7],
            output_dev=out,
        )
        again = block_of(CASE, 0, 5, 9)
        call = asyncio.ensure_future(swap.offload_block(layer=0, block=block, **again))  # type: ignore[arg-type]
        freeing = asyncio.ensure_future(swap.dec_disk_ref(block=block))
        await turns(200)
        early = call.done() or freeing.done()
        stuck.go()
        assert not early
        await call
        await result.done()
        assert (out == wanted).all()
        assert await freeing == 0
        await asyncio.to_thread(stuck.stream.close)


async def test_references_and_ids() -> None:
    async with watched(config_of(CASE)) as swap:
        free = swap.disk_free_count()
        block = await swap.alloc_disk_block_id()
        await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 0, 9))  # type: ignore[arg-type]
        await swap.inc_disk_ref(block=block)
        assert swap.disk_refcount(block=block) == 2
        # It was never written: its first content may still come, and change nobody's bytes.
        await swap.flush()
        with pytest.raises(SharedBlock, match="new id"):
            await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 0, 10))  # type: ignore[arg-type]
        assert await swap.dec_disk_ref(block=block) == 1
        assert await swap.dec_disk_ref(block=block) == 0
        assert swap.disk_free_count() == free
        for call in (
            lambda: swap.dec_disk_ref(block=block),
            lambda: swap.inc_disk_ref(block=block),
            lambda: attend(swap, CASE, 0, [block], 0),
            lambda: swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 0, 9)),  # type: ignore[arg-type]
        ):
            with pytest.raises(StaleBlockId):
                await call()
        ids = [await swap.alloc_disk_block_id() for _ in range(free)]
        with pytest.raises(OutOfBlocks):
            await swap.alloc_disk_block_id()
        await give_back(swap, ids)


async def test_bad_arguments_change_nothing() -> None:
    async with watched(config_of(CASE)) as swap:
        ids: list[int] = []
        await offload(swap, CASE, 40, ids)
        good = block_of(CASE, 0, 0, 16)
        other = await swap.alloc_disk_block_id()
        wrong_blocks: list[dict[str, object]] = [
            {"layer": 3},
            {"layer": True},
            {"block": -1},
            {"block": ids[0] + (1 << 32)},
            {"valid_tokens": 0},
            {"valid_tokens": 17},
            {"k_block_host": None},
            {"k_block_host": np.zeros((15, 2, 16), np.uint16)},
            {"k_block_host": np.zeros((16, 2, 16), np.float32)},
            {"k_block_dev": 3},
            {"k_block_dev": -8},
            {"k_block_dev": 4096, "k_strides": (64, 32)},
            {"k_block_dev": 4096, "k_strides": (64, 32, 1)},
            {"k_strides": (64, 32, 2)},
        ]
        for wrong in wrong_blocks:
            with pytest.raises(ArgumentError):
                await swap.offload_block(**{"layer": 0, "block": other, **good, **wrong})  # type: ignore[arg-type]
        out = np.zeros((6, 16), np.uint16)
        usual = {"layer": 0, "seq_block_ids": ids, "q_dev": CASE.queries[0][39], "output_dev": out}
        frozen = np.zeros((6, 16), np.uint16)
        frozen.flags.writeable = False
        wrong_attends: list[dict[str, object]] = [
            {"layer": -1},
            {"seq_block_ids": []},
            {"seq_block_ids": [ids[0], ids[1], ids[0]]},
            {"seq_block_ids": [ids[0], ids[2], ids[1]]},
            {"seq_block_ids": [*ids[:2], other]},
            {"seq_block_ids": [[ids[0]]]},
            {"seq_block_ids": ["a"]},
            {"q_dev": None},
            {"q_dev": CASE.queries[0][:2]},
            {"output_dev": np.zeros((6, 17), np.uint16)},
            {"output_dev": frozen},
            {"last_block_valid_slots": 0},
            {"last_block_valid_slots": 9},
            {"last_block_valid_slots": 1.5},
        ]
        for wrong in wrong_attends:
            arguments = {"stream": None, "last_block_valid_slots": 8, **usual, **wrong}
            with pytest.raises(ArgumentError):
                await swap.attend_layer_on_stream_with_q_pos(**arguments)
        assert not out.any()
        with pytest.raises(ArgumentError, match="stream"):
            await swap.attend_layer_on_stream(stream="x", **usual)
        got = await attend(swap, CASE, 0, ids, 39)
        assert (got == (await alone(CASE, [*range(40)]))[0][39]).all()
        await give_back(swap, [*ids, other])


async def test_many_callers_and_a_disk_that_fails() -> None:
    """Lists of blocks attended at once, some calls cancelled; writes fail for a while."""
    full = Fault(FaultKind.ERRNO, only="write", at=5, count=30, errno=errno.ENOSPC)
    wanted = await alone(CASE, [*range(640)])
    async with watched(config_of(CASE, extra_host=130), full) as swap:
        ids: list[int] = []
        await offload(swap, CASE, 640, ids)
        random = np.random.default_rng(4)

        async def ask(layer: int, row: int) -> None:
            got = await attend(
                swap, CASE, layer, ids[: row // 16 + 1], row, last_block_valid_slots=row % 16 + 1
            )
            assert (got == wanted[layer][row]).all()

        calls = [
            asyncio.ensure_future(ask(int(random.integers(3)), int(random.integers(640))))
            for _ in range(24)
        ]
        await turns(9)
        for call in calls[::5]:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends
        for _ in range(30):
            try:
                await swap.flush()
            except BlockIOError:
                continue
            break
        await offload(swap, CASE, 640, ids, 30)
        await ask(0, 639)
        await give_back(swap, ids)


@pytest.mark.parametrize("moment", [0, 1, 5, 40])
async def test_closing_ends_every_call(moment: int) -> None:
    async with watched(config_of(CASE), close_sequences=False) as swap:
        ids: list[int] = []
        await offload(swap, CASE, 400, ids)
        calls = [
            asyncio.ensure_future(call)
            for n in range(4)
            for call in (
                attend(swap, CASE, n % 3, ids, 399),
                swap.offload_block(layer=0, block=ids[n], **block_of(CASE, 0, n, 16)),  # type: ignore[arg-type]
                swap.dec_disk_ref(block=ids[10 + n]),
            )
        ]
        await turns(moment)
        await swap.close()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        for end in ends:
            assert not isinstance(end, BaseException) or isinstance(end, hsswap.HsswapError), end
        with pytest.raises(ClosedError):
            await swap.alloc_disk_block_id()


async def test_constructors_and_what_can_be_looked_at() -> None:
    device = open_device("host")
    stream = device.stream()
    config = replace(config_of(CASE), io="memory")
    swap = await HighSpeedSwap.new_on_stream(stream=stream, cfg=config, ctx=device)
    try:
        assert swap.config is config
        assert len(swap.pool) == 1
        assert swap.predictor is not None
        ids: list[int] = []
        await offload(swap, CASE, 100, ids)
        await attend(swap, CASE, 0, ids, 99)
        await swap.flush()
        summary = swap.diagnostic_summary()
        assert (summary.num_layers, summary.active_disk_blocks) == (3, 7)
        assert summary.disk_block_capacity == 100
        assert summary.scratch_pool_resident + summary.scratch_pool_free == config.device_slots
        assert summary.host_slots["dirty"] == 0
        assert sum(summary.host_slots.values()) == config.host_slots
        assert summary.statistics.attends == 1
        assert summary.left_out_mass_mean is None
        assert (summary.device, summary.path) == ("host", "memory")
        assert (summary.io_errors, summary.checksum_failures, summary.callers_waiting) == (0, 0, 0)
    finally:
        await swap.close()
    with pytest.raises(ArgumentError, match="stream"):
        await HighSpeedSwap.new_on_stream(stream="x", cfg=config)
    other = await HighSpeedSwap.new(cfg=config)
    await other.close()


async def test_top_k_says_how_good_its_predictions_are() -> None:
    config = config_for(CASE, extra_device=3 * hsswap.TopK(2).cache_blocks(16))
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap:
        sequence = swap.sequence(top_k=hsswap.TopK(2))
        await sequence.append(0, CASE.keys[0], CASE.values[0])
        result = await sequence.attend(0, CASE.queries[0][-1:])
        await result.done()
        summary = swap.diagnostic_summary()
        assert summary.left_out_mass_mean == pytest.approx(float(result.left_out_mass.mean()))
        assert summary.sequences == 1
