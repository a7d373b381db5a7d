"""The package follows the rules of layout, importing it does nothing, and each check can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.layout_rules import ROOMS, text_violations, violations

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "hsswap"


def test_the_package_follows_the_rules() -> None:
    found = violations(PACKAGE)
    assert not found, "\n".join(found)


def test_every_room_is_there() -> None:
    places = {room: PACKAGE.joinpath(*room.split(".")) for room in ROOMS}
    gone = [
        r for r, at in places.items() if not at.is_dir() and not at.with_suffix(".py").is_file()
    ]
    assert gone == []


def test_no_file_names_one_machine() -> None:
    found = text_violations(PROJECT)
    assert not found, "\n".join(found)


# Runs in a fresh interpreter. NumPy comes first: its threads and libraries are not our doing.
IMPORT_PROBE = """
import ctypes, os, sys, threading
import asyncio, numpy
effects = []
def watch(event, arguments):
    opens_for_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    named = event in {"os.mkdir", "socket.__new__", "subprocess.Popen", "os.posix_spawn"}
    if opens_for_write or named or (event == "ctypes.dlopen" and arguments[0]):
        effects.append(f"{event} {arguments[0]}")
def watch_environment(self, key, read=os._Environ.__getitem__):
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in {"os", "collections.abc", "_collections_abc"}:
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").split(".")[0] == "hsswap":
        effects.append(f"environment {key}")
    return read(self, key)
os._Environ.__getitem__ = watch_environment
sys.addaudithook(watch)
tasks = len(os.listdir("/proc/self/task"))
import hsswap
if len(os.listdir("/proc/self/task")) != tasks:
    effects.append(f"threads {threading.enumerate()}")
heavy = {"cuda", "cupy", "gguf", "kvikio", "matplotlib", "tokenizers", "torch", "uvloop"}
effects += [f"imported {name}" for name in sorted(heavy & set(sys.modules))]
print("\\n".join(effects), end="")
"""


def effects_of_import(where: Path, package_parent: Path) -> list[str]:
    """What ``import hsswap`` did, in a new process in the empty folder ``where``."""
    home = where / "home"
    home.mkdir()
    environment = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(package_parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-W", "error", "-c", IMPORT_PROBE]
    done = subprocess.run(
        command,
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = [f"file {path}" for path in where.rglob("*") if path != home]
    return done.stdout.splitlines() + made


def test_importing_does_nothing(tmp_path: Path) -> None:
    assert effects_of_import(tmp_path, PROJECT) == []


@pytest.mark.parametrize(
    ("line", "effect"),
    [
        (
            "from threading import *; Thread(target=Event().wait, daemon=True).start()",
            "threads",
        ),
        ("open('made', 'w').close()", "file"),
        ("import uvloop", "imported uvloop"),
        ("import ctypes; ctypes.CDLL('libc.so.6')", "ctypes.dlopen libc.so.6"),
        ("import os; os.environ.get('HSSWAP_DIR')", "environment HSSWAP_DIR"),
    ],
)
def test_the_import_check_can_fail(tmp_path: Path, line: str, effect: str) -> None:
    package = tmp_path / "hsswap"
    package.mkdir()
    (package / "__init__.py").write_text(line)
    where = tmp_path / "empty"
    where.mkdir()
    assert any(found.startswith(effect) for found in effects_of_import(where, tmp_path))


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write sources by relative path; each gets a module docstring unless it is not Python."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Doc."""\n{text}\n' if path.suffix == ".py" else text)
    return root


