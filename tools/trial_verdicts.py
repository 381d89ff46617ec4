"""Compares this tree's verdicts, words, times and memory with another commit's, on random lists.

    python tools/trial_verdicts.py COMMIT [--lists 4000] [--seed 0] [--show 3]

A list is built in or random, with up to three faults, and goes as text to one process for each code
base. The tool prints how many lists of each sort were drawn, how many answers of each sort differ,
and the first few differences in full. The exit status is 1 if there is a difference that
`EXPLAINED` does not have.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from at_commit import ROOT, checkout, environment

sys.path.insert(0, str(ROOT))
import schedir
from schedir import Schedule
from schedir.passes import strip_communication
from tests.built_in import EVERY, variants
from tests.joined import joined
from tests.test_random import drawn, scattered
from tests.test_several_steps import drawn_with_steps
from tests.test_ties import some_ties, updating

Lists: TypeAlias = list[list[list[str]]]
"""By rank and index, the tokens of an entry."""
Answers: TypeAlias = dict[str, Any]
"""What a code base says of a list, by what it is about."""

KINDS = ("F", "B", "I", "W", "R", "SEND_ACT", "RECV_ACT", "SEND_GRAD", "RECV_GRAD")
STAGE_WIDE = ("REDUCE_GRAD", "OPTIM_STEP")
TOKEN = re.compile(r"(\d+)([A-Z_]+)(\d+)?(?:@(\d+))?")
MOST_ENTRIES = 200


@attrs.frozen
class Case:
    """A list as text, and how it is judged and run; `faults` says how many it was given."""

    text: str
    options: dict[str, Any]
    costs: dict[str, Any]
    durations: list[tuple[int, int, float]]
    faults: int


# Right lists.


@cache
def built(name: str, ranks: int, microbatches: int, variant: int) -> Schedule | None:
    """A built-in schedule, None where it rejects the shape or is long."""
    of_it = variants(name)
    try:
        found = schedir.build(
            name, ranks=ranks, microbatches=microbatches, **of_it[variant % len(of_it)]
        )
    except schedir.SchedirError:
        return None
    return found if len(found.columns) <= MOST_ENTRIES else None


def right(chance: random.Random) -> tuple[Schedule, list[tuple[int, ...]]]:
    """A list without faults, and stages of it that share parameters."""
    ties: list[tuple[int, ...]] = []
    how = chance.randrange(8)
    if how == 0:
        base, ties = updating(chance)
    elif how == 1:
        base = drawn_with_steps(chance)
    elif how < 5:
        base = drawn(chance)
    else:
        found = None
        while found is None:
            shape = chance.randint(1, 4), chance.randint(1, 6), chance.randrange(8)
            found = built(chance.choice([*EVERY]), *shape)
        base = found
    if base.ranks == 1 and chance.random() < 0.8:
        return right(chance)
    if not ties and chance.random() < 0.2:
        ties = some_ties(chance, base.stages)
    if chance.random() < 0.2:
        base = schedir.recompute(base, {s for s in range(base.stages) if chance.random() < 0.5})
    if chance.random() < 0.2:
        base = schedir.append_steps(base)
    if how < 5 and chance.random() < 0.3:
        base = joined(base, chance, 0.5)  # its pairs
    return formed(base, chance), ties


def formed(base: Schedule, chance: random.Random) -> Schedule:
    """The list with its communication in some form, or without."""
    form = chance.choice(["compute", "complete", "batched", "scattered", "joined", "joined"])
    if form == "compute":
        return strip_communication(base)
    try:
        complete = schedir.insert_communication(base)
    except schedir.SchedirError:  # pairs may wait for each other
        return base
    if form == "batched":
        return schedir.batch_communication(complete)
    if form == "complete":
        return complete
    complete = scattered(complete, chance)
    return joined(complete, chance, 0.5) if form == "joined" else complete


# Faults.


def lists_of(text: str) -> tuple[str, Lists]:
    """The head of a schedule's text, and its lists."""
    head, *rows = re.split(r"^rank \d+:", text, flags=re.MULTILINE)
    return head, [[entry.strip("()").split(";") for entry in row.split()] for row in rows]


