"""The gds backend without a GPU: what it refuses and why, how it cuts transfers, and, in a child
process on stand-ins for libcuda and libcufile, the contract and everything else with kvikio itself.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap.errors import ArgumentError, BlockIOError, ConfigError
from hsswap.io import open_backend
from hsswap.io.base import IOFile, Operation, Priority, Transfer
from hsswap.io.gds import Compatibility, GdsIO
from hsswap.io.gds_driver import Allocation
from hsswap.io.gds_kvikio import CuFile, DeviceBuffer, acquire, errno_of, words_of
from hsswap.io.gds_pieces import pieces_of
from hsswap.io.gds_probe import missing_for_gpudirect
from tests.conftest import missing_for_gpu
from tests.io.gds_support import build_stand_ins, missing_packages
from tests.io.support import PAGE
from tests.io.transfers import ignore

ROOT = Path(__file__).parents[2]
CHILD_LIMIT_S = 300  # a hang's end; it takes seconds

without_driver = pytest.mark.skipif(missing_for_gpu() is None, reason="there is a driver here")
with_stand_ins = pytest.mark.skipif(
    missing_packages() is not None, reason=missing_packages() or "all is there"
)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both libraries."""
    place = tmp_path_factory.mktemp("stand-ins")
    build_stand_ins(place)
    return place


@with_stand_ins
@pytest.mark.parametrize(
    ("file", "least"),
    [("test_gds_conformance.py", 150), ("test_gds_device.py", 25), ("test_gds_paths.py", 8)],
)
def test_kvikio_on_stand_ins(file: str, least: int, stand_ins: Path) -> None:
    # Elsewhere than at home: libcufile writes its log where it runs, unless it is told not to.
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "-c", str(ROOT / "pyproject.toml")]
    options.append(f"--rootdir={ROOT}")
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name(file))],
        cwd=stand_ins,
        env={**os.environ, "LD_LIBRARY_PATH": str(stand_ins), "FAKE_CUFILE": "gds"},
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        check=False,
    )
    report = child.stdout[-8000:] + child.stderr[-2000:]
    assert child.returncode == 0, report
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None, report
    assert int(passed[1]) >= least, report
    assert "skipped" not in child.stdout, report


def test_importing_it_does_not_import_kvikio() -> None:
    code = "import sys, hsswap.io; sys.exit('kvikio' in sys.modules or 'nvidia' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=CHILD_LIMIT_S)


@without_driver
@pytest.mark.parametrize("name", ["gds", "gds-compat"])
async def test_without_a_driver_it_says_so(name: str, tmp_path: Path) -> None:
    io = open_backend(name)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1 cannot be loaded \(install the NVIDIA"):
        await io.start(tmp_path)
    assert list(tmp_path.iterdir()) == []
    await io.close()


def test_a_broken_kvikio_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)  # importing it raises then
    with pytest.raises(ConfigError, match=r"kvikio cannot be imported \(.+\); pip install"):
        acquire(true_path=False)


async def test_it_needs_a_directory() -> None:
    io = GdsIO(compatibility=Compatibility.FORCED)
    with pytest.raises(ConfigError, match="needs a directory"):
        await io.start(None)


def test_what_a_host_lacks_is_named_with_its_remedy(tmp_path: Path) -> None:
    bare = [str(reason) for reason in missing_for_gpudirect(tmp_path, tmp_path)]
    for what in (r"/run/udev is missing \(.*mount it", "no NVMe drive", "nvidia-fs is not loaded"):
        assert any(re.search(what, reason) for reason in bare), what
    (tmp_path / "run/udev").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvme0n1").touch()
    (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    equipped = {reason.what for reason in missing_for_gpudirect(tmp_path, tmp_path)}
    assert not any(word in what for what in equipped for word in ("udev", "NVMe", "nvidia-fs"))


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="/dev/shm cannot be written to")
def test_tmpfs_is_no_place_for_gpudirect() -> None:
    found = [str(reason) for reason in missing_for_gpudirect(Path("/dev/shm"))]
    assert any("/dev/shm is on tmpfs (choose a directory on ext4 or xfs" in one for one in found)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EIO, "x"), errno.EIO),
        (RuntimeError("POSIX error on pwrite: No space left on device"), errno.ENOSPC),
        (RuntimeError("POSIX error on pread: EOF"), 0),
        (RuntimeError("cuFile error at: x.cpp:1: internal error"), 0),
    ],
)
def test_the_systems_number_behind_an_error_of_kvikio(error: Exception, number: int) -> None:
    assert errno_of(error) == number


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("KvikIO failure at: /a/b.hpp:168: POSIX error on pread: EOF", "POSIX error on pread: EOF"),
        ("CUDA error at: /a/b.cpp:9: CUDA_ERROR_X(y)", "CUDA_ERROR_X(y)"),
        ("as it is", "as it is"),
    ],
)
def test_what_an_error_of_kvikio_says(text: str, words: str) -> None:
    assert words_of(RuntimeError(text)) == words


