"""Persistent stores: ids and generations, kept blocks, copy-on-write, prefixes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import (
    ArgumentError,
    BlockIOError,
    CorruptBlock,
    OutOfBlocks,
    SharedBlock,
    StaleBlockId,
)
from hsswap.io import BlockStore
from hsswap.io.directory import segment_name
from hsswap.io.ids import generation_of, index_of
from hsswap.io.keys import PrefixKeys
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from tests.io.persist_support import (
    SALT,
    SMALL,
    check_ids,
    content_of,
    memory,
    open_store,
    tokens_of,
    write_ids,
)
from tests.io.support import begin_write, pattern, read, write

# Ids.


async def test_generations_are_never_given_out_again() -> None:
    io = memory()
    async with await open_store(io) as store:
        ids = store.ids.allocate(2)
        await write_ids(store, ids)
        await store.flush()
        lost = store.ids.allocate(5)
        for _ in range(3):
            store.ids.drop_reference(lost)
            lost = store.ids.allocate(5)
        state = io.power_state()
        highest = generation_of(int(lost.max()))
    again = MemoryIO(files=state.cut(lambda number: False), power=True)
    async with await open_store(again) as store:
        new = store.ids.allocate(5)
        assert generation_of(int(new.min())) > highest
        with pytest.raises(StaleBlockId):
            store.ids.check(lost)


async def test_kept_blocks_go_when_room_is_needed_oldest_first() -> None:
    io = memory()
    async with await open_store(io, capacity=32) as store:
        first = store.ids.allocate(8)
        await write_ids(store, first)
        await store.flush()
        second = store.ids.allocate(8)
        await write_ids(store, second)
    async with await open_store(io.power_cut(lambda number: True), capacity=32) as store:
        assert store.ids.kept().tolist() == [*first.tolist(), *second.tolist()]
        held = store.ids.allocate(16)
        assert store.ids.kept_count == 16
        more = store.ids.allocate(5)
        assert store.ids.kept().tolist() == [*first[5:].tolist(), *second.tolist()]
        with pytest.raises(OutOfBlocks, match="12 blocks wanted, 11 of 32"):
            store.ids.allocate(12)
        assert store.ids.kept_count == 11
        rest = store.ids.allocate(11)
        assert len({index_of(int(i)) for i in [*held, *more, *rest]}) == 32
        await write_ids(store, rest)
        await check_ids(store, rest)


async def test_references_are_counted() -> None:
    async with await open_store(memory(), capacity=2) as store:
        ids = store.ids
        first, second = ids.allocate(2).tolist()
        assert ids.free_count == 0
        with pytest.raises(OutOfBlocks):
            ids.allocate(1)
        ids.add_reference([first])
        assert ids.refcount(first) == 2
        assert ids.drop_one(first) == 1
        assert ids.drop_one(first) == 0
        for call in (lambda stale: ids.add_reference([stale]), ids.drop_one, ids.refcount):
            for stale in (first, -1, 1 << 62, 12345):
                with pytest.raises(StaleBlockId):
                    call(stale)
        assert ids.free_count == 1
        assert ids.allocate(1) != [first]
        assert ids.refcount(second) == 1


# Copy-on-write.


async def test_shared_blocks_are_not_written_and_can_be_copied() -> None:
    async with await open_store(memory()) as store:
        ids = store.ids.allocate(3)
        await write_ids(store, ids)
        indices = store.ids.check(ids)
        store.ids.add_reference(ids[1:2])
        outcome = await write(store, 0, indices, pattern(3, 4096, 1))
        assert {n: type(e) for n, e in outcome.errors.items()} == {1: SharedBlock}
        assert "copy_block" in str(outcome.errors[1])
        await check_ids(store, ids[1:2])
        copied = await store.copy_block(int(ids[1]))
        index = store.ids.check([copied])
        for layer in range(2):
            found, outcome = await read(store, layer, index)
            assert np.array_equal(found, content_of(store, ids[1:2], layer))
        assert not (await write(store, 0, index, pattern(1, 4096, 2))).errors
        await check_ids(store, ids[1:2])
        assert store.ids.refcount(int(ids[1])) == 2
        assert store.ids.refcount(copied) == 1
        with pytest.raises(StaleBlockId):
            await store.copy_block(-1)


async def test_what_is_being_written_is_copied_too() -> None:
    gate = Gate()
    held = Fault(FaultKind.HOLD, only="write", at=2, gate=gate)  # behind manifest and records
    async with await open_store(memory(held)) as store:
        ids = store.ids.allocate(1)
        writing = [
            begin_write(store, layer, store.ids.check(ids), content_of(store, ids, layer))
            for layer in range(2)
        ]
        copying = asyncio.ensure_future(store.copy_block(int(ids[0])))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        gate.opened.set()
        index = store.ids.check([await copying])
        assert all(outcome.ended for outcome in writing)
        for layer in range(2):
            found, outcome = await read(store, layer, index)
            assert not outcome.errors
            assert np.array_equal(found, content_of(store, ids, layer))


async def test_a_copy_that_fails_takes_no_id() -> None:
    fault = Fault(FaultKind.ERRNO, only="read", at=1, count=None)
    async with await open_store(memory(fault)) as store:
        ids = store.ids.allocate(1)
        await write_ids(store, ids)
        free = store.ids.free_count
        with pytest.raises(BlockIOError):
            await store.copy_block(int(ids[0]))
        assert store.ids.free_count == free
        assert store.ids.refcount(int(ids[0])) == 1


# Prefixes.


async def test_prefixes_are_found_again_by_another_process(tmp_path: Path) -> None:
    tokens = tokens_of(1, 10)
    async with await open_store(tmp_path, fingerprint="model") as store:
        ids = store.ids.allocate(10)
        await write_ids(store, ids)
        assert store.commit_prefix(tokens, ids) == 10
        assert store.commit_prefix(tokens, ids) == 0
        store.ids.drop_reference(ids)
        assert store.ids.kept_count == 10
        await store.flush()
    async with await open_store(tmp_path, fingerprint="model") as store:
        other = np.concatenate([tokens[:96], tokens_of(2, 4)])
        found = store.find_prefix(other)
        assert found.tolist() == ids[:6].tolist()
        assert store.ids.refcount(int(found[0])) == 1
        assert store.find_prefix(tokens[1:]).tolist() == []
        whole = store.find_prefix(np.append(tokens, [5, 6]))
        assert whole.tolist() == ids.tolist()
        assert store.ids.refcount(int(found[0])) == 2
        await check_ids(store, whole)
        outcome = await write(store, 0, store.ids.check(whole[6:7]), pattern(1, 4096, 1))
        assert isinstance(outcome.errors[0], SharedBlock)


def test_keys_do_not_depend_on_the_process() -> None:
    script = (
        "from hsswap.io.keys import PrefixKeys; from tests.io.persist_support import tokens_of;"
        "print(PrefixKeys(b'salt', 'model', 0, 16).of(tokens_of(1, 10))[-1].hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert answers == {PrefixKeys(b"salt", "model", 0, 16).of(tokens_of(1, 10))[-1].hex()}


async def test_keys_tell_models_ranks_and_salts_apart() -> None:
    tokens = tokens_of(1, 2)
    keys = {
        PrefixKeys(salt, fingerprint, rank, size).of(tokens)[0]
        for salt in (b"a", b"b")
        for fingerprint in ("m", "n")
        for rank in (0, 1)
        for size in (8, 16)
    }
    assert len(keys) == 16


async def test_what_cannot_be_a_prefix_is_refused() -> None:
    async with await open_store(memory()) as store:
        ids = store.ids.allocate(3)
        tokens = tokens_of(1, 3)
        with pytest.raises(ArgumentError, match="not written in full"):
            store.commit_prefix(tokens, ids)
        await write_ids(store, ids)
        with pytest.raises(ArgumentError, match="2 full blocks"):
            store.commit_prefix(tokens[:47], ids)
        with pytest.raises(ArgumentError, match="integers"):
            store.commit_prefix([0.5] * 48, ids)
        with pytest.raises(StaleBlockId):
            store.commit_prefix(tokens, [1, 2, 3])
        assert store.find_prefix(tokens).tolist() == []
        assert store.statistics().prefix_blocks == 0


async def test_the_ends_of_old_prefixes_go_first() -> None:
    io = memory()
    async with await open_store(io, capacity=32) as store:
        sequences = []
        for number in range(2):
            ids = store.ids.allocate(12)
            await write_ids(store, ids)
            store.commit_prefix(tokens_of(number, 12), ids)
            sequences.append(ids)
        store.ids.drop_reference(sequences[1])
        store.ids.drop_reference(sequences[0])
        store.ids.allocate(8 + 5)
        assert len(store.find_prefix(tokens_of(0, 12))) == 12
        found = store.find_prefix(tokens_of(1, 12))
        assert found.tolist() == sequences[1][:7].tolist()
        with pytest.raises(OutOfBlocks):
            store.ids.allocate(1)


async def test_a_prefix_whose_block_another_thread_takes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was found by its key, and is another's before the reference on it is taken."""
    tokens = tokens_of(1, 2)
    async with await open_store(memory(), capacity=2) as store:
        ids = store.ids.allocate(2)
        await write_ids(store, ids)
        store.commit_prefix(tokens, ids)
        store.ids.drop_reference(ids)
        find = store._prefixes.index.find
        taken: list[int] = []

        def find_and_lose(keys: list[bytes]) -> list[int]:
            found = find(keys)
            if not taken:
                taken.extend(store.ids.allocate(1).tolist())
            return found

        monkeypatch.setattr(store._prefixes.index, "find", find_and_lose)
        assert store.find_prefix(tokens).tolist() == ids[:1].tolist()
        assert store.ids.check(taken).tolist() == [1]
        assert store.ids.refcount(taken[0]) == 1


