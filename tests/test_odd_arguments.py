"""Every argument of every public call, given what is no such thing: a typed error, nothing changed.

Arrays where a number or a yes is due (NumPy will not say whether an array is true), NaN, numbers of
NumPy, words, None, absurd sizes: each is refused in our words, or means what it says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from hsswap import (
    HighSpeedSwap,
    HsswapError,
    LayerGroup,
    ModelDims,
    PredictorConfig,
    Rope,
    Sequence,
    SwapConfig,
    TopK,
    blocking,
)
from hsswap.captured import CapturedSteps
from hsswap.driver import open_device
from hsswap.io.memory import MemoryIO
from hsswap.sync import BlockingSequence, BlockingSwap
from tests.swap_cases import SMALL, config_for, random_case
from tests.swap_watch import watched
from tests.test_bad_input import state

CASE = random_case(SMALL, 60, 17)
TOP_K = TopK(1)
KEYS, VALUES, QUERIES = CASE.keys[0], CASE.values[0], CASE.queries[0]
ODD: list[Any] = [
    np.zeros(3),
    np.ones((2, 2), np.int64),
    np.array([], np.int32),
    np.array(["a", "b"]),
    np.array(True),
    np.array(2),
    np.array(float("nan")),
    np.float64("nan"),
    np.float32(1.5),
    np.int64(-1),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.str_("x"),
    float("nan"),
    float("inf"),
    -(2**70),
    2**70,
    2**31,
    1.5,
    1j,
    "x",
    "",
    b"x",
    None,
    object(),
    [],
    [1, [2]],
    {},
    {1},
    (),
    (np.zeros(2), np.zeros(3)),
    len,
    NotImplemented,
    np.datetime64("NaT", "s"),
    slice(None),
]


def id_of(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:40]


async def refused(
    call: Callable[..., Any], good: dict[str, Any], name: str, value: Any
) -> tuple[bool, Any]:
    """Whether a call with one odd argument was refused in our words, else what it gave."""
    try:
        result = call(**{**good, name: value})
        if inspect.isawaitable(result):
            result = await result
        elif hasattr(result, "__aenter__"):
            async with result as steps:
                return False, steps
    except HsswapError:
        return True, None
    return False, result


def sequence_calls() -> dict[str, dict[str, Any]]:
    """Good arguments of a sequence's calls, at 40 tokens."""
    row = {"layer": 0, "queries": QUERIES[39:40], "stream": None}
    asked = {**row, "out": None, "exact": True, "lse_out": None, "sinks": None}
    more = {"layer": 0, "keys": KEYS[40:41], "values": VALUES[40:41], "stream": None}
    return {
        "append": more,
        "try_append": more,
        "attend": asked,
        "try_attend": asked,
        "look_ahead": row,
        "truncate": {"length": 39, "stream": None},
        "try_truncate": {"length": 39, "stream": None},
        "fork": {"stream": None},
        "commit": {"tokens": [1] * 40},
        "reserve": {"tokens": 2},
        "captured": {"tokens": 2, "rows": 1, "stream": None},
        "layer_length": {"layer": 0},
    }


def parameters(owner: type, name: str) -> list[str]:
    """The names of a call's arguments."""
    return [p for p in inspect.signature(getattr(owner, name)).parameters if p != "self"]


