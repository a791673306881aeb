// @ts-check
// The page: its views, its state, its header and controls, and how it starts in a server, a file or a notebook.

import { choice, cut, focusKey, make, note, plain, restoreFocus } from "./parts.js";
import { kernelSource, keptSource, serverSource } from "./source.js";
import { headView } from "./head.js";
import { modelView } from "./model.js";
import { neuronView } from "./neuron.js";
import { stepsView } from "./steps.js";
import { predictionView } from "./predict.js";
import { changeView } from "./change.js";
import { positionsView } from "./places.js";
import { decoderView } from "./decoder.js";
import { alignmentView } from "./align.js";
import { compareView } from "./compare.js";
import { similarityView, wordsView } from "./words.js";
import { headsView } from "./patterns.js";
import { headName, nameOf, nearest, placesOf } from "./tokens.js";
import { setCaption } from "./save.js";

/** @typedef {import("./tokens.js").Context} Context */
/** @typedef {import("./tokens.js").State} State */
/** @typedef {import("./tokens.js").Look} Look */
/** @typedef {import("./source.js").Source} Source */
/**
 * A view of the page. `show` draws it; `uses`: controls that it needs; `fits`: whether it can show a model.
 * @typedef {{
 *   key: string, name: string, about: string, show: (context: Context) => Promise<HTMLElement>,
 *   uses: string, fits: (look: Look, about: any, live: boolean) => boolean,
 * }} View
 */

const has = (/** @type {Look} */ look, /** @type {string[]} */ ...parts) => look.views.some((view) => parts.includes(view.part));
const takesApart = (/** @type {Look} */ look) => has(look, "encoder", "decoder");

const HEADS = /** @type {Record<string, string>} */ ({ // names of the kinds of heads
  pooler: "pooled [CLS] vector", masked_lm: "masked language model", next_sentence: "next sentence prediction",
  pretraining: "masked language model and next sentence prediction", sequence_classification: "text classification",
  token_classification: "token classification", multiple_choice: "multiple choice", question_answering: "extractive question answering",
  replaced_token_detection: "replaced token detection", language_model: "next-token prediction", permutation_lm: "permutation language model",
  double_heads: "next-token prediction and multiple choice", embedding: "sentence embeddings",
});
const LEFT_OUT = /** @type {Record<string, string>} */ ({ // names of answers that a file may lack, by question
  weights: "attention", neuron: "queries and keys", steps: "the steps of a block", similarity: "the spectrum of a head", compare: "comparisons",
  thumbnails: "thumbnails", prediction: "explanations", positions: "positions", writing: "generation", rollout: "rollout", words: "words", suggested: "words", scatter: "words in a plane", analogy: "analogies",
});
const FIELD = 20_000; // maximum characters in the field of the text
const SIZED = new Set(["head", "model", "neuron"]); // views whose pictures are drawn for the width of the page
const MIN_RESIZE = 24; // pixels; a scroll bar that appears changes the width by less
const RESIZE_DELAY = 150; // milliseconds without a change of the width until the view is drawn again

/** @type {View[]} */
const VIEWS = [
  { key: "head", name: "Head", about: "Which token attends to which", show: headView, uses: "part layer", fits: () => true },
  { key: "model", name: "Model", about: "All layers and heads", show: modelView, uses: "part", fits: () => true },
  { key: "neuron", name: "Neuron", about: "Queries and keys, taken apart", show: neuronView, uses: "part layer head", fits: takesApart },
  { key: "steps", name: "Step by step", about: "One token through one block", show: stepsView, uses: "part layer head", fits: takesApart },
  { key: "prediction", name: "Prediction", about: "The prediction, and what it rests on", show: predictionView, uses: "", fits: () => true },
  { key: "change", name: "Change", about: "Heads switched off, tokens replaced", show: changeView, uses: "", fits: takesApart },
  { key: "positions", name: "Positions", about: "How positions are represented", show: positionsView, uses: "", fits: () => true },
  { key: "decoder", name: "Decoder", about: "Generation, step by step", show: decoderView, uses: "layer head", fits: (look) => look.head === "language_model" },
  { key: "alignment", name: "Alignment", about: "Generated tokens, and the source tokens that they attend to", show: alignmentView, uses: "layer", fits: (look) => has(look, "cross") },
  { key: "compare", name: "Compare", about: "Two side by side", show: compareView, uses: "part layer", fits: (look, about, live) => about.looks.length > 1 || live },
  { key: "words", name: "Words", about: "Words as vectors", show: wordsView, uses: "", fits: () => true },
  { key: "similarity", name: "Similarity", about: "Queries and keys as a learned similarity", show: similarityView, uses: "part layer head", fits: takesApart },
  { key: "heads", name: "Heads", about: "What each head does", show: headsView, uses: "", fits: (look, about) => about.report },
];

