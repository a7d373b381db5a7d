"""The rules of layout as functions over sources: who imports whom, sizes, docstrings, paths.

`ARCHITECTURE.md` shows the rooms; `ROOMS` below is the same as a table. A new module or folder
needs a row there, so that its place is a decision. `test_layout_rules.py` runs them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FILE_LINES_LIMIT = 400
FUNCTION_LINES_LIMIT = 70  # from `def` to its last line, docstring included

# A room may import the rooms in its row, never another. Rows from the bottom to the top; "" is
# `hsswap` itself, the public API, which only rooms above the API may import.
PLAIN = (
    *("bf16", "checksum", "codec", "config", "errors", "metrics"),
    *("dims", "e4m3", "fitting", "forked", "halves", "plain_file", "predictor_config", "rope"),
    *("top_k_config", "validation", "whole"),
)
CONTRACTS = (
    *("driver.base", "driver.tensor"),
    *("driver.codes_operations", "driver.operations", "driver.round_operations"),
)
DECIDING = ("predictor", "resident_table", "tiers")
WAITING = ("loads", "loop", "plans", "pools", "prefetch")
# What an engine holds, and the parts it is made of.
API = (
    "sync",
    "sequence",
    "swap",
    "appending",
    "arguments",
    "attending",
    "batch_table",
    "batching",
    "captured",
    "captured_layer",
    "captured_top_k",
    "capturing",
    "carving",
    "calibrating",
    "coding",
    "diagnostics",
    "exact",
    "repeating",
    "forking",
    "late",
    "lessons",
    "looking_ahead",
    "reserving",
    "reshaping",
    "retiring",
    "reusing",
    "ring",
    "named_calls",
    "named_blocks",
    "named_ids",
    "sequence_state",
    "swap_state",
    "topk",
    "writeback",
)
BELOW_API = (*PLAIN, "io", "driver", "ptx", *DECIDING, *WAITING)
COMMANDS = ("__main__", "bench", "commands")
EVERYTHING = ("", *BELOW_API, *API, "rounds", "models", *COMMANDS)

ROOMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PLAIN, PLAIN),
    "io": (*PLAIN, "io"),  # never driver: they meet in a protocol that io.base defines
    "ptx": (*PLAIN, "ptx"),
    "driver": (*PLAIN, "ptx", "driver"),  # ptx is the table of kernels that driver compiles
    "predictor": (*PLAIN, *CONTRACTS, "predictor"),
    "resident_table": (*PLAIN, *CONTRACTS, "tiers"),
    "tiers": (*PLAIN, *CONTRACTS, "tiers"),
    "loop": ("forked", "loop"),
    "pools": (*PLAIN, *CONTRACTS, *DECIDING, "pools"),
    "loads": (*PLAIN, *CONTRACTS, *DECIDING, "pools"),
    "plans": (*PLAIN, *CONTRACTS, *DECIDING, "loads", "pools"),
    "prefetch": (*PLAIN, *CONTRACTS, *DECIDING, "io", *WAITING),
    **dict.fromkeys(API, (*BELOW_API, *API)),
    "rounds": (*BELOW_API, *API, "rounds"),
    # As an engine: the public API, nothing inside.
    "models": ("", *PLAIN, *API, "rounds", "models"),
    "integrations": ("", *PLAIN, *API, "models", "integrations"),
    **dict.fromkeys(COMMANDS, EVERYTHING),
    "": EVERYTHING,
}

# Packages that only the rooms named may import, so that a host without them runs all the rest.
ONLY_IN = {
    "kvikio": ("io.gds_kvikio", "bench.io_kvikio"),
    "cuda": ("driver",),
    "transformers": ("integrations.transformers", "bench.decode_torch"),
}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def is_within(name: str, room: str) -> bool:
    """Whether the dotted name is the room or lies inside it."""
    return name == room or (room != "" and name.startswith(room + "."))


@dataclass(frozen=True)
class Module:
    """One parsed source file. ``name`` is dotted and relative to the package; "" is its root."""

    path: Path
    name: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def resolve(self, node: ast.ImportFrom, package: str) -> str:
        """The absolute module that ``from ... import`` names."""
        if node.level == 0:
            return node.module or ""
        parts = [package, *(self.name.split(".") if self.name else [])]
        up = node.level - (self.path.name == "__init__.py")
        return ".".join(parts[: len(parts) - up] + ([node.module] if node.module else []))


def read_package(root: Path) -> list[Module]:
    """Every Python file of the package at ``root``."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(path, name, path.read_text()))
    return modules


