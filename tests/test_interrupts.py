"""Signals are kept while work must not be cut in two, and none is lost."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import pytest

from hsswap.commands.interrupts import Interrupted, Interrupts


def test_signals_are_kept_while_held() -> None:
    reached = []

    def work(interrupts: Interrupts) -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            interrupts.check()
            reached.append(2)

    with Interrupts() as interrupts:
        with pytest.raises(Interrupted):
            work(interrupts)
        signal.raise_signal(signal.SIGINT)  # everything is being closed already
    assert reached == [1]


def test_a_signal_elsewhere_is_raised_at_once() -> None:
    with Interrupts(), pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_whose_exception_was_lost_is_raised_again() -> None:
    reached = []

    def work(interrupts: Interrupts) -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            with suppress(Interrupted):  # as a callback of C code would
                signal.raise_signal(signal.SIGINT)
            reached.append(1)
            interrupts.check()
            reached.append(2)

    with Interrupts() as interrupts, pytest.raises(Interrupted) as caught:
        work(interrupts)
    assert caught.value.exit_code == 143  # the first that came
    assert reached == [1]


def test_a_second_signal_does_not_wait() -> None:
    reached = []

    def work(interrupts: Interrupts) -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    with Interrupts() as interrupts, pytest.raises(Interrupted):
        work(interrupts)
    assert reached == [1]


def test_a_kept_signal_is_raised_at_the_end() -> None:
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.held():
        signal.raise_signal(signal.SIGINT)


def test_a_signal_cancels_what_is_awaited() -> None:
    closed = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            closed.append(1)

    with Interrupts() as interrupts, pytest.raises(Interrupted) as caught:
        interrupts.run(work())
    assert caught.value.exit_code == 130
    assert closed == [1]


def test_what_is_awaited_gives_its_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    with Interrupts() as interrupts:
        assert interrupts.run(work()) == 7
