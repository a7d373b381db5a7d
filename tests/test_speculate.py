"""``hsswap generate --speculate``: the tokens of plain decoding, bit for bit, while blocks swap."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsswap.__main__ import main
from hsswap.bench.rounds import SMALL, small_model
from hsswap.bf16 import U16
from hsswap.commands.decoding import Step
from hsswap.errors import ArgumentError
from hsswap.models import read_config
from tests.running import TINY, TinyRun, note_of_smollm2, real_model

COUNT = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(tiny: TinyRun) -> list[int]:
    """The tokens of plain decoding."""
    report, _ = tiny.run("--tokens", str(COUNT), "--io", "memory")
    return report.run.tokens


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
@pytest.mark.parametrize(("k", "rounds"), [(1, 1), (3, 4), (8, 2)])
def test_tokens_are_those_of_plain_decoding(
    tiny: TinyRun, plain: list[int], drafter: str, k: int, rounds: int
) -> None:
    asked = ["--speculate", drafter, "--draft", str(k), "--rounds", str(rounds)]
    report, _ = tiny.run("--tokens", str(COUNT), "--io", "memory", *asked)
    assert report.run.tokens == plain
    assert len(report.run.steps) == len(plain) - 1
    assert report.run.speculated is not None
    fared = report.run.speculated.acceptance
    assert fared.tokens == len(plain) - 1
    assert fared.drafted > 0
    assert report.statistics.bytes_read > 0
    assert "only on disk" in report.run.speculated.why or rounds == 1


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_everything_in_memory(tiny: TinyRun, plain: list[int], drafter: str) -> None:
    """Whole bursts, and nothing to say about them."""
    slots = ["--slots", "600", "--host-slots", "600", "--speculate", drafter]
    report, _ = tiny.run("--tokens", str(COUNT), "--io", "memory", *slots)
    assert report.run.tokens == plain
    assert report.run.speculated is not None
    assert report.run.speculated.why == ""


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_every_pass_verifies(tiny: TinyRun, drafter: str) -> None:
    """Drafts' and rejected rows too, against K and V that were cut as the swap's were."""
    report, failures = tiny.run(
        "--tokens", "30", "--io", "memory", "--verify", "--speculate", drafter
    )
    assert failures == []
    assert report.verified is not None
    assert report.verified.failures == 0
    assert report.tokens_agree == len(report.run.tokens)


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_up_to_the_end_of_the_context(tiny: TinyRun, tmp_path: Path, drafter: str) -> None:
    """No row passes it: the last rounds draft less."""
    prompt = tmp_path / "long.txt"
    prompt.write_text("ab" * (TINY.context_tokens - 40))
    near = TinyRun(tiny.model, prompt)
    count = TINY.context_tokens - len(near.job("--tokens", "1").prompt)
    assert 10 < count < 50
    slots = ["--slots", "900", "--host-slots", "200", "--io", "memory"]
    tokens = ["--tokens", str(count)]
    plain, _ = near.run(*tokens, *slots)
    ours, _ = near.run(*tokens, *slots, "--speculate", drafter, "--draft", "8")
    assert ours.run.tokens == plain.run.tokens
    assert ours.run.context_tokens == TINY.context_tokens


def test_a_continuation_is_stored_and_found_again(
    tiny: TinyRun, plain: list[int], tmp_path: Path
) -> None:
    """What bursts left behind the last token is cut before the sequence is kept."""
    kept = ["--tokens", "30", "--persist", "--dir", str(tmp_path / "store")]
    for _ in range(2):
        report, _ = tiny.run(*kept, "--speculate", "early-exit")
        assert report.run.tokens == plain[:30]
    assert report.run.prefix_tokens > 0


def test_report(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--tokens", "20", "--io", "memory", "--json", "--speculate", "ngram"]
    assert main(tiny.arguments(*asked)) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["speculate"] == "ngram"
    assert 0 <= found["acceptance"] <= 1
    assert 1 <= found["tokens_per_round"] <= 5
    assert "speculation" in printed.err


def test_what_it_cannot_be_used_with(tiny: TinyRun) -> None:
    with pytest.raises(ArgumentError, match="--mode exact"):
        tiny.job("--speculate", "ngram", "--mode", "topk")
    scarce = ["--slots", "131", "--host-slots", "128"]
    for draft in (15, 16):
        asked = ["--device", "cuda:0", "--draft", str(draft), *scarce]
        if draft < 16:
            tiny.job("--speculate", "ngram", *asked)
            continue
        with pytest.raises(ArgumentError, match="--draft is 16"):
            tiny.job("--speculate", "ngram", *asked)


def test_steps_of_a_burst_add_up() -> None:
    step = Step(0.9, 10, 7, 1)
    parts = step.shared_by(3)
    assert sum(p.resident for p in parts) == 10
    assert sum(p.ahead for p in parts) == 7
    assert sum(p.waited for p in parts) == 1
    assert sum(p.seconds for p in parts) == pytest.approx(0.9)
    assert step.shared_by(0) == []


@pytest.fixture(scope="module", params=[3, 60, 668])
def smol(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyRun, list[str], list[int]]:
    """The real model with a prompt of 18, 544 or 8,111 tokens: under a span, over tiles, and with
    room for 81 more; what is asked for, and the tokens of plain decoding.

    The prompt's K and V are kept for the runs that speculate: 8,111 tokens take a processor 105 s.
    """
    folder = tmp_path_factory.mktemp("smol")
    prompt = folder / "prompt.txt"
    prompt.write_text(" ".join(f"the {n * n} of {n}" for n in range(request.param)))
    run = TinyRun(real_model(), prompt)
    given = ["--slots", "1200", "--persist", "--dir", str(folder / "store")]
    job = run.job("--tokens", "1", *given)
    room = read_config(job.file).context_tokens - len(job.prompt)
    asked = ["--tokens", str(min(512, room)), *given]
    return run, asked, run.run(*asked)[0].run.tokens


@pytest.mark.soak
@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_smollm2_for_512_tokens(smol: tuple[TinyRun, list[str], list[int]], drafter: str) -> None:
    """The real model, swap on: tokens equal, up to the end of the context."""
    run, asked, plain = smol
    ours, _ = run.run(*asked, "--speculate", drafter)
    assert ours.run.tokens == plain
    assert ours.run.prefix_tokens >= 16
    note_of_smollm2("cpu", drafter, ours.run)


class Echo:
    """Attention that gives each row its own queries back: no row sees another."""

    def attend(self, layer: int, queries: U16, keys: U16, values: U16) -> U16:
        """See the protocol."""
        return queries


def test_rows_apart_have_the_bits_of_single_rows() -> None:
    """Whatever BLAS makes of one row and of five."""
    config = replace(SMALL, width=576, ffn_width=700, vocab_size=300, head_dim=32, rope_dims=32)
    model = small_model(config)
    tokens = [5, 0, 299, 17, 5]
    together = model.forward(tokens, 3, Echo(), all_logits=True, rows_apart=True)
    for row, token in enumerate(tokens):
        alone = model.forward([token], 3 + row, Echo())
        assert together[row].tobytes() == alone.tobytes()
    early = model.forward(tokens[:1], 3, Echo(), layers=1)
    assert early.shape == (300,)
    assert not np.array_equal(early, together[0])