/**
 * The state when the page opens.
 * @returns {State}
 */
function begin() {
  return { view: "", side: 0, part: "", layer: 0, head: 0, row: 1, heads: null, words: false, filter: "all", relative: null, numbers: false, tall: false, step: 0, lecture: false };
}

/**
 * Open the page within an element.
 * @param {HTMLElement} root
 * @param {Source} source
 * @param {{remember: boolean}} how whether the state is written to the fragment of the address
 */
export async function open(root, source, { remember }) {
  root.classList.add("heedful");
  root.replaceChildren(make("p", { class: "waiting" }, "…"));
  /** @type {any} */
  let about;
  try {
    about = await source.ask("about");
  } catch (error) {
    root.replaceChildren(note(/** @type {Error} */ (error).message, "problem"));
    return;
  }
  const state = begin();
  if (!remember || !recall(state)) chooseTelling(state, about.looks[0], source);
  const body = make("div", { class: "body", id: "heedful-view", role: "tabpanel", tabindex: -1 });
  const controls = make("div", { class: "controls" });
  const tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
  let turn = 0;
  let width = 0; // of the page when the view was drawn
  let timer = 0;

  const context = () => {
    state.side = Math.min(state.side, about.looks.length - 1);
    /** @type {Look} */
    const look = about.looks[state.side];
    const part = look.views.find((view) => view.part === state.part) ?? look.views[0];
    state.part = part.part;
    const viewQuestion = state.view === "neuron" || state.view === "steps" ? "neuron" : state.view === "similarity" ? "similarity" : "weights";
    const places = placesOf(source, state.side, part, viewQuestion);
    const layers = [...places.keys()];
    state.layer = nearest(layers, state.layer);
    const heads = places.get(state.layer) ?? [];
    state.head = nearest(heads, state.head);
    state.row = Math.min(state.row, look.sides[part.rows].length - 1);
    /** @type {Context} */
    const shared = {
      looks: about.looks, look, part, layers, heads, state, root, source, word: about.word, report: about.report,
      set: (changed) => {
        Object.assign(state, changed);
        show();
      },
      note: (changed) => {
        Object.assign(state, changed);
        if (remember) write(state);
      },
      place: (head = state.head) => ({ side: state.side, part: state.part, layer: state.layer, head }),
      reload: async () => {
        about = await source.ask("about");
        show();
      },
    };
    return shared;
  };

  const show = async () => {
    const now = context();
    const fitting = VIEWS.filter((candidate) => candidate.fits(now.look, about, source.live));
    const first = about.report ? "heads" : "head";
    const view = fitting.find((candidate) => candidate.key === (state.view || first)) ?? fitting[0];
    state.view = view.key;
    width = root.clientWidth;
    if (remember) write(state);
    root.classList.toggle("lecture", state.lecture);
    if (headed !== now.look) {
      headed = now.look;
      const within = top.contains(/** @type {any} */ (root.getRootNode()).activeElement);
      top.replaceChildren(header(now.look, root, source, context));
      if (within) top.querySelector("textarea")?.focus();
    }
    turn += 1;
    const mine = turn;
    const focused = focusKey(root);
    tabs.replaceChildren(...fitting.map((candidate) => tab(candidate, candidate === view, now)));
    controls.replaceChildren(...controlsOf(now, view));
    restoreFocus(root, focused);
    body.setAttribute("aria-label", view.name);
    body.setAttribute("aria-busy", "true");
    /** @type {Node} */
    let content;
    try {
      content = await view.show(now);
    } catch (error) {
      content = note(/** @type {Error} */ (error).message, "problem");
    }
    if (mine !== turn) return;
    const within = focusKey(root) ?? focused;
    body.replaceChildren(make("h2", { class: "unseen" }, view.name), content);
    restoreFocus(root, within);
    body.setAttribute("aria-busy", "false");
    body.dataset.view = view.key;
  };

  setCaption(root, () => captionOf(context(), VIEWS.find((view) => view.key === state.view)));
  const top = make("div", {});
  /** @type {Look | null} */
  let headed = null; // the text that the header is about
  root.replaceChildren(top, make("main", {}, tabs, controls, body), footer(source));
  arrowsOnTabs(tabs);
  shortcuts(remember ? document : root, context);
  const sized = new ResizeObserver(() => {
    if (!SIZED.has(state.view) || !root.clientWidth || Math.abs(root.clientWidth - width) < MIN_RESIZE) return;
    clearTimeout(timer);
    timer = setTimeout(show, RESIZE_DELAY);
  });
  sized.observe(root);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", show);
  root.addEventListener("themed", show);
  await show();
}

