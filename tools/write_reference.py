"""Writes the pages of the reference that come from the code, and the table of the page on GPUs.

python tools/write_reference.py
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs

import schedir
from schedir import Kind, Schedule, check, loads
from schedir.checker import RULES, Rule
from schedir.cli import TASKS, Command, parser
from schedir.files import write_text
from schedir.ir.kinds import STAGE_WIDE, VALUES, Use, Value, uses_of
from schedir.library import built_in
from schedir.render.diagnostics import command_options, finding
from schedir.runtime.processes.groups import shares
from schedir.runtime.transports import communicators_of, ranks_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
REFERENCE = DOCS / "reference"


# The rules, from the text of `schedir explain`.


def rules() -> str:
    """The page on the rules of `schedir check`."""
    head = (
        "# Rules\n\nThis page lists every code that `schedir check` reports. `schedir explain "
        "CODE` prints the same text. How to read a diagnostic: "
        "[Read a diagnostic](../how-to/read-a-diagnostic.md).\n\n"
        + _written_from("schedir/checker/rules.py")
    )
    return head + "\n".join(_rule(rule) for rule in RULES.values())


def _written_from(source: str) -> str:
    return f"<!-- written by tools/write_reference.py from {source}: edit that instead -->\n\n"


def _rule(rule: Rule) -> str:
    found = [
        d
        for d in check(loads(rule.example), **dict(rule.options)).diagnostics
        if d.code == rule.code
    ]
    return (
        f"## {rule.code} {rule.name}\n\n{rule.meaning}\n\n**Why:** {rule.why}\n\n"
        f"**Fix:** {rule.fix}\n\n```text\n{rule.example}```\n\n"
        f"`schedir check{command_options(rule)}` says:\n\n```text\n{finding(found[0])}```\n"
    )


# The commands, from their parsers.


@attrs.frozen
class Group:
    """Arguments of a command that stand together in its help, as rows of a table."""

    title: str
    rows: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        title = {"positional": "argument", "options": "option"}.get(self.title, self.title)
        rows = "\n".join(f"| {name} | {text} |" for name, text in self.rows)
        return f"| {title} | |\n| --- | --- |\n{rows}\n"


def commands() -> str:
    """The page on the commands."""
    filled = _filled()
    groups = {name: [*_groups(command)] for name, command in filled.items()}
    shared = _shared(groups.values())
    tasks = "".join(
        f"- {task}: {', '.join(f'[{name}](#schedir-{name})' for name in names)}\n"
        for task, names in TASKS.items()
    )
    sections = [
        _command(filled[name], name, groups[name], shared)
        for task in TASKS.values()
        for name in task
    ]
    return (
        "# Commands\n\nA command writes its result to stdout, and everything else to stderr. Exit "
        "codes: 0 success, 1 a schedule with errors, 2 a target or an option that can't be used. "
        "An error names the page of this documentation to read. To train, start your script with "
        "[torchrun](../tutorials/first-pipeline.md).\n\n"
        + _written_from("the parsers in schedir/cli")
        + f"{tasks}\n"
        + "\n".join(sections)
        + "".join(f"\n## {_heading(group)}\n\n{group}" for group in shared)
        + "\n[The costs file](costs-file.md) explains every name.\n"
    )


def _filled() -> dict[str, Command]:
    """The parsers of all commands, with their arguments."""
    by_name: dict[str, Command] = parser().get_default("commands")
    for command in by_name.values():
        command.fill()
    return by_name


def _groups(command: Command) -> Iterator[Group]:
    """The groups of arguments of a command."""
    formatter = argparse.HelpFormatter(command.prog, width=10**6)
    for group in command._action_groups:
        rows = tuple(
            (
                f"`{formatter._format_action_invocation(each)}`",
                _listed(formatter._expand_help(each), command, "<br>").replace("|", "\\|"),
            )
            for each in group._group_actions
            if "-h" not in each.option_strings and each.help != argparse.SUPPRESS
        )
        if rows:
            yield Group((group.title or "").removesuffix(" arguments"), rows)


def _shared(groups: Iterable[list[Group]]) -> list[Group]:
    """The groups that are the same in every command that has one of their title."""
    of_title: dict[str, Counter[Group]] = {}
    for each in groups:
        for group in each:
            of_title.setdefault(group.title, Counter())[group] += 1
    only = [found.most_common() for found in of_title.values() if len(found) == 1]
    return [group for [(group, many)] in only if many > 1]


def _command(command: Command, name: str, groups: list[Group], shared: list[Group]) -> str:
    usage = " ".join(command.format_usage().removeprefix("usage: ").split())
    tables = [
        f"And the options for [{_heading(group).lower()}](#{_heading(group).lower()}).\n"
        if group in shared
        else str(group)
        for group in groups
    ]
    return "\n".join(
        [
            f"## {command.prog}\n",
            "```sh",
            *command.examples,
            "```\n",
            _paragraphs(_listed(command.description or "", command, "\n- ")),
            f"Usage: `{usage}`\n",
            *tables,
            *([_paragraphs(command.epilog)] if command.epilog else []),
        ]
    )


def _heading(group: Group) -> str:
    """The heading of a shared group: `costs (by default …)` → `Costs`."""
    return group.title.partition(" (")[0].capitalize()


def _paragraphs(text: str) -> str:
    """A description, with a paragraph for each bold word."""
    return re.sub(r"(?:^| )(Exit code|JSON|Marks): ", r"\n\n**\1:** ", text).strip() + "\n"


def _listed(text: str, command: Command, before: str) -> str:
    """A text with the formats of a command on lines of their own."""
    option = command._option_string_actions.get("--format")
    names = "|".join(option.choices or ()) if option else "(?!)"
    return re.sub(rf"(?:(?<=\.)|;) ({names}): ", rf"{before}`\1`: ", text)


# The kinds of actions and the values, from their tables.

_ON = {
    "compute": "the rank",
    "send": "a channel",
    "receive": "a channel",
    "group": "the stage's ranks",
    "copy": "the copy engine",
    "nothing": "nothing",
}
_VERSIONS = {
    "named": " (the named version, else the newest)",
    "of home": " (the version that F read)",
    "newest": " (newest version)",
    "next": " (next version)",
    "": "",
}
_ENDED = {
    "always": "yes",
    "step": "in lists with an OPTIM_STEP",
    "step or summed": "in lists with an OPTIM_STEP, and if the gradients are summed over ranks",
    "never": "no",
}


def kinds() -> str:
    """The page on the kinds of actions."""
    rows = [
        f"| `{_token(kind)}` | {kind.name} | {kind.meaning.word} | {_uses(kind, 'read')} | "
        f"{_uses(kind, 'make')} | {_uses(kind, 'end')} | {_ON[kind.meaning.on]} | "
        f"{kind.meaning.cost} |\n"
        for kind in Kind
    ]
    values = [
        f"| {name} | {value.word} | {_lives(value)} | {_ENDED[value.ended]} |\n"
        for name, value in VALUES.items()
    ]
    return (
        "# Kinds of actions\n\nA schedule is one list of actions per rank. Each action has a kind, "
        "a stage and, for most kinds, a microbatch: `0F3` runs the forward of stage 0 on "
        "microbatch 3. The checker, the simulator and the executor all follow this table.\n\n"
        + _written_from("schedir/ir/kinds.py")
        + "An action reads values, makes values, and ends values: an ended value is gone. An "
        "action occupies a resource. It takes its default cost unless you "
        "[set other costs](costs-file.md).\n\n"
        "| token | name | meaning | reads | makes | ends | occupies | default cost |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        + "".join(rows)
        + "\n- A recomputed microbatch (`R`) keeps its input at `F`, and its activation from `R` "
        "on.\n- On the last stage, `F` computes the loss, and so makes the output's gradient. The "
        "first stage makes no gradient of its input."
        "\n- The gradients of a stage are summed over ranks if several ranks hold the stage. A "
        "`REDUCE_GRAD` of a stage on one rank stands for data parallelism that the lists do not "
        "show; the gradients of all stages are then summed. `OPTIM_STEP` applies the sum."
        "\n- The weights of a stage are sharded if the lists gather them: `UNSHARD` gathers all "
        "weights, and `RESHARD` gives them up. See [sharded stages](../how-to/shard-stages.md)."
        "\n- Between two stages on one rank a value is handed over directly, without a send."
        "\n- [The text form](text-form.md) shows how tokens are written, "
        "[Write generators](authoring.md) how a generator yields actions.\n"
        "\n## Values\n\nA value lives on a rank, from the action that makes it to the action that "
        "ends it. `schedir check` reports a value that is used before it is made or after it has "
        "ended, one that is made twice, and one that must be ended and is not.\n\n"
        "| value | in messages | one for each | must be ended |\n| --- | --- | --- | --- |\n"
        + "".join(values)
    )


def _token(kind: Kind) -> str:
    return f"0{kind}" if kind in STAGE_WIDE else f"0{kind}3"


def _uses(kind: Kind, does: str) -> str:
    return ", ".join(map(_use, uses_of(kind, does))) or "–"


def _use(use: Use) -> str:
    """A value with its condition: `output (not on the last stage)`."""
    where = {
        "any": "",
        "first": " (on the first stage)",
        "not first": " (not on the first stage)",
        "last": " (on the last stage)",
        "not last": " (not on the last stage)",
        "summed": " (if summed over ranks)",
        "sharded": " (if sharded)",
        "not sharded": " (if not sharded)",
        "not summed": " (if not summed)",
    }[use.where]
    kinds = f" (with an {use.beside})" if use.beside else f" (without an {use.without})"
    return use.value + _VERSIONS[use.version] + where + (kinds if use.beside or use.without else "")


def _lives(value: Value) -> str:
    return {
        "microbatch": "stage and microbatch",
        "round": "stage, from one update to the next",
        "version": "stage and update",
    }[value.per]


# The communicators of NCCL that the built-in schedules take, for the page on GPUs.

GPUS = DOCS / "explanation" / "gpus.md"
BEGIN = "<!-- written by tools/write_reference.py -->\n"
END = "<!-- end of the table -->\n"

RANKS = (2, 4, 8)
PROCESSORS = 132  # of an H100 or H200
BUFFERS = 0.5 + 4.7 + 4.0  # MiB: NCCL's for its protocols LL, LL128 and Simple


@attrs.frozen
class Need:
    """The most that any rank needs: communicators for transfers, communicators for sums of
    gradients, and MiB of buffers for the transfers that it receives."""

    transfers: int
    sums: int
    memory: float

    def __str__(self) -> str:
        sums = f" + {self.sums}" if self.sums else ""
        return f"{self.transfers}{sums}, {self.memory:.0f} MiB"


def need(schedule: Schedule) -> Need:
    """What a schedule needs of each GPU at most."""
    found = communicators_of(schedule)
    transfers = _most(rank for channels in found for rank in ranks_of(channels))
    sums = _most(rank for members in _replicas(schedule) for rank in members)
    receives = _most(target for channels in found for _, target in channels)
    share = shares(PROCESSORS, transfers, sums)
    return Need(transfers, sums, receives * share.transfer * BUFFERS)


def _most(ranks: Iterable[int]) -> int:
    return max(Counter(ranks).values(), default=0)


def _replicas(schedule: Schedule) -> set[frozenset[int]]:
    """The sets of ranks that hold a stage together, and so sum its gradients."""
    by_stage = (
        frozenset(rank for held, rank in schedule.holdings if held == stage)
        for stage in range(schedule.stages)
    )
    return {ranks for ranks in by_stage if len(ranks) > 1}


def table() -> str:
    """The table of communicators, with one row for the schedules that need the same."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for generator in built_in():
        built = [schedir.build(generator.name, ranks=n, microbatches=2 * n) for n in RANKS]
        rows.setdefault(tuple(str(need(each)) for each in built), []).append(generator.name)
    lines = [
        f"| schedules | {' | '.join(f'{ranks} ranks' for ranks in RANKS)} |",
        f"| --- |{' --- |' * len(RANKS)}",
        *(
            f"| {', '.join(f'`{name}`' for name in sorted(names))} | {' | '.join(cells)} |"
            for cells, names in rows.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def gpus() -> str:
    """The page on GPUs, with today's table."""
    before, _, rest = GPUS.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


PAGES: dict[Path, Callable[[], str]] = {
    REFERENCE / "rules.md": rules,
    REFERENCE / "commands.md": commands,
    REFERENCE / "kinds.md": kinds,
    GPUS: gpus,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        write_text(path, page())
