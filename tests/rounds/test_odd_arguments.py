"""Every argument of rounds, given what is no such thing: an error in few words, nothing kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest

from hsswap.driver.host import HostDevice
from hsswap.errors import HsswapError
from hsswap.rounds import Choice, NgramDrafter, RoundOptions, RoundStream, SequenceStart, StreamBufs
from tests.rounds.models import TableTarget, greedy
from tests.rounds.opened import VOCAB, opened
from tests.test_odd_arguments import ODD, id_of

PROMPT, COUNT = [3, 1, 4], 20
VALUES = [*ODD, 10**400, 10**5000]
START: dict[str, Any] = {"tokens": PROMPT, "pending": 2, "capacity": 23, "last_pred": 1}
RECORDS: dict[Callable[..., Any], dict[str, Any]] = {
    SequenceStart: {**START, "choice": Choice()},
    RoundOptions: {field.name: field.default for field in fields(RoundOptions)},
    Choice: {field.name: field.default for field in fields(Choice)},
}
SIZES = {"k": 3, "history_tokens": 30, "batch": 1, "stops": 2}


def name_of(value: object) -> str:
    """The same in every process: no addresses."""
    if type(value) is object:
        return "object"
    return "huge" if isinstance(value, int) and abs(value) > 1 << 80 else id_of(value)


def refused(call: Callable[..., Any], good: dict[str, Any], name: str, value: Any) -> Any:
    """What the call gave with one odd argument, or None for an error in few words."""
    try:
        return call(**{**good, name: value})
    except HsswapError as error:
        said = str(error)
    assert len(said) < 300
    return None


@pytest.mark.parametrize("value", VALUES, ids=name_of)
def test_records(value: object) -> None:
    for record, good in RECORDS.items():
        for name in good:
            refused(record, good, name, value)


@pytest.mark.parametrize("value", VALUES, ids=name_of)
def test_sizes_and_parts(value: object) -> None:
    with HostDevice() as device:
        for name in (*SIZES, "m_rounds"):
            made = refused(StreamBufs, {"device": device, "m_rounds": 2, **SIZES}, name, value)
            if made is not None:
                made.close()
        for name in ("shortest", "longest"):
            refused(NgramDrafter, {"device": device}, name, value)
        assert device.live_count == 0


@pytest.mark.parametrize("value", VALUES, ids=name_of)
async def test_a_stream(value: object) -> None:
    with HostDevice() as device, TableTarget(device, 3, [PROMPT], vocab=VOCAB, room=29) as target:
        live = device.live_count
        drafter = NgramDrafter(device)
        parts = {"device": device, "target": target, "drafter": drafter, "rounds": 2}
        for name in (*SIZES, *parts, "options", "stream"):
            made = refused(RoundStream, {**parts, **SIZES}, name, value)
            if made is not None:
                await made.close()
            assert device.live_count == live


@pytest.mark.parametrize("value", VALUES, ids=name_of)
async def test_a_start_that_is_refused_changes_nothing(value: Any) -> None:
    async with opened([PROMPT], "often", k=3, rounds=2, room=30) as (stream, _):
        start = SequenceStart(**START)
        for sequences in (value, [value]):
            with pytest.raises(HsswapError):
                await stream.start(sequences)
        with suppress(HsswapError):  # nothing at all is no stop token
            await stream.start([start], value)
        await stream.start([start])
        assert [token async for token in stream.tokens()] == greedy([*PROMPT, 2], COUNT, VOCAB)
