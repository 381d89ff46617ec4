// Reads what schedir/render/packed.py writes. Times are whole ticks; a place is an index into the
// actions of all ranks, laid end to end.

async function unpacked(text) {
  const packed = atob(text);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Stream {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }
  next() {
    let byte = this.bytes[this.at++];
    if (byte < 128) return (byte >>> 1) ^ -(byte & 1);
    let value = byte & 127;
    for (let scale = 128; byte > 127; scale *= 128) {
      byte = this.bytes[this.at++];
      value += (byte & 127) * scale;
    }
    return value % 2 ? -(value + 1) / 2 : value / 2;
  }
  column(array) {
    for (let i = 0; i < array.length; i++) array[i] = this.next();
    return array;
  }
  // Each number is told by how much more it is than the one before.
  rising(array) {
    for (let i = 0, last = 0; i < array.length; i++) array[i] = last += this.next();
    return array;
  }
}

// Things in one lane of the page, by their start: `id` is a place, or the number of an idle time.
class Lane {
  constructor(ids, starts, ends) {
    let sorted = true;
    for (let i = 1; i < ids.length && sorted; i++) sorted = starts[ids[i - 1]] <= starts[ids[i]];
    if (!sorted) ids = ids.slice().sort((a, b) => starts[a] - starts[b] || a - b);
    this.id = ids;
    this.start = ids.map((id) => starts[id]);
    this.end = ids.map((id) => ends[id]);
    // How far all up to this one reach: ascending, whatever overlaps.
    this.reach = this.end.slice();
    for (let i = 1; i < ids.length; i++) {
      if (this.reach[i] < this.reach[i - 1]) this.reach[i] = this.reach[i - 1];
    }
  }
  get length() {
    return this.id.length;
  }
  // The first that may last until after `time`, and the first that starts after it.
  first(time) {
    return bisect(this.reach, time);
  }
  after(time) {
    return bisect(this.start, time);
  }
}

