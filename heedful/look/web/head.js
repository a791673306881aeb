// @ts-check
// Head view: lines from the tokens that attend to the tokens that they attend to, one colour for each head.

import { arrows, choice, make, note, percent, plain, svg, toggle } from "./parts.js";
import { savable } from "./save.js";
import { merged, rowOf, segmentsOf, unpack, wordsOf } from "./numbers.js";
import { isRelative, withoutZeros, scaleSwitch, strength } from "./draw.js";
import { headColour, headName, isDashed, namesOf, rowHeight, tokenList, tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */
/** @typedef {import("./numbers.js").Numbers} Numbers */

const TALL = 1_000; // maximum height of a list of tokens, in pixels; for longer lists tokens are closer and not all are named
const LABEL = 13; // pixels that a name needs
const SHADE_WIDTH = 10; // minimum width of a head's shade behind the tokens on the right, in pixels
const FAINT = 0.03; // weights below are not drawn
const LINES = 12_000; // maximum lines that are drawn, the strongest ones
const DRAWN = 3_000; // maximum lines that are SVG elements; more are painted on a canvas
const [WIDE, THIN, MANY] = [1.6, 0.9, 400]; // pixels of a line, of one among many, and lines that are many
const TOLD_APART = 4; // heads whose lines can be told apart
const ALSO = 3; // further heads that are offered by name

/**
 * The head view.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function headView(context) {
  const { part, state } = context;
  const [rows, keys] = [tokensOf(context, part.rows), tokensOf(context, part.keys)];
  const heads = (state.heads ?? [state.head]).filter((head) => context.heads.includes(head));
  const answers = await Promise.all(heads.map((head) => context.source.ask("weights", context.place(head))));
  const groups = state.words ? { rows: wordsOf(rows), keys: wordsOf(keys) } : null;
  const weights = answers.map((answer) => {
    const numbers = unpack(answer.weights);
    return groups ? merged(numbers, groups.rows, groups.keys) : numbers;
  });
  const sides = {
    left: namesOf(rows, groups?.rows),
    right: namesOf(keys, groups?.keys),
    from: parted(segmentsOf(rows), groups?.rows),
    to: parted(segmentsOf(keys), groups?.keys),
  };
  const view = make("section", { class: "head-view" });
  view.append(headBar(context, heads, sides));
  if (heads.length === 1) view.append(story(context, heads[0]));
  if (heads.length > TOLD_APART) view.append(note(`The lines of more than ${TOLD_APART} heads cover each other: choose one or two of them to see what each does.`));
  if (!heads.length) view.append(note("No head is chosen: choose one or more above."));
  else view.append(picture(context, heads, weights, sides));
  view.append(
    note(
      "Each token on the left attends to tokens on the right; the stronger a line, the larger the weight. Weights below 3 % are not drawn. " +
        "Choose tokens on the left to see only their lines; the tokens that they attend to are shaded in the colours of the heads. " +
        "Point at one on the right to see which tokens attend to it." +
        (part.part === "cross" ? " The left side is what the decoder reads: a token's lines lead to what helps to write the next one." : ""),
    ),
  );
  return view;
}

const MIN_WORDS = 4; // of a text in which a pattern is named, as in head_patterns.py
const STORIES = /** @type {Record<string, [string, string]>} */ ({
  previous: ["previous token", "Each token attends to the one before it"],
  next: ["next token", "Each token attends to the one after it"],
  same: ["same word", "Words attend to the same or a related word in their own text"],
  other: ["same word in the other text", "Words attend to the same or a related word in the other text"],
  delimiters: ["delimiters", "Tokens attend to [CLS], [SEP] and punctuation, as a head does where its pattern does not occur"],
});

/**
 * A sentence on the pattern of the head that is shown, and buttons for other heads with a pattern in this text.
 * @param {Context} context
 * @param {number} head
 */
function story(context, head) {
  const { look, part, state } = context;
  const here = look.telling.filter((named) => named.part === part.part && named.layer === state.layer && named.head === head)[0];
  const where = part.layers > 1 ? `Layer ${state.layer}, ${headName(context, head)}` : headName(context, head);
  const line = make("p", { class: "story" });
  if (here) {
    const [name, description] = STORIES[here.name];
    line.append(make("b", {}, `${where}: ${name}. `), `${description}, with ${percent(here.share)} of its weight (${percent(here.chance)} by chance). `);
  } else line.append(make("b", {}, `${where}. `), unnamed(context));
  /** @type {Set<string>} */
  const names = new Set(here ? [here.name] : []);
  for (const named of look.telling) {
    const canShow = context.source.keeps("weights", { side: state.side, part: named.part, layer: named.layer, head: named.head });
    if (names.has(named.name) || names.size > ALSO || !canShow) continue;
    names.add(named.name);
    const go = () => context.set({ part: named.part, layer: named.layer, head: named.head, heads: [named.head] });
    line.append(make("button", { type: "button", class: "quiet", onclick: go }, `layer ${named.layer}, head ${named.head}: ${STORIES[named.name][0]}`), " ");
  }
  return line;
}

/**
 * A sentence on why the head that is shown has no pattern.
 * @param {Context} context
 */
function unnamed({ look, part }) {
  if (!["encoder", "decoder"].includes(part.part)) return "";
  if (look.telling.length) return "No simple pattern: compare it with one that has a name. ";
  const words = look.sides[part.rows].filter((token) => !token.special).length;
  return words < MIN_WORDS
    ? `A pattern is named in texts of ${MIN_WORDS} words or more. `
    : "No head of this model attends mainly to the previous or the next token, to the same word or to delimiters in this text. ";
}

/**
 * The segment of each token, or with groups of each word.
 * @param {number[]} segments
 * @param {number[][]} [groups] positions of the tokens of each word
 */
function parted(segments, groups) {
  return groups ? groups.map((group) => segments[group[0]]) : segments;
}

/**
 * The controls of the view: heads, texts of a pair, whole words.
 * @param {Context} context
 * @param {number[]} heads
 * @param {{from: number[], to: number[]}} sides segments of the tokens on the left and on the right
 */
function headBar(context, heads, sides) {
  const bar = make("div", { class: "bar-of" });
  const chips = make("div", { class: "chips", role: "group", "aria-label": "Heads" });
  for (let head = 0; head < context.part.heads; head++) {
    const chip = make(
      "button",
      {
        type: "button", class: "chip", "aria-pressed": String(heads.includes(head)),
        disabled: !context.heads.includes(head),
        title: context.heads.includes(head) ? headName(context, head) : "not kept in the file",
        onclick: () => {
          const chosen = heads.includes(head) ? heads.filter((other) => other !== head) : [...heads, head].sort((a, b) => a - b);
          context.set({ heads: chosen });
        },
        ondblclick: () => context.set({ heads: [head], head }),
      },
      context.part.names[head] ? plain(context.part.names[head]) : String(head),
    );
    chip.style.setProperty("--mine", `var(${headColour(head)})`);
    chip.classList.toggle("dashed", isDashed(head));
    chips.append(chip);
  }
  arrows(chips, ".chip:enabled");
  bar.append(
    make("span", { class: "label" }, "Heads"), chips,
    make("button", { type: "button", class: "quiet", onclick: () => context.set({ heads: [...context.heads] }) }, "all heads"),
    make("button", { type: "button", class: "quiet", onclick: () => context.set({ heads: [] }) }, "none"),
  );
  if (new Set([...sides.from, ...sides.to]).size > 1) {
    /** @type {[string, string][]} */
    const filters = [["all", "all"], ["00", "A → A"], ["01", "A → B"], ["10", "B → A"], ["11", "B → B"]];
    bar.append(choice("Texts", filters, context.state.filter, (filter) => context.set({ filter })));
  }
  bar.append(toggle("whole words", context.state.words, (words) => context.set({ words })));
  if (Math.max(sides.from.length, sides.to.length) * rowHeight(context.root) > TALL) {
    bar.append(toggle("name every token", context.state.tall, (tall) => context.set({ tall })));
  }
  return bar;
}

/**
 * The tokens on both sides with lines between them.
 * @param {Context} context
 * @param {number[]} heads
 * @param {Numbers[]} weights of each head
 * @param {{left: string[], right: string[], from: number[], to: number[]}} sides names and segments of the tokens
 */
function picture(context, heads, weights, sides) {
  const [n, m] = [sides.left.length, sides.right.length];
  /** @type {Set<number>} */
  const chosen = new Set();
  /** @type {number | null} */
  let row = null;
  /** @type {number | null} */
  let key = null;
  const height = rowHeight(context.root);
  const fits = context.state.tall || Math.max(n, m) * height <= TALL;
  const step = fits ? height : Math.max(2, Math.floor(TALL / Math.max(n, m, 1))); // pixels from one token to the next
  const between = make("div", { class: "lines", "aria-hidden": "true" });
  const shares = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "shares", "aria-hidden": "true" }));
  const status = make("p", { class: "told", role: "status" }, "Enter chooses a token, Escape lets go of all.");
  const passes = (/** @type {number} */ i, /** @type {number} */ j) =>
    context.state.filter === "all" || context.state.filter === `${sides.from[i]}${sides.to[j]}`;
  const left = tokenList(sides.left, {
    label: "Tokens that attend",
    pick: (place, event) => {
      if (chosen.has(place)) chosen.delete(place);
      else chosen.add(place);
      /** @type {HTMLElement} */ (event.currentTarget).setAttribute("aria-pressed", String(chosen.has(place)));
      redraw();
    },
    over: (place) => {
      row = place;
      redraw();
    },
  });
  const right = tokenList(sides.right, {
    label: "Tokens that are attended to",
    over: (place) => {
      key = place;
      redraw();
    },
  });
  left.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    chosen.clear();
    for (const button of left.children) button.setAttribute("aria-pressed", "false");
    redraw();
  });
  arrows(left, ".token");
  arrows(right, ".token");
  const { lecture } = context.state;
  const { clientWidth } = context.root;
  const longest = lecture ? 900 : Math.max(380, Math.min(640, 0.3 * clientWidth));
  const gap = Math.max(70, Math.min(longest, clientWidth - (lecture ? 420 : 260)));
  const relative = isRelative(context.state.relative, tokensOf(context, context.part.keys).length);
  const most = relative ? largestWeight(weights, passes) || 1 : 1;
  const redraw = () => {
    const active = row !== null ? [row] : chosen.size ? [...chosen].sort((a, b) => a - b) : [...Array(n).keys()];
    const drawn = collect(weights, key === null ? active : [...Array(n).keys()], key, passes, m);
    const draw = drawn.length > DRAWN ? painted : stroked;
    draw(between, drawn, heads, { gap, step, height: Math.max(n, m, 1) * step, most, width: drawn.length > MANY ? THIN : WIDE });
    const sums = means(weights, row !== null || chosen.size ? active : [], passes, m);
    shade(shares, sums, heads, most);
    const focus = row ?? (chosen.size === 1 ? active[0] : null);
    if (focus !== null && key === null) status.textContent = strongest(sides, focus, sums, heads.length);
    else if (key !== null) status.textContent = `tokens that attend to ${plain(sides.right[key])}`;
    else if (!drawn.length) status.textContent = `No weight reaches ${100 * FAINT} %, so no line is drawn: the view "Model" shows small weights too.`;
    else status.textContent = `${active.length} of ${n} tokens, ${heads.length} ${heads.length === 1 ? "head" : "heads"}: ${drawn.length.toLocaleString("en")} lines`;
  };
  const grid = make("div", { class: "head-grid" }, left, between, make("div", { class: "right" }, shares, right));
  right.style.minWidth = `${SHADE_WIDTH * heads.length}px`;
  grid.style.setProperty("--row", `${step}px`);
  if (!fits) {
    grid.classList.add("tight");
    const every = Math.ceil(LABEL / step);
    for (const list of [left, right]) for (const [place, button] of [...list.children].entries()) button.classList.toggle("unnamed", place % every > 0);
  }
  requestAnimationFrame(redraw);
  const legend = make("div", { class: "legend saved-only" });
  const scale = make("div", { class: "legend scale-of" });
  for (const head of heads) {
    const dot = make("i", { class: "dot" });
    dot.style.background = `var(${headColour(head)})`;
    legend.append(make("span", {}, dot, `${headName(context, head)}${dashes(heads, head) ? " (dashed)" : ""}`));
  }
  for (const [place, weight] of [0.05, 0.2, 0.5, 1].map((share) => share * most).filter((weight) => weight >= FAINT).entries()) {
    const line = svg("svg", { width: 26, height: 8, viewBox: "0 0 26 8" }, svg("path", { d: "M0 5H24", "stroke-width": WIDE, opacity: opacity(weight, most) }));
    line.style.stroke = `var(${headColour(heads[0] ?? 0)})`;
    scale.append(make("span", {}, place ? "" : "weight ", line, ` ${withoutZeros(percent(weight))}`));
  }
  scale.append(scaleSwitch({ relative, change: (chosen) => context.set({ relative: chosen }) }));
  return savable(make("div", { class: "scrolled" }, status, grid, scale, legend), "attention between tokens");
}

