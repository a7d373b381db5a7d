"""A store whose process is killed under write load, again and again: run as a child by tests.

The child keeps writing groups of blocks; while one group is being written it flushes the one before
and says on stdout what was acknowledged. What it drops it announces before. The parent kills it,
opens the store itself, and checks that everything acknowledged and not dropped is there, whole.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hsswap.io.checking import check_store
from tests.io.persist_support import SMALL, check_ids, content_of, open_store
from tests.io.support import Outcome, begin_write

CAPACITY = 512
GROUP = 24
ROOT = Path(__file__).parents[2]


async def write_for_ever(place: Path, seed: int) -> None:
    """The child."""
    choose = random.Random(seed)
    async with await open_store(place, CAPACITY) as store:
        groups: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        kept = store.ids.kept()
        if len(kept):
            store.ids.add_reference(kept)
            groups.extend(np.array_split(kept, -(-len(kept) // GROUP)))
        pending: tuple[np.ndarray[tuple[int], np.dtype[np.int64]], list[Outcome]] | None = None
        while True:
            while store.ids.free_count < GROUP:
                gone = groups.pop(choose.randrange(len(groups)))
                print("drop", *gone.tolist(), flush=True)
                store.ids.drop_reference(gone)
            ids = store.ids.allocate(choose.randint(1, GROUP))
            indices = store.ids.check(ids)
            outcomes = [
                begin_write(store, layer, indices, content_of(store, ids, layer))
                for layer in range(SMALL.layers)
            ]
            if pending is not None:
                for outcome in pending[1]:
                    assert not (await outcome.end()).errors
                await store.stored(store.ids.check(pending[0]))
                print("stored", *pending[0].tolist(), flush=True)
                groups.append(pending[0])
            pending = ids, outcomes


@dataclass
class Killing:
    """The parent. ``acknowledged``: ids that must be there. The others count what was done."""

    place: Path
    acknowledged: set[int] = field(default_factory=set)
    rounds: int = 0
    blocks_checked: int = 0

    def round(self) -> None:
        """Let a child write, kill it at some moment, look at what it leaves."""
        self.rounds += 1
        lines_wanted = random.Random(self.rounds).randint(1, 40)
        command = [sys.executable, "-m", "tests.io.killed", str(self.place), str(self.rounds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            assert child.stdout is not None
            for _ in range(lines_wanted):
                self._hear(child.stdout.readline())
            child.kill()
            for line in child.stdout:
                self._hear(line)
        assert child.returncode == -9
        report = check_store(self.place)
        assert report.ok, report
        asyncio.run(self._look())

    def _hear(self, line: str) -> None:
        if not line.endswith("\n"):  # cut off by the kill: not said
            return
        word, *ids = line.split()
        if word == "stored":
            self.acknowledged.update(map(int, ids))
        else:
            assert word == "drop", line
            self.acknowledged.difference_update(map(int, ids))

    async def _look(self) -> None:
        async with await open_store(self.place, CAPACITY) as store:
            kept = store.ids.kept()
            assert self.acknowledged <= set(kept.tolist())
            store.ids.add_reference(kept)
            indices = store.ids.check(kept)
            known = [store.describe(layer, indices).written for layer in range(SMALL.layers)]
            whole = np.logical_and.reduce(known)
            assert self.acknowledged <= set(kept[whole].tolist())
            await check_ids(store, kept[whole])
            self.blocks_checked += int(whole.sum()) * SMALL.layers
            # What was half acknowledged goes, so that the next child finds whole ids alone.
            store.ids.drop_reference(kept[~whole])


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1]), int(sys.argv[2])))
