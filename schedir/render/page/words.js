// Numbers, times and actions in words.

const short = (value, digits = 9) => String(Number(value.toPrecision(digits)));
const time = (value) => `${short(value)} ${page.unit}`.trim();
const amount = (value) => `${short(value / page.kept.size, 4)} ${page.kept.word}`;
const kindOf = (line, row) => page.kinds[Math.floor(line.colour[row] / page.shades)];

// A number after a word, and nothing where there is none.
const numbered = (word, number) => (number < 0 ? "" : word + number);

function token(line, row) {
  const { stage, microbatch, version } = line, kind = kindOf(line, row).token;
  return stage[row] + kind + numbered("", microbatch[row]) + numbered("@", version[row]);
}

// What stands in a cell, with or without the stage.
function label(line, row, staged) {
  const { letter } = kindOf(line, row);
  return numbered((staged ? line.stage[row] : "") + letter, line.microbatch[row]) || letter;
}

// The rows of a rank that satisfy a condition.
function rowsOf({ lane }, rank, condition) {
  return indices(lane, rank * page.tracks, (rank + 1) * page.tracks - 1).filter(condition);
}

// [name, value] for each thing to be told of an action.
function about(lines, at, row) {
  const line = lines[at], other = page.alike && lines[1 - at];
  const whose = numbered(", microbatch ", line.microbatch[row]);
  const lasts = line.end[row] - line.start[row];
  const rows = [
    ["", `${kindOf(line, row).word}, stage ${line.stage[row]}${whose}`],
    ["place", `rank ${line.rank[row]} #${line.index[row]}`],
    ["start", time(line.start[row])], ["end", time(line.end[row])], ["duration", time(lasts)],
  ];
  // The parts of a pair or batch are one entry of the list.
  const entry = rowsOf(line, line.rank[row], (each) => line.index[each] === line.index[row]);
  if (entry.length > 1) rows.push(["together", entry.map((each) => token(line, each)).join(" ")]);
  const named = (each, of) => `${of.index[each]} ${token(of, each)}`;
  const same = (each) => named(each, other) === named(row, line);
  for (const each of other ? rowsOf(other, line.rank[row], same) : []) {
    const theirs = other.end[each] - other.start[each];
    rows.push([other.label, `${time(theirs)} from ${time(other.start[each])}`]);
    const more = (100 * (lasts - theirs)) / theirs;
    if (theirs) rows.push(["difference", `${more < 0 ? "−" : "+"}${short(Math.abs(more), 3)} %`]);
  }
  if (line.source[row] >= 0) rows.push(["source", line.sources[line.source[row]]]);
  return rows;
}

// The same of an idle time.
function aboutIdle(line, idle) {
  const [maker, transfer] = [line.idleBlamed[idle], line.idleTransfer[idle]];
  const lasts = time(line.idleEnd[idle] - line.idleStart[idle]);
  const rows = [["", `${lasts}, ${page.causes[line.idleCause[idle]]}`]];
  if (maker >= 0) rows.push(["waits for", `${token(line, maker)} on rank ${line.rank[maker]}`]);
  if (transfer >= 0) rows.push(["through", token(line, transfer)]);
  return rows;
}

// What a rank keeps at a time.
function aboutKept(line, rank, now) {
  const [start, amounts] = line.kept[rank];
  return [["keeps", amount(amounts[Math.max(0, bisect(start, now) - 1)])], ["at", time(now)]];
}
