"""An attend made again: the bits of one made anew; what it sets of the packed parameters."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.cuda import CudaDevice
from hsswap.driver.cuda_again import attend_again
from hsswap.driver.cuda_attention_params import (
    ATTEND_BYTES,
    LENGTH_AT,
    OUT_AT,
    QUERIES_AT,
    Shape,
    attend_params,
)
from hsswap.driver.cuda_stream import CudaStream
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import AttendWork, AttentionState, FinalizeWork, UnitPool
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError, CaptureError
from tests.driver.fake_driver import FakeContext
from tests.driver.rig import NAN_CODE, Cache, Rig, random_codes

LLAMA, ODD = LayerGroup(1, 32, 8, 128), LayerGroup(1, 15, 3, 24, 40)
SPAN = 1024


def work_of(rig: Rig, cache: Cache, queries: np.ndarray, length: int) -> AttendWork:
    """One row over a table that the device holds, to its end."""
    group = cache.units.group
    poison = np.full((1, 1, group.q_heads, group.value_dim), np.nan, np.float32)
    state = AttentionState(
        rig.tensor(poison[..., 0]), rig.tensor(poison[..., 0]), rig.tensor(poison)
    )
    out = rig.tensor(np.full(poison.shape, NAN_CODE, np.uint16))
    return AttendWork(
        queries=rig.tensor(queries),
        lengths=np.array([length], np.int64),
        units=cache.units,
        slots=rig.tensor(cache.slots),
        first_block=0,
        positions=None,
        span_blocks=SPAN // cache.units.block_size,
        state=state,
        begin=True,
        end=FinalizeWork(state, out),
    )


@pytest.mark.parametrize("group", [LLAMA, ODD], ids=["llama", "odd"])
@pytest.mark.parametrize("tokens", [16, 304, 5008])
def test_a_call_made_again_has_the_bits_of_a_new_one(
    rig: Rig, group: LayerGroup, tokens: int
) -> None:
    rng = np.random.default_rng(tokens)
    cache = rig.cache(rng, group, 16, [tokens])
    shape = (1, 1, group.q_heads, group.head_dim)
    first = work_of(rig, cache, random_codes(rng, shape), tokens - 15)
    again = rig.device.attend_again(rig.stream, first)
    if again is None:
        assert group is ODD  # the GPU's kernel for one row does not take it
        assert not isinstance(rig.device, HostDevice)
        return
    assert first.end is not None
    rig.stream.synchronize()
    assert (first.end.out.array() == NAN_CODE).all()  # nothing was enqueued
    for length in (tokens, tokens - 15, tokens - 3, tokens):
        queries = random_codes(rng, shape)
        out = rig.tensor(np.full((1, group.q_heads, group.value_dim), NAN_CODE, np.uint16))
        event = again(rig.tensor(queries[0]), out, length)
        event.synchronize()
        wanted = rig.attend(cache, queries, [length], span_blocks=SPAN // 16, fused=True)
        assert out.array().tobytes() == wanted.out.tobytes()


def test_only_calls_that_end_can_be_made_again(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    cache = rig.cache(rng, LLAMA, 16, [100])
    work = work_of(rig, cache, random_codes(rng, (1, 1, 32, 128)), 100)
    assert rig.device.attend_again(rig.stream, replace(work, end=None)) is None


class Noting:
    """The parts of a device that a call made again uses; launches note what they are given."""

    def __init__(self) -> None:
        self.context = FakeContext()
        self.compute_capability, self.sm_count, self.shared_bytes_limit = (9, 0), 132, 232448
        self.arch = "sm_90a"
        self.launched: list[bytes] = []

    def check_open(self) -> None:
        """It is."""

    def max_active_clusters(self, *_: object) -> int:
        """As on no card."""
        return 0

    def workspace(self, stream: object, nbytes: int) -> int:
        """Somewhere."""
        return 4096

    def prepared(self, *_: object, **__: object) -> Any:
        """A launch that notes its parameters."""

        def launch(arguments: int) -> None:
            address = ctypes.c_void_p.from_address(arguments).value
            assert address
            self.launched.append(ctypes.string_at(address, ATTEND_BYTES))

        return launch


def on_gpu(tensor: Tensor) -> Tensor:
    """The same, said to be a GPU's."""
    return replace(tensor, on_device=True)


