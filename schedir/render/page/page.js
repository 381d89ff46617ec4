// Opens the page: reads the data, listens, and draws when something has changed.

const NEAR = 3; // pixels that the pointer may be off what is too narrow to be hit
const page = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const [canvas, box] = [byId("lanes"), byId("box")];

// What is under the pointer: {at, row} of an action, {at, idle} of an idle time, {at, rank, now} of
// what is kept, or {}.
function under(lines, x, y) {
  const depth = y - AXIS + view.top, now = timeAt(x), { bands, parts } = frame.placed;
  const band = bands.find((each) => !each.text && depth >= each.y && depth < each.y + parts.all);
  if (!band || y < AXIS || x < GUTTER) return {};
  const { at, rank } = band;
  if (view.memory && depth > band.y + parts.low) {
    return now < 0 || now > lines[at].makespan ? {} : { at, rank, now };
  }
  const { track, cells } = stripsOf(lines, band).findLast(({ top }) => top <= depth);
  const row = nearest(cells, now), idle = track ? -1 : nearest(lines[at].idle[rank], now);
  return row >= 0 ? { at, row } : idle >= 0 ? { at, idle } : {};
}

// What lasts at `time`, or is so narrow that it is hard to hit and near; -1 for nothing.
function nearest({ ids, start, end, reach }, time) {
  const pixel = (view.to - view.from) / frame.width, near = NEAR * pixel;
  let best = -1, least = NEAR;
  for (let i = bisect(start, time + near) - 1; i >= 0 && reach[i] >= time - near; i--) {
    const off = Math.max(start[i] - time, time - end[i], 0) / pixel;
    // What is narrow comes before the wide one that it lies on, two pixels either side.
    const score = end[i] - start[i] < 2 * pixel ? off - NEAR : off ? NEAR : -1;
    if (score < least) [least, best] = [score, ids[i]];
  }
  return best;
}

// Tells of what was found, at the side where it is not.
function tell(lines, { at, row, idle, rank, now }) {
  const line = lines[at];
  const [heading, rows, when] =
    row >= 0 ? [token(line, row), about(lines, at, row), line.start[row]]
    : idle >= 0 ? ["idle", aboutIdle(line, idle), line.idleStart[idle]]
    : rank >= 0 ? [`rank ${rank}`, aboutKept(line, rank, now), now] : [];
  box.hidden = !heading;
  if (box.hidden) return;
  const said = rows.map(([name, value]) => (name ? `${name}\t${value}` : value));
  box.textContent = [lines[1] ? `${heading} · ${line.label}` : heading, ...said].join("\n");
  box.className = xOf(when) > GUTTER + frame.width / 2 ? "left" : "right";
}

async function open() {
  const lines = await readTimelines();
  const inputs = [...document.querySelectorAll("[data-shows]")];
  let found = {}, drag = null, waiting = 0, writing = 0, changed = true;

  function paint() {
    if (changed) draw(canvas, lines); // or else the pointer alone has moved
    drawMarks(byId("marks"), lines, [view, found]);
    tell(lines, found.at === undefined && view.row >= 0 ? view : found);
    waiting = changed = 0;
  }
  const remember = () => history.replaceState(null, "", fragment() || location.pathname);
  const soon = () => (waiting ||= requestAnimationFrame(paint));
  ask = () => {
    byId("causes").hidden = !view.causes;
    for (const input of inputs) input.checked = view[input.dataset.shows];
    clearTimeout(writing); // for browsers refuse to write an address too often
    writing = setTimeout(remember, 150);
    changed = soon();
  };
  function point(...spot) {
    found = spot.length ? under(lines, ...spot) : {};
    soon();
    return found;
  }
  const select = ({ at = 0, row = -1 }) => goTo({ at, row });
  // To the next or the one before in its lane, or to another rank at the same time.
  function step(along, across) {
    const { at, row } = view, line = lines[at], lane = line.lane[row] + across * page.tracks;
    if (row < 0) return select({ row: 0 });
    const there = indices(line.lane, lane);
    const before = there.findLast((each) => line.start[each] <= line.start[row]);
    const next = across ? before ?? there[0] : row + along;
    if (line.lane[next] !== lane) return;
    const middle = (line.start[next] + line.end[next]) / 2, half = (view.to - view.from) / 2;
    if (middle < view.from || middle > view.to) goTo({ from: middle - half, to: middle + half });
    select({ at, row: next });
  }

  const scroll = (top) => goTo({ top: Math.max(0, Math.min(top, lowest())) });
  const pan = (by) => zoom(1, 0, by);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { deltaX: dx, deltaY: dy } = event;
    if (event.offsetX < GUTTER) return scroll(view.top + dy);
    if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) return pan((dx || dy) / frame.width);
    // A pinch comes as a wheel with the control key, and in smaller steps.
    zoom(Math.exp(dy * (event.ctrlKey ? 0.01 : 0.002)), (event.offsetX - GUTTER) / frame.width);
  }, { passive: false });
  canvas.onpointerdown = ({ button, pointerId, offsetX: x, offsetY: y }) => {
    if (button) return;
    canvas.setPointerCapture(pointerId);
    drag = { x, y, moved: false };
  };
  canvas.onpointermove = ({ offsetX: x, offsetY: y }) => {
    if (!drag) return point(x, y);
    const moved = drag.moved || Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4;
    if (!moved) return;
    pan((drag.x - x) / frame.width);
    scroll(view.top + drag.y - y);
    drag = { x, y, moved };
  };
  canvas.onpointerup = ({ offsetX, offsetY }) => {
    if (drag && !drag.moved) select(point(offsetX, offsetY));
    drag = null;
  };
  canvas.onpointerleave = () => point();

  const lane = (factor) => Math.round(frame.placed.parts.compute * factor);
  const { from, to } = atFirst();
  const keys = {
    w: () => zoom(0.7), s: () => zoom(1 / 0.7), a: () => pan(-0.15), d: () => pan(0.15),
    q: () => goTo({ height: Math.max(3, lane(0.75)) }),
    e: () => goTo({ height: Math.min(120, lane(1.34)) }),
    f: () => goTo({ from, to, top: 0, height: 0 }),
    PageDown: () => scroll(view.top + frame.height), PageUp: () => scroll(view.top - frame.height),
    ArrowRight: () => step(1, 0), ArrowLeft: () => step(-1, 0),
    ArrowDown: () => step(0, 1), ArrowUp: () => step(0, -1), Escape: () => select({}),
  };
  addEventListener("keydown", (event) => {
    const act = keys[event.key] ?? keys[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  for (const key of "wsf") byId(key).onclick = keys[key];
  for (const input of inputs) input.onchange = () => goTo({ [input.dataset.shows]: input.checked });
  addEventListener("hashchange", () => location.hash !== fragment() && restore(lines));
  restore(lines);
  new ResizeObserver(ask).observe(canvas);
  paint();
  // For a test, a benchmark or the console, which see what is global too.
  window.schedir = { lines, point, opened: performance.now(), settled: () => !waiting };
  document.body.dataset.ready = "yes";
}

open();
