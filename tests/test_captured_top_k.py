"""Captured steps in top-k mode: what is chosen, what came since, and the share left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hsswap import TopK
from hsswap.captured import CapturedSteps
from hsswap.captured_top_k import CapturedTopK
from tests.branches import Branch, alone
from tests.captured_engine import check_row, config_of, decoding
from tests.swap_cases import SMALL, U16, Case, check_chosen, random_case
from tests.swap_watch import watched

CASE = random_case(SMALL, 900, seed=41)
TOP_K = TopK(4, cache_factor=2)


def attended(steps: CapturedSteps, layer: int) -> list[list[int]]:
    """The blocks that the last step attended in each KV head."""
    captured = steps._layers[layer]
    assert isinstance(captured, CapturedTopK)
    slots, positions = (captured._tensor(name).array()[0] for name in ("attended", "positions"))
    return [row[held >= -1].tolist() for row, held in zip(positions, slots + 0, strict=True)]


@pytest.mark.parametrize("eager_first", [False, True])
async def test_captured_top_k(eager_first: bool) -> None:
    """Chosen blocks of each head, all that came since, and the mass it left out."""
    start, tokens = 805, 40
    dims = replace(SMALL, block_size=16)
    case = Case(dims, CASE.keys, CASE.values, CASE.queries)
    config = config_of(case, 900, resident=3 * TOP_K.cache_blocks(16) + 3)
    async with watched(replace(config, max_sequences=1)) as swap:
        branch = Branch(swap.sequence(top_k=TOP_K), case)
        await branch.append([*range(start)])
        if eager_first:
            result = await branch.sequence.attend(0, case.queries[0][start - 1 : start])
            await result.done()
        async with decoding(swap, branch.sequence, case, tokens) as (steps, step):
            for row in range(start, start + tokens):
                for layer, out in enumerate(step(row)):
                    check_step(case, steps, layer, row, out, start // 16)
                if eager_first:
                    steps.settle(row + 1)
            steps.finish(start + tokens)
        branch.rows = [*range(start + tokens)]
        await branch.check(30)  # exact, of what was handed over
        row = start + tokens
        await branch.append([row])
        result = await branch.sequence.attend(1, case.queries[1][row : row + 1])
        await result.done()
        assert result.chosen is not None
        assert result.chosen.max() == row // 16 - 1  # codes of the new blocks are there


def check_step(
    case: Case, steps: CapturedSteps, layer: int, row: int, out: U16, ranked: int
) -> None:
    """The answer over exactly the blocks that were attended."""
    left_out = steps.left_out_mass(layer)
    assert left_out is not None
    assert ((left_out.array() >= 0) & (left_out.array() < 1)).all()
    for head, blocks in enumerate(attended(steps, layer)):
        chosen = [b for b in blocks if b < ranked]
        assert len(set(chosen)) == TOP_K.pinned_blocks(16) + TOP_K.k
        assert {0, *range(ranked - 8, ranked)} <= set(chosen)
        seen = [b for b in blocks if b * 16 <= row]
        assert set(range(ranked, row // 16 + 1)) <= set(seen)
        check_chosen(case, layer, head, row, seen, out)


async def test_captured_top_k_with_a_bound() -> None:
    """Fewer blocks where the bound allows it; what is attended is right, and the cache stays so."""
    start, tokens, bound = 805, 20, 0.6
    top_k = TopK(12, left_out_bound=bound)
    case = Case(replace(SMALL, block_size=16), CASE.keys, CASE.values, CASE.queries)
    config = config_of(case, 900, resident=3 * top_k.cache_blocks(16) + 3)
    given_up = 0
    async with watched(replace(config, max_sequences=1)) as swap:
        sequence = swap.sequence(top_k=top_k)
        await Branch(sequence, case).append([*range(start)])
        async with decoding(swap, sequence, case, tokens) as (steps, step):
            for row in range(start, start + tokens):
                for layer, out in enumerate(step(row)):
                    given_up += check_bounded(case, steps, layer, row, out, bound)
    assert given_up > 50


def check_bounded(
    case: Case, steps: CapturedSteps, layer: int, row: int, out: U16, bound: float
) -> int:
    """The answer over what was attended; returns how many chosen blocks were given up."""
    left_out = steps.left_out_mass(layer)
    assert left_out is not None
    lists = attended(steps, layer)
    given_up = 0
    for head, blocks in enumerate(lists):
        kept = [b for b in blocks if b >= 0]
        if len(kept) < len(blocks):
            assert left_out.array()[head] <= bound
            given_up += len(blocks) - len(kept)
        check_chosen(case, layer, head, row, kept, out)
    return given_up


async def test_top_k_with_too_few_blocks_is_exact() -> None:
    config = config_of(CASE, 640, resident=3 * TOP_K.cache_blocks(16))
    async with watched(replace(config, max_sequences=1)) as swap:
        sequence = swap.sequence(top_k=TOP_K)
        branch = Branch(sequence, CASE)
        await branch.append([*range(60)])
        wanted = await alone(CASE, [*range(62)])
        async with decoding(swap, sequence, CASE, 2) as (steps, step):
            assert steps.left_out_mass(0) is None
            for row in (60, 61):
                check_row(step(row), wanted, row)
