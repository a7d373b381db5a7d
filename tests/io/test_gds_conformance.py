"""The BlockIO contract on gds, with host and with device memory, on both of its paths.

It needs kvikio and a driver. Where there is no driver, test_gds.py runs this file on stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hsswap.io.base import BlockIO
from hsswap.io.gds import Compatibility, GdsIO
from tests.io import test_conformance as contract
from tests.io.gds_support import DeviceMemory, DevicePages, device_transfer, missing_here, stand_in

# Every test of the contract, with its fixtures; `make` below takes the place of the one there.
from tests.io.test_conformance import *  # noqa: F403

if missing := missing_here():
    pytest.skip(missing, allow_module_level=True)

del test_names  # noqa: F821  of other backends

pytestmark = [pytest.mark.gds]

WITHOUT_GPUDIRECT = stand_in() is None


def compatible(threads: int) -> BlockIO:
    return GdsIO(threads, compatibility=Compatibility.FORCED, limit=contract.LIMIT)


def gpudirect(threads: int) -> BlockIO:
    return GdsIO(threads, limit=contract.LIMIT, why_not=lambda directory: [])


@pytest.fixture(  # type: ignore[no-redef]  # takes the place of the contract's
    params=[
        (compatible, "host"),
        (compatible, "device"),
        pytest.param(
            (gpudirect, "device"),
            marks=pytest.mark.skipif(
                WITHOUT_GPUDIRECT, reason="GPUDirect is tested on the stand-in for cuFile"
            ),
        ),
    ],
    ids=["compat-host", "compat-device", "gpudirect-device"],
)
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], BlockIO]:
    maker, memory = request.param
    monkeypatch.setenv("FAKE_CUFILE", "gds")
    if memory == "device":
        monkeypatch.setattr(DevicePages, "memory", DeviceMemory(), raising=False)
        monkeypatch.setattr(contract, "Pages", DevicePages)
        monkeypatch.setattr(contract, "transfer", device_transfer)
    result: Callable[[int], BlockIO] = maker
    return result
