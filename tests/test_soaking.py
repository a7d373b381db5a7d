"""What long tests note is added up, and only where a folder is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soaking import note


def test_notes_of_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays, but for what is noted anew; a shorter text leaves no rest."""
    monkeypatch.delenv("HSSWAP_SOAK_RESULTS", raising=False)
    note("nothing", count=1)
    monkeypatch.setenv("HSSWAP_SOAK_RESULTS", str(tmp_path / "results"))
    note("some", count=1, long="x" * 999)
    note("some", count=2, other={"a": 3})
    note("some", long="")
    [file] = (tmp_path / "results").iterdir()
    found = json.loads(file.read_text())
    assert file.name == "soak-some.json"
    assert found.pop("machine")["kernel"]
    assert found == {"count": 2, "long": "", "other": {"a": 3}}
