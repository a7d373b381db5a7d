"""Streams and events: order, overlap, failure, cancellation, and what closing leaves."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.base import Device
from hsswap.driver.host import HostDevice
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_stream import QUEUE_LIMIT, HostStream
from hsswap.driver.operations import ChecksumWork
from hsswap.errors import ArgumentError, ClosedError, DeviceError
from tests.driver.rig import Rig

GATE_LIMIT_S = 60.0


class Gate:
    """Work that stops its stream until the test opens it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, work: object, scratch: Scratch) -> None:
        self.reached.set()
        assert self._opened.wait(GATE_LIMIT_S), "the test never opened the gate"

    def open(self) -> None:
        """Let the stream go on."""
        self._opened.set()


def note(work: tuple[list[str], str], scratch: Scratch) -> None:
    """Work that writes down that it ran."""
    work[0].append(work[1])


def fail(message: str, scratch: Scratch) -> None:
    """Work that fails."""
    raise ZeroDivisionError(message)


def new_stream(host: HostDevice) -> HostStream:
    """A stream, as the class that takes functions."""
    stream = host.stream()
    assert isinstance(stream, HostStream)
    return stream


# --- both devices


def test_an_event_behind_nothing_is_done(device: Device) -> None:
    with device.stream() as stream:
        event = stream.record()
        event.synchronize()
        assert event.is_done()


async def test_an_event_can_be_awaited(device: Device) -> None:
    with device.stream() as stream:
        await stream.record().wait()


def test_call_when_done_of_a_done_event_calls_at_once(device: Device) -> None:
    with device.stream() as stream:
        event = stream.record()
        event.synchronize()
        calls: list[str] = []
        event.call_when_done(lambda: calls.append(threading.current_thread().name))
        assert calls == [threading.current_thread().name]


def test_closing_the_device_closes_streams_and_buffers() -> None:
    host = HostDevice()
    stream, buffer = new_stream(host), host.allocate(4096)
    ran: list[str] = []
    stream.enqueue("note", note, (ran, "a"))
    host.close()
    assert ran == ["a"]
    assert stream.closed
    assert buffer.closed
    assert host.live_count == 0


# --- order and overlap


def test_one_stream_runs_in_order_off_the_callers_thread(host: HostDevice) -> None:
    ran: list[str] = []
    with new_stream(host) as stream:
        for i in range(100):
            stream.enqueue("note", note, (ran, str(i)))
        stream.enqueue("name", lambda w, s: w.append(threading.current_thread().name), ran)
        stream.synchronize()
        assert ran == [*map(str, range(100)), f"hsswap-stream-{stream.handle}"]


def test_operations_run_on_the_worker(host: HostDevice) -> None:
    """Enqueued behind a closed gate, an operation has written nothing."""
    with Rig(host) as rig:
        assert isinstance(rig.stream, HostStream)
        gate = Gate()
        rig.stream.enqueue("gate", gate, None)
        blocks = rig.blocks(LayerGroup(1, 1, 1, 8), 16, 1)
        out = rig.tensor(np.zeros(1, np.uint32))
        zeros = np.zeros(1, np.int32)
        work = ChecksumWork(blocks, zeros, zeros.astype(np.uint32), out)
        host.checksum(rig.stream, work)
        assert out.array()[0] == 0
        gate.open()
        rig.stream.synchronize()
        assert out.array()[0] != 0


def test_two_streams_overlap(host: HostDevice) -> None:
    """Each waits for the other to have begun: in turns they would never end."""
    with new_stream(host) as a, new_stream(host) as b:
        gates = Gate(), Gate()
        for stream, gate in zip((a, b), gates, strict=True):
            stream.enqueue("gate", gate, None)
        for gate in gates:
            assert gate.reached.wait(GATE_LIMIT_S)
        for gate in gates:
            gate.open()


