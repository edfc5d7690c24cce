// The server's page: asks /live again and again and draws it, and lets the reader try a prompt.

// Text from the server is hostile until proven otherwise: it only ever becomes textContent, a title or a label.
const OFTEN = 500; // milliseconds between two questions
const SELDOM = 5000; // the same where nobody looks
const PATIENCE = 10000; // for an answer from /live
const SHOWN = 120; // seconds of the chart
const SMOOTH = 3; // seconds that a rate is taken over

// ---- elements and words

/** Set a text only where it changed: what a reader has selected stays so, and nothing is read aloud twice. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function speed(value) {
  return value >= 100 ? whole(Math.round(value)) : value.toFixed(1);
}

// ---- sources

const names = []; // in the order they were met: a source's place chooses its underline
let colours = new Map(); // by drafter: any CSS colour

function place(name) {
  if (!names.includes(name)) {
    names.push(name);
    setColours();
  }
  return names.indexOf(name);
}

/** Colours are variables of the whole page, so what was drawn before they came gets them too. */
function setColours() {
  names.forEach((name, i) => {
    const colour = colours.get(name) ?? colours.get(name.split(/[ :]/)[0]); // eagle3:2 is eagle3
    if (colour) document.documentElement.style.setProperty(`--source${i}`, colour);
  });
}

function hue(name) {
  return `var(--source${place(name)}, var(--faint))`;
}

function chip(name, text = name) {
  const element = make("span", "chip");
  paint(element, [name]).textContent = text;
  return element;
}

// ---- asking the server

