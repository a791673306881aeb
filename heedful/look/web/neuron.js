// @ts-check
// Neuron view: one query against all keys, dimension by dimension: q, k, q times k, their sum, the score, the softmax.
// It opens on colours; a switch adds the numbers.

import { arrows, make, note, percent, plain, short, svg, toggle, tokenElement } from "./parts.js";
import { savable } from "./save.js";
import { reach, rowOf, softmax, unpack } from "./numbers.js";
import { colourBar, colours, HEAT, isRelative, paint, SIGNED } from "./draw.js";
import { rowHeight, tokenList, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */
/** @typedef {import("./numbers.js").Numbers} Numbers */
/** @typedef {{q: Numbers, k: Numbers, scores: Numbers, scale: number, biased: boolean, coarse: number}} HeadAttention coarse: relative error of the numbers */

const PRODUCTS = 2; // width of the products, compared with that of queries and of keys
const NARROW = 736; // width of a page, in pixels, below which look.css hides queries and keys
const NARROW_FIELD = 140; // pixels
const NAMED = 3; // tokens with the largest weights that are named

/**
 * The neuron view.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function neuronView(context) {
  const { part, state } = context;
  const rows = tokensOf(context, part.rows).map((token) => token.text);
  const keys = tokensOf(context, part.keys).map((token) => token.text);
  const sent = await context.source.ask("neuron", context.place());
  /** @type {HeadAttention} */
  const attention = {
    q: unpack(sent.q), k: unpack(sent.k), scores: unpack(sent.scores), scale: sent.scale, biased: sent.biased,
    coarse: sent.q.kind === "f2" ? 0.01 : 0.001,
  };
  const table = make("div", { class: state.numbers ? "neurons numbered" : "neurons" });
  const queries = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "strips", "aria-hidden": "true" }));
  const list = tokenList(rows, {
    label: "The token that looks",
    chosen: (place) => place === state.row,
    pick: (place) => {
      for (const [number, button] of [...list.children].entries()) button.setAttribute("aria-pressed", String(number === place));
      context.note({ row: place });
      against(context, table, attention, keys, place);
    },
  });
  arrows(list, ".token");
  const [n, d] = attention.q.shape;
  paint(queries, attention.q.values, n, d, { signed: largest(attention), lut: colours(context.root, SIGNED) });
  size(queries, context, n, d);
  against(context, table, attention, keys, Math.min(state.row, rows.length - 1));
  const bias = attention.biased ? " + bias" : "";
  return make(
    "section",
    { class: "neuron-view" },
    make("div", { class: "panel queries" }, make("h3", {}, "Token"), make("h3", {}, "query q"), list, queries),
    savable(make(
      "div",
      { class: "panel wide" },
      note("A row is a token that can be attended to. Where query and key agree in sign, q × k is orange and raises the score; where they do not, it is blue and lowers it. The lines lead to the sum, the score and the weight."),
      table,
      note(`score = (q · k) × ${short(attention.scale)}${bias}; the weight is the softmax of the scores. Orange is positive, blue negative; q and k have one scale of colours, and each further column has its own.`),
    ), "queries and keys"),
  );
}

/**
 * The largest absolute value of queries and keys, which has the last colour.
 * @param {HeadAttention} attention
 */
function largest({ q, k }) {
  return Math.max(reach(q.values), reach(k.values)) || 1;
}

/**
 * Set the size of a canvas with a vector in each row.
 * @param {HTMLCanvasElement} canvas
 * @param {Context} context
 * @param {number} count number of vectors
 * @param {number} d numbers of a vector
 * @param {number} [share] width, compared with that of queries and of keys
 */
function size(canvas, context, count, d, share = 1) {
  const beside = context.state.numbers ? 720 : 660; // pixels of all other columns
  const { clientWidth } = context.root;
  const room = (clientWidth - beside) / (2 + PRODUCTS);
  const width = share * Math.max(120, Math.min(320, d * 8, room));
  canvas.style.width = `${clientWidth < NARROW ? Math.min(NARROW_FIELD, width) : width}px`;
  canvas.style.height = `calc(var(--row) * ${count})`;
}