def cases(owner: type, calls: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Each argument of each call."""
    return [(call, name) for call in calls for name in parameters(owner, call)]


def public_calls(owner: type) -> set[str]:
    return {
        name
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (inspect.isroutine(member))
    }


WITHOUT_ARGUMENTS = {"close", "launched", "quiet", "let_go", "free_slots", "adopt"}


def test_every_call_of_a_sequence_is_here() -> None:
    assert public_calls(Sequence) - WITHOUT_ARGUMENTS == sequence_calls().keys()
    for name, good in sequence_calls().items():
        assert set(parameters(Sequence, name)) == good.keys(), name


@pytest.mark.parametrize(("name", "argument"), cases(Sequence, sequence_calls()))
@pytest.mark.parametrize("top_k", [None, TOP_K], ids=str)
async def test_calls_of_a_sequence(name: str, argument: str, top_k: TopK | None) -> None:
    good = sequence_calls()[name]
    async with watched(config_for(CASE, sequences=4, extra_device=200)) as swap:
        for value in ODD:
            sequence = swap.sequence(top_k=top_k)
            for layer in range(3):
                await sequence.append(layer, CASE.keys[layer][:40], CASE.values[layer][:40])
            await swap.flush()
            for _ in range(2 if name.endswith("attend") else 0):  # the same call is made again then
                await refused(getattr(sequence, name), good, "layer", 0)
            before = state(swap, sequence)
            was_refused, given = await refused(getattr(sequence, name), good, argument, value)
            if argument == "exact":
                known = value is None or isinstance(value, bool | np.bool_)
                assert was_refused != known, id_of(value)
            if was_refused:
                assert state(swap, sequence) == before, id_of(value)
            elif isinstance(given, Sequence):
                await given.close()
            if not was_refused and not isinstance(given, Sequence) and hasattr(given, "done"):
                await given.done()
            await sequence.close()
            await swap.retiring.settle(sequence.number)


def steps_calls() -> dict[str, dict[str, Any]]:
    """Good arguments of captured steps, opened at 40 tokens for one row."""
    out = np.zeros((1, 6, 16), np.uint16)
    return {
        "append": {"layer": 0, "keys": KEYS[40:41], "values": VALUES[40:41], "stream": None},
        "attend": {"layer": 0, "queries": QUERIES[40:41], "out": out, "exact": True}
        | {"stream": None},
        "left_out_mass": {"layer": 0},
        "advance": {"rows": 1, "stream": None},
        "finish": {"length": 41},
    }


@pytest.mark.parametrize(("name", "argument"), cases(CapturedSteps, steps_calls()))
async def test_calls_of_captured_steps(name: str, argument: str) -> None:
    async with watched(config_for(CASE, extra_device=200, extra_host=20)) as swap:
        sequence = swap.sequence()
        for layer in range(3):
            await sequence.append(layer, CASE.keys[layer][:40], CASE.values[layer][:40])
        async with sequence.captured(20) as steps:
            for value in ODD:
                await refused(getattr(steps, name), steps_calls()[name], argument, value)
        assert (await sequence.attend(0, QUERIES[39:40])) is not None or name == "finish"


def swap_calls(sequence: Sequence, block: int) -> dict[str, dict[str, Any]]:
    """Good arguments of a swap's calls."""
    out = np.zeros((1, 6, 16), np.uint16)
    rows = {"k_block_host": KEYS[:16], "v_block_host": VALUES[:16], "valid_tokens": 16}
    given = {"layer": 1, "block": block, **rows}
    asked = {"layer": 0, "seq_block_ids": [block], "q_dev": QUERIES[0], "output_dev": out[0]}
    pointers = {"k_block_dev": None, "v_block_dev": None, "k_strides": None, "v_strides": None}
    return {
        "sequence": {"top_k": None},
        "open_prefix": {"tokens": [1, 2], "top_k": None},
        "attend_batch": {
            "layer": 0, "sequences": [sequence], "queries": QUERIES[39:40], "out": out,
            "rows": None, "exact": True, "lse_out": None, "sinks": None, "stream": None,
        },
        "offload_block": {**given, **pointers},
        "offload_block_on_stream": {**given, **pointers, "stream": None},
        "offload_block_no_predict_on_stream": {**given, "stream": None},
        "attend_layer": asked,
        "attend_layer_on_stream": {**asked, "stream": None},
        "attend_layer_on_stream_with_q_pos": {
            **asked, "stream": None, "last_block_valid_slots": 16,
        },
        "inc_disk_ref": {"block": block},
        "dec_disk_ref": {"block": block},
        "disk_refcount": {"block": block},
    }  # fmt: skip


SWAP_CALLS = [
    (call, name)
    for call, good in swap_calls(None, 0).items()  # type: ignore[arg-type]
    for name in good
]
NO_ARGUMENTS = {
    "alloc_disk_block_id", "disk_free_count", "diagnostic_summary", "statistics", "flush", "close",
    "store_statistics", "check_loop", "check_open", "named",
}  # fmt: skip
INNER = {
    "allocate_ids", "call_behind", "check_ids", "commit_ids", "drop_ids", "free_at_close",
    "pool_of", "release_after", "release_behind", "release_now", "release_sequence", "scratch",
    "scratch_of",
    "share_ids", "stream_of", "take_active_slots",
}  # fmt: skip
"""What sequences call, with what was checked."""
OPENING = {"open", "create", "new", "new_on_stream"}


def test_every_call_of_a_swap_is_here() -> None:
    left = public_calls(HighSpeedSwap) - NO_ARGUMENTS - INNER - OPENING
    assert left == swap_calls(None, 0).keys()  # type: ignore[arg-type]
    for name, good in swap_calls(None, 0).items():  # type: ignore[arg-type]
        assert set(parameters(HighSpeedSwap, name)) == good.keys(), name


@pytest.mark.parametrize(("name", "argument"), SWAP_CALLS)
async def test_calls_of_a_swap(name: str, argument: str) -> None:
    async with watched(config_for(CASE, sequences=3, extra_device=200, extra_host=20)) as swap:
        sequence = swap.sequence()
        await sequence.append(0, KEYS[:40], VALUES[:40])
        for value in ODD:
            if argument.endswith("_dev") and isinstance(value, int | np.integer):
                continue  # a pointer, of which nobody knows what it points to
            block = await swap.alloc_disk_block_id()
            rows: dict[str, Any] = {"k_block_host": KEYS[:16], "v_block_host": VALUES[:16]}
            await swap.offload_block(layer=0, block=block, **rows)
            await swap.flush()
            good = swap_calls(sequence, block)
            before = state(swap, sequence)
            was_refused, given = await refused(getattr(swap, name), good[name], argument, value)
            if was_refused:
                assert state(swap, sequence) == before, id_of(value)
            if isinstance(given, Sequence):
                await given.close()
            for result in given if isinstance(given, list) else [given]:
                if hasattr(result, "done"):
                    await result.done()
            held = (
                0 if name == "dec_disk_ref" and not was_refused else swap.disk_refcount(block=block)
            )
            for _ in range(held):
                await swap.dec_disk_ref(block=block)


@pytest.mark.parametrize("name", ["config", "io", "device", "cfg", "ctx", "stream"])
async def test_opening_a_swap(name: str) -> None:
    config = config_for(CASE)
    for value in ODD:
        if value is None:
            continue
        device = open_device("host")
        try:
            if name in ("cfg", "ctx", "stream"):
                good = {"cfg": config, "ctx": device, "stream": None, name: value}
                try:
                    swap = await HighSpeedSwap.new_on_stream(**good)
                except HsswapError:
                    continue
                raise AssertionError(f"{name} = {id_of(value)} was taken: {swap}")
            with pytest.raises(HsswapError):
                await HighSpeedSwap.create(**{"config": config, "device": device, name: value})
            with pytest.raises(HsswapError):
                blocking(**{"config": config, "device": device, name: value})
        finally:
            device.close()


GROUP = LayerGroup(1, 2, 1, 8)
RECORDS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (LayerGroup, {"layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 8}),
    (ModelDims, {"groups": (GROUP,), "block_size": 16}),
    (ModelDims.uniform, {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 8}),
    (PredictorConfig, {}),
    (TopK, {"k": 3}),
    (Rope, {}),
    (
        SwapConfig,
        {"dims": ModelDims((GROUP,)), "capacity_tokens": 64, "device_slots": 70, "host_slots": 70},
    ),
    (
        SwapConfig.plan,
        {"dims": ModelDims((GROUP,)), "tokens": 64, "device_bytes": 1 << 24, "host_bytes": 1 << 24},
    ),
]


@pytest.mark.parametrize(
    ("make", "good", "argument"),
    [(make, good, name) for make, good in RECORDS for name in inspect.signature(make).parameters],
    ids=lambda value: getattr(value, "__qualname__", None) or (value if type(value) is str else ""),
)
def test_settings(make: Callable[..., Any], good: dict[str, Any], argument: str) -> None:
    """Refused, or a record that can be compared, hashed and shown like any other."""
    for value in ODD:
        try:
            made = make(**{**good, argument: value})
        except HsswapError:
            continue
        assert made == made
        hash(made)
        held = getattr(made, argument, None)
        assert not isinstance(held, np.ndarray), id_of(value)
        if argument in {field.name for field in fields(made)}:
            assert not isinstance(held, np.generic | np.ndarray), id_of(value)
            assert held == held, id_of(value)  # no NaN


def test_a_blocking_swap_refuses_the_same() -> None:
    good = sequence_calls()
    with blocking(config_for(CASE, sequences=2, extra_device=200), io=MemoryIO()) as swap:
        assert isinstance(swap, BlockingSwap)
        with swap.sequence() as sequence:
            assert isinstance(sequence, BlockingSequence)
            for layer in range(3):
                sequence.append(layer, CASE.keys[layer][:40], CASE.values[layer][:40])
            for name in ("append", "attend", "look_ahead", "truncate", "fork", "commit", "reserve"):
                for argument in good[name]:
                    for value in (np.zeros(3), np.array(["a"]), object()):
                        if (name, argument) == ("commit", "tokens"):
                            continue
                        with pytest.raises(HsswapError):
                            getattr(sequence, name)(**{**good[name], argument: value})
