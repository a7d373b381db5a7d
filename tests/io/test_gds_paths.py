"""GPUDirect told from the two compatibility paths, kvikio's and cuFile's.

It needs kvikio and the stand-ins of libcuda and libcufile; test_gds.py runs this file on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsswap.io import open_backend
from hsswap.io.gds import Compatibility, GdsIO
from hsswap.io.gds_driver import GdsUnavailable
from hsswap.io.gds_probe import Reason, why_no_gpudirect
from tests.io.gds_support import (
    Drivers,
    all_given_back,
    gpudirect,
    missing_here,
    settings,
    stand_in,
)

if missing := missing_here():
    pytest.skip(missing, allow_module_level=True)

# Not marked gds: on a GPU host these are not to run.
pytestmark = pytest.mark.skipif(stand_in() is None, reason="it needs the stand-ins for a driver")


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    with all_given_back(monkeypatch) as found:
        yield found


async def test_the_log_stays_out_of_the_current_directory_and_is_removed(
    drivers: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, scratch = tmp_path / "current", tmp_path / "scratch"
    current.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(current)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    for name in ("CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON"):
        monkeypatch.delenv(name, raising=False)
    io = gpudirect()
    await io.start(current)
    assert [path.name for path in scratch.glob("*/*")] == ["cufile.log"]
    await io.close()
    monkeypatch.setenv("FAKE_CUFILE", "none")
    with pytest.raises(GdsUnavailable, match=r"\(its log says: stand-in:1 made up\)"):
        await gpudirect().start(current)
    monkeypatch.setenv("FAKE_CUFILE", "gds")
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", str(tmp_path / "mine"))
    mine = gpudirect()
    await mine.start(current)
    await mine.close()
    assert (tmp_path / "mine").exists()
    assert os.listdir(current) == os.listdir(scratch) == []


async def test_cufiles_own_compatibility_path_is_refused(
    drivers: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUFILE", "none")  # it would open if compatibility were allowed
    original = settings()
    io = gpudirect()
    with pytest.raises(GdsUnavailable, match="cannot be opened for GPUDirect"):
        await io.start(tmp_path)
    assert settings() == original
    allowed = GdsIO(1, compatibility=Compatibility.ALLOWED, why_not=lambda directory: [])
    await allowed.start(tmp_path)
    assert not allowed.true_path
    assert "cannot be opened for GPUDirect" in allowed.path
    await allowed.close()


async def test_cufile_was_opened_by_somebody_else_with_compatibility(
    drivers: Drivers, tmp_path: Path
) -> None:
    drivers.open_cufile()
    io = gpudirect()
    with pytest.raises(GdsUnavailable, match="allow_compat_mode"):
        await io.start(tmp_path)
    drivers.close_cufile()


async def test_named_without_gpudirect_and_allowed_by_name(
    drivers: Drivers, tmp_path: Path
) -> None:
    reasons = [Reason("no drive", "buy one"), Reason("no module", "load it")]
    with pytest.raises(GdsUnavailable, match=r"no drive \(buy one\); no module \(load it\)"):
        await GdsIO(why_not=lambda directory: reasons).start(tmp_path)
    io = GdsIO(compatibility=Compatibility.ALLOWED, why_not=lambda directory: reasons)
    await io.start(tmp_path)
    assert "through host memory: no drive; no module)" in io.path
    await io.close()


async def test_by_name_on_this_host(
    drivers: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing injected: whatever drives there are, this cuFile cannot do it."""
    monkeypatch.setenv("FAKE_CUFILE", "none")
    with pytest.raises(GdsUnavailable, match=r"io='gds' cannot work here: .*io='gds-compat'"):
        await open_backend("gds").start(tmp_path)
    io = open_backend("gds-compat", threads=2)
    await io.start(tmp_path)
    assert re.fullmatch(
        r"compatibility path \(kvikio 26\S+ through host memory: .+\); host memory: .+", io.path
    )
    await io.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("gds", None),
        ("none", "a trial transfer failed: cuFile cannot be opened for GPUDirect"),
        ("abort", "cuFile ended a trial process with SIGABRT"),
    ],
)
def test_the_trial_in_a_child(
    host: str,
    expected: str | None,
    drivers: Drivers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_CUFILE", host)
    monkeypatch.setattr("hsswap.io.gds_probe.missing_for_gpudirect", lambda directory: [])
    reasons = why_no_gpudirect(tmp_path)
    assert (expected is None) == (reasons == [])
    assert expected is None or expected in str(reasons[0])
    assert os.listdir(tmp_path) == []