def test_wait_for_orders_streams(host: HostDevice) -> None:
    ran: list[str] = []
    gate = Gate()
    with new_stream(host) as a, new_stream(host) as b:
        a.enqueue("gate", gate, None)
        a.enqueue("note", note, (ran, "a"))
        b.enqueue("note", note, (ran, "before"))
        before = b.record()
        b.wait_for(a.record())
        b.enqueue("note", note, (ran, "b"))
        after = b.record()
        before.synchronize()
        assert not after.is_done()
        gate.open()
        after.synchronize()
        assert ran == ["before", "a", "b"]


def test_a_stream_may_wait_for_itself(host: HostDevice) -> None:
    with new_stream(host) as stream:
        stream.wait_for(stream.record())
        stream.synchronize()


def test_only_events_can_be_waited_for(host: HostDevice) -> None:
    with new_stream(host) as stream, pytest.raises(ArgumentError, match="event is a str"):
        stream.wait_for("event")  # type: ignore[arg-type]


def test_a_shared_handle_shares_the_queue(host: HostDevice) -> None:
    ran: list[str] = []
    with new_stream(host) as stream:
        again = host.stream(stream.handle)
        assert isinstance(again, HostStream)
        stream.enqueue("note", note, (ran, "a"))
        again.enqueue("note", note, (ran, "b"))
        again.close()
        with pytest.raises(ClosedError):
            again.record()
        stream.enqueue("note", note, (ran, "c"))
        stream.synchronize()
    assert ran == ["a", "b", "c"]


def test_handles_of_others_are_refused(host: HostDevice) -> None:
    with HostDevice() as other, other.stream() as foreign:
        for handle in (foreign, foreign.handle):
            with pytest.raises(ArgumentError, match="names no open stream"):
                host.stream(handle)
        with Rig(host) as rig, pytest.raises(ArgumentError, match="another device"):
            host.checksum(foreign, no_blocks(rig))


def no_blocks(rig: Rig) -> ChecksumWork:
    """The least work there is."""
    blocks = rig.blocks(LayerGroup(1, 1, 1, 8), 16, 1)
    none = np.zeros(0, np.int32)
    out = rig.tensor(np.zeros(0, np.uint32))
    return ChecksumWork(blocks, none, none.astype(np.uint32), out)


def test_a_closed_streams_handle_is_refused(host: HostDevice) -> None:
    with Rig(host) as rig:
        stream = host.stream()
        stream.close()
        with pytest.raises(ArgumentError, match="names no open stream"):
            host.stream(stream.handle)
        with pytest.raises(ClosedError):
            host.checksum(stream, no_blocks(rig))


# --- waiting on loops


async def test_waiters_wake_when_the_work_has_run(host: HostDevice) -> None:
    gate = Gate()
    with new_stream(host) as stream:
        stream.enqueue("gate", gate, None)
        event = stream.record()
        waits = [asyncio.ensure_future(event.wait()) for _ in range(3)]
        await asyncio.sleep(0)  # let them begin
        assert not event.is_done()
        assert not any(wait.done() for wait in waits)
        gate.open()
        await asyncio.gather(*waits)
        assert event.is_done()
        await event.wait()


async def test_a_cancelled_wait_leaves_work_and_other_waits_alone(host: HostDevice) -> None:
    gate, ran, complaints = Gate(), list[str](), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, facts: complaints.append(facts))
    with new_stream(host) as stream:
        stream.enqueue("gate", gate, None)
        stream.enqueue("note", note, (ran, "a"))
        event = stream.record()
        dropped, kept = (asyncio.ensure_future(event.wait()) for _ in range(2))
        await asyncio.sleep(0)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        gate.open()
        await kept
        assert ran == ["a"]
        assert complaints == []


def test_a_wait_whose_loop_is_gone_is_harmless(host: HostDevice) -> None:
    gate = Gate()
    with new_stream(host) as stream:
        stream.enqueue("gate", gate, None)
        event = stream.record()

        async def begin_and_leave() -> None:
            task = asyncio.ensure_future(event.wait())
            await asyncio.sleep(0)
            task.cancel()

        asyncio.run(begin_and_leave())
        gate.open()
        stream.synchronize()
        assert event.is_done()


