"""A basis in a file: what was kept comes back, and what is no such file is as good as none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsswap.codec import HeadCodec
from hsswap.predictor.codes import Learned
from hsswap.predictor.keeping import load_basis, save_basis
from hsswap.predictor.stand_in import StandIn

KEY = '{"format": 2}'
RANDOM = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def learned() -> Learned:
    """Two KV heads of two query heads each."""
    bits = np.full(4, 4, np.uint8)
    codecs = tuple(HeadCodec(draw(8, 4), draw(4), draw(8, 4), draw(8), bits) for _ in "ab")
    return Learned(codecs, tuple(StandIn(draw(2), draw(2, 8)) for _ in "ab"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the file is."""
    save_basis(tmp_path, KEY, learned())
    return tmp_path / "predictor-basis.npz"


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    (tmp_path / "predictor-basis.part").write_bytes(b"of a process that was ended here")
    kept = learned()
    save_basis(tmp_path, KEY, kept)
    assert os.listdir(tmp_path) == ["predictor-basis.npz"]
    found = load_basis(tmp_path, KEY)
    assert found is not None
    for one, other in zip(kept.codecs, found.codecs, strict=True):
        for name in ("encode", "bias", "query", "centre", "bits"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for own, others in zip(kept.stand_ins, found.stand_ins, strict=True):
        np.testing.assert_array_equal(own.scale, others.scale)
        np.testing.assert_array_equal(own.value, others.value)
    assert load_basis(tmp_path, KEY + " ") is None


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 200])
def test_a_file_that_was_cut_short(place: Path, nbytes: int) -> None:
    place.write_bytes(place.read_bytes()[:nbytes])
    assert load_basis(place.parent, KEY) is None
    place.write_bytes(bytes(nbytes))  # as a file system leaves it that lost the power
    assert load_basis(place.parent, KEY) is None


def test_every_byte_counts(place: Path) -> None:
    good = place.read_bytes()
    for at in range(0, len(good), 97):
        place.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert load_basis(place.parent, KEY) is None


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: None],
    ids=["folder", "pipe", "link", "nothing"],
)
def test_what_is_no_file(place: Path, make: Callable[[Path], None]) -> None:
    place.unlink()
    make(place)
    assert load_basis(place.parent, KEY) is None
