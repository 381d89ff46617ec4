// What of the page is seen, and its place in the address.

const GUTTER = 64, AXIS = 38, FOOT = 12;

// `from` and `to` are ticks, `top` the pixels scrolled away, `height` that of a compute lane in
// pixels, 0 for what fits. `shown` is what is ticked, `selected` {at: which timeline, place}.
const view = {};
const shown = {};
let selected = null;
let ask = () => {};

const margin = () => page.longest * 0.01;
const whole = () => ({ from: -margin(), to: page.longest + margin(), top: 0, height: 0 });

function goTo(next) {
  Object.assign(view, next);
  const { from: least, to: most } = whole();
  const all = most - least;
  const span = Math.min(Math.max(view.to - view.from, Math.min(all, 8)), all);
  const from = (view.from + view.to - span) / 2;
  view.from = Math.min(Math.max(from, least), most - span);
  view.to = view.from + span;
  ask();
}

// `at` is the part of the width that stays where it is.
function zoom(factor, at = 0.5) {
  const span = view.to - view.from;
  const from = view.from + span * at * (1 - factor);
  goTo({ from, to: from + span * factor });
}

function pan(part) {
  const by = (view.to - view.from) * part;
  goTo({ from: view.from + by, to: view.to + by });
}

// #t=3..7.5&y=40&h=20&on=memory&off=transfers&sel=0.17, of which is left out what is as at first.
function fragment() {
  const words = [];
  if (view.to - view.from < page.longest * 1.0199) {
    words.push(`t=${short(view.from * page.tick)}..${short(view.to * page.tick)}`);
  }
  if (view.top > 0) words.push(`y=${Math.round(view.top)}`);
  if (view.height) words.push(`h=${view.height}`);
  for (const [word, on] of [["on", true], ["off", false]]) {
    const changed = Object.keys(shown).filter((key) => shown[key] === on && page.shown[key] !== on);
    if (changed.length) words.push(`${word}=${changed}`);
  }
  if (selected) words.push(`sel=${selected.at}.${selected.place}`);
  return words.length ? `#${words.join("&")}` : "";
}

function restore(lines) {
  const said = new URLSearchParams(location.hash.slice(1));
  const split = (key, by) => (said.get(key) || "").split(by);
  const number = (key, most) => Math.min(Math.max(0, parseFloat(said.get(key)) || 0), most);
  const next = { ...whole(), top: number("y", 1e9), height: number("h", 120) };
  const [from, to] = split("t", "..").map((text) => parseFloat(text) / page.tick);
  if (to > from) Object.assign(next, { from, to });
  Object.assign(shown, page.shown);
  for (const key of split("on", ",")) if (key in shown) shown[key] = true;
  for (const key of split("off", ",")) if (key in shown) shown[key] = false;
  const [at, place] = split("sel", ".").map(Number);
  selected = lines[at] && lines[at].known[place] ? { at, place } : null;
  goTo(next);
}

let writing = 0;
function remember() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    const words = fragment();
    if (location.hash !== words) history.replaceState(null, "", words || location.pathname);
  }, 150);
}
