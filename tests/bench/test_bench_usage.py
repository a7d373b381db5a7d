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
        (["attention", "--only", "A1,A9"], "--only has 'A9'; known: A1, A2, A3, A4, F8, S1"),
        (["attention", "--device", "host"], "compares kernels of a GPU; give cuda:N"),
        (["overlap", "--only", "decode,all"], "--only has 'all'; known: prefill, decode"),
        (["overlap", "--only", ""], "known: prefill, decode"),
        (["decode", "--arms", "all"], "--arms has 'all'; known: host-decided, copies, offloaded"),
        (["overlap", "--dir", "/dev/null"], "/dev/null is no directory"),
        (["overlap", "--dir", ""], "--dir: the name is empty"),
        (["io", "--dir", ""], "--dir: the name is empty"),
        (["io", "--device", ""], "known: host, cuda:N"),
        (["io", "--blocks", "64,,8"], "'' is not a whole number of 1 or more"),
        (["io", "--depths", "9" * 5000], "is not a whole number of 1 or more"),
        (["io", "--memory-mib", "-1"], "'-1' is not a whole number of 0 or more"),
        (["io", "--data-mib", "0"], "'0' is not a whole number of 1 or more"),
        (["decode", "--tokens", "7"], "--tokens has '7'; known: 32768, 131072"),
        (["decode", "--layers", "9999999"], "9999999 is too many; 1024 at most"),
        (["rounds", "--batch", "two"], "--batch: 'two' is not a whole number of 1 or more"),
        (["rounds", "--draft", "0"], "--draft: '0' is not a whole number of 1 or more"),
        (["rounds", "--prompt", "-4"], "--prompt: '-4' is not a whole number of 1 or more"),
        (["rounds", "--batch", "1,9999999"], "1024 sequences at most"),
        (["rounds", "--quick", "--model", "x"], "leave --model out"),
        (["rounds", "--quick", "--prompt", "9999999"], "the model's context is 1024"),
        (["predictor", "--jobs", "0"], "'0' is not a whole number of 1 or more"),
        (["predictor", "--keep", "/dev/null/below"], "/dev/null is no directory"),
    ],
)
def test_names_that_nothing_has(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err