/**
 * The largest weight.
 * @param {Numbers[]} weights of each head
 * @param {(row: number, key: number) => boolean} passes whether the texts of a pair are selected
 */
function largestWeight(weights, passes) {
  let most = 0;
  for (const { shape: [n, m], values } of weights) {
    for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) if (values[i * m + j] > most && passes(i, j)) most = values[i * m + j];
  }
  return most;
}

/**
 * The lines to draw, [row, key, number of the head, weight]; at most `LINES`, the strongest ones, in ascending order.
 * @param {Numbers[]} weights of each head
 * @param {number[]} rows
 * @param {number | null} key null: all
 * @param {(row: number, key: number) => boolean} passes whether the texts of a pair are selected
 * @param {number} m number of keys
 */
function collect(weights, rows, key, passes, m) {
  /** @type {[number, number, number, number][]} */
  const collected = [];
  for (const [h, matrix] of weights.entries()) {
    for (const i of rows) {
      const line = rowOf(matrix, i);
      for (let j = key ?? 0; j < (key === null ? m : key + 1); j++) {
        if (line[j] >= FAINT && passes(i, j)) collected.push([i, j, h, line[j]]);
      }
    }
  }
  return collected.sort((a, b) => a[3] - b[3]).slice(-LINES); // larger weights are drawn above smaller ones
}

