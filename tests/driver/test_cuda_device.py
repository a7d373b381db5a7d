"""What only a GPU has: contexts, raw handles, device memory, wake-ups, lost contexts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.driver import open_device
from hsswap.driver.cuda import CudaDevice
from hsswap.driver.cuda_errors import checked
from hsswap.driver.cuda_events import CudaEvent
from hsswap.driver.cuda_stream import RING_BYTES, CudaStream
from hsswap.driver.operations import (
    AppendWork,
    ChecksumWork,
    GatherWork,
    ScatterWork,
    UnitPool,
)
from hsswap.driver.tensor import Tensor, tensor_in, tensor_of
from hsswap.errors import ArgumentError, DeviceError
from tests.driver.cuda_rig import DelayWork, stream_of
from tests.driver.rig import Rig, random_codes

pytestmark = pytest.mark.gpu

GROUP = LayerGroup(layers=1, q_heads=8, kv_heads=4, head_dim=64)
WAIT_LIMIT_S = 60.0


def current_context() -> int:
    """The calling thread's context, 0: none."""
    from cuda.bindings import driver

    assert not driver.cuInit(0)[0]
    status, context = driver.cuCtxGetCurrent()
    assert not status
    return int(context)


def test_a_threads_context_is_left_alone() -> None:
    def run() -> None:
        seen.append(current_context())
        with open_device("cuda:0") as device, Rig(device) as rig:
            seen.append(current_context())
            rig.device.gather(rig.stream, random_gather(rig, 10))
            rig.stream.synchronize()
            seen.append(current_context())
        seen.append(current_context())

    seen: list[int] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(seen) == 4
    assert len(set(seen)) == 1


def test_a_callers_own_context_is_used(cuda: CudaDevice) -> None:
    """Not the primary one: work goes to the caller's, and closing does not destroy it."""
    from cuda.bindings import driver

    assert not driver.cuInit(0)[0]
    _, gpu_handle = driver.cuDeviceGet(0)
    status, own = driver.cuCtxCreate(None, 0, gpu_handle)
    assert not status
    try:
        with open_device("cuda:0") as device, Rig(device) as rig:
            assert isinstance(device, CudaDevice)
            assert int(device.context.handle) == int(own)
            check_gather(rig, random_gather(rig, 10))
            with cuda.stream() as foreign, pytest.raises(ArgumentError, match="another"):
                device.stream(foreign.handle)
            with cuda.stream() as foreign, pytest.raises(ArgumentError, match="another device"):
                device.gather(foreign, random_gather(rig, 1))
        assert current_context() == int(own)
    finally:
        assert not driver.cuCtxDestroy(own)[0]


def test_gpus_that_do_not_exist() -> None:
    with pytest.raises(DeviceError, match=r"cuda:99 does not exist: \d+ GPU"):
        open_device("cuda:99")


