"""The benches of a GPU where there is none: one sentence that says what to do."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hsswap.__main__ import main


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("overlap", "--device host"), ("decode", "--device host"), ("attention", "no other way")],
)
def test_without_a_driver(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ctypes.CDLL

    def without_cuda(library: Any, *more: Any, **options: Any) -> Any:
        if "libcuda" in str(library):
            raise OSError("no such file")
        return load(library, *more, **options)

    monkeypatch.setattr(ctypes, "CDLL", without_cuda)
    assert main(["bench", name]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert "libcuda.so.1" in told.err
    assert remedy in told.err
