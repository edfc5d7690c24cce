// The panel of one step: the drafted tree, what was kept of it, and where the time went.

const ROW = 26; // the height of a row of the tree, as in the style sheet
const INDENT = 18;
const BONUS = -1; // in place of a node: the token after the path, which is in no tree

function drawHint() {
  delete at("panel").dataset.step;
  const hint = make("p", "hint");
  hint.append("Click a token or a column to see how its step was drafted, or walk through the steps with ");
  hint.append(make("kbd", "", "←"), " ", make("kbd", "", "→"), "; ", make("kbd", "", "space"), " plays the run.");
  return hint;
}

function drawStep(run, index, place) {
  const step = run.steps[index];
  const bar = make("div", "bar");
  const title = bar.appendChild(make("h2"));
  const self = title.appendChild(make("a", "", `Step ${index + 1}`));
  self.href = fragment(run, index);
  self.title = "a link to this step";
  title.append(" ", make("small", "", `of ${run.steps.length}${compared ? ` by ${run.label}` : ""}`));
  for (const [sign, label, action] of [
    ["‹", "the step before (←)", "back"],
    ["›", "the next step (→)", "on"],
    ["×", "close (Esc)", "close"],
  ]) {
    const button = bar.appendChild(make("button", "", sign));
    button.type = "button";
    button.title = label;
    button.setAttribute("aria-label", label);
    button.dataset.action = action;
  }
  const drafted = step.nodes.length - 1;
  const accepted = step.path.length - 1;
  const summary = drafted
    ? `${plural(drafted, "token")} drafted, ${accepted} accepted, one by the target`
    : "nothing drafted, one token by the target";
  return [bar, make("p", "summary", summary), ...drawChoice(step), drawTree(run, step, place), ...drawTimes(step)];
}

/** Whom the drafter asked, and what it expected of the step. */
function drawChoice(step) {
  const choice = step.choice;
  if (!choice) return [];
  const expected = `expecting ${plural(Number(choice.tokens.toFixed(1)), "token")}`;
  const faster = `${number(choice.rate / choice.plain)} × plain speed`;
  const rests = "verified nothing: too little came of what this text's drafts promised";
  const said = choice.asked.length
    ? `asked ${choice.asked.join(", ")}, ${choice.resting ? rests : `${expected} at ${faster}`}`
    : "asked nobody";
  return [make("p", "summary choice", said)];
}

/** The tree's rows from top to bottom. The accepted path keeps to column 0 down to the bonus token; what was rejected
    branches off to the right, before the path goes on. */
function layOut(step) {
  const children = step.nodes.map(() => []);
  step.nodes.forEach((node, i) => node.parent >= 0 && children[node.parent].push(i));
  const kept = new Set([...step.path, BONUS]);
  const tip = step.path[step.path.length - 1];
  const rows = [];
  const waiting = [{ node: 0, column: 0, from: -1 }];
  while (waiting.length) {
    const { node, column, from } = waiting.pop();
    const row = rows.push({ node, column, from, kept: kept.has(node) }) - 1;
    const below = children[node] ?? [];
    const straight = node === tip ? BONUS : (below.find((child) => kept.has(child)) ?? below[0]);
    if (straight !== undefined) waiting.push({ node: straight, column, from: row });
    for (const child of below.toReversed()) {
      if (child !== straight) waiting.push({ node: child, column: column + 1, from: row });
    }
  }
  return rows;
}

