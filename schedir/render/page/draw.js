// Draws what `view` shows: lanes, labels, memory, critical path and axis on one canvas, and on one
// above it frames around what is selected and what the pointer is at.

const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const CROWDED = 3; // cells narrower than this, in pixels, are averaged with their neighbours
const LABELLED = 14; // cells narrower than this have no label
const frame = {};

const xOf = (time) => GUTTER + ((time - view.from) / (view.to - view.from)) * frame.width;
const timeAt = (x) => view.from + ((x - GUTTER) / frame.width) * (view.to - view.from);
const lowest = () => Math.max(0, frame.placed.height - frame.height + FOOT);

// A context in pixels of the page, on a canvas that has all pixels of the screen.
function penOf(canvas) {
  const ratio = devicePixelRatio, pen = canvas.getContext("2d");
  canvas.width = Math.round(canvas.clientWidth * ratio); // which clears it
  canvas.height = Math.round(canvas.clientHeight * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

function write(pen, words, x, y, ink, size = 11, align = "right") {
  pen.font = `${size}px ${FONT}`;
  Object.assign(pen, { fillStyle: ink, textAlign: align, textBaseline: "middle" });
  pen.fillText(words, x, y);
}

function draw(canvas, lines) {
  const pen = penOf(canvas), { ink, faint } = page.ink;
  const width = Math.max(1, canvas.clientWidth - GUTTER - 8), height = canvas.clientHeight - AXIS;
  const placed = layout(lines, height - FOOT), { compute, all, curve, gap } = placed.parts;
  Object.assign(frame, { width, height, placed });
  view.top = Math.min(view.top, lowest());
  const end = view.top + height;
  const seen = placed.bands.filter(({ y }) => y + Math.max(all, HEADING) > view.top && y < end);
  drawLanes(pen, lines, seen.filter((band) => !band.text));
  if (view.critical) lines.forEach((line, at) => drawCritical(pen, line, at));
  // What lies beside and above the lanes.
  pen.clearRect(0, 0, GUTTER, AXIS + height);
  pen.clearRect(0, 0, GUTTER + width + 8, AXIS);
  for (const { at, rank, text, y: below } of seen) {
    const line = lines[at], y = AXIS + below - view.top;
    if (text) write(pen, text, 16, y + HEADING / 2 + 1, ink, 12, "left");
    if (text) continue;
    const name = all > 11 && !line.replicas ? `rank ${rank}` : rank;
    const often = rank % Math.ceil(11 / all) === 0; // where lanes are thin, not each is named
    if (often) write(pen, name, GUTTER - (line.replicas ? 44 : 6), y + compute / 2, ink);
    const stages = line.replicas ? line.stages[rank] : [], high = compute / stages.length;
    stages.forEach((stage, turn) => high >= 9 &&
      write(pen, `stage ${stage}`, GUTTER - 6, y + (turn + 0.5) * high, faint, 9));
    if (curve) drawMemory(pen, line, rank, y + all - gap);
  }
  drawAxis(pen);
}

// The strips of a rank, one below the other, in pixels from the first band.
function stripsOf(lines, { at, rank, y }) {
  const line = lines[at], first = rank * page.tracks;
  const lanes = line.lanes.slice(first, first + (frame.placed.parts.strip ? page.tracks : 1));
  return lanes.flatMap((cells, track) => line.strips.map((strip, i) => {
    const [offset, height] = trackBox(track);
    const [top, bottom] = [strip.top, strip.bottom].map((part) => y + offset + part * height);
    return { at, rank, track, top, bottom, cells: cells[i] };
  }));
}

// All strips are pixels of one image, each one row of them many times. Labels stand on it.
function drawLanes(pen, lines, bands) {
  const ratio = devicePixelRatio;
  const width = Math.round(frame.width * ratio), height = Math.round(frame.height * ratio);
  const image = new ImageData(width, height), all = new Uint32Array(image.data.buffer);
  const pixelOf = (time) => (time - view.from) * (width / (view.to - view.from));
  const within = (time) => Math.max(0, Math.round(pixelOf(time)));
  const wide = lines.map(() => new Set());
  for (const { at, rank, track, top, bottom, cells } of bands.flatMap((b) => stripsOf(lines, b))) {
    const { idle, idleCause, critical, colour, makespan } = lines[at];
    const pixels = new Uint32Array(width).fill(page.pixels.idle, within(0), within(makespan));
    if (!track && view.causes) {
      paint(idle[rank], pixelOf, pixels, (number) => page.pixels.causes[idleCause[number]]);
    }
    const found = paint(cells, pixelOf, pixels, (row) =>
      page.pixels[view.critical && !critical[row] ? "pale" : "areas"][colour[row]]);
    if (!track) found.forEach((row) => wide[at].add(row));
    const edge = (y) => Math.max(0, Math.min(Math.round((y - view.top) * ratio), height));
    for (let y = edge(top); y < edge(bottom); y++) all.set(pixels, y * width);
  }
  pen.putImageData(image, Math.round(GUTTER * ratio), Math.round(AXIS * ratio));
  wide.forEach((rows, at) => rows.forEach((row) => drawLabel(pen, lines[at], at, row)));
}

// One colour with so much of another over it: red and blue at once, then green.
function mix(under, over, part) {
  const of = Math.round(part * 256);
  const mixed = (mask) => (((under & mask) * (256 - of) + (over & mask) * of) / 256) & mask;
  return (0xff000000 | mixed(0xff00ff) | mixed(0xff00)) >>> 0;
}

// Paints cells into a row of pixels, and returns those with room for a label. Where cells are
// crowded a pixel has the colour that takes most of it, the paler the more of it is idle.
function paint({ ids, start, end, reach }, pixelOf, pixels, colourOf) {
  const taken = new Map(), marks = [], wide = [];
  let pixel = -1, crowded = -Infinity; // the pixel that is taken, and the end of a narrow cell
  const settle = (next) => {
    if (next === pixel) return;
    const [[colour] = []] = [...taken].sort((a, b) => b[1] - a[1]);
    const sum = [...taken.values()].reduce((sum, part) => sum + part, 0);
    if (sum) pixels[pixel] = mix(pixels[pixel], colour, Math.min(1, sum));
    taken.clear();
    pixel = next;
  };
  for (let i = bisect(reach, view.from), last = bisect(start, view.to); i < last; i++) {
    const a = pixelOf(start[i]), b = pixelOf(end[i]), right = Math.max(0, Math.round(b));
    const colour = colourOf(ids[i]), narrow = b - a < CROWDED;
    if (b - a > LABELLED) wide.push(ids[i]);
    if (!narrow) pixels.fill(colour, Math.max(0, Math.round(a)), right);
    // A paler edge sets it off from the next.
    if (b - a > 5 && right) pixels[right - 1] = mix(colour, 0xffffffff, 0.6);
    // What is too narrow to be seen has pixels of its own where nothing is beside it.
    if (b - a < 1.5 && a - crowded > CROWDED) marks.push([Math.max(0, Math.floor(a)), colour]);
    for (let at = Math.floor(a); narrow && at < b; at++) {
      settle(at);
      taken.set(colour, (taken.get(colour) || 0) + Math.min(b, at + 1) - Math.max(a, at));
    }
    crowded = narrow ? b : -Infinity;
  }
  settle();
  for (const [at, colour] of marks) pixels.fill(colour, at, at + 2);
  return wide;
}

function drawLabel(pen, line, at, row) {
  // What is cut by an edge keeps its label in sight.
  const left = Math.max(xOf(line.start[row]), GUTTER);
  const room = Math.min(xOf(line.end[row]), GUTTER + frame.width) - left;
  const [, height, middle] = boxOf(at, line, row), most = Math.min(13, height - 2);
  const faint = view.critical && !line.critical[row];
  const ink = faint ? page.ink.faint : page.inks[line.colour[row]];
  // The stage only where a rank has several, and there is room: its shade tells it as well.
  for (const staged of line.several ? [true, false] : [false]) {
    const words = label(line, row, staged);
    const size = [most, Math.min(10, most)].find((size) => words.length * 0.6 * size < room - 2);
    if (size >= 7) return write(pen, words, left + room / 2, middle + 1, ink, size, "center");
  }
}

function drawMemory(pen, line, rank, base) {
  const [start, amounts] = line.kept[rank], { curve } = frame.placed.parts;
  const last = Math.min(GUTTER + frame.width, xOf(line.makespan));
  pen.fillStyle = page.ink.memoryFill;
  for (let x = Math.max(GUTTER, Math.floor(xOf(0))); x < last; x++) {
    // The most of all that there is within a pixel.
    const [first, end] = [x, x + 1].map((edge) => bisect(start, timeAt(edge)));
    const most = Math.max(0, ...amounts.subarray(Math.max(0, first - 1), end));
    const height = (most / page.kept.most) * (curve - 3);
    pen.fillRect(x, base - height, Math.min(1, last - x), height);
  }
  const peak = amount(line.most[rank]);
  if (curve > 17) write(pen, peak, GUTTER - 6, base - curve + 7, page.ink.memory, 10);
}

function drawCritical(pen, line, at) {
  Object.assign(pen, { strokeStyle: page.ink.critical, lineWidth: 2 });
  pen.beginPath();
  for (const row of line.path) {
    // Along the lower edge of a cell, where no label stands.
    const [top, height, middle] = boxOf(at, line, row);
    const y = line.track[row] ? middle : top + height - 2;
    pen.lineTo(xOf(line.start[row]), y);
    pen.lineTo(xOf(line.end[row]), y);
  }
  pen.stroke();
}

function drawAxis(pen) {
  // The smallest of 1, 2 and 5 times a power of ten that has room for twelve digits.
  const rough = ((view.to - view.from) * 110) / frame.width;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((times) => times * power >= rough) || 10);
  for (let i = Math.ceil(view.from / step); i * step <= view.to; i++) {
    const words = short(i * step, 12), x = xOf(i * step);
    const last = GUTTER + frame.width + 8 - 4 * words.length; // which keeps it in sight
    write(pen, words, Math.min(x, last), AXIS - 11, page.ink.faint, 11, "center");
    pen.fillRect(x, AXIS - 4, 1, 3);
  }
  const title = page.unit ? `time (${page.unit})` : "time";
  write(pen, title, GUTTER + frame.width / 2, 9, page.ink.ink, 12, "center");
}

// Frames around rows, each with lines from what it waits for and to what waits for it.
function drawMarks(canvas, lines, marked) {
  const pen = penOf(canvas);
  pen.rect(GUTTER, AXIS, frame.width + 8, frame.height);
  pen.clip();
  Object.assign(pen, { strokeStyle: page.ink.ink, fillStyle: page.ink.ink, lineWidth: 1.5 });
  for (const { at, row } of marked.filter(({ row }) => row >= 0)) {
    const line = lines[at], [top, height] = boxOf(at, line, row), left = xOf(line.start[row]);
    for (const [from, to] of view.dependencies ? dependenciesOf(line, row) : []) {
      // The two ends of a transfer go side by side: the last two tracks are of receives.
      const since = (line.track[to] >= page.tracks - 2 ? line.start : line.end)[from];
      const x = xOf(line.start[to]), y = boxOf(at, line, to)[2];
      pen.beginPath();
      pen.moveTo(xOf(since), boxOf(at, line, from)[2]);
      pen.lineTo(x, y);
      pen.stroke();
      if (!line.track[to]) pen.fillRect(x - 2.5, y - 2.5, 5, 5);
    }
    pen.strokeRect(left - 1, top - 1, Math.max(2, xOf(line.end[row]) - left) + 2, height + 2);
  }
}

// [maker, user] pairs of rows: back to the compute that makes what this one needs, and forth to the
// compute that needs what it makes.
function dependenciesOf(line, row) {
  const pairs = [];
  for (let to = row, from; (from = line.before[to]) >= 0; to = from) {
    pairs.push([from, to]);
    if (!line.track[from]) break;
  }
  const forth = (from) => line.before.forEach((maker, to) => {
    if (maker !== from) return;
    pairs.push([from, to]);
    if (line.track[to]) forth(to);
  });
  forth(row);
  return pairs;
}
