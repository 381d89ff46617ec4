"""Prints the answers of one code base about schedules, for `trial_verdicts.py`.

Each line of stdin has a schedule and how to judge it, and the answers go to stdout, as JSON.
PYTHONPATH names the code base, and the first line of output its folder.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import schedir

LIMIT = 120
"""Seconds for one schedule."""


def asked(question: Callable[[], Any]) -> Any:
    """The answer to a question, or the error that it ends in."""
    try:
        return question()
    except schedir.SchedirError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # a crash is an answer: the other code base may not have it
        return f"crash: {error!r}"


def judged(schedule: schedir.Schedule, options: dict[str, Any]) -> dict[str, Any]:
    """What `check` says."""
    report = schedir.check(schedule, **options)
    found = report.diagnostics
    return {
        "verdict": report.ok,
        "codes": [(each.code, each.severity, list(map(str, each.locations))) for each in found],
        "messages": [each.headline for each in found],
        "help": [(each.help, None if each.change is None else str(each.change)) for each in found],
        "words": [
            (each.labels, each.notes, each.trace, list(map(str, each.excerpts))) for each in found
        ],
        "clean channels": report.clean_channels,
        "completed list": None if report.schedule is None else schedir.dumps(report.schedule),
    }


def simulated(*arguments: Any, **options: Any) -> dict[str, Any]:
    """What `simulate` says."""
    line = schedir.simulate(*arguments, **options)
    return {
        "times": (line.starts.tolist(), line.ends.tolist(), line.makespan),
        "busy": [(rank.busy, rank.idle, rank.span) for rank in line.ranks],
        "activations": [rank.peak_activations for rank in line.ranks],
        "versions": [rank.weight_versions for rank in line.ranks],
        "bytes": [rank.peak_bytes for rank in line.ranks],
        "idle": [
            [(i.start, i.end, i.cause, i.entry, i.blamed, i.transfer, i.root) for i in rank]
            for rank in line.idle
        ],
        "critical path": line.critical_path,
    }


def answers(case: dict[str, Any]) -> dict[str, Any]:
    """By what they are about, everything that the code base says of a schedule."""
    text, options = case["text"], case["options"]
    schedule = asked(lambda: schedir.loads(text))
    if isinstance(schedule, str):
        return {"loading": schedule}
    told = asked(lambda: judged(schedule, options))
    found: dict[str, Any] = told if isinstance(told, dict) else {"verdict": told}
    found["receives ahead"] = asked(
        lambda: schedir.dumps(
            schedir.advance_receives(schedule, options["channel"], ties=options["ties"])
        )
    )
    given: dict[str, Any] = dict(case["costs"])
    for by_link in ("latency", "bandwidth"):
        given[by_link] = {(source, target): cost for source, target, cost in given[by_link]}
    costs = schedir.CostModel(**given)
    durations = {(rank, index): value for rank, index, value in case["durations"]}
    runs: list[tuple[schedir.CostModel | None, dict[str, Any]]] = [
        (None, {}),
        (costs, {}),
        (costs, {"receives": "listed"}),
        (costs, {"durations": durations}),
    ]
    for number, (model, how) in enumerate(runs):
        # Of every other run nothing is known yet, as nobody has checked the list.
        fresh = schedir.loads(text) if number % 2 else schedule
        line = asked(partial(simulated, fresh, model, **how))
        for about, told in (line if isinstance(line, dict) else {"times": line}).items():
            found.setdefault(about, []).append(told)
    return found


def main() -> None:
    print(json.dumps(schedir.__file__), flush=True)
    for line in sys.stdin:
        signal.alarm(LIMIT)
        print(json.dumps(answers(json.loads(line))), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
