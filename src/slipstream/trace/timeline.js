// The whole run as a timeline: a column per step, as wide as its time and as high as its tokens.

const highest = Math.max(1, ...runs.flatMap((run) => run.steps.map((step) => step.emitted.length)));
const FEW = 150; // columns that are wide enough to stand apart

function drawTimeline(run) {
  const line = make("div", "timeline");
  line.id = run.number ? "timeline2" : "timeline";
  line.tabIndex = 0;
  line.setAttribute("role", "slider");
  line.setAttribute("aria-label", compared ? `The steps of ${run.label}` : "The steps");
  line.setAttribute("aria-valuemin", 1);
  line.setAttribute("aria-valuemax", run.steps.length);
  const svg = makeSvg("svg", { viewBox: `0 0 ${longest || 1} ${highest}`, preserveAspectRatio: "none" });
  svg.classList.toggle("apart", run.steps.length <= FEW);
  run.pieces = drawPieces(run);
  run.steps.forEach((step, index) => svg.append(drawColumn(run, step, index)));
  svg.append(...run.pieces.map((piece) => piece.element));
  run.marker = make("div", "marker");
  run.hand = make("div", "hand");
  run.marker.hidden = run.hand.hidden = true;
  line.append(svg, run.marker, run.hand);
  line.addEventListener("click", (event) => {
    const box = line.getBoundingClientRect();
    leavePlay();
    choose(stepAt(run, ((event.clientX - box.left) / box.width) * longest), -1, run);
  });
  line.addEventListener("focus", () => run !== active && choose(-1, -1, run)); // the keys walk where the reader is
  const row = make("div", "row");
  run.count = make("span", "count");
  if (compared) row.append(swatch(run.header.drafter), make("b", "", run.label), run.count);
  at("timelines").append(...(compared ? [row] : []), line);
}

/** The room of a step, which says on hover what happened in it. */
function drawColumn(run, step, index) {
  const room = makeSvg("rect", { class: "room", x: begins(run, index), width: total(step), y: 0, height: highest });
  const drafted = step.path.length - 1;
  const by = [...new Set(step.emitted.flatMap((token) => sourcesOf(token.source)))].filter((name) => name !== TARGET);
  room.append(makeSvg("title", {}));
  room.firstChild.textContent =
    `Step ${index + 1}: ${plural(drafted + 1, "token")} in ${duration(total(step))}` +
    (drafted ? `, ${drafted} drafted by ${by.join(", ")}` : "");
  return room;
}

/** A shape per source, of its pieces in all columns: a run has thousands of those. In a column tokens stand from the
    bottom to the top, in the order of the text: those that were drafted, then the target's own. */
function drawPieces(run) {
  const shapes = new Map([...names, TARGET].map((name) => [name, ""]));
  run.steps.forEach((step, index) => {
    const [x, width] = [begins(run, index), total(step)];
    step.emitted.forEach((token, place) => {
      const sources = sourcesOf(token.source);
      const height = 1 / sources.length; // who drafted the same token shares it
      sources.forEach((name, i) => {
        const y = highest - place - i * height;
        shapes.set(name, `${shapes.get(name)}M${x} ${y}v${-height}h${width}v${height}z`);
      });
    });
  });
  return [...shapes].map(([name, d]) => {
    const element = makeSvg("path", { class: name === TARGET ? "piece own" : "piece", d });
    if (name !== TARGET) element.style.setProperty("--c", hue(name));
    return { element, sources: [name] };
  });
}

function stepAt(run, time) {
  const index = run.ends.findIndex((end) => end > time);
  return index < 0 ? run.steps.length - 1 : index;
}

function drawAxis() {
  const axis = make("div", "axis");
  axis.append(make("span", "", "0 s"), make("span", "", duration(longest)));
  at("timelines").append(axis);
  at("timelines").hidden = longest === 0;
}

/** Point at the chosen step. */
function mark(run, index) {
  run.marker.hidden = index < 0;
  const line = run.marker.parentElement;
  if (index < 0) {
    line.removeAttribute("aria-valuenow");
    return;
  }
  run.marker.style.left = `${(100 * begins(run, index)) / longest}%`;
  run.marker.style.width = `${(100 * total(run.steps[index])) / longest}%`;
  line.setAttribute("aria-valuenow", index + 1);
}
