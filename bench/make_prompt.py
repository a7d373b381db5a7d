"""Write a prompt of real prose that every machine has: the language reference in pydoc_data.topics.

The text differs a little between Python versions; a run to be compared names its version.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics

# Mostly prose, where the alphabet's first topics are mostly grammar. The rest follows by name.
FIRST_TOPICS = ("objects", "naming", "exceptions", "execmodel")


def reference_text() -> str:
    """All topics of ``pydoc_data.topics``, in an order that does not depend on the dictionary."""
    first = [name for name in FIRST_TOPICS if name in topics]
    rest = sorted(set(topics) - set(first))
    return "\n\n".join(topics[name].strip() for name in first + rest)


def main(arguments: list[str] | None = None) -> int:
    """Write the first ``--characters`` to ``--out``; exits with 2 if there are not so many."""
    parser = argparse.ArgumentParser(
        description="Write the first N characters of pydoc_data.topics."
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
