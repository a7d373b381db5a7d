"""What a bench is asked for is checked before it begins, whatever the machine has."""

from __future__ import annotations

import pytest

from hsswap.__main__ import BENCHES, main


@pytest.mark.parametrize("name", [bench.name for bench in BENCHES])
@pytest.mark.parametrize(
    ("place", "words"),
    [("/nonexistent/x.json", "/nonexistent is no directory"), ("/", "/ is a directory")],
)
def test_results_need_a_place(
    name: str, place: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, "--out", place]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attention", "--only", "A1,A9"], "--only has A9; known: A1, A2, A3, A4, F8, S1"),
        (["overlap", "--only", "decode,all"], "--only has all; known: prefill, decode"),
        (["overlap", "--only", ""], "known: prefill, decode"),
        (["decode", "--arms", "all"], "--arms has all; known: host-decided, copies, offloaded"),
        (["predictor", "--keep", "/dev/null/below"], "/dev/null is no directory"),
    ],
)
def test_names_that_nothing_has(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err
