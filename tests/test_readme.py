"""The README's code runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code[1]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    tokens, bytes_read = map(int, done.stdout.split())
    assert tokens == 3072
    assert bytes_read > 0
