// @ts-check
// Heat maps: canvases with one pixel for each number, which CSS enlarges; colours come from the style sheet.

import { make, percent, plain, short, toggle, tokenElement } from "./parts.js";
import { reach } from "./numbers.js";
import { savable } from "./save.js";

/**
 * A table of 256 colours, [256 * 3], interpolated between colours of the style sheet.
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

const GAIN = 0.5; // exponent of a weight in its strength: below 1, so that small weights can be seen
const MANY_KEYS = 64; // keys above which colours are relative to the largest weight by default
const TICKS = [0, 0.05, 0.2, 0.5, 1]; // numbers beside the colours
const EVEN_TICKS = [0, 0.25, 0.5, 0.75, 1]; // numbers beside the colours if the gain is 1

export const HEAT = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"];
export const SIGNED = ["--cold-2", "--cold-1", "--heat-0", "--warm-1", "--warm-2"];

/**
 * How strongly a weight is shown everywhere, from 0 to 1: its place among the colours, the opacity of its line or shade.
 * @param {number} weight
 * @param {number} [most] weight of the strength 1
 * @param {number} [gain] exponent
 */
export function strength(weight, most = 1, gain = GAIN) {
  return Number.isFinite(weight) ? Math.min(1, Math.pow(Math.max(weight, 0) / most, gain)) : 0;
}

/**
 * Paint numbers on a canvas, one pixel each.
 * @param {HTMLCanvasElement} canvas
 * @param {ArrayLike<number>} values
 * @param {number} rows
 * @param {number} columns
 * @param {{signed?: number, gain?: number, most?: number, lut: Uint8ClampedArray}} how `signed`: numbers are from -signed to
 *   signed; 0: from 0 to `most`, coloured by their `strength`. `lut`: table of colours.
 */
export function paint(canvas, values, rows, columns, { signed = 0, gain = GAIN, most = 1, lut }) {
  canvas.width = Math.max(columns, 1);
  canvas.height = Math.max(rows, 1);
  const pen = canvas.getContext("2d");
  if (!pen || !rows || !columns) return;
  const image = pen.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const share = signed ? (values[i] / signed + 1) / 2 : strength(values[i], most, gain);
    const level = Number.isFinite(share) ? Math.max(0, Math.min(255, Math.round(255 * share))) : 0;
    image.data.set([lut[3 * level], lut[3 * level + 1], lut[3 * level + 2], 255], 4 * i);
  }
  pen.putImageData(image, 0, 0);
}

/**
 * Whether colours are relative to the largest number of a picture.
 * @param {boolean | null} chosen by the user; null: by the number of keys
 * @param {number} keys
 */
export function isRelative(chosen, keys) {
  return chosen ?? keys > MANY_KEYS;
}

/**
 * A colour bar with numbers, and with `scale` the checkbox that makes colours relative.
 * @param {Element} where
 * @param {{signed?: number, gain?: number, most?: number, unit?: (value: number) => string,
 *   scale?: {relative: boolean, change: (relative: boolean) => void}}} how
 */
export function colourBar(where, { signed = 0, gain = GAIN, most = 1, unit = signed ? short : percent, scale }) {
  const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "colours", "aria-hidden": "true" }));
  const lut = colours(where, signed ? SIGNED : HEAT);
  const steps = [...Array(256).keys()].map((step) => step / 255);
  paint(canvas, steps.map((step) => (signed ? (2 * step - 1) * signed : Math.pow(step, 1 / gain) * most)), 1, 256, { signed, gain, most, lut });
  const ticks = make("div", { class: "ticks" });
  const marks = signed ? [-signed, 0, signed] : (gain === 1 ? EVEN_TICKS : TICKS).map((tick) => tick * most);
  for (const mark of marks) {
    const tick = make("span", {}, withoutZeros(unit(mark)));
    tick.style.left = `${100 * (signed ? (mark / signed + 1) / 2 : strength(mark, most, gain))}%`;
    ticks.append(tick);
  }
  const bar = make("div", { class: "colour-bar" }, make("div", {}, canvas, ticks));
  if (scale) bar.append(scaleSwitch(scale));
  return bar;
}

/**
 * A checkbox that makes strengths relative to the largest weight.
 * @param {{relative: boolean, change: (relative: boolean) => void}} scale
 */
export function scaleSwitch({ relative, change }) {
  return toggle("relative to the largest", relative, change);
}

/**
 * A percentage without decimals that are 0.
 * @param {string} text
 */
export function withoutZeros(text) {
  return text.replace(/\.0+(?= %)/u, "");
}

/**
 * A vector as a strip of colours.
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
 *   unit?: (value: number) => string, scale?: {chosen: boolean | null, change: (relative: boolean) => void}, large?: boolean,
 *   say?: (row: number, column: number, value: number) => string, pick?: (row: number, column: number) => void,
 * }} Map `large`: whether cells may be large however many there are
 */