/**
 * @typedef {{gap: number, step: number, height: number, most: number, width: number}} Size `gap`, `step`, `height`, `width`: pixels
 *   between both sides, of a token, of all tokens, of a line; `most`: weight of an opaque line
 */

/**
 * Draw lines as SVG elements.
 * @param {HTMLElement} between
 * @param {[number, number, number, number][]} drawn
 * @param {number[]} heads
 * @param {Size} size
 */
function stroked(between, drawn, heads, { gap, step, height, most, width }) {
  const drawing = svg("svg", { width: gap, height, viewBox: `0 0 ${gap} ${height}` });
  for (const [i, j, h, weight] of drawn) {
    const [a, b] = [(i + 0.5) * step, (j + 0.5) * step];
    const line = svg("path", {
      d: `M0 ${a}C${gap * 0.4} ${a} ${gap * 0.6} ${b} ${gap} ${b}`, fill: "none", "stroke-width": width, opacity: opacity(weight, most),
      ...(dashes(heads, heads[h]) ? { "stroke-dasharray": "5 3" } : {}),
    });
    line.style.stroke = `var(${headColour(heads[h])})`;
    drawing.append(line);
  }
  between.replaceChildren(drawing);
}

/**
 * Whether the lines of a head are dashed, since another head that is shown has its colour.
 * @param {number[]} heads
 * @param {number} head
 */