def text_of(head: str, lists: Lists) -> str:
    rows = (
        " ".join(own[0] if len(own) == 1 else f"({';'.join(own)})" for own in entries if own)
        for entries in lists
    )
    return head + "".join(f"rank {rank}: {row}\n" for rank, row in enumerate(rows))


def at_fault(lists: Lists, chance: random.Random) -> None:
    """Make one fault."""
    own = lists[chance.choice([rank for rank, entries in enumerate(lists) if entries])]
    index = chance.randrange(len(own))
    wide = [i for i, entry in enumerate(own) if entry[0].endswith(STAGE_WIDE)]
    if wide and chance.random() < 0.2:
        index = chance.choice(wide)
    entry = own[index]
    part = chance.randrange(len(entry))
    other = chance.choice(lists)
    fault = chance.choice(FAULTS)
    if fault == "drop":
        del entry[part]
    elif fault == "drop entry":
        del own[index]
    elif fault == "double":
        target = other if chance.random() < 0.3 else own
        target.insert(chance.randint(0, len(target)), [entry[part]])
    elif fault == "move":
        own.insert(chance.randrange(len(own)), own.pop(index))
    elif fault == "move a little":
        own.insert(max(0, index + chance.choice([-2, -1, 1, 2])), own.pop(index))
    elif fault == "swap":
        second = chance.randrange(len(own))
        own[index], own[second] = own[second], own[index]
    elif fault == "to another rank":
        other.insert(chance.randint(0, len(other)), own.pop(index))
    elif fault == "renumber":
        entry[part] = renumbered(entry[part], chance)
    elif fault == "split entry":
        own[index : index + 1] = [[token] for token in entry]
    elif fault == "join entries":
        own[index : index + 2] = [[token for both in own[index : index + 2] for token in both]]
    elif fault == "split backward":
        backwards = [i for i, each in enumerate(own) if re.fullmatch(r"\d+B\d+", each[0])]
        if backwards:
            index = chance.choice(backwards)
            token = own[index][0]
            own[index][0] = token.replace("B", "I")
            own.insert(chance.randint(index, len(own)), [token.replace("B", "W")])
    elif fault == "run again":
        own.insert(chance.randint(0, len(own)), [re.sub("[A-Z_]+", "R", entry[part])])


FAULTS = (
    *("drop", "drop entry", "double", "move", "move a little", "swap", "to another rank"),
    *("renumber", "renumber", "split entry", "join entries", "split backward", "run again"),
)


def renumbered(token: str, chance: random.Random) -> str:
    """The action with another stage, microbatch, version or kind."""
    match = TOKEN.fullmatch(token)
    assert match is not None, token
    stage, kind, microbatch, version = match.groups()
    what = chance.choice(["stage", "microbatch", "version", "kind", "kind"])
    if what == "stage":
        stage = chance.randrange(int(stage) + 2)
    elif what == "kind":
        kind = chance.choice(KINDS + STAGE_WIDE)
        microbatch, version = (None if kind in STAGE_WIDE else microbatch or 0), None
    elif microbatch is not None and what == "microbatch":
        microbatch = chance.randrange(int(microbatch) + 2)
    elif kind == "F":
        version = chance.randrange(3)
    number = "" if microbatch is None else microbatch
    return f"{stage}{kind}{number}{'' if version is None else f'@{version}'}"


# How they are judged and run.


def some_options(chance: random.Random, ties: list[tuple[int, ...]]) -> dict[str, Any]:
    def maybe(low: int, high: int) -> int | None:
        return chance.randint(low, high) if chance.random() < 0.2 else None

    return {
        "channel": chance.choice(schedir.CHANNELS),
        "max_delay": maybe(0, 2),
        "max_versions": maybe(1, 3),
        "max_activations": maybe(1, 6),
        "held_until": chance.choice(["W", "I"]),
        "ties": ties,
    }