def imported_names(module: Module, package: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = module.resolve(node, package)
                for alias in node.names:
                    # `from hsswap import errors` imports a module, `from hsswap import X` does not.
                    deeper = f"{base}.{alias.name}"
                    yield node.lineno, deeper if deeper in names else base
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def import_violations(modules: list[Module], package: str) -> Iterator[str]:
    """Imports against the direction of the rooms, and foreign packages in the wrong room."""
    names = {f"{package}.{module.name}".rstrip(".") for module in modules}
    for module in modules:
        room = module.name.split(".")[0]
        if room not in ROOMS:
            yield f"{module.path}:1: no room: give {module.name!r} a row in ROOMS"
            continue
        for line, target in imported_names(module, package, names):
            where = f"{module.path}:{line}"
            top = target.split(".")[0]
            if top == package:
                inner = target[len(package) + 1 :]
                if not any(is_within(inner, allowed) for allowed in ROOMS[room]):
                    yield f"{where}: room {room!r} must not import {target}"
            elif not any(is_within(module.name, home) for home in ONLY_IN.get(top, (module.name,))):
                yield f"{where}: only {', '.join(ONLY_IN[top])} may import {top}"


def size_violations(root: Path, modules: list[Module]) -> Iterator[str]:
    """Files and functions that are too long; kernels' files count too."""
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".py", ".cu", ".cuh"}):
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES_LIMIT:
            yield f"{path}:1: {lines} lines, at most {FILE_LINES_LIMIT}"
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, FunctionNode):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_LIMIT:
                    yield (
                        f"{module.path}:{node.lineno}: function {node.name} has {lines} lines,"
                        f" at most {FUNCTION_LINES_LIMIT}"
                    )


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under if, try and with too."""
    for node in body:
        yield node
        if not isinstance(node, FunctionNode | ast.ClassDef):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    yield from statements([child])
                elif isinstance(child, ast.ExceptHandler):
                    yield from statements(child.body)


def last_name(node: ast.expr) -> str:
    """``C`` of ``C``, ``a.b.C``, ``C[int]`` and ``C(...)``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=value):
            return last_name(value)
    return ""


class DocstringRule:
    """Every public module, class, function and method says what it is.

    Exempt: private and dunder names, setters and overloads, and a method that a base class in the
    package documents under the same name (Python 3.11 has no ``typing.override`` to ask for).
    """

    def __init__(self, modules: list[Module]) -> None:
        self._modules = modules
        # By bare name: two classes of one name share an entry, which can only exempt too much.
        self._bases: dict[str, set[str]] = {}
        self._documented: dict[str, set[str]] = {}
        for module in modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    bases = self._bases.setdefault(node.name, set())
                    bases.update(last_name(base) for base in node.bases)
                    documented = self._documented.setdefault(node.name, set())
                    documented.update(
                        method.name
                        for method in statements(node.body)
                        if isinstance(method, FunctionNode) and ast.get_docstring(method)
                    )

    def violations(self) -> Iterator[str]:
        """One line for each missing docstring."""
        for module in self._modules:
            private = any(re.match(r"_(?!_)", part) for part in module.name.split("."))
            if not private:
                if not ast.get_docstring(module.tree):
                    yield f"{module.path}:1: module without docstring"
                yield from self._in_body(module, module.tree.body, owner=None)

    def _in_body(
        self, module: Module, body: list[ast.stmt], owner: ast.ClassDef | None
    ) -> Iterator[str]:
        for node in statements(body):
            if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and not self._is_exempt(node, owner):
                title = f"{owner.name}.{node.name}" if owner else node.name
                yield f"{module.path}:{node.lineno}: {title} without docstring"
            if isinstance(node, ast.ClassDef):
                yield from self._in_body(module, node.body, node)

    def _is_exempt(self, node: FunctionNode | ast.ClassDef, owner: ast.ClassDef | None) -> bool:
        marks = {last_name(mark) for mark in node.decorator_list}
        if marks & {"setter", "deleter", "overload", "override"}:
            return True
        if owner is None or isinstance(node, ast.ClassDef):
            return False
        seen: set[str] = set()
        todo = {last_name(base) for base in owner.bases}
        while todo:
            name = todo.pop()
            seen.add(name)
            if node.name in self._documented.get(name, ()):
                return True
            todo |= self._bases.get(name, set()) - seen
        return False


def violations(root: Path) -> list[str]:
    """Everything in the package at ``root`` that is against a rule, as ``file:line: what``."""
    modules = read_package(root)
    return [
        *import_violations(modules, root.name),
        *size_violations(root, modules),
        *DocstringRule(modules).violations(),
    ]


# Written in pieces, because this file is searched as well.
PRIVATE_PATH = re.compile(r"(?<![\w.~-])/(?:" + r"work|root|home/\w+)/")
REGISTRY = re.compile(
    "|".join(["pypi" + r"\.org", "python" + "hosted", "npm" + r"js\.(?:com|org)"])
)


def project_files(root: Path) -> Iterator[Path]:
    """What git could track: no caches, builds or environments, which have these names or a dot."""
    for path in sorted(root.iterdir()):
        if path.name in {"build", "dist", "__pycache__"} or path.suffix == ".egg-info":
            continue
        if path.name.startswith(".") and path.name not in {".ci", ".gitignore", ".clang-format"}:
            continue
        if path.is_dir():
            yield from project_files(path)
        else:
            yield path


def text_violations(root: Path) -> list[str]:
    """Lines with a path of one person's machine, or the host of a registry."""
    found = []
    for path in project_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture or another binary file
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if PRIVATE_PATH.search(line):
                found.append(f"{path}:{number}: absolute path of one machine")
            if REGISTRY.search(line):
                found.append(f"{path}:{number}: host of a package registry")
    return found
