// @ts-check
// Lines and bars, drawn as SVG, so that they are sharp and can be read out.

import { headColour, isDashed } from "./tokens.js";
import { make, percent, plain, shown, svg } from "./parts.js";
import { savable } from "./save.js";

/**
 * One or more lines over the same places.
 * @param {string} name
 * @param {ArrayLike<number>[]} series
 * @param {{from?: number, across: string, names?: string[], ticks?: string[]}} how
 */
export function lines(name, series, { from = 0, across, names = [], ticks }) {
  const [width, height, left, below] = [520, 180, 46, 28];
  const all = series.flatMap((each) => [...Array.from(each)]).filter(Number.isFinite);
  const [low, high] = [Math.min(0, ...all), Math.max(0, ...all)];
  const span = high - low || 1;
  const count = Math.max(...series.map((each) => each.length), 2);
  const x = (/** @type {number} */ i) => left + (i / (count - 1)) * (width - left - 10);
  const y = (/** @type {number} */ v) => 8 + (1 - (v - low) / span) * (height - below - 8);
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": name });
  for (const value of [low, 0, high].filter((each, i, list) => list.indexOf(each) === i)) {
    made.append(
      svg("line", { x1: left, x2: width - 10, y1: y(value), y2: y(value), class: value ? "rule" : "zero" }),
      svg("text", { x: left - 6, y: y(value) + 4, class: "tick end" }, value.toPrecision(2)),
    );
  }
  for (const [number, each] of series.entries()) {
    const points = Array.from(each, (value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const drawn = svg("polyline", { points, class: "line" });
    drawn.style.stroke = `var(${headColour(number)})`;
    if (isDashed(number)) drawn.style.strokeDasharray = "5 3";
    made.append(drawn);
  }
  for (const place of new Set([0, Math.floor((count - 1) / 2), count - 1])) {
    made.append(svg("text", { x: x(place), y: height - 10, class: "tick" }, ticks?.[place] ?? String(from + place)));
  }
  const legend = make("div", { class: "legend" });
  for (const [number, each] of names.entries()) {
    const dot = make("i", { class: "dot" });
    dot.style.background = `var(${headColour(number)})`;
    legend.append(make("span", {}, dot, plain(each)));
  }
  return savable(make("figure", { class: "figure" }, make("figcaption", {}, name), made, make("p", { class: "axis" }, across), legend), name);
}

/**
 * Names with shares, as bars.
 * @param {{text: string, value: number, told?: string, marked?: boolean, long?: boolean}[]} rows `long` names are sentences
 * @param {number} [most] what a full bar stands for
 */
export function bars(rows, most = 1) {
  const made = make("div", { class: "bars" });
  for (const each of rows) {
    const bar = make("i", { class: each.value < 0 ? "bar less" : "bar" });
    bar.style.width = `${Math.min(100, (100 * Math.abs(each.value)) / most)}%`;
    made.append(
      make("span", { class: `name${each.marked ? " marked" : ""}${each.long ? " long" : ""}` }, each.long ? make("bdi", {}, plain(each.text, 160)) : shown(each.text)),
      make("span", { class: "track" }, bar),
      make("span", { class: "number" }, each.told ?? percent(each.value)),
    );
  }
  return made;
}
