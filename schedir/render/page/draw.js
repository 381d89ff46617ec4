// Draws what `view` shows: lanes, labels, memory, critical path and axis on one canvas, and what
// the pointer is at on another above it, which alone is drawn anew when it moves.

const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const frame = { drawn: 0 };
const colours = {};
const pad = document.createElement("canvas");

function prepareColours() {
  const all = page.kinds.flatMap((kind) => kind.fills).concat([page.pair]);
  colours.areas = all.map(([area]) => rgb(area));
  colours.pale = colours.areas.map((colour) => mix(rgb(page.ink.paper), colour, 0.25));
  colours.inks = all.map(([, ink]) => ink);
  colours.idle = rgb(page.ink.idle);
  colours.causes = page.causes.map((cause) => rgb(cause.fill));
}

const xOf = (ticks) => frame.left + ((ticks - view.from) / (view.to - view.from)) * frame.width;
const timeAt = (x) => view.from + ((x - frame.left) / frame.width) * (view.to - view.from);
const yOf = (band) => AXIS + band.y - view.top;
const lowest = () => Math.max(0, frame.placed.height - frame.height + FOOT);

// A context in pixels of the page, on a canvas that has all pixels of the screen.
function penOf(canvas) {
  const ratio = devicePixelRatio;
  const sides = [canvas.clientWidth, canvas.clientHeight];
  const [width, height] = sides.map((side) => Math.round(side * ratio));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function draw(canvas, lines) {
  const pen = penOf(canvas);
  frame.left = GUTTER;
  frame.width = Math.max(1, canvas.clientWidth - GUTTER - 8);
  frame.height = canvas.clientHeight - AXIS;
  const placed = (frame.placed = layout(lines, frame.height - FOOT));
  view.top = Math.min(view.top, lowest());
  const size = Math.max(placed.parts.all, HEADING);
  const bands = placed.bands.filter(({ y }) => y + size > view.top && y < view.top + frame.height);
  drawLanes(pen, lines, bands.filter((band) => !band.text));
  for (const band of bands) {
    const y = yOf(band);
    if (band.text) {
      write(pen, band.text, 16, y + HEADING / 2 + 1, page.ink.ink, 12, "left");
      continue;
    }
    const { compute, all, curve, gap } = placed.parts;
    const { at, rank } = band;
    const line = lines[at];
    // Where lanes are thin, not each is named.
    if (rank % Math.ceil(11 / all) === 0) {
      const name = all > 11 && !line.replicas ? `rank ${rank}` : rank;
      write(pen, name, GUTTER - (line.replicas ? 44 : 6), y + compute / 2, page.ink.ink);
    }
    for (const lane of lanesIn(line, rank).filter(computes)) {
      const [down, height] = laneBox(lane, line, rank);
      if (height < 9) continue;
      drawLabels(pen, line.lanes[rank][lane], line, y + down, height);
      const own = lane && `stage ${line.stages[rank][lane - PARTS]}`;
      if (own) write(pen, own, GUTTER - 6, y + down + height / 2, page.ink.faint, 9);
    }
    if (curve) drawMemory(pen, line, rank, y + all - gap);
  }
  if (shown.critical) inPlot(pen, () => lines.forEach((line, at) => drawCritical(pen, line, at)));
  drawAxis(pen, lines);
  if (!lowest()) return;
  // How much of the ranks is in sight, and where.
  const part = frame.height / (frame.height + lowest());
  pen.fillStyle = page.ink.faint;
  pen.fillRect(frame.left + frame.width + 3, AXIS + view.top * part, 3, frame.height * part);
}

function drawLanes(pen, lines, rows) {
  const ratio = devicePixelRatio;
  const width = Math.round(frame.width * ratio);
  const scale = width / (view.to - view.from);
  const strips = rows.flatMap(({ at, rank, y }) =>
    lanesIn(lines[at], rank).map((lane) => ({ line: lines[at], rank, lane, y })));
  frame.drawn = 0;
  pad.width = width;
  pad.height = strips.length || 1;
  const image = new ImageData(width, pad.height);
  const all = new Uint32Array(image.data.buffer);
  strips.forEach(({ line, rank, lane }, row) => {
    const pixels = all.subarray(row * width, (row + 1) * width);
    const within = (ticks) => Math.max(0, Math.round((ticks - view.from) * scale));
    pixels.fill(colours.idle, within(0), within(line.ticks));
    if (computes(lane) && shown.causes) {
      const { lanes, cause } = line.idle;
      rasterise(lanes[rank], scale, pixels, (idle) => colours.causes[cause[idle]]);
    }
    frame.drawn += rasterise(line.lanes[rank][lane], scale, pixels, (place) =>
      colours[shown.critical && !line.critical[place] ? "pale" : "areas"][line.style[place]]);
  });
  pad.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  strips.forEach((band, row) => {
    const [y, height] = laneBox(band.lane, band.line, band.rank);
    const top = Math.round((yOf(band) + y) * ratio) / ratio;
    pen.drawImage(pad, 0, row, width, 1, frame.left, top, width / ratio, height);
  });
}

function write(pen, words, x, y, ink, size = 11, align = "right") {
  pen.font = `${size}px ${FONT}`;
  pen.fillStyle = ink;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(words, x, y);
}

function drawLabels(pen, lane, line, y, height) {
  const [first, last] = [lane.first(view.from), lane.after(view.to)];
  if (last - first > frame.width / 6) return;
  const most = Math.min(13, height - 2);
  pen.font = `${most}px ${FONT}`;
  const wide = (pen.measureText("0").width / most) * 1.05; // of a letter, in its heights
  for (let i = first; i < last; i++) {
    // What is cut by an edge keeps its label in sight.
    const left = Math.max(xOf(lane.start[i]), frame.left);
    const room = Math.min(xOf(lane.end[i]), frame.left + frame.width) - left;
    if (room < 14) continue;
    // The stage only where a rank has several, and there is room: its shade tells it as well.
    let words, size;
    for (const staged of line.several ? [true, false] : [false]) {
      words = label(line, lane.id[i], staged);
      size = [most, 10].find((size) => words.length * wide * size < room - 2);
      if (size) break;
    }
    if (!size) continue;
    const faint = shown.critical && !line.critical[lane.id[i]];
    const ink = faint ? page.ink.faint : colours.inks[line.style[lane.id[i]]];
    write(pen, words, left + room / 2, y + height / 2 + 1, ink, size, "center");
  }
}

function drawMemory(pen, line, rank, base) {
  const { curve } = frame.placed.parts;
  const { times, values } = line.memory.ranks[rank];
  const left = Math.max(frame.left, xOf(0));
  const right = Math.max(left, Math.min(frame.left + frame.width, xOf(line.ticks)));
  const y = (value) => base - (value / page.kept.most) * (curve - 3);
  let next = bisect(times, timeAt(left) - 1);
  let value = next ? values[next - 1] : 0;
  let last = 0;
  pen.beginPath();
  pen.moveTo(left, base);
  for (let x = left; x < right; x++) {
    // The most of all that there is within a pixel.
    let most = value;
    for (const end = timeAt(x + 1); times[next] < end; next++) {
      most = Math.max(most, (value = values[next]));
    }
    if (most !== last) pen.lineTo(x, y(last)), pen.lineTo(x, y(most));
    last = most;
  }
  pen.lineTo(right, y(last));
  pen.lineTo(right, base);
  pen.fillStyle = page.ink.memoryFill;
  pen.fill();
  pen.strokeStyle = page.ink.memory;
  pen.lineWidth = 1;
  pen.stroke();
  if (curve <= 17) return;
  write(pen, kept(line.memory.most[rank]), GUTTER - 6, base - curve + 7, page.ink.memory, 10);
}

// The middle of the lane of a place.
function middleOf(at, line, place) {
  const band = frame.placed.bands.find((each) => each.at === at && each.rank === line.rank[place]);
  const [y, height] = laneBox(line.row[place], line, band.rank);
  return yOf(band) + y + height / 2;
}

function drawCritical(pen, line, at) {
  const edge = {}; // by rank and lane
  pen.strokeStyle = page.ink.critical;
  pen.lineWidth = 2;
  pen.beginPath();
  for (let i = Math.max(0, bisect(line.pathStart, view.from) - 2); i < line.path.length; i++) {
    const place = line.path[i];
    const [rank, row] = [line.rank[place], line.row[place]];
    // Along the lower edge of a cell, where no label stands.
    const low = computes(row) ? laneBox(row, line, rank)[1] / 2 - 2 : 0;
    const y = (edge[[rank, row]] ??= middleOf(at, line, place) + low);
    pen.lineTo(xOf(line.start[place]), y);
    pen.lineTo(xOf(line.end[place]), y);
    if (line.start[place] > view.to) break;
  }
  pen.stroke();
}

function inPlot(pen, drawing) {
  pen.save();
  pen.beginPath();
  pen.rect(frame.left, AXIS, frame.width, frame.height);
  pen.clip();
  drawing();
  pen.restore();
}

function drawAxis(pen, lines) {
  const right = frame.left + frame.width;
  const [factor, name] = unitFor((view.to - view.from) * page.tick);
  const size = page.tick * factor; // of a tick, in the unit of the axis
  const say = (value) => short(value, 12); // more than ticks of a time have
  // The smallest of 1, 2 and 5 times a power of ten that is at least so many pixels.
  const stepOf = (pixels) => {
    const rough = ((view.to - view.from) * size * pixels) / frame.width;
    const power = 10 ** Math.floor(Math.log10(rough));
    return power * ([1, 2, 5].find((times) => times * power >= rough) || 10);
  };
  let step = stepOf(90);
  const last = say(Math.floor((view.to * size) / step) * step);
  pen.font = `11px ${FONT}`;
  const wide = pen.measureText(last).width + 16;
  if (wide > 90) step = stepOf(wide);
  pen.clearRect(0, 0, right + 8, AXIS);
  pen.strokeStyle = page.ink.faint;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let i = Math.ceil((view.from * size) / step); i * step <= view.to * size; i++) {
    const x = xOf((i * step) / size);
    const middle = Math.min(x, right + 16 - wide / 2); // the last one stays in sight
    write(pen, say(i * step), middle, AXIS - 11, page.ink.faint, 11, "center");
    pen.moveTo(x, AXIS - 4);
    pen.lineTo(x, AXIS - 1);
  }
  pen.stroke();
  const title = name ? `time (${name})` : "time";
  write(pen, title, frame.left + frame.width / 2, 9, page.ink.ink, 12, "center");
  // Where each timeline ends.
  inPlot(pen, () => {
    pen.setLineDash([2, 3]);
    for (const line of lines) {
      pen.strokeRect(Math.round(xOf(line.ticks)) + 0.5, AXIS, 0, frame.placed.height - view.top);
    }
  });
}

