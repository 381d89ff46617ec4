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
  const ends = (start, length) => times(start.map((from, i) => from + length[i]));
  line.ranks = line.stages.length;
  line.rank = line.lane.map((own) => Math.floor(own / page.tracks));
  line.track = line.lane.map((own) => own % page.tracks);
  line.end = ends(line.start, line.length);
  line.start = times(line.start);
  // Where the cells of a lane stand one above the other, it has several strips.
  line.edges = [...new Set([0, 1, ...line.boxes.flat()])].sort();
  line.lanes = Array.from({ length: line.ranks * page.tracks }, (_, lane) => stripsIn(line, lane));
  line.idleEnd = ends(line.idleStart, line.idleLength);
  line.idleStart = times(line.idleStart);
  line.idle = line.stages.map((_, rank) =>
    cellsOf(range(line.idleBounds[rank], line.idleBounds[rank + 1]), line.idleStart, line.idleEnd));
  line.kept = line.keptBounds.slice(1).map((end, rank) => ({
    start: times(line.keptStart.subarray(line.keptBounds[rank], end)),
    amount: line.keptAmount.subarray(line.keptBounds[rank], end),
  }));
  return line;
}

const range = (first, end) => Int32Array.from({ length: end - first }, (_, i) => first + i);
const receives = (track) => track >= page.tracks - 2;

// The strips of a lane, from the top: the cells that cover each part of its height.
function stripsIn(line, lane) {
  const rows = range(bisect(line.lane, lane - 1), bisect(line.lane, lane));
  return line.edges.slice(1).map((bottom, i) => {
    const top = line.edges[i], boxes = line.boxes.map((box) => box[0] < bottom && box[1] > top);
    const cells = cellsOf(rows.filter((row) => boxes[line.box[row]]), line.start, line.end);
    return { top, bottom, cells };
  });
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
