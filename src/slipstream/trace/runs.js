// The traces that the page shows, one or two, and what all its parts are made of.

// Text from a trace is hostile until proven otherwise: it only ever becomes textContent, a title or a label.
const data = JSON.parse(document.getElementById("trace").textContent);
const runs = data.runs.map(readRun);
const compared = runs.length > 1;
const hues = new Map(Object.entries(data.colours)); // by name: the CSS variable of its colour

const LOSSLESS = ["match", "rejection"]; // accept rules whose text differs from plain decoding by rounding at most
const names = [...new Set(runs.flatMap((run) => run.steps).flatMap(sourcesIn))];

/** A trace with what is drawn of it. `ends`: when each step was over, in milliseconds since the first began. */
function readRun(lines, number) {
  const steps = lines.filter((line) => "step" in line);
  const ends = [];
  for (const step of steps) ends.push((ends.at(-1) ?? 0) + total(step));
  return {
    number,
    header: lines[0],
    steps,
    ends,
    end: lines.find((line) => line.end) ?? null,
    label: lines[0].drafter,
    tokens: [], // {element, step, place, sources}, in the order of the answer
    stepElements: [],
  };
}

function total(step) {
  return step.draft_ms + step.verify_ms + step.host_ms;
}

function begins(run, index) {
  return index > 0 ? run.ends[index - 1] : 0;
}

const longest = Math.max(...runs.map((run) => run.ends.at(-1) ?? 0)); // both are drawn and played on one clock

// ---- elements and words

/** The ids of the second run's elements end in 2. */
const ofRun = (run, id) => at(run.number ? `${id}2` : id);

function number(value) {
  if (Math.abs(value) >= 1000) return value.toExponential(1);
  return Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(2);
}

function duration(ms) {
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

// ---- sources

function sourcesIn(step) {
  const proposed = step.nodes.flatMap((node) => Object.keys(node.sources));
  const accepted = step.emitted.flatMap((token) => sourcesOf(token.source));
  return [...proposed, ...accepted].filter((name) => name !== TARGET);
}

function place(name) {
  return names.indexOf(name);
}

function hue(name) {
  return `var(${hues.get(name)})`;
}

function chip(sources, text) {
  const element = make("span", "chip");
  paint(element, sources).textContent = text;
  return element;
}