const FITS = 13; // pixels that a label needs
const [CELL, LARGE_CELL] = [26, 44]; // maximum side of a cell, and of one in a map of few cells, in pixels
const FEW_CELLS = 8; // rows and columns below which cells are large
const ZOOMS = [1, 2, 4, 8]; // factors of the size of a cell

/**
 * A matrix as a heat map with labels and a colour bar. The cell at the pointer, or that the arrow keys choose, is described
 * below. Where cells are small, only every n-th label is shown, and buttons enlarge the map.
 * @param {Element} where
 * @param {ArrayLike<number>} values
 * @param {Map} map
 */
export function heatmap(where, values, map) {
  const [n, m] = [map.rows.length, map.columns.length];
  const room = Math.min(900, (where.clientWidth || 900) - 160); // pixels; long texts take what there is
  const size = Math.max(map.size ?? 560, Math.max(n, m) > 64 ? room : 0);
  const count = Math.max(n, m, 1);
  const fitting = Math.max(1, Math.min(map.large || count < FEW_CELLS ? LARGE_CELL : CELL, Math.floor(size / count)));
  const canvas = /** @type {HTMLCanvasElement} */ (
    make("canvas", { class: "heat", tabindex: 0, role: "img", "aria-label": `${map.name}: ${n} rows, ${m} columns` })
  );
  const limit = map.signed ? (map.limit ?? reach(values)) || 1 : 0;
  const relative = !!map.scale && isRelative(map.scale.chosen, m);
  const most = relative ? reach(values) || 1 : 1;
  paint(canvas, values, n, m, { signed: limit, gain: map.gain, most, lut: colours(where, map.signed ? SIGNED : HEAT) });
  const cursor = make("div", { class: "cursor", hidden: true });
  const status = make("p", { class: "told", role: "status" }, "Point at a cell, or use the arrow keys.");
  let [row, column] = [0, 0];
  const point = (/** @type {number} */ i, /** @type {number} */ j) => {
    if (!n || !m) return;
    row = Math.max(0, Math.min(n - 1, i));
    column = Math.max(0, Math.min(m - 1, j));
    const [across, down] = [canvas.clientWidth / m, canvas.clientHeight / n];
    cursor.hidden = false;
    cursor.style.transform = `translate(${column * across}px, ${row * down}px)`;
    cursor.style.width = `${across}px`;
    cursor.style.height = `${down}px`;
    const value = values[row * m + column];
    const say = map.say ?? ((a, b, v) => `${plain(map.rows[a])} → ${plain(map.columns[b])}: ${short(v)}`);
    status.textContent = say(row, column, value);
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
  const names = make("div", { class: "columns", "aria-hidden": "true" });
  const side = make("div", { class: "rows", "aria-hidden": "true" });
  const field = make("div", { class: "field-of" }, canvas, cursor);
  grid.append(make("span"), names, side, field);
  const draw = (/** @type {number} */ zoom) => {
    const cell = fitting * zoom;
    const every = Math.ceil(FITS / cell);
    const lay = (/** @type {string[]} */ all) => all.filter((_, place) => place % every === 0).map((name) => make("span", {}, tokenElement(name)));
    names.replaceChildren(...lay(map.columns));
    side.replaceChildren(...lay(map.rows));
    names.style.gridTemplateColumns = `repeat(${Math.ceil(m / every)}, ${cell * every}px)`;
    side.style.gridTemplateRows = `repeat(${Math.ceil(n / every)}, ${cell * every}px)`;
    field.style.width = canvas.style.width = `${Math.max(m * cell, 24)}px`;
    field.style.height = canvas.style.height = `${Math.max(n * cell, 24)}px`;
    cursor.hidden = true;
  };
  draw(1);
  const caption = make("figcaption", {}, map.name);
  if (fitting < FITS) {
    const zooms = make("span", { class: "zooms", role: "group", "aria-label": "Size of a cell" });
    for (const zoom of ZOOMS.filter((factor) => factor === 1 || fitting * (factor / 2) < FITS)) {
      const press = (/** @type {any} */ event) => {
        for (const button of zooms.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
        draw(zoom);
      };
      zooms.append(make("button", { type: "button", class: "quiet", "aria-pressed": String(zoom === 1), onclick: press }, `${zoom}×`));
    }
    caption.append(" ", zooms);
  }
  const bar = colourBar(where, {
    signed: limit, gain: map.gain, most, unit: map.unit,
    scale: map.scale ? { relative, change: map.scale.change } : undefined,
  });
  return savable(make("figure", { class: "figure" }, caption, grid, bar, status), map.name);
}
