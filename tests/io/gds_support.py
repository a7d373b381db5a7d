"""What the tests of gds share: the stand-ins for libcuda and libcufile, and device memory."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap.errors import HsswapError
from hsswap.io.base import IOFile, Operation, Priority, Transfer
from hsswap.io.gds import Compatibility, GdsIO
from hsswap.io.gds_driver import LIBRARY, CudaDriver
from tests.io import transfers
from tests.io.support import PAGE

SOURCES = Path(__file__).parent / "fake_cuda"


def missing_packages() -> str | None:
    """What the tests lack to run kvikio on stand-ins, or None."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed (extra gds)"
    if shutil.which("cc") is None:
        return "cc, a C compiler, is missing"
    return None


def missing_here() -> str | None:
    """What this very process lacks to run kvikio, or None."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed (extra gds)"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return f"{LIBRARY} cannot be loaded; test_gds.py runs this file on a stand-in"
    return None


def stand_in() -> Any:
    """The stand-in for libcuda, or None on a real driver."""
    library = ctypes.CDLL(LIBRARY)
    return library if hasattr(library, "fake_cuda_count") else None


def build_stand_ins(place: Path) -> None:
    """Compile both stand-ins into a directory for LD_LIBRARY_PATH."""
    common = ["cc", "-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra"]
    for library, source, others in [
        ("libcuda.so.1", "cuda.c", []),
        ("libcufile.so.0", "cufile.c", [place / "libcuda.so.1"]),
    ]:
        command = [*common, f"-Wl,-soname,{library}", "-o", place / library, SOURCES / source]
        subprocess.run([*map(str, command), *map(str, others)], check=True)


class DeviceMemory:
    """A device with an initialized driver; its memory is copied from and to host mirrors."""

    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.driver.initialize()
        self.context = self.driver.primary_context(0)
        self._library = ctypes.CDLL(LIBRARY)

    def on_device(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call with the context current, and leave the thread as it was."""
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(self.context))
        try:
            return call(*arguments)
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        address: int = self.on_device(self.driver.allocate, nbytes)
        return address

    def allocate_pooled(self, nbytes: int) -> int:
        """Device memory of a stream's pool, which belongs to no context."""
        address = ctypes.c_uint64()
        arguments = ctypes.byref(address), ctypes.c_size_t(nbytes), None
        assert self.on_device(self._library.cuMemAllocAsync, *arguments) == 0
        return address.value

    def free_pooled(self, address: int) -> None:
        """Give that back."""
        assert self.on_device(self._library.cuMemFreeAsync, ctypes.c_uint64(address), None) == 0

    def free(self, address: int) -> None:
        """Give device memory back."""
        self.on_device(self.driver.free, address)


class DevicePages:
    """As Pages, in device memory. ``spans`` is a mirror, copied around each transfer's move."""

    memory: DeviceMemory

    def __init__(self, count: int, span_bytes: int = PAGE) -> None:
        self.spans = np.zeros((count, span_bytes), np.uint8)
        # A driver aligns to 256 bytes where something small was allocated before.
        allocated = self.memory.allocate(count * span_bytes + PAGE)
        self.base = allocated + -allocated % PAGE
        first = np.uint64(self.base)
        self.addresses = np.arange(count, dtype=np.uint64) * np.uint64(span_bytes) + first
        self.upload()
        weakref.finalize(self, self.memory.free, allocated)

    def upload(self) -> None:
        """Copy the mirror to the device."""
        memory, spans = self.memory, self.spans
        memory.on_device(memory.driver.upload, self.base, spans.ctypes.data, spans.nbytes)

    def download(self) -> None:
        """Copy the device's bytes to the mirror."""
        memory, spans = self.memory, self.spans
        memory.on_device(memory.driver.download, spans.ctypes.data, self.base, spans.nbytes)


def device_transfer(
    operation: Operation,
    file: IOFile,
    pages: Any,
    on_done: Callable[[Any, HsswapError | None], None],
    offset: int = 0,
    priority: Priority = Priority.NEEDED,
    **options: Any,
) -> Transfer:
    """As transfers.transfer, with the mirror copied behind ``prepare`` and before ``verify``."""
    made = transfers.transfer(operation, file, pages, on_done, offset, priority, **options)
    prepare, verify = made.prepare, made.verify

    def prepare_device(one: Transfer) -> None:
        if prepare is not None:
            prepare(one)
        pages.upload()

    def verify_device(one: Transfer) -> None:
        pages.download()
        if verify is not None:
            verify(one)

    made.prepare, made.verify = prepare_device, verify_device
    return made


class Drivers:
    """The counters of the stand-ins."""

    def __init__(self) -> None:
        self._cuda = stand_in()
        self._cufile = ctypes.CDLL("libcufile.so.0")

    def count(self, name: str) -> int:
        """Calls of a driver function, or what is live."""
        found: int = self._cuda.fake_cuda_count(name.encode())
        return found

    def cufile(self, name: str) -> int:
        """The same of cuFile."""
        found: int = self._cufile.fake_cufile_count(name.encode())
        return found

    def fail(self, name: str, nth: int, code: int) -> None:
        """Let the n-th next call of a driver function fail."""
        self._cuda.fake_cuda_fail(name.encode(), nth, code)

    def open_cufile(self) -> None:
        """As another library of the process would."""
        self._cufile.cuFileDriverOpen()

    def close_cufile(self) -> None:
        """Undo that."""
        self._cufile.cuFileDriverClose()


def compatible(threads: int = 1) -> GdsIO:
    """The backend on kvikio's compatibility path."""
    return GdsIO(threads, compatibility=Compatibility.FORCED)


def gpudirect(threads: int = 1) -> GdsIO:
    """The backend on GPUDirect, which the stand-ins have."""
    return GdsIO(threads, why_not=lambda directory: [])


SETTINGS = ("num_threads", "task_size", "gds_threshold", "auto_direct_io_read", "compat_mode")


def settings() -> dict[str, Any]:
    """What kvikio is set to."""
    defaults = importlib.import_module("kvikio.defaults")
    return {name: defaults.get(name) for name in SETTINGS}


@contextmanager
def all_given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    """Stand-ins with GPUDirect. All pinned, open, registered or set must be back at the end."""
    monkeypatch.setenv("FAKE_CUFILE", "gds")
    monkeypatch.setattr(DevicePages, "memory", DeviceMemory(), raising=False)
    found, before = Drivers(), settings()
    yield found
    assert found.count("live host") == 0
    for name in ("live files", "live registrations", "early closes", "open"):
        assert found.cufile(name) == 0, name
    assert settings() == before
