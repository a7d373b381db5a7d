"""The checks in conftest.py can fail, and both event loops are used."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py")
INI = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
markers =
    gpu
    slow
    soak
"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the real conftest.py, to run small tests in."""
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST.read_text())
    return pytester


def test_a_clean_async_test_runs_on_both_loops(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import asyncio
        async def test_it():
            await asyncio.get_running_loop().run_in_executor(None, int)
            print("ran on", type(asyncio.get_running_loop()).__module__)
        """
    )
    result = inner.runpytest_inprocess("-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*ran on asyncio.unix_events*", "*ran on uvloop*"])


LEAKS = {
    "file": ("kept.append(os.open('f', os.O_CREAT | os.O_RDWR))", "*left open: */f"),
    "folder": ("kept.append(os.open('.', os.O_RDONLY))", "*descriptor left open: /*"),
    "pipe": ("kept.extend(os.pipe())", "*descriptor left open: pipe:*"),
    "thread": ("kept.append(run_thread())", "*thread still runs: hsswap-worker*"),
}


@pytest.mark.parametrize("kind", LEAKS)
@pytest.mark.parametrize("color", ["def", "async def"])
def test_a_leak_is_an_error(inner: pytest.Pytester, kind: str, color: str) -> None:
    statement, message = LEAKS[kind]
    inner.makepyfile(
        f"""
        import os, threading, pytest, conftest
        conftest.THREAD_EXIT_LIMIT_S = 0.01
        kept = []
        stop = threading.Event()

        def run_thread():
            thread = threading.Thread(target=stop.wait, name="hsswap-worker")
            thread.start()
            return thread

        @pytest.fixture(scope="module", autouse=True)
        def give_back():
            yield
            stop.set()
            for one in kept:
                os.close(one) if isinstance(one, int) else one.join()

        {color} test_it():
            {statement}
        """
    )
    result = inner.runpytest_inprocess()
    runs = 1 if color == "def" else 2
    result.assert_outcomes(passed=runs, errors=runs)
    result.stdout.fnmatch_lines([message])


def test_closing_what_another_owns_is_an_error(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os, pytest
        @pytest.fixture(scope="module")
        def owned():
            return os.open(".", os.O_RDONLY)
        def test_it(owned):
            os.close(owned)
        """
    )
    result = inner.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*of someone else closed: /*"])


def test_a_thread_that_is_ending_is_waited_for(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import threading
        def test_it():
            stop = threading.Event()
            threading.Thread(target=stop.wait, args=(0.02,), name="hsswap-worker").start()
        """
    )
    inner.runpytest_inprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [([], 1), (["-m", "soak"], 1), (["-m", "slow or soak"], 2), (["-m", "not gpu"], 1)],
)
def test_slow_and_soak_run_only_when_named(
    inner: pytest.Pytester, arguments: list[str], ran: int
) -> None:
    inner.makepyfile(
        """
        import pytest
        @pytest.mark.slow
        def test_slow(): pass
        @pytest.mark.soak
        def test_soak(): pass
        def test_quick(): pass
        """
    )
    inner.runpytest_inprocess(*arguments).assert_outcomes(passed=ran, deselected=3 - ran)


def test_gpu_tests_say_what_is_missing(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import conftest, pytest
        conftest.missing_for_gpu = lambda: "libcuda.so.1 is away"
        @pytest.mark.gpu
        def test_kernel(): raise AssertionError("must not run")
        """
    )
    result = inner.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*libcuda.so.1 is away*"])
