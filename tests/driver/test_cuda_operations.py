"""The GPU's operations against the host device's, at sizes the shared tests leave out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hsswap.bf16 import to_float32
from hsswap.config import LayerGroup
from hsswap.driver import open_device
from hsswap.driver.operations import EncodeWork, ProjectionCodes, ScoreWork, SelectWork, UnitCache
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError
from tests.driver.rig import Rig, random_codes

pytestmark = pytest.mark.gpu


@pytest.fixture
def rigs() -> Iterator[tuple[Rig, Rig]]:
    """The GPU's and the host's."""
    with (
        open_device("cuda:0") as cuda,
        open_device("host") as host,
        Rig(cuda) as first,
        Rig(host) as second,
    ):
        yield first, second


def select_on(
    rig: Rig, heads: int, blocks: int, places: int, k: int, pinned: int, steps: int
) -> list[Tensor]:
    """Several steps on one cache; all that the last one leaves."""
    rng = np.random.default_rng(blocks)
    tensor = rig.tensor
    cache = UnitCache(
        tensor(rng.permutation(heads * places).astype(np.int32).reshape(heads, places)),
        tensor(np.full((heads, places), 12345, np.int32)),  # step 0 takes it as empty
        tensor(np.full((heads, places), np.nan, np.float32)),
        tensor(np.full((heads, places), 7, np.int32)),
    )
    if rig.device.name == "host":
        cache.owner.array()[...] = -1
        cache.mass.array()[...] = 0
        cache.used.array()[...] = 0
    last: tuple[Tensor | None, Tensor | None] = (None, None)
    results: list[Tensor] = []
    count = min(blocks, k + pinned)
    for step in range(steps):
        scores = rng.standard_normal((heads, blocks)).astype(np.float32)
        scores[rng.random(scores.shape) < 0.3] = 1.5
        results = [
            tensor(np.zeros((heads, count), np.int32)),
            tensor(np.zeros((heads, count), np.int32)),
            tensor(np.zeros((heads, count), np.uint8)),
            tensor(np.zeros(heads, np.float32)),
        ]
        work = SelectWork(
            tensor(scores),
            tensor(scores[:, ::-1].copy()),
            k,
            rng.permutation(blocks)[:pinned].astype(np.int32),
            cache,
            step,
            0.5,
            *last,
            *results,
        )
        rig.device.select(rig.stream, work)
        rig.stream.synchronize()
        mass = rng.integers(0, 3, (heads, count)).astype(np.float32)
        last = (results[0], tensor(mass))
    return [*results, cache.owner, cache.mass, cache.used]


@pytest.mark.parametrize(
    ("blocks", "places", "k", "pinned"),
    [
        (40, 41, 40, 0),
        (2048, 256, 64, 9),
        (3000, 300, 100, 40),  # more pinned blocks than travel with the parameters
        (70_000, 1100, 500, 33),  # keys not in shared memory
        (1_000_000, 2048, 1500, 1),  # 1M tokens in blocks of one
    ],
)
def test_select_equals_the_host(
    rigs: tuple[Rig, Rig], blocks: int, places: int, k: int, pinned: int
) -> None:
    got, wanted = (
        [tensor.array() for tensor in select_on(rig, 3, blocks, places, k, pinned, 4)]
        for rig in rigs
    )
    for mine, theirs in zip(got[:3] + got[4:], wanted[:3] + wanted[4:], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_allclose(got[3], wanted[3], rtol=1e-5)


def test_a_cache_that_shared_memory_cannot_hold_is_refused(rigs: tuple[Rig, Rig]) -> None:
    with pytest.raises(ArgumentError, match="take fewer slots a head"):
        select_on(rigs[0], 1, 100, 20_000, 5, 0, 1)


@pytest.mark.parametrize("tokens", [1, 4, 32, 256])
@pytest.mark.parametrize(("group_size", "rank", "dim"), [(1, 1, 8), (6, 20, 72), (9, 128, 256)])
def test_score_and_encode_equal_the_host(
    rigs: tuple[Rig, Rig], tokens: int, group_size: int, rank: int, dim: int
) -> None:
    """Also by lists that change, whose copy on the device is kept."""
    group = LayerGroup(1, 2 * group_size, 2, dim)
    results = []
    for rig in rigs:
        rng = np.random.default_rng(tokens)
        blocks = rig.blocks(group, tokens, 5)
        raw = blocks.memory.array().view(np.uint16)
        raw[...] = random_codes(rng, raw.shape)
        into = ProjectionCodes(
            rig.tensor(np.zeros((9, 2, tokens, rank), np.uint16)),
            rig.tensor(random_codes(rng, (dim, rank), dim**-0.5)),
            group,
        )
        order = np.array([3, 1, 4, 0, 2], np.int32)
        rig.device.encode(rig.stream, EncodeWork(into, blocks, order, 2 * order % 9))
        queries = rig.tensor(random_codes(rng, (2 * group_size, dim)))
        listed = [np.array(ids, np.int32) for ids in ([6, 2], [6, 2], [2, 8, 0], [6], [4, 6] * 99)]
        scores = [rig.tensor(np.zeros((2, len(ids)), np.float32)) for ids in listed]
        for ids, out in zip(listed, scores, strict=True):
            rig.device.score(rig.stream, ScoreWork(into, queries, ids, out))
        rig.stream.synchronize()  # before the matrix is changed in place
        into.matrix.array()[...] = random_codes(rng, (dim, rank), dim**-0.5)
        scores.append(rig.tensor(np.zeros((2, 2), np.float32)))
        rig.device.score(rig.stream, ScoreWork(into, queries, listed[0], scores[-1]))
        rig.stream.synchronize()
        results.append((into.codes.array().copy(), [out.array().copy() for out in scores]))
    (codes, scored), (wanted_codes, wanted) = results
    # Sums in another order differ in their last place, and so may the rounded codes.
    np.testing.assert_allclose(to_float32(codes), to_float32(wanted_codes), rtol=2.0**-7, atol=1e-5)
    for mine, theirs in zip(scored, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-2)
