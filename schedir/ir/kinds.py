"""What actions mean, as data: the values that exist, and what each kind of action does to them.

These two tables are the specification. Other modules ask the tables what is alive, what is missing,
what is listed too early, which actions meet, what a step must produce, what an action costs if
nobody says it, how large a value is and which letter stands for a kind. A new kind is a new row
here, with its constructor in `schedir.ir.action`, its words in the docs, and the function that
carries it out (`schedir.runtime.program.compiler`). The oracle of the tests is one more place, on
purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from functools import cache, partial
from itertools import product
from typing import Any, Literal, TypeAlias, get_args

import attrs

On: TypeAlias = Literal["compute", "send", "receive", "group", "copy", "nothing"]
"""What an action occupies: its rank; one end of a channel; the group of ranks that hold its stage,
whose k-th actions meet; its rank's copy engine, which works beside compute; or nothing, as it takes
no time."""
Place: TypeAlias = Literal[
    "any",
    "first",
    "not first",
    "last",
    "not last",
    "summed",
    "not summed",
    "sharded",
    "not sharded",
]
Version: TypeAlias = Literal["", "named", "of home", "newest", "next"]
Size: TypeAlias = Literal[
    "", "boundary before", "boundary after", "input", "activation", "deferred", "weight"
]
"""How many bytes a value has: those of a field of `Sizes`, of the boundary before or after its
stage; "" for a value that has none, or that is counted by rounds (`schedir.simulator.memory`)."""


@attrs.frozen
class Value:
    """A thing that lives on a rank, such as an activation or a gradient.

    `per` says how a value is named. "microbatch": by (stage, microbatch). "round": by the time from
    one update to the next, on each rank of the stage. "version": by the version of the weights, on
    each rank of the stage.

    `link` is (value, number of stages further on). If one rank runs both stages, the two values are
    the same object; otherwise a transfer makes one from the other. `given` values have no maker: at
    the "first" stage, or as version "zero". `many` actions may make the value together, and an
    action may make it `again` after its end. `ended` says when an action must end it: "always"; in
    lists that "step"; in these and if the stage's gradients are "summed"; or "never", because the
    value lives until its last reader (the newest version to the end). A step must make every `goal`
    for every stage and microbatch. `units` is how much the value counts as an activation. `size` is
    how many bytes it has, on its rank's device, or on its `host`.
    """

    word: str
    size: Size
    host: bool = False
    per: Literal["microbatch", "round", "version"] = "microbatch"
    link: tuple[str, int] | None = None
    given: Literal["", "first", "zero"] = ""
    many: bool = False
    again: bool = False
    ended: Literal["always", "step", "step or summed", "never"] = "always"
    goal: bool = False
    units: int = 0


VALUES = {
    "input": Value("input", "boundary before", link=("output", -1), given="first"),
    "output": Value("output", "boundary after"),
    "output gradient": Value(
        "gradient of the output", "boundary after", link=("input gradient", 1)
    ),
    "input gradient": Value("gradient of the input", "boundary before"),
    # That a forward has run at all: what comes back to its stage follows it.
    "ran": Value("forward", "", ended="never"),
    "kept": Value("kept input", "input"),
    "saved": Value("activation", "activation", units=1, again=True),
    "stored": Value("activation on the host", "activation", host=True, again=True),
    "deferred": Value("what the gradient of the weights needs", "deferred", units=1),
    "share": Value("share of the gradient", "", goal=True, ended="never"),
    "gradient": Value("gradient", "", per="round", many=True, ended="step or summed"),
    "sum": Value("summed gradient", "", per="round", ended="step"),
    "weights": Value("weights", "", per="version", given="zero", ended="never"),
    "gathered": Value("gathered weights", "weight", per="version", again=True),
}


@attrs.frozen
class Use:
    """One thing that an action does to a value, at the "start" or the "end" of its entry.

    An action that ends a value reads it as well. `version` is the weight version: the one that the
    action has "named" (else the newest), the one "of home", which the stage's forward of the
    microbatch reads, the "newest", or the "next", which the action makes. `where` limits the use to
    the first or last stage, to stages whose gradients are summed over ranks, or to stages whose
    weights are sharded over them. `beside` limits it to microbatches that also have an action of
    that kind, `without` to microbatches that have none.
    """

    does: Literal["read", "make", "end"]
    value: str
    version: Version = ""
    at: Literal["start", "end"] = "start"
    where: Place = "any"
    beside: str = ""
    without: str = ""


_read, _make, _end = partial(Use, "read"), partial(Use, "make"), partial(Use, "end", at="end")


def _weights(version: Version) -> tuple[Use, Use]:
    """The uses that read the weights of a stage, which are gathered if the stage is sharded."""
    return (
        _read("weights", version, where="not sharded"),
        _read("gathered", version, where="sharded"),
    )


@attrs.frozen
class Meaning:
    """What a kind of action is, and what it does.

    `token` stands for the kind in the text form, and `word` names it for people. `on` is what it
    occupies, and `cost` is how long, in forwards, in the textbook costs, and wherever nothing else
    is known. A copy takes as long as the first value that it makes needs. It runs once per
    microbatch, or per stage if it is `stage_wide`. `uses` is what it does to values. A `home`
    decides which rank runs the stage on the microbatch, and at which version of the weights. A kind
    that `evaluates` is also part of a step that only evaluates. `letter` stands for it in drawings;
    by default it is the first of its token.
    """

    token: str
    word: str
    on: On
    uses: tuple[Use, ...]
    cost: int = 0
    stage_wide: bool = False
    home: bool = False
    evaluates: bool = False
    letter: str = ""


_WEIGHTS = _weights("of home")
_GRADIENT = _make("share", at="end"), _make("gradient", at="end")
_BACK = (
    _end("output gradient"),
    _read("ran"),
    _end("saved"),
    *_WEIGHTS,
    _make("input gradient", where="not first"),
)


class Kind(StrEnum):
    """What an action does; the value is its token in the text form. `meaning` holds the rest.

    >>> import schedir
    >>> schedir.Kind.BACKWARD_INPUT.value
    'I'
    >>> schedir.Kind("I").meaning.word
    'gradient of the input'
    """

    meaning: Meaning

    def __new__(cls, meaning: Any) -> Kind:
        """A row of the table below. (`Kind("F")` finds the member of a token, and makes none.)"""
        kind = str.__new__(cls, meaning.token)
        kind._value_, kind.meaning = meaning.token, meaning
        return kind

    @property
    def letter(self) -> str:
        """The letter that stands for the kind in drawings."""
        return self.meaning.letter or self.value[0]

    @property
    def cost_name(self) -> str:
        """What its cost is called: as a field of CostModel and in files, after `--cost`, among the
        samples of measured runs."""
        return self.name.lower()

    FORWARD = Meaning(
        "F",
        "forward",
        "compute",
        (
            _end("input", at="start"),
            *_weights("named"),
            _make("output", where="not last"),
            _make("output gradient", where="last"),
            _make("ran"),
            _make("saved", without="R"),
            _make("kept", beside="R"),
        ),
        cost=1,
        home=True,
        evaluates=True,
    )
    BACKWARD = Meaning(
        "B",
        "backward",
        "compute",
        (*_BACK, *_GRADIENT),
        cost=2,
    )
    BACKWARD_INPUT = Meaning(
        "I",
        "gradient of the input",
        "compute",
        (*_BACK, _make("deferred", at="end")),
        cost=1,
    )
    BACKWARD_WEIGHT = Meaning(
        "W",
        "gradient of the weights",
        "compute",
        (_read("ran"), _end("deferred"), *_WEIGHTS, *_GRADIENT),
        cost=1,
    )
    RECOMPUTE = Meaning(
        "R",
        "recomputation",
        "compute",
        (_end("kept", at="start"), *_WEIGHTS, _make("saved")),
        cost=1,
    )
    SEND_ACT = Meaning("SEND_ACT", "send of the output", "send", (_end("output"),), evaluates=True)
    RECV_ACT = Meaning(
        "RECV_ACT", "receive of the input", "receive", (_make("input"),), evaluates=True
    )
    SEND_GRAD = Meaning(
        "SEND_GRAD", "send of the input's gradient", "send", (_end("input gradient"),)
    )
    RECV_GRAD = Meaning(
        "RECV_GRAD", "receive of the output's gradient", "receive", (_make("output gradient"),)
    )
    OFFLOAD = Meaning(
        "OFFLOAD",
        "copy of the activation to the host",
        "copy",
        (_end("saved"), _make("stored", at="end")),
        letter=">",
    )
    RELOAD = Meaning(
        "RELOAD",
        "copy of the activation back",
        "copy",
        (_end("stored"), _make("saved")),
        letter="<",
    )
    UNSHARD = Meaning(
        "UNSHARD",
        "gathering of the weights",
        "group",
        (_read("weights", "newest"), _make("gathered", "newest", at="end")),
        evaluates=True,
        stage_wide=True,
    )
    RESHARD = Meaning(
        "RESHARD",
        "release of the gathered weights",
        "nothing",
        (_end("gathered", "newest"),),
        evaluates=True,
        stage_wide=True,
    )
    REDUCE_GRAD = Meaning(
        "REDUCE_GRAD",
        "sum of the gradients",
        "group",
        (_end("gradient"), _make("sum", at="end")),
        stage_wide=True,
    )
    OPTIM_STEP = Meaning(
        "OPTIM_STEP",
        "update of the weights",
        "compute",
        (
            _end("gradient", where="not summed"),
            _end("sum", where="summed"),
            _read("weights", "newest"),
            _make("weights", "next", at="end"),
        ),
        letter="*",
        stage_wide=True,
    )


def moved(copy: Meaning) -> Size:
    """The size of what a copy moves: of the first value that it makes."""
    made = (use.value for use in copy.uses if use.does == "make")
    return next((VALUES[value].size for value in made if value in VALUES), "")


@cache
def uses_of(kind: Kind, does: str = "", value: str = "") -> tuple[Use, ...]:
    """What a kind does to values: everything, or only one verb (`does`), or only to one `value`."""
    return tuple(u for u in kind.meaning.uses if does in ("", u.does) and value in ("", u.value))


def _kinds(have: Callable[[Kind], object]) -> frozenset[Kind]:
    return frozenset(kind for kind in Kind if have(kind))


def _on(*resources: On) -> frozenset[Kind]:
    return _kinds(lambda kind: kind.meaning.on in resources)


STAGE_WIDE = _kinds(lambda kind: kind.meaning.stage_wide)
"""Actions of a whole stage, which name no microbatch."""
COMPUTE = _on("compute")
"""The kinds that occupy a rank, which runs them in list order."""
SENDS, RECEIVES = _on("send"), _on("receive")
COMMUNICATION = SENDS | RECEIVES
"""Point-to-point communication, which a pass inserts."""
GROUPS = _on("group")
"""Collectives, which the author lists: the k-th ones of a stage on all its ranks meet."""
GATHERS = _kinds(lambda kind: uses_of(kind, "make", "gathered"))
RELEASES = _kinds(lambda kind: uses_of(kind, "end", "gathered"))
SUMS = _kinds(lambda kind: uses_of(kind, "make", "sum"))
"""The kinds that gather the weights of a sharded stage, that give them up, and that sum
gradients."""
COPIES = _on("copy")
"""The kinds that a rank's copy engine runs beside its compute."""
TIMED = tuple(kind for kind in Kind if kind in COMPUTE | GROUPS)
"""The kinds that have a cost of their own. Transfers and copies take as long as their bytes."""
DRAWN = tuple(kind for kind in Kind if kind in COMPUTE | COPIES)
"""The kinds that have a cell in a timeline."""
HOMES = _kinds(lambda kind: kind.meaning.home)
"""The kinds that decide which rank runs a stage on a microbatch, and at which weight version."""
READS_WEIGHTS = _kinds(
    lambda kind: any(use.version in ("named", "of home") for use in kind.meaning.uses)
)
"""The kinds that use the weight version that the home of their (stage, microbatch) reads."""
BACKWARDS = _kinds(
    lambda kind: kind in COMPUTE and any(VALUES[u.value].units for u in uses_of(kind, "end"))
)
"""The full backward, and the two parts of a split one: compute that ends an activation."""
NAMES_VERSION = READS_WEIGHTS - BACKWARDS
"""The kinds that may name a weight version."""
COMPLETES_GRADIENTS = _kinds(
    lambda kind: any(VALUES[use.value].goal for use in uses_of(kind, "make"))
)
"""The kinds that complete a microbatch's share of the gradients of the stage's parameters."""
STEPS = _kinds(lambda kind: any(use.version == "next" for use in kind.meaning.uses))
"""The kinds that make the next version of the weights."""


