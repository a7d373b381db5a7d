"""``hsswap generate --speculate`` with the model in torch: the tokens of plain decoding, through a
swap on the host device, and on a GPU in captured rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from hsswap.commands.generate import load_model, run_job
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.output import OutputError
from hsswap.commands.report import Report
from hsswap.models import open_gguf
from tests.running import TINY, TinyRun, note_of_smollm2, real_model

torch = pytest.importorskip("torch")

from hsswap.models.torch_llama import STEP_ROWS, TorchLlama  # noqa: E402  (imports torch)

COUNT = 60
ENOUGH = ("--slots", "900", "--host-slots", "600")
SCARCE = ("--slots", "131", "--host-slots", "128")
"""Two tiles and a block a layer: what exact mode cannot do without, on any device."""


@dataclass(frozen=True)
class Asking:
    """Runs of one model on one device."""

    where: str
    model: TorchLlama
    run: TinyRun

    def report(self, *more: str) -> Report:
        """Of one run, which must verify if it is asked to."""
        device = "host" if self.where == "cpu" else self.where
        job = self.run.job(*more, "--io", "memory", "--device", device)
        with Interrupts() as interrupts:
            report, failures = run_job(job, self.model, interrupts, progress_to=StringIO())
        assert failures == []
        return report


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def asking(request: pytest.FixtureRequest, tmp_path: Path) -> Asking:
    """The tiny model, and a prompt of four spans of the host device."""
    where: str = request.param
    tiny = TinyRun.make(tmp_path, characters=1200)
    return asking_of(where, tiny)


def asking_of(where: str, run: TinyRun) -> Asking:
    """With the model loaded as the command does."""
    file = open_gguf(run.model)
    if where != "cpu":
        model = load_model(file, where)
        assert isinstance(model, TorchLlama)
        return Asking(where, model, run)
    return Asking(where, TorchLlama.from_gguf(file, "cpu", least_rows=STEP_ROWS), run)


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
@pytest.mark.parametrize(("k", "rounds"), [(1, 1), (4, 4), (15, 2)])
def test_tokens_are_those_of_plain_decoding(
    asking: Asking, drafter: str, k: int, rounds: int
) -> None:
    """Bit for bit: every pass has matrix products of as many rows."""
    tokens = ("--tokens", str(COUNT), *ENOUGH)
    plain = asking.report(*tokens)
    asked = ("--speculate", drafter, "--draft", str(k), "--rounds", str(rounds))
    ours = asking.report(*tokens, *asked)
    assert ours.run.tokens == plain.run.tokens
    assert ours.run.context_tokens == plain.run.context_tokens
    assert len(ours.run.steps) == len(plain.run.steps)
    assert ours.run.speculated is not None
    assert ours.run.speculated.why == ""
    assert ours.run.speculated.acceptance.drafted > 0


def test_a_short_prompt(asking: Asking, tmp_path: Path) -> None:
    """A store with less room than steps are opened for at a time."""
    prompt = tmp_path / "short.txt"
    prompt.write_text("abc")
    here = Asking(asking.where, asking.model, TinyRun(asking.run.model, prompt))
    tokens = ("--tokens", "30", *ENOUGH)
    plain = here.report(*tokens)
    assert here.report(*tokens, "--speculate", "early-exit").run.tokens == plain.run.tokens


class Full(StringIO):
    """A stream for text that takes nothing after a while."""

    def write(self, text: str) -> int:
        """As a disk that is full."""
        if self.tell() > 12:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_nobody_takes_the_text(asking: Asking) -> None:
    """Rounds under way end before their swap does; the leak check sees what stayed."""
    device = "host" if asking.where == "cpu" else asking.where
    job = asking.run.job(
        *("--tokens", str(COUNT), *ENOUGH, "--io", "memory", "--device", device),
        *("--speculate", "ngram"),
    )
    with Interrupts() as interrupts, pytest.raises(OutputError):
        run_job(job, asking.model, interrupts, text_to=Full(), progress_to=StringIO())


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_blocks_only_on_disk(asking: Asking, drafter: str) -> None:
    """The same tokens, one round at a time, and it says why."""
    tokens = ("--tokens", "20", *SCARCE)
    plain = asking.report(*tokens)
    ours = asking.report(*tokens, "--speculate", drafter)
    assert ours.run.tokens == plain.run.tokens
    assert ours.run.speculated is not None
    assert "host_slots" in ours.run.speculated.why
    assert ours.statistics.bytes_read > 0


def test_a_cache_of_fp8(asking: Asking) -> None:
    """Rejected rows were rounded with scales of their own, and are overwritten."""
    tokens = ("--tokens", "40", "--kv-dtype", "e4m3", *ENOUGH)
    plain = asking.report(*tokens)
    ours = asking.report(*tokens, "--speculate", "early-exit")
    assert ours.run.tokens == plain.run.tokens
    asking.report(*tokens, "--speculate", "early-exit", "--verify")


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
@pytest.mark.parametrize("slots", [ENOUGH, SCARCE])
def test_every_pass_verifies(asking: Asking, drafter: str, slots: tuple[str, ...]) -> None:
    """Drafts' and rejected rows too, up to the last token."""
    report = asking.report("--tokens", "24", "--verify", "--speculate", drafter, *slots)
    assert report.verified is not None
    assert report.verified.failures == 0
    assert report.verified.calls > TINY.layers * 4
    assert report.tokens_agree == 24


