"""What the predictor ``codes`` ranks through the swap: only tokens, and the best key first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, Sequence
from hsswap.bf16 import from_float32, to_float32
from hsswap.driver.base import Stream
from hsswap.driver.operations import SelectWork
from hsswap.driver.tensor import Tensor
from hsswap.halves import narrow
from hsswap.io.memory import MemoryIO
from tests.swap_cases import Case, random_case
from tests.test_codes_predictor import (
    DIMS,
    LAYERS,
    TOKENS,
    TOP_K,
    config,
    missing,
    predictor_of,
    prefill,
    step,
)

PROMPT = 1205  # 5 tokens in the block being filled


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(DIMS, TOKENS, seed=43)


async def decode(sequence: Sequence, case: Case, rows: range) -> list[tuple[np.ndarray, ...]]:
    """Steps of layer 0: what was chosen, the share left out, and the output."""
    found: list[tuple[np.ndarray, ...]] = []
    for row in rows:
        part = slice(row, row + 1)
        await sequence.append(0, case.keys[0][part], case.values[0][part])
        result = await sequence.attend(0, case.queries[0][part])
        await result.done()
        assert result.chosen is not None
        found.append((result.chosen, result.left_out_mass, np.asarray(result.out)))
    return found


async def test_what_is_no_token_is_not_scored(case: Case) -> None:
    """Slots full of NaN before anything is in them, or of the keys that a query likes best."""
    runs = []
    best = from_float32(50 * to_float32(case.queries[0][PROMPT, 0]))
    for dirt in (np.zeros(1, np.uint16), np.full(1, 0xFFFF, np.uint16), best):
        async with HighSpeedSwap.open(config(), io=MemoryIO()) as swap:
            for memory in (swap.pool[0].units.memory, swap.pool[0].blocks.memory):
                words = memory.array().view(np.uint16)
                words[...] = np.resize(dirt, words.shape[1])
            async with swap.sequence(top_k=TOP_K) as sequence:
                for first in range(0, 1200, 240):  # whole blocks: nothing was in the active slot
                    for layer in range(LAYERS):
                        rows = slice(first, first + 240)
                        await sequence.append(
                            layer, case.keys[layer][rows], case.values[layer][rows]
                        )
                        result = await sequence.attend(layer, case.queries[layer][rows], exact=True)
                        await result.done()
                runs.append(await decode(sequence, case, range(1200, 1212)))
    for clean, *dirty in zip(*runs, strict=True):
        for found in dirty:
            assert all((a == b).all() for a, b in zip(clean, found, strict=True))


async def test_the_share_left_out_knows_no_corrections(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is near the true one on average, and not what the corrected scores would say."""
    errors, differences = [], []
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, PROMPT)
        works: list[SelectWork] = []
        select = swap.device.select

        def recorded(stream: Stream, work: SelectWork) -> None:
            works.append(work)
            select(stream, work)

        monkeypatch.setattr(swap.device, "select", recorded)
        for row in range(PROMPT, PROMPT + 40):
            ((chosen, left_out, _),) = await decode(sequence, case, range(row, row + 1))
            true = shares_of_blocks(case, row)
            for head, own in enumerate(chosen):
                errors.append(left_out[head] - (1 - true[head, own].sum()))
                differences.append(left_out[head] - left_out_of(works[-1].scores, head, own))
                shares = left_out_of(works[-1].shares, head, own)
                assert left_out[head] == pytest.approx(shares, abs=1e-6)
    assert abs(np.mean(errors)) < 0.01
    assert np.abs(differences).max() > 0.01


def shares_of_blocks(case: Case, row: int) -> np.ndarray:
    """The true shares ``[heads, full blocks]`` among full blocks, in float64."""
    full = (row + 1) // 16
    shares = np.empty((2, full))
    for head in range(2):
        query = to_float32(case.queries[0][row, 2 * head : 2 * head + 2]).astype(np.float64)
        keys = to_float32(case.keys[0][: full * 16, head]).astype(np.float64)
        weight = np.exp(query @ keys.T / 32**0.5)
        shares[head] = (weight / weight.sum(1, keepdims=True)).mean(0).reshape(full, 16).sum(1)
    return shares


def left_out_of(scores: Tensor, head: int, chosen: np.ndarray) -> float:
    """Softmax of a head's scores over the blocks that were not chosen."""
    weight = np.exp(scores.array()[head].astype(np.float64))
    return float(1 - weight[chosen].sum() / weight.sum())


