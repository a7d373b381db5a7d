"""Long runs in short form, and at full length under ``make soak``, which notes what they did."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.io.killed import Killing
from tests.io.store_model import Player
from tests.soaking import note


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
def test_a_million_random_operations() -> None:
    player = asyncio.run(play(7, 1_000_000, 0.002))
    assert sum(player.done.values()) == 1_000_000
    note("store", random_operations=dict(player.done), random_operations_ok=True)


def kill_rounds(place: Path, rounds: int) -> Killing:
    killing = Killing(place)
    for _ in range(rounds):
        killing.round()
    return killing


def test_killed_three_times(tmp_path: Path) -> None:
    killing = kill_rounds(tmp_path / "store", 3)
    assert killing.acknowledged
    assert killing.blocks_checked


@pytest.mark.soak
def test_killed_two_hundred_times(tmp_path: Path) -> None:
    killing = kill_rounds(tmp_path / "store", 200)
    note(
        "store",
        kill_rounds=killing.rounds,
        kill_blocks_checked=killing.blocks_checked,
        kill_ok=True,
    )