/** The key stays in its field: it is kept nowhere else. */
function headers(more = {}) {
  const key = at("key").value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

let asking = null;
let next = 0;

/** Ask /live now; whatever was asked before is dropped. */
async function poll() {
  clearTimeout(next);
  asking?.abort();
  const mine = (asking = new AbortController());
  const limit = setTimeout(() => mine.abort(), PATIENCE);
  let live = null;
  let problem = "";
  try {
    const response = await fetch("live", { headers: headers(), signal: mine.signal, cache: "no-store" });
    if (response.ok) live = await response.json();
    else if (response.status === 401) problem = `needs an API key${at("key").value ? ": this one was refused" : ""}`;
    else problem = `not connected: status ${response.status}`;
  } catch {
    problem = /[^\x20-\x7e]/.test(at("key").value) ? "the API key has letters that can't be sent" : "not connected";
  }
  clearTimeout(limit);
  if (mine !== asking) return; // another question took over
  next = setTimeout(poll, document.hidden ? SELDOM : OFTEN);
  say(at("connection"), problem || "connected");
  at("connection").classList.toggle("up", !problem);
  at("connection").classList.toggle("down", Boolean(problem));
  document.body.classList.toggle("stale", Boolean(problem));
  sample(live);
  if (live) drawLive(live);
  drawChart();
}

// ---- tokens per second

let samples = []; // {time, tokens}; tokens is null while there was no connection

function sample(live) {
  const time = performance.now() / 1000;
  const tokens = live?.totals.new_tokens ?? null;
  if (tokens !== null && samples.some((earlier) => earlier.tokens > tokens)) samples = []; // the server began anew
  samples.push({ time, tokens });
  samples = samples.filter((earlier) => time - earlier.time <= SHOWN + SMOOTH);
}

/** The tokens per second that led up to a sample; null where there is nothing before it to compare with. */
function rate(index) {
  const last = samples[index];
  let first = null;
  for (let i = index - 1; i >= 0 && last.tokens !== null && samples[i].tokens !== null; i--) {
    if (first && last.time - samples[i].time > SMOOTH) break;
    first = samples[i];
  }
  return first && last.time > first.time ? (last.tokens - first.tokens) / (last.time - first.time) : null;
}

/** The round number that a scale may end with. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 3, 5, 10].find((step) => step * power >= value);
}

function drawChart() {
  const now = samples.at(-1).time;
  const rates = samples.map((_, index) => rate(index));
  const top = roundUp(Math.max(10, ...rates));
  const svg = makeSvg("svg", { viewBox: `0 0 ${SHOWN} 1`, preserveAspectRatio: "none" });
  const scale = [top, top / 2].map((value) => {
    const label = make("span", "", whole(value));
    label.style.top = `${100 * (1 - value / top)}%`;
    svg.append(makeSvg("line", { x1: 0, x2: SHOWN, y1: 1 - value / top, y2: 1 - value / top }));
    return label;
  });
  let line = [];
  rates.forEach((value, index) => {
    const x = SHOWN - (now - samples[index].time);
    if (value !== null && x >= 0) line.push([x, 1 - value / top]);
    if (line.length && (value === null || index === rates.length - 1)) {
      const points = line.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(4)}`).join("L");
      svg.append(makeSvg("path", { class: "area", d: `M${line[0][0]} 1L${points}V1z` }));
      svg.append(makeSvg("path", { class: "curve", d: `M${points}` }));
      line = []; // the connection was lost here: a gap
    }
  });
  at("chart").replaceChildren(svg, ...scale);
  const current = rates.at(-1);
  if (current !== null) say(at("rate"), speed(current));
}

// ---- what the server is doing

function drawLive(live) {
  const { totals } = live;
  colours = new Map(Object.entries(live.colours ?? {}));
  setColours();
  document.title = `${live.model} · slipstream`;
  say(at("model"), live.model);
  drawAbout(live);
  say(at("per-step"), totals.steps ? (totals.new_tokens / totals.steps).toFixed(2) : "–");
  drawShare(at("running"), live.running.length, live.max_batch);
  say(at("waiting"), whole(live.waiting));
  say(at("cache"), `${(100 * live.cache.used).toFixed(0)}%`);
  drawSources(totals.by_source);
  drawAnswers(live.running);
  const ends = [
    ["finished", totals.finished],
    ["cancelled", totals.cancelled],
    ["timed out", totals.timeout],
    ["failed", totals.failed],
  ]
    .filter(([, count]) => count)
    .map(([end, count]) => `${whole(count)} ${end}`);
  say(
    at("totals"),
    `${plural(totals.requests, "request")}${ends.length ? ` (${ends.join(", ")})` : ""} · ` +
      `${plural(totals.prompt_tokens, "prompt token")} read · ${plural(totals.new_tokens, "token")} written`,
  );
}

function drawAbout(live) {
  const how = live.drafter === "none" ? "plain decoding" : `${live.drafter} drafts`;
  const said = [how, live.device, live.dtype].join(" · ");
  if (at("about").textContent === said) return;
  const square = make("i", "swatch");
  square.style.setProperty("--c", hue(live.drafter));
  at("about").replaceChildren(square, said);
}

function drawShare(element, part, all) {
  if (element.textContent === `${whole(part)} of ${whole(all)}`) return;
  element.replaceChildren(whole(part), make("small", "", ` of ${whole(all)}`));
}

function drawSources(bySource) {
  const sources = Object.entries(bySource).sort(([, a], [, b]) => b.accepted - a.accepted);
  const most = Math.max(1, ...sources.map(([, count]) => count.accepted));
  at("no-sources").hidden = sources.length > 0;
  at("sources").replaceChildren(
    ...sources.map(([name, { proposed, accepted }]) => {
      const row = make("div", "source");
      const label = row.appendChild(make("div"));
      const share = proposed ? `, ${((100 * accepted) / proposed).toFixed(0)}%` : "";
      label.append(chip(name), make("span", "count", `${whole(accepted)} of ${whole(proposed)} drafted${share}`));
      const bar = row.appendChild(make("span", "bar")).appendChild(make("i"));
      bar.style.width = `${(100 * accepted) / most}%`;
      bar.style.setProperty("--c", hue(name));
      return row;
    }),
  );
}

const rows = new Map(); // by the answer's id

function drawAnswers(running) {
  at("answers-box").hidden = running.length === 0;
  at("no-answers").hidden = running.length > 0;
  const ids = new Set(running.map((answer) => answer.id));
  for (const [id, row] of rows) {
    if (ids.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  for (const answer of running) drawRow(answer);
}

function drawRow(answer) {
  let row = rows.get(answer.id);
  if (!row) {
    row = at("answers").insertRow();
    rows.set(answer.id, row);
    for (const kind of ["", "", "n", "n", "n", "n", ""]) row.insertCell().className = kind;
    row.dataset.id = row.cells[0].title = answer.id;
  }
  row.cells[1].className = answer.state === "reading" ? "reading" : "";
  const texts = [
    answer.id.replace(/^(chat)?cmpl-/, ""), // all begin alike, and a narrow screen shows the beginning
    answer.state,
    whole(answer.prompt_tokens),
    whole(answer.new_tokens),
    answer.steps ? answer.tokens_per_step.toFixed(2) : "–",
    answer.seconds.toFixed(1),
  ];
  texts.forEach((text, i) => say(row.cells[i], text));
  const chips = Object.entries(answer.by_source ?? {}).map(([name, { proposed, accepted }]) => {
    const element = chip(name, `${name} ${whole(accepted)}/${whole(proposed)}`);
    element.title = `${whole(accepted)} of ${plural(proposed, "token")} that ${name} drafted`;
    return element;
  });
  row.cells[6].replaceChildren(...chips);
}

// ---- trying a prompt

let sending = null; // stops the answer that is being written
let counts = new Map(); // of the answer's tokens, by source

async function send() {
  if (sending) return;
  const mine = (sending = new AbortController());
  clearAnswer();
  setBusy(true);
  try {
    await answer(mine.signal);
  } catch (error) {
    if (mine.signal.aborted) say(at("outcome"), `Stopped after ${plural(written(), "token")}.`);
    else if (error instanceof Refused) fail(error.message);
    else fail(`${written() ? "The answer broke off" : "No answer came"}: ${error.message}`);
  }
  sending = null;
  setBusy(false);
}

function clearAnswer() {
  counts = new Map();
  at("answer").replaceChildren();
  at("legend").replaceChildren();
  at("answer").hidden = at("legend").hidden = at("error").hidden = true;
  say(at("outcome"), "");
}

function setBusy(busy) {
  const focused = document.activeElement;
  at("send").disabled = busy;
  at("stop").disabled = !busy;
  at("answer").setAttribute("aria-busy", busy);
  if (busy) say(at("outcome"), "Waiting for the first token …");
  // A button that is switched off loses the keyboard: the other one takes it.
  if (focused === at("send") && busy) at("stop").focus();
  if (focused === at("stop") && !busy) at("send").focus();
}

function fail(message) {
  say(at("outcome"), "");
  at("error").textContent = message;
  at("error").hidden = false;
}

/** The server said why there is no answer. */
class Refused extends Error {}

function reason(error, otherwise) {
  return new Refused(String(error?.message ?? (typeof error === "string" ? error : otherwise)));
}

async function answer(signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    signal,
    body: JSON.stringify({
      messages: [{ role: "user", content: at("prompt").value }],
      stream: true,
      stream_options: { include_usage: true },
      max_completion_tokens: at("max-tokens").valueAsNumber,
      temperature: at("temperature").valueAsNumber,
      slipstream: { sources: true, stats: true },
    }),
  });
  if (!response.ok) {
    const body = await response.json().catch(() => null); // a proxy may answer with a page of its own
    throw reason(body?.error, `The server answered with status ${response.status}.`);
  }
  const end = { finish: null, usage: null, stats: null, sampled: at("temperature").valueAsNumber > 0 };
  for await (const event of events(response.body)) {
    if (event === "[DONE]") {
      drawOutcome(end);
      return;
    }
    const chunk = JSON.parse(event);
    if (chunk.error) throw reason(chunk.error, "The server failed.");
    const choice = chunk.choices?.[0];
    end.finish = choice?.finish_reason ?? end.finish;
    end.usage = chunk.usage ?? end.usage;
    end.stats = chunk.slipstream?.stats ?? end.stats;
    drawTokens(choice?.delta?.content ?? "", chunk.slipstream?.tokens ?? []);
  }
  throw new Error("the connection was closed before its end.");
}