function drawTree(run, step, place) {
  const rows = layOut(step);
  const bonus = step.emitted[step.emitted.length - 1];
  const spelled = run.steps[step.step + 1]?.nodes[0].text ?? bonus.text; // the next root is the bonus as a token alone
  const tip = step.path[step.path.length - 1];
  const chosen = place < 0 ? null : (step.path[place + 1] ?? BONUS);
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const [label, className] of [["", ""], ["score", "score"], ["from", "from"]]) {
    head.append(make("th", className, label));
  }
  const body = table.createTBody();
  for (const row of rows) {
    const own = row.node === BONUS;
    const node = own ? { token: bonus.token, text: spelled, score: null, sources: {} } : step.nodes[row.node];
    const line = body.insertRow();
    // Where the text ends on a drafted token, that draft wasn't wrong: nothing could follow it.
    const ended = !own && node.parent === tip && node.token === bonus.token;
    line.className = row.kept ? "kept" : ended ? "ended" : "rejected";
    if (row.node === chosen) line.classList.add("chosen");
    line.dataset.node = own ? "bonus" : row.node;
    const cell = line.insertCell();
    cell.style.paddingLeft = `${(row.column + 1) * INDENT + 4}px`;
    cell.append(drawWord(node));
    line.insertCell().className = "score";
    line.cells[1].textContent = node.score === null ? "" : number(node.score);
    line.insertCell().className = "from";
    if (own) line.cells[2].textContent = "target";
    else if (row.node === 0) line.cells[2].textContent = step.step ? "the step before" : "the prompt";
    for (const [name, score] of Object.entries(node.sources)) {
      // A source's own score says something new only where it differs from the node's.
      const more = score === null || number(score) === number(node.score ?? NaN) ? "" : `${number(score)} `;
      line.cells[2].append(chip([name], name), more);
    }
  }
  const tree = make("div", "tree");
  tree.append(drawBranches(rows), table);
  return tree;
}

/** A token alone. Spaces at its ends and control characters are shown by signs. */
function drawWord(node) {
  const word = make("span", "word");
  word.dir = "auto";
  word.title = `token ${node.token}: ${JSON.stringify(node.text)}`;
  for (const part of node.text.split(/(^ +| +$|[\n\t\r]+)/)) {
    if (/^[ \n\t\r]+$/.test(part)) {
      const signs = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };
      word.append(make("span", "blank", [...part].map((character) => signs[character]).join("")));
    } else if (part) word.append(part);
  }
  if (!node.text) word.append(make("span", "blank", `#${node.token}`));
  return word;
}

function drawBranches(rows) {
  const columns = Math.max(...rows.map((row) => row.column)) + 1;
  const svg = makeSvg("svg", { width: columns * INDENT + 4, height: rows.length * ROW, "aria-hidden": "true" });
  const x = (row) => row.column * INDENT + INDENT / 2;
  const y = (index) => index * ROW + ROW / 2;
  const add = (tag, attributes) => svg.append(makeSvg(tag, attributes));
  const edges = rows.map((row, index) => ({ row, index })).filter(({ row }) => row.from >= 0);
  // Accepted edges last, on top of the others.
  edges.sort((a, b) => a.row.kept - b.row.kept);
  for (const { row, index } of edges) {
    const parent = rows[row.from];
    const corner = Math.min(8, INDENT / 2);
    const d =
      parent.column === row.column
        ? `M${x(row)} ${y(row.from)}V${y(index)}`
        : `M${x(parent)} ${y(row.from)}V${y(index) - corner}q0 ${corner} ${corner} ${corner}H${x(row)}`;
    add("path", { d, class: row.kept ? "kept" : "" });
  }
  rows.forEach((row, index) => {
    add("circle", { cx: x(row), cy: y(index), r: row.kept ? 3.5 : 2.5, class: row.kept ? "kept" : "" });
  });
  return svg;
}

function drawTimes(step) {
  const bar = make("div", "times");
  const list = make("ul", "spent");
  for (const part of ["draft", "verify", "host"]) {
    const spent = step[`${part}_ms`];
    bar.appendChild(make("span", part)).style.flexGrow = total(step) > 0 ? spent / total(step) : 0;
    const item = list.appendChild(make("li"));
    item.append(make("i", part), `${part} ${spent.toFixed(spent < 10 ? 2 : 1)} ms`);
  }
  bar.setAttribute("aria-hidden", "true");
  return [bar, list];
}
