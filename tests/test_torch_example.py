"""The example of an engine in torch is right about its own outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.running import PROJECT

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("device", "tokens"), [("cpu", 1536), pytest.param("cuda:0", 4608, marks=pytest.mark.gpu)]
)
async def test_outputs_are_torchs_own(device: str, tokens: int, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "torch_engine", PROJECT / "examples" / "torch_engine.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    store = tmp_path / "store"
    error = await example.run(device, tokens, 3, str(store))
    assert 0 < error < 2**-8
    assert not store.exists()
