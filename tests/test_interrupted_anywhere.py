"""Ctrl-C between any two lines of a blocking call: it is raised, and everything works on.

A real signal, at every so many lines that the call runs in the main thread.
"""

from __future__ import annotations

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hsswap
from hsswap import BlockingSequence, BlockingSwap, TopK
from hsswap.driver import open_device
from hsswap.io.memory import MemoryIO
from hsswap.whole import Whole
from tests.ways import PLAIN, START, config_of

LINES = 151
"""Between two tries of a call; a prime, so that they fall on different lines of its loops."""
LIMIT_S = 30.0
QUERIES = PLAIN.queries


def append(sequence: BlockingSequence, start: int, stop: int) -> None:
    for layer in range(PLAIN.dims.layers):
        part = slice(start, stop)
        sequence.append(layer, PLAIN.keys[layer][part], PLAIN.values[layer][part])


def answer(sequence: BlockingSequence, exact: bool | None = True) -> list[np.ndarray]:
    """The last three rows of each layer."""
    found = []
    for layer in range(PLAIN.dims.layers):
        end = sequence.layer_length(layer)
        rows = 3 if exact else 1
        result = sequence.attend(layer, QUERIES[layer][end - rows : end], exact=exact)
        result.synchronize()
        found.append(np.asarray(result.out))
    return found


def steps(sequence: BlockingSequence) -> None:
    with sequence.captured(20, rows=5) as opened:
        for layer in range(PLAIN.dims.layers):
            part = slice(START, START + 5)
            opened.append(layer, PLAIN.keys[layer][part], PLAIN.values[layer][part])
        opened.advance(5)
        opened.stream.synchronize()
        opened.finish(START + 5)


Call = Callable[[BlockingSwap, BlockingSequence], object]
CALLS: dict[str, Call] = {
    "append": lambda _, s: append(s, START, START + 40),
    "attend": lambda _, s: answer(s),
    "attend, top-k": lambda _, s: answer(s, None),
    "truncate": lambda _, s: s.truncate(301),
    "truncate in the active block": lambda _, s: s.truncate(START - 3),
    "fork": lambda _, s: s.fork(),
    "sequence": lambda w, _: w.sequence(),
    "captured": lambda _, s: steps(s),
    "reserve": lambda _, s: s.reserve(40),
    "open_prefix": lambda w, _: w.open_prefix([1] * START),
    "close": lambda _, s: s.close(),
}


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Whether a signal came at the ``at``-th line that runs in hsswap; False: there are fewer."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        file = frame.f_code.co_filename
        if "/hsswap/" not in file:
            return None
        # At the end of a with block its line is traced once more, before __exit__, where the
        # interpreter does not look for signals.
        if event == "line" and not linecache.getline(file, frame.f_lineno).lstrip().startswith(
            ("with ", "async with ")
        ):
            lines += 1
            if lines == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return lines >= at


def check(swap: BlockingSwap, sequence: BlockingSequence, other: BlockingSequence) -> None:
    """Both go on, and nothing is held at the end."""
    before = answer(other)
    append(other, 100, 140)
    if not sequence.closed and sequence.length:
        end = sequence.length
        for layer in range(PLAIN.dims.layers):  # what was interrupted between two layers
            start = sequence.layer_length(layer)
            if start < end:
                part = slice(start, end)
                sequence.append(layer, PLAIN.keys[layer][part], PLAIN.values[layer][part])
        answer(sequence)
        sequence.truncate(96)
        other.truncate(96)
        for one, another in zip(answer(sequence), answer(other), strict=True):
            assert (one == another).all()
    assert len(before) == PLAIN.dims.layers
    swap.flush()
    for each in (sequence, other):
        each.close()
    inner = swap._swap
    for left in list(inner._sequences.values()):  # one that the caller has, or none
        swap.run(lambda _, left=left: left.close())  # type: ignore[misc]
    assert swap.statistics().host_slots_used == 0
    assert swap.statistics().free_blocks == inner.config.capacity_blocks


# Of a call that was interrupted before it began.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("top_k", [None, TopK(2)], ids=["exact", "top-k"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_interrupted_anywhere(name: str, top_k: TopK | None) -> None:
    at, came = 3, True
    while came:
        device = open_device("host")
        with hsswap.blocking(config_of(PLAIN), io=MemoryIO(), device=device) as swap:
            sequence, other = swap.sequence(top_k=top_k), swap.sequence()
            append(sequence, 0, START)
            append(other, 0, 100)
            swap.flush()
            answer(sequence, None if top_k else True)
            came = interrupted(lambda: CALLS[name](swap, sequence), at)  # noqa: B023
            ended: list[BaseException | None] = []

            def work() -> None:
                try:
                    check(swap, sequence, other)  # noqa: B023
                except BaseException as error:
                    ended.append(error)  # noqa: B023
                else:
                    ended.append(None)  # noqa: B023

            thread = threading.Thread(target=work, name="hsswap-check", daemon=True)
            thread.start()
            thread.join(LIMIT_S)
            assert ended, f"at line {at} of {name}: it hangs afterwards"
            if ended[0] is not None:
                raise AssertionError(f"at line {at} of {name}") from ended[0]
        assert device.live_count == 0
        at += LINES


def test_the_second_interrupt_comes_at_once() -> None:
    reached = []

    def twice() -> None:
        with Whole():
            for number in range(2):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_and_an_interrupt_together() -> None:
    def both() -> None:
        with Whole():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as caught:
        both()
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_none_of_pythons_stay(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with Whole():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_handlers_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with Whole():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