def some_costs(chance: random.Random, stages: int, ranks: int) -> dict[str, Any]:
    """Costs whose sums are exact, so that the order of additions changes nothing; many are 0."""

    def cost() -> float:
        return chance.choice([0, 1, 1, 2, 3, 5]) * scale

    def per_stage(of: Callable[[], float] = cost) -> list[float]:
        return [of() for _ in range(stages)]

    def size() -> float:
        return chance.choice([0, 4, 8, 24])

    scale = chance.choice([1, 1, 0.125])
    links = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    found: dict[str, Any] = {
        **{name: per_stage() for name in ("forward", "backward", "backward_input")},
        **{name: per_stage() for name in ("backward_weight", "reduce_grad", "optim_step")},
        "latency": [(*link, cost()) for link in links],
        "bandwidth": [(*link, chance.choice([1, 2, 4])) for link in links],
        "boundary_bytes": [size() for _ in range(stages - 1)] or 0,
        "activation_bytes": per_stage(size),
        "input_bytes": per_stage(size),
        "weight_bytes": per_stage(size),
        "gradient_bytes": per_stage(size),
        "optimizer_bytes": size(),
    }
    for name, each in (("recompute", cost), ("overlapped", cost), ("deferred_bytes", size)):
        if chance.random() < 0.5:
            found[name] = per_stage(each)
    return found


def case_of(seed: int) -> Case:
    """The case of a seed: the same on every run of one tree."""
    chance = random.Random(seed)
    base, ties = right(chance)
    head, lists = lists_of(schedir.dumps(base))
    faults = chance.choice([0, 0, 1, 1, 2, 3])
    for _ in range(faults):
        if any(lists):
            at_fault(lists, chance)
            lists = [[entry for entry in own if entry] for own in lists]
    places = [(rank, index) for rank, own in enumerate(lists) for index in range(len(own))]
    longer = chance.sample(places, min(len(places), 3))
    return Case(
        text_of(head, lists),
        some_options(chance, ties),
        some_costs(chance, base.stages, base.ranks),
        [(*place, chance.choice([0, 0.5, 7])) for place in longer],
        faults,
    )


def traits(case: Case) -> Iterator[str]:
    """What a case has, to be counted."""
    yield f"faults {case.faults}"
    forms = {
        "batches": r"\(\d+(SEND|RECV)",
        "pairs": r"\(\d+[FBI]\d",
        "replicas": r"^placement.*,",
        "recomputation": r"\dR\d",
        "split backwards": r"\dW\d",
        "named versions": "@",
        "sums": "REDUCE_GRAD",
        "several steps of a stage": r"(\b\d+OPTIM_STEP\b).*\1",
    }
    yield from (name for name, form in forms.items() if re.search(form, case.text, re.MULTILINE))
    yield "communication" if re.search("SEND|RECV", case.text) else "compute alone"
    given = case.options
    yield from ("ties",) * bool(given["ties"])
    yield from ("limits",) * any(given[name] is not None for name in given if name[:4] == "max_")


# The two code bases.


class CodeBase:
    """A process in which one code base answers."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "verdict_run.py")],
            env=environment(self.tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        loaded = self.read()
        if not isinstance(loaded, str) or not Path(loaded).is_relative_to(self.tree):
            raise SystemExit(f"schedir should come from {self.tree}, not {loaded}")

    def ask(self, case: Case) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(attrs.asdict(case)) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """The next answer, None where the process died over it or took too long."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def answer(self) -> Answers:
        found: Answers | None = self.read()
        if found is not None:
            return found
        status = self.process.wait()
        self.start()
        return {"verdict": f"the process ended with status {status}"}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def code_base(tree: Path) -> Iterator[CodeBase]:
    found = CodeBase(tree)
    try:
        yield found
    finally:
        found.end()


# What differs, and why.


def on_one_rank(case: Case) -> set[str]:
    """The stages that live on one rank."""
    (placement,) = re.findall("^placement (.*)$", case.text, re.MULTILINE)
    return {str(s) for s, held in enumerate(placement.split()) if "," not in held}


def summed_alone(case: Case, then: Answers, now: Answers) -> bool:
    """Whether a stage on one rank has sums, of which no change may leave one nothing to sum."""
    return not on_one_rank(case).isdisjoint(re.findall(r"\b(\d+)REDUCE_GRAD", case.text))


