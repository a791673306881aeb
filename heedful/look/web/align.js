// @ts-check
// Alignment: which source tokens each generated token attended to.

import { choice, make, note, percent, plain, toggle } from "./parts.js";
import { merged, unpack, wordsOf } from "./numbers.js";
import { heatmap } from "./draw.js";
import { namesOf, nearest, placesOf, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

const WRITTEN = "Rows: generated tokens; columns: source tokens. Each row is what the decoder attended to when it generated that token.";
const GIVEN =
  "Rows: the tokens of the target; columns: source tokens. Each row is what the decoder attended to before that token; the " +
  "last row is for the token that the model would generate next.";
const READ = "Rows: the tokens that the decoder read; columns: source tokens. Each row is what the decoder attended to while it read that token.";

/**
 * The view of cross-attention.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function alignmentView(context) {
  const { look } = context;
  const part = look.views.find((view) => view.part === "cross") ?? context.part;
  const places = placesOf(context.source, context.state.side, part);
  const layer = nearest([...places.keys()], context.state.layer);
  const place = { side: context.state.side, part: part.part, layer };
  const headNumbers = places.get(layer) ?? [];
  const answers = await Promise.all(headNumbers.map((head) => context.source.ask("weights", { ...place, head })));
  const heads = answers.map((answer) => unpack(answer.weights).values);
  const [rows, keys] = [look.sides.generated ?? tokensOf(context, part.rows), tokensOf(context, part.keys)];
  const picture = make("div", { class: "beside" });
  const every = headNumbers.length === part.heads; // only then there is a mean of all heads
  let head = every ? "mean" : String(headNumbers[0]);
  const show = () => {
    const groups = context.state.words ? { rows: wordsOf(rows), keys: wordsOf(keys) } : null;
    const whole = { shape: [rows.length, keys.length], values: head === "mean" ? mean(heads) : heads[headNumbers.indexOf(Number(head))] };
    const drawn = groups ? merged(whole, groups.rows, groups.keys) : whole;
    const [down, across] = [namesOf(rows, groups?.rows), namesOf(keys, groups?.keys)];
    const which = part.heads === 1 ? "" : head === "mean" ? `, the mean of ${part.heads} heads` : `, head ${head}`;
    picture.replaceChildren(
      heatmap(context.root, drawn.values, {
        rows: down, columns: across, size: 640, scale: { chosen: context.state.relative, change: (relative) => context.set({ relative }) },
        name: part.layers > 1 || which ? `Layer ${layer}${which}` : "What it attended to",
        say: (i, j, value) => `${plain(down[i])} from ${plain(across[j])}: ${percent(value)}`,
      }),
    );
  };
  show();
  const bar = make("div", { class: "bar-of" });
  if (part.heads > 1) {
    const names = /** @type {[string, string][]} */ ([...(every ? [["mean", "mean of all"]] : []), ...headNumbers.map((head) => [String(head), String(head)])]);
    bar.append(
      choice("Head", names, head, (to) => {
        head = to;
        show();
      }),
    );
  }
  bar.append(
    toggle("whole words", context.state.words, (words) => {
      context.note({ words });
      show();
    }),
  );
  const about = !look.sides.generated ? READ : look.written ? WRITTEN : GIVEN;
  return make("section", { class: "alignment-view panel" }, bar, picture, note(about));
}

/**
 * The mean of the weights of all heads.
 * @param {Float32Array[]} heads
 */
function mean(heads) {
  const sums = new Float32Array(heads[0].length);
  for (const weights of heads) for (let i = 0; i < sums.length; i++) sums[i] += weights[i] / heads.length;
  return sums;
}