/**
 * The caption of a picture that is saved: model, part, layer and head, then the text.
 * @param {Context} context
 * @param {View | undefined} view
 */
function captionOf(context, view) {
  const { look, part, state } = context;
  const uses = view?.uses ?? "";
  const heads = view?.key === "head" ? (state.heads ?? [state.head]) : [state.head];
  const place = [
    uses.includes("part") && look.views.length > 1 ? part.part : "",
    (uses.includes("layer") || view?.key === "model") && part.layers > 1 ? `layer ${state.layer}` : "",
    (uses.includes("head") || view?.key === "head" || view?.key === "model") && part.heads > 1 ? heads.map((head) => headName(context, head)).join(", ") : "",
  ];
  const text = Array.isArray(look.item) ? look.item.join(" | ") : look.item;
  return [[nameOf(look), ...place].filter(Boolean).join(" · "), plain(text, 300)];
}

/**
 * The tab of a view.
 * @param {View} view
 * @param {boolean} chosen
 * @param {Context} context
 */
function tab(view, chosen, context) {
  return make(
    "button",
    {
      type: "button", role: "tab", class: "tab", "aria-selected": String(chosen), "aria-controls": "heedful-view", title: view.about, "data-view": view.key,
      tabindex: chosen ? 0 : -1, onclick: () => context.set({ view: view.key }),
    },
    view.name,
  );
}

/**
 * Let arrow keys choose a tab.
 * @param {HTMLElement} tabs
 */
function arrowsOnTabs(tabs) {
  tabs.addEventListener("keydown", (event) => {
    const all = /** @type {HTMLElement[]} */ ([...tabs.children]);
    const at = all.findIndex((tab) => tab.getAttribute("aria-selected") === "true");
    const to = all[at + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? NaN)];
    if (!to) return;
    event.preventDefault();
    to.click();
    /** @type {HTMLElement | null} */ (tabs.querySelector('[aria-selected="true"]'))?.focus();
  });
}

/**
 * The controls that a view uses: text or model, part, layer, head.
 * @param {Context} context
 * @param {View} view
 */
function controlsOf(context, view) {
  const { state, look, part } = context;
  const options = (/** @type {number[]} */ all) => all.map((number) => /** @type {[string, string]} */ ([String(number), String(number)]));
  const controls = [];
  if (context.looks.length > 1 && view.key !== "compare") {
    const models = new Set(context.looks.map((look) => look.name)).size > 1;
    const names = context.looks.map((look, i) => /** @type {[string, string]} */ ([String(i), `${i + 1}: ${titleOf(look, models)}`]));
    controls.push(choice(context.look.choices.length ? "Candidate" : models ? "Model" : "Text", names, String(state.side), (side) => context.set({ side: Number(side) })));
  }
  if (view.uses.includes("part") && look.views.length > 1) {
    controls.push(choice("Part", look.views.map((view) => [view.part, view.part]), part.part, (name) => context.set({ part: name, heads: null })));
  }
  if (view.uses.includes("layer") && part.layers > 1) {
    controls.push(choice("Layer", options(context.layers), String(state.layer), (layer) => context.set({ layer: Number(layer) })));
  }
  if (view.uses.includes("head") && part.heads > 1) {
    controls.push(choice("Head", options(context.heads), String(state.head), (head) => context.set({ head: Number(head) })));
  }
  controls.push(make("span", { class: "soft about" }, view.about));
  return controls;
}

