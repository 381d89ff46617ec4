// What of the page is seen, which its address says too, and where the lanes are.

const GUTTER = 64, AXIS = 38, FOOT = 12, HEADING = 22, EDGE = 5;

// `from` and `to` are times, `top` the pixels scrolled away, `height` that of a lane of compute in
// pixels, 0 for what fits; the `row` of the timeline `at` is selected. Others are ticked or not.
const view = {};
let ask = () => {}; // for a new frame

function atFirst() {
  const margin = page.longest * 0.01, span = { from: -margin, to: page.longest + margin };
  return { ...span, top: 0, height: 0, at: 0, row: -1, ...page.shown };
}

// Nothing is shorter than a tick.
function goTo(next) {
  Object.assign(view, next);
  const { from: least, to: most } = atFirst();
  const span = Math.min(Math.max(view.to - view.from, page.tick), most - least);
  view.from = Math.min(Math.max((view.from + view.to - span) / 2, least), most - span);
  view.to = view.from + span;
  ask();
}

// Zooms so that the part `at` of the width stays where it is, and moves by a part of the width.
function zoom(factor, at = 0.5, by = 0) {
  const span = view.to - view.from, from = view.from + span * (at * (1 - factor) + by);
  goTo({ from, to: from + span * factor });
}

// #from=3&to=7.5&memory=true&row=17, without what is as at first.
function fragment() {
  const first = atFirst(), said = (value) => (value === +value ? short(value) : `${value}`);
  const changed = Object.keys(view).filter((key) => said(view[key]) !== said(first[key]));
  return changed.map((key, i) => `${i ? "&" : "#"}${key}=${said(view[key])}`).join("");
}

function restore(lines) {
  const next = atFirst();
  for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
    const value = next[key] === !!next[key] ? text === "true" : parseFloat(text);
    if (key in next && Number.isFinite(+value)) next[key] = value;
  }
  if (lines[next.at]?.start[next.row] === undefined) Object.assign(next, { at: 0, row: -1 });
  goTo({ ...next, top: Math.max(0, next.top), height: Math.max(0, Math.min(next.height, 120)) });
}

// The heights of the parts of a rank's band, given that of its compute: below it a strip for each
// other track, unless lanes are thin, and the curve of its memory.
function heights(compute) {
  const atLeast = (least, part) => Math.max(least, Math.round(compute * part));
  const strip = view.transfers && compute > 7 ? atLeast(1, 0.1) : 0, gap = atLeast(1, 1 / 6);
  const curve = view.memory ? atLeast(6, 0.8) : 0, low = compute + (page.tracks - 1) * strip;
  return { compute, strip, low, gap, curve, all: low + curve + gap };
}

// {bands, height, parts}: a band is a heading or the lanes of a rank of one of the timelines, `y`
// pixels below the first.
function layout(lines, room) {
  const several = lines.length > 1, bands = [];
  const ranks = lines.flatMap((line, at) => line.stages.map((_, rank) => ({ at, rank })));
  if (view.paired) ranks.sort((a, b) => a.rank - b.rank);
  room -= EDGE + 2 * HEADING * several;
  let compute = view.height || 48, height = EDGE;
  while (!view.height && compute > 3 && ranks.length * heights(compute).all > room) compute--;
  const parts = heights(compute), both = lines.map((line) => line.label).join(", and below it ");
  for (const { at, rank } of ranks) {
    if (several && !rank && !(view.paired && at)) {
      bands.push({ text: view.paired ? both : `${lines[at].label}: ${lines[at].says}`, y: height });
      height += HEADING;
    }
    bands.push({ at, rank, y: height });
    height += parts.all + (view.paired && at ? parts.gap : 0);
  }
  return { bands, height, parts };
}

// The top and the height of a track in a rank's band.
function trackBox(track) {
  const { compute, strip } = frame.placed.parts;
  return track && strip ? [compute + (track - 1) * strip, strip] : [0, compute];
}

// The top, the height and the middle of a row of the table, in pixels of the canvas.
function boxOf(at, line, row) {
  const band = frame.placed.bands.find((each) => each.at === at && each.rank === line.rank[row]);
  const [y, all] = trackBox(line.track[row]), [from, to] = line.boxes[line.box[row]];
  const top = AXIS + band.y - view.top + y + from * all, height = (to - from) * all;
  return [top, height, top + height / 2];
}
