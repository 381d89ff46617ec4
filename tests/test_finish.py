"""When pairs and batches run, against hand-drawn timetables and a naive fixed point."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import schedir
from schedir import CHANNELS, Action, Kind, Schedule, Together, UnsoundError
from schedir.graph.alive import peak_activations
from schedir.graph.compile import graph_of
from schedir.graph.paths import finish, textbook_prices, waits
from schedir.ir import (
    COMMUNICATION,
    COMPUTE,
    CONSUMES,
    GROUPS,
    RECEIVES,
    SENDS,
    Entry,
    flat,
    loads_torch_csv,
)
from schedir.passes import forward_only, insert_communication, strip_communication
from tests.joined import drawn_joined, joined
from tests.literals import listed
from tests.test_batches import runs_in_order
from tests.test_random import drawn
from tests.torch_schedules import dumped

Spans = dict[str, tuple[float, float]]


def finished(
    schedule: Schedule, transfer: float = 0, collective: float = 0, latency: float = 0
) -> Spans:
    """When everything runs, at the textbook costs of compute, each transfer on its channel for so
    long and on its way for the latency more; (-1, -1) for what never does."""
    waiting, columns, transfers = (
        waits(schedule, "edge"),
        schedule.columns,
        graph_of(schedule).transfers,
    )
    takes = textbook_prices(columns).takes
    takes[columns.is_kind(*GROUPS)] = collective
    holds = takes.copy()
    for ends in (transfers.send, transfers.receive):
        takes[ends], holds[ends] = transfer + latency, transfer
    spans: Spans = {}
    begins = finish(waiting, takes, holds)[: len(columns)].tolist()
    for place, (begin, took) in enumerate(zip(begins, takes.tolist(), strict=True)):
        if not columns.is_kind(*RECEIVES)[place]:
            end = begin + took if begin >= 0 else -1
            spans[f"{columns.rank[place]} {columns.action(place)}"] = (begin, end)
    return spans


def naive(
    schedule: Schedule, transfer: float = 0, collective: float = 0, latency: float = 0
) -> Spans | None:
    """The same, by the meaning of the lists: all times grow until none has to. None where they
    never stop, as something waits for itself."""
    ranks = [[[*flat([entry])] for entry in entries] for entries in schedule.actions]
    lengths = {
        kind: transfer if kind.name.startswith(("SEND", "RECV")) else kind.meaning.cost
        for kind in Kind
    } | {Kind.REDUCE_GRAD: collective}
    begin: dict[tuple[int, Action, int], float] = {}
    at: dict[tuple[int, Action, int], tuple[int, int]] = {}
    turns: Counter[tuple[int, Action]] = Counter()
    keys: list[list[list[tuple[int, Action, int]]]] = []
    for rank, entries in enumerate(ranks):
        keys.append([])
        for index, parts in enumerate(entries):
            keys[-1].append([])
            for action in parts:
                key = (rank, action, turns[rank, action])
                turns[rank, action] += 1
                begin[key], at[key] = 0, (rank, index)
                keys[-1][-1].append(key)

    def channel(rank: int, action: Action) -> object:
        if action.kind is Kind.REDUCE_GRAD:
            return action.stage
        peer = graph_of(schedule).peer(action)
        return (rank, peer) if action.kind in SENDS else (peer, rank)

    def over(rank: int, index: int) -> float:
        """When a whole entry is, and all that it sends and receives has arrived."""
        parts = keys[rank][index]
        if parts[0][1].kind in COMPUTE:
            return begin[parts[0]] + sum(lengths[action.kind] for _, action, _ in parts)
        return max(arrived(key) for key in parts)

    def arrived(key: tuple[int, Action, int]) -> float:
        on_its_way = latency if key[1].kind in COMMUNICATION else 0
        return begin[key] + lengths[key[1].kind] + on_its_way

    def others(key: tuple[int, Action, int]) -> list[tuple[int, Action, int]]:
        """What happens with a send, receive or sum, itself included."""
        _, action, turn = key
        if action.kind is Kind.REDUCE_GRAD:
            return [(r, action, turn) for r in schedule.placement[action.stage]]
        partner, peer = action.counterpart, graph_of(schedule).peer(action)
        assert partner is not None
        assert peer is not None
        return [key, (peer, partner, turn)]

    def earliest(key: tuple[int, Action, int]) -> float:
        rank, action, _ = key
        _, index = at[key]
        before = ranks[rank][:index]
        waits = [over(rank, i) for i, parts in enumerate(before) if parts[0].kind in COMPUTE]
        if action.kind in COMPUTE:
            for part in ranks[rank][index]:
                consumed = (
                    {Action(CONSUMES[part.kind], part.stage, part.microbatch)}
                    if (part.kind in CONSUMES)
                    else set()
                )
                for i, parts in enumerate(before):
                    if consumed & set(parts):
                        waits.append(over(rank, i))
                    if part.kind is Kind.OPTIM_STEP and parts[0].kind is Kind.REDUCE_GRAD:
                        waits += [over(rank, i)] * (parts[0].stage == part.stage)
        else:
            # A batch is posted as one: once what any of its queues holds before it is over.
            own = {channel(rank, part) for part in ranks[rank][index]}
            for i, parts in enumerate(before):
                if any(channel(rank, p) in own for p in parts if p.kind not in COMPUTE):
                    first = keys[rank][i][0]
                    free = begin[first] + lengths[first[1].kind]
                    waits.append(over(rank, i) if len(parts) > 1 else free)
            # Its parts go one after the other on their channel, though none waits to be posted.
            for each in keys[rank][index]:
                if each == key:
                    break
                if channel(rank, each[1]) == channel(rank, action):
                    waits.append(begin[each] + lengths[each[1].kind])
        return max(waits, default=0)

    for _ in range(2 * len(begin) + 2):
        grown = False
        for key in begin:
            rank, index = at[key]
            together = keys[rank][index] if key[1].kind in COMPUTE else others(key)
            latest = max(earliest(other) for other in together)
            grown |= latest > begin[key]
            begin[key] = max(begin[key], latest)
        if not grown:
            break
    else:
        return None
    spans: Spans = {}
    for key, start in begin.items():
        rank, action, _ = key
        if action.kind in COMPUTE:
            spans[f"{rank} {action}"] = (start, over(*at[key]))
        elif action.kind in SENDS or action.kind is Kind.REDUCE_GRAD:
            spans[f"{rank} {action}"] = (start, arrived(key))
    return spans


def compute(spans: Spans) -> dict[str, tuple[float, float]]:
    return {name.partition(" ")[2]: span for name, span in spans.items() if "SEND" not in name}


def test_a_pair_waits_for_both_its_inputs_and_ends_as_one() -> None:
    #   time    0    1    2    3    4    5    6    7    8
    #   rank 0  0F0  0F1            0B0------ 0B1------         0B1 waits for 1B1 at 6
    #   rank 1       1F0  (1B0;1F1)------
    #                              1B1------                    a pair takes the time of both parts
    schedule = insert_communication(listed(2, "0 1", "0F0 0F1 0B0 0B1", "1F0 (1B0;1F1) 1B1"))
    expected = {
        **{"0F0": (0, 1), "0F1": (1, 2), "0B0": (5, 7), "0B1": (7, 9)},
        **{"1F0": (1, 2), "1B0": (2, 5), "1F1": (2, 5), "1B1": (5, 7)},
    }
    assert compute(finished(schedule)) == expected
    assert naive(schedule) == finished(schedule)


@pytest.mark.parametrize("pair", ["(1F1;1B0)", "(1B0;1F1)"])
def test_a_pair_starts_with_its_later_input_and_hands_both_outputs_on_at_its_end(pair: str) -> None:
    #   time    0    1    2    3    4    5    6    7    8    9   10   11   12   13   14
    #   rank 0  0F0       2F0  2B0------ 0F1            2F1  2B1------ 0B0------ 0B1 ...
    #   rank 1       1F0                      (1F1;1B0)------          1B1------
    compute_only = listed(2, "0 1 0", "0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1", f"1F0 {pair} 1B1")
    schedule = insert_communication(compute_only)
    spans = compute(finished(schedule))
    by_hand = {"1F1": (6, 9), "1B0": (6, 9), "2F1": (9, 10), "0B0": (12, 14), "0B1": (14, 16)}
    assert {name: spans[name] for name in by_hand} == by_hand


def run(first: str, second: str, transfer: float = 0, latency: float = 0) -> Spans:
    """Two stages and two microbatches: these lists, then the backwards."""
    schedule = listed(
        2,
        "0 1",
        f"{first} 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        f"{second} 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1",
    )
    return finished(schedule, transfer, latency=latency)


def test_transfers_of_a_batch_are_posted_after_the_compute_before_it() -> None:
    #   time    0    1    2    3    4    5    6
    #   rank 0  0F0  0F1  ════                     both sends are posted at 2, the second waits
    #   rank 1                 1F0  ════ 1F1       for its receive, which is not posted before 4
    lists = "0F0 0F1 (0SEND_ACT0;0SEND_ACT1)", "1RECV_ACT0 1F0 1RECV_ACT1 1F1"
    spans = run(*lists, transfer=1)
    assert (spans["0 0SEND_ACT0"], spans["1 1F0"]) == ((2, 3), (3, 4))
    assert (spans["0 0SEND_ACT1"], spans["1 1F1"]) == ((4, 5), (5, 6))


def test_a_consumer_waits_for_the_whole_batch() -> None:
    lists = "0F0 0SEND_ACT0 0F1 0SEND_ACT1", "(1RECV_ACT0;1RECV_ACT1) 1F0 1F1"
    spans = run(*lists, transfer=1)
    assert (spans["0 0SEND_ACT0"], spans["0 0SEND_ACT1"]) == ((1, 2), (2, 3))
    assert (spans["1 1F0"], spans["1 1F1"]) == ((3, 4), (4, 5))
    # Where nothing takes time the whole batch is waited for all the same.
    assert run(*lists)["1 1F0"] == (2, 3)


def test_parts_of_a_batch_do_not_wait_for_each_other() -> None:
    lists = "0F0 0F1 (0SEND_ACT0;0SEND_ACT1)", "(1RECV_ACT0;1RECV_ACT1) 1F0 1F1"
    spans = run(*lists, latency=1)
    assert [spans[name] for name in ("0 0SEND_ACT0", "0 0SEND_ACT1")] == [(2, 3)] * 2
    # They share their channel all the same.
    timed = run(*lists, transfer=1)
    assert [timed[name] for name in ("0 0SEND_ACT0", "0 0SEND_ACT1")] == [(2, 3), (3, 4)]


def test_parts_of_a_batch_that_waits_go_in_its_order() -> None:
    # The channel is free at 6, and the batch that waits for that starts with microbatch 1.
    schedule = listed(
        3,
        "0 1",
        "0F2 0SEND_ACT2 0F0 0F1 (0SEND_ACT1;0SEND_ACT0) 0RECV_GRAD2 0B2 0RECV_GRAD0 0B0 "
        "0RECV_GRAD1 0B1",
        "1RECV_ACT2 (1RECV_ACT1;1RECV_ACT0) 1F2 1F0 1F1 1B2 1SEND_GRAD2 1B0 1SEND_GRAD0 1B1 "
        "1SEND_GRAD1",
    )
    spans = finished(schedule, transfer=5)
    sends = [spans[f"0 0SEND_ACT{m}"] for m in (2, 1, 0)]
    assert sends == [(1, 6), (6, 11), (11, 16)]


BACKWARDS = "2F0 2B0 2SEND_GRAD0 2RECV_ACT1 2F1 2B1 2SEND_GRAD1 2RECV_ACT2 2F2 2B2 2SEND_GRAD2"


def test_what_is_sent_behind_a_part_waits_for_the_whole_batch() -> None:
    # 1SEND_ACT0 happens at 3, but its batch is over with 1RECV_ACT2, which 0F2 sends at 11; and
    # so late is 1SEND_ACT1, which follows on the channel.
    schedule = listed(
        3,
        "0 1 2",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0F2 0SEND_ACT2 0RECV_GRAD1 0B1 0RECV_GRAD2 "
        "0B2",
        "1RECV_ACT0 1F0 1RECV_ACT1 1F1 (1SEND_ACT0;1RECV_ACT2) 1SEND_ACT1 1RECV_GRAD0 1B0 "
        "1SEND_GRAD0 1F2 1SEND_ACT2 1RECV_GRAD1 1B1 1SEND_GRAD1 1RECV_GRAD2 1B2 1SEND_GRAD2",
        f"2RECV_ACT0 {BACKWARDS}",
    )
    spans = finished(schedule)
    sends = [spans[name][0] for name in ("1 1SEND_ACT0", "0 0SEND_ACT2", "1 1SEND_ACT1")]
    assert sends == [3, 11, 11]


def test_what_is_received_behind_a_part_waits_for_the_whole_batch() -> None:
    # 1RECV_ACT1 happens at 2, but its batch is over with 1RECV_GRAD0, which 2B0 sends at 5; and so
    # late is 1RECV_ACT2, which follows on the channel, though 0F2 sends it at 3.
    schedule = listed(
        3,
        "0 1 2",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0F2 0SEND_ACT2 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0RECV_GRAD2 "
        "0B2",
        "1RECV_ACT0 1F0 1SEND_ACT0 (1RECV_ACT1;1RECV_GRAD0) 1RECV_ACT2 1B0 1SEND_GRAD0 1F1 "
        "1SEND_ACT1 1F2 1SEND_ACT2 1RECV_GRAD1 1B1 1SEND_GRAD1 1RECV_GRAD2 1B2 1SEND_GRAD2",
        f"2RECV_ACT0 {BACKWARDS}",
    )
    spans = finished(schedule)
    sends = [spans[name][0] for name in ("0 0SEND_ACT1", "2 2SEND_GRAD0", "0 0SEND_ACT2")]
    assert sends == [2, 5, 5]


def test_no_part_of_a_batch_goes_ahead_of_what_another_is_queued_behind() -> None:
    # 1F0 is done at 7, but the batch that sends it is posted as one, once 1RECV_ACT1 is over,
    # which 1RECV_ACT2 is queued behind: at 12.
    schedule = listed(
        3,
        "0 1 2",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0F2 0SEND_ACT2 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0RECV_GRAD2 "
        "0B2",
        "1RECV_ACT0 1F0 1RECV_ACT1 (1RECV_ACT2;1SEND_ACT0) 1F1 1SEND_ACT1 1F2 1SEND_ACT2 "
        "1RECV_GRAD0 1B0 1SEND_GRAD0 1RECV_GRAD1 1B1 1SEND_GRAD1 1RECV_GRAD2 1B2 1SEND_GRAD2",
        f"2RECV_ACT0 {BACKWARDS}",
    )
    spans = finished(schedule, transfer=5)
    by_hand = {"1 1F0": (6, 7), "0 0SEND_ACT1": (7, 12)}
    by_hand |= {"1 1SEND_ACT0": (12, 17), "0 0SEND_ACT2": (12, 17)}
    assert {name: spans[name] for name in by_hand} == by_hand


def test_batches_that_wait_for_each_other_never_end() -> None:
    # What rank 0 receives as 0RECV_GRAD0 is sent behind rank 1's batch, and 1RECV_GRAD0 behind
    # rank 0's: each batch has a part that waits for the other one.
    spans = finished(
        listed(
            1,
            "0 1 0",
            "0F0 (2RECV_ACT0;0SEND_ACT0;0RECV_GRAD0) 2F0 2B0 2SEND_GRAD0 0B0",
            "1RECV_ACT0 1F0 (1SEND_ACT0;1RECV_GRAD0) 1B0 1SEND_GRAD0",
        )
    )
    assert (spans["0 0F0"], spans["1 1F0"]) == ((0, 1), (1, 2))
    assert {spans[name][1] for name in ("0 2F0", "0 2B0", "0 0B0", "1 1B0")} == {-1}


@example(seed=2748, transfer=3, collective=0, latency=1)  # a batch with two on one channel
@given(
    seed=st.integers(0, 1 << 32),
    transfer=st.sampled_from([0, 1, 3]),
    collective=st.sampled_from([0, 2]),
    latency=st.sampled_from([0, 1, 4]),
)
def test_times_equal_a_naive_fixed_point(
    seed: int, transfer: int, collective: int, latency: int
) -> None:
    schedule = drawn_joined(random.Random(seed))
    apart = Schedule("apart", schedule.microbatches, schedule.placement, schedule.flat)
    if any(found.code != "S301" for found in schedir.check(apart).errors):
        return  # sends and receives that do not match
    columns = schedule.columns
    never = naive(schedule, 1, 1) is None  # what waits for itself shows where all takes time
    found = finished(schedule, transfer, collective, latency)
    assert never == any(end < 0 for _, end in found.values())
    transfers = graph_of(schedule).transfers
    for send, user in zip(transfers.send.tolist(), transfers.user.tolist(), strict=True):
        sent, used = (found[f"{columns.rank[p]} {columns.action(p)}"] for p in (send, user))
        assert used[1] < 0 or sent[1] >= 0
    if not never:
        assert found == naive(schedule, transfer, collective, latency)


def test_dual_pipe_v_gets_its_communication_and_runs_as_published() -> None:
    read = loads_torch_csv(dumped("ScheduleDualPipeV", 4, 10))
    complete = insert_communication(strip_communication(read))
    assert complete.columns.together
    assert max(end for _, end in finished(complete).values()) == 66
    assert [most for most, _ in peak_activations(graph_of(complete))] == [9, 9, 9, 9]


# Communication around pairs.


def runs_alone(schedule: Schedule) -> bool:
    """Whether compute gets to its end in list order, each entry once the inputs of all its parts
    are made, wherever that is."""
    lists = [[[*flat([entry])] for entry in entries] for entries in schedule.actions]
    backwards = {Kind.BACKWARD, Kind.BACKWARD_INPUT}
    made: set[tuple[bool, int, int | None]] = set()
    at = [0] * len(lists)

    def ready(action: Action) -> bool:
        stage, m = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return stage == 0 or (True, stage - 1, m) in made
        return (
            action.kind not in backwards
            or stage == schedule.stages - 1
            or (False, stage + 1, m) in made
        )

    moved = True
    while moved:
        moved = False
        for rank, entries in enumerate(lists):
            while at[rank] < len(entries) and all(map(ready, entries[at[rank]])):
                for action in entries[at[rank]]:
                    if action.kind is Kind.FORWARD or action.kind in backwards:
                        made.add((action.kind is Kind.FORWARD, action.stage, action.microbatch))
                at[rank] += 1
                moved = True
    return all(place == len(entries) for place, entries in zip(at, lists, strict=True))


@given(st.integers(0, 1 << 32))
def test_pairs_get_their_communication_where_they_can_start(seed: int) -> None:
    chance = random.Random(seed)
    compute_only = joined(drawn(chance), chance)
    try:
        complete = insert_communication(compute_only)
    except UnsoundError:
        assert not runs_alone(compute_only)
        return
    assert runs_alone(compute_only)
    assert strip_communication(complete) == compute_only
    assert runs_in_order(complete)
    assert all(end >= 0 for _, end in finished(complete).values())
    assert finished(complete, 1, 1) == naive(complete, 1, 1)
    for channel in CHANNELS:
        ahead = schedir.advance_receives(complete, channel, room=chance.randrange(9))
        assert strip_communication(ahead) == compute_only
        assert channel not in ("host", "rank") or runs_in_order(ahead)


@given(st.integers(0, 1 << 32))
def test_what_runs_in_order_does_so_with_its_receives_ahead(seed: int) -> None:
    schedule = drawn_joined(random.Random(seed))
    if runs_in_order(schedule):
        assert runs_in_order(schedir.advance_receives(schedule, "rank", room=99))


@given(st.integers(0, 1 << 32))
def test_batches_are_left_out_and_cut_down_as_a_whole(seed: int) -> None:
    schedule = drawn_joined(random.Random(seed))
    stripped, forwards = strip_communication(schedule), forward_only(schedule)
    sides = {Kind.FORWARD, Kind.SEND_ACT, Kind.RECV_ACT}
    for rank, entries in enumerate(schedule.actions):
        assert [*stripped.actions[rank]] == [*kept(entries, set(Kind) - COMMUNICATION)]
        newest = [re.sub(r"@\d+", "", str(entry)) for entry in kept(entries, sides)]
        assert [*map(str, forwards.actions[rank])] == newest


def kept(entries: Iterable[Entry], kinds: Set[Kind]) -> Iterator[Entry]:
    """What is left of the entries with the actions of some kinds only."""
    for entry in entries:
        parts = [action for action in flat([entry]) if action.kind in kinds]
        if parts:
            yield Together(parts) if len(parts) > 1 else parts[0]
