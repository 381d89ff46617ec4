// Fills lanes pixel by pixel, so that a frame costs as much with a hundred actions on a pixel as
// with one on a hundred: a pixel has the colour of what takes most of it, the paler the more of it
// is idle.

const CROWDED = 3; // what is narrower, in pixels, is averaged with its neighbours

// A colour as the four bytes of a pixel lie in memory: red first.
function rgb(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

// One colour with so much of another over it: red and blue at once, then green.
function mix(under, over, part) {
  const of = Math.round(part * 256);
  const blend = (mask) => (((under & mask) * (256 - of) + (over & mask) * of) / 256) & mask;
  return (0xff000000 | blend(0xff00ff) | blend(0xff00)) >>> 0;
}

// Draws a lane into a line of pixels from `view.from` on; returns how many things it drew.
function rasterise(lane, scale, pixels, colourOf) {
  const width = pixels.length;
  const { id, start, end } = lane;
  const first = lane.first(view.from - 1 / scale);
  const last = lane.after(view.to);
  const seen = [], taken = []; // the colours in the pixel, and how much of it each takes
  const marks = [];
  let pixel = -1;
  let before = -1e9; // where the one before ends
  let wide = true; // whether it was

  function settle() {
    let sum = 0, most = 0, best = 0;
    for (let k = 0; k < seen.length; k++) {
      sum += taken[k];
      if (taken[k] > most) (most = taken[k]), (best = seen[k]);
    }
    if (sum && pixel >= 0 && pixel < width) {
      pixels[pixel] = mix(pixels[pixel], best, Math.min(1, sum));
    }
    seen.length = 0;
  }
  for (let i = first; i < last; i++) {
    const a = (start[i] - view.from) * scale;
    const b = (end[i] - view.from) * scale;
    const colour = colourOf(id[i]);
    if (b - a >= CROWDED) {
      settle();
      const right = Math.round(b);
      pixels.fill(colour, Math.max(0, Math.round(a)), right);
      // A paler edge sets it off from the next.
      if (b - a > 5 && right <= width) pixels[right - 1] = mix(colour, 0xffffffff, 0.6);
    } else {
      // What is too narrow to be seen has pixels of its own where nothing is beside it.
      if (b - a < 1.5 && (wide || a - before > CROWDED)) marks.push([Math.floor(a), colour]);
      for (let at = Math.floor(a); at < b; at++) {
        if (at !== pixel) settle(), (pixel = at);
        let k = seen.indexOf(colour);
        if (k < 0) (k = seen.push(colour) - 1), (taken[k] = 0);
        taken[k] += Math.min(b, at + 1) - Math.max(a, at);
      }
    }
    before = b;
    wide = b - a >= CROWDED;
  }
  settle();
  for (const [at, colour] of marks) {
    pixels.fill(colour, Math.max(0, Math.min(at, width - 2)), Math.max(0, at + 2));
  }
  return Math.max(0, last - first);
}