def test_up_to_the_end_of_the_context(asking: Asking, tmp_path: Path) -> None:
    """No row passes it: the last burst shrinks, and its last round drafts less."""
    prompt = tmp_path / "long.txt"
    prompt.write_text("ab" * (TINY.context_tokens - 40))
    near = TinyRun(asking.run.model, prompt)
    count = TINY.context_tokens - len(near.job("--tokens", "1").prompt)
    assert 10 < count < 50
    tokens = ("--tokens", str(count), "--slots", "900", "--host-slots", "300")
    here = Asking(asking.where, asking.model, near)
    plain = here.report(*tokens)
    assert here.report(*tokens, "--speculate", "ngram", "--draft", "8").run.tokens == (
        plain.run.tokens
    )


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_a_continuation_is_stored_and_found_again(
    asking: Asking, drafter: str, tmp_path: Path
) -> None:
    """What bursts left behind the last token is cut before the sequence is kept."""
    device = "host" if asking.where == "cpu" else asking.where
    kept = ("--tokens", "30", "--persist", "--dir", str(tmp_path / "store"), *ENOUGH)
    made = []
    for _ in range(2):
        job = asking.run.job(*kept, "--speculate", drafter, "--device", device)
        with Interrupts() as interrupts:
            report, _ = run_job(job, asking.model, interrupts, progress_to=StringIO())
        made.append(report.run)
    assert made[0].tokens == made[1].tokens
    assert made[1].prefix_tokens > made[0].prefix_tokens == 0


WORDS = {"a block": 2, "a span": 60, "tiles": 570, "the end of the context": 650}
"""Prompts of 12, 544, 6,837 and 7,877 tokens: under a leaf of attention, under and then over a
span, over tiles, and with less room than 512 tokens.
"""


@pytest.fixture(scope="module", params=WORDS.values(), ids=list(WORDS))
def smol(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Asking, tuple[str, ...], list[int]]:
    """The real model with a prompt, what is asked for, and the tokens of plain decoding."""
    prompt = tmp_path_factory.mktemp("smol") / "prompt.txt"
    prompt.write_text(" ".join(f"the {n * n} of {n}" for n in range(request.param)))
    asking = asking_of("cuda:0", TinyRun(real_model(), prompt))
    slots = ("--slots", "18000", "--host-slots", "4000")
    room = asking.model.config.context_tokens - len(asking.run.job("--tokens", "1", *slots).prompt)
    asked = ("--tokens", str(min(512, room)), *slots)
    return asking, asked, asking.report(*asked).run.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_smollm2_for_512_tokens(
    smol: tuple[Asking, tuple[str, ...], list[int]], drafter: str
) -> None:
    """Swap and speculation on: the tokens of plain decoding, up to the end of the context."""
    asking, asked, plain = smol
    ours = asking.report(*asked, "--speculate", drafter)
    assert ours.run.tokens == plain
    assert ours.run.speculated is not None
    assert ours.run.speculated.why == ""
    note_of_smollm2(asking.where, drafter, ours.run)
