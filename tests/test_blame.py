"""`schedir blame`: the root of a hang, from the dumps of torch's flight recorder."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir.diagnosis import Diagnosis, chain, sinks
from schedir.diagnosis.blame import blame
from schedir.diagnosis.flight_recorder import Dumps, dump_of, read_dumps
from schedir.diagnosis.plain_pickle import read_plain_pickle
from schedir.errors import LoadError
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, SENDS
from tests.command_line import Run
from tests.diagnosis.standing import at_rest
from tests.hangs import FAULTS, Job, Style, dumps_of, random_job, write
from tests.sweeps import examples, sweep
from tests.warm import commands

SAMPLE = Path(__file__).parent / "data" / "flight_recorder"


def verdict_of(dumps: Mapping[int, Mapping[str, Any]]) -> Diagnosis:
    return blame(Dumps({rank: dump_of(rank, dump) for rank, dump in dumps.items()}))


def roots_of(verdict: Diagnosis) -> dict[int, str]:
    return {root.rank: root.cause for root in verdict.roots}


# The graph


def reachable(edges: Mapping[int, set[int]], rank: int) -> set[int]:
    found, new = set(), [rank]
    while new:
        for other in edges.get(new.pop(), set()):
            if other not in found:
                found.add(other)
                new.append(other)
    return found


GRAPHS = st.dictionaries(st.integers(0, 7), st.sets(st.integers(0, 7), max_size=3), max_size=8)


@examples(300)
@given(GRAPHS)
def test_sinks_are_what_reaches_only_itself(edges: dict[int, set[int]]) -> None:
    ranks = set(edges).union(*edges.values())
    # By the definition: all that a rank of a sink reaches, reaches it back.
    expected = {
        tuple(sorted(reachable(edges, rank) | {rank}))
        for rank in ranks
        if all(rank in reachable(edges, other) for other in reachable(edges, rank) - {rank})
    }
    assert set(sinks(edges)) == expected


@examples(100)
@given(GRAPHS)
def test_a_chain_leads_to_a_sink(edges: dict[int, set[int]]) -> None:
    ends = {rank for ranks in sinks(edges) for rank in ranks}
    way = chain(edges, ends)
    assert bool(way) == bool(ends)
    assert not way or way[-1] in ends
    assert all(after in edges[rank] for rank, after in pairwise(way))


# Jobs whose root is known


def test_the_root_of_a_real_job(run: Run) -> None:
    verdict = blame(read_dumps(str(SAMPLE)))
    assert roots_of(verdict) == {9: "missing", 14: "missing"}
    assert (verdict.is_sure, verdict.by_rules) == (True, (9, 14))
    assert verdict.waits_for.keys() == set(range(16)) - {9, 14}
    assert verdict.stands[0].words.startswith("waits at send 0->8 of group ")
    assert verdict.waits_for[0] == {8}
    found = json.loads(run.prints("blame", str(SAMPLE), "--json"))
    assert [root["rank"] for root in found["roots"]] == [9, 14]
    assert (found["missing_dumps"], found["sure"]) == ([], True)
    waiting = found["waiting"][0]
    assert (waiting["operation"], waiting["waits_for"]) == ("send 0->8", [8])


def dumped(groups: str, *posted: str) -> dict[int, dict[str, Any]]:
    """Dumps of ranks that have posted operations, separated by commas: each of a group, by its
    place in `groups`, which name their ranks; at its end `done` or `started`."""
    members = {str(name): tuple(map(int, ranks)) for name, ranks in enumerate(groups.split())}
    dumps = {}
    for rank, operations in enumerate(posted):
        own = [name for name in members if rank in members[name]]
        status: dict[str, dict[str, int]] = {}
        entries: list[dict[str, Any]] = []
        for operation in filter(None, operations.split(", ")):
            match = re.fullmatch(r"(\d) (.+?)( done| started)?", operation)
            assert match is not None
            group, name, state = match.groups()
            number = 1 + sum(each["process_group"][0] == group for each in entries)
            of = status.setdefault(str(own.index(group)), {"last_completed_collective": -1})
            of["last_enqueued_collective"] = number
            if state == " done":
                of["last_completed_collective"] = number
            is_p2p = "->" in name or "<-" in name
            entries.append(
                {
                    "record_id": len(entries),
                    "pg_id": own.index(group),
                    "process_group": (group, ""),
                    "collective_seq_id": 0 if is_p2p else number,
                    "p2p_seq_id": number if is_p2p else 0,
                    "profiling_name": f"nccl:{name}",
                    "state": {" done": "completed", " started": "started"}.get(state, "scheduled"),
                    "time_created_ns": 10**18 + len(entries),
                    "is_p2p": is_p2p,
                }
            )
        of_group = {
            name: {"name": name, "desc": "", "ranks": str([*members[name]])} for name in own
        }
        dumps[rank] = {
            "version": "2.10",
            "pg_config": of_group,
            "pg_status": status,
            "entries": entries,
        }
    return dumps


def test_a_rank_that_waits_in_one_group_is_not_blamed_in_another() -> None:
    ended = "0 all_reduce done"
    waiting = [f"{ended}, {group} all_reduce" for group in (3, 4, 2)]
    verdict = verdict_of(dumped("0123 01 23 02 13", *waiting, ended))
    assert roots_of(verdict) == {3: "missing"}
    assert verdict.by_rules == (2, 3)
    assert verdict.chain == (0, 2, 3)


def test_the_early_end_of_a_broadcasts_source_blames_nobody() -> None:
    posted = ["0 broadcast done", "1 recv 0<-1, 0 broadcast", ""]
    verdict = verdict_of(dumped("012 12", *posted))
    assert roots_of(verdict) == {2: "missing"}
    assert 1 in verdict.by_rules


def test_a_job_without_collectives_has_a_root() -> None:
    posted = ["0 send 0->1 done, 0 recv 0<-1", "0 recv 1<-0 done, 0 recv 1<-2", ""]
    verdict = verdict_of(dumped("012", *posted))
    assert roots_of(verdict) == {2: "missing"}
    assert verdict.by_rules == ()
    assert verdict.chain == (0, 1, 2)


HELD = "0 all_reduce, 0 all_reduce done"


@pytest.mark.parametrize(
    ("groups", "posted", "roots", "is_sure"),
    [
        # Of two that differ both are named, of three one.
        ("01", ["0 broadcast", "0 reduce"], {0: "differs", 1: "differs"}, False),
        ("012", [*["0 all_gather"] * 2, "0 all_to_all"], {2: "differs"}, True),
        # Each waits for the other.
        ("01 01", ["0 all_reduce", "1 all_reduce"], {0: "circle", 1: "circle"}, False),
        # Both ends of a transfer have posted it.
        ("012", ["0 send 0->1", "0 recv 1<-0", "0 recv 2<-0"], {0: "stuck", 1: "stuck"}, False),
        # A collective has not started on one rank, which holds the others.
        ("012", [f"0 all_reduce{on}" for on in (" started", "", " started")], {1: "stuck"}, True),
        # What a stream held before something that ended has ended.
        ("01", [HELD, f"{HELD}, 0 all_reduce"], {0: "missing"}, True),
        # It hangs nowhere.
        ("012", ["0 all_reduce done"] * 3, {}, True),
    ],
)
def test_the_root_of_a_job(
    groups: str, posted: list[str], roots: dict[int, str], is_sure: bool
) -> None:
    verdict = verdict_of(dumped(groups, *posted))
    assert roots_of(verdict) == roots
    assert not roots or verdict.is_sure == is_sure


def test_where_no_dump_names_the_members_of_a_group_a_set_is_named() -> None:
    # As gloo writes them: rank 1 waits in a group that has, besides it, rank 2.
    ended = "1 all_reduce done"
    dumps = dumped("012 02 12", f"{ended}, 1 all_reduce", "2 all_reduce", ended)
    for dump in dumps.values():
        dump["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
    verdict = verdict_of(dumps)
    assert 2 in roots_of(verdict)
    assert not verdict.is_sure


def test_what_is_retired_has_ended() -> None:
    dumps = dumped("01", "0 all_reduce", "0 all_reduce")
    for dump in dumps.values():
        dump["entries"][0]["retired"] = True
    assert verdict_of(dumps).roots == ()


# Random jobs

SURE = {"stop", "unending"}
"""Faults that show exactly: a rank posts nothing more, or it alone does not end a collective."""


def style_of(seed: int) -> Style:
    draw = random.Random(seed)
    return Style(
        ring=draw.choice((2000, 2000, 20)),
        clocks=draw.random() < 0.4,
        whole=draw.random() < 0.6,
        hashed=draw.random() < 0.3,
        unlike=draw.random() < 0.2,
    )


def hangs(job: Job) -> bool:
    return bool(job.effective) and any(
        each.ended is None for of in job.done.values() for each in of
    )


PARTS = sweep("part", range(10), quick=[0])
"""Of a thousand or more seeds."""


@PARTS
def test_the_root_of_a_random_job_is_named(part: int) -> None:
    for seed in range(300 * part, 300 * (part + 1)):
        kind = FAULTS[seed % len(FAULTS)]
        job, style = random_job(seed, (kind,)), style_of(seed)
        verdict = verdict_of(dumps_of(job, style))
        if not hangs(job):
            assert not verdict.roots, seed
            continue
        unnoted = not style.whole and any(event.kind == "batch" for event in job.events)
        if unnoted and kind == "kernel" and job.ahead > 1:
            continue  # it is held in a batch whose end nobody noted, and others have gone on
        roots = roots_of(verdict).keys()
        assert job.effective <= roots, seed
        if verdict.is_sure or (kind in SURE and not unnoted):
            assert roots == job.effective, seed


@PARTS
def test_with_two_faults_no_innocent_is_named_alone(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        job = random_job(seed, (("stop", "unending")[seed % 2], "stop"))
        verdict = verdict_of(dumps_of(job, style_of(seed)))
        if hangs(job):
            assert roots_of(verdict), seed
            assert roots_of(verdict).keys() <= job.effective, seed


@PARTS
def test_lost_dumps_are_evidence(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        job = random_job(seed, ("stop",))
        if not hangs(job):
            continue
        # The root's own dump, and somebody's.
        lost = (*job.effective, seed % job.ranks)
        verdict = verdict_of(dumps_of(job, Style(lost=lost)))
        left = set(range(job.ranks)) - set(lost)
        assert not left or {*(verdict.missing_dumps or ())} == set(lost), seed
        if any(each.ended is None for rank in left for each in job.done[rank]):
            assert roots_of(verdict).keys() & job.effective, seed
            named = {rank for rank, reason in roots_of(verdict).items() if reason == "no dump"}
            assert named <= set(lost), seed


@PARTS
def test_dumps_of_what_goes_on_alone_tell_less_but_nothing_wrong(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        job = random_job(seed, ("stop",))
        verdict = verdict_of(dumps_of(job, Style(active=True, hashed=seed % 2 == 1)))
        if hangs(job) and verdict.roots:
            assert roots_of(verdict).keys() & job.effective, seed


# Files


@pytest.mark.parametrize("as_json", [False, True])
def test_files_say_what_memory_does(tmp_path: Path, as_json: bool) -> None:
    for seed in range(20):
        job, style = random_job(seed), Style(json=as_json)
        folder = tmp_path / str(seed)
        folder.mkdir()
        write(job, style, folder)
        read = blame(read_dumps(str(folder)))
        assert roots_of(read) == roots_of(verdict_of(dumps_of(job, style)))


def test_what_torch_itself_writes_is_read(tmp_path: Path) -> None:
    script = (
        "import json, torch, torch.distributed as dist\n"
        "from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json\n"
        f"dist.init_process_group('gloo', store=dist.FileStore({str(tmp_path / 'store')!r}, 1),"
        " rank=0, world_size=1)\n"
        # A thread of gloo's notes what has ended, a moment later, and two at once in any order.
        "def ended(number):\n"
        "    status = json.loads(_dump_fr_trace_json())['pg_status']['0']\n"
        "    return status['last_completed_collective'] == number\n"
        "dist.all_reduce(torch.ones(4))\n"
        "while not ended('1'): pass\n"
        "dist.broadcast(torch.ones(4), 0)\n"
        "while not ended('2'): pass\n"
        "for name, dump in (('p', _dump_fr_trace()), ('j', _dump_fr_trace_json())):\n"
        "    dump = dump if isinstance(dump, bytes) else dump.encode()\n"
        f"    open({str(tmp_path)!r} + '/' + name + '_0', 'wb').write(dump)\n"
    )
    subprocess.run(
        [commands() / "python", "-c", script],
        check=True,
        timeout=250,
        env={"TORCH_FR_BUFFER_SIZE": "10", "PATH": "/usr/bin:/bin"},
    )
    for name in "pj":
        folder = tmp_path / name
        folder.mkdir()
        shutil.move(tmp_path / f"{name}_0", folder / "trace_0")
        dump = read_dumps(str(folder)).of[0]
        assert [record.name for record in dump.records] == ["all_reduce", "broadcast"]
        assert dump.last == {"0": (2, 2)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"\x80\x02}", "ends too early"),
        (b"{", "damaged JSON"),
        (b"[" * 100_000, "stands for no plain value"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"{}", "no dump of a flight recorder"),
        (pickle.dumps([1]), "no dump of a flight recorder"),
        (pickle.dumps({"pg_config": Path()}), "stands for no plain value"),
        (pickle.dumps({"pg_config": {(1,): 2}}), "neither text nor a number"),
        (b"\x80\x02X\xff\xff\xff\xff", "ends too early"),
        (b"\x80\x04\x8d" + b"\xff" * 8, "ends too early"),
    ],
)
def test_what_cannot_be_read_is_named_and_used(tmp_path: Path, content: bytes, why: str) -> None:
    shutil.copytree(SAMPLE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "_dump_9").write_bytes(content)
    dumps = read_dumps(str(tmp_path))
    assert list(dumps.unreadable) == ["_dump_9"]
    assert why in dumps.unreadable["_dump_9"]
    verdict = blame(dumps)
    assert roots_of(verdict) == {9: "no dump", 14: "missing"}
    assert verdict.missing_dumps == (9,)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return exec, ("raise SystemExit('it ran')",)


def test_nothing_is_run() -> None:
    for protocol in range(6):
        with pytest.raises(ValueError, match="stands for no plain value"):
            read_plain_pickle(pickle.dumps({"pg_config": Evil()}, protocol))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda each: (
        st.lists(each)
        | st.lists(each).map(tuple)
        | st.dictionaries(st.text() | st.integers(), each)
    ),
    max_leaves=30,
)


@examples(100)
@given(PLAIN, st.integers(2, 5))
def test_plain_values_are_read_as_python_reads_them(value: object, protocol: int) -> None:
    assert read_plain_pickle(pickle.dumps(value, protocol)) == value


@examples(500)
@given(st.data())
def test_damaged_files_raise_nothing_else(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(FILES))
    cut = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 8))):
        if cut:
            cut[data.draw(st.integers(0, len(cut) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        content = read_plain_pickle(bytes(cut))
        blame(Dumps({0: dump_of(0, content), 1: dump_of(1, content)}))


FILES = [(SAMPLE / "_dump_0").read_bytes(), (SAMPLE / "_dump_8").read_bytes()]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=4)
    ),
    max_leaves=10,
)


@examples(300)
@given(st.data())
def test_fields_of_any_type_raise_nothing_else(data: st.DataObject) -> None:
    dumps = dumps_of(random_job(data.draw(st.integers(0, 50))), Style())
    for dump in dumps.values():
        parts = [dump, *dump["entries"]]
        for _ in range(data.draw(st.integers(0, 3))):
            of = data.draw(st.sampled_from(parts))
            of[data.draw(st.sampled_from(sorted(of)))] = data.draw(JUNK)
    with suppress(ValueError):
        verdict_of(dumps)


def bomb(kind: str) -> bytes:
    """A small file that takes much of a careless reader."""
    if kind == "memo":  # a memo of four thousand million places
        return b"\x80\x02}r\xff\xff\xff\xff."
    if kind == "containers":
        return b"\x80\x02(" + b"]" * 1_000_000 + b"t."
    if kind == "laughs":  # a list of two of a list of two of …
        laughs = b"]" + b"".join(
            b"\x940]h" + bytes([n]) + b"ah" + bytes([n]) + b"a" for n in range(60)
        )
        return b"\x80\x04" + laughs + b"."
    if kind == "key":  # a tuple within a tuple, very deep, of which a hash is taken
        return b"\x80\x02}" + b"N" + b"\x85" * 300_000 + b"Ns."
    out = io.BytesIO()  # one entry, a million times
    sizes = [[4] * 1000] * 1000
    one = {"process_group": ("0", ""), "profiling_name": "nccl:all_reduce", "input_sizes": sizes}
    pickle.dump({"pg_config": {}, "entries": [one] * 1_000_000}, out)
    return out.getvalue()


def test_small_files_take_little(tmp_path: Path) -> None:
    kinds = ("memo", "containers", "laughs", "key", "entries")
    for kind in kinds:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "trace_0").write_bytes(bomb(kind))
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from schedir.cli import main\n"
        f"for kind in {kinds}:\n"
        "    main(['blame', kind])\n"
        # ru_maxrss would count the memory of the process that has started this one.
        "    status = open('/proc/self/status').read().partition('VmHWM:')[2]\n"
        "    print(kind, int(status.split()[0]) >> 10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "Traceback" not in done.stderr
    taken = re.findall(rf"^({'|'.join(kinds)}) (\d+)$", done.stdout, re.MULTILINE)
    assert [kind for kind, _ in taken] == [*kinds]
    assert all(int(most) < 1000 for _, most in taken), taken  # MiB


# The command


def test_the_command_names_the_roots_in_ten_lines(run: Run) -> None:
    out = run.prints("blame", str(SAMPLE))
    assert len(out.splitlines()) <= 10
    assert out.startswith("root: rank 9: missing: ")
    assert "\nroot: rank 14: missing: " in out
    assert "16 of 16" in out


@sweep("seed", range(40), quick=range(10))
def test_ten_lines_are_enough(seed: int, tmp_path: Path, run: Run) -> None:
    job = random_job(seed, (FAULTS[seed % len(FAULTS)],))
    write(job, Style(lost=(0, 1) if seed % 3 == 0 else ()), tmp_path)
    (tmp_path / "trace_99").write_bytes(b"")
    code, out, err = run("blame", str(tmp_path))
    assert code == (not out.startswith("root:"))
    assert len(out.splitlines()) <= 10
    assert "trace_99: it is empty" in out
    assert err == ""


def test_a_directory_without_dumps_is_refused(tmp_path: Path, run: Run) -> None:
    (tmp_path / "notes.txt").write_text("none")
    code, _, err = run("blame", str(tmp_path))
    assert code == 2
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT=1" in err
    assert run("blame", str(tmp_path / "nowhere"))[0] == 2
    with pytest.raises(LoadError):
        read_dumps(str(tmp_path / "notes.txt"))


def test_hostile_names_are_harmless(tmp_path: Path, run: Run) -> None:
    dumps = dumped("01", "0 \x1b]0;x\x07", "")
    for dump in dumps.values():
        dump["pg_config"] = {"\x1b[31m": dump["pg_config"]["0"] | {"name": "\x1b[31m"}}
        for entry in dump["entries"]:
            entry["process_group"] = ("\x1b[31m", "")
    for rank, dump in dumps.items():
        (tmp_path / f"\x1b[1m{rank}").write_bytes(pickle.dumps(dump))
    (tmp_path / "\x1b[1m7").write_bytes(b"")
    code, out, err = run("blame", str(tmp_path))
    assert code == 0
    assert "\x1b" not in out + err


# With a schedule


BUILT = schedir.build("1f1b", ranks=4, microbatches=4)


def stopped(rank: int, index: int) -> dict[int, dict[str, Any]]:
    """Dumps of the second step of `BUILT`, in which a rank posts no more from an index on."""
    runs = [at for _, at, _ in at_rest(BUILT, {rank: index})]
    begun = [actions[:end] for actions, end in zip(BUILT.flat, runs, strict=True)]
    there = {action for actions in begun for action in actions}
    posted = []
    for own, actions in enumerate(BUILT.flat):
        names: list[str] = []
        for action in (*actions, *begun[own]):
            if action.kind in COMMUNICATION:
                peer = graph_of(BUILT).peer(action)
                way = f"send {own}->{peer}" if action.kind in SENDS else f"recv {own}<-{peer}"
                ended = len(names) < sum(a.kind in COMMUNICATION for a in actions)
                ended |= action.counterpart in there
                names.append(f"0 {way}{' done' * ended}")
        posted.append(", ".join(names))
    return dumped("0123", *posted)


@pytest.mark.parametrize("ring", [2000, 11])
def test_a_schedule_names_the_actions(ring: int, run: Run) -> None:
    index = [*map(str, BUILT.actions[2])].index("2RECV_ACT2")
    for rank, dump in stopped(2, index).items():
        dump["entries"] = dump["entries"][-ring:]
        Path(f"trace_{rank}").write_bytes(pickle.dumps(dump))
    given = ("--schedule", "1f1b", "--ranks", "4", "--microbatches", "4")
    found = json.loads(run.prints("blame", ".", *given, "--json"))
    named = [(root["rank"], root["action"]) for root in found["roots"]]
    assert named == [(2, f"#{index} 2RECV_ACT2")]
    for waiting in found["waiting"]:
        number, token = waiting["action"].split()
        assert str(BUILT.actions[waiting["rank"]][int(number[1:])]) == token
    assert {each["rank"] for each in found["waiting"]} == {0, 1, 3}


def test_another_jobs_schedule_names_nothing(run: Run) -> None:
    code, out, _ = run("blame", str(SAMPLE), "--schedule", "1f1b", "--ranks", "3", "--json")
    assert code == 0
    assert {root["action"] for root in json.loads(out)["roots"]} == {None}


def test_its_colours_are_colours(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("blame", str(SAMPLE), "--schedule", "1f1b", "--ranks", "3")
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = run("blame", str(SAMPLE), "--schedule", "1f1b", "--ranks", "3")
    assert "\x1b[1;31mroot: rank" in out
    assert (code, re.sub(r"\x1b\[[0-9;]*m", "", out)) == plain[:2]
