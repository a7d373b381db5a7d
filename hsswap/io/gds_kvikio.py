"""kvikio and cuFile, as far as the gds backend uses them. The only module that imports kvikio.

Both keep their settings for the whole process. :func:`acquire` sets those that hsswap relies on
when its first backend starts, and :func:`release` puts back what was found when the last one
closes: another user of kvikio in the process sees hsswap's values in between.

What was seen with kvikio 26.6 and is dealt with here: without libcufile its compatibility mode OFF
ends the process (``std::terminate``), and its wheel does not find the one of nvidia-cufile by
itself; ``raw_read`` past the end of a file raises on one path and is short on the other; the pool's
futures keep neither file nor buffer alive.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from hsswap.io.gds_driver import GdsUnavailable

INSTALL = "pip install 'hsswap[gds]'"
CUFILE_LIBRARY = "libcufile.so.0"

POOL_THREADS = 8
"""kvikio's pool, which moves the scattered spans of one transfer on the compatibility path. Above 8
small blocks became slower (an H200 host, tmpfs: 64 KiB 1.7 GB/s at 8, 1.3 at 16; 256 KiB 14 and
12)."""
TASK_BYTES = 4 << 20
"""Longer spans are split. kvikio's default, named so that the environment cannot change it: the
last task of a split span waits inside the pool and so takes a thread from the others."""

# cufile.h: CUFileBoolConfigParameter_t
ALLOW_COMPAT_MODE = 1
FORCE_COMPAT_MODE = 2

LOG_VARIABLE = "CUFILE_LOGFILE_PATH"
"""Where cuFile logs to; without it, into the current directory. (Its parameters for that are
accepted and have no effect, seen with 1.20.)"""


KVIKIO_ERRORS = (OSError, RuntimeError, ValueError)
"""What kvikio raises; the first two from C++, the last for buffers."""


def errno_of(error: Exception) -> int:
    """The system's error number behind an error of kvikio, which has only its text; 0 without."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    for number in errno.errorcode:
        if text.endswith(f": {os.strerror(number)}"):
            return number
    return 0


def words_of(error: Exception) -> str:
    """What an error of kvikio says, without the place in its source."""
    return re.sub(r"^\w+ \w+ at: \S+:\d+: ", "", str(error)) or repr(error)


class DeviceBuffer:
    """Device memory as kvikio takes it: an address and a length. Keeps nothing alive."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Pending(Protocol):
    """kvikio's IOFuture."""

    def get(self) -> int:
        """Wait for the end; the bytes moved."""


class CuFile(Protocol):
    """kvikio's CuFile, the methods used. Their ``size`` bytes begin ``dev_offset`` into ``buf``."""

    def raw_read(self, buf: DeviceBuffer, size: int, file_offset: int, dev_offset: int) -> int:
        """Read in the calling thread, whose current context must reach the buffer."""

    def raw_write(self, buf: DeviceBuffer, size: int, file_offset: int, dev_offset: int) -> int:
        """Write in the calling thread, likewise."""

    def pread(self, buf: DeviceBuffer, size: int, file_offset: int) -> Pending:
        """Read on kvikio's pool."""

    def pwrite(self, buf: DeviceBuffer, size: int, file_offset: int) -> Pending:
        """Write on kvikio's pool."""

    def close(self) -> None:
        """Close both descriptors. Whatever is in flight then fails."""


class _Process:
    """What backends of one process share. Everything under ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.true_holders = 0
        self.before: dict[str, Any] = {}
        self.allowed_compat = True
        self.log: tempfile.TemporaryDirectory[str] | None = None


_process = _Process()


class Kvikio:
    """kvikio with hsswap's settings, from :func:`acquire`. ``true_path``: GPUDirect, or nothing."""

    def __init__(self, module: Any, true_path: bool) -> None:
        self._module = module
        self.true_path = true_path

    @property
    def version(self) -> str:
        """kvikio's and, on the true path, cuFile's."""
        version = f"kvikio {self._module.__version__}"
        if self.true_path:
            major, minor = self._module.cufile_driver.libcufile_version()
            version += f", cuFile {major}.{minor}"
        return version

    def open(self, descriptor: int) -> CuFile:
        """Open the file of a descriptor a second time, for reading and writing.

        Through /proc, so that it is this file whatever its name leads to by now. Raises
        RuntimeError where the path cannot be had.
        """
        with _process.lock, self._mode():
            file: CuFile = self._module.CuFile(f"/proc/self/fd/{descriptor}", "r+")
        return file

    def register(self, buffer: DeviceBuffer) -> None:
        """Pin the whole allocation around a buffer for DMA. Nothing on the compatibility path."""
        with _process.lock, self._mode():
            self._module.memory_register(buffer)

    def unregister(self, buffer: DeviceBuffer) -> None:
        """Undo :meth:`register`. Before the memory is freed: the other way round can hang."""
        with _process.lock, self._mode():
            self._module.memory_deregister(buffer)

    def _mode(self) -> Any:
        """kvikio looks at this setting of the process when a file is opened or memory pinned."""
        modes = self._module.CompatMode
        return self._module.defaults.set("compat_mode", modes.OFF if self.true_path else modes.ON)


def acquire(*, true_path: bool) -> Kvikio:
    """Import kvikio and set it up. Slow, so never on a loop. Undo it with :func:`release`.

    Raises GdsUnavailable when a package is missing, or when the true path is asked for and cuFile
    cannot be opened without its own compatibility mode.
    """
    kvikio = _import()
    with _process.lock:
        if _process.holders == 0:
            settings = {
                "num_threads": POOL_THREADS,
                "task_size": TASK_BYTES,
                "gds_threshold": 0,  # below it kvikio would copy in the calling thread
                "auto_direct_io_read": True,  # not from the page cache, which is the default
                "auto_direct_io_write": True,
            }
            _process.before = {name: kvikio.defaults.get(name) for name in settings}
            kvikio.defaults.set(settings)
        _process.holders += 1
        if true_path:
            try:
                if _process.true_holders == 0:
                    _process.allowed_compat = _open_cufile(kvikio)
                _process.true_holders += 1
            except BaseException:
                _let_go(kvikio)
                raise
    return Kvikio(kvikio, true_path)