@pytest.mark.parametrize("zero", [30, 50])
async def test_a_block_of_zeros_never_outranks_one_of_the_best_key(case: Case, zero: int) -> None:
    """Block 40 repeats the key that each head's queries like best; that it wins is no accident."""
    query = to_float32(case.queries[0][PROMPT]).reshape(2, 2, 32)
    wide = to_float32(case.keys[0])
    wide[zero * 16 : zero * 16 + 16] = 0
    for head in range(2):
        liked = (wide[:PROMPT, head] @ query[head].T).max(1)
        wide[40 * 16 : 41 * 16, head] = wide[np.argmax(liked), head]
    changed = replace(case, keys=[from_float32(wide), case.keys[1]])
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, changed, PROMPT)
        ((chosen, _, _),) = await decode(sequence, changed, range(PROMPT, PROMPT + 1))
        assert predictor_of(swap).version == 1
    for head in chosen:
        assert 40 in head
        assert zero not in head


async def test_f16_keys_are_ranked_as_what_they_are(case: Case) -> None:
    """The same numbers in both formats: the same blocks, but for levels at a rounding boundary."""
    exact = [to_float32(rows) for rows in (case.keys[0], case.keys[1])]
    group = replace(DIMS.group(0), layers=LAYERS, dtype="f16", kv_dtype="f16")
    halves = Case(
        ModelDims((group,), DIMS.block_size),
        [narrow(rows, "f16") for rows in exact],
        [narrow(to_float32(rows), "f16") for rows in case.values],
        [narrow(to_float32(rows), "f16") for rows in case.queries],
    )
    chosen = []
    for given in (case, halves):
        settings = replace(config(), dims=given.dims)
        async with (
            HighSpeedSwap.open(settings, io=MemoryIO()) as swap,
            swap.sequence(top_k=TOP_K) as sequence,
        ):
            await prefill(sequence, given, PROMPT)
            chosen.append(await decode(sequence, given, range(PROMPT, PROMPT + 8)))
            assert predictor_of(swap).version == 1
    for (plain, *_), (half, *_) in zip(*chosen, strict=True):
        assert np.mean([np.isin(a, b).mean() for a, b in zip(plain, half, strict=True)]) > 0.98


@pytest.mark.parametrize("tokens", [1200, 64])
async def test_a_prefix_makes_a_basis_of_its_blocks(
    case: Case, tmp_path: Path, tokens: int
) -> None:
    """Where none was kept; of too few tokens there is none, and top-k attends all the same."""
    kept = replace(config(), directory=tmp_path / "store", persist=True, io="posix")
    async with (
        HighSpeedSwap.open(kept) as swap,
        swap.sequence() as sequence,
    ):  # exact: shows nothing
        await prefill(sequence, case, tokens)
        await sequence.commit(np.arange(tokens))
    async with HighSpeedSwap.open(kept) as swap:
        assert not predictor_of(swap).ready
        async with await swap.open_prefix(np.arange(tokens), top_k=TOP_K) as sequence:
            assert sequence.length == tokens
            assert predictor_of(swap).version == (tokens == 1200)
            assert missing(swap, sequence) == [0, 0]
            if tokens == 1200:
                for row in range(tokens, tokens + 3):
                    await step(sequence, case, row)
                assert missing(swap, sequence) == [0, 0]


async def test_in_a_layer_with_a_window_what_it_does_not_reach_is_not_left_out() -> None:
    """Blocks behind it are not chosen, and the share said to be left out is the true one."""
    window = 700
    group = replace(DIMS.group(0), layers=1, window=window)
    dims = ModelDims((group,), DIMS.block_size)
    case = random_case(dims, 1300, seed=45)
    settings = replace(config(host_slots=128), dims=dims)
    async with (
        HighSpeedSwap.open(settings, io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        for part in (slice(0, 1100), *(slice(row, row + 1) for row in range(1100, 1130))):
            await sequence.append(0, case.keys[0][part], case.values[0][part])
            result = await sequence.attend(0, case.queries[0][part])
            await result.done()
            if part.start == 0:
                continue
            assert result.chosen is not None
            row, full = part.start, (part.start + 1) // 16
            first = row + 1 - window
            assert (result.chosen >= first // 16).all()
            assert (result.chosen[:, -8:] == np.arange(full - 8, full)).all()
            for head in range(2):
                keys = to_float32(case.keys[0][: row + 1, head]).astype(np.float64)
                asked = to_float32(case.queries[0][row, 2 * head : 2 * head + 2])
                weight = np.exp(asked @ keys.T * group.logit_scale)
                weight[:, :first] = 0
                whole = weight[:, : 16 * full].reshape(2, full, 16).sum(-1)
                share = (whole / whole.sum(1, keepdims=True)).mean(0)
                left = share.sum() - share[result.chosen[head]].sum()
                assert result.left_out_mass[head] == pytest.approx(left, abs=0.06)