GOOD = {
    "__init__.py": "from hsswap.swap import open_swap",
    "errors.py": "",
    "config.py": "from .errors import Oops",
    "io/__init__.py": "",
    "io/base.py": 'class Backend:\n  """D."""\n  def read(self):\n    """D."""',
    "io/gds_kvikio.py": "import kvikio\nfrom . import base\nfrom .. import errors",
    "io/posix.py": (
        'from .base import Backend\nclass Posix(Backend):\n  """D."""\n  def read(self): ...\n'
        "  def __len__(self): ...\n  def _inner(self): ..."
    ),
    "driver/__init__.py": "",
    "driver/base.py": "",
    "driver/cuda.py": "from cuda.bindings import driver\nfrom hsswap.ptx import kernels",
    "ptx/__init__.py": "",
    "ptx/kernels.py": "",
    "tiers.py": "from hsswap.driver import base",
    "prefetch.py": "from hsswap.io.posix import Posix\nimport hsswap.tiers",
    "swap.py": "import importlib\nimportlib.import_module('hsswap.driver.cuda')",
    "models/llama.py": "import hsswap\nfrom hsswap import HighSpeedSwap",
}


def test_a_good_tree_passes(tmp_path: Path) -> None:
    assert violations(write_tree(tmp_path / "hsswap", GOOD)) == []


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "io/posix.py",
            "from hsswap.driver.base import X",
            "'io' must not import hsswap.driver.base",
        ),
        ("io/posix.py", "from ..driver import base", "'io' must not import hsswap.driver.base"),
        ("io/__init__.py", "from .. import swap", "'io' must not import hsswap.swap"),
        ("io/posix.py", "import hsswap", "'io' must not import hsswap"),
        ("driver/cuda.py", "import hsswap.io.base", "'driver' must not import hsswap.io.base"),
        ("errors.py", "def _f():\n  from hsswap import io", "'errors' must not import hsswap.io"),
        (
            "tiers.py",
            "from hsswap.driver import cuda",
            "'tiers' must not import hsswap.driver.cuda",
        ),
        ("tiers.py", "from hsswap.driver import open", "'tiers' must not import hsswap.driver"),
        ("prefetch.py", "from hsswap.swap import X", "'prefetch' must not import hsswap.swap"),
        ("models/llama.py", "from hsswap import io", "'models' must not import hsswap.io"),
        ("swap.py", "from hsswap import models", "'swap' must not import hsswap"),
        ("swap.py", "__import__('hsswap.models.llama')", "must not import hsswap.models.llama"),
        ("extra.py", "", "no room: give 'extra' a row"),
        (
            "io/posix.py",
            "import kvikio.defaults",
            "only io.gds_kvikio, bench.io_kvikio may import kvikio",
        ),
        ("swap.py", "from cuda.bindings import nvrtc", "only driver may import cuda"),
        ("ptx/big.cuh", "//\n" * 401, "401 lines, at most 400"),
        ("config.py", "#\n" * 400, "lines, at most 400"),
        ("config.py", "def _f():\n" + "  x = 1\n" * 70, "function _f has 71 lines, at most 70"),
        ("config.py", "def f(): ...", "f without docstring"),
        ("config.py", "if True:\n  async def f(): ...", "f without docstring"),
        ("config.py", "class C: ...", "C without docstring"),
        ("io/base.py", 'class B:\n  """D."""\n  def read(self): ...', "B.read without docstring"),
        ("io/base.py", "class Backend:\n  def read(self): ...", "Posix.read without docstring"),
    ],
)
def test_a_bad_tree_is_found(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    found = violations(write_tree(tmp_path / "hsswap", GOOD | {name: text}))
    assert any(complaint in line for line in found), found


def test_a_module_without_docstring_is_found(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "hsswap", GOOD)
    (root / "metrics.py").write_text("x = 1\n")
    assert violations(root) == [f"{root / 'metrics.py'}:1: module without docstring"]


def test_a_private_path_is_found(tmp_path: Path) -> None:
    home, host = "/" + "root/.cache/x", "https://" + "pypi" + ".org/simple"
    files = {"README.md": f"see {home}", "a/b.py": f"x = '{host}'", "build/c.md": home}
    inside = "/" + "work/x"
    write_tree(tmp_path, files | {"fine.md": f"see ..{inside} and rewrite{inside}"})
    assert text_violations(tmp_path) == [
        f"{tmp_path / 'README.md'}:1: absolute path of one machine",
        f"{tmp_path / 'a/b.py'}:2: host of a package registry",
    ]
