"""Top-k with what stands in for the attention left out: from a prompt to the output of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap import HighSpeedSwap, Sequence, TopK
from hsswap import codec as codecs
from hsswap.bf16 import from_float32, to_float32
from hsswap.codec import HeadCodec
from hsswap.fitting import LESSON_SPAN, LESSON_STEP, fitted, sums_of
from hsswap.io.memory import MemoryIO
from hsswap.predictor.calibration import HeadSamples, stand_ins
from hsswap.predictor.stand_in import StandIn
from hsswap.topk import TopKLayer
from tests.driver import oracle
from tests.swap_cases import Case, random_case
from tests.test_codes_predictor import DIMS, LAYERS, TOKENS, config, predictor_of, prefill

WITH, WITHOUT = TopK(6, cache_factor=3), TopK(6, cache_factor=3, stand_in=False)
LEARNED = 1024
Step = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Outputs, blocks chosen and shares left out of one attend."""


@pytest.fixture(scope="module")
def case() -> Case:
    """The first tokens' values are not like the rest."""
    plain = random_case(DIMS, TOKENS, seed=43)
    values = [to_float32(one) for one in plain.values]
    for one in values:
        one[:16] -= 20
    return replace(plain, values=[from_float32(one) for one in values])


def learned_from(case: Case) -> list[list[StandIn]]:
    """By layer and KV head, from the first 1,024 tokens and every fourth query."""
    found = []
    for layer in range(LAYERS):
        group = DIMS.group(layer)
        keys, values, queries = (
            to_float32(part[layer][:LEARNED]).astype(np.float64)
            for part in (case.keys, case.values, case.queries)
        )
        at = np.arange(16, LEARNED, 4)
        heads = [
            HeadSamples(
                keys=keys[:, head],
                values=values[:, head],
                positions=np.arange(LEARNED),
                queries=queries[at].reshape(len(at), group.kv_heads, -1, group.head_dim)[:, head],
                query_positions=at,
                rope=None,
                logit_scale=group.logit_scale,
                group_size=group.group_size,
                value_dim=group.value_dim,
            )
            for head in range(group.kv_heads)
        ]
        found.append(stand_ins(heads))
    return found


async def steps(sequence: Sequence, case: Case, first: int) -> list[Step]:
    """Two tokens, all layers."""
    made = []
    for row in (first, first + 1):
        for layer in range(LAYERS):
            part = slice(row, row + 1)
            await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
            result = await sequence.attend(layer, case.queries[layer][part])
            await result.done()
            assert result.chosen is not None
            made.append((np.asarray(result.out).copy(), result.chosen, result.left_out_mass))
    return made


