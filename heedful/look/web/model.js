// @ts-check
// Model view: all layers and heads as thumbnails, and one of them large.

import { arrows, make, note, percent, plain } from "./parts.js";
import { savable } from "./save.js";
import { reach, unpack } from "./numbers.js";
import { colours, HEAT, heatmap, isRelative, paint } from "./draw.js";
import { headName, namesOf, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

const MAX_THUMB = 80; // maximum width of a thumbnail, in pixels
const GAP = 2; // pixels between two thumbnails, as in look.css
const MAX_ASPECT = 1.4; // maximum ratio of the longer to the shorter side of a thumbnail
const LABELS = 100; // pixels beside the thumbnails: labels and borders
const BESIDE = 160; // pixels beside the thumbnails and the large map: labels of both, borders
const BELOW = 134; // pixels of the page above and below the thumbnails, without header and controls
const SPELLED = 56; // width and height of a thumbnail that has room for "layer 10" and "head 10", in pixels
const TILED = 48; // tokens above which a thumbnail shows tiles, as in inspection.py

/**
 * The model view.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function modelView(context) {
  const { part, state } = context;
  const grid = make("div", { class: "thumbs", role: "group", "aria-label": "Layers and heads" });
  const { beside, spelled, least, wide, tall } = thumbSize(context);
  grid.style.setProperty("--thumb", `${wide}px`);
  grid.style.setProperty("--thumb-height", `${tall}px`);
  grid.style.gridTemplateColumns = `auto repeat(${part.heads}, ${part.names.length ? "5rem" : `minmax(${least}px, var(--thumb))`})`;
  grid.append(make("span"));
  for (let head = 0; head < part.heads; head++) {
    const name = part.names[head] ?? (spelled ? `head ${head}` : String(head));
    grid.append(make("span", { class: "across", title: name }, name));
  }
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
    const name = make("span", { class: spelled ? "down spelled" : "down", "data-layer": layer }, spelled ? `layer ${layer}` : String(layer));
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
  const axes = spelled ? "" : [part.layers > 1 ? "Rows: layers." : "", part.names.length ? "" : "Columns: heads."].join(" ");
  return make(
    "section",
    { class: beside ? "model-view" : "model-view stacked" },
    savable(make("div", { class: "panel" }, axes.trim() ? make("p", { class: "axis" }, axes) : "", grid), "all layers and heads"),
    large,
  );
}

/**
 * The number of tokens that attend or that are attended to, whichever is larger.
 * @param {Context} context
 */
function tokenCount(context) {
  return Math.max(tokensOf(context, context.part.rows).length, tokensOf(context, context.part.keys).length);
}

/**
 * The side of the large map, in pixels: it grows with the number of tokens, within limits set by the width of the page.
 * @param {Context} context
 */
function mapSize(context) {
  const { clientWidth } = context.root;
  const cell = clientWidth < 1_500 ? 18 : 26;
  return Math.max(Math.min(320, clientWidth - 130), Math.min(tokenCount(context) * cell, Math.max(440, Math.min(680, 0.33 * clientWidth))));
}

/**
 * The size of a thumbnail, in pixels, for which all fit into the window, beside the large map or in a narrow window above it.
 * `least` is the smallest width, `wide` the largest: the style sheet chooses between them by the width of the map's labels.
 * `spelled`: whether there is room for "layer" and "head" in each label.
 * @param {Context} context
 * @returns {{beside: boolean, spelled: boolean, least: number, wide: number, tall: number}}
 */
function thumbSize(context) {
  const { root, part, state } = context;
  const least = parseFloat(getComputedStyle(root).getPropertyValue("--thumb"));
  const scale = state.lecture ? 1.6 : 1; // of letters, as in look.css
  const map = scale * BESIDE + mapSize(context);
  const beside = part.heads * (least + GAP) + map <= root.clientWidth;
  const width = (root.clientWidth - (beside ? map : scale * LABELS)) / part.heads - GAP;
  const top = (root.querySelector(".body")?.getBoundingClientRect().top ?? 0) - root.getBoundingClientRect().top;
  const height = Math.floor((window.innerHeight - top - BELOW) / part.layers) - GAP;
  const tall = Math.floor(Math.max(least, Math.min(height, MAX_ASPECT * Math.min(MAX_THUMB, Math.max(least, width)))));
  const wide = Math.floor(Math.max(least, Math.min(MAX_THUMB, MAX_ASPECT * tall)));
  const spelled = !part.names.length && Math.min(width, wide, tall) >= scale * SPELLED;
  return { beside, spelled, least, wide, tall };
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
  const scale = isRelative(state.relative, tokensOf(context, part.keys).length)
    ? "the colours of each picture are relative to its largest weight."
    : "all pictures have these colours.";
  try {
    const weights = unpack((await context.source.ask("weights", context.place())).weights);
    const [rows, keys] = [namesOf(tokensOf(context, part.rows)), namesOf(tokensOf(context, part.keys))];
    large.replaceChildren(
      heatmap(context.root, weights.values, {
        rows, columns: keys, size: mapSize(context), large: true, name: `Layer ${state.layer}, ${headName(context, state.head)}`,
        say: (i, j, value) => `${plain(rows[i])} attends to ${plain(keys[j])}: ${percent(value)}`,
        scale: { chosen: state.relative, change: (relative) => context.set({ relative }) },
      }),
      note(`Rows attend to columns; ${scale}${tokenCount(context) > TILED ? " A small picture shows the largest weight of each tile." : ""}`),
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
