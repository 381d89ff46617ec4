// Numbers, times and actions in words.

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

const short = (value, digits = 9) => String(Number(value.toPrecision(digits)));

// The unit that so much of the page's own is best told in: how many of these one is, and its name.
function unitFor(value) {
  const seconds = { s: 1, ms: 1e-3, us: 1e-6 }[page.unit];
  if (!seconds) return [1, ""];
  const [size, name] = UNITS.find(([size]) => Math.abs(value) * seconds >= size) || UNITS[3];
  return [seconds / size, name];
}

function time(ticks) {
  const [factor, name] = unitFor(ticks * page.tick);
  return short(ticks * page.tick * factor) + (name && ` ${name}`);
}

function kept(value) {
  if (!page.kept.bytes) return `${value} alive`;
  const power = Math.min(5, Math.max(0, Math.floor(Math.log2(value || 1) / 10)));
  return `${short(value / 1024 ** power, 4)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

function token(line, place) {
  const { kind, stage, microbatch, version } = line;
  const which = microbatch[place] < 0 ? "" : microbatch[place];
  const at = version[place] < 0 ? "" : `@${version[place]}`;
  return stage[place] + page.kinds[kind[place]].token + which + at;
}

// The places of an entry: one, or those of a pair or batch.
function entryOf(line, place) {
  while (line.joined[place]) place--;
  const places = [place];
  while (line.joined[++place]) places.push(place);
  return places;
}

// What stands in a cell, with or without the stage.
function label(line, place, staged) {
  const { token } = page.kinds[line.kind[place]];
  if (line.microbatch[place] < 0) return token[0] === "O" ? "*" : token;
  const own = `${staged ? line.stage[place] : ""}${token}${line.microbatch[place]}`;
  return follows(line, place + 1) ? `${own};${label(line, place + 1, staged)}` : own;
}

// [name, value] for each thing to be told of an action.
function about(lines, at, place) {
  const line = lines[at];
  const { start, end, microbatch } = line;
  const whose = microbatch[place] < 0 ? "" : `, microbatch ${microbatch[place]}`;
  const rows = [["", `${page.kinds[line.kind[place]].word}, stage ${line.stage[place]}${whose}`]];
  const say = (name, value) => rows.push([name, value]);
  const entry = entryOf(line, place);
  if (entry.length > 1) say("together", entry.map((part) => token(line, part)).join(" "));
  say("place", `rank ${line.rank[place]} #${line.index[place]}`);
  say("start", time(start[place]));
  say("end", time(end[place]));
  const lasts = end[place] - start[place];
  say("duration", time(lasts));
  const other = lines[1 - at];
  if (page.alike && other && other.known[place]) {
    const theirs = other.end[place] - other.start[place];
    say(other.label, `${time(theirs)} from ${time(other.start[place])}`);
    const more = (100 * (lasts - theirs)) / theirs;
    if (theirs) say("difference", `${more < 0 ? "−" : "+"}${short(Math.abs(more), 3)} %`);
  }
  if (line.source && line.source[place]) say("source", line.sources[line.source[place] - 1]);
  for (let i = line.idle.before[entry[0]]; i >= 0 && line.idle.entry[i] === entry[0]; i++) {
    say("idle before", aboutIdle(line, i).map((row) => row.join(" ").trim()).join(", "));
  }
  return rows;
}

// The same of an idle time.
function aboutIdle(line, idle) {
  const { starts, ends, cause, blamed, transfer } = line.idle;
  const rows = [["", `${time(ends[idle] - starts[idle])}, ${page.causes[cause[idle]].word}`]];
  const maker = blamed[idle];
  if (maker >= 0) rows.push(["waits for", `${token(line, maker)} on rank ${line.rank[maker]}`]);
  if (transfer[idle] >= 0) rows.push(["through", token(line, transfer[idle])]);
  return rows;
}

// What a rank keeps at a time.
function aboutKept(line, { rank, now }) {
  const { times, values } = line.memory.ranks[rank];
  return [["keeps", kept(values[Math.max(0, bisect(times, now) - 1)])], ["at", time(now)]];
}
