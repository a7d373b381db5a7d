"""Long runs in short form, and at full length under ``make soak``, which notes what they did.

The long ones are in parts, each with seeds of its own, so that several processes can share them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.io.killed import Killing
from tests.io.store_model import Player
from tests.soaking import note

PLAYS, PLAYED = 20, 50_000
KILLINGS, KILLED = 10, 20


async def play(seed: int, count: int, reopenings: float) -> Player:
    player = Player(seed)
    await player.open()
    try:
        await player.play(count, reopenings=reopenings)
    finally:
        await player.store.close()
    return player


@pytest.mark.parametrize("seed", range(2))
def test_random_operations(seed: int) -> None:
    player = asyncio.run(play(seed, 1500, 0.02))
    assert set(player.done) >= {"write", "read", "fork", "commit", "find", "reopen", "crash"}


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PLAYS))
def test_a_million_random_operations(part: int) -> None:
    player = asyncio.run(play(100 + part, PLAYED, 0.002))
    assert sum(player.done.values()) == PLAYED
    note("store", **{f"random_operations_{part:02}": dict(player.done)})


def kill_rounds(place: Path, rounds: int, after: int = 0) -> Killing:
    """So many rounds at one store, each with its number for a seed."""
    killing = Killing(place, rounds=after)
    for _ in range(rounds):
        killing.round()
    return killing


def test_killed_three_times(tmp_path: Path) -> None:
    killing = kill_rounds(tmp_path / "store", 3)
    assert killing.acknowledged
    assert killing.blocks_checked


@pytest.mark.soak
@pytest.mark.parametrize("part", range(KILLINGS))
def test_killed_two_hundred_times(part: int, tmp_path: Path) -> None:
    killing = kill_rounds(tmp_path / "store", KILLED, after=part * KILLED)
    did = {"rounds": KILLED, "blocks_checked": killing.blocks_checked}
    note("store", **{f"kills_{part:02}": did})
