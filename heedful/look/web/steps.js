// @ts-check
// Step by step: what a token's row becomes in one block, with the model's own numbers and the formulas beside them.

import { arrows, formula, make, note, short } from "./parts.js";
import { unpack } from "./numbers.js";
import { strip } from "./draw.js";
import { savable } from "./save.js";
import { bars } from "./plots.js";
import { tokenList, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

const FIRST = 6; // numbers that are written out

/**
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function stepsView(context) {
  const { part, state } = context;
  const names = tokensOf(context, part.rows).map((each) => each.text);
  const cards = make("ol", { class: "cards" });
  const list = tokenList(names, {
    label: "The token that is followed",
    chosen: (place) => place === state.row,
    pick: (place) => {
      for (const [number, each] of [...list.children].entries()) each.setAttribute("aria-pressed", String(number === place));
      context.note({ row: place });
      follow(context, cards, place);
    },
  });
  arrows(list, ".token");
  await follow(context, cards, Math.min(state.row, names.length - 1));
  return make(
    "section",
    { class: "steps-view" },
    make("div", { class: "panel" }, make("h3", {}, "Token"), list),
    savable(make("div", { class: "wide" }, cards, note("Strips show every number of a vector: orange positive, blue negative, faint near 0.")), "one block, step by step"),
  );
}

/**
 * @param {Context} context
 * @param {HTMLElement} cards
 * @param {number} row
 */
async function follow(context, cards, row) {
  try {
    const { steps } = await context.source.ask("steps", { ...context.place(), row });
    cards.replaceChildren(...steps.map((/** @type {any} */ step) => card(context, step)));
  } catch (error) {
    cards.replaceChildren(make("li", {}, note(/** @type {Error} */ (error).message, "problem")));
  }
}

/**
 * @param {Context} context
 * @param {{name: string, formula: string, about: string, over: string, vectors: {name: string, values: any}[]}} step
 */
function card(context, step) {
  const made = make("li", { class: "card" }, make("h3", {}, step.name), formula(step.formula), note(step.about));
  for (const { name, values } of step.vectors) {
    const numbers = unpack(values).values;
    if (step.over === "keys" && name !== "q · k") {
      made.append(overKeys(context, numbers, name));
      continue;
    }
    const first = [...numbers.slice(0, FIRST)].map(short).join("  ");
    made.append(
      make(
        "div",
        { class: "vector" },
        formula(name),
        strip(context.root, numbers),
        make("span", { class: "number" }, `${first}${numbers.length > FIRST ? ` … ${numbers.length} numbers` : ""}`),
      ),
    );
  }
  return made;
}

/**
 * @param {Context} context
 * @param {Float32Array} numbers
 * @param {string} name
 */
function overKeys(context, numbers, name) {
  const keys = tokensOf(context, context.part.keys);
  const best = [...numbers.entries()].filter(([, value]) => Number.isFinite(value)).sort((a, b) => b[1] - a[1]).slice(0, 8);
  const share = name === "w";
  const most = share ? 1 : Math.max(...best.map(([, value]) => Math.abs(value)), 1e-9);
  return bars(best.map(([place, value]) => ({ text: keys[place].text, value, told: share ? undefined : short(value) })), most);
}
