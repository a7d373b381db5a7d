"""``hsswap bench rounds``: one small run of the whole, and its refusals."""

from __future__ import annotations

import argparse
import json
from itertools import count
from pathlib import Path

import pytest

from hsswap.bench import rounds
from hsswap.bench.rounds_arms import READ_BACK, WAYS, ReadBack, Told, arm_of, prompts_of
from hsswap.bench.rounds_host import HostEngine
from hsswap.commands.interrupts import Interrupts
from hsswap.errors import ArgumentError, VerifyError

ARGUMENTS = ("--quick", "--json", "--tokens", "12", "--prompt", "30", "--draft", "3")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    rounds.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_small_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arm and batch has its row, with rates and ratios; the file is what is printed."""
    out = tmp_path / "rounds.json"
    monkeypatch.setattr(rounds, "machine", count().__next__)  # one second is not the next
    assert (
        rounds.main(
            parse(*ARGUMENTS, "--batch", "1,2", "--texts", "code", "--out", str(out)), Interrupts()
        )
        == 0
    )
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert json.loads(out.read_text()) == found
    names = [way.name for way in WAYS]
    assert [(row["batch"], row["arm"]) for row in found["rows"]] == [
        (batch, name) for batch in (1, 2) for name in names
    ]
    for row in found["rows"]:
        rate = row["tokens_per_s"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
        assert row["host_us_per_token"] >= 0
        assert row["against_read_back"]["median"] > 0
        assert 0 <= row["acceptance"] <= 1
        assert 1 <= row["tokens_per_round"] <= 4
        assert row["passed"]
        if row["arm"] == "plain":
            assert row["tokens_per_round"] == 1
            assert row["against_plain"]["median"] == 1
    assert len(printed.err.splitlines()) == len(found["rows"])


async def test_wrong_tokens_are_no_figure() -> None:
    """An arm that makes other tokens than plain decoding ends the bench."""
    prompts = prompts_of(range(9), 1, 20)
    with HostEngine(rounds.small_model(), prompts, 8, 2) as engine:
        expected = await engine.plain()
        expected[0][-1] += 1
        with (
            ReadBack(engine.setting(READ_BACK), READ_BACK.options) as loop,
            pytest.raises(VerifyError, match="read-back"),
        ):
            await arm_of(engine, READ_BACK, loop.run, expected, Told())()


@pytest.mark.parametrize(
    "more",
    [
        ("--ways", "stream,backwards"),
        ("--texts", "code,verse"),
    ],
)
def test_refusals(more: tuple[str, str]) -> None:
    with pytest.raises(ArgumentError, match=more[0]):
        rounds.main(parse(*ARGUMENTS, *more), Interrupts())


def test_prompts_differ_and_have_one_length() -> None:
    made = prompts_of(range(10), 3, 12)
    assert [len(prompt) for prompt in made] == [12] * 3
    assert len({tuple(prompt) for prompt in made}) == 3
