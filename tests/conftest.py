"""What every test gets: two event loops, a leak check, markers and Hypothesis' profile."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

# A worker that was told to stop needs a moment to end; the worst is a thread in a disk read.
THREAD_EXIT_LIMIT_S = 5.0
# Markers whose tests run only when -m names them.
ON_REQUEST = ("slow", "soak")

# A shell's background job ignores the one, nohup the other, and so would every command that a test
# starts; tests want to see them end it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("laptop", deadline=None, max_examples=50, print_blob=True)
# CI draws the same examples each time, so that a red run is about the commit under test.
settings.register_profile("ci", settings.get_profile("laptop"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "laptop")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test on asyncio and on uvloop (hook of pytest-asyncio 1.4 and newer)."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@cache
def missing_for_gpu() -> str | None:
    """What the tests marked ``gpu`` lack here, or None. Loads the driver, does not start it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 (the NVIDIA driver) cannot be loaded"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs on request only; skip what this machine cannot run, naming why."""
    asked: str = config.option.markexpr
    left_out = [
        item
        for item in items
        if any(item.get_closest_marker(name) and name not in asked for name in ON_REQUEST)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if item.get_closest_marker("gpu") and (missing := missing_for_gpu()):
            item.add_marker(pytest.mark.skip(reason=missing))


@dataclass(frozen=True)
class OpenResources:
    """What a test must give back: our threads, and the open descriptors by what they refer to."""

    threads: frozenset[threading.Thread]
    descriptors: Counter[str]


def open_resources() -> OpenResources:
    """Take stock of this process."""
    descriptors: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        descriptors[target.removesuffix(" (deleted)")] += 1
    threads = frozenset(t for t in threading.enumerate() if t.name.startswith("hsswap"))
    return OpenResources(threads, descriptors)


def only_files(descriptors: Counter[str]) -> Counter[str]:
    """Without sockets, pipes, anonymous inodes and devices."""
    return Counter(
        {
            target: count
            for target, count in descriptors.items()
            if target.startswith("/") and not target.startswith(("/dev/", "/memfd:"))
        }
    )


def differences(before: OpenResources) -> list[str]:
    """What was left open since, or closed by someone else than its owner, in words.

    Waits for threads that are ending, and collects garbage before it complains: cycles through the
    traceback of an expected exception keep objects alive that nothing else holds.
    """
    deadline = time.monotonic() + THREAD_EXIT_LIMIT_S
    for thread in open_resources().threads - before.threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    after = open_resources()
    if after != before:
        gc.collect()
        after = open_resources()
    old, new = before.descriptors, after.descriptors
    if old != new and "/libcuda.so" in Path("/proc/self/maps").read_text():
        # The driver opens devices, sockets and events of its own, until the process ends.
        old, new = only_files(old), only_files(new)
    return [
        *(f"thread still runs: {thread.name}" for thread in after.threads - before.threads),
        *(f"thread of an outer fixture ended: {t.name}" for t in before.threads - after.threads),
        *(f"descriptor left open: {target}" for target in (new - old).elements()),
        *(f"descriptor of someone else closed: {target}" for target in (old - new).elements()),
    ]


@pytest.fixture(scope="session", autouse=True)
def libuv_started() -> None:
    """Let libuv open what it opens once a process (the pipe that serialises its signals)."""
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def leak_check(libuv_started: None) -> Iterator[None]:
    """Fail a test after which threads named hsswap* or open descriptors differ from before it.

    Autouse fixtures are set up before the others of their scope, so the event loop of an async test
    opens after the first count and is closed before the second.
    """
    before = open_resources()
    yield
    if found := differences(before):
        pytest.fail("leak check:\n  " + "\n  ".join(found), pytrace=False)