// What the pointer is at and what is selected, what they wait for and what waits for them.
function drawOver(canvas, lines, found) {
  const pen = penOf(canvas);
  inPlot(pen, () => {
    for (const each of [selected, found]) {
      if (!each || each.place === undefined) continue;
      const { at, place } = each;
      const line = lines[at];
      pen.strokeStyle = pen.fillStyle = page.ink.ink;
      pen.lineWidth = 1.5;
      const pairs = shown.dependencies ? dependenciesOf(line, place) : [];
      for (const [from, to] of pairs) drawArrow(pen, at, line, from, to);
      pen.lineWidth = 2;
      const height = laneBox(line.row[place], line, line.rank[place])[1] + 2;
      const [left, right] = [xOf(line.start[place]), xOf(line.end[place])];
      const top = middleOf(at, line, place) - height / 2;
      pen.strokeRect(left - 1, top, Math.max(2, right - left) + 2, height);
    }
  });
}

// [maker, user] pairs of places: back to the compute that makes what this one needs, and forth to
// the compute that needs what it makes.
function dependenciesOf(line, place) {
  const pairs = [];
  const { first, next } = usersOf(line);
  for (const part of line.lane[place] ? [place] : entryOf(line, place)) {
    for (let to = part, from; (from = line.before[to]) >= 0; to = from) {
      pairs.push([from, to]);
      if (!line.lane[from]) break;
    }
    for (const ahead = [part]; ahead.length; ) {
      const from = ahead.pop();
      for (let user = first[from]; user >= 0; user = next[user]) {
        pairs.push([from, user]);
        if (line.lane[user]) ahead.push(user);
      }
    }
  }
  return pairs.filter(([from, to]) => line.known[from] && line.known[to]);
}

function drawArrow(pen, at, line, from, to) {
  // Where transfers are not shown, from compute to compute.
  if (!frame.placed.parts.strip) {
    if (line.lane[to]) return;
    while (line.lane[from]) from = line.before[from];
  }
  const sent = line.lane[to] >= IN; // the two ends of a transfer go side by side
  const [x0, y0] = [xOf(sent ? line.start[from] : line.end[from]), middleOf(at, line, from)];
  const [x1, y1] = [xOf(line.start[to]), middleOf(at, line, to)];
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
  if (line.lane[to]) return;
  const angle = Math.atan2(y1 - y0, x1 - x0);
  pen.beginPath();
  pen.moveTo(x1, y1);
  for (const side of [angle - 0.4, angle + 0.4]) {
    pen.lineTo(x1 - 8 * Math.cos(side), y1 - 8 * Math.sin(side));
  }
  pen.fill();
}