def test_callers_streams_are_bounded(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    def made() -> int:
        with cuda.context:
            return int(checked(driver.cuStreamCreate(1), "cuStreamCreate"))

    known = sum(not state.owned for state in cuda._states.values())
    monkeypatch.setattr("hsswap.driver.cuda.CALLERS_STREAMS", known + 2)
    first, second, third = made(), made(), made()
    for handle in (first, second, first):
        assert cuda.stream(handle).handle == handle
    with pytest.raises(DeviceError, match="is one too many; give the first"):
        cuda.stream(third)
    own = cuda.stream()  # its own do not count
    own.close()
    with cuda.context:
        for handle in (first, second, third):
            checked(driver.cuStreamDestroy(handle), "cuStreamDestroy")
    streams = [cuda.stream() for _ in range(8)]  # handles of destroyed streams among them
    assert all(cuda._states[stream.handle].owned for stream in streams)
    for stream in streams:
        stream.close()


def test_torchs_streams_and_tensors(cuda: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    assert cuda.stream(stream).handle == stream.cuda_stream
    assert cuda.stream(torch.cuda.default_stream()).handle == 0
    with Rig(cuda) as rig, torch.cuda.stream(stream):
        keys = torch.randn(40, 4, 64, device="cuda", dtype=torch.bfloat16)
        units, blocks = rig.units(GROUP, 16, 12), rig.blocks(GROUP, 16, 3)
        work = AppendWork(
            tensor_of(keys.view(torch.int16), "bf16", (40, 4, 64), "keys"),
            tensor_of(keys.view(torch.int16), "bf16", (40, 4, 64), "values"),
            0,
            units,
            np.arange(12, dtype=np.int32).reshape(3, 4),
            blocks,
            np.arange(3, dtype=np.int32),
        )
        wrapped = cuda.stream(stream)
        cuda.append(wrapped, work)
        wrapped.synchronize()
        raw = units.memory.array().view(np.uint16).reshape(3, 4, 2, 16, 64)[:, :, 0]
        rows = raw.transpose(0, 2, 1, 3).reshape(48, 4, 64)[:40]
        np.testing.assert_array_equal(rows.view(np.int16), keys.view(torch.int16).cpu().numpy())


def test_cupys_streams(cuda: CudaDevice) -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    assert cuda.stream(stream).handle == stream.ptr


# --- memory


def random_gather(rig: Rig, count: int, group: LayerGroup = GROUP, size: int = 16) -> GatherWork:
    """Random units into random places; a third of the units stay where they are."""
    rng = np.random.default_rng(count)
    slots = -(-3 * count // (2 * group.kv_heads)) + 1
    units, blocks = rig.units(group, size, count + 3), rig.blocks(group, size, slots)
    memory = blocks.memory.array()
    memory[...] = rng.integers(0, 256, memory.shape, np.uint8)
    pairs = rng.permutation(slots * group.kv_heads)[:count].astype(np.int32)
    block, head = np.divmod(pairs, np.int32(group.kv_heads))
    places = rng.permutation(count + 3)[:count].astype(np.int32)
    return GatherWork(blocks, units, block, head, places)


def check_gather(rig: Rig, work: GatherWork) -> None:
    """Run it and compare bytes."""
    rig.device.gather(rig.stream, work)
    rig.stream.synchronize()
    nbytes = work.units.unit_bytes
    memory = work.blocks.memory.array()[:, : work.units.group.kv_heads * nbytes]
    wanted = memory.reshape(len(memory), -1, nbytes)[work.host_slots, work.heads]
    np.testing.assert_array_equal(work.units.memory.array()[work.device_slots], wanted)


@pytest.mark.parametrize("count", [1, 100, 5000])
def test_gather_of_many(gpu: Rig, count: int) -> None:
    check_gather(gpu, random_gather(gpu, count))


@pytest.mark.parametrize("aux", [2, 8, 16])
def test_units_of_every_alignment(gpu: Rig, aux: int) -> None:
    check_gather(gpu, random_gather(gpu, 50, replace(GROUP, aux_bytes=aux)))


def in_device_memory(rig: Rig, pool: UnitPool) -> UnitPool:
    """An equal pool in memory of the GPU; the rig closes it."""
    buffer = rig.device.allocate(pool.memory.shape[0] * pool.unit_bytes)
    rig._buffers.append(buffer)
    return replace(pool, memory=tensor_in(buffer, "u8", pool.memory.shape))


def test_through_device_memory_and_back(gpu: Rig) -> None:
    """Gather into it, scatter out of it, on two streams ordered by an event."""
    work = random_gather(gpu, 300)
    work = replace(work, units=in_device_memory(gpu, work.units))
    back = gpu.blocks(GROUP, 16, work.blocks.memory.shape[0], fill=7)
    assert work.heads is not None
    with gpu.device.stream() as other:
        gpu.device.gather(gpu.stream, work)
        other.wait_for(gpu.stream.record())
        gpu.device.scatter(
            other, ScatterWork(back, work.units, work.host_slots, work.heads, work.device_slots)
        )
        other.synchronize()
    nbytes = work.units.unit_bytes

    def units(pool: Any) -> NDArray[np.uint8]:
        rows: NDArray[np.uint8] = pool.memory.array()[:, : 4 * nbytes].reshape(-1, 4, nbytes)
        return rows

    taken = np.zeros(units(back).shape[:2], bool)
    taken[work.host_slots, work.heads] = True
    np.testing.assert_array_equal(units(back)[taken], units(work.blocks)[taken])
    assert (units(back)[~taken] == 7).all()


def test_device_memory_is_zero_and_aligned(cuda: CudaDevice) -> None:
    from cuda.bindings import driver

    for nbytes in (1, 5000, 3 << 20):
        with cuda.allocate(nbytes) as buffer:
            assert buffer.on_device
            assert buffer.address % 4096 == 0
            out = np.full(nbytes, 9, np.uint8)
            with cuda.context:
                assert not driver.cuMemcpyDtoH(out.ctypes.data, buffer.address, nbytes)[0]
                assert not driver.cuMemsetD8(buffer.address, 5, nbytes)[0]
            assert not out.any()


def test_device_memory_runs_out_with_a_remedy(cuda: CudaDevice) -> None:
    for nbytes in (1 << 50, 1 << 70):
        with pytest.raises(DeviceError, match="take fewer slots"):
            cuda.allocate(nbytes)


def test_ordinary_arrays_are_copied_in_and_refused_out(gpu: Rig) -> None:
    rng = np.random.default_rng(0)
    keys, values = (random_codes(rng, (5, 4, 64)) for _ in range(2))
    units, blocks = gpu.units(GROUP, 16, 4), gpu.blocks(GROUP, 16, 1)
    given = tensor_of(keys, "bf16", keys.shape, "keys"), tensor_of(values, "bf16", keys.shape, "v")
    slots = np.arange(4, dtype=np.int32)[None]
    work = AppendWork(*given, 3, units, slots, blocks, np.zeros(1, np.int32))
    gpu.device.append(gpu.stream, work)
    keep = keys.copy()
    keys[...] = 0
    gpu.stream.synchronize()
    written = units.memory.array().view(np.uint16).reshape(4, 2, 16, 64)[:, 0, 3:8]
    np.testing.assert_array_equal(written, keep.transpose(1, 0, 2))
    out = np.zeros(1, np.uint32)
    zeros = np.zeros(1, np.int32)
    check = ChecksumWork(blocks, zeros, zeros.astype(np.uint32), tensor_of(out, "u32", (1,), "out"))
    with pytest.raises(ArgumentError, match=r"out is in host memory that cuda:0 cannot reach"):
        gpu.device.checksum(gpu.stream, check)
    odd = Tensor(blocks.memory.address + 1, (1,), (4,), "u32", False, blocks.memory)
    with pytest.raises(ArgumentError, match="not aligned"):
        gpu.device.checksum(gpu.stream, replace(check, out=odd))


def test_lists_larger_than_the_ring(gpu: Rig) -> None:
    """The ring grows, and nothing in flight is overwritten."""
    count = RING_BYTES // 12 // 4
    blocks = gpu.blocks(LayerGroup(1, 1, 1, 8), 16, 3)
    memory = blocks.memory.array()
    memory[...] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
    outs, works = [], []
    for turn in range(16):
        rng = np.random.default_rng(turn)
        seeds = rng.integers(0, 1 << 32, count, np.uint32)
        slots = rng.integers(0, 3, count).astype(np.int32)
        outs.append(gpu.tensor(np.zeros(count, np.uint32)))
        works.append((slots, seeds))
        gpu.device.checksum(gpu.stream, ChecksumWork(blocks, slots, seeds, outs[-1]))
    gpu.stream.synchronize()
    for out, (slots, seeds) in zip(outs, works, strict=True):
        for i in range(0, count, count // 7):
            assert out.array()[i] == crc32(memory[slots[i]].tobytes(), int(seeds[i]))


# --- events


async def test_waits_and_callbacks_of_unfinished_work(cuda: CudaDevice) -> None:
    names: list[str] = []
    called = threading.Event()

    def note() -> None:
        names.append(threading.current_thread().name)
        called.set()

    with cuda.stream() as stream:
        assert isinstance(stream, CudaStream)
        delay_work = DelayWork(cuda)
        delay_work.enqueue(stream)
        event = stream.record()
        assert not event.is_done()
        event.call_when_done(note)
        waits = [asyncio.ensure_future(event.wait()) for _ in range(50)]
        dropped = asyncio.ensure_future(event.wait())
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.gather(*waits)
        assert event.is_done()
        assert called.wait(WAIT_LIMIT_S)
        assert names == ["hsswap-waiter-cuda:0"]
        delay_work.close()


def test_short_work_does_not_wait_for_long_work_of_another_stream(cuda: CudaDevice) -> None:
    work = DelayWork(cuda)
    order: list[str] = []
    both = threading.Semaphore(0)

    def note(name: str) -> None:
        order.append(name)
        both.release()

    with cuda.stream() as long, cuda.stream() as short:
        assert isinstance(long, CudaStream)
        for _ in range(10):
            work.enqueue(long)
        long.record().call_when_done(lambda: note("long"))
        event = short.record()
        assert isinstance(event, CudaEvent)
        event._done = False
        cuda._shared.waiter.add(event, lambda: note("short"), event._wakes)
        for _ in range(2):
            assert both.acquire(timeout=WAIT_LIMIT_S)
    assert order == ["short", "long"]
    work.close()


def test_a_callback_may_close_its_stream(cuda: CudaDevice) -> None:
    work = DelayWork(cuda)
    stream = cuda.stream()
    assert isinstance(stream, CudaStream)
    work.enqueue(stream)
    closed = threading.Event()
    event = stream.record()
    event.call_when_done(stream.close)
    event.call_when_done(closed.set)
    assert closed.wait(WAIT_LIMIT_S)
    assert event.is_done()
    work.close()


def test_only_cuda_events_can_be_waited_for(gpu: Rig) -> None:
    with open_device("host") as host, host.stream() as stream:
        event = stream.record()
        with pytest.raises(ArgumentError, match="event is a HostEvent"):
            gpu.stream.wait_for(event)


def test_finished_work_is_let_go(gpu: Rig) -> None:
    state = stream_of(gpu).state
    for _ in range(200):
        gpu.device.gather(gpu.stream, random_gather(gpu, 1))
    gpu.stream.synchronize()
    assert not state._epochs
    assert not state._held


LOST = """
import numpy as np
from hsswap.config import LayerGroup
from hsswap.driver import open_device
from hsswap.driver.operations import BlockPool, GatherWork, UnitPool
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import DeviceError

group, zero = LayerGroup(1, 1, 1, 64), np.zeros(1, np.int32)
with open_device("cuda:0") as device:
    stream, other = device.stream(), device.stream()
    memory, host = device.allocate(4096), device.allocate_host(4096)
    nowhere = Tensor(1 << 46, (1, 4096), (4096, 1), "u8", True, None)
    units = UnitPool(tensor_in(memory, "u8", (1, 4096)), group, 16)
    device.gather(stream, GatherWork(BlockPool(nowhere, group, 16), units, zero, zero, zero))
    event = stream.record()
    woken = []
    import threading
    called = threading.Event()
    event.call_when_done(called.set)
    assert called.wait(30)
    for call in (event.synchronize, event.is_done, stream.synchronize, other.synchronize):
        try:
            call()
        except DeviceError as error:
            woken.append("start a new process" in str(error))
    print(woken)
"""


def test_a_lost_context_is_said_and_nothing_hangs() -> None:
    """In a process of its own, whose GPU is unusable afterwards."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOST],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.stdout.strip() == "[True, True, True, True]", done.stderr
    assert done.returncode == 0