function dashes(heads, head) {
  return isDashed(head) && heads.some((other) => other !== head && headColour(other) === headColour(head));
}

/**
 * Opacity of the line of a weight, from 0 to 1.
 * @param {number} weight
 * @param {number} most weight of an opaque line
 */
function opacity(weight, most) {
  return Math.round(100 * strength(weight, most)) / 100;
}

/**
 * Paint lines on a canvas.
 * @param {HTMLElement} between
 * @param {[number, number, number, number][]} drawn
 * @param {number[]} heads
 * @param {Size} size
 */
function painted(between, drawn, heads, { gap, step, height, most, width }) {
  const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", {}));
  between.replaceChildren(canvas);
  const sharp = Math.min(window.devicePixelRatio || 1, 16_000 / height, 2);
  canvas.width = gap * sharp;
  canvas.height = height * sharp;
  canvas.style.height = `${height}px`;
  canvas.style.width = `${gap}px`;
  const pen = canvas.getContext("2d");
  if (!pen) return;
  pen.scale(sharp, sharp);
  const style = getComputedStyle(canvas);
  const tints = heads.map((head) => style.getPropertyValue(headColour(head)).trim());
  pen.lineWidth = width;
  for (const [i, j, h, weight] of drawn) {
    pen.strokeStyle = tints[h];
    pen.setLineDash(dashes(heads, heads[h]) ? [5, 3] : []);
    pen.globalAlpha = opacity(weight, most);
    pen.beginPath();
    const [a, b] = [(i + 0.5) * step, (j + 0.5) * step];
    pen.moveTo(0, a);
    pen.bezierCurveTo(gap * 0.4, a, gap * 0.6, b, gap, b);
    pen.stroke();
  }
}

