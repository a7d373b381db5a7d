"""Bad input is refused before anything changes: foreign memory, closed objects, ranges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from hsswap import (
    ArgumentError,
    ClosedError,
    ConfigError,
    HighSpeedSwap,
    ModelDims,
    OutOfSlots,
    PredictorConfig,
    Sequence,
    SwapConfig,
)
from hsswap.driver.tensor import Tensor
from hsswap.io.memory import MemoryIO
from tests.swap_cases import SMALL, config_for, random_case
from tests.swap_watch import watched

CASE = random_case(SMALL, 60, 17)
KEYS, VALUES, QUERIES = CASE.keys[0], CASE.values[0], CASE.queries[0]


def elsewhere(array: np.ndarray, dtype: str = "bf16") -> Tensor:
    """The same array as if it were in a GPU's memory."""
    return Tensor(array.ctypes.data, array.shape, array.strides, dtype, True, array)


def state(swap: HighSpeedSwap, sequence: Sequence) -> tuple[object, ...]:
    statistics = swap.statistics()
    return (
        [sequence.layer_length(layer) for layer in range(3)],
        sequence.ids.tolist(),
        statistics.device_slots_used,
        statistics.host_slots_used,
        statistics.free_blocks,
        statistics.attends,
        swap.sequence_count,
    )


async def test_memory_of_another_device_is_refused() -> None:
    out, lse = np.zeros((2, 6, 16), np.uint16), np.zeros((2, 6), np.float32)
    async with watched(config_for(CASE)) as swap:
        sequence = swap.sequence()
        await sequence.append(0, KEYS[:40], VALUES[:40])
        block = await swap.alloc_disk_block_id()
        await swap.flush()  # writes that end meanwhile free host slots
        before = state(swap, sequence)
        asked = QUERIES[38:40]
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: sequence.append(0, elsewhere(KEYS[:20]), VALUES[:20]),
            lambda: sequence.append(0, KEYS[:20], elsewhere(VALUES[:20])),
            lambda: sequence.attend(0, elsewhere(asked), out),
            lambda: sequence.attend(0, asked, elsewhere(out)),
            lambda: sequence.attend(0, asked, out, lse_out=elsewhere(lse, "f32")),
            lambda: swap.attend_batch(0, [sequence], elsewhere(asked), out),
            lambda: swap.attend_batch(0, [sequence], asked, elsewhere(out)),
            lambda: swap.attend_batch(0, [sequence], asked, out, lse_out=elsewhere(lse, "f32")),
            lambda: swap.offload_block(
                layer=0, block=block, k_block_dev=elsewhere(KEYS[:16]), v_block_host=VALUES[:16]
            ),
        ]
        for call in calls:
            with pytest.raises(ArgumentError, match="GPU's memory"):
                await call()
            assert state(swap, sequence) == before
        assert not out.any()
        await swap.dec_disk_ref(block=block)


