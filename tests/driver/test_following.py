"""Which kernels of a top-k step may read before the one ahead has ended: what launch code says."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from hsswap.driver.base import Stream
from hsswap.driver.cuda_attention import enqueue_attend
from hsswap.driver.cuda_seam import Launch
from hsswap.driver.cuda_top_k import score, select
from hsswap.driver.operations import ProjectionCodes, ScoreWork, SelectWork, UnitCache
from hsswap.driver.tensor import Tensor
from tests.driver.test_cuda_prepare import (
    HOPPER,
    LLAMA,
    Listening,
    attend_work,
    fetching,
    i32_table,
    tensor,
)

ELSEWHERE = 4096  # bytes behind where other tensors are


class Remembering(Listening):
    """A GPU that knows its last launch, as a stream does."""

    last: Launch | None = None
    told: tuple[str, bool] | None = None

    def start(self, stream: Stream, launch: Launch) -> None:
        """Keep it, and what select or attention, whose end may be others, was told."""
        self.last = launch
        if launch.kernel in ("select_few", "select", "attend_decode"):
            (number,) = struct.unpack("<i", launch.params[-4:])
            self.told = launch.kernel, bool(number)

    def last_launch(self, stream: Stream) -> Launch | None:
        """The one kept."""
        return self.last

    def score(self, blocks: int) -> None:
        """By one of the kernels that end a score."""
        matrix, heads = tensor("bf16", (128, 32)), LLAMA.kv_heads
        codes = ProjectionCodes(tensor("bf16", (blocks, heads, 16, 32)), matrix, LLAMA)
        index = np.arange(blocks, dtype=np.int32)
        work = ScoreWork(
            codes, tensor("bf16", (32, 128)), index, tensor("f32", (LLAMA.kv_heads, blocks))
        )
        score(self, None, work)  # type: ignore[arg-type]

    def select(self, blocks: int, chosen: Tensor, elsewhere: str | None = None) -> None:
        """Into ``chosen``; the output that is named is elsewhere."""
        heads, count = chosen.shape
        places = i32_table(heads, count)
        work = SelectWork(
            scores=tensor("f32", (heads, blocks)),
            shares=tensor("f32", (heads, blocks)),
            k=count,
            pinned=np.empty(0, np.int32),
            cache=UnitCache(places, places, tensor("f32", (heads, count)), places),
            step=3,
            decay=0.9,
            last_chosen=chosen,
            last_mass=tensor("f32", (heads, count)),
            chosen=chosen,
            chosen_slots=places,
            missing=tensor("u8", (heads, count)),
            left_out=tensor("f32", (heads,)),
        )
        if elsewhere is not None:
            output = getattr(work, elsewhere)
            moved = replace(output, address=output.address + ELSEWHERE)
            work = replace(work, **{elsewhere: moved})
        select(self, None, work)  # type: ignore[arg-type]

    def attend(self, chosen: Tensor) -> None:
        """What was chosen, with a fetch."""
        sizes = (1, 1, chosen.shape[1])
        work = fetching(attend_work(LLAMA, 16, sizes, ranked=True, skip_bytes=0))
        assert work.fetch is not None
        work = replace(work, fetch=replace(work.fetch, chosen=chosen))
        enqueue_attend(self, None, work, work.end)  # type: ignore[arg-type]


def test_select_reads_its_cache_while_a_score_ends() -> None:
    chip, chosen = Remembering(HOPPER), i32_table(LLAMA.kv_heads, 60)
    chip.select(2000, chosen)
    assert chip.told == ("select_few", False)  # nothing is known of what is ahead
    chip.score(2000)
    chip.select(2000, chosen)
    assert chip.told == ("select_few", True)
    chip.select(2000, chosen)  # a select writes what the next one reads
    assert chip.told == ("select_few", False)


@pytest.mark.parametrize(("blocks", "count"), [(2000, 60), (2000, 256), (6000, 300)])
def test_attention_reads_what_is_chosen_while_select_ends(blocks: int, count: int) -> None:
    chip, chosen = Remembering(HOPPER), i32_table(LLAMA.kv_heads, count)
    chip.select(blocks, chosen)
    chip.attend(chosen)
    assert chip.told == ("attend_decode", True)
    chip.attend(chosen)  # another kernel is between: it may write units
    assert chip.told == ("attend_decode", False)


@pytest.mark.parametrize("other", ["chosen", "chosen_slots", "missing"])
def test_attention_waits_for_a_select_of_other_lists(other: str) -> None:
    """It would wait for good for entries that nobody writes."""
    chip, chosen = Remembering(HOPPER), i32_table(LLAMA.kv_heads, 60)
    chip.select(2000, chosen, other)
    chip.attend(chosen)
    assert chip.told == ("attend_decode", False)


@pytest.mark.parametrize(("blocks", "count"), [(2000, 600), (9000, 60)])
def test_attention_waits_for_a_select_that_does_not_tell(blocks: int, count: int) -> None:
    """More are chosen than it has threads; or the blocks are too many for it."""
    chip, chosen = Remembering(HOPPER), i32_table(LLAMA.kv_heads, count)
    chip.select(blocks, chosen)
    chip.attend(chosen)
    assert chip.told == ("attend_decode", False)
