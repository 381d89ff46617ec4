"""torch's overlapped pairs, `(0F1;0B0)OVERLAP_F_B`, beside torch's own verdict on the lists."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from check_torch import dumped
from torch.distributed.pipelining import schedules as torch_schedules

import schedir
from schedir import ParseError
from schedir.ir import loads_torch_csv
from schedir.passes import strip_communication

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


def test_pairs_are_judged_as_torch_judges_them() -> None:
    rng = random.Random(14)
    seen: Counter[str] = Counter()
    for _ in range(1500):
        ranks = rng.choice((2, 3))
        placement = rng.choice(([*range(ranks)], [*range(ranks), *range(ranks)[::-1]]))
        microbatches = rng.choice((2, 3))
        lists = paired(rng, a_run(rng, placement, microbatches))
        text = csv(lists)
        try:
            verdict = "clean" if schedir.check(loads_torch_csv(text)).ok else "wrong"
        except ParseError:
            verdict = "refused"
        assert torch_takes(lists, placement, microbatches) == (verdict == "clean"), text
        seen[verdict] += "OVERLAP" in text
    assert min(seen[verdict] for verdict in ("clean", "wrong", "refused")) > 100


def test_the_shortest_pair_that_waits_for_itself() -> None:
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n"
    with pytest.raises(ParseError) as error:
        loads_torch_csv(text, "x.csv")
    assert str(error.value) == (
        "x.csv:1:5: (0F1;0B0)OVERLAP_F_B of rank 0 can never start, as it waits for the inputs of "
        "both its parts: 0B0 needs 1B0 of rank 1, which stands after 1F1; 1F1 needs 0F1 of rank "
        "0, a part of (0F1;0B0)"
    )
    # One after the other they run, and so does the pair where rank 1 gives 1B0 first.
    assert schedir.check(loads_torch_csv(text.replace("(0F1;0B0)OVERLAP_F_B", "0F1,0B0"))).ok
    assert schedir.check(loads_torch_csv(text.replace("1F1,1B0", "1B0,1F1"))).ok


def test_two_pairs_that_wait_for_each_other() -> None:
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    with pytest.raises(
        ParseError, match=r"a part of \(1F1;1B0\); 1F1 needs 0F1 of rank 0"
    ) as error:
        loads_torch_csv(text)
    assert (error.value.line, error.value.column) == (1, 5)


def test_a_long_circle_is_cut() -> None:
    # Forwards go down the ranks; of the two last stages, one is rank 0's and one the last rank's.
    n = 9
    rows = [[f"{s}F0", f"{s}F1", f"{s}B0", f"{s}B1"] for s in range(n)]
    rows[0] = f"0F0 {n}F0 (0F1;{n}B0)OVERLAP_F_B {n}F1 {n}B1 0B0 0B1".split()
    rows[-1][1:1] = [f"{n + 1}F0"]
    rows[-1][3:3] = [f"{n + 1}B0", f"{n + 1}F1", f"{n + 1}B1"]
    with pytest.raises(ParseError) as error:
        loads_torch_csv(csv(rows))
    assert error.value.message.partition("parts: ")[2] == (
        "9B0 needs 10B0 of rank 8, which stands after 8F1; 8F1 needs 7F1 of rank 7; 7F1 needs 6F1 "
        "of rank 6; …; 1F1 needs 0F1 of rank 0, a part of (0F1;9B0)"
    )


@pytest.mark.parametrize(
    "cell", ["(0F0;0F1)", "(0B0;0B1)", "(0F1)", "(0F1;0B0;0W0)", "(0F1;0W0)", "(0UNSHARD;0F1)"]
)
def test_what_is_no_pair(cell: str) -> None:
    with pytest.raises(ParseError, match=r"one forward \(F\) and one backward \(B or I\)") as error:
        loads_torch_csv(f"0F0,{cell}OVERLAP_F_B\n")
    assert (error.value.line, error.value.column) == (1, 5)


def test_a_pair_of_a_forward_and_its_own_backward() -> None:
    with pytest.raises(ParseError, match="its backward needs its forward"):
        loads_torch_csv("(0F0;0B0)OVERLAP_F_B\n")


def test_a_pair_in_a_list_that_lacks_actions_is_for_check_to_judge() -> None:
    read = loads_torch_csv("(0F9;0B0)OVERLAP_F_B\n1F9\n")
    assert {"S105"} == {found.code for found in schedir.check(read).errors}


def test_a_cycle_without_the_pair_is_for_check_to_explain() -> None:
    # 0B1 in front of 0F2, which 1B1 waits for: the pair on rank 0 is only a bystander.
    text = "0F0,0F1,0B1,(0F2;0B0)OVERLAP_F_B,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    assert {"S301"} == {found.code for found in schedir.check(loads_torch_csv(text)).errors}


def send(cell: str, last: int) -> list[str]:
    """The communication after an action, as torch writes it."""
    if cell.startswith("("):
        return [
            token for part in cell[1:].partition(")")[0].split(";") for token in send(part, last)
        ]
    stage, kind, m = int(cell[0]), cell[1], cell[2:]
    if kind == "F":
        return [f"{stage}SEND_F{m}"] if stage < last else []
    return [f"{stage}SEND_B{m}"] if stage else []


def runs_with_pairs(lists: Lists) -> bool:
    """Whether lists with communication run to their end, each pair as one, posts never blocking."""
    done: set[str] = set()
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(lists):
            while at[rank] < len(row):
                cell = row[at[rank]]
                parts = cell[1:].partition(")")[0].split(";") if cell[0] == "(" else [cell]
                needs = []
                for part in parts:
                    stage, kind, m = int(part[0]), part[1:].rstrip("0123456789"), part[-1]
                    receive = f"{stage}RECV_{kind}{m}"
                    if receive in row and kind in "FB":
                        sender = stage - 1 if kind == "F" else stage + 1
                        needs += [receive, f"{sender}SEND_{kind}{m}"]
                if not done.issuperset(needs):
                    break
                done.update(parts)
                at[rank] += 1
                moved = True
    return all(place == len(row) for place, row in zip(at, lists, strict=True))


def test_where_communication_is_listed_the_parts_stand_for_the_pair() -> None:
    """Nothing leaves the rank between them: the pair runs exactly where its parts do."""
    rng = random.Random(3)
    seen: Counter[bool] = Counter()
    for _ in range(500):
        lists = paired(rng, a_run(rng, [0, 1, 2], 3))
        rows = [[c for cell in row for c in (cell, *send(cell, 2))] for row in lists]
        sends = [cell for row in rows for cell in row if "SEND" in cell]
        # What each channel brings, in its order, ahead of everything.
        for sent in sends[::-1]:
            stage, kind, m = int(sent[0]), sent[-2], sent[-1]
            receiver = stage + 1 if kind == "F" else stage - 1
            rows[receiver].insert(0, f"{receiver}RECV_{kind}{m}")
        ok = schedir.check(loads_torch_csv(csv(rows)), "async").ok
        assert not (ok and not runs_with_pairs(rows)), csv(rows)
        seen[ok] += any("OVERLAP" in cell for row in rows for cell in row)
    assert min(seen[True], seen[False]) > 50


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 10), (3, 9)])
def test_dual_pipe_v_is_read_and_runs(ranks: int, microbatches: int) -> None:
    text = dumped("ScheduleDualPipeV", ranks, 2, microbatches, False)
    assert "OVERLAP_F_B" in text
    complete = loads_torch_csv(text)
    assert schedir.check(complete, "host").clean_channels == schedir.CHANNELS
    compute = "\n".join(
        ",".join(c for c in row.split(",") if c.startswith("(") or not ("SEND" in c or "RECV" in c))
        for row in text.splitlines()
    )
    read = loads_torch_csv(compute)
    assert strip_communication(complete).columns == read.columns
    assert schedir.check(read).ok
