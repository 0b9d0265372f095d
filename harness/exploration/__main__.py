"""`python -m harness.exploration`: exhausts worlds and says what it has counted.

Exit status: 0 when nothing was violated and every planted defect was found, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys

from harness.exploration.defects import DEFECTS
from harness.exploration.search import TooLarge, explore
from harness.exploration.world import Rules
from harness.exploration.worlds import LARGE, SMALL


def main(argv: list[str] | None = None) -> int:
    """Explore what was asked for, one world after the other."""
    known = {world.name: world for world in (*SMALL, *LARGE)}
    asking = argparse.ArgumentParser(prog="python -m harness.exploration", description=__doc__.splitlines()[0])
    asking.add_argument("--world", action="append", choices=sorted(known), help="this one (may be given again)")
    asking.add_argument("--large", action="store_true", help="the large ones as well: minutes each, and gigabytes")
    asking.add_argument("--defects", action="store_true", help="plant each defect and see it found, instead")
    asking.add_argument("--limit", type=int, default=20_000_000, metavar="STATES", help="give up beyond so many")
    asked = asking.parse_args(argv)
    if asked.defects:
        return _defects()
    worlds = [known[name] for name in asked.world] if asked.world else [*SMALL, *(LARGE if asked.large else ())]
    failed = states = 0
    for world in worlds:
        try:
            found = explore(Rules(world), asked.limit)
        except TooLarge as error:
            print(f"{error}: not exhausted", flush=True)
            failed += 1
            continue
        print(found, flush=True)
        states += found.states
        failed += found.counterexample is not None
    print(f"{states:,} states in {len(worlds)} worlds, {failed} of them not shown to hold")
    return int(failed > 0)


def _defects() -> int:
    missed = 0
    for defect in DEFECTS:
        try:
            found = defect.explored().counterexample
        except TooLarge:
            found = None
        right = found is not None and f"({defect.invariant.name})" in found.why
        missed += not right
        print(f"{'found ' if right else 'MISSED'} {defect.name}, in {defect.world}", flush=True)
        print(found if found is not None else "  nothing", flush=True)
    print(f"{len(DEFECTS) - missed} of {len(DEFECTS)} defects found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
