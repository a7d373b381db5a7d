"""The devices under test. Every test that takes ``device`` runs on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.driver.cuda import CudaDevice
from hsswap.driver.cuda_context import Context
from hsswap.driver.cuda_events import EventPool, Waiter
from hsswap.driver.cuda_stream import Shared, StreamState
from hsswap.driver.host import HostDevice
from tests.driver.fake_driver import OK, FakeContext
from tests.driver.rig import Rig


@pytest.fixture(params=["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An open device; nothing of it may be left open but what the device itself closes."""
    name: str = request.param
    with open_device(name) as opened:
        yield opened
    assert opened.live_count == 0


@pytest.fixture
def rig(device: Device) -> Iterator[Rig]:
    """Memory and a stream on the device under test."""
    with Rig(device) as opened:
        yield opened


@pytest.fixture
def host() -> Iterator[HostDevice]:
    """A host device: gates are functions on its workers, which a GPU does not run."""
    with HostDevice() as opened:
        yield opened
    assert opened.live_count == 0


@pytest.fixture
def cuda() -> Iterator[CudaDevice]:
    """The first GPU."""
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    with device:
        yield device
    assert device.live_count == 0


@pytest.fixture
def gpu(cuda: CudaDevice) -> Iterator[Rig]:
    """Memory and a stream of the GPU."""
    with Rig(cuda) as opened:
        yield opened


@pytest.fixture
def context() -> FakeContext:
    """A context."""
    return FakeContext()


@pytest.fixture
def state(context: FakeContext) -> Iterator[StreamState]:
    """A stream's state; all memory must be given back."""
    real = cast(Context, context)
    shared = Shared(real, EventPool(real), Waiter(real))
    made = StreamState(shared, 5000, owned=True)
    yield made
    context.driver.status = OK
    made.close()
    made.close()
    shared.waiter.stop()
    shared.events.close()
    assert not context.driver._memory
