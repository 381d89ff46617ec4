"""Follows the help lines of many broken lists to a right list, and counts the rules that it met.

    python -m tools.check_help 10000 [--from 0]

It prints a line, with the seed, for each list that the help does not lead to a right one.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from tests.following import a_case, follow
from tests.oracle import happens
from tests.test_help import updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lists", type=int, help="how many to break")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (0)")
    args = parser.parse_args()
    reached: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.lists):
        chance = random.Random(seed)
        case = a_case(chance)
        try:
            led = follow(case, chance, first=bool(seed % 3))
        except AssertionError as error:
            ends["untrue"] += 1
            print(f"{seed}: untrue: {error}", flush=True)
            continue
        reached.update(led.codes)
        end = "right"
        if led.helpless is not None:
            end = f"no mend known for {led.helpless}"
        else:
            complete, ties = case.report(led.last).proved(), case.options.get("ties", ())
            if happens(complete, case.channel, ties=ties) != "completes":
                end = "wrong"
            elif led.codes and case.faults == 1 and updates(led.last) != updates(case.right):
                once = set(updates(case.right).values()) == {1}
                end = "other updates" if once else "other updates of several"
        ends[end] += 1
        if end != "right":
            print(f"{seed}: {end}, after {' '.join(led.codes)}", flush=True)
    print(", ".join(f"{end}: {many}" for end, many in ends.most_common()))
    print(", ".join(f"{code} {many}" for code, many in sorted(reached.items())))


if __name__ == "__main__":
    main()