def device_read(addresses: list[int], span_bytes: int) -> Transfer:
    file = IOFile(Path("file"), 1 << 40)
    listed = np.array(addresses, np.uint64)
    return Transfer(Operation.READ, file, PAGE, listed, span_bytes, Priority.NEEDED, ignore)


ALLOCATIONS = [Allocation(0x100000, 16 * PAGE, 7), Allocation(0x100000 + 16 * PAGE, 16 * PAGE, 8)]


def allocation_of(address: int) -> Allocation | None:
    return next((one for one in ALLOCATIONS if one.base <= address < one.end), None)


@given(st.lists(st.integers(0, 31), min_size=1, max_size=40))
def test_pieces_are_the_spans_with_neighbours_joined(places: list[int]) -> None:
    """Over two allocations that adjoin: no piece spans both, none could be joined, none is lost."""
    addresses = [ALLOCATIONS[0].base + place * PAGE for place in places]
    pieces = pieces_of(device_read(addresses, PAGE), allocation_of)
    spans = [
        (piece.offset + at, piece.address + at)
        for piece in pieces
        for at in range(0, piece.nbytes, PAGE)
    ]
    assert spans == [(PAGE + number * PAGE, one) for number, one in enumerate(addresses)]
    for piece in pieces:
        assert piece.allocation.base <= piece.address
        assert piece.address + piece.nbytes <= piece.allocation.end
    for one, other in pairwise(pieces):
        assert one.address + one.nbytes != other.address or one.allocation is not other.allocation


class ScriptedCuFile:
    """kvikio's pool as a script: piece ``refused`` is not taken, piece ``failing`` fails."""

    def __init__(self, refused: int, failing: int) -> None:
        self.refused, self.failing = refused, failing
        self.taken: list[int] = []
        self.waited: list[int] = []

    def pread(self, buf: DeviceBuffer, size: int, file_offset: int) -> ScriptedFuture:
        number = len(self.taken)
        if number == self.refused:
            raise RuntimeError("made up: refused")
        self.taken.append(number)
        return ScriptedFuture(self, number, size)


class ScriptedFuture:
    """A future of it; the end of a piece is when somebody has waited for it."""

    def __init__(self, script: ScriptedCuFile, number: int, nbytes: int) -> None:
        self.script, self.number, self.nbytes = script, number, nbytes

    def get(self) -> int:
        self.script.waited.append(self.number)
        if self.number == self.script.failing:
            raise RuntimeError("POSIX error on pread: Input/output error")
        return self.nbytes


@pytest.mark.parametrize(
    ("refused", "failing", "message"), [(9, 1, "drive reported a fault"), (2, 9, "made up")]
)
def test_all_pieces_on_kvikios_pool_are_waited_for(
    refused: int, failing: int, message: str
) -> None:
    """They use the file and the buffer until they end, whatever became of the others."""
    script = ScriptedCuFile(refused, failing)
    io = GdsIO()
    read = device_read([ALLOCATIONS[0].base + at * PAGE for at in (6, 4, 2, 0)], PAGE)
    io._cufiles[read.file] = cast("CuFile", script)
    with pytest.raises(BlockIOError, match=message):
        io._move_on_pool(read, pieces_of(read, allocation_of))
    assert script.waited == script.taken == list(range(min(4, refused)))


def test_host_memory_has_no_pieces_and_is_not_mixed() -> None:
    assert pieces_of(device_read([PAGE, 2 * PAGE], PAGE), allocation_of) == []
    device, host = ALLOCATIONS[0].base, PAGE
    with pytest.raises(ArgumentError, match="one transfer to each kind"):
        pieces_of(device_read([device, host], PAGE), allocation_of)
    with pytest.raises(ArgumentError, match="ends behind its allocation"):
        pieces_of(device_read([device + 15 * PAGE], 2 * PAGE), allocation_of)
    with pytest.raises(ArgumentError, match="ends behind its allocation"):
        pieces_of(device_read([device], 64 * PAGE), allocation_of)
