// What is under the pointer, and the box that tells of it.

const NEAR = 3; // pixels that the pointer may be off what is too narrow to be hit

// {at, place} of an action, {at, idle} of an idle time, {at, rank, now} of what is kept, or null; x
// and y are as of the canvas.
function under(lines, x, y) {
  const depth = y - AXIS + view.top;
  const { bands, parts } = frame.placed;
  const band = bands.find((each) => !each.text && depth >= each.y && depth < each.y + parts.all);
  if (!band || y < AXIS || x < frame.left) return null;
  const line = lines[band.at];
  const now = timeAt(x);
  if (shown.memory && depth > band.y + parts.low) {
    return now < 0 || now > line.ticks ? null : { at: band.at, rank: band.rank, now };
  }
  const lane = lanesIn(line, band.rank).findLast(
    (each) => depth - band.y >= laneBox(each, line, band.rank)[0]);
  const place = nearest(line.lanes[band.rank][lane], now);
  if (place >= 0) return { at: band.at, place };
  const idle = computes(lane) ? nearest(line.idle.lanes[band.rank], now) : -1;
  return idle < 0 ? null : { at: band.at, idle };
}

// What lasts at `time`, or is so narrow that it is hard to hit and near; -1 for nothing.
function nearest(lane, time) {
  const pixel = (view.to - view.from) / frame.width;
  let best = -1;
  let least = NEAR;
  const near = NEAR * pixel;
  for (let i = lane.after(time + near) - 1; i >= 0 && lane.reach[i] >= time - near; i--) {
    const narrow = lane.end[i] - lane.start[i] < 2 * pixel;
    const off = Math.max(lane.start[i] - time, time - lane.end[i], 0) / pixel;
    // What is narrow comes before the wide one that it lies on, two pixels either side.
    const score = narrow ? off - NEAR : off ? NEAR : -1;
    if (score < least) (least = score), (best = lane.id[i]);
  }
  return best;
}

function tell(box, lines, found, x, y) {
  box.hidden = !found;
  if (!found) return;
  const line = lines[found.at];
  const [heading, rows] =
    found.place !== undefined ? [token(line, found.place), about(lines, found.at, found.place)]
    : found.idle !== undefined ? ["idle", aboutIdle(line, found.idle)]
    : [`rank ${found.rank}`, aboutKept(line, found)];
  const title = lines.length > 1 ? `${heading} · ${line.label}` : heading;
  box.replaceChildren(element("strong", title), element("dl"));
  for (const [name, value] of rows) box.lastChild.append(element("dt", name), element("dd", value));
  const { clientWidth, clientHeight } = box.parentElement;
  const left = x + 16 + box.offsetWidth > clientWidth ? x - 12 - box.offsetWidth : x + 16;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, Math.min(y + 14, clientHeight - box.offsetHeight - 4))}px`;
}

function element(name, words = "") {
  const made = document.createElement(name);
  made.textContent = words;
  return made;
}
