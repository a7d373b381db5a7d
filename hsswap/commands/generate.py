"""``hsswap generate``: a real model decodes with its KV cache in slots and on disk."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TextIO

from hsswap.commands.decoding import Decoder, Run, SwapAttention, count_agreeing, dims_of
from hsswap.commands.generate_args import GenerateOptions, read_prompt
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.planning import Plan, make_plan
from hsswap.commands.plot import check_plot, draw
from hsswap.commands.progress import Progress
from hsswap.commands.report import Report
from hsswap.commands.verify import AttentionVerifier
from hsswap.driver.base import Device
from hsswap.errors import ArgumentError, VerifyError
from hsswap.models import (
    GgufFile,
    Llama,
    TextStream,
    Tokenizer,
    default_model_path,
    open_gguf,
    read_config,
)
from hsswap.sync import blocking


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run, all of it checked: the model's file, the prompt and the plan."""

    options: GenerateOptions
    file: GgufFile
    tokenizer: Tokenizer
    prompt: list[int]
    plan: Plan

    @classmethod
    def of(cls, options: GenerateOptions) -> Job:
        """Read the model's header and the prompt, and plan the slots.

        Raises ArgumentError or ConfigError for a prompt or slots that cannot work, ModelError for
        a model that cannot be read.
        """
        text = read_prompt(options.prompt_file)
        if options.plot is not None:
            check_plot(options.plot)
        file = open_gguf(options.model or default_model_path())
        config = read_config(file)
        tokenizer = Tokenizer.from_gguf(file)
        prompt = tokenizer.encode(text)
        if not prompt:
            raise ArgumentError(
                f"prompt file {options.prompt_file} has no text that the model's vocabulary knows"
            )
        tokens = len(prompt) + options.tokens
        if tokens > config.context_tokens:
            raise ArgumentError(
                f"the prompt of {len(prompt)} tokens and {options.tokens} generated ones exceed "
                f"the model's context of {config.context_tokens}; shorten the prompt or lower "
                "--tokens"
            )
        return cls(options, file, tokenizer, prompt, make_plan(options, dims_of(config), tokens))

    @property
    def model_name(self) -> str:
        """The model's file; the names inside such files are those of training runs."""
        return self.file.path.stem


def main(parsed: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the command. Raises HsswapError, BrokenPipeError or Interrupted."""
    options = GenerateOptions.of(parsed)
    job = Job.of(options)
    print(f"loading {job.file.path.name}", file=sys.stderr, flush=True)
    model = Llama.from_gguf(job.file)
    text_to = None if options.json else sys.stdout
    report, failures = run_job(job, model, interrupts, text_to=text_to)
    print(report.as_table(), file=sys.stderr, flush=True)
    if options.plot is not None:
        draw(options.plot, report.run.steps, title_of(report))
        print(f"picture: {options.plot}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(report.as_json(), ensure_ascii=False, allow_nan=False), flush=True)
    if failures:
        assert report.verified is not None
        more = report.verified.failures - 1
        suffix = f" ({more} more calls failed)" if more else ""
        raise VerifyError(f"{failures[0]}{suffix}")
    return 0


def run_job(
    job: Job,
    model: Llama,
    interrupts: Interrupts,
    *,
    text_to: TextIO | None = None,
    progress_to: TextIO | None = None,
    device: Device | None = None,
) -> tuple[Report, list[VerifyError]]:
    """Decode through a swap of its own; the report, and the first calls that failed to verify.

    Text goes to ``text_to`` as it is made, progress to ``progress_to`` (None: stderr). ``device``
    as in :func:`hsswap.blocking`. Raises what the swap raises, and Interrupted.
    """
    options = job.options
    run = Run(len(job.prompt))
    verifier = AttentionVerifier(job.plan.config.dims) if options.verify else None
    progress = Progress(progress_to or sys.stderr)
    stream = TextStream(job.tokenizer)
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        if text_to is not None:
            print(text, end="", file=text_to, flush=True)

    with interrupts.held():
        try:
            with (
                blocking(job.plan.config, device=device) as swap,
                swap.sequence(top_k=job.plan.top_k) as sequence,
            ):
                attention = SwapAttention(sequence, verifier=verifier, checkpoint=interrupts.check)
                decoder = Decoder(
                    model, swap, attention, verifier=verifier, checkpoint=interrupts.check
                )
                for token in decoder.tokens(
                    run,
                    job.prompt,
                    options.tokens,
                    stop_ids=job.tokenizer.stop_ids,
                    progress=progress.update,
                ):
                    show(stream.push(token))
        finally:
            progress.close()
    show(stream.finish())
    if text_to is not None:
        print(file=text_to, flush=True)
    agree = None
    if verifier is not None:
        agree = count_agreeing(model, job.prompt, run.tokens)
    assert run.statistics is not None
    report = Report(
        job.model_name,
        "".join(pieces),
        run,
        job.plan,
        run.statistics,
        None if verifier is None else verifier.summary,
        agree,
    )
    return report, [] if verifier is None else verifier.failures


def title_of(report: Report) -> str:
    """The picture's title: what ran, its context and its slots."""
    config, run = report.plan.config, report.run
    share = (report.device_slot_bytes + report.host_slot_bytes) / report.kv_bytes
    mode = "exact" if report.plan.top_k is None else f"top {report.plan.top_k.k} blocks"
    ahead = "" if config.look_ahead else ", look-ahead off"
    return (
        f"{report.model_name}, {run.context_tokens} tokens of context, {mode}{ahead}\n"
        f"{config.device_slots} device and {config.host_slots} host slots: {share:.1%} of the KV "
        f"cache; {run.tokens_per_s:.1f} tokens/s, {report.statistics.path}"
    )
