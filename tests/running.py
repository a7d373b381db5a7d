"""For tests of the command: a tiny model, its prompt, and runs of it in this process or a child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from hsswap.__main__ import make_parser
from hsswap.commands.decoding import Run
from hsswap.commands.generate import Job, run_job
from hsswap.commands.generate_args import GenerateOptions
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.report import Report
from hsswap.driver.base import Device
from hsswap.errors import ModelError, VerifyError
from hsswap.models import Llama, default_model_path
from tests.models.tiny_llama import Tiny, tiny_weights, write_tiny
from tests.soaking import note

PROJECT = Path(__file__).resolve().parents[1]

TINY = Tiny(layers=3, head_dim=16, rope_dims=8, context_tokens=4000)
LEAST_SLOTS = 2 * 16 + TINY.layers
"""Device slots that exact mode needs for it: two tiles of 256 tokens, one block a layer."""
LEAST_HOST_SLOTS = 2 * 16


@dataclass(frozen=True)
class TinyRun:
    """A tiny model and a prompt, as files."""

    model: Path
    prompt: Path

    @classmethod
    def make(cls, folder: Path, *, characters: int = 600) -> TinyRun:
        """Write both into ``folder``. Nearly every character is a token."""
        model = write_tiny(folder / "tiny.gguf", TINY, tiny_weights(TINY))
        letters = np.random.default_rng(3).choice(list("abcd12 "), characters)
        prompt = folder / "prompt.txt"
        prompt.write_text("a" + "".join(letters.tolist()))
        return cls(model, prompt)

    def arguments(self, *more: str) -> list[str]:
        """A command line of ``hsswap generate`` with the least slots, from argument 1 on."""
        least = ["--slots", str(LEAST_SLOTS), "--host-slots", str(LEAST_HOST_SLOTS)]
        chosen = [] if "--slots" in more or "topk" in more else least
        files = ["--prompt-file", str(self.prompt), "--model", str(self.model)]
        return ["generate", *files, *chosen, *more]

    def job(self, *more: str) -> Job:
        """The same as a checked job."""
        words = self.arguments(*more)
        return Job.of(GenerateOptions.of(make_parser(words).parse_args(words)))

    def run(self, *more: str, device: Device | None = None) -> tuple[Report, list[VerifyError]]:
        """Run it in this process, silently."""
        job = self.job(*more)
        model = Llama.from_gguf(job.file)
        with Interrupts() as interrupts:
            return run_job(job, model, interrupts, progress_to=StringIO(), device=device)


def real_model() -> Path:
    """SmolLM2: MODEL names it, or it is that of the package."""
    if named := os.environ.get("MODEL"):
        return Path(named)
    try:
        return default_model_path()
    except ModelError as error:
        pytest.skip(f"MODEL names no GGUF, and {error}")


def note_of_smollm2(place: str, drafter: str, run: Run) -> None:
    """What a speculative run of the real model did, whose tokens were those of plain decoding."""
    assert run.speculated is not None
    fared = run.speculated.acceptance
    what = f"SmolLM2, {place}, prompt of {run.prompt_tokens} tokens, {drafter}"
    did = {"tokens": len(run.tokens), "rounds": fared.rounds, "accepted": fared.accepted}
    note("rounds", **{what: {**did, "context_tokens": run.context_tokens}})


class Terminal(StringIO):
    """A stream that people watch."""

    def isatty(self) -> bool:
        """As a terminal says."""
        return True


# One thread: a second one of BLAS only waits where tests run side by side.
ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def child(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """``python -m hsswap`` in a process of its own, killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "hsswap", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
        env=ENVIRONMENT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(stream: object, text: str) -> None:
    """Read lines of a child's stream up to one with ``text``."""
    seen = []
    for line in stream:  # type: ignore[attr-defined]
        if text in line:
            return
        seen.append(line)
    raise AssertionError(f"{text!r} did not come: {seen}")
