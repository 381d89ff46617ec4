"""A timeline's page, opened in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from playwright.sync_api import Browser, ConsoleMessage, Page, Route

from schedir import Timeline
from schedir.render.html import html_page, tracks_of
from schedir.render.lanes import lanes_of

WIDTH, HEIGHT = 1280, 720


@attrs.define
class Opened:
    """A page, what it has asked the network for, and what has gone wrong in it."""

    page: Page
    rows: list[dict[int, int]]
    """For each timeline, the row of the page's table that each place has."""
    requests: list[str] = attrs.Factory(list)
    errors: list[str] = attrs.Factory(list)

    def hear(self, said: ConsoleMessage) -> None:
        if said.type == "error":
            self.errors.append(said.text)

    def ask(self, expression: str, *arguments: Any) -> Any:
        """The value of an expression of the page."""
        return self.page.evaluate(f"(given) => (({expression}))", list(arguments))

    def until(self, condition: str) -> None:
        """Wait for a condition of the page, ten seconds at most."""
        # Not by Playwright's wait_for_function, which the page's policy refuses to evaluate.
        self.page.evaluate(
            f"""async () => {{
                const limit = performance.now() + 10_000;
                while (!({condition})) {{
                    if (performance.now() > limit) throw new Error("it never came to pass");
                    await new Promise(requestAnimationFrame);
                }}
            }}"""
        )

    def settle(self) -> None:
        """Wait until all that was asked for has been drawn, and the address says it."""
        self.until("schedir.settled() && fragment() === location.hash")

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.settle()

    @property
    def span(self) -> tuple[float, float]:
        """What of the time is seen."""
        start, end = self.ask("[view.from, view.to]")
        return start, end

    def spots(self, at: int, places: list[int]) -> list[tuple[float, float]]:
        """The middles of actions of a timeline, in pixels of the window."""
        found: list[tuple[float, float]] = self.ask(
            """(() => {
                const [at, rows] = given, line = schedir.lines[at];
                const {left, top} = document.getElementById("lanes").getBoundingClientRect();
                return rows.map((row) => {
                    const middle = (line.start[row] + line.end[row]) / 2;
                    return [left + xOf(middle), top + boxOf(at, line, row)[2]];
                });
            })()""",
            at,
            [self.rows[at][place] for place in places],
        )
        return found

    def spot(self, at: int, place: int) -> tuple[float, float]:
        """The middle of one action."""
        return self.spots(at, [place])[0]

    def box(self) -> str:
        """What the box beside the pointer says."""
        box = self.page.locator("#box")
        return box.inner_text() if box.is_visible() else ""

    def pixels(self, spots: list[tuple[float, float]]) -> list[str]:
        """The colours of the lanes at pixels of the window, `#rrggbb`."""
        colours: list[str] = self.ask(
            """(() => {
                const canvas = document.getElementById("lanes"), pen = canvas.getContext("2d");
                const {left, top} = canvas.getBoundingClientRect();
                const all = pen.getImageData(0, 0, canvas.width, canvas.height).data;
                return given[0].map(([x, y]) => {
                    const at = [x - left, y - top].map((p) => Math.floor(p * devicePixelRatio));
                    const [r, g, b] = all.subarray(4 * (at[1] * canvas.width + at[0]));
                    return "#" + [r, g, b].map((c) => c.toString(16).padStart(2, "0")).join("");
                });
            })()""",
            spots,
        )
        return colours


@contextmanager
def opened(
    browser: Browser,
    folder: Path,
    timeline: Timeline,
    against: Timeline | None = None,
    *,
    memory: bool = False,
    fragment: str = "",
    ratio: float = 1,
) -> Iterator[Opened]:
    """The page of a timeline. Whatever it asks of the network fails, and the test with it, as it
    does where the page reports an error."""
    file = folder / "timeline.html"
    file.write_text(html_page(timeline, against, memory=memory), encoding="utf-8")
    context = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=ratio
    )
    try:
        both = [timeline] if against is None else [timeline, against]
        both.sort(key=lambda line: line.measured is not None)
        places = [lanes_of(line, tracks_of(both)).place.tolist() for line in both]
        found = Opened(
            context.new_page(), [{p: row for row, p in enumerate(own)} for own in places]
        )
        asked: list[str] = []

        def refuse(route: Route) -> None:
            asked.append(route.request.url)
            route.abort()

        context.route(lambda url: not url.startswith("file:"), refuse)
        page = found.page
        page.set_default_timeout(100_000)
        page.on("request", lambda request: found.requests.append(request.url))
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("console", lambda said: found.hear(said))
        page.goto(f"{file.as_uri()}{fragment}")
        page.wait_for_selector("body[data-ready]", state="attached")
        yield found
        assert not found.errors
        assert not asked
    finally:
        context.close()
