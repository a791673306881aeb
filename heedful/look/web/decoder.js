// @ts-check
// Decoder: each step's distribution over the vocabulary, what the step attended to, and greedy decoding beside beam search.

import { arrows, cut, make, note, percent, plain, short } from "./parts.js";
import { rowOf, unpack } from "./numbers.js";
import { bars } from "./plots.js";
import { savable } from "./save.js";
import { headName, nearest, placesOf, tokenList, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * The view of generation.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function decoderView(context) {
  const report = await context.source.ask("writing", { side: context.state.side });
  const step = make("div", { class: "panel wide" });
  const list = tokenList(report.steps.map((/** @type {any} */ step) => step.token), {
    label: "Tokens that were written",
    chosen: (place) => place === 0,
    pick: (place) => {
      for (const [number, button] of [...list.children].entries()) button.setAttribute("aria-pressed", String(number === place));
      showStep(context, step, report, place);
    },
  });
  arrows(list, ".token");
  if (report.steps.length) await showStep(context, step, report, 0);
  const beams = make("table", { class: "table" }, make("tr", {}, make("th", {}, "way"), make("th", {}, "log p"), make("th", {}, "tokens"), make("th", {}, "text")));
  for (const [number, sequence] of [report.greedy, ...report.beams].entries()) {
    beams.append(
      make(
        "tr", {}, make("td", {}, number ? `beam ${number}` : "greedy"), make("td", { class: "number" }, short(sequence.log_probability)),
        make("td", { class: "number" }, String(sequence.num_tokens)), make("td", {}, number ? differing(sequence.text, report.greedy.text) : make("bdi", {}, plain(sequence.text, 400))),
      ),
    );
  }
  return make(
    "section", { class: "decoder-view" },
    make("div", { class: "panel" }, make("h3", {}, "Written, one by one"), list),
    step,
    savable(make(
      "div", { class: "panel full" }, make("h3", {}, "Greedy decoding and beam search"), beams,
      note("Greedy decoding takes the most probable token at each step; beam search follows several beginnings and may find a text that is more probable as a whole. Words that greedy decoding did not generate are marked."),
    ), "greedy decoding and beam search"),
  );
}

/**
 * Show the candidates of a step, and the cross-attention for its token.
 * @param {Context} context
 * @param {HTMLElement} panel
 * @param {any} report
 * @param {number} place
 */
async function showStep(context, panel, report, place) {
  const step = report.steps[place];
  const written = make(
    "div", {}, make("h3", {}, `Step ${place}: the next token`),
    bars(step.candidates.map((/** @type {any} */ candidate) => ({ text: candidate.text, value: candidate.probability, marked: candidate.text === step.token }))),
    note(`The distribution's entropy is ${short(step.entropy)} nats: 0 is certain.`),
  );
  const both = make("div", { class: "beside apart" }, written);
  panel.replaceChildren(both);
  savable(panel, `step ${place} of the decoder`);
  const cross = context.look.views.find((view) => view.part === "cross");
  if (!cross || !context.look.written) return;
  const places = placesOf(context.source, context.state.side, cross);
  const layer = nearest([...places.keys()], context.state.layer);
  const head = nearest(places.get(layer) ?? [], context.state.head);
  try {
    const sent = await context.source.ask("weights", { side: context.state.side, part: "cross", layer, head });
    const line = rowOf(unpack(sent.weights), place);
    const keys = tokensOf(context, "source");
    const best = [...line.entries()].sort((a, b) => b[1] - a[1]).slice(0, 10);
    const where = cross.layers * cross.heads > 1 ? `: layer ${layer}, ${headName(context, head)}` : "";
    both.append(
      make("div", {}, make("h3", {}, `What it attended to${where}`), bars(best.map(([key, value]) => ({ text: keys[key].text, value, told: percent(value) })))),
    );
  } catch (error) {
    both.append(note(/** @type {Error} */ (error).message, "problem"));
  }
}

/**
 * A text with marks on the words that are not in its longest common subsequence with another text.
 * @param {string} text
 * @param {string} other
 */
function differing(text, other) {
  const [mine, theirs] = [cut(text, 400).split(" "), cut(other, 400).split(" ")];
  const best = [...Array(mine.length + 1)].map(() => new Uint16Array(theirs.length + 1));
  for (let i = mine.length - 1; i >= 0; i--) {
    for (let j = theirs.length - 1; j >= 0; j--) best[i][j] = mine[i] === theirs[j] ? 1 + best[i + 1][j + 1] : Math.max(best[i + 1][j], best[i][j + 1]);
  }
  const line = make("bdi", {});
  for (let i = 0, j = 0; i < mine.length; i++) {
    while (mine[i] !== theirs[j] && j < theirs.length && best[i][j + 1] === best[i][j]) j++;
    const same = mine[i] === theirs[j];
    if (same) j++;
    line.append(same ? plain(mine[i], 60) : make("b", { class: "other" }, plain(mine[i], 60)), " ");
  }
  return line;
}