async def test_layers_arrays_and_numbers_out_of_range() -> None:
    async with watched(config_for(CASE)) as swap:
        sequence = swap.sequence()
        await sequence.append(0, KEYS[:40], VALUES[:40])
        await swap.flush()  # writes that end meanwhile free host slots
        before = state(swap, sequence)
        out = np.zeros((1, 6, 16), np.uint16)
        calls: list[Callable[[], Awaitable[Any]]] = [
            *(lambda layer=layer: sequence.append(layer, KEYS, VALUES) for layer in (3, -1, True)),
            *(lambda layer=layer: sequence.attend(layer, QUERIES[:1]) for layer in (3, -1, "0")),
            lambda: sequence.append(0, KEYS[:20], VALUES[:19]),
            lambda: sequence.append(0, KEYS[:0], VALUES[:0]),
            lambda: sequence.append(0, KEYS.astype(np.float32), VALUES),
            lambda: sequence.append(0, KEYS[:, :1], VALUES),
            lambda: sequence.append(0, None, VALUES),
            lambda: sequence.attend(0, QUERIES[:41]),
            lambda: sequence.attend(1, QUERIES[:1]),
            lambda: sequence.attend(0, QUERIES[:1], out[:, :5]),
            lambda: sequence.attend(0, QUERIES[:1], out, lse_out=np.zeros((1, 5), np.float32)),
            lambda: sequence.reserve(-1),
            lambda: sequence.truncate(41),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(ArgumentError):
                await call()
            assert state(swap, sequence) == before, number


async def test_closed_objects_say_so() -> None:
    async with HighSpeedSwap.open(config_for(CASE), io=MemoryIO()) as swap:
        sequence = swap.sequence()
        await sequence.append(0, KEYS[:40], VALUES[:40])
        await sequence.close()
        out = np.zeros((1, 6, 16), np.uint16)
        of_sequence: list[Callable[[], Awaitable[Any]]] = [
            lambda: sequence.append(0, KEYS, VALUES),
            lambda: sequence.attend(0, QUERIES[:1]),
            lambda: sequence.truncate(0),
            lambda: sequence.reserve(1),
            lambda: sequence.commit([]),
            lambda: swap.attend_batch(0, [sequence], QUERIES[:1], out),
        ]
        for call in of_sequence:
            with pytest.raises(ClosedError):
                await call()
        for plain in (
            sequence.fork,
            lambda: sequence.try_append(0, KEYS, VALUES),
            lambda: sequence.try_attend(0, QUERIES[:1]),
            lambda: sequence.try_truncate(0),
        ):
            with pytest.raises(ClosedError):
                plain()
    of_swap: list[Callable[[], Awaitable[Any]]] = [
        swap.flush,
        lambda: swap.open_prefix([1]),
        swap.alloc_disk_block_id,
        lambda: swap.inc_disk_ref(block=1),
        lambda: swap.dec_disk_ref(block=1),
        lambda: swap.attend_layer(layer=0, seq_block_ids=[1], q_dev=2, output_dev=2),
    ]
    for call in of_swap:
        with pytest.raises(ClosedError):
            await call()
    with pytest.raises(ClosedError):
        swap.sequence()


async def test_more_sequences_than_slots_serve_are_refused_with_the_number() -> None:
    async with watched(config_for(CASE, sequences=2)) as swap:
        held = [swap.sequence() for _ in range(2)]
        before = state(swap, held[0])
        with pytest.raises(OutOfSlots, match=r"max_sequences is 2 .*3 device slots for each"):
            swap.sequence()
        with pytest.raises(OutOfSlots, match="max_sequences is 2"):
            held[0].fork()
        assert state(swap, held[0]) == before


async def test_tokens_rows_and_lists_of_other_kinds() -> None:
    """What NumPy itself stumbles over is refused in our words."""
    ragged: Any = [[1, 2], [3]]
    async with watched(config_for(CASE)) as swap:
        sequence = swap.sequence()
        await sequence.append(0, KEYS[:40], VALUES[:40])
        block = await swap.alloc_disk_block_id()
        await swap.flush()  # writes that end meanwhile free host slots
        before = state(swap, sequence)
        out: Any = np.zeros((1, 6, 16), np.uint16)
        one: Any = QUERIES[39:40]
        rows: dict[str, Any] = {"k_block_host": KEYS[:16], "v_block_host": VALUES[:16]}
        address = KEYS.ctypes.data
        no_ids: list[Any] = [[], (), np.zeros((0, 2)), None, 1.5]
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: sequence.commit(ragged),
            lambda: sequence.commit(np.array([2**64 - 1], np.uint64)),
            lambda: swap.open_prefix(ragged),
            lambda: swap.attend_batch(0, [sequence], one, out, rows=ragged),
            *(
                lambda which=which: swap.attend_batch(0, which, one, out)
                for which in (None, 1, "a", [None], iter([sequence]), np.zeros(1))
            ),
            *(
                lambda which=which: swap.offload_block(layer=0, block=which, **rows)
                for which in no_ids
            ),
            lambda: swap.inc_disk_ref(block=[]),  # type: ignore[arg-type]
            lambda: swap.dec_disk_ref(block=[]),  # type: ignore[arg-type]
            *(
                lambda strides=strides: swap.offload_block(
                    layer=0, block=block, k_block_dev=address, v_block_dev=address,
                    k_strides=strides,
                )
                for strides in (1, (64, 32), (64, 32, 1), (64.0, 32.0, 2.0), "abc", np.ones(3))
            ),
            lambda: swap.offload_block(
                layer=0, block=block, k_block_dev=2**70, v_block_dev=address
            ),
        ]  # fmt: skip
        for number, call in enumerate(calls):
            with pytest.raises(ArgumentError):
                await call()
            assert state(swap, sequence) == before, number
        with pytest.raises(ArgumentError):
            swap.disk_refcount(block=[])  # type: ignore[arg-type]
        await swap.dec_disk_ref(block=block)
    with pytest.raises(ConfigError):
        PredictorConfig(metadata_ratio=None)  # type: ignore[arg-type]


