// Reads what schedir/render/html.py writes: the table of lanes, column by column. Its rows are
// sorted by lane and start; a row of -1 is none.

async function readTimelines() {
  const bytes = Uint8Array.from(atob(page.columns), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  let at = 0;
  return page.timelines.map((about) => {
    const line = { ...about };
    for (const [name, type, length] of about.columns) {
      const Type = globalThis[type];
      const column = new Type(buffer.slice(at, (at += length * Type.BYTES_PER_ELEMENT)));
      // A number is written as its difference from the one before.
      for (let i = 1; i < length; i++) column[i] += column[i - 1];
      line[name] = column;
    }
    return prepared(line);
  });
}

// A timeline with what follows from its columns. Times are written as whole ticks.
function prepared(line) {
  const times = (ticks) => Float64Array.from(ticks, (tick) => tick * page.tick);
  line.end = times(line.start.map((from, i) => from + line.length[i]));
  for (const name of ["start", "idleStart", "idleEnd", "keptStart"]) line[name] = times(line[name]);
  line.rank = line.lane.map((own) => Math.floor(own / page.tracks));
  line.track = line.lane.map((own) => own % page.tracks);
  // Where the cells of a lane stand one above the other, it has several strips.
  const edges = [...new Set([0, 1, ...line.boxes.flat()])].sort();
  line.strips = edges.slice(1).map((bottom, i) => ({ top: edges[i], bottom }));
  line.lanes = Array.from({ length: line.stages.length * page.tracks }, (_, lane) =>
    line.strips.map((strip) => cellsIn(line, lane, strip)));
  line.idle = line.stages.map((_, rank) =>
    cellsOf(indices(line.idleRank, rank), line.idleStart, line.idleEnd));
  line.kept = line.stages.map((_, rank) => {
    const [first, end] = [rank - 1, rank].map((each) => bisect(line.keptRank, each));
    return [line.keptStart.subarray(first, end), line.keptAmount.subarray(first, end)];
  });
  return line;
}

// The cells of a lane that cover a part of its height.
function cellsIn(line, lane, { top, bottom }) {
  const covers = line.boxes.map((box) => box[0] < bottom && box[1] > top);
  const rows = indices(line.lane, lane).filter((row) => covers[line.box[row]]);
  return cellsOf(rows, line.start, line.end);
}

// Cells by start: `ids` are rows of the table, or numbers of idle times. `reach` is how far all up
// to each one reach: ascending, whatever overlaps.
function cellsOf(ids, starts, ends) {
  let furthest = 0;
  const [start, end] = [starts, ends].map((times) => Float64Array.from(ids, (id) => times[id]));
  return { ids, start, end, reach: end.map((time) => (furthest = Math.max(furthest, time))) };
}

// The first index whose value is above `limit`.
function bisect(values, limit) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The indices of ascending values from `first` to `last`.
function indices(values, first, last = first) {
  const start = bisect(values, first - 1);
  return Array.from({ length: bisect(values, last) - start }, (_, i) => start + i);
}
