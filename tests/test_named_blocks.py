"""The calls on blocks named by id: offload, attend, count references, look inside."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hsswap import (
    ArgumentError,
    OutOfBlocks,
    SharedBlock,
    StaleBlockId,
)
from hsswap.driver.tensor import tensor_in
from tests.branches import alone
from tests.driver import oracle
from tests.named_cases import CASE, OTHER, attend, block_of, config_of, give_back, offload
from tests.swap_cases import Case
from tests.swap_watch import Linked, Stuck, turns, watched
from tests.ways import evict


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
            {"k_block_dev": 4096, "k_strides": (1 << 63, 32, 2)},
            {"k_block_dev": 4096, "k_strides": (64, -(1 << 70), 2)},
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


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("wait", [False, True])
async def test_a_block_that_is_shared_before_its_new_content_is_on_disk(
    wait: bool, written: bool
) -> None:
    """The second holder has what was offloaded last, in memory and on disk, and it stays so."""
    async with watched(config_of(CASE)) as swap:
        taken: list[int] = []  # whatever device slots full blocks may stay in
        await offload(swap, CASE, 400, taken)
        block = await swap.alloc_disk_block_id()
        await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 0, 7))  # type: ignore[arg-type]
        if written:
            await swap.flush()
        await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 0, 16))  # type: ignore[arg-type]
        if wait:
            await swap.writes.settle()
        await swap.inc_disk_ref(block=block)
        with pytest.raises(SharedBlock, match="new id"):
            await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 1, 16))  # type: ignore[arg-type]
        await swap.flush()
        assert await swap.dec_disk_ref(block=block) == 1
        before = swap.statistics().bytes_read
        await evict(swap)
        wanted = await alone(CASE, list(range(16)))
        assert (await attend(swap, CASE, 0, [block], 15) == wanted[0][15]).all()
        assert swap.statistics().bytes_read > before
        await give_back(swap, [block, *taken])