async def test_a_corrupt_block_is_no_prefix_any_more(tmp_path: Path) -> None:
    tokens = tokens_of(1, 4)
    async with await open_store(tmp_path) as store:
        ids = store.ids.allocate(4)
        await write_ids(store, ids)
        store.commit_prefix(tokens, ids)
    with (tmp_path / segment_name(0)).open("r+b") as file:
        file.seek(2 * 4096 + 17)
        file.write(b"?")
    async with await open_store(tmp_path) as store:
        found = store.find_prefix(tokens)
        assert len(found) == 4
        _, outcome = await read(store, 0, store.ids.check(found))
        assert {n: type(e) for n, e in outcome.errors.items()} == {2: CorruptBlock}
        again = store.find_prefix(tokens)
        assert len(again) == 2
        store.ids.drop_reference(found)
        with pytest.raises(StaleBlockId):  # nobody can find it: it is freed, and not kept
            store.ids.add_reference(found[2:3])
    async with await open_store(tmp_path) as store:
        assert len(store.find_prefix(tokens)) == 2, "it is found again by the next process"


async def test_a_prefix_in_a_temporary_store() -> None:
    async with await BlockStore.open(SMALL, None, 300, io="memory", salt=SALT) as store:
        ids = store.ids.allocate(4)
        await write_ids(store, ids)
        store.commit_prefix(tokens_of(1, 4), ids)
        store.ids.drop_reference(ids)
        await store.flush()
        found = store.find_prefix(tokens_of(1, 4))
        await check_ids(store, found)
        assert store.statistics().segment_files == 1
