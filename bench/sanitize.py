"""NVIDIA's compute-sanitizer over every kernel: the GPU tests of tests/driver, family by family.

Each family of kernels runs in processes of its own, side by side, once under each tool, with a few
sets of parameters of each test: racecheck makes a kernel some hundred times slower. A family's
report is a file in ``--out``, and ``sanitize.json`` there says what came of all so far. The exit
status is 1 if an error was reported, a test failed, or a kernel of ``hsswap.ptx`` was never
launched; racecheck's warnings are counted. Needs a GPU and compute-sanitizer (of the CUDA toolkit);
the same file is the plugin that those processes load.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsswap import ptx
from hsswap.bench.figures import machine

LAUNCHED = "HSSWAP_SANITIZE_LAUNCHED"
"""Environment: the file that a process appends a kernel's name to, when it is to be launched."""

EACH = "HSSWAP_SANITIZE_EACH"
"""Environment: how many sets of parameters of a test run."""

REPORTED = 99
"""What compute-sanitizer exits with where it reported something."""

RUNNING: set[int] = set()
"""Processes, each the first of a session."""

BARRIERS = ["--num-cuda-barriers", "64"]
"""Of a thread block; what the tools guess is less, and then launches fail under them."""

FAMILIES: dict[str, list[str]] = {
    "moves": ["test_operations.py", "test_gather.py", "test_held.py", "-k", "not attention"],
    "fetch": ["test_fetch.py", "test_extras.py"],
    "codes": ["test_codes.py", "test_f16.py", "-k", "codes or scores or lists or blocks or rows"],
    "select": ["test_select.py", "test_trim.py", "test_cuda_operations.py"],
    "top-k": ["test_top_k_step.py", "test_left_out.py"],
    "learn": ["test_learn.py"],
    "decode": ["test_cuda_attention.py", "-k", "decode or lists or same_launch or logsumexps"],
    "tile": ["test_cuda_attention.py", "test_sinks.py", "-k", "short or leaf or spans or sink"],
    "wide": ["test_cuda_attention.py", "-k", "long or ragged or alone or infinite"],
    "attention": ["test_attention.py", "test_again.py", "-k", "not refused"],
    "held": ["test_held.py", "test_pages.py", "-k", "attention or pages"],
    "e4m3": ["test_e4m3.py"],
    "rounds": ["test_rounds.py", "test_round_words.py", "test_skipping.py"],
    "sampling": ["test_round_sampling.py"],
}


@dataclass(frozen=True)
class Outcome:
    """One family under one tool."""

    family: str
    tool: str
    status: int  # 0: no error reported and every test passed; -1: time was up
    warnings: int
    seconds: float
    tests: int
    kernels: list[str]
    tail: str  # where the status is not 0


