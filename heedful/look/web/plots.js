// @ts-check
// Line plots, scatter plots and bars, as SVG and HTML.

import { headColour, isDashed } from "./tokens.js";
import { make, percent, plain, svg, tokenElement } from "./parts.js";
import { savable } from "./save.js";

/**
 * A plot of one or more lines over the same positions.
 * @param {string} name
 * @param {ArrayLike<number>[]} series
 * @param {{from?: number, across: string, names?: string[], ticks?: string[]}} how
 */
export function lines(name, series, { from = 0, across, names = [], ticks }) {
  const [width, height, left, below] = [520, 180, 58, 28];
  const all = series.flatMap((values) => [...Array.from(values)]).filter(Number.isFinite);
  const [low, high] = [Math.min(0, ...all), Math.max(0, ...all)];
  const span = high - low || 1;
  const count = Math.max(...series.map((values) => values.length), 2);
  const x = (/** @type {number} */ i) => left + (i / (count - 1)) * (width - left - 10);
  const y = (/** @type {number} */ v) => 8 + (1 - (v - low) / span) * (height - below - 8);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": name });
  for (const value of [low, 0, high].filter((value, i, list) => list.indexOf(value) === i)) {
    drawing.append(
      svg("line", { x1: left, x2: width - 10, y1: y(value), y2: y(value), class: value ? "rule" : "zero" }),
      svg("text", { x: left - 6, y: y(value) + 4, class: "tick end" }, value.toPrecision(2).replaceAll("-", "\u2212")),
    );
  }
  for (const [number, values] of series.entries()) {
    const points = Array.from(values, (value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const drawn = svg("polyline", { points, class: "line" });
    drawn.style.stroke = `var(${headColour(number)})`;
    if (isDashed(number)) drawn.style.strokeDasharray = "5 3";
    drawing.append(drawn);
  }
  for (const place of new Set([0, Math.floor((count - 1) / 2), count - 1])) {
    drawing.append(svg("text", { x: x(place), y: height - 10, class: "tick" }, ticks?.[place] ?? String(from + place)));
  }
  const legend = make("div", { class: "legend" });
  for (const [number, name] of names.entries()) {
    const dot = make("i", { class: "dot" });
    dot.style.background = `var(${headColour(number)})`;
    legend.append(make("span", {}, dot, plain(name)));
  }
  return savable(make("figure", { class: "figure" }, make("figcaption", {}, name), drawing, make("p", { class: "axis" }, across), legend), name);
}

/**
 * Words as points in a plane, with one scale for both axes. A word that would cover another is only a tooltip of its point.
 * @param {string} name
 * @param {{text: string, x: number, y: number, filled: boolean}[]} points
 * @param {{axes?: string[], width: number}} how the names of both axes, if they have a meaning
 */
export function scatter(name, points, { axes, width: wanted }) {
  const [width, margin, letter] = [Math.max(280, Math.min(760, wanted)), 14, 7];
  const height = Math.max(260, Math.round(0.6 * width));
  const [across, up] = [points.map((point) => point.x), points.map((point) => point.y)];
  const [left, right, low, high] = [Math.min(...across), Math.max(...across), Math.min(...up), Math.max(...up)];
  const scale = Math.min((width - 2 * margin - 60) / (right - left || 1), (height - 2 * margin - 10) / (high - low || 1));
  const x = (/** @type {number} */ value) => width / 2 - 20 + (value - (left + right) / 2) * scale;
  const y = (/** @type {number} */ value) => height / 2 - (value - (low + high) / 2) * scale;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "plot scatter", role: "img", "aria-label": `${name}: ${points.map((point) => plain(point.text)).join(", ")}` });
  const boxes = points.map((point) => ({ x: x(point.x) - 4, y: y(point.y) - 4, width: 8, height: 8 }));
  for (const [number, word] of [...points.entries()].sort((a, b) => Number(b[1].filled) - Number(a[1].filled))) {
    const [px, py, text] = [x(word.x), y(word.y), plain(word.text)];
    const long = [...text].reduce((sum, one) => sum + (/[\u1100-\uffff]/u.test(one) ? 13 : letter), 0);
    const own = { x: px - 4, y: py - 4, width: 8, height: 8 };
    const room = [[px + 7, py - 7], [px - 7 - long, py - 7], [px - long / 2, py - 20], [px - long / 2, py + 6]]
      .map(([boxX, boxY]) => ({ x: boxX, y: boxY, width: long, height: 14 }))
      .find((box) => box.x >= 0 && box.x + box.width <= width && box.y >= 0 && box.y + box.height <= height
        && boxes.every((other) => sameBox(other, own) || !overlap(box, other)));
    const point = svg("g", {}, svg("title", {}, text), svg("circle", { cx: px, cy: py, r: 4, class: word.filled ? "point filled" : "point" }));
    if (room) {
      boxes.push(room);
      point.append(svg("text", { x: room.x, y: room.y + 11, class: word.filled ? "word filled" : "word" }, text));
    }
    point.dataset.number = String(number);
    drawing.append(point);
  }
  const meaning = axes ? `Across: ${axes[0]}. Up: ${axes[1]}.` : "The axes have no meaning of their own.";
  return savable(make("figure", { class: "figure" }, make("figcaption", {}, name), drawing, make("p", { class: "axis" }, meaning)), name);
}

/** @typedef {{x: number, y: number, width: number, height: number}} Box */

/**
 * Whether two boxes overlap.
 * @param {Box} one
 * @param {Box} other
 */
function overlap(one, other) {
  return one.x < other.x + other.width && other.x < one.x + one.width && one.y < other.y + other.height && other.y < one.y + one.height;
}

/**
 * Whether two boxes are the same.
 * @param {Box} one
 * @param {Box} other
 */
function sameBox(one, other) {
  return one.x === other.x && one.y === other.y && one.width === other.width;
}

/**
 * Names with numbers, as horizontal bars.
 * @param {{text: string, value: number, told?: string, marked?: boolean, long?: boolean}[]} rows `told`: the number as text, by
 *   default in percent; `long`: whether the name is a sentence
 * @param {{most?: number, signed?: boolean}} [how] `most`: number of a full bar; `signed`: numbers may be negative, and have the
 *   colours of positive and negative numbers instead of that of weights and probabilities
 */
export function bars(rows, { most = 1, signed = false } = {}) {
  const element = make("div", { class: "bars" });
  for (const row of rows) {
    const bar = make("i", { class: signed ? `bar ${row.value < 0 ? "less" : "more"}` : "bar" });
    bar.style.width = `${Math.min(100, (100 * Math.abs(row.value)) / most)}%`;
    element.append(
      make("span", { class: `name${row.marked ? " marked" : ""}${row.long ? " long" : ""}` }, row.long ? make("bdi", {}, plain(row.text, 160)) : tokenElement(row.text)),
      make("span", { class: "track" }, bar),
      make("span", { class: "number" }, row.told ?? percent(row.value)),
    );
  }
  return element;
}