COUNTERPARTS: dict[Kind, tuple[Kind, int]] = {}
"""For each send and receive, the kind of its other end, and how many stages further on that is."""
for _send, _receive in product(SENDS, RECEIVES):
    _link = VALUES[_receive.meaning.uses[0].value].link
    if _link and _link[0] == _send.meaning.uses[0].value:
        COUNTERPARTS |= {_send: (_receive, -_link[1]), _receive: (_send, _link[1])}
CONSUMES = {
    kind: receive
    for kind in Kind
    for receive in RECEIVES
    if kind in COMPUTE and uses_of(kind, "end", receive.meaning.uses[0].value)
}
"""For each kind of compute, the receive of its input if another rank makes that input."""
CARRIES_GRADIENTS = _kinds(
    lambda kind: kind in COMMUNICATION and (kind in SENDS) == (COUNTERPARTS[kind][1] < 0)
)
"""The sends to the stage before, and their receives."""


def incomplete(kinds: Collection[Kind]) -> Iterator[str]:
    """What is missing from the two tables. Every rule would call a schedule clean that uses a row
    with a gap."""
    letters: dict[str, Kind] = {}
    for kind in kinds:
        meaning, name = kind.meaning, kind.name
        on = meaning.on
        if not meaning.word:
            yield f"{name} has no word"
        if on != "compute" and not meaning.uses:
            yield f"{name} is on a {on}, and so uses a value"
        if on in ("send", "receive"):
            way = "end" if on == "send" else "make"
            if [use.does for use in meaning.uses] != [way]:
                yield f"{name} is a {on}, and so {way}s one value"
            elif kind not in COUNTERPARTS:
                yield f"{name} has no kind that it meets: its value has no link"
        if on == "copy" and not moved(meaning):
            yield f"{name} is a copy, and so makes a value that has a size"
        if meaning.cost and on in ("copy", "send", "receive"):
            yield f"{name} is a {on}, whose cost is the time of its bytes"
        letter = meaning.letter or str(kind)[0]
        if on in ("compute", "copy") and letters.setdefault(letter, kind) is not kind:
            yield f"{name} has the letter {letter} of {letters[letter].name}"
        for use in meaning.uses:
            if use.value not in VALUES:
                yield f"{name} uses {use.value!r}, which is no value"
                continue
            per = VALUES[use.value].per
            if {use.beside, use.without} - {"", *map(str, kinds)}:
                yield f"{name} depends on a kind that there is not"
            if (per == "version") is not bool(use.version):
                yield f"{name} must say which version of {use.value} it uses"
            if on == "copy" and use.does == "read":
                yield (
                    f"{name} is a copy that reads the {use.value}: what ends it would not wait, so "
                    "end it, and make it"
                )
            if per == "microbatch" and meaning.stage_wide:
                yield f"{name} is for a whole stage, but uses the {use.value} of one pair"
    for name, value in VALUES.items():
        done = {use.does for kind in kinds for use in kind.meaning.uses if use.value == name}
        if not value.word:
            yield f"the value {name!r} has no word"
        if "make" not in done:
            yield f"no kind makes the value {name!r}"
        if value.ended != "never" and "end" not in done:
            yield f"no kind ends the value {name!r}, which must be ended"
        if value.size not in get_args(Size):
            yield f"the value {name!r} has the size {value.size!r}, which there is not"
        if value.link and value.link[0] not in VALUES:
            yield f"the value {name!r} is linked to {value.link[0]!r}, which is no value"


if _WRONG := "; ".join(incomplete([*Kind])):
    raise ImportError(f"the tables of schedir.ir.kinds are incomplete: {_WRONG}")
