// Where every lane is: rows of ranks, one below the other, in pixels from the top of the first.

const HEADING = 22, EDGE = 5;

// The heights of the parts of a rank's row, given that of its compute lane.
function heights(compute) {
  // Where lanes are thin, transfers would be but a line each.
  const strip = shown.transfers && compute > 7 ? Math.max(1, Math.round(compute / 10)) : 0;
  const curve = shown.memory ? Math.max(6, Math.round(compute * 0.8)) : 0;
  const gap = Math.max(1, Math.round(compute / 6));
  const low = compute + (PARTS - 1) * strip;
  return { compute, strip, low, gap, curve, all: low + curve + gap };
}

// {bands, height, parts}: a band is a heading or the row of a rank of one of the timelines.
function layout(lines, room) {
  const ranks = lines.reduce((sum, line) => sum + line.ranks, 0);
  const several = lines.length > 1;
  const rows = ({ all, gap }) => ranks * all + (shown.paired ? (ranks / 2) * gap : 0);
  let compute = view.height || 48;
  room -= EDGE + 2 * HEADING * several;
  while (!view.height && compute > 3 && rows(heights(compute)) > room) compute--;
  const parts = heights(compute);
  const bands = [];
  let height = EDGE;
  const add = (band, size) => {
    bands.push({ ...band, y: height });
    height += size;
  };
  const row = (at, rank) => rank < lines[at].ranks && add({ at, rank }, parts.all);
  if (shown.paired) {
    add({ text: lines.map((line) => line.label).join(", and below it ") }, HEADING);
    for (let rank = 0; lines.some((line) => rank < line.ranks); rank++) {
      lines.forEach((_, at) => row(at, rank));
      height += parts.gap;
    }
  } else {
    lines.forEach((line, at) => {
      if (several) add({ text: `${line.label}: ${line.says}` }, HEADING);
      for (let rank = 0; rank < line.ranks; rank++) row(at, rank);
    });
  }
  return { bands, height, parts };
}

const computes = (lane) => !lane || lane >= PARTS;

// The lanes that are drawn of a rank.
function lanesIn(line, rank) {
  const parts = line.stages[rank].map((_, turn) => PARTS + turn);
  const computing = line.replicas && parts.length ? parts : [0];
  return frame.placed.parts.strip ? computing.concat(LANES.slice(1)) : computing;
}

// The top and the height of a lane in the row of a rank.
function laneBox(lane, line, rank) {
  const { compute, strip } = frame.placed.parts;
  if (lane >= PARTS) {
    const height = compute / line.stages[rank].length;
    return [(lane - PARTS) * height, height];
  }
  return !lane || !strip ? [0, compute] : [compute + (lane - 1) * strip, strip];
}