async def test_closing_on_the_loop_ends(host: HostDevice) -> None:
    """Also with a waiter whose wake-up comes only after this function returns."""
    stream, ran = new_stream(host), list[str]()
    stream.enqueue("note", note, (ran, "a"))
    wait = asyncio.ensure_future(stream.record().wait())
    await asyncio.sleep(0)
    stream.close()
    assert ran == ["a"]
    await wait


def test_callbacks_run_on_the_worker_and_may_close_the_stream(host: HostDevice) -> None:
    gate, names = Gate(), list[str]()
    stream = new_stream(host)
    stream.enqueue("gate", gate, None)
    event = stream.record()
    event.call_when_done(stream.close)
    event.call_when_done(lambda: names.append(threading.current_thread().name))
    gate.open()
    event.synchronize()
    stream.close()
    assert names == [f"hsswap-stream-{stream.handle}"]


# --- failure


def test_a_failure_marks_the_stream(host: HostDevice) -> None:
    ran: list[str] = []
    with new_stream(host) as stream:
        before = stream.record()
        stream.enqueue("divide", fail, "by zero")
        behind = stream.record()
        stream.enqueue("note", note, (ran, "never"))
        called = threading.Event()
        behind.call_when_done(called.set)
        assert called.wait(GATE_LIMIT_S)
        for call in (behind.is_done, behind.synchronize, stream.synchronize):
            with pytest.raises(DeviceError, match="divide failed on hsswap-stream") as caught:
                call()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert before.is_done()
    assert ran == []


async def test_a_failure_reaches_waiters(host: HostDevice) -> None:
    gate = Gate()
    with new_stream(host) as stream:
        stream.enqueue("gate", gate, None)
        stream.enqueue("divide", fail, "by zero")
        waits = [asyncio.ensure_future(stream.record().wait()) for _ in range(2)]
        await asyncio.sleep(0)
        gate.open()
        got = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(error) for error in got] == [DeviceError, DeviceError]
        assert got[0] is not got[1]
        with pytest.raises(DeviceError, match="by zero"):
            await stream.record().wait()


def test_a_failure_passes_to_streams_that_wait_for_it_only(host: HostDevice) -> None:
    ran: list[str] = []
    with new_stream(host) as bad, new_stream(host) as after, new_stream(host) as apart:
        bad.enqueue("divide", fail, "by zero")
        after.wait_for(bad.record())
        after.enqueue("note", note, (ran, "never"))
        apart.enqueue("note", note, (ran, "apart"))
        apart.synchronize()
        with pytest.raises(DeviceError, match=r"waited for work that failed.*by zero"):
            after.synchronize()
    assert ran == ["apart"]


def test_a_full_queue_is_an_error_not_a_wait(host: HostDevice) -> None:
    gate = Gate()
    with new_stream(host) as stream:
        stream.enqueue("gate", gate, None)
        assert gate.reached.wait(GATE_LIMIT_S)
        for _ in range(QUEUE_LIMIT):
            stream.enqueue("nothing", lambda w, s: None, None)
        with pytest.raises(DeviceError, match="operations waiting"):
            stream.record()
        gate.open()


# --- what is left behind


def test_closing_runs_what_is_enqueued(host: HostDevice) -> None:
    ran: list[str] = []
    stream = new_stream(host)
    for i in range(50):
        stream.enqueue("note", note, (ran, str(i)))
    event = stream.record()
    stream.close()
    stream.close()
    assert len(ran) == 50
    assert event.is_done()
    with pytest.raises(ClosedError):
        stream.enqueue("note", note, (ran, "late"))


def test_a_stream_lets_go_of_finished_work(host: HostDevice) -> None:
    class Work:
        pass

    work = Work()
    held = weakref.ref(work)
    with new_stream(host) as stream:
        stream.enqueue("nothing", lambda w, s: None, work)
        del work
        stream.synchronize()
        stream.synchronize()  # the first one's own record may still be in hand
        assert held() is None
