"""The rows of ``hsswap bench attention`` and their inputs, in device memory.

A row is checked against float64 before it is timed. Its inputs are several sets that together pass
the second-level cache, each set's units in random places of one pool; the baseline reads the same
numbers from contiguous K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hsswap.config import LayerGroup
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    FinalizeWork,
    UnitPool,
    unit_bytes_of,
)
from hsswap.driver.tensor import Tensor, contiguous_strides

BLOCK_SIZE = 16
ROTATED_BYTES = 768 << 20
"""K and V of all sets of a row, at least: 12 times the second-level cache of an H200 (60 MB)."""

POOL_BYTES = 4 << 30
"""Places among which units lie, at least."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: ``rows`` query rows of ``batch`` sequences over ``tokens`` tokens each.

    ``floor`` and ``aim`` are ratios of the best baseline's time to ours.
    """

    number: str
    batch: int
    rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    floor: float
    aim: float
    kv_dtype: str = "bf16"

    @property
    def group(self) -> LayerGroup:
        """What units are of."""
        return LayerGroup(1, self.q_heads, self.kv_heads, self.head_dim, kv_dtype=self.kv_dtype)

    @property
    def name(self) -> str:
        """As in tables."""
        return (
            f"{self.number} {self.batch} x {self.tokens} tokens, {self.rows} rows, "
            f"{self.q_heads}/{self.kv_heads} heads, d {self.head_dim}"
            + (f", {self.kv_dtype}" if self.kv_dtype != "bf16" else "")
        )

    @property
    def kv_bytes(self) -> int:
        """K and V of one set, with their scales."""
        return self.batch * self.kv_heads * self.tokens * self.group.token_bytes


CASES = (
    Case("A1", 1, 1, 32, 8, 128, 131072, 0.96, 1.02),
    Case("A2", 1, 1, 32, 8, 128, 2048, 1.2, 1.35),
    Case("A2", 1, 1, 32, 8, 128, 8192, 1.1, 1.25),
    Case("A2", 1, 1, 32, 8, 128, 32768, 1.0, 1.07),
    Case("A2", 8, 1, 32, 8, 128, 8192, 0.97, 1.02),
    Case("A2", 32, 1, 32, 8, 128, 4096, 0.94, 1.0),
    Case("A2", 1, 1, 9, 3, 64, 8192, 1.2, 1.4),
    Case("A4", 1, 2048, 32, 8, 128, 32768, 0.8, 1.0),
    # Against the same numbers in BF16.
    Case("F8", 1, 1, 32, 8, 128, 131072, 1.3, 1.8, "e4m3"),
    Case("F8", 1, 1, 32, 8, 128, 32768, 1.0, 1.5, "e4m3"),
    Case("F8", 32, 1, 32, 8, 128, 4096, 1.3, 1.8, "e4m3"),
)


def tensor_from(array: Any, dtype: str) -> Tensor:
    """A torch tensor as the device takes it."""
    itemsize = array.element_size()
    shape = tuple(array.shape)
    strides = tuple(s * itemsize for s in array.stride())
    return Tensor(array.data_ptr(), shape, strides, dtype, True, array)


@dataclass(slots=True)
class Inputs:
    """One set. ``keys`` and ``values`` ``[batch, kv_heads, tokens, d]`` are the baseline's."""

    queries: Any
    keys: Any
    values: Any
    out: Any
    attend: AttendWork
    finalize: FinalizeWork


