// @ts-check
// Model view: all layers and heads as thumbnails, and one of them large.

import { arrows, make, note, percent, plain } from "./parts.js";
import { savable } from "./save.js";
import { reach, unpack } from "./numbers.js";
import { colours, HEAT, heatmap, isRelative, paint } from "./draw.js";
import { headName, namesOf, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

const MAX_THUMB = 80; // maximum width of a thumbnail, in pixels
const GAP = 4; // pixels between two thumbnails
const MAX_ASPECT = 4 / 3; // maximum ratio of the longer to the shorter side of a thumbnail
const LABELS = 135; // pixels beside the thumbnails: labels, borders and a scroll bar
const BESIDE = 210; // pixels beside the thumbnails and the large map, with the labels of the map

/**
 * The model view.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function modelView(context) {
  const { part, state } = context;
  const grid = make("div", { class: "thumbs", role: "group", "aria-label": "Layers and heads" });
  const [wide, tall] = thumbSize(context);
  grid.style.setProperty("--thumb", `${wide}px`);
  grid.style.setProperty("--thumb-height", `${tall}px`);
  grid.style.gridTemplateColumns = `auto repeat(${part.heads}, ${part.names.length ? "5rem" : "var(--thumb)"})`;
  grid.append(make("span", { class: "axis" }, "layer"));
  for (let head = 0; head < part.heads; head++) grid.append(make("span", { class: "across" }, part.names[head] ?? String(head)));
  const large = make("div", { class: "large" });
  const watch = new IntersectionObserver((seen) => {
    for (const entry of seen) {
      if (!entry.isIntersecting) continue;
      watch.unobserve(entry.target);
      fillLayer(context, grid, Number(/** @type {HTMLElement} */ (entry.target).dataset.layer));
    }
  });
  const layers = [...Array(part.layers).keys()].filter((layer) => context.source.keeps("thumbnails", { side: state.side, part: part.part, layer }));
  for (const layer of layers) {
    const name = make("span", { class: "down", "data-layer": layer }, String(layer));
    grid.append(name);
    for (let head = 0; head < part.heads; head++) {
      const thumb = make(
        "button",
        {
          type: "button", class: "thumb", "data-layer": layer, "data-head": head,
          "aria-label": `layer ${layer}, ${headName(context, head)}`,
          "aria-pressed": String(layer === state.layer && head === state.head),
          onclick: (event) => {
            for (const thumb of grid.querySelectorAll(".thumb")) thumb.setAttribute("aria-pressed", String(thumb === event.currentTarget));
            context.note({ layer, head });
            enlarge(context, large);
          },
        },
        make("canvas", { "aria-hidden": "true" }),
      );
      grid.append(thumb);
    }
    watch.observe(name);
  }
  arrows(grid, ".thumb", part.heads);
  await enlarge(context, large);
  return make(
    "section",
    { class: "model-view" },
    savable(make("div", { class: "panel" }, make("p", { class: "axis" }, part.names.length ? "" : "head"), grid, note("Each picture is one head: its rows are the tokens that attend, its columns the tokens that they attend to. A picture of many tokens shows the largest weight of each tile. The colours are those of the large map.")), "all layers and heads"),
    large,
  );
}

/**
 * The side of the large map, in pixels: it grows with the number of tokens, within limits set by the width of the page.
 * @param {Context} context
 */
function mapSize(context) {
  const { root, part } = context;
  const tokens = Math.max(tokensOf(context, part.rows).length, tokensOf(context, part.keys).length);
  const cell = root.clientWidth < 1_500 ? 18 : 26;
  return Math.max(240, Math.min(tokens * cell, Math.max(440, Math.min(680, 0.33 * root.clientWidth))));
}

/**
 * Width and height of a thumbnail, in pixels. All thumbnails fit beside the large map, or in a narrow window above it.
 * @param {Context} context
 */
function thumbSize(context) {
  const { root, part } = context;
  const least = parseFloat(getComputedStyle(root).getPropertyValue("--thumb"));
  const beside = BESIDE + mapSize(context);
  const width = root.clientWidth - (part.heads * (least + GAP) + beside > root.clientWidth ? LABELS : beside);
  const tall = Math.floor((0.58 * window.innerHeight) / part.layers) - GAP;
  const wide = Math.max(least, Math.min(MAX_THUMB, Math.floor(width / part.heads) - GAP, MAX_ASPECT * tall));
  return [wide, Math.max(least, Math.min(tall, MAX_ASPECT * wide))].map(Math.floor);
}

/**
 * Paint the thumbnails of a layer, or disable them if there is no answer.
 * @param {Context} context
 * @param {HTMLElement} grid
 * @param {number} layer
 */
async function fillLayer(context, grid, layer) {
  const { state, part } = context;
  try {
    const tensor = unpack((await context.source.ask("thumbnails", { side: state.side, part: part.part, layer })).heads);
    const [, n, m] = tensor.shape;
    const lut = colours(context.root, HEAT);
    const relative = isRelative(state.relative, tokensOf(context, part.keys).length);
    for (const [head, canvas] of grid.querySelectorAll(`.thumb[data-layer="${layer}"] canvas`).entries()) {
      const values = tensor.values.subarray(head * n * m, (head + 1) * n * m);
      paint(/** @type {HTMLCanvasElement} */ (canvas), values, n, m, { most: relative ? reach(values) || 1 : 1, lut });
    }
  } catch (error) {
    for (const thumb of grid.querySelectorAll(`.thumb[data-layer="${layer}"]`)) thumb.setAttribute("disabled", "");
  }
}

/**
 * Show the head of the state as the large map.
 * @param {Context} context
 * @param {HTMLElement} large
 */
async function enlarge(context, large) {
  const { part, state } = context;
  try {
    const weights = unpack((await context.source.ask("weights", context.place())).weights);
    const [rows, keys] = [namesOf(tokensOf(context, part.rows)), namesOf(tokensOf(context, part.keys))];
    large.replaceChildren(
      heatmap(context.root, weights.values, {
        rows, columns: keys, size: mapSize(context), name: `Layer ${state.layer}, ${headName(context, state.head)}`,
        say: (i, j, value) => `${plain(rows[i])} attends to ${plain(keys[j])}: ${percent(value)}`,
        scale: { chosen: state.relative, change: (relative) => context.set({ relative }) },
      }),
      part.part === "cross" ? note("Rows are what the decoder reads: each row's weights help to write the token after it.") : "",
      make(
        "p",
        {},
        make("button", { type: "button", onclick: () => context.set({ view: "head", heads: [state.head] }) }, "Open as lines"),
        " ",
        part.names.length || !["encoder", "decoder"].includes(part.part) ? "" : make("button", { type: "button", onclick: () => context.set({ view: "neuron" }) }, "Take apart"),
      ),
    );
  } catch (error) {
    large.replaceChildren(note(/** @type {Error} */ (error).message, "problem"));
  }
}