/**
 * The mean weights of some rows; 0 without rows.
 * @param {Numbers[]} weights of each head
 * @param {number[]} rows
 * @param {(row: number, key: number) => boolean} passes whether the texts of a pair are selected
 * @param {number} m number of keys
 * @returns {Float64Array} [keys, heads]
 */
function means(weights, rows, passes, m) {
  const sums = new Float64Array(m * weights.length);
  for (const [h, matrix] of weights.entries()) {
    for (const i of rows) {
      const line = rowOf(matrix, i);
      for (let j = 0; j < m; j++) if (passes(i, j)) sums[j * weights.length + h] += line[j] / rows.length;
    }
  }
  return sums;
}

/**
 * Shade the names of the tokens on the right by their mean weights, one column for each head.
 * @param {HTMLCanvasElement} canvas
 * @param {Float64Array} sums [keys, heads]
 * @param {number[]} heads
 * @param {number} most weight of the strongest shade
 */
function shade(canvas, sums, heads, most) {
  canvas.width = heads.length;
  canvas.height = sums.length / heads.length;
  const pen = canvas.getContext("2d");
  if (!pen) return;
  const style = getComputedStyle(canvas);
  const opaque = Number(style.getPropertyValue("--shade")); // opacity with which a name keeps a contrast of 4.5
  for (const [h, head] of heads.entries()) {
    pen.fillStyle = style.getPropertyValue(headColour(head)).trim();
    for (let j = 0; j < canvas.height; j++) {
      pen.globalAlpha = opaque * strength(sums[j * heads.length + h], most);
      pen.fillRect(h, j, 1, 1);
    }
  }
}

/**
 * A sentence with the tokens that a token attends to most, averaged over heads.
 * @param {{left: string[], right: string[]}} sides
 * @param {number} row
 * @param {Float64Array} sums [keys, heads]
 * @param {number} heads number of heads
 */
function strongest(sides, row, sums, heads) {
  const means = sides.right.map((name, j) => {
    let sum = 0;
    for (let h = 0; h < heads; h++) sum += sums[j * heads + h];
    return { name, share: sum / heads };
  });
  const best = means.sort((a, b) => b.share - a.share).slice(0, 4);
  return `${plain(sides.left[row])} attends to ${best.map((token) => `${plain(token.name)} ${percent(token.share)}`).join(", ")}`;
}
