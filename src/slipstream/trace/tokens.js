// What the pages that show tokens have in common. Each says itself which `place` a drafter has, and which `hue`.
"use strict";

const UNDERLINES = 5;
const TARGET = null; // among sources; a drafter may be called "target"

const at = (id) => document.getElementById(id);

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function makeSvg(tag, attributes) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
  return shape;
}

function whole(count) {
  return count.toLocaleString("en");
}

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function sourcesOf(source) {
  return source == null ? [TARGET] : String(source).split("+");
}

/** Give `element` its sources' look. Returns where its text belongs: one element deeper per further source. */
function paint(element, sources) {
  const drafters = sources.filter((name) => name !== TARGET).sort((one, other) => place(one) - place(other));
  if (drafters.length === 0) return element; // the target's own tokens stay plain
  element.classList.add("tint");
  element.style.setProperty("--d", hue(drafters[Math.min(1, drafters.length - 1)]));
  let inner = element;
  drafters.forEach((name, i) => {
    if (i > 0) inner = inner.appendChild(make("span"));
    inner.classList.add("u", `u${place(name) % UNDERLINES}`);
    inner.style.setProperty("--c", hue(name));
  });
  return inner;
}

/** Line breaks get a mark that is drawn by the style sheet, so that the text itself stays as it is. */
function fill(element, text) {
  text.split("\n").forEach((part, i) => {
    if (i > 0) element.append(make("span", "newline", "\n"));
    if (part) element.append(part);
  });
}
