// The head, and each run's legend and answer.

function drawRun(run) {
  const suffix = run.number ? "2" : "";
  const section = make("section", "one");
  const parts = [
    ["div", "legend"],
    ["p", "shares"],
    ["div", "text"],
    ["p", "note"],
  ].map(([tag, name]) => Object.assign(make(tag, name), { id: name + suffix }));
  section.append(...parts);
  parts[0].setAttribute("role", "group");
  parts[0].setAttribute("aria-label", "Show the tokens of");
  parts[2].dir = "auto";
  at("runs").append(section);
  drawAnswer(run);
  drawNote(run);
  drawLegend(run);
  const about = [drawAbout(run, suffix), drawFigures(run, suffix)];
  if (compared) section.prepend(...about);
  else {
    at("model").after(about[0]);
    at("header").append(about[1]);
  }
}

function drawAnswer(run) {
  const all = document.createDocumentFragment();
  run.steps.forEach((step, index) => {
    const group = make("span", "step");
    step.emitted.forEach((emitted, place) => {
      const element = make("span", "token");
      const sources = sourcesOf(emitted.source);
      fill(paint(element, sources), emitted.text);
      element.dataset.index = run.tokens.length;
      run.tokens.push({ element, step: index, place, sources });
      group.append(element);
    });
    run.stepElements.push(group);
    all.append(group);
  });
  ofRun(run, "text").append(all);
}

function drawNote(run) {
  const { end } = run;
  const notes = [];
  if (!end) notes.push("The run was interrupted: this is as far as it got.");
  else if (end.text !== ofRun(run, "text").textContent) {
    notes.push("The pieces of this trace don't add up to its answer.");
  }
  if (end && end.finish !== "stop") notes.push(`The generation ended by: ${end.finish}.`);
  ofRun(run, "note").textContent = notes.join(" ");
  ofRun(run, "note").hidden = notes.length === 0;
}

// ---- the head

function drawHead() {
  const { header } = runs[0];
  document.title = `${header.model} · slipstream trace`;
  at("model").textContent = header.model;
  at("prompt-size").textContent = `Prompt, ${plural(header.prompt_tokens, "token")}`;
  at("prompt").textContent = header.prompt;
  if (!compared) return;
  const [one, other] = runs;
  document.body.classList.add("two");
  if (one.label === other.label) [one.label, other.label] = [`${one.label} (1)`, `${other.label} (2)`];
  at("prompt2").textContent = other.header.prompt;
  at("prompt2").hidden = header.prompt === other.header.prompt;
}

/** Said once both answers are drawn: how fast, and whether it's the same text. */
function drawComparison() {
  const [one, other] = runs;
  const said = [];
  if (rate(one) && rate(other)) {
    said.push(`${one.label} wrote ${(rate(one) / rate(other)).toFixed(2)} × as fast as ${other.label}.`);
  }
  if (one.header.model !== other.header.model) said.push(`The second model is ${other.header.model}.`);
  if (one.header.prompt !== other.header.prompt) said.push("They were asked different things.");
  else said.push(sameText(one, other));
  at("compared").textContent = said.join(" ");
  at("compared").hidden = false;
}

function sameText(one, other) {
  const [a, b] = [one, other].map((run) => run.steps.flatMap((step) => step.emitted.map((token) => token.token)));
  const place = a.findIndex((token, i) => token !== b[i]);
  if (place < 0 && a.length === b.length) return "Both wrote the same tokens.";
  const first = (place < 0 ? a.length : place) + 1;
  return first > Math.min(a.length, b.length)
    ? `One goes on where the other ended, after ${plural(first - 1, "token")}.`
    : `Their texts differ from token ${first} on.`;
}

function rate(run) {
  const spent = (run.ends.at(-1) ?? 0) / 1000;
  return Number(run.end?.stats.tokens_per_second) || (spent > 0 ? run.tokens.length / spent : 0);
}

function drawAbout(run, suffix) {
  const { header } = run;
  const lossy = !header.exact && !LOSSLESS.includes(header.accept);
  const verdict = make("span", lossy ? "verdict lossy" : "verdict");
  verdict.id = `verdict${suffix}`;
  verdict.textContent = header.exact ? "exact" : lossy ? "LOSSY" : "same rule, rounding may differ";
  verdict.title = header.exact
    ? "The text is what the model writes without drafts."
    : "The text may differ from what the model writes without drafts.";
  const about = make("p", "run");
  const who = compared ? run.label : header.drafter;
  const how = header.drafter === "none" ? "plain decoding" : `${who} drafts, ${header.accept} accepts`;
  about.append(swatch(header.drafter), `${how} · `, verdict);
  return about;
}

/** A drafter's colour alone, for a drafter that asks others has one too. */
function swatch(name) {
  const square = make("i", "swatch");
  square.style.setProperty("--c", hue(name));
  return square;
}

function drawFigures(run, suffix) {
  const list = make("dl", "figures");
  list.id = `figures${suffix}`;
  const count = run.tokens.length;
  const steps = run.steps.length;
  const figures = [
    ["tokens", count.toLocaleString("en")],
    ["steps", steps.toLocaleString("en")],
    ["tokens/step", steps ? (count / steps).toFixed(2) : "–"],
    ["tokens/s", rate(run) ? rate(run).toFixed(1) : "–"],
  ];
  for (const [label, value] of figures) {
    const pair = list.appendChild(make("div"));
    pair.append(make("dt", "", label), make("dd", "", value));
  }
  return list;
}

// ---- the legend

const filter = new Set(); // of sources
const legend = []; // {name, button}, of both runs

function drawLegend(run) {
  const here = new Set(run.steps.flatMap(sourcesIn));
  const count = run.tokens.length;
  let sum = 0; // of the shares as they are shown
  for (const name of [...names.filter((name) => here.has(name)), TARGET]) {
    const mine = run.tokens.filter((token) => token.sources.includes(name)).length;
    const share = count ? Math.round((100 * mine) / count) : 0;
    sum += share;
    const button = make("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.title = name === TARGET ? "the model’s own tokens" : `accepted tokens that ${name} had drafted`;
    button.append(chip([name], name ?? "target"), make("span", "count", `${mine.toLocaleString("en")} · ${share} %`));
    ofRun(run, "legend").append(button);
    legend.push({ name, button });
  }
  const shared = run.tokens.filter((token) => token.sources.length > 1).length;
  const why = shared
    ? `${plural(shared, "token")} had been drafted by several, and each of them counts ${shared === 1 ? "it" : "them"}.`
    : "each is rounded.";
  ofRun(run, "shares").textContent = sum > 100 ? `Together these are ${sum} %: ${why}` : "";
  ofRun(run, "shares").hidden = sum <= 100;
}

function applyFilter() {
  const dim = (sources) => filter.size > 0 && !sources.some((name) => filter.has(name));
  for (const { name, button } of legend) button.setAttribute("aria-pressed", String(filter.has(name)));
  for (const run of runs) {
    for (const token of run.tokens) token.element.classList.toggle("dim", dim(token.sources));
    for (const piece of run.pieces) piece.element.classList.toggle("dim", dim(piece.sources));
  }
}