def gpu_work(rig: Rig, tokens: int) -> AttendWork:
    """As a GPU takes it; no kernel reads it."""
    rng = np.random.default_rng(2)
    cache = rig.cache(rng, LLAMA, 16, [tokens])
    work = work_of(rig, cache, random_codes(rng, (1, 1, 32, 128)), tokens)
    assert work.end is not None
    assert isinstance(work.slots, Tensor)
    assert isinstance(work.units, UnitPool)
    tensors = (work.state.maximum, work.state.total, work.state.weighted)
    state = AttentionState(*map(on_gpu, tensors))
    units = replace(work.units, memory=on_gpu(work.units.memory))
    return replace(
        work,
        queries=on_gpu(work.queries),
        units=units,
        slots=on_gpu(work.slots),
        state=state,
        end=FinalizeWork(state, on_gpu(work.end.out)),
    )


def stream_and_held(*, captured: bool) -> tuple[CudaStream, list[object]]:
    """A stream that keeps what it is to hold."""
    held: list[object] = []
    captures = SimpleNamespace(look=lambda: captured, refuse=lambda _: None)
    state = SimpleNamespace(lock=threading.RLock(), captures=captures, hold=held.append)
    return cast(CudaStream, SimpleNamespace(state=state, mark=lambda: "event")), held


@pytest.fixture
def host_rig() -> Any:
    """Memory that the processor can read."""
    with HostDevice() as device, Rig(device) as opened:
        yield opened


@pytest.mark.parametrize("tokens", [320, 32768])
def test_three_numbers_are_set(host_rig: Rig, tokens: int) -> None:
    device = Noting()
    work = gpu_work(host_rig, tokens)
    stream, held = stream_and_held(captured=False)
    again = attend_again(cast(CudaDevice, device), stream, work)
    assert again is not None
    shape = Shape.of(work)
    queries, out = (on_gpu(host_rig.tensor(np.zeros((1, 1, 32, 128), np.uint16))) for _ in "ab")
    event: object = again(queries, out, tokens - 5)
    assert event == "event"
    assert held == [(queries, out)]
    assert work.end is not None
    for params in device.launched:
        parts = int.from_bytes(params[280 + 28 : 280 + 32], "little")
        end = replace(work.end, out=out)
        lengths = np.array([tokens - 5], np.int64)
        asked = replace(work, queries=queries, lengths=lengths, end=end)
        launcher = cast(Any, device)
        wanted = attend_params(launcher, stream, asked, shape, parts, end)
        fixed = np.frombuffer(params, np.uint8) == np.frombuffer(wanted, np.uint8)
        places = [*range(8 * 11, 8 * 13)]  # of parts in memory, if there are none
        assert set(np.flatnonzero(~fixed).tolist()) <= set(places)
    assert len({QUERIES_AT, OUT_AT, LENGTH_AT}) == 3


def test_no_call_is_kept_or_made_again_during_a_capture(host_rig: Rig) -> None:
    device, work = Noting(), gpu_work(host_rig, 320)
    stream, held = stream_and_held(captured=False)
    again = attend_again(cast(CudaDevice, device), stream, work)
    assert again is not None

    def refuse(what: str) -> None:
        raise CaptureError(what)

    captures = cast(Any, stream.state.captures)
    captures.look, captures.refuse = lambda: True, refuse
    with pytest.raises(CaptureError):
        again(work.queries, work.queries, 309)
    assert not device.launched
    assert not held
    assert attend_again(cast(CudaDevice, device), stream, work) is None


def test_lists_that_are_made_anew_are_none_to_repeat(host_rig: Rig) -> None:
    device, work = Noting(), gpu_work(host_rig, 320)
    stream, _ = stream_and_held(captured=False)
    slots = cast(Tensor, work.slots)
    listed = replace(work, slots=np.zeros(slots.shape, np.int32))
    assert attend_again(cast(CudaDevice, device), stream, listed) is None
    plain = replace(work, queries=host_rig.tensor(np.zeros((1, 1, 32, 128), np.uint16)))
    assert attend_again(cast(CudaDevice, device), stream, plain) is None
    with pytest.raises(ArgumentError):
        attend_again(cast(CudaDevice, device), stream, replace(work, span_blocks=0))
