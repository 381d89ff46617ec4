"""Follows what `schedir check` says to do about broken lists, as a user would who has its words
alone: no code of schedir's makes the change that a help line describes.

Lists are broken at random: entries moved, taken to other ranks, added, taken out, renumbered.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import attrs

import schedir
from schedir import Action, Kind, Schedule, Together
from schedir.checker import CHANNELS, Diagnostic, Report, changed
from schedir.ir import NAMES_VERSION, RECEIVES, Entry, parse_action
from schedir.ir.kinds import STAGE_WIDE
from schedir.passes import batch_communication, strip_communication
from tests.built_in import EVERY, variants
from tests.test_check import BASES, naive
from tests.test_random import drawn, scattered

Lists = list[list[list[Action]]]
"""By rank and index, the actions of an entry."""


def lists_of(schedule: Schedule) -> Lists:
    return [
        [list(entry.actions) if isinstance(entry, Together) else [entry] for entry in entries]
        for entries in schedule.actions
    ]


def listed(schedule: Schedule, lists: Lists) -> Schedule:
    entries: list[list[Entry]] = [
        [own[0] if len(own) == 1 else Together(own) for own in entries if own] for entries in lists
    ]
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, entries)


# What a help line says, done.


def _move(lists: Lists, match: re.Match[str]) -> None:
    rank, index, other, target = map(int, match.group(1, 2, 4, 5))
    assert rank == other
    entry = lists[rank][index]
    place = target + (match[3] == "after")
    lists[rank].insert(place, entry)
    del lists[rank][index + (place <= index)]


def _swap(lists: Lists, match: re.Match[str]) -> None:
    rank, one, same, other = map(int, match.groups())
    assert rank == same
    own = lists[rank]
    own[one], own[other] = own[other], own[one]


def _reorder(lists: Lists, match: re.Match[str]) -> None:
    own = lists[int(match[1])]
    slots, order = (list(map(int, re.findall(r"\d+", match[n]))) for n in (2, 3))
    for slot, entry in zip(slots, [own[index] for index in order], strict=True):
        own[slot] = entry


def _add(lists: Lists, match: re.Match[str]) -> None:
    own = lists[int(match[3])]
    own.insert(int(match[4]) + (match[2] == "after"), [parse_action(match[1])])


def _add_alone(lists: Lists, match: re.Match[str]) -> None:
    assert not lists[int(match[2])]
    lists[int(match[2])].append([parse_action(match[1])])


def _remove(lists: Lists, match: re.Match[str]) -> None:
    own, index = lists[int(match[2])], int(match[3])
    own[index].remove(parse_action(match[1]))
    if not own[index]:
        del own[index]


def _write(lists: Lists, match: re.Match[str]) -> None:
    entry = lists[int(match[3])][int(match[4])]
    entry[entry.index(parse_action(match[2]))] = parse_action(match[1])


def _write_one(lists: Lists, match: re.Match[str]) -> None:
    whole, first, second = map(parse_action, match.groups())
    (own,) = (entries for entries in lists if [first] in entries)
    own[own.index([first])] = [whole]
    own.remove([second])


def _as_sent(lists: Lists, match: re.Match[str]) -> None:
    """Each end of the channel is found by where the forwards stand."""
    target, source, same = map(int, match.groups())
    assert source == same
    runs = {
        (action.stage, action.microbatch): rank
        for rank, entries in enumerate(lists)
        for entry in entries
        for action in entry
        if action.kind is Kind.FORWARD
    }

    def peer(action: Action) -> int | None:
        other = action.counterpart
        return None if other is None else runs.get((other.stage, other.microbatch))

    there = {action for entry in lists[target] for action in entry}
    sent = [
        action.counterpart
        for entry in lists[source]
        for action in entry
        if action.kind not in RECEIVES and peer(action) == target and action.counterpart in there
    ]
    following = iter(sent)
    for entry in lists[target]:
        for at, action in enumerate(entry):
            if action in sent:
                receive = next(following)
                assert receive is not None
                entry[at] = receive


_PLACE = r"rank (\d+) #(\d+)"
_WORDS: dict[str, Callable[[Lists, re.Match[str]], None]] = {
    rf"(?:move|post) {_PLACE} (before|after) {_PLACE}": _move,
    rf"swap {_PLACE} and {_PLACE}": _swap,
    r"list rank (\d+) ([#\d ]+) in the order ([#\d ]+)": _reorder,
    rf"add (\S+) (before|after) {_PLACE}": _add,
    r"add (\S+) to rank (\d+)": _add_alone,
    rf"remove (\S+) at {_PLACE}": _remove,
    rf"write (\S+) in place of (\S+) at {_PLACE}": _write,
    r"write (\S+) in place of (\S+) and (\S+)": _write_one,
    r"order rank (\d+)'s receives from rank (\d+) as rank (\d+) sends them": _as_sent,
}


def followed(schedule: Schedule, words: str) -> Schedule:
    """The schedule with what a help line says done; of alternatives, the first."""
    words = words.removeprefix(f"{NO_MOVE}; ")
    if words == "leave the communication out, and schedir inserts it":
        return strip_communication(schedule)
    if words.endswith("as batches, as schedir.batch_communication does"):
        return batch_communication(schedule)
    lists = lists_of(schedule)
    first = words.removesuffix(", in the list as it was given").partition(", or ")[0]
    for part in first.split(", and "):
        found = [(m, do) for form, do in _WORDS.items() if (m := re.fullmatch(form, part))]
        assert len(found) == 1, part
        for match, do in found:
            do(lists, match)
    return listed(schedule, lists)


# What is followed, and how often.

NO_MOVE = "none of the moves tried fixes it"
TIED = "list the OPTIM_STEPs of tied stages after the last backward of all of them"
LIMITS = {"S403", "S404", "S405"}  # which are the user's own: no single change keeps them


@attrs.frozen
class Case:
    """A broken list, what it was made of, and how it is judged."""

    right: Schedule
    wrong: Schedule
    channel: str
    options: dict[str, Any]
    faults: int

    def report(self, schedule: Schedule) -> Report:
        return schedir.check(schedule, self.channel, **self.options)


def about(finding: Diagnostic) -> tuple[Any, ...]:
    """What a finding is about, wherever it stands."""
    if finding.code == "S301":
        return finding.code, frozenset((p.rank, p.action) for p in finding.locations)
    if finding.code == "S303":
        return finding.code, *(place.rank for place in finding.locations)
    if finding.code == "S207":
        return finding.code, finding.message
    return finding.code, *((place.rank, place.action) for place in finding.locations[:1])


@attrs.define
class Followed:
    """How following the help of a case went: the codes that it went through, the list that it led
    to, and the one whose help was no more (None where the list is right in the end)."""

    codes: list[str]
    last: Schedule
    helpless: str | None = None


def follow(case: Case, chance: random.Random, *, first: bool = True) -> Followed:
    """Follow the first error's help, or any one's, until there is no error. Raises AssertionError
    where a fault is still there after its help was followed, or a list comes again."""
    here, report = case.wrong, case.report(case.wrong)
    seen = {here}
    codes: list[str] = []
    while not report.ok:
        finding = report.errors[0] if first else chance.choice(report.errors)
        words = finding.help
        if finding.change is None or words is None:
            assert words in (NO_MOVE, TIED) or finding.code in LIMITS, words
            return Followed(codes, here, finding.code)
        codes.append(finding.code)
        there = followed(here, words)
        assert there == changed(here, finding.change), (words, schedir.dumps(here))
        was, report = report, case.report(there)
        told = (codes, finding.message, words, schedir.dumps(here))
        before, after = (Counter(map(about, each.errors)) for each in (was, report))
        assert after[about(finding)] < before[about(finding)], told
        assert there not in seen, told
        assert len(codes) < 100, told
        seen.add(there)
        here = there
    return Followed(codes, here)


# Lists that are right, and broken.


@cache
def _right() -> list[Schedule]:
    found = [*BASES]
    for name, shape in product(EVERY, ((2, 4), (3, 3))):
        for parameters in variants(name):
            with suppress(schedir.SchedirError):  # it refuses the shape
                built = schedir.build(name, ranks=shape[0], microbatches=shape[1], **parameters)
                found += [built] * (sum(map(len, built.flat)) <= 150)
    return [base for base in found if schedir.check(base).ok]


def right(chance: random.Random) -> Schedule:
    """A list that is right: built in, drawn at random, complete or compute-only, in batches."""
    if chance.random() < 0.5:
        base = chance.choice(_right())
    else:
        base = schedir.insert_communication(drawn(chance))
    if base.stages > 1 and base.is_complete and not base.columns.together:
        how = chance.randrange(5)
        if how == 0:
            base = strip_communication(base)
        elif how == 1:
            base = batch_communication(naive(base) if chance.random() < 0.5 else base)
        elif how == 2:
            other = scattered(base, chance)
            base = other if schedir.check(other).ok else base
    return base


def broken(base: Schedule, chance: random.Random) -> Schedule:
    """One fault: an entry moved, within its list or to another rank, added once more, taken out, or
    written otherwise."""
    lists = lists_of(base)
    if not any(lists):
        return base
    rank = chance.choice([r for r, own in enumerate(lists) if own])
    own = lists[rank]
    index = chance.randrange(len(own))
    wide = [i for i, entry in enumerate(own) if entry[0].microbatch is None]
    if wide and chance.random() < 0.3:
        index = chance.choice(wide)
    part = chance.randrange(len(own[index]))
    action = own[index][part]
    how = chance.choice(["move", "swap", "add", "remove", "away", "part", "renumber", "version"])
    if how == "move":
        entry = own.pop(index)
        own.insert(chance.randint(0, len(own)), entry)
    elif how == "swap":
        other = chance.randrange(len(own))
        own[index], own[other] = own[other], own[index]
    elif how == "add":
        to = lists[chance.randrange(len(lists))] if chance.random() < 0.3 else own
        made = action
        if chance.random() < 0.5:
            kind = chance.choice(list(Kind))
            made = Action(
                kind, action.stage, None if kind in STAGE_WIDE else action.microbatch or 0
            )
        to.insert(chance.randint(0, len(to)), [made])
    elif how == "remove":
        del own[index]
    elif how == "part":
        del own[index][part]
    elif how == "away":
        entry = own.pop(index)
        other_list = lists[chance.randrange(len(lists))]
        other_list.insert(chance.randint(0, len(other_list)), entry)
    elif how == "renumber":
        if action.microbatch is None or chance.random() < 0.5:
            action = attrs.evolve(action, stage=chance.randrange(base.stages + 1))
        else:
            action = attrs.evolve(action, microbatch=chance.randrange(base.microbatches + 1))
        own[index][part] = action
    elif how == "version" and action.kind in NAMES_VERSION:
        own[index][part] = attrs.evolve(action, version=chance.randrange(3))
    return listed(base, lists)


def a_case(chance: random.Random) -> Case:
    """A right list with one to three faults, judged under any channel model, with ties or
    without."""
    base = right(chance)
    channel = chance.choice(CHANNELS)
    options: dict[str, Any] = {}
    if base.stages > 1 and chance.random() < 0.25:
        options["ties"] = [tuple(sorted(chance.sample(range(base.stages), 2)))]
    if not schedir.check(base, channel, **options).ok:
        channel, options = "async", {}
    while True:
        wrong, faults = base, chance.choice([1, 1, 2, 3])
        try:
            for _ in range(faults):
                wrong = broken(wrong, chance)
        except ValueError:  # what cannot stand in one entry
            continue
        return Case(base, wrong, channel, options, faults)
