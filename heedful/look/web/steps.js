// @ts-check
// Step by step: one block as a diagram, and the vectors of one token in each step.

import { arrows, formula, make, note, short } from "./parts.js";
import { rowOf, softmax, unpack } from "./numbers.js";
import { strip } from "./draw.js";
import { bars } from "./plots.js";
import { savable } from "./save.js";
import { tokenList, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */
/**
 * @typedef {{
 *   name: string, formula: string, about: string, over: string, vectors: {name: string, values?: any}[],
 * }} Step BlockStep of block_steps.py; vectors without values belong to a head
 */

const FIRST = 6; // numbers of a vector that are printed
const ALL_SCORES = 24; // tokens up to which every score is shown
const MOST_SCORES = 16; // scores that are shown for more tokens, the largest ones

/**
 * The view of a block.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function stepsView(context) {
  const { part, state } = context;
  const names = tokensOf(context, part.rows).map((token) => token.text);
  const block = make("div", { class: "wide block-of" });
  const place = (/** @type {number} */ row) => ({ side: state.side, part: part.part, layer: state.layer, row });
  const list = tokenList(names, {
    label: "The token that is followed",
    chosen: (row) => row === state.row,
    pick: (row) => {
      for (const [number, button] of [...list.children].entries()) button.setAttribute("aria-pressed", String(number === row));
      context.note({ row });
      follow(context, block, row);
    },
  });
  for (const [row, button] of [...list.children].entries()) button.toggleAttribute("disabled", !context.source.keeps("steps", place(row)));
  arrows(list, ".token:enabled");
  await follow(context, block, Math.min(state.row, names.length - 1));
  return make("section", { class: "steps-view" }, make("div", { class: "panel" }, make("h3", {}, "Token"), list), block);
}

/**
 * Show the steps of one token.
 * @param {Context} context
 * @param {HTMLElement} block
 * @param {number} row
 */
async function follow(context, block, row) {
  const { state, part } = context;
  try {
    const [{ steps }, head] = await Promise.all([
      context.source.ask("steps", { side: state.side, part: part.part, layer: state.layer, row }), context.source.ask("neuron", context.place()),
    ]);
    const known = ofHead(head, row);
    for (const step of steps) for (const vector of step.vectors) vector.numbers = vector.values ? unpack(vector.values).values : known[vector.name];
    const card = make("div", { class: "panel step-card", "aria-live": "polite" });
    const stages = diagram(context, steps, (number) => showStage(context, card, steps, number, go));
    const go = (/** @type {number} */ number) => /** @type {HTMLElement} */ (stages.querySelectorAll(".stage")[number])?.focus();
    showStage(context, card, steps, Math.min(state.step, steps.length - 1), go);
    block.replaceChildren(make("div", { class: "beside stages-of" }, stages, card));
    savable(block, `block ${state.layer}, step by step`);
  } catch (error) {
    block.replaceChildren(note(/** @type {Error} */ (error).message, "problem"));
  }
}

/**
 * The vectors of one head for a row, by name: query, key, value, products, scores, weights and the weighted sum.
 * @param {any} head
 * @param {number} row
 * @returns {Record<string, Float32Array>}
 */
function ofHead(head, row) {
  const [q, k, v, scores] = [head.q, head.k, head.v, head.scores].map(unpack);
  const [m, d] = k.shape;
  const [query, score] = [rowOf(q, row), rowOf(scores, row)];
  const products = Float32Array.from({ length: m }, (_, j) => rowOf(k, j).reduce((sum, value, i) => sum + query[i] * value, 0));
  const weights = Float32Array.from(softmax(score));
  const z = Float32Array.from({ length: d }, (_, i) => weights.reduce((sum, weight, j) => sum + weight * v.values[j * d + i], 0));
  const own = Math.min(row, m - 1);
  return { q: query, k: rowOf(k, own), v: rowOf(v, own), "q · k": products, score, w: weights, z };
}

/**
 * The diagram of a block: a button for each step, and lines for the residual connections.
 * @param {Context} context
 * @param {Step[]} steps
 * @param {(number: number) => void} choose
 */