def sanitizer() -> str | None:
    """compute-sanitizer's path, or None."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/opt/cuda/bin"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def command(tool: str, family: str, log: Path) -> list[str]:
    """One process: the tool, and pytest below it."""
    found = sanitizer()
    assert found is not None, "main looked for it"
    tests = [f"tests/driver/{a}" if a.endswith(".py") else a for a in FAMILIES[family]]
    # Tests provoke errors of the driver, which are not the kernels'.
    how = ["--report-api-errors", "no"] if tool == "memcheck" else BARRIERS
    pytest = ["-m", "pytest", "-q", "-m", "gpu", "-p", "bench.sanitize", "-p", "no:benchmark"]
    pytest += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=600", "--no-header"]
    return [
        *(found, "--tool", tool, *how, "--target-processes", "all", "--print-limit", "20"),
        *("--error-exitcode", str(REPORTED), "--log-file", str(log)),
        *(sys.executable, *pytest, *tests),
    ]


def run(tool: str, family: str, each: int, out: Path, until_s: float) -> Outcome:
    """Run one family under one tool until it ends or time is up."""
    start, log = time.monotonic(), out / f"{tool}-{family}.txt"
    launched, tests = log.with_suffix(".kernels"), log.with_suffix(".tests.txt")
    launched.touch()
    environment = {**os.environ, EACH: str(each), LAUNCHED: str(launched)}
    with tests.open("w") as output:
        process = subprocess.Popen(
            command(tool, family, log),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process.pid)
        try:
            status = process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = -1
        finally:
            RUNNING.discard(process.pid)
    text = log.read_text(errors="replace") if log.exists() else ""
    told = tests.read_text(errors="replace")
    status, warnings = judged(status, text, told)
    tail = "" if status == 0 else text[-1500:] + told[-1500:]
    passed = re.search(r"(\d+) passed", told)
    seconds = round(time.monotonic() - start, 1)
    count, names = int(passed[1]) if passed else 0, sorted(set(launched.read_text().split()))
    return Outcome(family, tool, status, warnings, seconds, count, names, tail)


def judged(status: int, report: str, tests: str) -> tuple[int, int]:
    """The status of a process that ended with ``status``, and how many warnings it reported."""
    found = re.search(r"SUMMARY: \d+ \S+(?: displayed \(0 errors?, (\d+) warnings?\))?", report)
    warnings = int(found[1] or 0) if found else 0
    is_clean = warnings > 0 or re.search(r"SUMMARY: 0 ", report) is not None
    if status in (0, REPORTED) and is_clean and " failed" not in tests and " error" not in tests:
        return 0, warnings
    return (REPORTED if status == 0 else status), warnings


def end_all(*_: object) -> None:
    """Told to end: the processes have sessions of their own, and would go on."""
    for pid in list(RUNNING):
        os.killpg(pid, signal.SIGKILL)
    os._exit(143)


def main() -> int:
    """Run everything; 0 if nothing was found."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    add, families = parser.add_argument, list(FAMILIES)
    tools = ["memcheck", "racecheck", "synccheck"]
    add("--tools", nargs="+", default=tools, metavar="T", help=f"({' '.join(tools)})")
    text = f"only these families of kernels (all: {' '.join(families)})"
    add("--families", nargs="+", default=families, choices=families, metavar="F", help=text)
    add("--each", type=int, default=4, help="sets of parameters of each test (4)")
    add("--seconds", type=float, default=1800.0, help="then what runs is ended (1800)")
    add("--processes", type=int, default=6, help="side by side (6)")
    add("--out", type=Path, default=Path("build/sanitize"), help="a folder (build/sanitize)")
    arguments = parser.parse_args()
    if sanitizer() is None:
        parser.error("compute-sanitizer is not in PATH; it comes with the CUDA toolkit")
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, end_all)
    signal.signal(signal.SIGINT, end_all)
    until_s = time.monotonic() + arguments.seconds
    asked = [(tool, family) for tool in arguments.tools for family in arguments.families]
    everything = set(ptx.KERNELS) if set(arguments.families) == set(FAMILIES) else set()
    wanted = dict.fromkeys(arguments.tools, everything)
    outcomes: list[Outcome] = []

    def one(pair: tuple[str, str]) -> None:
        if time.monotonic() < until_s:
            outcome = run(*pair, arguments.each, arguments.out, until_s)
        else:
            outcome = Outcome(pair[1], pair[0], -1, 0, 0.0, 0, [], "not begun")
        outcomes.append(outcome)
        print(f"{outcome.tool} {outcome.family}: {outcome.status}, {outcome.seconds} s", flush=True)
        record(outcomes, wanted, arguments.out / "sanitize.json")

    with ThreadPoolExecutor(arguments.processes) as pool:
        list(pool.map(one, asked))
    report = record(outcomes, wanted, arguments.out / "sanitize.json")
    print(json.dumps({name: report[name] for name in ("failed", "never_launched")}))
    return int(bool(report["failed"]) or any(report["never_launched"].values()))


def record(outcomes: list[Outcome], wanted: dict[str, set[str]], file: Path) -> dict[str, Any]:
    """What came of all so far, also as a file; ``wanted``: kernels that each tool should see."""
    done = list(outcomes)
    report = {
        "what": "compute-sanitizer over the GPU tests of tests/driver",
        "machine": machine(),
        "failed": [f"{o.tool} {o.family}: {o.status}" for o in done if o.status],
        "never_launched": {
            tool: sorted(kernels - {k for o in done if o.tool == tool for k in o.kernels})
            for tool, kernels in wanted.items()
        },
        "outcomes": [asdict(outcome) for outcome in done],
    }
    file.write_text(json.dumps(report, indent=1) + "\n")
    return report


# The plugin.


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep a few sets of parameters of each test, spread over all it has."""
    each = int(os.environ[EACH])
    of_test: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu"):
            of_test[item.nodeid.partition("[")[0]].append(item)
    kept = {  # the first and the last among them: lists grow, and the last shapes are odd
        some[at * (len(some) - 1) // max(1, each - 1)].nodeid
        for some in of_test.values()
        for at in range(each)
    }
    left_out = [item for item in items if item.nodeid not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_configure(config: Any) -> None:
    """Note the name of every kernel that is looked up: each is looked up to be launched.

    Keep the context and what is loaded from test to test, too: the tools change a kernel's code
    when it is loaded, which takes seconds.
    """
    from hsswap.driver.cuda_context import Context
    from hsswap.driver.cuda_modules import Modules

    begin, look_up = Modules.__init__, Modules.function
    functions: dict[Any, Any] = {}
    modules: dict[Any, Any] = {}

    def sharing(self: Modules, *given: Any) -> None:
        begin(self, *given)
        self._functions, self._modules = functions, modules

    def noting(self: Modules, key: Any) -> Any:
        with open(os.environ[LAUNCHED], "a", encoding="utf-8") as file:
            file.write(f"{key[0]}\n")
        return look_up(self, key)

    Modules.__init__ = sharing  # type: ignore[assignment,method-assign]
    Modules.function = noting  # type: ignore[method-assign]
    Modules.close = Context.release = lambda self: None  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    sys.exit(main())
