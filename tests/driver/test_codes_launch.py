"""How the kernels of a score of codes are spread over a GPU: what launch code says."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap.codec import HeadCodec
from hsswap.config import LayerGroup
from hsswap.driver.base import Stream
from hsswap.driver.codes_operations import LayerCodes, Resident, ScoreCodesWork, ScoreMemory
from hsswap.driver.cuda_codes import score
from hsswap.driver.cuda_seam import Launch
from hsswap.driver.operations import UnitPool, unit_bytes_of
from tests.driver.test_cuda_prepare import AMPERE, HOPPER, SMALL, Listening, tensor

GROUP = LayerGroup(1, 32, 8, 128)
RESERVED = 1024  # bytes that the driver takes for each thread block (CUDA C++ guide)


class Keeping(Listening):
    """A GPU that keeps what is launched."""

    def __init__(self, facts: tuple[tuple[int, int], int, int]) -> None:
        super().__init__(facts)
        self.kept: list[Launch] = []

    def start(self, stream: Stream, launch: Launch) -> None:
        """Keep it."""
        self.kept.append(launch)


def launches(facts: tuple[tuple[int, int], int, int], blocks: int) -> list[Launch]:
    """Of a score without residents."""
    table = np.zeros((128, 8), np.float32)
    codec = HeadCodec(table, table[0], table, table[:, 0], np.full(8, 4, np.uint8))
    heads, queries = GROUP.kv_heads, GROUP.q_heads
    pages = tuple(tensor("u8", (256, 2 * 2 * 16 * heads)) for _ in range(-(-blocks // 256)))
    units = UnitPool(tensor("u8", (4, unit_bytes_of(GROUP, 16))), GROUP, 16)
    none = np.empty(0, np.int32)
    work = ScoreCodesWork(
        codes=LayerCodes((codec,) * heads, tensor("u8", (1 << 16,)), pages, GROUP, 16),
        queries=tensor("bf16", (queries, 128)),
        code_index=tensor("i32", (blocks,)),
        resident=Resident(units, None, none, np.zeros(heads, np.int32), 0),
        memory=ScoreMemory(*(tensor("f32", (queries, blocks)) for _ in "ab")),
        first=True,
        last=None,
        scores=tensor("f32", (heads, blocks)),
        uncorrected=tensor("f32", (heads, blocks)),
    )
    device = Keeping(facts)
    score(device, None, work)  # type: ignore[arg-type]
    return device.kept


@pytest.mark.parametrize("facts", [HOPPER, AMPERE, SMALL])
@pytest.mark.parametrize("blocks", [1, 100, 2048, 8192, 32768])
def test_the_second_kernel_does_not_crowd_where_the_first_left_room(
    facts: tuple[tuple[int, int], int, int], blocks: int
) -> None:
    first, second = launches(facts, blocks)
    _, multiprocessors, limit = facts
    assert first.kernel == "codes_mass"
    assert second.kernel == "codes_rank"
    assert second.shared_bytes <= limit
    thread_blocks = second.grid.x * second.grid.y
    room = (limit + RESERVED) // (second.shared_bytes + RESERVED)
    assert thread_blocks <= room * multiprocessors  # all at once
    assert room <= max(2, 1.1 * thread_blocks / multiprocessors + 1)
