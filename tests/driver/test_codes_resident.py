"""Blocks whose exact logits scores of codes count, of which there may be many, on each device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.codes_operations import UNKNOWN_SCORE, Resident
from hsswap.driver.operations import UnitCache
from hsswap.halves import widen
from tests.driver.rig import Rig, random_codes
from tests.driver.test_codes import F64, Case, log_share, lse_of, put_keys

RESIDENT = [
    (LayerGroup(1, 5, 1, 256, soft_cap=5.0), 16, [3]),
    (LayerGroup(1, 12, 2, 40, dtype="f16", aux_bytes=6), 8, [1, 2]),
    (LayerGroup(1, 4, 2, 128, kv_dtype="e4m3"), 64, [4, 1]),
    (LayerGroup(1, 2, 2, 136), 32, [20, 2]),
]


@pytest.mark.parametrize(("group", "size", "planes"), RESIDENT)
def test_many_residents_and_a_large_cache(
    rig: Rig, group: LayerGroup, size: int, planes: list[int]
) -> None:
    blocks, held, places = 70, 30, 1100
    case = Case(rig, group, size, blocks, planes)
    case.encode()
    heads, dim, q_group = group.kv_heads, group.head_dim, group.group_size
    units = rig.units(group, size, heads * (held + 1), fill=0xFF)
    content = units.memory.array()
    slots = case.rng.permutation(len(content)).reshape(heads, held + 1).astype(np.int32)
    rows = random_codes(case.rng, (heads, held + 1, size, dim), dtype=group.dtype)
    keys = np.empty(rows.shape)
    owner = np.full((heads, places), -1, np.int32)
    place = np.zeros((heads, places), np.int32)
    for head in range(heads):
        keys[head] = put_keys(group, content, slots[head], rows[head])
        at = case.rng.permutation(places)[:held]
        owner[head, at] = case.rng.permutation(blocks)[:held]
        place[head, at] = slots[head, :held]
    unused = rig.tensor(np.zeros((heads, places), np.float32))
    cache = UnitCache(rig.tensor(place), rig.tensor(owner), unused, unused)
    pinned = case.rng.permutation(blocks)[:45].astype(np.int32)
    resident = Resident(units, cache, pinned, slots[:, held].copy(), size - 1)
    work = replace(case.work(), resident=resident)
    scores = case.score(work)
    queries = work.queries.array()
    mass = case.log_mass(queries)
    q = widen(queries, group.dtype).astype(F64).reshape(heads, q_group, dim)
    logits = np.einsum("hgd,hptd->hgpt", q, keys) * group.logit_scale
    if group.soft_cap:
        logits = np.tanh(logits / group.soft_cap) * group.soft_cap
    logits[:, :, held, size - 1 :] = -np.inf
    exact = lse_of(logits).reshape(heads * q_group, held + 1)
    for head in range(heads):
        part = slice(head * q_group, (head + 1) * q_group)
        of_slot = {int(slot): i for i, slot in enumerate(slots[head])}
        for found in np.flatnonzero(np.isin(owner[head], pinned)).tolist():
            mass[part, owner[head, found]] = exact[part, of_slot[int(place[head, found])]]
    wanted = log_share(mass, exact[:, held:], q_group)
    assert np.abs(scores - wanted).max() < 1e-4
    assert np.abs(work.uncorrected.array() - wanted).max() < 1e-4


def test_keys_that_give_nan_count_as_nothing(rig: Rig) -> None:
    case = Case(rig, LayerGroup(1, 4, 2, 32), 16, 20, [3, 2])
    case.encode()  # all units of the pool are NaN
    unused = rig.tensor(np.zeros((2, 1), np.float32))
    owner, place = rig.tensor(np.full((2, 1), 5, np.int32)), rig.tensor(np.zeros((2, 1), np.int32))
    cache = UnitCache(place, owner, unused, unused)
    pinned = np.array([5], np.int32)
    resident = Resident(case.units, cache, pinned, np.ones(2, np.int32), 3)
    work = replace(case.work(), resident=resident)
    scores = case.score(work)
    mass = np.delete(case.log_mass(work.queries.array()), 5, axis=1)
    wanted = log_share(mass, np.full((4, 1), -np.inf), 2)
    assert np.abs(np.delete(scores, 5, axis=1) - wanted).max() < 1e-4
    assert (scores[:, 5] == UNKNOWN_SCORE - 14).all()