/**
 * Fill the table with the steps from one query to its attention weights.
 * @param {Context} context
 * @param {HTMLElement} table
 * @param {HeadAttention} attention
 * @param {string[]} keys
 * @param {number} row
 */
function against(context, table, attention, keys, row) {
  const { q, k, scores, scale, biased } = attention;
  const [m, d] = k.shape;
  const query = rowOf(q, row);
  const products = new Float32Array(m * d);
  const dots = new Float64Array(m);
  for (let j = 0; j < m; j++) {
    for (let i = 0; i < d; i++) dots[j] += products[j * d + i] = query[i] * k.values[j * d + i];
  }
  const line = rowOf(scores, row);
  const weights = softmax(line);
  const limit = largest(attention);
  const names = tokensOf(context, context.part.rows).map((token) => token.text);
  const best = [...weights.entries()].sort((one, other) => other[1] - one[1]).slice(0, NAMED);
  const summary = `${plain(names[row])} attends to ${best.map(([j, weight]) => `${plain(keys[j])} ${percent(weight)}`).join(", ")}.`;
  const status = make("p", { class: "told", role: "status" }, `${summary} Point at a row, or at one of the ${d} dimensions.`);
  const lut = colours(context.root, SIGNED);
  const frame = make("div", { class: "cursor", hidden: true }); // around the row that is pointed at
  /** @type {HTMLElement[]} */
  const marks = []; // around the dimension that is pointed at, one in each field
  const point = (/** @type {number} */ j, /** @type {number | null} */ i) => {
    const sum = `q\u00a0·\u00a0k = ${short(dots[j])}, score ${short(line[j])}, weight ${percent(weights[j])}`;
    status.textContent = i === null
      ? `${plain(keys[j])}: ${sum}`
      : `${plain(keys[j])}, dimension ${i}: ${short(query[i])} × ${short(k.values[j * d + i])} = ${short(products[j * d + i])}; all ${d}: ${sum}`;
    frame.hidden = false;
    frame.style.cssText = `top: calc(${j + 2} * var(--row) + .5rem); width: 100%; height: var(--row);`;
    for (const mark of marks) {
      mark.hidden = i === null;
      mark.style.cssText = `left: ${(100 * (i ?? 0)) / d}%; width: ${100 / d}%; height: 100%;`;
    }
  };
  const field = (/** @type {string} */ name, /** @type {Float32Array} */ values, /** @type {number} */ most, /** @type {number} */ count, share = 1) => {
    const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "strips", role: "img", "aria-label": name, tabindex: 0 }));
    paint(canvas, values, count, d, { signed: most || 1, lut });
    size(canvas, context, count, d, share);
    let [j, i] = [0, 0];
    const pointHere = () => {
      i = Math.max(0, Math.min(d - 1, i));
      j = Math.max(0, Math.min(m - 1, j));
      point(j, i);
    };
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      i = Math.floor(((event.clientX - box.left) / box.width) * d);
      j = count === 1 ? j : Math.floor(((event.clientY - box.top) / box.height) * m);
      pointHere();
    });
    canvas.addEventListener("focus", pointHere);
    canvas.addEventListener("keydown", (event) => {
      const step = /** @type {Record<string, [number, number]>} */ ({
        ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1],
      })[event.key];
      if (!step) return;
      event.preventDefault();
      [j, i] = [j + step[0], i + step[1]];
      pointHere();
    });
    const mark = make("div", { class: "cursor", hidden: true });
    marks.push(mark);
    return make("div", { class: "field-of" }, canvas, mark);
  };
  const column = (/** @type {string} */ title, /** @type {string | Node} */ top, /** @type {Node[]} */ body, kind = "") =>
    make("div", { class: `column ${kind}` }, make("h3", {}, title), make("div", { class: "top" }, top), ...body);
  const cells = (/** @type {(j: number) => Node | string} */ cell) => {
    const box = make("div", { class: "cells" });
    for (let j = 0; j < m; j++) box.append(make("div", { class: "cell" }, cell(j)));
    return box;
  };
  const coloured = (/** @type {HTMLCanvasElement} */ strip, /** @type {(j: number) => Node | string} */ cell) =>
    [links(m, rowHeight(context.root)), make("div", { class: "valued" }, strip, cells(cell))];
  const signed = (/** @type {ArrayLike<number>} */ values) => upright(values, { signed: reach(values) || 1, lut });
  const visible = Float32Array.from(line, (score) => (Number.isFinite(score) ? score : 0)); // no colour for a token that is masked
  const relative = isRelative(context.state.relative, m);
  const most = relative ? reach(weights) || 1 : 1;
  const columns = [
    column("token", "q →", [cells((j) => tokenElement(keys[j]))], "names"),
    column("key k", field("query", query, limit, 1), [field("keys", k.values, limit, m)], "keys-of"),
    column("q × k", "products", [field("products", products, reach(products), m, PRODUCTS)]),
    column("q · k", "sum", coloured(signed(dots), (j) => short(dots[j])), "linked figures"),
    column("score", biased ? "scaled, + bias" : "scaled", coloured(signed(visible), (j) => short(line[j])), "linked figures"),
    column("softmax", "weight", coloured(upright(weights, { most, lut: colours(context.root, HEAT) }), (j) => weightBar(weights[j])), "linked"),
  ];
  const plainScores = [...dots].every((dot, j) => !Number.isFinite(line[j]) || Math.abs(scale * dot - line[j]) < attention.coarse * Math.max(1, Math.abs(line[j])));
  table.dataset.exact = String(biased || plainScores);
  const whole = make("div", { class: "columns-of" }, ...columns, frame);
  whole.addEventListener("pointermove", (event) => {
    if (/** @type {Element} */ (event.target).closest(".field-of")) return; // a field points at a dimension too
    const box = columns[0].querySelector(".cells")?.getBoundingClientRect();
    const j = box ? Math.floor(((event.clientY - box.top) / box.height) * m) : -1;
    if (j >= 0 && j < m) point(j, null);
  });
  const bar = colourBar(context.root, { most, scale: { relative, change: (chosen) => context.set({ relative: chosen }) } });
  const above = make("div", { class: "above" }, status, toggle("numbers", context.state.numbers, (numbers) => context.set({ numbers })));
  table.replaceChildren(above, make("div", { class: "scrolled" }, whole), bar);
}

/**
 * Numbers as colours, one above the other.
 * @param {ArrayLike<number>} values
 * @param {{signed?: number, most?: number, lut: Uint8ClampedArray}} how as for `paint`
 */
function upright(values, how) {
  const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "strips", "aria-hidden": "true" }));
  paint(canvas, values, values.length, 1, how);
  canvas.style.height = `calc(var(--row) * ${values.length})`;
  return canvas;
}

/**
 * A weight as a bar and in percent.
 * @param {number} weight
 */
function weightBar(weight) {
  const bar = make("i", { class: "bar" });
  bar.style.width = `${100 * weight}%`;
  return make("span", { class: "weight" }, make("span", { class: "track" }, bar), make("span", { class: "number" }, percent(weight)));
}

/**
 * Lines from the rows of a column to the same rows of the next one, which is computed from it. The style sheet sets their length.
 * @param {number} count number of rows
 * @param {number} height of a row, in pixels
 */
function links(count, height) {
  const path = [...Array(count).keys()].map((j) => `M0 ${(j + 0.5) * height - 0.5}H99`).join("");
  return svg("svg", { class: "links", "aria-hidden": "true", height: count * height }, svg("path", { d: path }));
}
