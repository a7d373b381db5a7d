"""bench/sanitize.py as far as no GPU is needed: what it would run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import sanitize

HERE = Path(__file__).parents[1] / "driver"
pytest_plugins = ["pytester"]


def test_every_family_names_tests_that_are_there() -> None:
    for family, arguments in sanitize.FAMILIES.items():
        files = [name for name in arguments if name.endswith(".py")]
        assert files, family
        assert all((HERE / name).is_file() for name in files), family


def test_without_the_tool_it_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sanitize.py"])
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        sanitize.main()
    assert "it comes with the CUDA toolkit" in capsys.readouterr().err


def tool(folder: Path, body: str) -> str:
    """A stand-in for compute-sanitizer: ``$log`` is the file it was asked to write."""
    path = folder / "compute-sanitizer"
    take = 'while [ "$1" != --log-file ]; do shift; done; log=$2\n'
    path.write_text(f"#!/bin/sh\n{take}{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('echo "===== ERROR SUMMARY: 0 errors" > $log', 0),
        (
            'echo "== RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)" > $log; exit 99',
            0,
        ),
        ('echo "== RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)" > $log', 99),
        ('echo "===== ERROR SUMMARY: 0 errors" > $log; echo "1 failed, 2 passed"; exit 1', 1),
        ('echo "===== ERROR SUMMARY: 2 errors" > $log', sanitize.REPORTED),
        (f'echo "Invalid write" > $log; exit {sanitize.REPORTED}', sanitize.REPORTED),
        ("true", sanitize.REPORTED),  # nothing written: it did not look
        ("exit 1", 1),
        ("exec tail -f /dev/null", -1),
    ],
)
def test_what_a_process_says_is_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: int
) -> None:
    monkeypatch.setattr(sanitize, "sanitizer", lambda: tool(tmp_path, body))
    until_s = 0.0 if status == -1 else 1e9  # long ago, or never
    outcome = sanitize.run("memcheck", "moves", 1, tmp_path, until_s)
    assert (outcome.status, outcome.kernels) == (status, [])
    if status == 0:
        assert outcome.tail == ""


def test_a_few_sets_of_parameters_spread_over_all(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sanitize.EACH, "3")
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nmarkers = ["gpu: here"]\n')
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.parametrize("at", range(10))
        def test_many(at): pass

        @pytest.mark.gpu
        def test_alone(): pass

        def test_elsewhere(): pass
        """
    )
    pytester.makeconftest("from bench.sanitize import pytest_collection_modifyitems")
    result = pytester.runpytest_inprocess("-v", "-p", "no:asyncio")
    result.assert_outcomes(passed=4, deselected=8)
    result.stdout.fnmatch_lines(["*many?0?*", "*many?4?*", "*many?9?*", "*alone*"])
