// @ts-check
// Compare: two texts, or two models, side by side, and their difference.

import { choice, make, note, percent, plain, sentence, short } from "./parts.js";
import { reach, unpack } from "./numbers.js";
import { heatmap } from "./draw.js";
import { nameOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * The view of comparisons.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function compareView(context) {
  const section = make("section", { class: "compare-view" });
  if (context.source.live) section.append(another(context));
  if (context.looks.length < 2) {
    section.append(note("There is one text. Write another one, with one word changed, and see what changes inside."));
    return section;
  }
  const [one, other] = context.looks;
  const theirs = other.views.find((view) => view.part === context.part.part);
  if (!theirs) {
    section.append(note("The second model has no such part.", "problem"));
    return section;
  }
  const pictures = make("div", {});
  const chosen = { layer: Math.min(context.state.layer, theirs.layers - 1), head: "mean", mine: "mean" };
  const show = async () => {
    try {
      pictures.replaceChildren(...(await sideBySide(context, chosen)));
    } catch (error) {
      pictures.replaceChildren(note(/** @type {Error} */ (error).message, "problem"));
    }
  };
  const { live, keeps } = context.source;
  const heads = (/** @type {number} */ count) => {
    const all = [...Array(count).keys()].filter((head) => keeps("compare", comparisonParameters(context, { ...chosen, mine: String(head), head: String(head) })));
    return /** @type {[string, string][]} */ ([["mean", "mean of all"], ...all.map((head) => [String(head), String(head)])]);
  };
  const second = choice("Head of the second", heads(theirs.heads), "mean", (head) => {
    chosen.head = head;
    show();
  });
  const bar = make(
    "div", { class: "bar-of" },
    choice(live ? "Head of the first" : "Head of both", heads(live ? context.part.heads : Math.min(context.part.heads, theirs.heads)), "mean", (head) => {
      const along = chosen.head === chosen.mine && (head === "mean" || Number(head) < theirs.heads);
      if (along) chosen.head = /** @type {HTMLSelectElement} */ (second.querySelector("select")).value = head;
      chosen.mine = head;
      show();
    }),
  );
  const layers = [...Array(theirs.layers).keys()].map((number) => /** @type {[string, string]} */ ([String(number), String(number)]));
  const below = choice("Layer of the second", layers, String(chosen.layer), (layer) => {
    chosen.layer = Number(layer);
    show();
  });
  if (live) bar.append(second, below); // a file keeps each head beside the same one
  section.append(
    make("div", { class: "sides" }, sideLine("first", one), sideLine("second", other)), bar, pictures,
  );
  await show();
  return section;
}

/**
 * The parameters of a comparison.
 * @param {Context} context
 * @param {{layer: number, head: string, mine: string}} chosen `mine`: head of the first; `head`, `layer`: those of the second
 */
function comparisonParameters(context, chosen) {
  return { part: context.part.part, layer: context.state.layer, other_layer: chosen.layer, head: chosen.mine, other_head: chosen.head };
}

/**
 * A line with text and model.
 * @param {string} name
 * @param {import("./tokens.js").Look} look
 */
function sideLine(name, look) {
  const text = Array.isArray(look.item) ? look.item.join(" | ") : look.item;
  return make("p", {}, make("b", {}, `${name}: `), make("bdi", {}, plain(text, 200)), make("span", { class: "soft" }, ` · ${nameOf(look)}`));
}

/**
 * Heat maps of both, of their difference, and of the distances of hidden states.
 * @param {Context} context
 * @param {{layer: number, head: string, mine: string}} chosen
 */
async function sideBySide(context, chosen) {
  const comparison = await context.source.ask("compare", comparisonParameters(context, chosen));
  const [one, other] = context.looks.map((look) => look.sides);
  const name = (/** @type {number[]} */ [a, b], /** @type {string} */ side) =>
    one[side][a].text === other[side][b].text ? one[side][a].text : `${one[side][a].text}/${other[side][b].text}`;
  const rows = comparison.rows.map((/** @type {number[]} */ pair) => name(pair, context.part.rows));
  const columns = comparison.keys.map((/** @type {number[]} */ pair) => name(pair, context.part.keys));
  const largest = reach(unpack(comparison.difference).values);
  const most = Math.max(0.05, largest);
  const map = (/** @type {string} */ title, /** @type {any} */ sent, signed = false) =>
    heatmap(context.root, unpack(sent).values, {
      rows, columns, signed, name: title, size: 280, limit: signed ? most : undefined, unit: percent,
      scale: signed ? undefined : { chosen: context.state.relative, change: (relative) => context.set({ relative }) },
      say: (i, j, value) => `${plain(rows[i])} → ${plain(columns[j])}: ${signed && value > 0 ? "+" : ""}${percent(value)}`,
    });
  const models = context.looks[0].name !== context.looks[1].name;
  const [first, second] = ["First", "Second"].map((title, n) => (models ? `${title}: ${nameOf(context.looks[n])}` : title));
  const elements = [
    make("div", { class: "beside" }, map(first, comparison.a), map(second, comparison.b), map(`Second minus first, up to ${percent(largest)}`, comparison.difference, true)),
    note("Only tokens that both have, or that stand for each other, are compared. Orange: the second attends more; blue: less."),
  ];
  if (comparison.cosines) {
    const { shape, values } = unpack(comparison.cosines);
    const layers = [...Array(shape[0]).keys()].map((number) => (number ? `after layer ${number - 1}` : "embeddings"));
    const names = comparison.tokens.map((/** @type {number[]} */ pair) => name(pair, context.part.rows));
    const distances = values.map((cosine) => Math.max(0, 1 - cosine));
    const furthest = reach(distances);
    elements.push(
      heatmap(context.root, distances.map((distance) => distance / Math.max(furthest, 0.001)), {
        rows: layers, columns: names, gain: 1, size: 520, unit: (value) => short(value * Math.max(furthest, 0.001)),
        name: `How far each token's row moved, layer by layer: 1 − cosine, up to ${short(furthest)}`,
        say: (i, j) => `${layers[i]}, ${plain(names[j])}: cosine ${short(values[i * names.length + j])}`,
      }),
    );
  } else elements.push(note(sentence(comparison.apart)));
  return elements;
}

/**
 * A form for another second text.
 * @param {Context} context
 */
function another(context) {
  const item = (context.looks[1] ?? context.look).item;
  const area = /** @type {HTMLTextAreaElement} */ (make("textarea", { rows: 2, "aria-label": "The second text", dir: "auto", spellcheck: "false" }));
  area.value = Array.isArray(item) ? item[0] : item;
  const problem = make("p", { class: "problem", role: "status" });
  return make(
    "form",
    {
      class: "another",
      onsubmit: async (event) => {
        event.preventDefault();
        try {
          const pair = Array.isArray(item) ? item[1] : "";
          await context.source.ask("look", { side: 1, text: area.value, pair });
          await context.reload();
        } catch (error) {
          problem.textContent = /** @type {Error} */ (error).message;
        }
      },
    },
    area, make("button", { type: "submit" }, "Compare with this"), problem,
  );
}