function diagram(context, steps, choose) {
  const group = make("div", { class: "stages", role: "group", "aria-label": "The steps of one block; arrow keys step through" });
  const now = Math.min(context.state.step, steps.length - 1);
  let kind = "";
  for (const [number, step] of steps.entries()) {
    const next = kindOf(step.name);
    const stage = make(
      "button",
      {
        type: "button", class: `stage ${next}${next === kind ? "" : " begins"}`, "aria-pressed": String(number === now),
        onclick: () => choose(number), onfocus: () => choose(number),
      },
      make("span", { class: "number-of" }, String(number + 1)), step.name,
    );
    kind = next;
    group.append(stage);
  }
  arrows(group, ".stage");
  const stages = /** @type {HTMLElement[]} */ ([...group.children]);
  for (const [number, stage] of stages.entries()) stage.tabIndex = number === now ? 0 : -1;
  requestAnimationFrame(() => {
    const stream = stages.filter((stage) => stage.classList.contains("stream"));
    for (let i = 0; i + 1 < stream.length; i++) { // residual connections past attention, and past the MLP
      const [from, to] = [stream[i], stream[i + 1]];
      const past = make("i", { class: "past", "aria-hidden": "true" });
      past.style.top = `${from.offsetTop + 0.6 * from.offsetHeight}px`;
      past.style.height = `${to.offsetTop + 0.4 * to.offsetHeight - from.offsetTop - 0.6 * from.offsetHeight}px`;
      group.append(past);
    }
  });
  return group;
}

/**
 * The part of a block that a step belongs to.
 * @param {string} name
 */
function kindOf(name) {
  if (/^(Embedding|Position)/u.test(name)) return "input";
  if (name.startsWith("Into")) return "stream";
  if (name.startsWith("Residual")) return "stream adds";
  return name === "MLP" ? "mlp" : name === "Attention to the encoder" ? "cross" : "attends";
}

/**
 * Show one step on the card.
 * @param {Context} context
 * @param {HTMLElement} card
 * @param {any[]} steps
 * @param {number} number
 * @param {(number: number) => void} go
 */
function showStage(context, card, steps, number, go) {
  const step = steps[number];
  context.note({ step: number });
  for (const [place, button] of [...(card.parentElement?.querySelectorAll(".stage") ?? [])].entries()) button.setAttribute("aria-pressed", String(place === number));
  const move = (/** @type {string} */ name, /** @type {number} */ to) => make("button", { type: "button", disabled: to < 0 || to >= steps.length, onclick: () => go(to) }, name);
  card.replaceChildren(
    make("p", { class: "soft" }, `Step ${number + 1} of ${steps.length}`), make("h3", {}, step.name), make("p", { class: "law" }, formula(step.formula)), note(step.about),
    ...step.vectors.flatMap((/** @type {any} */ vector) => vectorOf(context, step, vector)),
    note(step.over ? "" : "Strips show every number of a vector: orange positive, blue negative, faint near 0."),
    make("div", { class: "bar-of" }, move("← back", number - 1), move("next →", number + 1)),
  );
}

/**
 * A vector as a strip with its first numbers, or as bars if it has a number for each key.
 * @param {Context} context
 * @param {Step} step
 * @param {{name: string, numbers: Float32Array}} vector
 * @returns {HTMLElement[]}
 */
function vectorOf(context, step, { name, numbers }) {
  if (step.over === "keys") return name === "q · k" ? [] : overKeys(context, step, numbers, name);
  const first = [...numbers.slice(0, FIRST)].map(short).join("  ");
  const text = make("span", { class: "number" }, `${first}${numbers.length > FIRST ? ` … ${numbers.length} numbers` : ""}`);
  return [make("div", { class: "vector" }, formula(name), strip(context.root, numbers), text)];
}

/**
 * Scores or weights of the tokens that are attended to, as bars; beside a score is the product before it is scaled.
 * @param {Context} context
 * @param {any} step
 * @param {Float32Array} numbers
 * @param {string} name
 */
function overKeys(context, step, numbers, name) {
  const keys = tokensOf(context, context.part.keys);
  const visible = [...numbers.entries()].filter(([, value]) => Number.isFinite(value));
  const cut = visible.length > ALL_SCORES;
  const barEntries = cut ? visible.sort((a, b) => b[1] - a[1]).slice(0, MOST_SCORES) : visible;
  const products = step.vectors.find((/** @type {any} */ vector) => vector.name === "q · k")?.numbers;
  const most = name === "w" ? 1 : Math.max(...barEntries.map(([, value]) => Math.abs(value)), 1e-9);
  const rows = barEntries.map(([place, value]) => ({
    text: keys[place].text, value, told: name === "w" ? undefined : `${short(value)}   (q · k = ${short(products[place])})`,
  }));
  const hidden = numbers.length - visible.length;
  const remarks = [name === "w" ? "" : "Orange bars are positive scores, blue ones negative.", cut ? `The ${MOST_SCORES} largest of ${visible.length} are shown.` : "", hidden ? `${hidden} later tokens cannot be seen from here.` : ""].filter(Boolean);
  return [bars(rows, { most, signed: name !== "w" }), ...(remarks.length ? [note(remarks.join(" "))] : [])];
}