def summed_twice(case: Case, then: Answers, now: Answers) -> bool:
    """Whether all that is new are sums that a stage on one rank lists in vain or too early."""
    alone = on_one_rank(case)

    def errors(answers: Answers) -> list[Any]:
        found = answers.get("codes", ())
        return [[code, places] for code, severity, places in found if severity == "error"]

    new = [each for each in errors(now) if each not in errors(then)]
    return bool(new) and all(
        code in ("S208", "S210") and re.search(r"(\d+)REDUCE_GRAD", places[0])[1] in alone  # type: ignore[index]
        for code, places in new
    )


def exposed(case: Case, then: Answers, now: Answers) -> bool:
    """Whether only the lints of communication differ, of which one came in place of three."""
    lints = {"S501", "S502", "S505", "S506"}
    both = [[*answers.get("codes", ())] for answers in (then, now)]
    then_rest, now_rest = ([each for each in own if each[0] not in lints] for own in both)
    return then_rest == now_rest and any(each[0] in lints for own in both for each in own)


def batched(case: Case, then: Answers, now: Answers) -> bool:
    return re.search(r"\(\d+(SEND|RECV)", case.text) is not None


EXPLAINED: tuple[tuple[str, tuple[str, ...], Callable[[Case, Answers, Answers], bool]], ...] = (
    (
        "a stage on one rank sums the same gradients twice, or after its OPTIM_STEP: S208, S210",
        (),
        summed_twice,
    ),
    ("no help leaves a stage on one rank a sum of nothing", ("help",), summed_alone),
    (
        "one lint about communication in the place of three: S506",
        ("codes", "messages", "words", "help"),
        exposed,
    ),
    ("a critical path with batches has no gaps and starts at 0", ("critical path",), batched),
)
"""Differences that are wanted: the reason, the answers that may differ (all where none is named),
and a test of the case. The table is emptied when COMMIT has them too."""


def differing(then: Answers, now: Answers) -> list[str]:
    """What the answers differ in, whole numbers and fractions told apart."""
    return [
        about
        for about in {**then, **now}
        if json.dumps(then.get(about)) != json.dumps(now.get(about))
    ]


def shown(seed: int, case: Case, about: list[str], then: Answers, now: Answers) -> str:
    """A difference in full."""
    lines = [f"seed {seed}, differs in: {', '.join(about)}", case.text.rstrip()]
    lines += [f"options {case.options}", f"costs {case.costs}", f"durations {case.durations}"]
    for each in about:
        lines += [f"{each}, then: {then.get(each)}", f"{each}, now:  {now.get(each)}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--lists", type=int, default=4000, help="how many (4000)")
    parser.add_argument("--seed", type=int, default=0, help="the first list's (0)")
    parser.add_argument("--show", type=int, default=3, help="so many differences in full (3)")
    args = parser.parse_args()
    drawn_with: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    differ: Counter[str] = Counter()
    explained: Counter[str] = Counter()
    lists = 0
    with (
        checkout(args.commit) as tree,
        code_base(tree) as before,
        code_base(ROOT) as after,
    ):
        for seed in range(args.seed, args.seed + args.lists):
            case = case_of(seed)
            for each in (before, after):
                each.ask(case)
            then, now = before.answer(), after.answer()
            found = {code for code, *_ in then.get("codes", ())}
            codes.update(found or {"loading" if "loading" in then else "nothing"})
            codes["crash"] += '"crash: ' in json.dumps(now)
            drawn_with.update([*traits(case), "right" if then.get("verdict") is True else "wrong"])
            about = differing(then, now)
            for reason, answers, explains in EXPLAINED:
                if set(about) & set(answers or about) and explains(case, then, now):
                    about = [each for each in about if answers and each not in answers]
                    explained[reason] += 1
            if about:
                lists += 1
                differ.update(about)
                if lists <= args.show:
                    print(shown(seed, case, about, then, now), end="\n\n", flush=True)
    for title, counts in (("drawn", drawn_with), ("found", codes), ("explained", explained)):
        print(f"{title}: {', '.join(f'{what} {many}' for what, many in sorted(counts.items()))}")
    print(f"{lists} of {args.lists} lists differ", dict(differ.most_common()) or "")
    return int(lists > 0)


if __name__ == "__main__":
    sys.exit(main())
