// @ts-check
// Neuron view: one query against all keys, dimension by dimension: q, k, q times k, their sum, the score, the softmax.

import { arrows, make, note, percent, plain, short, shown } from "./parts.js";
import { savable } from "./save.js";
import { reach, rowOf, softmax, unpack } from "./numbers.js";
import { colours, paint, SIGNED } from "./draw.js";
import { tokenList, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */
/** @typedef {import("./numbers.js").Numbers} Numbers */
/** @typedef {{q: Numbers, k: Numbers, scores: Numbers, scale: number, biased: boolean, coarse: number}} HeadAttention coarse: relative error of the numbers */

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
  const table = make("div", { class: "neurons" });
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
      table,
      note(
        `score = (q · k) × ${short(attention.scale)}${bias}; the weight is the softmax of the scores. Orange is positive, ` +
          "blue negative. Where q and k agree in sign, the product is positive and the token gets more attention.",
      ),
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
 */
function size(canvas, context, count, d) {
  const room = (context.root.clientWidth - 660) / 3; // beside tokens and figures
  canvas.style.width = `${Math.max(120, Math.min(320, d * 8, room))}px`;
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
  const status = make("p", { class: "told", role: "status" }, `${d} dimensions; point at one.`);
  const lut = colours(context.root, SIGNED);
  const field = (/** @type {string} */ name, /** @type {Float32Array} */ values, /** @type {number} */ most, /** @type {number} */ count) => {
    const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "strips", role: "img", "aria-label": name, tabindex: 0 }));
    paint(canvas, values, count, d, { signed: most || 1, lut });
    size(canvas, context, count, d);
    let [j, i] = [0, 0];
    const point = () => {
      i = Math.max(0, Math.min(d - 1, i));
      j = Math.max(0, Math.min(m - 1, j));
      status.textContent =
        `${plain(keys[j])}, dimension ${i}: ${short(query[i])} × ${short(k.values[j * d + i])} = ${short(products[j * d + i])}; ` +
        `all ${d}: ${short(dots[j])}`;
    };
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      i = Math.floor(((event.clientX - box.left) / box.width) * d);
      j = count === 1 ? j : Math.floor(((event.clientY - box.top) / box.height) * m);
      point();
    });
    canvas.addEventListener("focus", point);
    canvas.addEventListener("keydown", (event) => {
      const step = /** @type {Record<string, [number, number]>} */ ({
        ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1],
      })[event.key];
      if (!step) return;
      event.preventDefault();
      [j, i] = [j + step[0], i + step[1]];
      point();
    });
    return canvas;
  };
  const column = (/** @type {string} */ title, /** @type {Node} */ top, /** @type {Node} */ body, kind = "") =>
    make("div", { class: `column ${kind}` }, make("h3", {}, title), make("div", { class: "top" }, top), body);
  const cells = (/** @type {(j: number) => Node | string} */ cell) => {
    const box = make("div", { class: "cells" });
    for (let j = 0; j < m; j++) box.append(make("div", { class: "cell" }, cell(j)));
    return box;
  };
  const bar = (/** @type {number} */ j) => {
    const inner = make("i", { class: "bar" });
    inner.style.width = `${100 * weights[j]}%`;
    return make("span", { class: "weight" }, make("span", { class: "track" }, inner), make("span", { class: "number" }, percent(weights[j])));
  };
  const columns = [
    column("token", make("span", {}, "q →"), cells((j) => shown(keys[j])), "names"),
    column("key k", field("query", query, limit, 1), field("keys", k.values, limit, m)),
    column("q × k", make("span", {}, ""), field("products", products, reach(products), m)),
    column("q · k", make("span", {}, "sum"), cells((j) => short(dots[j])), "figures"),
    column("score", make("span", {}, biased ? "scaled, + bias" : "scaled"), cells((j) => short(line[j])), "figures"),
    column("softmax", make("span", {}, "weight"), cells(bar), "last"),
  ];
  const plainScores = [...dots].every((dot, j) => !Number.isFinite(line[j]) || Math.abs(scale * dot - line[j]) < attention.coarse * Math.max(1, Math.abs(line[j])));
  table.dataset.exact = String(biased || plainScores);
  table.replaceChildren(status, make("div", { class: "columns-of" }, ...columns));
}
