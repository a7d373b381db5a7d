"""Scratch memory: again at once on the stream that used it, elsewhere when its work is done; and
what a pool that cannot be made leaves behind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hsswap import ConfigError, HighSpeedSwap
from hsswap.driver.base import Stream
from hsswap.driver.host import HostDevice
from hsswap.io.memory import MemoryIO
from hsswap.pools import ScratchPool
from tests.swap_cases import SMALL, config_for, random_case


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with HostDevice() as opened:
        yield opened
    assert opened.live_count == 0


def hold(stream: Stream) -> threading.Event:
    """Keep the stream busy until the event is set."""
    go = threading.Event()
    stream.enqueue("hold", lambda _work, _scratch: go.wait(), None)  # type: ignore[attr-defined]
    return go


def test_a_stream_gets_its_own_buffer_back_at_once(device: HostDevice) -> None:
    pool, stream = ScratchPool(device), device.stream()
    go = hold(stream)
    first = pool.take(1000, stream)
    second = pool.take(1000, stream)  # by an attend beside it: the first is still in hand
    assert second is not first
    pool.give_back_behind(first, stream)
    assert pool.take(1000, stream) is first
    pool.give_back_behind(first, stream)
    large = pool.take(1 << 20, stream)  # for which the first is too small
    assert large is not first
    go.set()
    stream.close()
    pool.give_back(second)
    large.close()
    pool.close()


def test_another_stream_gets_it_when_the_work_is_done(device: HostDevice) -> None:
    pool, busy, other = ScratchPool(device), device.stream(), device.stream()
    go = hold(busy)
    first = pool.take(1000, busy)
    pool.give_back_behind(first, busy)
    second = pool.take(1000, other)
    assert second is not first
    go.set()
    busy.synchronize()
    taken = pool.take(1000, other)
    assert taken is first
    pool.give_back_behind(first, other)
    pool.give_back_behind(second, other)
    other.synchronize()
    busy.close()
    other.close()
    third = device.stream()
    assert pool.take(1000, third) in (first, second)  # of a stream that is closed
    third.close()
    first.close()
    second.close()
    pool.close()


def test_few_idle_buffers_are_kept(device: HostDevice) -> None:
    pool, stream = ScratchPool(device), device.stream()
    buffers = [pool.take(1000, stream) for _ in range(ScratchPool.KEPT + 4)]
    for buffer in buffers:
        pool.give_back_behind(buffer, stream)
    stream.synchronize()
    with device.stream() as other:
        pool.give_back(pool.take(1000, other))  # events are recorded when another stream asks
        stream.synchronize()
        taken = pool.take(1000, other)
    assert sum(not buffer.closed for buffer in buffers) == ScratchPool.KEPT - 1  # and that one
    stream.close()
    taken.close()
    pool.close()


async def test_a_capacity_whose_table_has_no_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: HostDevice
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 16.0 GiB")

    monkeypatch.setattr("hsswap.pools.HostTier", refuse)
    case = random_case(SMALL, 20, seed=1)
    with pytest.raises(ConfigError, match=r"16.0 GiB.*lower capacity_tokens"):
        await HighSpeedSwap.create(config_for(case), io=MemoryIO(), device=device)
    assert device.live_count == 0