def release(library: Kvikio) -> None:
    """Put back, with the last one, the settings that were found, pinned memory and cuFile."""
    kvikio = library._module
    with _process.lock:
        try:
            if library.true_path:
                _process.true_holders -= 1
                if _process.true_holders == 0:
                    _close_cufile(kvikio, _process.allowed_compat)
        finally:
            _let_go(kvikio)


def _let_go(kvikio: Any) -> None:
    _process.holders -= 1
    if _process.holders == 0:
        kvikio.defaults.set(_process.before)
        with suppress(RuntimeError):  # the device was closed before us, and freed it
            kvikio.bounce_buffer_free()


def _import() -> Any:
    try:
        kvikio = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
        importlib.import_module("kvikio.cufile_driver")
    except ImportError as error:
        raise GdsUnavailable(f"kvikio cannot be imported ({error}); {INSTALL}") from error
    return kvikio


def find_cufile() -> Any:
    """libcufile, loaded, from the system or the wheel nvidia-cufile; None where there is none.

    Once it is loaded kvikio finds it by its name. Loading opens no driver and writes no log.
    """
    with suppress(OSError):
        return ctypes.CDLL(CUFILE_LIBRARY)
    found = importlib.util.find_spec("nvidia")
    for place in (found.submodule_search_locations or []) if found else []:
        for library in sorted(Path(place).glob(f"*/lib/{CUFILE_LIBRARY}")):
            with suppress(OSError):
                return ctypes.CDLL(str(library))
    return None


class _Status(ctypes.Structure):
    """cufile.h: CUfileError_t."""

    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


def _cufile_call(cufile: Any, name: str, *arguments: Any) -> int:
    """A cuFile function's error number; 0: fine. One that this version lacks is an error too."""
    function = getattr(cufile, name, None)
    if function is None:
        return -1
    function.restype = _Status
    code: int = function(*arguments).err
    return code


def _flag(cufile: Any, which: int) -> bool | None:
    value = ctypes.c_bool()
    if _cufile_call(cufile, "cuFileGetParameterBool", ctypes.c_int(which), ctypes.byref(value)):
        return None
    return value.value


def _set_flag(cufile: Any, which: int, value: bool) -> None:
    _cufile_call(cufile, "cuFileSetParameterBool", ctypes.c_int(which), ctypes.c_bool(value))


def _open_cufile(kvikio: Any) -> bool:
    """Open cuFile's driver so that it cannot go through host memory; what it allowed before.

    With compatibility allowed, as cufile.json usually does, cuFile takes any file and bounces
    through host memory while kvikio reports GPUDirect.
    """
    cufile = find_cufile()
    if cufile is None:
        raise GdsUnavailable(f"{CUFILE_LIBRARY} cannot be loaded; {INSTALL}")
    allowed = bool(_flag(cufile, ALLOW_COMPAT_MODE))
    _set_flag(cufile, ALLOW_COMPAT_MODE, False)
    try:
        with _log_elsewhere():
            kvikio.cufile_driver.driver_open()
    except RuntimeError as error:
        said = _last_error_logged()
        _set_flag(cufile, ALLOW_COMPAT_MODE, allowed)
        _drop_log()
        raise GdsUnavailable(
            f"cuFile cannot be opened for GPUDirect: {words_of(error)}{said}; load nvidia-fs, or "
            f"enable PCI peer-to-peer in cufile.json; set {LOG_VARIABLE} to keep its log"
        ) from error
    if _flag(cufile, ALLOW_COMPAT_MODE) is not False or _flag(cufile, FORCE_COMPAT_MODE):
        _close_cufile(kvikio, allowed)
        raise GdsUnavailable(
            "cuFile runs with its own compatibility mode allowed, so GPUDirect cannot be told from "
            'a copy through host memory; set "allow_compat_mode": false in cufile.json, or start '
            "hsswap before whatever else in this process opens cuFile"
        )
    return allowed


def _close_cufile(kvikio: Any, allowed: bool) -> None:
    """Close what :func:`_open_cufile` opened. At exit would be too late: cuFile crashes there."""
    kvikio.cufile_driver.driver_close()
    _set_flag(find_cufile(), ALLOW_COMPAT_MODE, allowed)
    _drop_log()


@contextmanager
def _log_elsewhere() -> Iterator[None]:
    """Let cuFile, opened meanwhile, log into a folder of ours, unless the caller said where."""
    if {LOG_VARIABLE, "CUFILE_ENV_PATH_JSON"} & os.environ.keys():
        yield
        return
    _process.log = tempfile.TemporaryDirectory(prefix="hsswap-cufile-")
    os.environ[LOG_VARIABLE] = f"{_process.log.name}/cufile.log"
    try:
        yield
    finally:
        del os.environ[LOG_VARIABLE]


def _last_error_logged() -> str:
    """The last error in the log, as the end of a sentence; empty when there is none."""
    if _process.log is not None:
        with suppress(OSError):
            text = Path(_process.log.name, "cufile.log").read_text(errors="replace")
            errors = [line for line in text.splitlines() if " ERROR " in line]
            if errors:
                return f" (its log says: {errors[-1].partition(' ERROR ')[2].strip()})"
    return ""


def _drop_log() -> None:
    log, _process.log = _process.log, None
    if log is not None:
        log.cleanup()
