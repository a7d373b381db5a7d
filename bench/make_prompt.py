"""Write a prompt of real prose that every machine has: the language reference in pydoc_data.topics.

The text differs a little between Python versions; a run to be compared names its version.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hsswap.bench.predictor_contexts import reference_text


def main(arguments: list[str] | None = None) -> int:
    """Write the first ``--characters`` to ``--out``; exits with 2 if there are not so many."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Write the first N characters of pydoc_data.topics."
    )
    parser.add_argument("--characters", type=int, required=True, help="how many, 1 or more")
    parser.add_argument("--out", type=Path, required=True, help="the file to write (UTF-8)")
    options = parser.parse_args(arguments)

    text = reference_text()
    if not 1 <= options.characters <= len(text):
        parser.error(f"--characters must be 1 to {len(text)}, got {options.characters}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text[: options.characters], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
