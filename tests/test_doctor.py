"""``hsswap doctor``: every probe answers, whatever happens to it."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsswap.__main__ import main
from hsswap.commands import doctor_probes
from hsswap.commands.doctor import COLUMNS, examine, lines_of, run_probe
from hsswap.commands.doctor_probes import DEGRADED, MISSING, OK, Check
from hsswap.commands.doctor_selftest import attention, store
from hsswap.errors import CorruptBlock
from hsswap.io.gds_probe import Reason
from hsswap.io.store import BlockStore

REQUIRED = {"python", "packages", "attention", "store"}
EXPECTED = REQUIRED | {
    "demo packages",
    "cuda driver",
    "nvrtc",
    "torch",
    "gds",
    "io_uring",
    "direct I/O",
    "free space",
    "numa",
    "huge pages",
    "memlock",
}


def test_it_names_everything_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--dir", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["ok"] is True
    checks = {check["name"]: check for check in found["checks"]}
    assert set(checks) >= EXPECTED
    for check in found["checks"]:
        assert check["state"] in (OK, DEGRADED, MISSING)
        assert check["meaning"]
        assert check["required"] == (check["name"] in REQUIRED)
        assert check["state"] == OK or check["fix"], check
    assert list(tmp_path.iterdir()) == []


def test_people_get_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert {line[:14].strip() for line in heads} >= EXPECTED
    assert all(line[14:24].strip() in (OK, DEGRADED, MISSING) for line in heads)
    assert all(len(line) <= COLUMNS or " " not in line[24:].strip(" ->") for line in lines)


def test_a_fix_has_a_line_of_its_own() -> None:
    indent = " " * 24
    check = Check("x", MISSING, "not\nthere", "get it")
    assert lines_of(check).splitlines() == [f"x{' ' * 13}missing   not there", f"{indent}-> get it"]
    check = Check("x", OK, "word " * 30, "a-long-word " * 9)
    lines = lines_of(check).splitlines()
    assert [line[24:28] for line in lines] == ["word", "word", "-> a", "   a"]
    assert max(len(line) for line in lines) <= COLUMNS


def test_a_folder_that_is_not_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dir", str(tmp_path / "not" / "yet")]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert main(["doctor", "--dir", str(tmp_path / "file" / "below")]) == 2
    assert f"{tmp_path / 'file'} is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("packages", [[], [Reason("no kvikio", "install it")]])
@pytest.mark.parametrize("others", [[], [Reason("no drive", "buy one")]])
def test_gpudirect(
    packages: list[Reason], others: list[Reason], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsswap.io.gds_probe.missing_packages", lambda: packages)
    monkeypatch.setattr("hsswap.io.gds_probe.missing_for_gpudirect", lambda path: others)
    (check,) = doctor_probes.gds(tmp_path)
    reasons = packages + others
    assert (check.state == OK) == (not reasons)
    assert check.fix == "; ".join(reason.remedy for reason in reasons)
    assert all(reason.what in check.meaning for reason in reasons)
    assert ("gds-compat does, through host memory" in check.meaning) == (
        not packages and bool(others)
    )


def test_a_broken_store_is_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: BlockStore, *arguments: object, **more: object) -> None:
        raise CorruptBlock("layer 0, block id 1: other bytes than were written")

    monkeypatch.setattr(BlockStore, "read", read)
    assert main(["doctor", "--dir", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    (check,) = [check for check in found["checks"] if check["name"] == "store"]
    assert check["state"] == MISSING
    assert "other bytes" in check["meaning"]
    assert main(["doctor", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "broken: store"


def test_self_tests(tmp_path: Path) -> None:
    assert [check.state for check in attention()] == [OK]
    assert [check.state for check in store(tmp_path)] == [OK]
    (check,) = store(tmp_path / "missing")
    assert (check.state, check.required) == (MISSING, True)


def test_a_probe_that_raises_is_a_line() -> None:
    def probe() -> Iterator[Check]:
        yield Check("first", OK, "fine")
        raise RuntimeError("the driver is in a mood")

    first, second = run_probe("x", probe, 10.0)
    assert first.state == OK
    assert (second.name, second.state) == ("x", DEGRADED)
    assert "RuntimeError: the driver is in a mood" in second.meaning


def test_a_probe_that_hangs_is_a_line() -> None:
    end = threading.Event()

    def probe() -> Iterator[Check]:
        end.wait()
        yield Check("never", OK, "read")

    (check,) = run_probe("store", probe, 0.01)
    end.set()
    assert (check.name, check.state, check.required) == ("store", MISSING, True)
    assert "no answer within 0.01 s" in check.meaning


def test_every_probe_answers_where_files_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str, **more: object) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", absent)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    checks = {check.name: check for check in doctor_probes.cuda()}
    assert checks["cuda driver"].state == MISSING
    assert checks["nvrtc"].state == MISSING
    assert "pip install 'hsswap[cuda]'" in checks["nvrtc"].fix
    found = list(examine(tmp_path / "missing"))
    assert {check.name for check in found if check.required and check.state != OK} == {"store"}


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/sys/module/nvidia/version": "570.86.10\n",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05",
    }

    def read_text(self: Path) -> str:
        if str(self) not in texts:
            raise FileNotFoundError(str(self))
        return texts[str(self)]

    monkeypatch.setattr(Path, "read_text", read_text)
    old = doctor_probes._driver_version()
    assert (old.state, old.fix) == (MISSING, "install the NVIDIA driver, 580 or newer")
    del texts["/sys/module/nvidia/version"]
    new = doctor_probes._driver_version()
    assert new.state == OK
    assert new.meaning.startswith("580.95.05")
    texts.clear()
    assert doctor_probes._driver_version().state == DEGRADED


class FakeDriver:
    """Two devices, as libcuda would tell of them."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = 2  # type: ignore[attr-defined]
        return 0

    def cuDeviceGet(self, device: object, number: int) -> int:
        device._obj.value = number  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetName(self, name: ctypes.Array[ctypes.c_char], size: int, device: object) -> int:
        name.value = b"Some GPU"
        return 0

    def cuDeviceTotalMem_v2(self, nbytes: object, device: object) -> int:
        nbytes._obj.value = 80 << 30  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: object) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]  # type: ignore[attr-defined]
        return 0


def test_devices() -> None:
    found = list(doctor_probes._devices(FakeDriver()))  # type: ignore[arg-type]
    assert [(check.name, check.state) for check in found] == [("cuda:0", OK), ("cuda:1", OK)]
    assert found[0].meaning == "Some GPU, sm_90, 80.00 GiB"
    (check,) = doctor_probes._devices(FakeDriver(code=100))  # type: ignore[arg-type]
    assert check.state == MISSING
    assert "code 100" in check.meaning
