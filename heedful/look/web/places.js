// @ts-check
// Positions: how a model represents the positions of tokens, or their distances.

import { make, note, short } from "./parts.js";
import { reach, unpack } from "./numbers.js";
import { heatmap } from "./draw.js";
import { lines } from "./plots.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * The view of positions.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function positionsView(context) {
  const { views } = await context.source.ask("positions", { side: context.state.side });
  const section = make("section", { class: "positions-view" });
  for (const view of views) section.append(viewPanel(context, view));
  if (!views.length) section.append(note("This model has no positions: it reads a text as a bag of words."));
  return section;
}

/**
 * One way in which the model represents positions, with its plots.
 * @param {Context} context
 * @param {any} view PositionsView of positions_view.py
 */
function viewPanel(context, view) {
  const panel = make("div", { class: "panel" }, make("h2", {}, view.name), note(view.description));
  const pictures = make("div", { class: "beside" });
  const distances = view.distances ? unpack(view.distances).values : null; // key position - query position
  const what = distances ? "distance" : "position";
  if (view.vectors) {
    const { shape, values } = unpack(view.vectors);
    const [count, width] = shape;
    const [down, across] = [distances ? [...distances].map(String) : numbered(count), numbered(width)];
    const name = `Rows: ${what}s; columns: dimensions`;
    pictures.append(
      heatmap(context.root, values, {
        rows: down, columns: across, signed: true, limit: Math.min(reach(values), spread(values) * 3), name,
        size: 420, say: (i, j, value) => `${what} ${down[i]}, dimension ${j}: ${short(value)}`,
      }),
    );
  }
  if (view.similarity) {
    const { shape, values } = unpack(view.similarity);
    const names = distances ? [...distances].map(String) : numbered(shape[0]);
    pictures.append(
      heatmap(context.root, values, {
        rows: names, columns: names, signed: true, limit: 1, name: `Similarity of two ${what}s`, size: 380,
        say: (i, j, value) => `${what}s ${names[i]} and ${names[j]}: ${short(value)}`,
      }),
    );
  }
  if (view.similarity_by_distance) {
    pictures.append(lines("Similarity by distance", [unpack(view.similarity_by_distance).values], { across: "distance in tokens" }));
  }
  if (view.buckets && distances) {
    const { shape, values } = unpack(view.bias);
    const heads = [...Array(shape[0]).keys()];
    pictures.append(
      lines("Bucket of each distance", [unpack(view.buckets).values], { from: distances[0], across: "key minus query, in tokens" }),
      lines(
        "What each head adds to its scores",
        heads.map((head) => values.subarray(head * shape[1], (head + 1) * shape[1])),
        { from: distances[0], across: "key minus query, in tokens", names: heads.map((head) => `head ${head}`) },
      ),
    );
  }
  if (pictures.childElementCount) panel.append(pictures);
  return panel;
}

/**
 * "0", "1", ... as labels.
 * @param {number} count
 */
function numbered(count) {
  return [...Array(count).keys()].map(String);
}

/**
 * The root mean square; 1 if it is 0.
 * @param {Float32Array} values
 */
function spread(values) {
  return Math.sqrt(values.reduce((sum, value) => sum + value * value, 0) / Math.max(values.length, 1)) || 1;
}