async def test_the_output_is_that_of_the_choice_and_what_stands_in(case: Case) -> None:
    """Learned from the first 1,024 tokens: no rows have attended everything but one by one."""
    runs, of_heads = [], []
    for top_k in (WITH, WITHOUT):
        async with (
            HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
            swap.sequence(top_k=top_k) as sequence,
        ):
            await prefill(sequence, case, 1200, chunk=LESSON_SPAN - 1)
            runs.append(await steps(sequence, case, 1200))
            of_heads = list(predictor_of(swap).codecs)
    learned = learned_from(case)
    for number, (got, plain) in enumerate(zip(*runs, strict=True)):
        layer = number % LAYERS
        own = [learned[layer][q // 2] for q in range(4)]
        scale = np.array([own[q].scale[q % 2] for q in range(4)])
        value = np.array([own[q].value[q % 2] for q in range(4)])
        check_made_up(case, of_heads, number, got, plain, scale, value)


async def test_a_prompts_last_rows_teach_what_stands_in(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that attended everything, by what would have been chosen for them."""
    lessons: list[tuple[int, int, np.ndarray]] = []
    real = TopKLayer.enqueue_lesson

    def watched(layer: TopKLayer, *given: Any) -> None:
        _, _, choice, lesson, _ = given
        lessons.append((layer.cache.layer, lesson.length, choice.chosen.array().copy()))
        real(layer, *given)

    monkeypatch.setattr(TopKLayer, "enqueue_lesson", watched)
    runs, of_heads = [], []
    for top_k in (WITH, WITHOUT):
        async with (
            HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
            swap.sequence(top_k=top_k) as sequence,
        ):
            await prefill(sequence, case, 1200)
            runs.append(await steps(sequence, case, 1200))
            of_heads = list(predictor_of(swap).codecs)
    lengths = list(range(1200 - LESSON_SPAN + 1, 1201, LESSON_STEP))
    assert [lesson[:2] for lesson in lessons] == [(y, n) for y in range(LAYERS) for n in lengths]
    fits = []
    for layer in range(LAYERS):
        own = [sums_of(*taught_by(case, *lesson)) for lesson in lessons if lesson[0] == layer]
        fits.append(fitted(sum(own, np.zeros(()))))
    for number, got in enumerate(runs[0]):
        plain = runs[1][number]
        if (got[1] != plain[1]).any():  # the choice may know a little more from the rows again
            plain = (near_of(case, number, got[1]), got[1], plain[2])
        check_made_up(case, of_heads, number, got, plain, *fits[number % LAYERS])


def near_of(case: Case, number: int, chosen: np.ndarray) -> np.ndarray:
    """Attention over chosen blocks, BF16 codes ``[1, Q, dv]``."""
    row, layer = 1200 + number // LAYERS, number % LAYERS
    near = [over(case, layer, row, q, [*chosen[q // 2], row // 16])[0] for q in range(4)]
    return from_float32(np.stack(near)[None].astype(np.float32))


def over(
    case: Case, layer: int, row: int, q: int, blocks: list[int]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Attention of a row's query head over blocks, over everything, and the share they lack."""
    keys, values, queries = (
        oracle.decode(part[layer]) for part in (case.keys, case.values, case.queries)
    )
    weight = np.exp(keys[: row + 1, q // 2] @ queries[row, q] * DIMS.group(layer).logit_scale)
    kept = [t for b in blocks for t in range(16 * b, 16 * b + 16) if t <= row]
    seen = values[: row + 1, q // 2]
    near = weight[kept] @ seen[kept] / weight[kept].sum()
    return near, weight @ seen / weight.sum(), 1 - weight[kept].sum() / weight.sum()


def taught_by(
    case: Case, layer: int, length: int, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Near, full and share of a row that sees ``length`` tokens; block 75 is being filled."""
    parts = [over(case, layer, length - 1, q, [*chosen[q // 2], 75]) for q in range(4)]
    near, full, share = (np.stack([part[i] for part in parts])[None] for i in range(3))
    return near, oracle.round_to_bf16(full), share


def check_made_up(
    case: Case,
    of_heads: list[HeadCodec],
    number: int,
    got: Step,
    plain: Step,
    scale: np.ndarray,
    value: np.ndarray,
) -> None:
    """The choice is the same, and the output has what stands in."""
    assert (got[1] == plain[1]).all()
    row, layer = 1200 + number // LAYERS, number % LAYERS
    out, near = oracle.decode(got[0])[0], oracle.decode(plain[0])[0]
    wanted = np.empty_like(near)
    for q in range(4):
        share = share_left_out(case, layer, row, q, of_heads[2 * layer + q // 2], got[1][q // 2])
        wanted[q] = near[q] + share * (scale[q] * near[q] + value[q])
    assert oracle.relative_error(wanted, near) > 0.05
    # Both are rounded to BF16, and what is learned in single precision.
    assert oracle.relative_error(out, wanted) < 2.0**-8


async def test_tokens_that_are_taken_back_teach_no_more(case: Case) -> None:
    """Steps behind a cut are those of a sequence whose prompt was fed in single rows there."""
    outs = []
    for cut in (True, False):
        async with (
            HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
            swap.sequence(top_k=WITH) as sequence,
        ):
            await prefill(sequence, case, 1199 if cut else 1195)
            if cut:
                await sequence.truncate(1195)
            for row in range(1195, 1200):
                for layer in range(LAYERS):
                    part = slice(row, row + 1)
                    await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
            outs.append([out for out, _, _ in await steps(sequence, case, 1200)])
            lessons_left = [cache.lessons for cache in sequence._layers]
            assert all(one is not None for one in lessons_left)
            assert [one.learned is None for one in lessons_left if one] == [cut] * LAYERS
    assert any((a != b).any() for a, b in zip(*outs, strict=True))


def share_left_out(
    case: Case, layer: int, row: int, q: int, codec: HeadCodec, chosen: np.ndarray
) -> float:
    """By codes for the blocks left out, exactly for the others and the block being filled."""
    query = to_float32(case.queries[layer][row, q])
    keys = to_float32(case.keys[layer][: row + 1, q // 2])
    full = (row + 1) // 16
    codes = codecs.encode(codec, keys[: 16 * full].reshape(full, 16, -1))
    coarse = np.exp(codecs.logits_of(codec, query[None], codes)[0].astype(np.float64)).sum(1)
    exact = np.exp(keys.astype(np.float64) @ query * DIMS.group(layer).logit_scale)
    rest = sum(coarse[b] for b in range(full) if b not in chosen)
    held = sum(exact[16 * b : 16 * b + 16].sum() for b in chosen) + exact[16 * full :].sum()
    return float(rest / (rest + held))


async def test_what_is_asked_twice_is_learned_from_once(case: Case) -> None:
    """As by a call that finds blocks missing and is made again."""
    outs = []
    for times in (1, 2):
        async with (
            HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
            swap.sequence(top_k=WITH) as sequence,
        ):
            for first in range(0, 1200, 200):
                part = slice(first, first + 200)
                for layer in range(LAYERS):
                    await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                    for _ in range(times):
                        asked = case.queries[layer][part]
                        await (await sequence.attend(layer, asked, exact=True)).done()
            outs.append([out for out, _, _ in await steps(sequence, case, 1200)])
    assert all((a == b).all() for a, b in zip(*outs, strict=True))


async def test_a_sink_and_exact_attention_are_left_alone(case: Case) -> None:
    sinks = np.zeros(4, np.float32)
    outs = []
    for top_k in (WITH, WITHOUT):
        async with (
            HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
            swap.sequence(top_k=top_k) as sequence,
        ):
            await prefill(sequence, case, 1200)
            query = case.queries[0][1199:1200]
            for result in (
                await sequence.attend(0, query, sinks=sinks),
                await sequence.attend(0, query, exact=True),
            ):
                await result.done()
                outs.append(np.asarray(result.out).copy())
    assert (outs[0] == outs[2]).all()
    assert (outs[1] == outs[3]).all()


async def test_the_next_process_makes_up_the_same(case: Case, tmp_path: Path) -> None:
    kept = replace(config(), directory=tmp_path / "store", persist=True, io="posix")
    tokens = np.arange(1200)
    runs = []
    for number in range(2):
        async with HighSpeedSwap.open(kept) as swap:
            if not number:
                async with swap.sequence(top_k=WITH) as sequence:
                    await prefill(sequence, case, 1200)
                    await sequence.commit(tokens)
            async with await swap.open_prefix(tokens, top_k=WITH) as sequence:
                runs.append(await steps(sequence, case, 1200))
            assert predictor_of(swap).version == 1
    for first, second in zip(*runs, strict=True):
        for a, b in zip(first, second, strict=True):
            assert (a == b).all()
