"""torch's overlapped pairs, `(0F1;0B0)OVERLAP_F_B`, beside torch's own verdict on the lists."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import schedir
from schedir import ParseError, Schedule
from schedir.ir import dumps_torch_csv, loads_torch_csv
from schedir.passes import insert_communication, strip_communication
from tests.sweeps import sweep
from tests.torch_schedules import dumped

Lists = list[list[str]]


def csv(lists: Lists) -> str:
    return "".join(",".join(cells) + "\n" for cells in lists)


def a_run(rng: random.Random, placement: list[int], microbatches: int) -> Lists:
    """Lists of compute that run: a random order in which every input is there."""
    stages, last = len(placement), len(placement) - 1
    lists: Lists = [[] for _ in set(placement)]
    todo = [(kind, s, m) for s in range(stages) for m in range(microbatches) for kind in "FB"]
    done: set[tuple[str, int, int]] = set()
    while todo:

        def ready(work: tuple[str, int, int]) -> bool:
            kind, s, m = work
            if kind == "F":
                return s == 0 or ("F", s - 1, m) in done
            return ("F" if s == last else "B", s if s == last else s + 1, m) in done

        work = rng.choice([work for work in todo if ready(work)])
        todo.remove(work)
        done.add(work)
        kind, s, m = work
        lists[placement[s]].append(f"{s}{kind}{m}")
    return lists


def paired(rng: random.Random, lists: Lists) -> Lists:
    """The same with some neighbours as pairs, and sometimes with two neighbours swapped."""
    result: Lists = []
    for cells in lists:
        for _ in range(rng.choice((0, 0, 1))):
            i = rng.randrange(len(cells) - 1)
            cells[i : i + 2] = cells[i + 1], cells[i]
        row: list[str] = []
        for cell in cells:
            one = row[-1] if row else ""
            both = {one[1:2], cell[1]} == {"F", "B"} and one[::2] != cell[::2]
            if both and rng.random() < 0.6:
                row[-1] = f"({one};{cell})OVERLAP_F_B"
            else:
                row.append(cell)
        result.append(row)
    return result


def torch_takes(lists: Lists, placement: list[int], microbatches: int) -> bool:
    order = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(lists)
    }
    stages = len(placement)
    try:
        torch_schedules._validate_schedule(order, len(lists), stages, microbatches)
        torch_schedules._add_send_recv(order, placement.__getitem__, stages)
    except AssertionError:
        return False
    return True


def verdict(read: Schedule) -> str:
    """What is wrong with the lists, pairs taken apart; else whether the pairs wait for ever."""
    apart = Schedule(read.name, read.microbatches, read.placement, read.flat)
    if not schedir.check(apart).ok:
        return "wrong"
    return "clean" if schedir.check(read).ok else "stuck"


@sweep("number", [150, 1500], quick=[150])
def test_pairs_are_judged_as_torch_judges_them(number: int) -> None:
    rng = random.Random(14)
    seen: Counter[str] = Counter()
    for _ in range(number):
        ranks = rng.choice((2, 3))
        placement = rng.choice(([*range(ranks)], [*range(ranks), *range(ranks)[::-1]]))
        microbatches = rng.choice((2, 3))
        lists = paired(rng, a_run(rng, placement, microbatches))
        text = csv(lists)
        found = verdict(loads_torch_csv(text))
        assert torch_takes(lists, placement, microbatches) == (found == "clean"), text
        seen[found] += "OVERLAP" in text
    assert min(seen[found] for found in ("clean", "wrong", "stuck")) > number // 15


@pytest.mark.parametrize(
    ("cell", "column", "why"),
    [
        ("(0F0;0F1)", 5, r"one forward \(F\) and one backward \(B or I\)"),
        ("(0B0;0B1)", 5, r"one forward \(F\) and one backward \(B or I\)"),
        ("(0F1;0B0;0W0)", 5, "0W0 runs alone"),
        ("(0F1)", 5, "two or more actions"),
        ("(0F1;0W0)", 5, "0W0 runs alone"),
        ("(0F1;0B1)", 5, "0B1 needs 0F1"),
        ("(0UNSHARD;0F1)", 6, "'0UNSHARD' can't be a part of an overlapped pair"),
        ("(0F1;0SEND_F0)", 10, "'0SEND_F0' can't be a part of an overlapped pair"),
        ("(0SEND_F0;0RECV_B0)", 6, "'0SEND_F0' can't be a part of an overlapped pair"),
    ],
)
def test_what_is_no_pair(cell: str, column: int, why: str) -> None:
    with pytest.raises(ParseError, match=why) as error:
        loads_torch_csv(f"0F0,{cell}OVERLAP_F_B\n")
    assert (error.value.line, error.value.column) == (1, column)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 10), (3, 9)])
def test_dual_pipe_v_is_read_and_runs(ranks: int, microbatches: int) -> None:
    text = dumped("ScheduleDualPipeV", ranks, microbatches)
    assert "OVERLAP_F_B" in text
    complete = loads_torch_csv(text)
    compute = "\n".join(
        ",".join(c for c in row.split(",") if c.startswith("(") or not ("SEND" in c or "RECV" in c))
        for row in text.splitlines()
    )
    read = loads_torch_csv(compute)
    assert strip_communication(complete).columns == read.columns
    assert strip_communication(insert_communication(read)) == read
    for each in (complete, read):
        assert schedir.check(each).clean_channels == schedir.CHANNELS
    assert schedir.simulate(complete).makespan == schedir.simulate(read).makespan
    kept = [[c for c in row.split(",") if not c.endswith("SHARD")] for row in text.splitlines()]
    assert dumps_torch_csv(complete) == (csv(kept), [])