// The first index whose value is above `limit`.
function bisect(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// A timeline as columns, one number for each place; `about` is what the page says of it.
function readTimeline(stream, about) {
  const { kinds } = page;
  const ranks = about.starts.length - 1;
  const count = about.starts[ranks];
  const rank = new Int32Array(count);
  for (let r = 0; r < ranks; r++) rank.fill(r, about.starts[r], about.starts[r + 1]);
  const kind = stream.column(new Uint8Array(count));
  const lane = kind.map((k) => kinds[k].lane);

  // What is told by how much more it is than for the last of its kind on its rank.
  const last = new Float64Array(kinds.length);
  function byKind(array, wanted) {
    for (let place = 0, of = -1; place < count; place++) {
      if (wanted && !wanted(place)) continue;
      if (rank[place] !== of) last.fill(0), (of = rank[place]);
      array[place] = last[kind[place]] += stream.next();
    }
    return array;
  }
  const joined = stream.column(new Uint8Array(count));
  const stage = byKind(new Int32Array(count));
  const microbatch = byKind(new Int32Array(count));
  const version = stream.column(new Int32Array(count)).map((v) => v - 1);
  const before = byKind(new Int32Array(count)).map((back, place) => (back ? place - back : -1));
  const known = stream.column(new Uint8Array(count));

  const start = new Int32Array(count).fill(-1);
  const end = new Int32Array(count).fill(-1);
  const lasts = byKind(new Int32Array(count), (place) => known[place] && lane[place] < IN);
  for (let p = 0; p < count; p++) {
    if (known[p] && lane[p] >= IN) lasts[p] = stream.next() + (lasts[before[p]] || 0);
  }
  const turnOf = (place) => (lane[place] >= IN) + (lane[place] > 0);
  for (const [turn, origin] of [null, end, start].entries()) {
    for (let p = 0, free = 0, r = -1; p < count; p++) {
      if (!known[p] || turnOf(p) !== turn) continue;
      if (rank[p] !== r) (free = 0), (r = rank[p]);
      const made = before[p] >= 0 && known[before[p]];
      const from = !turn ? free : made ? origin[before[p]] : 0;
      start[p] = from + stream.next();
      end[p] = free = start[p] + lasts[p];
    }
  }
  const source = about.sources.length ? byKind(new Int32Array(count)) : null;

  const index = new Int32Array(count);
  for (let p = 0, r = -1, i = 0; p < count; p++) {
    i = rank[p] !== r ? 0 : joined[p] ? i : i + 1;
    r = rank[p];
    index[p] = i;
  }
  const line = { ...about, ranks, count, rank, kind, lane, joined, stage, microbatch, version };
  Object.assign(line, { before, known, start, end, source, index });
  // The turn of each one's stage on its rank, and the lane that it is drawn in.
  line.turn = stage.map((own, place) => Math.max(0, about.stages[rank[place]].indexOf(own)));
  line.row = lane.map((own, place) => own || about.replicas && PARTS + line.turn[place]);
  line.style = stylesOf(line);
  line.lanes = lanesOf(line);
  line.idle = readIdle(stream, line);
  line.path = stream.rising(new Int32Array(about.path));
  line.pathStart = line.path.map((place) => start[place]);
  line.critical = new Uint8Array(count);
  // The path has a transfer at its receive.
  for (const place of line.path) {
    line.critical[place] = 1;
    if (lane[place] >= IN && before[place] >= 0) line.critical[before[place]] = 1;
  }
  const keeping = about.memory.lengths.map((length) => ({
    times: stream.rising(new Int32Array(length)), values: stream.rising(new Float64Array(length)),
  }));
  line.memory = { ...about.memory, ranks: keeping };
  return line;
}

// The idle times, rank after rank: `before` has the first of those that each place waits through.
function readIdle(stream, line) {
  const bounds = line.idle;
  const count = bounds[line.ranks];
  const rising = () => stream.rising(new Int32Array(count));
  const [starts, entry, transfer, blamed] = [rising(), rising(), rising(), rising()];
  const ends = stream.column(new Int32Array(count)).map((lasts, i) => starts[i] + lasts);
  const cause = stream.column(new Uint8Array(count));
  const before = new Int32Array(line.count).fill(-1);
  for (let i = count - 1; i >= 0; i--) before[entry[i]] = i;
  const lanes = Array.from({ length: line.ranks }, (_, rank) => {
    const length = bounds[rank + 1] - bounds[rank];
    return new Lane(Int32Array.from({ length }, (_, i) => bounds[rank] + i), starts, ends);
  });
  return { lanes, starts, ends, cause, entry, before, transfer, blamed };
}

// Whether a part of a pair is drawn in the lane of the part before it.
const follows = (line, place) => line.joined[place] && line.row[place] === line.row[place - 1];

// One number for the colour of each place: its kind, and the turn of its stage on its rank.
function stylesOf(line) {
  return line.kind.map((kind, place) => {
    if (!line.lane[place] && follows(line, place + 1)) return 4 * page.kinds.length;
    return 4 * kind + (line.turn[place] % 4);
  });
}

// lanes[rank][lane]; the parts of a pair are one cell, but where each has a lane of its own.
function lanesOf(line) {
  return line.stages.map((stages, rank) => {
    const ids = LANES.concat(stages).map(() => []);
    for (let place = line.starts[rank]; place < line.starts[rank + 1]; place++) {
      const lane = line.lane[place], row = line.row[place];
      if (!line.known[place]) continue;
      if (lane || !line.joined[place]) ids[lane].push(place);
      if (row !== lane && !follows(line, place)) ids[row].push(place);
    }
    return ids.map((own) => new Lane(new Int32Array(own), line.start, line.end));
  });
}

// For each place, what it hands its data to: `first[place]`, then `next` of that, until -1.
function usersOf(line) {
  if (line.users) return line.users;
  const first = new Int32Array(line.count).fill(-1);
  const next = new Int32Array(line.count).fill(-1);
  for (let place = line.count - 1; place >= 0; place--) {
    const maker = line.before[place];
    if (maker >= 0) (next[place] = first[maker]), (first[maker] = place);
  }
  return (line.users = { first, next });
}
