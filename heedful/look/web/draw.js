// @ts-check
// Heat maps: one pixel for each number, made large by the style; colours come from the style sheet.

import { make, plain, shown, short } from "./parts.js";
import { reach } from "./numbers.js";

/**
 * 256 colours from some of the style sheet, evenly between them.
 * @param {Element} where
 * @param {string[]} names of custom properties that are #rrggbb
 */
export function colours(where, names) {
  const style = getComputedStyle(where);
  const stops = names.map((name) => {
    const hex = parseInt(style.getPropertyValue(name).trim().slice(1), 16);
    return [hex >> 16, (hex >> 8) & 255, hex & 255];
  });
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    for (let c = 0; c < 3; c++) table[3 * i + c] = stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c]);
  }
  return table;
}

export const HEAT = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"];
export const SIGNED = ["--cold-2", "--cold-1", "--heat-0", "--warm-1", "--warm-2"];

/**
 * Numbers as colours, one pixel each: shares from 0 to 1, or with `signed` from -limit to limit.
 * @param {HTMLCanvasElement} canvas
 * @param {ArrayLike<number>} values
 * @param {number} rows
 * @param {number} columns
 * @param {{signed?: number, gain?: number, lut: Uint8ClampedArray}} how gain below 1 lifts small shares
 */
export function paint(canvas, values, rows, columns, { signed = 0, gain = 0.6, lut }) {
  canvas.width = Math.max(columns, 1);
  canvas.height = Math.max(rows, 1);
  const pen = canvas.getContext("2d");
  if (!pen || !rows || !columns) return;
  const image = pen.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const share = signed ? (values[i] / signed + 1) / 2 : Math.pow(Math.max(values[i], 0), gain);
    const level = Number.isFinite(share) ? Math.max(0, Math.min(255, Math.round(255 * share))) : 0;
    image.data.set([lut[3 * level], lut[3 * level + 1], lut[3 * level + 2], 255], 4 * i);
  }
  pen.putImageData(image, 0, 0);
}

/**
 * A line of numbers as a strip.
 * @param {Element} where
 * @param {ArrayLike<number>} values
 * @param {number} [limit]
 */
export function strip(where, values, limit = reach(values) || 1) {
  const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "strip", "aria-hidden": "true" }));
  paint(canvas, values, 1, values.length, { signed: limit, lut: colours(where, SIGNED) });
  return canvas;
}

/**
 * @typedef {{
 *   rows: string[], columns: string[], signed?: boolean, limit?: number, name: string, size?: number, gain?: number,
 *   say?: (row: number, column: number, value: number) => string, pick?: (row: number, column: number) => void,
 * }} Map
 */

const FITS = 13; // pixels that a label needs

/**
 * A matrix with its labels where there is room for them, and what a pointer or the arrow keys point at told below.
 * @param {Element} where
 * @param {ArrayLike<number>} values
 * @param {Map} map
 */
export function heatmap(where, values, map) {
  const [n, m] = [map.rows.length, map.columns.length];
  const size = map.size ?? 560;
  const cell = Math.max(1, Math.min(Math.max(n, m) < 8 ? 44 : 26, Math.floor(size / Math.max(n, m, 1)))) || 1;
  const [width, height] = [Math.max(m * cell, 24), Math.max(n * cell, 24)];
  const canvas = /** @type {HTMLCanvasElement} */ (
    make("canvas", { class: "heat", tabindex: 0, role: "img", "aria-label": `${map.name}: ${n} rows, ${m} columns` })
  );
  const limit = map.signed ? (map.limit ?? reach(values)) || 1 : 0;
  const lut = colours(where, map.signed ? SIGNED : HEAT);
  paint(canvas, values, n, m, { signed: limit, gain: map.gain, lut });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const cursor = make("div", { class: "cursor", hidden: true });
  const told = make("p", { class: "told", role: "status" }, "Point at a cell, or use the arrow keys.");
  let [row, column] = [0, 0];
  const point = (/** @type {number} */ i, /** @type {number} */ j) => {
    if (!n || !m) return;
    row = Math.max(0, Math.min(n - 1, i));
    column = Math.max(0, Math.min(m - 1, j));
    const [across, down] = [width / m, height / n];
    cursor.hidden = false;
    cursor.style.transform = `translate(${column * across}px, ${row * down}px)`;
    cursor.style.width = `${across}px`;
    cursor.style.height = `${down}px`;
    const value = values[row * m + column];
    const say = map.say ?? ((a, b, v) => `${plain(map.rows[a])} → ${plain(map.columns[b])}: ${short(v)}`);
    told.textContent = say(row, column, value);
  };
  const at = (/** @type {PointerEvent | MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    return [
      Math.floor(((event.clientY - box.top) / box.height) * n), Math.floor(((event.clientX - box.left) / box.width) * m),
    ];
  };
  canvas.addEventListener("pointermove", (event) => point(at(event)[0], at(event)[1]));
  canvas.addEventListener("click", (event) => map.pick?.(at(event)[0], at(event)[1]));
  canvas.addEventListener("focus", () => point(row, column));
  canvas.addEventListener("keydown", (event) => {
    const steps = /** @type {Record<string, [number, number]>} */ ({
      ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1],
    });
    const step = steps[event.key];
    if (step) {
      event.preventDefault();
      point(row + step[0], column + step[1]);
    } else if (event.key === "Enter") map.pick?.(row, column);
  });
  const grid = make("div", { class: "map" });
  if (cell >= FITS) {
    const names = make("div", { class: "columns", "aria-hidden": "true" });
    for (const each of map.columns) names.append(make("span", {}, shown(each)));
    names.style.gridTemplateColumns = `repeat(${m}, ${cell}px)`;
    const side = make("div", { class: "rows", "aria-hidden": "true" });
    for (const each of map.rows) side.append(make("span", {}, shown(each)));
    side.style.gridTemplateRows = `repeat(${n}, ${cell}px)`;
    grid.append(make("span"), names, side);
  } else grid.classList.add("bare");
  const field = make("div", { class: "field-of" }, canvas, cursor);
  field.style.width = `${width}px`;
  field.style.height = `${height}px`;
  grid.append(field);
  return make("figure", { class: "figure" }, make("figcaption", {}, map.name), grid, told);
}
