"""Every call of the device refused in turn, in every call of a sequence: nothing is lost.

What must hold afterwards, :mod:`tests.ways` says.
"""

from __future__ import annotations

import pytest

from hsswap import HsswapError
from tests.device_seam import Refusal, refusing
from tests.swap_cases import Case
from tests.swap_watch import within
from tests.ways import MIXED, PLAIN, WAYS, Way, ready

MOST_CALLS = 400


async def once(way: Way, case: Case, refusal: Refusal) -> None:
    """One call with one refusal, on a swap of its own."""
    async with ready(way, case) as bench:
        with refusing(refusal):
            try:
                ended = way.call(bench)
                if ended is not None:
                    await within(lambda: ended)
            except HsswapError:
                assert refusal.fired


@pytest.mark.parametrize(
    ("case", "more"), [(PLAIN, 0), (MIXED, 60)], ids=["one", "all behind it, E4M3"]
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_any_refusal_of_the_device(
    way: Way, case: Case, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsswap.sequence_state.QUIET_PAUSE_S", 0)
    monkeypatch.setattr("hsswap.named_blocks.QUIET_PAUSE_S", 0)
    for at in range(MOST_CALLS):
        refusal = Refusal(at, more)
        try:
            await once(way, case, refusal)
        except BaseException as error:
            raise AssertionError(f"call {at} refused: {error!r}") from error
        if not refusal.fired:
            assert at > 0 or way.name.startswith(("reserve", "close", "commit"))
            return
    raise AssertionError("it never ended")
