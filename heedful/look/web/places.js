// @ts-check
// Positions: the clock by which a model tells places apart.

import { make, note, short } from "./parts.js";
import { reach, unpack } from "./numbers.js";
import { heatmap } from "./draw.js";
import { lines } from "./plots.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function positionsView(context) {
  const { clocks } = await context.source.ask("positions", { side: context.state.side });
  const made = make("section", { class: "positions-view" });
  for (const clock of clocks) made.append(clockPanel(context, clock));
  if (!clocks.length) made.append(note("This model has no positions: it reads a text as a bag of words."));
  return made;
}

/**
 * @param {Context} context
 * @param {any} clock
 */
function clockPanel(context, clock) {
  const panel = make("div", { class: "panel" }, make("h2", {}, clock.name), note(clock.about));
  const pictures = make("div", { class: "beside" });
  const gaps = clock.gaps ? unpack(clock.gaps).values : null;
  const what = gaps ? "distance" : "position";
  if (clock.bands) {
    const { shape, values } = unpack(clock.bands);
    const [places, width] = shape;
    const [down, across] = [gaps ? [...gaps].map(String) : numbered(places), numbered(width)];
    const name = `Rows: ${what}s; columns: dimensions`;
    pictures.append(
      heatmap(context.root, values, {
        rows: down, columns: across, signed: true, limit: Math.min(reach(values), spread(values) * 3), name,
        size: 420, say: (i, j, value) => `${what} ${down[i]}, dimension ${j}: ${short(value)}`,
      }),
    );
  }
  if (clock.dots) {
    const { shape, values } = unpack(clock.dots);
    const names = gaps ? [...gaps].map(String) : numbered(shape[0]);
    pictures.append(
      heatmap(context.root, values, {
        rows: names, columns: names, signed: true, limit: 1, name: `Similarity of two ${what}s`, size: 380,
        say: (i, j, value) => `${what}s ${names[i]} and ${names[j]}: ${short(value)}`,
      }),
    );
  }
  if (clock.distance) {
    pictures.append(lines("Similarity by distance", [unpack(clock.distance).values], { across: "distance in tokens" }));
  }
  if (clock.buckets && gaps) {
    const { shape, values } = unpack(clock.bias);
    const heads = [...Array(shape[0]).keys()];
    pictures.append(
      lines("Bucket of each distance", [unpack(clock.buckets).values], { from: gaps[0], across: "key minus query, in tokens" }),
      lines(
        "What each head adds to its scores",
        heads.map((head) => values.subarray(head * shape[1], (head + 1) * shape[1])),
        { from: gaps[0], across: "key minus query, in tokens", names: heads.map((head) => `head ${head}`) },
      ),
    );
  }
  if (pictures.childElementCount) panel.append(pictures);
  return panel;
}

/** @param {number} count */
function numbered(count) {
  return [...Array(count).keys()].map(String);
}

/**
 * The root of the mean square.
 * @param {Float32Array} values
 */
function spread(values) {
  return Math.sqrt(values.reduce((sum, each) => sum + each * each, 0) / Math.max(values.length, 1)) || 1;
}
