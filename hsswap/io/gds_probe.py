"""Whether a directory can be read by GPUDirect, and if not, why and what to do about it.

First what can be looked up. Then, because only a transfer shows it, and because cuFile was seen to
end the process in containers, clouds and WSL, one transfer in a child process:

    {"reason": null, or text}                 the one line that the child prints
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hsswap.errors import HsswapError
from hsswap.io import linux
from hsswap.io.gds_driver import CudaDriver, GdsUnavailable
from hsswap.io.gds_kvikio import (
    CUFILE_LIBRARY,
    INSTALL,
    DeviceBuffer,
    Kvikio,
    acquire,
    find_cufile,
    release,
)

CHILD_LIMIT_S = 60.0
"""Opening cuFile takes a second or two; on a host with many GPUs and drives up to ten."""
PROBE_BYTES = 1 << 16
CHILD = "from hsswap.io.gds_probe import main; main()"
P2PDMA_KERNEL = (6, 2)
"""Linux from which cuFile can do without nvidia-fs (PCI peer-to-peer, CUDA 12.8)."""

WITHOUT_DIRECT = frozenset({"tmpfs", "ramfs", "overlay", "fuse", "zfs", "btrfs"})
"""File systems that cuFile takes by its own compatibility path alone."""


class Reason(NamedTuple):
    """Why there is no GPUDirect, and the remedy."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what} ({self.remedy})"


def missing_packages() -> list[Reason]:
    """What kvikio needs to work at all, on either path, and is not here."""
    reasons = []
    if importlib.util.find_spec("kvikio") is None:
        reasons.append(Reason("the package kvikio is not installed", INSTALL))
    try:
        CudaDriver()
    except GdsUnavailable:
        reasons.append(
            Reason("libcuda.so.1 cannot be loaded", "install the NVIDIA driver, 580 or newer")
        )
    return reasons


def missing_for_gpudirect(directory: Path, root: Path = Path("/")) -> list[Reason]:
    """What GPUDirect needs beyond that, as far as it can be looked up, and is not here.

    ``root``: where /proc, /dev and /run are looked for.
    """
    reasons = []
    if find_cufile() is None:
        reasons.append(Reason(f"{CUFILE_LIBRARY} cannot be loaded", "pip install nvidia-cufile"))
    if not (root / "run/udev").is_dir():
        reasons.append(
            Reason("/run/udev is missing", "in a container, mount it: -v /run/udev:/run/udev:ro")
        )
    if not glob.glob(str(root / "dev/nvme*n*")):
        reasons.append(
            Reason("no NVMe drive is visible", "choose a host with one, or pass its device through")
        )
    if not (root / "proc/driver/nvidia-fs").exists() and not _may_do_peer_to_peer(root):
        reasons.append(
            Reason(
                "the kernel module nvidia-fs is not loaded",
                "modprobe nvidia-fs (package nvidia-gds)",
            )
        )
    try:
        name = linux.file_system(directory).name
    except OSError as error:
        reasons.append(Reason(f"{directory}: {error.strerror}", "choose another directory"))
    else:
        if name in WITHOUT_DIRECT:
            reasons.append(
                Reason(
                    f"{directory} is on {name}",
                    "choose a directory on ext4 or xfs on an NVMe drive",
                )
            )
    return reasons


def _may_do_peer_to_peer(root: Path) -> bool:
    """Whether this kernel could do PCI peer-to-peer with an NVMe drive; the child finds out."""
    release_text = os.uname().release.split("-")[0].split(".")
    try:
        version = int(release_text[0]), int(release_text[1])
    except (IndexError, ValueError):
        return False
    return version >= P2PDMA_KERNEL and bool(glob.glob(str(root / "dev/nvme*n*")))


def why_no_gpudirect(directory: Path) -> list[Reason]:
    """Why files in ``directory`` cannot be moved by GPUDirect; empty when they can.

    Takes up to :data:`CHILD_LIMIT_S`: never call it on a loop. Assumes that
    :func:`missing_packages` found nothing.
    """
    return missing_for_gpudirect(directory) or _ask_child(directory)


def _ask_child(directory: Path) -> list[Reason]:
    remedy = "run gdscheck -p"
    with tempfile.TemporaryDirectory(prefix="hsswap-gds-") as scratch:
        search = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": search, "TMPDIR": scratch}
        try:
            child = subprocess.run(
                [sys.executable, "-c", CHILD, str(directory.resolve())],
                cwd=scratch,
                env=environment,
                capture_output=True,
                text=True,
                timeout=CHILD_LIMIT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [Reason(f"a trial transfer did not end within {CHILD_LIMIT_S:.0f} s", remedy)]
        except OSError as error:
            return [Reason(f"a trial process cannot be started: {error}", "try again")]
    return _judge(child, remedy)


def _judge(child: subprocess.CompletedProcess[str], remedy: str) -> list[Reason]:
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return [Reason(f"cuFile ended a trial process with {name}", remedy)]
    try:
        reason = json.loads(child.stdout.splitlines()[-1])["reason"]
    except (IndexError, KeyError, TypeError, ValueError):
        last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [Reason(f"a trial process failed with {child.returncode}: {last}", remedy)]
    return [] if reason is None else [Reason(f"a trial transfer failed: {reason}", remedy)]


def try_transfer(directory: Path) -> str | None:
    """Move some bytes from the device to a new file and back by GPUDirect; what went wrong.

    For a process of its own, which it may end.
    """
    try:
        driver = CudaDriver()
        driver.initialize()
        library = acquire(true_path=True)
    except HsswapError as error:
        return str(error)
    try:
        return _write_and_read(directory, driver, library)
    except (HsswapError, OSError, RuntimeError) as error:
        return str(error) or repr(error)
    finally:
        release(library)


def _write_and_read(directory: Path, driver: CudaDriver, library: Kvikio) -> str | None:
    sent = np.random.default_rng().integers(0, 256, PROBE_BYTES, np.uint8)
    received = np.zeros_like(sent)
    source, target = driver.allocate(PROBE_BYTES), driver.allocate(PROBE_BYTES)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="hsswap-gds-") as scratch:
        os.posix_fallocate(scratch.fileno(), 0, PROBE_BYTES)
        file = library.open(scratch.fileno())
        try:
            driver.upload(source, sent.ctypes.data, PROBE_BYTES)
            written = file.raw_write(DeviceBuffer(source, PROBE_BYTES), PROBE_BYTES, 0, 0)
            read = file.raw_read(DeviceBuffer(target, PROBE_BYTES), PROBE_BYTES, 0, 0)
            driver.download(received.ctypes.data, target, PROBE_BYTES)
        finally:
            file.close()
            driver.free(source)
            driver.free(target)
    if (written, read) != (PROBE_BYTES, PROBE_BYTES):
        return f"{written} bytes were written and {read} read, of {PROBE_BYTES}"
    return None if np.array_equal(sent, received) else "other bytes came back than were written"


def main() -> None:
    """The child: try it in the directory that the command line names."""
    print(json.dumps({"reason": try_transfer(Path(sys.argv[1]))}))
