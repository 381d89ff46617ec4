// Opens the page: reads the data, listens, and draws when something has changed.

const page = JSON.parse(document.getElementById("data").textContent);
// A rank's compute; its copies, if there are any; its sends of activations and of gradients; and,
// from IN on, its receives. From PARTS on, the compute of each of its replicas, within the lane of
// its compute.
const LANES = page.lanes, PARTS = LANES.length, IN = PARTS - 2;
const byId = (id) => document.getElementById(id);

async function start() {
  const stream = new Stream(await unpacked(page.columns));
  const lines = page.timelines.map((about) => readTimeline(stream, about));
  const [canvas, over, box] = [byId("lanes"), byId("over"), byId("box")];
  let pointer = null;
  let found = null;
  let waiting = 0;

  function paint() {
    waiting = 0;
    byId("causes").hidden = !shown.causes;
    draw(canvas, lines);
    point();
    remember();
  }
  function point() {
    found = pointer && under(lines, ...pointer);
    drawOver(over, lines, found);
    let spot = pointer || [];
    if (selected && !found) {
      const { at, place } = selected;
      spot = [xOf(lines[at].end[place]), middleOf(at, lines[at], place)];
    }
    tell(box, lines, found || selected, ...spot);
  }
  function select(next) {
    selected = next && next.place !== undefined ? next : null;
    const said = selected && [token(lines[next.at], next.place), about(lines, next.at, next.place)];
    byId("said").textContent = said ? said.flat(2).join(" ") : "";
    ask();
  }
  // To the next or the one before in its lane, or to another rank at the same time.
  function step(along, across) {
    if (!selected) return select({ at: 0, place: lines[0].lanes[0][0].id[0] });
    const { at, place } = selected;
    const line = lines[at];
    const lanes = line.lanes[line.rank[place] + across];
    const there = lanes && lanes[line.lane[place]];
    if (!there) return;
    const same = there.after(line.start[place]) - 1;
    const next = there.id[across ? Math.max(0, same) : there.id.indexOf(place) + along];
    if (next === undefined) return;
    const middle = (line.start[next] + line.end[next]) / 2;
    const half = (view.to - view.from) / 2;
    if (middle < view.from || middle > view.to) goTo({ from: middle - half, to: middle + half });
    select({ at, place: next });
  }

  prepareColours();
  ask = () => (waiting = waiting || requestAnimationFrame(paint));
  const toggles = [...document.querySelectorAll("[data-shows]")];
  function open() {
    restore(lines);
    for (const input of toggles) input.checked = shown[input.dataset.shows];
  }
  for (const input of toggles) {
    input.onchange = () => {
      shown[input.dataset.shows] = input.checked;
      ask();
    };
  }
  open();
  addEventListener("hashchange", () => location.hash !== fragment() && open());
  listen(canvas, select, step, (...spot) => {
    pointer = spot.length ? spot : null;
    point();
    return found;
  });
  new ResizeObserver(ask).observe(canvas);
  paint();
  // For whoever wants to know what is seen: a test, a benchmark, the console.
  window.schedir = Object.freeze({
    lines, view, frame, shown, xOf, middleOf, fragment,
    opened: performance.now(),
    under: (x, y) => under(lines, x, y),
    settled: () => !waiting,
    paint: () => draw(canvas, lines),
    point: (...spot) => ((pointer = spot), point()),
  });
  setTimeout(() => lines.forEach(usersOf)); // so that the first hover need not wait for them
  document.body.dataset.ready = "yes";
}

// `at` is told where the pointer is, and says what is under it.
function listen(canvas, select, step, at) {
  let drag = null;
  const spot = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  const scroll = (top) => goTo({ top: Math.max(0, Math.min(top, lowest())) });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [x] = spot(event);
    const unit = [1, 16, 400][event.deltaMode];
    const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
    if (x < GUTTER) return scroll(view.top + dy);
    if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) return pan((dx || dy) / frame.width);
    // A pinch comes as a wheel with the control key, and in smaller steps.
    zoom(Math.exp(dy * (event.ctrlKey ? 0.01 : 0.002)), (x - frame.left) / frame.width);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.clientX, y: event.clientY, from: { ...view }, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return at(...spot(event));
    const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
    drag.moved ||= Math.abs(x) + Math.abs(y) > 4;
    if (!drag.moved) return;
    const { from, to, top } = drag.from;
    const by = (-x / frame.width) * (to - from);
    goTo({ from: from + by, to: to + by });
    scroll(top - y);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) select(at(...spot(event)));
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => at());

  const lane = (factor) => {
    const height = Math.round(frame.placed.parts.compute * factor);
    goTo({ height: Math.min(120, Math.max(3, height)) });
  };
  const keys = {
    w: () => zoom(0.7), s: () => zoom(1 / 0.7), a: () => pan(-0.15), d: () => pan(0.15),
    q: () => lane(0.75), e: () => lane(1.34), f: () => goTo(whole()),
    PageDown: () => scroll(view.top + frame.height), PageUp: () => scroll(view.top - frame.height),
    ArrowRight: () => step(1, 0), ArrowLeft: () => step(-1, 0),
    ArrowDown: () => step(0, 1), ArrowUp: () => step(0, -1), Escape: () => select(null),
  };
  addEventListener("keydown", (event) => {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[key]) return;
    event.preventDefault();
    keys[key]();
  });
  for (const key of "wsf") byId(key).addEventListener("click", keys[key]);
}

start();
