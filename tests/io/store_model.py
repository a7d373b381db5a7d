"""Random operations on a persistent store, and on a model of it in plain Python.

The store is in RAM; some of the reopenings are losses of power, of which random un-synced writes
survive. A block's content is its seed, repeated, so that making and checking it costs little.
"""

from __future__ import annotations

import mmap
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hsswap.config import ModelDims
from hsswap.errors import ArgumentError, CorruptBlock, OutOfBlocks, SharedBlock
from hsswap.io import BlockStore
from hsswap.io.memory import MemoryIO
from tests.io.persist_support import open_store
from tests.io.support import Outcome

DIMS = ModelDims.uniform(layers=2, q_heads=1, kv_heads=1, head_dim=8)
CAPACITY = 48
MOST = 12  # blocks of a call
Block = tuple[int, int]  # id, layer
OPERATIONS = {
    "alloc": 10,
    "write": 24,
    "read": 24,
    "ref": 5,
    "unref": 14,
    "fork": 4,
    "commit": 6,
    "find": 6,
    "flush": 4,
    "evict": 1,
}
"""How often each is played, reopenings aside."""


class Buffer:
    """Page-aligned memory for one call at a time."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, MOST * 4096)
        self.words = np.frombuffer(self._map, np.int64).reshape(MOST, 512)
        first = self.words.__array_interface__["data"][0]
        self.addresses = np.arange(MOST, dtype=np.uint64) * np.uint64(4096) + np.uint64(first)


@dataclass
class Model:
    """What must be so. ``kept``: ids that nobody holds, with what decides who goes first."""

    references: dict[int, int] = field(default_factory=dict)
    content: dict[Block, int] = field(default_factory=dict)
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    depth_of: dict[int, int] = field(default_factory=dict)  # of ids with a key
    key_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    id_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    # What may be there after a loss of power: what was acknowledged, and what was written since.
    acknowledged: dict[Block, set[int]] = field(default_factory=dict)
    acknowledged_keys: set[tuple[int, ...]] = field(default_factory=set)
    history: dict[Block, set[int]] = field(default_factory=dict)
    named: dict[tuple[int, ...], set[int]] = field(default_factory=dict)  # ids that had a key
    clock: int = 0

    def free(self, block_id: int) -> None:
        """Nobody can have the block any more."""
        self.depth_of.pop(block_id, None)
        key = self.key_of.pop(block_id, None)
        if key is not None:
            del self.id_of[key]
            self.acknowledged_keys.discard(key)
        for layer in range(DIMS.layers):
            self.content.pop((block_id, layer), None)
            self.acknowledged.pop((block_id, layer), None)

    def reclaim(self, count: int) -> None:
        """Free the kept ids that go first."""
        by_age = sorted(self.kept, key=lambda i: (*self.kept[i], i & 0xFFFFFFFF))
        for block_id in by_age[: max(0, count)]:
            del self.kept[block_id]
            self.free(block_id)


class Player:
    """Plays random operations; every one is checked against the model at once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = Model()
        self.buffer = Buffer()
        self.done: Counter[str] = Counter()
        self.io = MemoryIO(power=True)
        self._next = 1

    async def open(self) -> None:
        self.store: BlockStore = await open_store(self.io, CAPACITY, DIMS)

    def held(self, most: int = MOST) -> list[int]:
        """Some ids that are held, none twice."""
        ids = list(self.model.references)
        return self.random.sample(ids, min(len(ids), self.random.randint(1, most)))

    async def alloc(self) -> None:
        model, count = self.model, self.random.randint(1, MOST)
        after = self.random.choice([None, *model.references])
        room = CAPACITY - len(model.references)
        try:
            ids = self.store.ids.allocate(count, after).tolist()
        except OutOfBlocks:
            assert count > room
            return
        assert count <= room
        model.reclaim(count - (room - len(model.kept)))
        for block_id in ids:
            assert block_id not in model.references
            assert (block_id, 0) not in model.history
            assert (block_id, 1) not in model.history
            model.references[block_id] = 1

    async def write(self) -> None:
        model, layer, ids = self.model, self.random.randrange(DIMS.layers), self.held()
        if not ids:
            return
        seeds = list(range(self._next, self._next + len(ids)))
        self._next += len(ids)
        self.buffer.words[: len(ids)] = np.array(seeds)[:, None]
        outcome = Outcome(len(ids))
        self.store.write(
            layer, self.store.ids.check(ids), self.buffer.addresses[: len(ids)], on_done=outcome
        )
        await outcome.end()
        for position, (block_id, seed) in enumerate(zip(ids, seeds, strict=True)):
            shared = model.references[block_id] > 1 or block_id in model.depth_of
            if shared and (block_id, layer) in model.content:
                assert isinstance(outcome.errors[position], SharedBlock)
            else:
                assert position not in outcome.errors
                model.content[block_id, layer] = seed
                if (block_id, layer) in model.acknowledged:
                    model.acknowledged[block_id, layer].add(seed)
                model.history.setdefault((block_id, layer), set()).add(seed)

    async def read_blocks(self, layer: int, ids: list[int]) -> dict[int, int | None]:
        """The seeds found; None for a block without content."""
        outcome = Outcome(len(ids))
        self.store.read(
            layer, self.store.ids.check(ids), self.buffer.addresses[: len(ids)], on_done=outcome
        )
        await outcome.end()
        found: dict[int, int | None] = {}
        for position, block_id in enumerate(ids):
            if position in outcome.errors:
                assert isinstance(outcome.errors[position], CorruptBlock)
                assert "no content" in str(outcome.errors[position])
                found[block_id] = None
            else:
                words = self.buffer.words[position]
                assert (words == words[0]).all()
                found[block_id] = int(words[0])
        return found

    async def read(self) -> None:
        layer, ids = self.random.randrange(DIMS.layers), self.held()
        for block_id, seed in (await self.read_blocks(layer, ids)).items():
            assert seed == self.model.content.get((block_id, layer))

    async def ref(self) -> None:
        ids = self.held(3)
        self.store.ids.add_reference(ids)
        for block_id in ids:
            self.model.references[block_id] += 1

    async def unref(self) -> None:
        ids, model = self.held(6), self.model
        if not ids:
            return
        freed = set(self.store.ids.drop_reference(ids).tolist())
        model.clock += 1
        for block_id in ids:
            model.references[block_id] -= 1
            if model.references[block_id]:
                assert block_id not in freed
                continue
            del model.references[block_id]
            assert (block_id in freed) == (block_id not in model.depth_of)
            if block_id in freed:
                model.free(block_id)
            else:
                model.kept[block_id] = model.clock, -model.depth_of[block_id]

    async def fork(self) -> None:
        model, ids = self.model, self.held(1)
        if not ids:
            return
        room = CAPACITY - len(model.references)
        try:
            copied = await self.store.copy_block(ids[0])
        except OutOfBlocks:
            assert not room
            return
        model.reclaim(1 - (room - len(model.kept)))
        model.references[copied] = 1
        for layer in range(DIMS.layers):
            seed = model.content.get((ids[0], layer))
            if seed is not None:
                model.content[copied, layer] = seed
                model.history.setdefault((copied, layer), set()).add(seed)

    async def commit(self) -> None:
        """Name some blocks; half of the time behind a prefix that has a name."""
        model, ids = self.model, self.held(4)
        if not ids:
            return
        start = self.random.choice([(), *model.id_of])
        before = [model.id_of.get(start[: 16 * n + 16], -1) for n in range(len(start) // 16)]
        if any(block_id not in model.references for block_id in before):
            start, before = (), []
        ids = [*before, *ids]
        tokens = [*start, *(self.random.randrange(3) for _ in range(16 * len(ids) - len(start)))]
        whole = all((i, layer) in model.content for i in ids for layer in range(DIMS.layers))
        try:
            named = self.store.commit_prefix(tokens, ids)
        except ArgumentError:
            assert not whole
            return
        assert whole
        count = 0
        for depth, block_id in enumerate(ids):
            key = tuple(tokens[: 16 * depth + 16])
            if key not in model.id_of and block_id not in model.key_of:
                model.id_of[key], model.key_of[block_id] = block_id, key
                model.depth_of[block_id] = depth
                model.named.setdefault(key, set()).add(block_id)
                count += 1
        assert named == count

    async def find(self) -> None:
        model = self.model
        if not model.id_of:
            return
        tokens = self.random.choice(list(model.id_of))
        expected: list[int] = []
        for end in range(16, len(tokens) + 1, 16):
            block_id = model.id_of.get(tokens[:end])
            if block_id is None:
                break
            expected.append(block_id)
        assert self.store.find_prefix([*tokens, 7]).tolist() == expected
        for block_id in expected:
            model.kept.pop(block_id, None)
            model.references[block_id] = model.references.get(block_id, 0) + 1

    async def flush(self) -> None:
        await self.store.flush()
        self.model.acknowledged = {block: {seed} for block, seed in self.model.content.items()}
        self.model.acknowledged_keys = set(self.model.id_of)

    async def evict(self) -> None:
        """Ask for all the room there is, and give it back."""
        model = self.model
        ids = self.store.ids.allocate(CAPACITY - len(model.references))
        assert len(set(ids.tolist())) == len(ids)
        model.reclaim(len(model.kept))
        self.store.ids.drop_reference(ids)

    async def reopen(self) -> None:
        """Close, and open again: everything is there, held by nobody."""
        old = self.model
        await self.store.close()
        self.io = self.io.power_cut(lambda number: True)
        await self._open_again()
        assert self.model.content == old.content
        assert self.model.id_of == old.id_of

    async def crash(self) -> None:
        """Cut the power: what was acknowledged is there; the rest is whole, or is not there."""
        state, old = self.io.power_state(), self.model
        left = [self.random.random() < 0.5 for _ in state.pending]
        await self.store.close()
        self.io = MemoryIO(files=state.cut(left.__getitem__), power=True)
        await self._open_again()
        for block, seeds in old.acknowledged.items():
            assert self.model.content[block] in seeds
        assert old.acknowledged_keys <= set(self.model.id_of)

    async def _open_again(self) -> None:
        """Hold everything that is there; each block must have been written like that."""
        old, model = self.model, Model()
        self.model = model
        await self.open()
        kept = self.store.ids.kept().tolist()
        self.store.ids.add_reference(kept)
        model.references = dict.fromkeys(kept, 1)
        for layer in range(DIMS.layers):
            for begin in range(0, len(kept), MOST):
                found = await self.read_blocks(layer, kept[begin : begin + MOST])
                for block_id, seed in found.items():
                    if seed is not None:
                        assert seed in old.history[block_id, layer]
                        model.content[block_id, layer] = seed
                        model.history[block_id, layer] = {seed}
        for tokens, ids in old.named.items():
            if alive := ids.intersection(kept):
                model.named[tokens] = alive
            key = self.store._prefixes.keys.of(tokens)[-1]
            if indices := self.store._prefixes.index.find([key]):
                block_id = next(i for i in kept if i & 0xFFFFFFFF == indices[0])
                assert block_id in ids
                model.id_of[tokens], model.key_of[block_id] = block_id, tokens
                model.depth_of[block_id] = len(tokens) // 16 - 1
        assert self.store.statistics().prefix_blocks == len(model.id_of)
        model.acknowledged = {block: {seed} for block, seed in model.content.items()}
        model.acknowledged_keys = set(model.id_of)

    async def play(self, count: int, *, reopenings: float) -> None:
        """``count`` operations; this share of them reopens the store, half by a loss of power."""
        names = list(OPERATIONS)
        weights = list(OPERATIONS.values())
        for _ in range(count):
            if self.random.random() < reopenings:
                name = self.random.choice(["reopen", "crash"])
            else:
                name = self.random.choices(names, weights)[0]
            await getattr(self, name)()
            self.done[name] += 1
