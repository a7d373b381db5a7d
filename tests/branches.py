"""A family of sequences beside its model: for each sequence, which rows of a case it holds.

Rows come from one random case in any order, so two branches of equal length differ. What a branch
must answer is computed on a swap of its own with everything resident.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from hsswap import HighSpeedSwap, Sequence, SwapConfig, TopK
from hsswap.io.memory import MemoryIO
from tests.swap_actors import roomy
from tests.swap_cases import U16, Case, config_for, feed

MOST_BRANCHES = 4


def config_of(
    case: Case, branches: int = MOST_BRANCHES, *, extra_device: int = 0, extra_host: int = 0
) -> SwapConfig:
    """The least slots for so many branches, and more; ids for 1,000 tokens of each."""
    return config_for(
        case,
        sequences=branches,
        capacity=branches * 1000,
        extra_device=extra_device,
        extra_host=extra_host,
    )


def rows_of(case: Case, rows: list[int]) -> Case:
    """The rows of a case, in this order, as a case."""
    return Case(
        case.dims,
        [keys[rows] for keys in case.keys],
        [values[rows] for values in case.values],
        [queries[rows] for queries in case.queries],
    )


async def alone(case: Case, rows: list[int]) -> list[U16]:
    """All answers of a sequence with these rows, everything resident."""
    part = rows_of(case, rows)
    async with HighSpeedSwap.open(roomy(part), io=MemoryIO()) as swap:
        return await feed(swap.sequence(), part, [part.tokens])


@dataclass
class Branch:
    """A sequence and the rows it holds."""

    sequence: Sequence
    case: Case
    rows: list[int] = field(default_factory=list)

    async def append(self, rows: list[int], *, stream: object | None = None) -> None:
        """Append rows of the case to every layer."""
        part = rows_of(self.case, rows)
        for layer in range(self.case.dims.layers):
            keys, values = part.keys[layer], part.values[layer]
            await self.sequence.append(layer, keys, values, stream=stream)
        self.rows = self.rows + rows

    def fork(self, *, stream: object | None = None) -> Branch:
        """Fork both."""
        return replace(self, sequence=self.sequence.fork(stream=stream), rows=list(self.rows))

    async def truncate(self, length: int, *, wait: bool = True) -> None:
        """Truncate both."""
        if wait or not self.sequence.try_truncate(length):
            await self.sequence.truncate(length)
        self.rows = self.rows[:length]

    async def answers(self, rows: int) -> list[U16]:
        """What the last rows of each layer get."""
        part = rows_of(self.case, self.rows[-rows:])
        outputs = []
        for layer, queries in enumerate(part.queries):
            group = self.case.dims.group(layer)
            out = np.full((rows, group.q_heads, group.value_dim), 0x7FC0, np.uint16)
            await (await self.sequence.attend(layer, queries, out, exact=True)).done()
            outputs.append(out)
        return outputs

    async def check(self, rows: int = 20) -> None:
        """The last rows' answers are those of a sequence that never had another history."""
        rows = min(rows, len(self.rows))
        assert self.sequence.length == len(self.rows)
        if not rows:
            return
        got, wanted = await self.answers(rows), await alone(self.case, self.rows)
        for layer, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert (one == other[-rows:]).all(), f"layer {layer} at {len(self.rows)} tokens"


TOP_K = TopK(2)
