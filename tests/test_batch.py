"""Many sequences in one call: the same bits as each alone, one launch where nothing is read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

import hsswap
from hsswap import (
    ArgumentError,
    BlockIOError,
    ClosedError,
    HighSpeedSwap,
    Sequence,
    SwapConfig,
    TopK,
)
from hsswap.bf16 import to_float32
from hsswap.driver.base import Stream
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import AttendWork
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.branches import alone
from tests.swap_actors import roomy
from tests.swap_cases import MIXED, SMALL, U16, Case, config_for, feed, random_case
from tests.swap_watch import Linked, fill, turns, watched, within

SIZES = (530, 64, 700, 64, 1, 333)
COUNTS = [1, 3, 3, 64, 1, 40]
TOP_K = TopK(2)
CASES = {"small": SMALL, "mixed": MIXED}


class Counting(HostDevice):
    """Counts launches of attention."""

    launches = 0

    def attend(self, stream: Stream, work: AttendWork) -> None:
        self.launches += 1
        super().attend(stream, work)


def cases_of(dims_name: str) -> list[Case]:
    return [random_case(CASES[dims_name], tokens, 70 + at) for at, tokens in enumerate(SIZES)]


def config_of(cases: list[Case], *, extra_device: int = 0, extra_host: int = 0) -> SwapConfig:
    return config_for(
        cases[0],
        sequences=len(cases) + 2,
        capacity=2 * sum(SIZES) + 600,
        extra_device=extra_device,
        extra_host=extra_host,
    )


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[U16]]]:
    """Each sequence alone, everything resident."""

    async def one(case: Case) -> list[U16]:
        async with HighSpeedSwap.open(roomy(case), io=MemoryIO()) as swap:
            return await feed(swap.sequence(), case, [case.tokens])

    async def make() -> dict[str, list[list[U16]]]:
        return {name: [await one(case) for case in cases_of(name)] for name in CASES}

    return asyncio.run(make())


def asked(cases: list[Case], layer: int, counts: list[int]) -> U16:
    """The last rows of every sequence, packed."""
    parts = [case.queries[layer][-count:] for case, count in zip(cases, counts, strict=True)]
    return np.concatenate(parts)


def room(case: Case, layer: int, rows: int) -> U16:
    group = case.dims.group(layer)
    return np.full((rows, group.q_heads, group.value_dim), 0x7FC0, np.uint16)


async def filled(swap: HighSpeedSwap, cases: list[Case]) -> list[Sequence]:
    sequences = [swap.sequence() for _ in cases]
    for sequence, case in zip(sequences, cases, strict=True):
        await fill(sequence, case)
    return sequences


@pytest.mark.parametrize("dims", list(CASES))
@pytest.mark.parametrize(("device", "extra"), [(None, 0), (None, 900), (Linked, 0), (Linked, 900)])
async def test_a_batch_is_bit_for_bit_each_alone(
    answers: dict[str, list[list[U16]]], dims: str, device: type[HostDevice] | None, extra: int
) -> None:
    cases = cases_of(dims)
    config = config_of(cases, extra_device=extra, extra_host=extra // 2)
    async with watched(config, device=None if device is None else device()) as swap:
        sequences = await filled(swap, cases)
        for counts in (COUNTS, [1] * 6):
            for layer in range(cases[0].dims.layers):
                out = room(cases[0], layer, sum(counts))
                rows = counts if counts is COUNTS else None
                queries = asked(cases, layer, counts)
                results = await swap.attend_batch(layer, sequences, queries, out, rows=rows)
                start = 0
                for at, (result, count) in enumerate(zip(results, counts, strict=True)):
                    await result.done()
                    right = answers[dims][at][layer][-count:]
                    assert (np.asarray(result.out) == right).all(), (layer, at)
                    assert (out[start : start + count] == right).all()
                    start += count


async def test_one_launch_when_nothing_is_read(answers: dict[str, list[list[U16]]]) -> None:
    """From device slots and host slots mixed; forks lease the same host slots."""
    cases = cases_of("small")
    device = Counting()
    async with watched(config_of(cases, extra_host=900), device=device) as swap:
        sequences = await filled(swap, cases)
        sequences.append(sequences[2].fork())
        await swap.flush()
        queries = np.concatenate([asked(cases, 1, [1] * 6), cases[2].queries[1][-1:]])
        out = room(cases[0], 1, 7)
        device.launches = 0
        results = await swap.attend_batch(1, sequences, queries, out)
        assert device.launches == 1
        for result in results:
            await result.done()
        for at in range(7):
            assert (out[at] == answers["small"][at if at < 6 else 2][1][-1]).all()
        assert swap.statistics().misses == 0


async def test_logsumexp_of_the_logits() -> None:
    cases = cases_of("small")[:2]
    async with watched(config_of(cases, extra_host=300)) as swap:
        sequences = await filled(swap, cases)
        lse = np.full((4, 6), np.nan, np.float32)
        queries, out = asked(cases, 2, [2, 2]), room(cases[0], 2, 4)
        for result in await swap.attend_batch(2, sequences, queries, out, lse_out=lse):
            await result.done()
        alone = np.full((2, 6), np.nan, np.float32)
        result = await sequences[1].attend(2, queries[2:], lse_out=alone)
        await result.done()
        assert (alone == lse[2:]).all()
        group = cases[0].dims.group(2)
        for row, (at, back) in enumerate(((0, 1), (0, 0), (1, 1), (1, 0))):
            case = cases[at]
            end = case.tokens - back
            keys = to_float32(case.keys[2][:end]).astype(np.float64)
            query = to_float32(case.queries[2][end - 1]).astype(np.float64)
            for head in range(group.q_heads):
                logits = keys[:, head // group.group_size] @ query[head] * group.logit_scale
                top = logits.max()
                exact = top + np.log(np.exp(logits - top).sum())
                assert lse[row, head] == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("extra", [0, 600])
async def test_sinks_count_in_a_batch_as_alone(extra: int) -> None:
    cases = cases_of("small")[:3]
    sinks = np.linspace(-2.0, 9.0, 6).astype(np.float32)
    async with watched(config_of(cases, extra_host=extra)) as swap:
        sequences = await filled(swap, cases)
        out, plain = room(cases[0], 1, 3), room(cases[0], 1, 3)
        queries = asked(cases, 1, [1] * 3)
        results = await swap.attend_batch(1, sequences, queries, out, sinks=sinks)
        results += await swap.attend_batch(1, sequences, queries, plain)
        for result in results:
            await result.done()
        assert (out != plain).any()
        for at, sequence in enumerate(sequences):
            result = await sequence.attend(1, queries[at : at + 1], sinks=sinks)
            await result.done()
            assert (np.asarray(result.out)[0] == out[at]).all()
        with pytest.raises(ArgumentError, match="sinks"):
            await swap.attend_batch(1, sequences, queries, out, sinks=sinks[:5])


async def test_top_k_sequences_ride_along() -> None:
    cases = cases_of("small")[:3]
    caches = 2 * 3 * TOP_K.cache_blocks(16)
    config = config_of(cases, extra_device=caches)
    outs = []
    for together in (True, False):
        async with watched(config) as swap:
            sequences = [swap.sequence(top_k=None if n == 1 else TOP_K) for n in range(3)]
            for sequence, case in zip(sequences, cases, strict=True):
                await fill(sequence, case)
            out, lse = room(cases[0], 0, 3), np.zeros((3, 6), np.float32)
            queries = asked(cases, 0, [1] * 3)
            if together:
                results = await swap.attend_batch(0, sequences, queries, out, lse_out=lse)
            else:
                results = [
                    await s.attend(0, queries[n : n + 1], out[n : n + 1], lse_out=lse[n : n + 1])
                    for n, s in enumerate(sequences)
                ]
            for result in results:
                await result.done()
            assert results[0].chosen is not None
            assert results[1].chosen is None
            outs.append((out, lse))
    assert (outs[0][0] == outs[1][0]).all()
    assert (outs[0][1] == outs[1][1]).all()


async def test_bad_batches_are_refused_before_anything_is_enqueued() -> None:
    cases = cases_of("small")[:2]
    async with AsyncExitStack() as stack:
        swap = await stack.enter_async_context(watched(config_of(cases)))
        other = await stack.enter_async_context(HighSpeedSwap.open(config_of(cases), io=MemoryIO()))
        first, second = await filled(swap, cases)
        closed = swap.sequence()
        await closed.close()
        foreign = other.sequence()
        queries, out = asked(cases, 0, [2, 2]), room(cases[0], 0, 4)
        frozen = out.copy()
        frozen.flags.writeable = False
        wrong: list[tuple[dict[str, object], str]] = [
            ({"layer": 3}, "layer"),
            ({"sequences": []}, "sequences"),
            ({"sequences": [first, first]}, "running"),
            ({"sequences": [first, foreign]}, "another swap"),
            ({"sequences": [first, second, closed]}, "rows"),
            ({"rows": [2, 1]}, "rows"),
            ({"rows": [4, 0]}, "rows"),
            ({"rows": [2.0, 2.0]}, "rows"),
            ({"queries": queries[:, :5]}, "queries"),
            ({"queries": queries.astype(np.float32)}, "queries"),
            ({"out": frozen}, "read-only"),
            ({"out": out[:3]}, "out"),
            ({"lse_out": np.zeros((4, 6))}, "lse_out"),
            ({"lse_out": np.zeros((4, 5), np.float32)}, "lse_out"),
            ({"stream": "x"}, "stream"),
        ]
        usual = {"layer": 0, "sequences": [first, second], "queries": queries, "out": out}
        for change, match in wrong:
            with pytest.raises(ArgumentError, match=match):
                await swap.attend_batch(**{**usual, **change})  # type: ignore[arg-type]
        with pytest.raises(ClosedError):
            await swap.attend_batch(0, [first, closed], queries, out)
        short = swap.sequence()
        await short.append(0, cases[0].keys[0][:1], cases[0].values[0][:1])
        with pytest.raises(ArgumentError, match="has 1 tokens"):
            await swap.attend_batch(0, [first, short], queries, out)
        assert (out == 0x7FC0).all()
        for result in await swap.attend_batch(0, [first, second], queries, out):
            await result.done()


async def test_one_that_fails_leaves_the_others_right(
    answers: dict[str, list[list[U16]]],
) -> None:
    broken = Fault(FaultKind.ERRNO, only="read", at=0, count=60)
    cases = cases_of("small")[:3]
    async with watched(config_of(cases), broken) as swap:
        sequences = await filled(swap, cases)
        await swap.flush()
        out = room(cases[0], 0, 3)
        queries = asked(cases, 0, [1] * 3)
        failures = 0
        for _ in range(60):
            try:
                results = await swap.attend_batch(0, sequences, queries, out)
            except BlockIOError:
                failures += 1
            else:
                break
        assert failures
        for result in results:
            await result.done()
        for at in range(3):
            assert (out[at] == answers["small"][at][0][-1]).all()


async def test_a_cancelled_batch_gives_everything_back() -> None:
    cases = cases_of("small")[:3]
    async with watched(config_of(cases)) as swap:
        sequences = await filled(swap, cases)
        await swap.flush()
        for moment in range(8):
            out = room(cases[0], 0, 3)
            call = asyncio.ensure_future(
                swap.attend_batch(0, sequences, asked(cases, 0, [1] * 3), out)
            )
            await turns(moment)
            call.cancel()
            await asyncio.wait([call])
        assert not any(sequence.busy for sequence in sequences)


def test_blocking_callers_have_the_same_call(answers: dict[str, list[list[U16]]]) -> None:
    cases = cases_of("small")[:3]
    with hsswap.blocking(config_of(cases), io=MemoryIO()) as swap:
        sequences = [swap.sequence() for _ in cases]
        for sequence, case in zip(sequences, cases, strict=True):
            sequence.append(0, case.keys[0], case.values[0])
        out = room(cases[0], 0, 3)
        for result in swap.attend_batch(0, sequences, asked(cases, 0, [1] * 3), out):
            result.synchronize()
        assert all((out[at] == answers["small"][at][0][-1]).all() for at in range(3))


async def test_a_batch_s_table_is_kept_while_its_blocks_stay_where_they_are() -> None:
    cases = [random_case(SMALL, tokens, 90 + at) for at, tokens in enumerate((400, 330, 345))]
    wanted = [await alone(case, list(range(case.tokens))) for case in cases]
    config = config_for(cases[0], sequences=5, capacity=2400, extra_device=30, extra_host=500)
    async with watched(config) as swap:
        sequences = [swap.sequence() for _ in cases]
        lengths = [300, 290, 300]
        for sequence, case, length in zip(sequences, cases, lengths, strict=True):
            await sequence.append(1, case.keys[1][:length], case.values[1][:length])

        async def ask(places: list[int]) -> int:
            """The last rows, which must be right; where the launch's table lies."""
            rows = [cases[at].queries[1][lengths[at] - 1 : lengths[at]] for at in places]
            out = room(cases[0], 1, len(places))
            chosen = [sequences[at] for at in places]
            for result in await swap.attend_batch(1, chosen, np.concatenate(rows), out):
                await result.done()
            for row, at in zip(out, places, strict=True):
                assert (row == wanted[at][1][lengths[at] - 1]).all(), at
            kept = chosen[0]._layers[1].batch
            assert kept is not None
            assert kept._entries is not None
            return kept._entries.address

        async def append(at: int, rows: int) -> None:
            part = slice(lengths[at], lengths[at] + rows)
            await sequences[at].append(1, cases[at].keys[1][part], cases[at].values[1][part])
            lengths[at] += rows

        tables = [await ask([0, 1, 2])]
        for at in range(3):
            await append(at, 1)  # into blocks that the table has
        tables.append(await ask([0, 1, 2]))
        assert tables[0] == tables[1]
        await append(1, 20)  # two blocks more
        tables.append(await ask([0, 1, 2]))
        assert tables[1] != tables[2] == await ask([0, 1, 2])
        tables.append(await ask([0, 2]))
        assert tables[2] != tables[3]
        assert await ask([2, 1]) not in tables  # another one's
        await sequences[0].truncate(250)
        lengths[0] = 250
        await ask([0, 1, 2])
        await sequences[1].close()
        await ask([0, 2])
        await turns(5)
        assert len({place for place, _ in swap.pool_of(1).tables._free}) <= 4


async def test_a_batch_gives_back_host_slots_that_somebody_needs() -> None:
    cases = [random_case(SMALL, 600, 95 + at) for at in range(3)]
    wanted = [await alone(case, list(range(600))) for case in cases]
    async with watched(config_for(cases[0], sequences=4, capacity=2400, extra_host=240)) as swap:
        sequences = [swap.sequence() for _ in cases]
        for sequence, case in zip(sequences, cases, strict=True):
            await within(lambda s=sequence, c=case: fill(s, c))  # type: ignore[misc]
            await swap.flush()
            for _ in range(3):
                for count in (1, len(sequences)):
                    chosen = [s for s in sequences if s.length][-count:]
                    places = [sequences.index(s) for s in chosen]
                    out = room(cases[0], 2, len(chosen))
                    queries = np.concatenate([cases[at].queries[2][-1:] for at in places])
                    results = await within(
                        lambda c=chosen, q=queries, o=out: swap.attend_batch(2, c, q, o)  # type: ignore[misc]
                    )
                    for result, row, at in zip(results, out, places, strict=True):
                        await result.done()
                        assert (row == wanted[at][2][-1]).all()
