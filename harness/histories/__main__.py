"""`python -m harness.histories FILE...`: judge recorded histories.  Exit status 1 if one is not right."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.histories.checker import check
from harness.histories.history import read


def main(argv: Sequence[str] | None = None) -> int:
    """Print what each shows."""
    parser = argparse.ArgumentParser(prog="python -m harness.histories", description=__doc__)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    right = True
    for file in parser.parse_args(argv).files:
        verdict = check(read(file))
        right &= not verdict.findings
        print(f"{file}: {json.dumps(verdict.summary())}")
        for finding in verdict.findings:
            print(finding)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