/**
 * The name of a text in a model: the text, or if there are several models, the model.
 * @param {Look} look
 * @param {boolean} models whether there are several
 */
function titleOf(look, models) {
  if (models) return nameOf(look);
  if (look.choices.length) return plain(look.item[1], 40);
  const text = Array.isArray(look.item) ? look.item.join(" | ") : look.item;
  return plain(text, 40);
}

/**
 * The header: model, facts about it, and the text.
 * @param {Look} look
 * @param {HTMLElement} root
 * @param {Source} source
 * @param {() => Context} context
 */
function header(look, root, source, context) {
  const facts = [look.family === "heedful-classic" ? "classic" : look.family, look.head ? (HEADS[look.head] ?? look.head) : "no head", `${look.parameters.toLocaleString("en")} parameters`];
  const theme = make("button", { type: "button", class: "quiet theme", title: "Light or dark", onclick: () => turnTheme(root) }, "◐");
  theme.setAttribute("aria-label", "Light or dark");
  const lecture = make("button", { type: "button", class: "quiet", title: "Lecture mode (L): large type, whole width", onclick: () => context().set({ lecture: !context().state.lecture }) }, "Aa");
  lecture.setAttribute("aria-label", "Lecture mode");
  const element = make(
    "header", { class: "header" },
    make("div", {}, make("h1", {}, make("bdi", {}, nameOf(look))), make("p", { class: "soft" }, facts.join(" · "))),
    make("div", {}, lecture, theme),
  );
  const text = make("p", { class: "text" }, make("bdi", {}, plain(Array.isArray(look.item) ? look.item.join(" | ") : look.item, 600)));
  if (!source.live) element.append(text);
  else element.append(reading(look, context));
  return element;
}

/**
 * A form with the text, to show another one.
 * @param {Look} look
 * @param {() => Context} context
 */
function reading(look, context) {
  const [first, second] = Array.isArray(look.item) ? look.item : [look.item, ""];
  const area = /** @type {HTMLTextAreaElement} */ (make("textarea", { rows: Math.min(4, 1 + Math.floor(first.length / 110)), "aria-label": "Text", dir: "auto", spellcheck: "false" }));
  const pair = /** @type {HTMLInputElement} */ (make("input", { type: "text", "aria-label": "Second text", dir: "auto", placeholder: "a second text, if any", spellcheck: "false" }));
  [area.value, pair.value] = [cut(first, FIELD), second];
  const problem = make("p", { class: "problem", role: "status" });
  if (first.length > FIELD) problem.textContent = `The field holds the first ${FIELD.toLocaleString("en")} of ${first.length.toLocaleString("en")} characters; the views are of all.`;
  const form = make(
    "form",
    {
      class: "reading",
      onsubmit: async (event) => {
        event.preventDefault();
        problem.textContent = "";
        try {
          const now = context();
          await now.source.ask("look", { side: now.state.side, text: area.value, pair: pair.value });
          await now.reload();
        } catch (error) {
          problem.textContent = /** @type {Error} */ (error).message;
        }
      },
    },
    area, pair, make("button", { type: "submit" }, "Look"), problem,
  );
  return form;
}

/**
 * Change between the light and the dark theme.
 * @param {HTMLElement} root
 */
function turnTheme(root) {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  root.dispatchEvent(new Event("themed"));
}

/**
 * The footer: what a file lacks, and the keys.
 * @param {Source} source
 */
function footer(source) {
  const out = Object.keys(source.leftOut).map((name) => LEFT_OUT[name] ?? name);
  const size = source.bytes ? `This file holds ${(source.bytes / 1e6).toFixed(1)} MB of numbers${out.length ? `; for some layers, heads or tokens without ${out.join(", ")}` : ""}. ` : "";
  const keys = "Keys: [ and ] change the layer, { and } the head, L large type for lectures, arrows move within tabs, tokens, steps and pictures.";
  return make("footer", { class: "footer" }, size, keys);
}

