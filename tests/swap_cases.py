"""Random K, V and Q for a model's layers, fed through a swap and compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Chunks
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap import HighSpeedSwap, LayerGroup, ModelDims, Sequence, SwapConfig
from hsswap.bf16 import from_float32
from hsswap.config import PredictorConfig
from hsswap.driver.base import Device
from hsswap.io.base import BlockIO
from hsswap.io.memory import MemoryIO
from tests import e4m3_oracle
from tests.driver import oracle

U16 = NDArray[np.uint16]

SMALL = ModelDims.uniform(layers=3, q_heads=6, kv_heads=2, head_dim=16)
MIXED = ModelDims(
    (
        LayerGroup(2, 6, 2, 24, 40),
        LayerGroup(1, 4, 4, 8, window=300, kv_dtype="e4m3"),
        LayerGroup(2, 5, 1, 64, soft_cap=20.0),
    ),
    block_size=32,
)


@dataclass(frozen=True)
class Case:
    """``keys[layer]`` ``[tokens, H, dk]`` and so on: what a model would hand over."""

    dims: ModelDims
    keys: list[U16]
    values: list[U16]
    queries: list[U16]

    @property
    def tokens(self) -> int:
        """Tokens of every layer."""
        return len(self.keys[0])


def random_case(dims: ModelDims, tokens: int, seed: int) -> Case:
    """Normal K, V and Q; some keys stand out, so that attention is not flat."""
    random = np.random.default_rng(seed)

    def draw(heads: int, dim: int, scale: float) -> U16:
        return from_float32(
            (random.standard_normal((tokens, heads, dim)) * scale).astype(np.float32)
        )

    groups = [dims.group(layer) for layer in range(dims.layers)]
    return Case(
        dims,
        [draw(g.kv_heads, g.head_dim, 1.5) for g in groups],
        [draw(g.kv_heads, g.value_dim, 1.0) for g in groups],
        [draw(g.q_heads, g.head_dim, 1.5) for g in groups],
    )


def config_for(
    case: Case,
    *,
    extra_device: int = 0,
    extra_host: int = 0,
    sequences: int = 1,
    tile_tokens: int = 256,
    look_ahead: bool = True,
    capacity: int | None = None,
) -> SwapConfig:
    """The smallest slots that work, and some more."""
    dims = case.dims
    ring = 2 * (tile_tokens // dims.block_size) * len(dims.groups)
    return SwapConfig(
        dims,
        capacity_tokens=capacity or sequences * (case.tokens + dims.block_size),
        device_slots=ring + sequences * dims.layers + extra_device,
        host_slots=ring + extra_host,
        max_sequences=sequences,
        tile_tokens=tile_tokens,
        look_ahead=look_ahead,
        predictor=PredictorConfig("projection"),  # answers do not depend on who asked first
    )


def chunks_of(tokens: int, size: int) -> list[int]:
    """Rows of each step: ``size`` at a time."""
    return [min(size, tokens - start) for start in range(0, tokens, size)]


async def feed(sequence: Sequence, case: Case, chunks: Chunks[int]) -> list[U16]:
    """Append and attend chunk by chunk, layer by layer; all output rows of each layer."""
    outputs: list[list[U16]] = [[] for _ in case.keys]
    start = 0
    for rows in chunks:
        part = slice(start, start + rows)
        for layer in range(case.dims.layers):
            await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
            group = case.dims.group(layer)
            out = np.full((rows, group.q_heads, group.value_dim), 0x7FC0, np.uint16)  # NaN
            result = await sequence.attend(layer, case.queries[layer][part], out)
            await result.done()
            outputs[layer].append(out)
        start += rows
    return [np.concatenate(parts) for parts in outputs]


async def run(
    case: Case,
    config: SwapConfig,
    chunks: Chunks[int],
    *,
    io: BlockIO | None = None,
    device: Device | None = None,
) -> list[U16]:
    """One sequence through a swap of its own."""
    async with (
        HighSpeedSwap.open(config, io=io or MemoryIO(), device=device) as swap,
        swap.sequence() as sequence,
    ):
        outputs = await feed(sequence, case, chunks)
        await swap.flush()
        return outputs


def kept(group: LayerGroup, rows: NDArray[Any]) -> NDArray[Any]:
    """What a cache keeps of rows of K or V."""
    if group.kv_dtype != "e4m3":
        return rows
    return e4m3_oracle.numbers(*e4m3_oracle.quantised(oracle.decode(rows)))


def check_chosen(
    case: Case, layer: int, head: int, row: int, blocks: Iterable[int], out: U16
) -> None:
    """Promise 1 for the query heads ``[1, Q, dv]`` of one KV head, over these blocks alone."""
    group, size = case.dims.group(layer), case.dims.block_size
    tokens = [t for b in blocks for t in range(b * size, min(b * size + size, row + 1))]
    part = slice(head * group.group_size, (head + 1) * group.group_size)
    wanted = oracle.attend(
        case.queries[layer][row : row + 1, part],
        case.keys[layer][tokens][:, head : head + 1],
        case.values[layer][tokens][:, head : head + 1],
        len(tokens),
        oracle.Heads(group.group_size, group.logit_scale),
    )
    error = oracle.relative_error(oracle.decode(out[:, part]), wanted.exact)
    assert error <= wanted.tolerance(), f"layer {layer} head {head} row {row}: {error}"


def check_against_oracle(case: Case, outputs: list[U16], rows: Chunks[int]) -> None:
    """Promise 1 for some rows of every layer."""
    for layer, out in enumerate(outputs):
        group = case.dims.group(layer)
        heads = oracle.Heads(group.group_size, group.logit_scale, group.window, group.soft_cap)
        for row in rows:
            wanted = oracle.attend(
                case.queries[layer][row : row + 1],
                kept(group, case.keys[layer]),
                kept(group, case.values[layer]),
                row + 1,
                heads,
            )
            error = oracle.relative_error(oracle.decode(out[row : row + 1]), wanted.exact)
            assert error <= wanted.tolerance(), f"layer {layer} row {row}: {error}"
