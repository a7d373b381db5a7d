"""Every figure under the README's "What it costs" is that of the committed file that it names.

What is expected is written from the files in the README's words. After a new measurement the test
shows the lines that the README should have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hsswap import LayerGroup, PredictorConfig
from hsswap.driver.cuda_prepare import kernels_of
from hsswap.driver.preparing import PrepareWork

ROOT = Path(__file__).parent.parent
COSTS = (ROOT / "README.md").read_text().partition("\n## What it costs\n")[2]
TABLES = [line for line in COSTS.splitlines() if line.startswith("| ")]

ARMS = {
    "everything in device slots": "in memory",
    "an eighth in slots": "eighth",
    "an eighth, no look-ahead": "eighth, no look-ahead",
    "plain NumPy attention, no paging": "plain",
}
METHODS = {
    "codes, the default": ["codes 1/32"],
    "codes": ["codes 1/16"],
    "codes, without a stand-in": [f"codes 1/{n}, stand-in: none" for n in (32, 16)],
    "codes, a stand-in of the first 1,024 tokens": [
        f"codes 1/{n}, stand-in: first tokens" for n in (32, 16)
    ],
    "perfect choice, without and with a stand-in": ["oracle", "oracle, stand-in"],
    "KVSwap's rule": ["KVSwap, sigma 8"],
    "Quest": ["Quest"],
    "ArkVale": ["ArkVale"],
    "the blocks of the last step": ["last step"],
    "random projection, rank 8": ["projection, rank 8"],
}
MEASURED_MISSES = (2, 8)
"""Missing blocks of the top-k steps that the README shows: 3 % of 64 and of 256."""


def result(name: str) -> Any:
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


def rows_of(file: str, /, **wanted: object) -> list[Any]:
    """Rows of a file that have these values."""
    rows = result(file)["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def ratio(of: dict[str, float]) -> str:
    return f"{of['median']:.2f} ({of['low']:.2f}-{of['high']:.2f})"


def table_row(*cells: str) -> str:
    return "| " + " | ".join(cells).replace("|  |", "| |") + " |"


def decode_table() -> Iterator[str]:
    arms = result("decode_compare")["arms"]
    for name, arm in ARMS.items():
        row = arms[arm]
        share = dict(zip(("low", "high"), row["of_memory_95"], strict=True))
        read = f"{row.get('bytes_read_a_token', 0) / 1e6:.0f}"
        share["median"] = row["of_memory"]
        yield table_row(name, f"{row['tokens_per_s']:.1f}", ratio(share), read)


def attention_table() -> Iterator[str]:
    for row in result("attention-h200")["rows"]:
        times = [f"{row[of]['median']:.1f}" for of in ("ours_us", "baseline_us")]
        if row["id"] in ("A1", "A2"):
            batch = "" if row["batch"] == 1 else f"{row['batch']} x "
            small = f", {row['q_heads']}/{row['kv_heads']} heads, d {row['head_dim']}"
            name = f"{batch}{row['tokens']:,} tokens{small if row['head_dim'] != 128 else ''}"
            yield table_row(name, *times, ratio(row["ratio"]))
        elif row["id"] == "A4":
            name = f"prefill, {row['rows']:,} rows over {row['tokens']:,} tokens"
            yield table_row(name, *times, ratio(row["ratio"]))
        elif row["id"] == "A3" and row["missing"] in MEASURED_MISSES:
            of = f"{row['k']} blocks of {row['tokens'] // 16:,}"
            name = f"a top-k step, {of}, {row['missing']} of them in host memory"
            yield table_row(name, *times, f"{1 / row['ratio']['median']:.2f}")


def predictor_table() -> Iterator[str]:
    report = result("predictor-smollm2")
    means = {row["method"]: row for row in report["means"] if row["k"] == 16}
    whole = report["unit_bytes"]
    for name, methods in METHODS.items():
        rows = [means[method] for method in methods]
        taken = [row["metadata_bytes"] for row in rows]
        if name == "the blocks of the last step":
            share = "0"
        else:
            share = ", ".join(f"1/{whole / n:.0f}" for n in taken if n is not None)
        # What stands in for the blocks left out changes nothing about which they are.
        choices = dict.fromkeys(method.partition(", stand-in")[0] for method in methods)
        yield table_row(
            name,
            share,
            ", ".join(f"{means[choice]['recall']:.2f}" for choice in choices),
            ", ".join(f"{r['kl']:.3f} ({r['kl_low']:.3f}-{r['kl_high']:.3f})" for r in rows),
            ", ".join(str(row["digits_right"]) for row in rows),
        )


def rounds_table() -> Iterator[str]:
    """Where speculation pays: beside plain decoding by graphs."""
    beside = [row for row in result("rounds-h200")["rows"] if "against_plain" in row]
    for row in beside:
        if row["arm"] == "stream":
            batch, text = row["batch"], row["text"]
            exits = rows_of("rounds-h200", arm="early-exit", batch=batch, text=text)
            early = [ratio(row["against_plain"]) for row in exits if "against_plain" in row]
            yield table_row(
                *(str(batch), text),
                f"{row['tokens_per_round']:.2f}",
                ratio(row["against_read_back"]),
                ratio(row["against_plain"]),
                *(early or [""]),
            )


def test_tables() -> None:
    expected = [*decode_table(), *attention_table(), *predictor_table(), *rounds_table()]
    found = [row for row in TABLES if any(character.isdigit() for character in row)]
    assert [row for row in expected if row not in found] == []  # what the README should have
    assert [row for row in found if row not in expected] == []  # what it has instead


def machine_and_date() -> Iterator[str]:
    attention, decode = result("attention-h200"), result("decode_compare")
    machine = attention["machine"]
    yield f"{decode['date'][:10]}, commit {decode['commit'][:7]}"
    yield f"torch {attention['torch'].partition('+')[0]}"
    yield f"driver {machine['driver']}, {machine['date'][:10]}, commit {machine['commit'][:7]}"


def e4m3() -> Iterator[str]:
    for row in rows_of("attention-h200", id="F8"):
        batch = "" if row["batch"] == 1 else f"{row['batch']} x "
        yield f"{batch}{row['tokens']:,}"
        yield f"in {row['ours_us']['median']:.1f} us ({row['ratio']['median']:.2f})"


def gather() -> Iterator[str]:
    row = rows_of("attention-h200", id="S1", name="S1 1024 scattered pieces of 64 KiB")[0]
    yield f"at {row['ratio']['median']:.2f} of one contiguous pinned copy"


def top_k() -> Iterator[str]:
    report = result("predictor-smollm2")
    plans: dict[tuple[int, float], list[Any]] = {}
    for row in report["through_swap"]:
        plans.setdefault((row["k"], row["metadata_ratio"]), []).append(row)
    (_, swapped), *_, (_, best) = plans.items()
    dense = sum(row["dense_digits_right"] for row in swapped)
    yield f"(dense attention recalls {dense} of {report['means'][0]['digits']})"
    yield f"{sum(row['digits_right'] for row in swapped)} of dense attention's {dense} digits"
    prose = next(row for row in swapped if row["context"] == "docs")
    perfect = next(r for r in report["loss"] if (r["context"], r["method"]) == ("docs", "oracle"))
    yield f"{prose['nats']:.3f} nats a token of prose"
    yield f"dense attention has {prose['dense_nats']:.3f}"
    yield f"({100 * (prose['nats'] / prose['dense_nats'] - 1):.1f} % more"
    yield f"a perfect choice without a stand-in {perfect['nats']:.3f})"
    for (k, ratio), rows in plans.items():
        kls = [f"{row['kl']:.3f}" for row in rows]
        words = f"k = {k} KL is" if ratio == 1 / 32 else f"`--codes {1 / ratio:.0f}` besides"
        yield f"{words} {', '.join(kls[:-1])} and {kls[-1]}"
    for row in best:
        table = report["loss" if row["context"] == "docs" else "end_to_end"]
        [choice] = [
            one
            for one in table
            if (one["context"], one["method"], one.get("k")) == (row["context"], "oracle", 16)
        ]
        assert row["nats"] <= 1.01 * max(row["dense_nats"], choice["nats"])
    yield "all three are within 1 % of dense attention's nats a token or of a perfect choice's"
    untuned = {
        row["method"]: f"{row['kl']:.3f}"
        for row in report["end_to_end"]
        if row["context"] == "licences.txt" and row["k"] == 16
    }
    yield f"(licences) KL is {untuned['codes 1/16']} at 1/16"
    yield f"{untuned['codes 1/16, stand-in: none']} without a stand-in"
    yield f"{untuned['oracle']} with a perfect choice"


def overlap() -> Iterator[str]:
    def row_of(number: str, *words: str) -> Any:
        rows = rows_of("overlap-h200", id=number)
        [found] = [row for row in rows if all(word in row["name"] for word in words)]
        return found

    def late_ms(path: str) -> str:
        lags = row_of("L1", path)["loop_lag_ms"].values()
        return f"{max(lag['p99'] for lag in lags):.1f}"

    yield f"{row_of('O2', 'eager')['ratio']['median']:.2f} times as long"
    yield f"{row_of('O2', 'captured')['ratio']['median']:.2f} in a captured graph"
    yield f"reads from host memory {ratio(row_of('O1', 'prefill')['overlap'])} are hidden"
    yield f"reads from a disk {ratio(row_of('O1', 'decode', 'O_DIRECT')['overlap'])}"
    yield f"from `/dev/shm` {ratio(row_of('O1', 'decode', 'tmpfs')['overlap'])}"
    yield f"late by {late_ms('O_DIRECT')} and {late_ms('tmpfs')} ms"


def whole_step() -> Iterator[str]:
    def median(number: str, tokens: int) -> float:
        row = rows_of("decode-h200", id=number, tokens=tokens)[0]
        return float(row["ratio"]["median"])

    for tokens in (131072, 32768):
        dense = rows_of("decode-h200", id="D1", tokens=tokens)[0]
        yield f"at {tokens:,} tokens"
        yield ratio(dense["ratio"])
    yield f"{median('D2a', 131072):.1f} times that of a swap that the host decides"
    yield f"{median('D2b', 131072):.1f} times that of one copy a block"
    yield f"{median('D2a', 32768):.1f} and {median('D2b', 32768):.1f}"
    yield f"{median('D2c', 32768):.0f} times that of transformers' offloaded cache"


def rounds() -> Iterator[str]:
    """Of the runs beside an eager loop; the others are a table."""

    def streams(batch: int) -> list[Any]:
        rows = rows_of("rounds-h200", arm="stream", batch=batch)
        return [row for row in rows if "against_eager" in row]

    def of_read_back(row: Any) -> str:
        return ratio(row["against_read_back"])

    code, prose = streams(1)
    [four] = streams(4)
    yield f"{of_read_back(code)} and {of_read_back(prose)} of the same graphs"
    yield f"{of_read_back(four)} for four sequences of prose"
    yield f"({four['tokens_per_s']['median']:,.0f} tokens/s)"
    eager = [row["against_eager"]["median"] for row in (code, prose, four)]
    yield f"{min(eager):.0f} to {max(eager):.0f} times an eager loop"
    idle = [row["device_idle"] for row in rows_of("rounds-h200", arm="stream")]
    yield f"The device waits {100 * max(idle):.1f} % of the time"


class H200:
    """What the choice of kernels depends on."""

    compute_capability, sm_count, shared_bytes_limit = (9, 0), 132, 232448


def kernels() -> Iterator[str]:
    def count(sequences: int, predictor: PredictorConfig | None = None) -> int:
        work = PrepareWork((LayerGroup(1, 32, 8, 128),), 16, 32768, sequences, predictor)
        found = kernels_of(H200(), work)
        return len({(kernel, *sorted(constants.items())) for kernel, constants in found})

    yield f"{count(1)} kernels for one sequence"
    yield f"{count(8)} for eight sequences"
    yield f"{count(1, PredictorConfig())} for one in top-k mode"


@pytest.mark.parametrize(
    "part", [machine_and_date, e4m3, gather, top_k, overlap, whole_step, rounds, kernels]
)
def test_text(part: Callable[[], Iterable[str]]) -> None:
    text = " ".join(COSTS.split())
    assert [words for words in part() if words not in text] == []