/**
 * Handle the keys for layers, heads and lecture mode.
 * @param {Document | HTMLElement} where target of the events: the document of a page, the element of a widget
 * @param {() => Context} context
 */
function shortcuts(where, context) {
  where.addEventListener("keydown", (heard) => {
    const event = /** @type {KeyboardEvent} */ (heard);
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const now = context();
    const { state, layers, heads } = now;
    const step = { "[": -1, "]": 1 }[event.key];
    const other = { "{": -1, "}": 1 }[event.key];
    const beside = (/** @type {number[]} */ all, /** @type {number} */ here, /** @type {number} */ by) => all[all.indexOf(here) + by] ?? here;
    if (event.key === "l" || event.key === "L") now.set({ lecture: !state.lecture });
    else if (step) now.set({ layer: beside(layers, state.layer, step) });
    else if (other) {
      const head = beside(heads, state.head, other);
      now.set({ head, heads: [head] });
    }
  });
}

/**
 * Choose the head with the clearest pattern that can be shown.
 * @param {State} state
 * @param {Look} look
 * @param {Source} source
 */
function chooseTelling(state, look, source) {
  const head = look.telling.find(({ part, layer, head }) => source.keeps("weights", { side: 0, part, layer, head }));
  if (head) Object.assign(state, { part: head.part, layer: head.layer, head: head.head });
}

/**
 * Read the state from the fragment of the address.
 * @param {State} state
 * @returns {boolean} whether it names a part, a layer or a head
 */
function recall(state) {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (key === "view" || key === "part" || key === "filter") state[key] = value;
    else if (key === "heads") state.heads = value === "" ? [] : value.split(",").map(Number).filter(Number.isInteger);
    else if (key === "words") state.words = value === "true";
    else if (key === "relative") state.relative = value === "true";
    else if (key === "tall" || key === "lecture" || key === "numbers") state[key] = value === "true";
    else if (["side", "layer", "head", "row", "step"].includes(key) && /^\d{1,6}$/u.test(value)) {
      state[/** @type {"side" | "layer" | "head" | "row" | "step"} */ (key)] = Number(value);
    }
  }
  return ["part", "layer", "head", "heads"].some((key) => new URLSearchParams(location.hash.slice(1)).has(key));
}

/**
 * Write the state to the fragment of the address.
 * @param {State} state
 */
function write(state) {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) if (value !== null) params.set(key, String(value));
  history.replaceState(null, "", `#${params}`);
}

/** Start the page of a file. */
export function startFile() {
  const root = document.getElementById("look");
  const answers = document.getElementById("kept");
  if (root && answers) open(root, keptSource(JSON.parse(answers.textContent ?? "")), { remember: true });
}

/**
 * Start the page in a notebook, with the theme of the notebook.
 * @param {{model: any, el: HTMLElement}} widget model and element of anywidget
 */
export function startWidget({ model, el }) {
  const root = make("div", { class: "hosted" });
  el.append(root);
  const follow = () => {
    const theme = hostTheme();
    if (!theme || theme === root.dataset.theme) return;
    root.dataset.theme = theme;
    root.dispatchEvent(new Event("themed"));
  };
  follow();
  const watch = new MutationObserver(follow);
  const attributeFilter = ["data-jp-theme-light", "data-vscode-theme-kind", "theme"];
  for (const element of [document.documentElement, document.body]) watch.observe(element, { attributes: true, attributeFilter });
  open(root, kernelSource(model), { remember: false });
  return () => watch.disconnect();
}

/** "dark" or "light" by the theme of JupyterLab, VS Code or marimo; "" if there is no such setting. */
function hostTheme() {
  const settings = [document.body.dataset.jpThemeLight, document.body.dataset.vscodeThemeKind, document.documentElement.getAttribute("theme")];
  const theme = settings.find((value) => value) ?? "";
  if (theme === "false" || theme.includes("dark")) return "dark";
  return theme === "true" || theme.includes("light") ? "light" : "";
}

const served = document.querySelector("#look[data-served]");
if (served) open(/** @type {HTMLElement} */ (served), serverSource(), { remember: true });