def make_inputs(case: Case, span_tokens: int) -> list[Inputs]:
    """Sets of random inputs: blocks in random block slots, as the swap's pools give them out."""
    import torch

    group = case.group
    unit = unit_bytes_of(group, BLOCK_SIZE)
    blocks = case.tokens // BLOCK_SIZE
    count = max(1, -(-ROTATED_BYTES // case.kv_bytes)) if case.rows == 1 else 1
    heads = case.kv_heads
    block_slots = max(POOL_BYTES // (unit * heads), count * case.batch * blocks)
    places = block_slots * heads
    generator = torch.Generator("cuda").manual_seed(7)
    raw = torch.empty((places, unit), dtype=torch.uint8, device="cuda")
    for part in raw.split(1 << 16):
        _fill(part, group, generator)
    order = np.random.default_rng(7).permutation(block_slots).astype(np.int32)
    memory = Tensor(raw.data_ptr(), (places, unit), (unit, 1), "u8", True, raw)
    sets: list[Inputs] = []
    for i in range(count):
        taken_slots = order[i * case.batch * blocks :][: case.batch * blocks]
        head = np.arange(heads, dtype=np.int32)[:, None]
        slots = taken_slots.reshape(case.batch, 1, blocks) * np.int32(heads) + head
        taken = _numbers(raw[torch.from_numpy(slots.astype(np.int64)).cuda()], group)
        shape = (case.batch, case.kv_heads, case.tokens, case.head_dim)
        keys = taken[:, :, :, 0].reshape(shape).contiguous()
        values = taken[:, :, :, 1].reshape(shape).contiguous()
        del taken
        rows = (case.batch, case.rows, case.q_heads, case.head_dim)
        queries = torch.randn(rows, dtype=torch.bfloat16, device="cuda", generator=generator)
        out = torch.full_like(queries, float("nan"))
        floats = torch.full(rows, float("nan"), dtype=torch.float32, device="cuda")
        sums = torch.full((2, *rows[:3]), float("nan"), dtype=torch.float32, device="cuda")
        state = AttentionState(
            tensor_from(sums[0], "f32"), tensor_from(sums[1], "f32"), tensor_from(floats, "f32")
        )
        attend = AttendWork(
            queries=tensor_from(queries, "bf16"),
            lengths=np.full(case.batch, case.tokens, np.int64),
            units=UnitPool(memory, group, BLOCK_SIZE),
            slots=np.ascontiguousarray(slots),
            first_block=0,
            positions=None,
            span_blocks=span_tokens // BLOCK_SIZE,
            state=state,
            begin=True,
        )
        end = FinalizeWork(state, tensor_from(out, "bf16"))
        assert memory.strides == contiguous_strides(memory.shape, 1)
        sets.append(Inputs(queries, keys, values, out, attend, end))
    return sets


def _fill(units: Any, group: LayerGroup, generator: Any) -> None:
    """Random K and V, of E4M3 with scales of 2^-8 to 2^-6, into units ``[n, unit_bytes]``."""
    import torch

    elements = BLOCK_SIZE * 2 * group.head_dim
    random = torch.randn((len(units), elements), device="cuda", generator=generator)
    if not group.is_e4m3:
        units[:] = random.bfloat16().view(torch.uint8)
        return
    codes = (random * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    units[:, :elements] = codes.view(torch.uint8)
    shape = (len(units), 2 * BLOCK_SIZE)
    powers = torch.randint(-8, -5, shape, device="cuda", generator=generator)
    units[:, elements:] = torch.exp2(powers.float()).view(torch.uint8)


def _numbers(units: Any, group: LayerGroup) -> Any:
    """BF16 ``[..., 2, T, d]`` of K and V of units ``[..., unit_bytes]``, exactly."""
    import torch

    shape = (*units.shape[:-1], 2, BLOCK_SIZE, group.head_dim)
    if not group.is_e4m3:
        return units.view(torch.bfloat16).view(shape)
    elements = BLOCK_SIZE * 2 * group.head_dim
    codes = units[..., :elements].contiguous().view(torch.float8_e4m3fn).view(shape)
    scales = units[..., elements:].contiguous().view(torch.float32).view(*shape[:-1], 1)
    return (codes.float() * scales).bfloat16()


def relative_error(case: Case, inputs: Inputs, out: Any) -> float:
    """Relative L2 error of an output ``[batch, rows, q_heads, d]`` against float64.

    Of 16 rows spread over a prefill, of all rows otherwise.
    """
    import torch

    group = case.q_heads // case.kv_heads
    picked = sorted({round(i * (case.rows - 1) / 15) for i in range(16)})
    off = size = 0.0
    for s in range(min(case.batch, 4)):
        for h in range(case.kv_heads):
            k, v = inputs.keys[s, h].double(), inputs.values[s, h].double()
            heads = slice(h * group, (h + 1) * group)
            for row in picked:
                end = case.tokens - (case.rows - 1 - row)
                q = inputs.queries[s, row, heads].double()
                weights = torch.softmax(q @ k[:end].T * case.head_dim**-0.5, -1)
                wanted = weights @ v[:end]
                off += float((out[s, row, heads].double() - wanted).square().sum())
                size += float(wanted.square().sum())
    return float((off / size) ** 0.5)