class Exporter:
    """An array of a framework that breaks its word."""

    shape = KEYS[:20].shape

    def __init__(self, **broken: Any) -> None:
        vars(self).update(broken)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize(
    "given",
    [
        Exporter(__dlpack_device__=lambda: (1, 0), __dlpack__=lambda: 5),
        Exporter(__dlpack_device__=lambda: (), __dlpack__=lambda: 5),
        Exporter(__dlpack__=lambda: None),
        Exporter(__cuda_array_interface__=None),
        Exporter(__cuda_array_interface__={"shape": Exporter.shape, "typestr": "<u2"}),
        Exporter(
            __cuda_array_interface__={"shape": 3, "typestr": "<u2", "data": (KEYS.ctypes.data, 0)}
        ),
        Exporter(
            __cuda_array_interface__={"shape": Exporter.shape, "typestr": "?!", "data": (0, True)}
        ),
    ],
)
async def test_arrays_that_cannot_be_read(given: Exporter) -> None:
    async with watched(config_for(CASE)) as swap:
        sequence = swap.sequence()
        before = state(swap, sequence)
        with pytest.raises(ArgumentError, match="keys"):
            await sequence.append(0, given, VALUES[:20])
        assert state(swap, sequence) == before


@pytest.mark.parametrize("shape", [("4", 1, 8), (4.0, 1, 8), (None, 1, 8), 4, "418"])
async def test_shapes_that_are_none(shape: object) -> None:
    class Odd:
        def __init__(self) -> None:
            self.shape = shape

    async with watched(config_for(CASE)) as swap:
        sequence = swap.sequence()
        with pytest.raises(ArgumentError, match="keys is a Odd; give an array"):
            await sequence.append(0, Odd(), Odd())


async def test_an_output_whose_rows_share_memory_is_refused() -> None:
    """As an expanded one: whatever row is written last would be every row's."""
    rows = np.full((40, 1, 8), 0x3F80, np.uint16)
    dims = ModelDims.uniform(layers=1, q_heads=1, kv_heads=1, head_dim=8)
    config = SwapConfig(dims, 200, 40, 60, tile_tokens=256)
    shared = np.lib.stride_tricks.as_strided(np.zeros(8, np.uint16), (4, 1, 8), (0, 16, 2))
    sums = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4, 1), (0, 4))
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        await sequence.append(0, rows, rows)
        with pytest.raises(ArgumentError, match="out has strides"):
            await sequence.attend(0, rows[:4], shared)
        with pytest.raises(ArgumentError, match="out has strides"):
            sequence.try_attend(0, rows[:4], shared)
        with pytest.raises(ArgumentError, match="lse_out has strides"):
            await sequence.attend(0, rows[:4], lse_out=sums)
        with pytest.raises(ArgumentError, match="out has strides"):
            await swap.attend_batch(0, [sequence], rows[:4], shared)
        async with sequence.captured(4, rows=4) as steps:
            with pytest.raises(ArgumentError, match="out has strides"):
                steps.attend(0, rows[:4], shared)
            steps.finish(40)
        result = await sequence.attend(0, rows[:4])
        await result.done()
        assert (np.asarray(result.out) == 0x3F80).all()
