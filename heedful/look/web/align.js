// @ts-check
// Alignment: which words of the text each written word looked at.

import { make, note, percent, plain, toggle } from "./parts.js";
import { merged, unpack, wordsOf } from "./numbers.js";
import { heatmap } from "./draw.js";
import { namesOf, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function alignmentView(context) {
  const part = context.look.views.find((each) => each.part === "cross") ?? context.part;
  const layer = Math.min(context.state.layer, part.layers - 1);
  const place = { side: context.state.side, part: part.part, layer };
  const all = await Promise.all([...Array(part.heads).keys()].map((head) => context.source.ask("weights", { ...place, head })));
  const heads = all.map((each) => unpack(each.weights));
  const [rows, keys] = [tokensOf(context, part.rows), tokensOf(context, part.keys)];
  const picture = make("div", { class: "beside" });
  const show = (/** @type {boolean} */ words) => {
    const groups = words ? { rows: wordsOf(rows), keys: wordsOf(keys) } : null;
    const mean = new Float32Array(rows.length * keys.length);
    for (const each of heads) for (let i = 0; i < mean.length; i++) mean[i] += each.values[i] / heads.length;
    const whole = { shape: [rows.length, keys.length], values: mean };
    const drawn = groups ? merged(whole, groups.rows, groups.keys) : whole;
    const [down, across] = [namesOf(rows, groups?.rows), namesOf(keys, groups?.keys)];
    picture.replaceChildren(
      heatmap(context.root, drawn.values, {
        rows: down, columns: across, gain: 0.8,
        name: part.heads > 1 ? `Layer ${layer}, the mean of ${part.heads} heads` : `Layer ${layer}`,
        say: (i, j, value) => `${plain(down[i])} looked at ${plain(across[j])}: ${percent(value)}`,
      }),
    );
  };
  show(context.state.words);
  const about =
    "Down: what was written; across: the text. Each row says where the decoder looked while it read that token, to write " +
    "the next one.";
  return make(
    "section", { class: "alignment-view panel" },
    toggle("whole words", context.state.words, (words) => {
      context.note({ words });
      show(words);
    }),
    picture,
    note(about),
  );
}
