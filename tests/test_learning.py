"""What a prompt teaches when some of it is no number: the rest of it, and never an error."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

from hsswap.driver.host import HostDevice
from hsswap.errors import DeviceError
from hsswap.io.memory import MemoryIO
from hsswap.swap import HighSpeedSwap
from tests.swap_cases import Case, random_case
from tests.swap_watch import turns, watched
from tests.test_codes_predictor import DIMS, TOKENS, TOP_K, config, predictor_of, prefill

NAN, INFINITE, LARGEST, ZERO = 0x7FC0, 0xFF80, 0x7F7F, 0
PROMPT = 1200
WHERE: dict[str, Any] = {
    "a row": np.s_[700],
    "a head": np.s_[:, 0],
}


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(DIMS, TOKENS, seed=43)


def with_odd(case: Case, name: str, where: str, code: int) -> Case:
    """The case with a part of the keys, values or queries of layer 0 set to a code."""
    arrays = [array.copy() for array in getattr(case, name)]
    arrays[0][WHERE[where]] = code
    changed = {"keys": case.keys, "values": case.values, "queries": case.queries, name: arrays}
    return Case(case.dims, **changed)


@pytest.mark.parametrize("code", [NAN, INFINITE, LARGEST, ZERO], ids=hex)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["keys", "values", "queries"])
async def test_what_is_no_number_spoils_nothing_learned(
    case: Case, name: str, where: str, code: int
) -> None:
    odd = with_odd(case, name, where, code)
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, odd, PROMPT)
        part = slice(PROMPT, PROMPT + 1)
        for layer in range(DIMS.layers):
            await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
            result = await sequence.attend(layer, case.queries[layer][part])
            await result.done()
            assert ((result.left_out_mass >= 0) & (result.left_out_mass <= 1)).all()
        predictor = predictor_of(swap)
        assert predictor.ready
        for codec in predictor.codecs:
            for array in (codec.encode, codec.bias, codec.query, codec.centre):
                assert np.isfinite(array).all()
        for own in predictor._layers:
            assert own.stand_in is not None
            assert all(np.isfinite(tensor.array()).all() for tensor in own.stand_in)


async def test_a_basis_that_finds_no_room_is_made_of_the_next_prompt(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the first: it fails by itself, and the loop has nothing to complain of."""
    refused: list[int] = []
    asked = threading.Event()

    def prepare(self: Any, learned: Any) -> Any:
        refused.append(len(learned.codecs))
        asked.set()
        raise DeviceError("no memory is left")

    async with watched(config(sequences=2), device=HostDevice()) as swap:
        predictor = predictor_of(swap)
        with monkeypatch.context() as patch:
            patch.setattr(type(predictor), "prepare", prepare)
            async with swap.sequence(top_k=TOP_K) as first:
                await prefill(first, case, PROMPT)
                await asyncio.to_thread(asked.wait, 20)
                await turns(5)
        gc.collect()  # a task's error that nobody has looked at is told when the task goes
        second = swap.sequence(top_k=TOP_K)
        await prefill(second, case, PROMPT)
        result = await second.attend(0, case.queries[0][PROMPT - 1 : PROMPT])
        await result.done()
        assert refused == [4]
        assert predictor.ready
