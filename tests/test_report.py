"""What a run tells: the closing table, the picture, the progress."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from hsswap.__main__ import main
from hsswap.commands.decoding import Step
from hsswap.commands.plot import PlotError, draw
from hsswap.commands.progress import Progress
from hsswap.commands.report import Report
from hsswap.config import PredictorConfig
from tests.running import Terminal, TinyRun


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun.make(tmp_path_factory.mktemp("tiny"))


def table_of(report: Report) -> dict[str, str]:
    """The closing table by its names, which stand before two spaces at least."""
    rows = [line.split("  ", 1) for line in report.as_table().splitlines()]
    return {name: value.strip() for name, value in rows}


def test_the_table_of_top_k_has_the_codes(tiny: TinyRun) -> None:
    slots = ("--slots", "68", "--host-slots", "32")
    report, _ = tiny.run("--mode", "topk", "--tokens", "20", "--io", "memory", *slots)
    table = table_of(report)
    config = report.plan.config
    assert config.predictor == PredictorConfig()
    assert config.capacity_blocks <= 256  # a page; 16 bits a token for each of 6 heads
    nbytes = 256 * 16 * 2 * 6
    share = f"{nbytes / report.kv_bytes:.1%}"
    assert table["codes"] == (
        f"{nbytes / 1024:.1f} KiB in device memory, beside the slots: {share} of the cache"
    )
    assert "in exact mode, for comparison (" in table["least to read"]
    first, *others = (step.seconds for step in report.run.steps)
    assert table["decode"].endswith(
        f"; the first took {first:.1f} s, in which top-k learns, then "
        f"{len(others) / sum(others):.1f} tokens/s"
    )
    assert report.as_json()["mode"] == "topk"
    assert report.as_json()["k"] == report.plan.top_k.k  # type: ignore[union-attr]
    # The codes are no slots.
    assert report.as_json()["slot_bytes"] == 68 * 2 * 16 * 32 * 2 + 32 * 4096


def test_the_table_of_exact_mode(tiny: TinyRun) -> None:
    report, _ = tiny.run("--tokens", "20", "--io", "memory")
    table = table_of(report)
    assert "codes" not in table
    assert table["decode"].endswith(" tokens/s")
    assert report.plan.config.predictor is None
    assert table["least to read"].endswith(" times that was read)")
    assert " in exact mode (" in table["least to read"]
    assert table["slots"].endswith("% of the cache")
    blocks = sum(step.resident + step.ahead + step.waited for step in report.run.steps)
    assert f"of {blocks} blocks" in table["decode hits"]


def test_a_short_run_says_what_there_is_to_say(tmp_path: Path) -> None:
    short = TinyRun.make(tmp_path, characters=20)
    report, _ = short.run("--tokens", "1", "--io", "memory")
    table = table_of(report)
    assert table["slots"].endswith(": the whole cache fits")
    assert table["decode"] == "-"
    assert table["decode hits"] == "-"
    assert table["least to read"] == "nothing in exact mode"
    assert table["read wait"] == "nothing was read"
    assert report.as_json()["read_overlap"] is None


def test_a_picture_that_fails_loses_no_result(
    tiny: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise PlotError("the drive is full")

    monkeypatch.setattr("hsswap.commands.generate.draw", fail)
    picture = tmp_path / "x.png"
    more = ("--tokens", "3", "--io", "memory", "--json", "--plot", str(picture))
    assert main(tiny.arguments(*more)) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tokens"] == 3
    assert printed.err.endswith("\nhsswap: the drive is full\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let matplotlib open its fonts, which it keeps open."""
    draw(tmp_path_factory.mktemp("fonts") / "first.png", [Step(0.1, 1, 1, 1)], "first")


def test_the_picture(
    fonts: None, tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "run.png"
    more = ("--tokens", "5", "--plot", str(picture), "--dir", str(tmp_path / "store"))
    assert main(tiny.arguments(*more)) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(tmp_path.iterdir()) == [picture]
    assert f"picture: {picture}" in capsys.readouterr().err


def test_the_picture_of_one_token(fonts: None, tmp_path: Path) -> None:
    draw(tmp_path / "none.png", [], "no steps")
    draw(tmp_path / "one.png", [Step(0.1, 3, 2, 1)], "one")
    with pytest.raises(PlotError, match="name another file"):
        draw(tmp_path / "missing" / "x.png", [], "nowhere")
    assert len(list(tmp_path.iterdir())) == 2


def test_progress_on_a_terminal_and_elsewhere() -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    progress.update(50, 100)
    progress.update(100, 100)
    assert terminal.getvalue().count("\r") == 2
    assert terminal.getvalue().endswith("] 100/100 tokens\n")
    progress = Progress(terminal)
    progress.update(1, 100)
    progress.close()
    assert terminal.getvalue().endswith("1/100 tokens\n")
    file = StringIO()
    progress = Progress(file)
    for done in range(1, 101):
        progress.update(done, 100)
    lines = file.getvalue().splitlines()
    assert lines[0] == "prefill 1/100 tokens"
    assert lines[-1] == "prefill 100/100 tokens"
    assert len(lines) <= 11
