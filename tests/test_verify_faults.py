"""Faults injected into the device, each of which --verify must find."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.__main__ import main
from hsswap.driver.base import Stream
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import AttendWork, GatherWork
from tests.running import TinyRun


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun.make(tmp_path_factory.mktemp("tiny"))


def slots_of(work: AttendWork) -> NDArray[np.int32]:
    """A copy of a table that the host holds."""
    assert isinstance(work.slots, np.ndarray)
    return work.slots.copy()


def lengths_of(work: AttendWork) -> NDArray[np.int64]:
    """Lengths that the host holds."""
    assert isinstance(work.lengths, np.ndarray)
    return work.lengths


class Drop(HostDevice):
    """Attention without the block at logical position 5."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = slots_of(work)
        if work.first_block == 0:
            slots[:, :, 5:6] = -1
        super().attend(stream, replace(work, slots=slots))


class DropLate(HostDevice):
    """The same, in one attend late in the run."""

    calls = 0

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = slots_of(work)
        if work.first_block == 0:
            self.calls += 1
            if self.calls == 40:
                slots[:, :, 5:6] = -1
        super().attend(stream, replace(work, slots=slots))


class ExchangeHeads(HostDevice):
    """Two units of one block exchanged: each KV head attends to the other's."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = slots_of(work)
        if work.first_block == 0:
            slots[:, :, 5] = slots[:, ::-1, 5]
        super().attend(stream, replace(work, slots=slots))


class ExchangeLast(HostDevice):
    """The last block and the first exchanged, so that the fill of the last cuts the other."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = slots_of(work)
        slots[:, :, [0, -1]] = slots[:, :, [-1, 0]]
        super().attend(stream, replace(work, slots=slots))


class Shift(HostDevice):
    """One token fewer is seen than there is."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        super().attend(stream, replace(work, lengths=lengths_of(work) - 1))


class ShiftBeyond(HostDevice):
    """One token more is seen than was written."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        super().attend(stream, replace(work, lengths=lengths_of(work) + 1))


class Stale(HostDevice):
    """A gather that leaves one unit as it was: what an earlier tile or layer had there."""

    def reads_in_place(self, rows: int) -> bool:
        return False

    def gather(self, stream: Stream, work: GatherWork) -> None:
        work = work.by_unit()
        assert work.heads is not None
        kept = slice(1, None) if len(work.heads) > 1 else slice(None)
        super().gather(
            stream,
            replace(
                work,
                host_slots=work.host_slots[kept],
                heads=work.heads[kept],
                device_slots=work.device_slots[kept],
            ),
        )


class OtherBlock(HostDevice):
    """One block served in place of its neighbour, wherever the two are."""

    def attend(self, stream: Stream, work: AttendWork) -> None:
        slots = slots_of(work)
        if work.first_block == 0:
            slots[:, :, 5] = slots[:, :, 6]
        super().attend(stream, replace(work, slots=slots))


FAULTS = [Drop, DropLate, ExchangeHeads, ExchangeLast, Shift, ShiftBeyond, Stale, OtherBlock]


@pytest.fixture(scope="module")
def sound(tiny: TinyRun) -> list[int]:
    """Tokens of a run without a fault, which passes."""
    report, failures = tiny.run("--tokens", "12", "--verify", "--io", "memory", device=HostDevice())
    assert failures == []
    return report.run.tokens


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds(fault: Callable[[], HostDevice], tiny: TinyRun, sound: list[int]) -> None:
    report, failures = tiny.run("--tokens", "12", "--verify", "--io", "memory", device=fault())
    assert report.verified is not None
    assert report.verified.failures > 0
    assert "at most" in str(failures[0])
    if fault is DropLate:
        # What the tokens alone do not show.
        assert report.verified.failures == 1
        assert report.run.tokens == sound


def test_a_result_beyond_the_promise_is_exit_1(
    tiny: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsswap.swap.open_device", lambda name: Drop())
    assert main(tiny.arguments("--tokens", "3", "--verify", "--json", "--io", "memory")) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["max_rel_err"] > 0.01
    last = printed.err.splitlines()[-1]
    assert last.startswith("hsswap: layer ")
    assert "more calls failed" in last
    assert "(1.5 times a usual kernel's): BROKEN" in printed.err
