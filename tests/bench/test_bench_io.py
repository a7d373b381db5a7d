"""``hsswap bench io``: its arithmetic, its refusals, and one small run of the whole."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import pytest

from hsswap.bench import io
from hsswap.bench.figures import Interval, machine, percentile
from hsswap.bench.io_arms import BenchError, compile_reader, dims_of
from hsswap.commands.interrupts import Interrupts
from hsswap.errors import ArgumentError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    io.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_interval_is_that_of_the_books() -> None:
    # B(20, 1/2): the 6th and the 15th of 20 hold the median with 95.9 %.
    values = [float(value) for value in range(1, 21)]
    random.Random(1).shuffle(values)
    assert Interval.of(values) == (10.5, 6.0, 15.0)
    assert Interval.of([3.0]) == (3.0, 3.0, 3.0)
    assert Interval.of([1.0, 2.0]) == (1.5, 1.0, 2.0)


def test_percentiles() -> None:
    values = [float(value) for value in range(100)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([], 0.5) == 0.0


@pytest.mark.parametrize("kib", [4, 12, 64, 256, 1024])
def test_blocks_of_any_size(kib: int) -> None:
    dims = dims_of(kib * 1024)
    assert dims.block_bytes(dims.groups[0]) == kib * 1024


def test_every_place_in_the_files_holds_a_block() -> None:
    assert [io.whole_segments(count) for count in (1, 256, 257, 4096)] == [256, 256, 512, 4096]


def test_sizes_that_no_block_has() -> None:
    with pytest.raises(BenchError, match="5000 bytes"):
        dims_of(5000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backends", "posix,floppy"), "floppy is unknown; known: auto, posix"),
        (("--backends", "memory"), "need one with files"),
        (("--operations", "erase"), "erase is unknown; known: read, write"),
        (("--slices", "19"), "a ratio needs 20"),
        (("--dir", "/nowhere"), "/nowhere is no directory"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        io.main(parse(*arguments), Interrupts())


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BenchError, match="install gcc"):
        compile_reader(tmp_path)


def test_the_machine_is_named() -> None:
    found = machine()
    assert all(str(found[name]) for name in ("host", "processor", "kernel", "python", "date"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
def test_what_there_was_no_time_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    asked = ("--quick", "--json", "--limit", "0", "--dir", str(tmp_path), "--out", str(out))
    assert io.main(parse(*asked), Interrupts()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert not report["complete"]
    assert report["left_out"][0] == "blocks of 64 KiB"
    assert report["results"] == report["appended_in_turns"] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    asked = ("--quick", "--json", "--dir", str(tmp_path), "--data-mib", "8", "--out", str(out))
    assert io.main(parse(*asked), Interrupts()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert report["verified"]
    assert report["complete"]
    assert report["left_out"] == []
    rows = {(row["arm"], row["operation"]): row for row in report["results"]}
    for name in ("posix", "uring"):
        row = rows[name, "read"]
        low, high = row["of_reader"][1:]
        assert 0 < low <= row["of_reader"][0] <= high
        assert row["loop_lag_ms"]["timers"] > 0
    assert {"c-threads", "c-uring"} <= {arm for arm, _ in rows}
    assert list(tmp_path.iterdir()) == [out]
