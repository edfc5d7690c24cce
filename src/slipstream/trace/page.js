// Which step is chosen, its link, and what mouse and keys do.

let active = runs[0]; // whose steps the keys walk through
let current = -1; // the chosen step of the active run

/** Show a step; `place` is the emitted token to point at in its tree, if any. */
function choose(index, place = -1, run = active) {
  active.stepElements[current]?.classList.remove("current");
  mark(active, -1);
  active = run;
  current = run.steps.length ? index : -1;
  document.body.classList.toggle("open", current >= 0);
  const panel = at("panel");
  panel.scrollTop = 0;
  mark(run, current);
  if (!playing) link();
  if (current < 0) {
    panel.replaceChildren(drawHint());
    return;
  }
  run.stepElements[current].classList.add("current");
  panel.replaceChildren(...drawStep(run, current, place));
  panel.dataset.step = current;
  panel.dataset.run = run.number;
  run.stepElements[current].scrollIntoView({ block: "nearest" });
}

// ---- links

function fragment(run, index) {
  return `#${run.number ? "second-" : ""}step-${index + 1}`;
}

let linking = 0;

/** The address names the chosen step. Browsers refuse to be told so at every repeat of a key that is held down. */
function link() {
  clearTimeout(linking);
  linking = setTimeout(() => {
    const place = current < 0 ? location.pathname + location.search : fragment(active, current);
    history.replaceState(null, "", place);
  }, 100);
}

function follow() {
  const [, second, step] = /^#(second-)?step-(\d+)$/.exec(location.hash) ?? [];
  const run = runs[second ? 1 : 0];
  const index = Number(step) - 1;
  if (run?.steps[index]) choose(index, -1, run);
}

// ---- mouse and keys

drawHead();
for (const run of runs) drawRun(run);
for (const run of runs) drawTimeline(run);

for (const run of runs) {
  ofRun(run, "text").addEventListener("click", (event) => {
    const element = event.target.closest(".token");
    if (!element || !getSelection().isCollapsed) return; // a text being selected is no click
    const token = run.tokens[Number(element.dataset.index)];
    leavePlay();
    choose(token.step, token.place, run);
  });
}

for (const { name, button } of legend) {
  button.addEventListener("click", () => {
    if (!filter.delete(name)) filter.add(name);
    applyFilter();
  });
}

const actions = {
  back: () => choose(current < 0 ? active.steps.length - 1 : Math.max(current - 1, 0)),
  on: () => choose(Math.min(current + 1, active.steps.length - 1)),
  first: () => choose(0),
  last: () => choose(active.steps.length - 1),
  close: () => choose(-1),
  clear: () => {
    filter.clear();
    applyFilter();
    choose(-1);
  },
};
const keys = new Map([
  ["ArrowLeft", "back"], ["k", "back"], ["ArrowRight", "on"], ["j", "on"], ["Home", "first"], ["End", "last"],
  ["Escape", "clear"], [" ", "play"],
]);

/** Do what the reader asked for; whatever it is, it ends what is being played. */
function act(action) {
  if (action === "play") return togglePlay();
  leavePlay();
  actions[action]();
}

at("play").addEventListener("click", togglePlay);

at("panel").addEventListener("click", (event) => {
  const action = event.target.closest("button")?.dataset.action;
  if (!action) return;
  act(action);
  at("panel").querySelector(`[data-action="${action}"]`)?.focus(); // the button was rebuilt under the pointer
});

document.addEventListener("keydown", (event) => {
  const action = keys.get(event.key);
  const steps = runs.some((run) => run.steps.length);
  if (!action || !steps || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.key === " " && event.target.closest?.("button, summary, a")) return; // there space has its own meaning
  event.preventDefault();
  act(action);
});

addEventListener("hashchange", () => {
  leavePlay();
  follow();
});

if (compared) drawComparison();
drawAxis();
for (const run of runs) show(run, run.steps.length);
drawClock();
choose(-1);
follow();
