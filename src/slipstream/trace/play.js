// Playing the run: steps follow each other as they did, and two runs go by one clock.

const QUICKEST = 10_000; // milliseconds that a run is played for at least, so that an eye can follow it,
const SLOWEST = 60_000; // and at most; in between it is played as fast as it was
const speed = longest / Math.min(Math.max(longest, QUICKEST), SLOWEST);

let clock = null; // milliseconds into the run; null where nothing is being played
let playing = false;
let last = null; // when the clock was last moved, in the browser's time

function togglePlay() {
  if (playing) return pause();
  const chosen = current < 0 || current === active.steps.length - 1 ? 0 : begins(active, current);
  if (clock === null || clock >= longest) clock = chosen;
  playing = true;
  last = null;
  at("panel").setAttribute("aria-live", "off"); // nobody wants all these steps read out
  seek(clock);
  requestAnimationFrame(tick);
}

function pause() {
  playing = false;
  at("panel").setAttribute("aria-live", "polite");
  drawClock();
  link();
}

/** The reader chose something: everything is shown again. */
function leavePlay() {
  if (clock === null) return;
  clock = null;
  pause();
  for (const run of runs) {
    run.hand.hidden = true;
    show(run, run.steps.length);
  }
}

function tick(now) {
  if (!playing) return;
  if (last !== null) seek(Math.min(clock + (now - last) * speed, longest));
  last = now;
  if (clock >= longest) pause();
  else requestAnimationFrame(tick);
}

/** Show all runs as they were at a time: what was written, and the last step that was over. */
function seek(time) {
  clock = time;
  for (const run of runs) {
    const over = run.ends.findIndex((end) => end > time);
    const done = over < 0 ? run.steps.length : over;
    run.hand.hidden = false;
    run.hand.style.left = `${(100 * Math.min(time, run.ends.at(-1) ?? 0)) / longest}%`;
    const news = done !== run.shown;
    show(run, done);
    if (news && run === active && done) choose(done - 1, -1, run);
  }
  drawClock();
}

/** Steps from `done` on are yet to come. */
function show(run, done) {
  const before = run.shown ?? run.steps.length;
  for (let i = Math.min(before, done); i < Math.max(before, done); i++) {
    run.stepElements[i].classList.toggle("later", i >= done);
  }
  run.shown = done;
  const written = done < run.steps.length ? run.steps[done].first : run.tokens.length;
  const sofar = clock === null ? "" : `${written.toLocaleString("en")} of `;
  run.count.textContent = `${sofar}${plural(run.tokens.length, "token")}, ${duration(run.ends.at(-1) ?? 0)}`;
}

function drawClock() {
  at("play").textContent = playing ? "❚❚ Pause" : "▶ Play";
  at("play").title = "space";
  const pace = Math.abs(speed - 1) < 0.005 ? "as fast as it was" : `at ${number(speed)} × the speed it had`;
  at("clock").textContent = clock === null ? "" : `${duration(clock)} of ${duration(longest)}, ${pace}`;
}