/** The data of each server-sent event. A chunk of bytes may end anywhere: inside a line, inside a character. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((line) => line.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already broken: nothing is left to close
  }
}

function drawTokens(content, tokens) {
  // The content is the answer. Tokens that don't spell it can't colour it.
  const spelled = tokens.map((token) => token.text).join("") === content;
  const pieces = spelled ? tokens : [{ text: content, source: TARGET }];
  if (!content && pieces !== tokens) return;
  for (const { text, source } of pieces) {
    const sources = sourcesOf(source);
    const element = make("span", "token");
    fill(paint(element, sources), text);
    element.title = sources[0] === TARGET ? "the model's own" : `drafted by ${sources.join(", ")}`;
    at("answer").append(element);
    for (const name of sources) counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  if (!pieces.length) return;
  at("answer").hidden = false;
  say(at("outcome"), "");
  drawLegend();
}

function drawLegend() {
  at("legend").hidden = false;
  const entries = [...counts].sort(([a], [b]) => (a === TARGET) - (b === TARGET));
  at("legend").replaceChildren(
    ...entries.map(([name, count]) => {
      const entry = make("span");
      entry.append(name === TARGET ? "the model's own" : chip(name), make("span", "count", whole(count)));
      return entry;
    }),
  );
}

function written() {
  return at("answer").childElementCount;
}

function drawOutcome({ finish, usage, stats, sampled }) {
  const said = [plural(usage?.completion_tokens ?? written(), "token")];
  if (stats) {
    said.push(`${stats.tokens_per_step.toFixed(2)} tokens per step`);
    const own = sampled ? "drawn exactly as the model draws" : "exactly the model's own answer";
    said.push(stats.exact ? own : "may differ from the model's own answer");
  }
  if (finish === "length") said.push("cut off at max tokens");
  say(at("outcome"), said.join(", "));
}

/** #prompt=… fills the box. It never sends: a link must not spend the reader's tokens. */
function readHash() {
  const prompt = new URLSearchParams(location.hash.slice(1)).get("prompt");
  if (prompt !== null) at("prompt").value = prompt;
}

at("try").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  if (!sending) at("try").requestSubmit(); // checks the fields as the button does
});
at("stop").addEventListener("click", () => sending?.abort());
at("key").addEventListener("change", poll);
document.addEventListener("visibilitychange", poll);
window.addEventListener("hashchange", readHash);
readHash();
poll();
