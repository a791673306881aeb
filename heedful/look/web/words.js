// @ts-check
// Words as vectors: a word in several texts, layer by layer; static neighbours, a plane and analogies; the matrix W_Q^T W_K.

import { choice, formula, make, note, percent, plain, sentence, short } from "./parts.js";
import { unpack } from "./numbers.js";
import { heatmap } from "./draw.js";
import { bars, lines, scatter } from "./plots.js";
import { savable } from "./save.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * The view of words.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function wordsView(context) {
  const { source, state } = context;
  const section = make("section", { class: "words-view" });
  const suggested = await source.ask("suggested", { side: state.side });
  const shownHere = make("div", {});
  if (source.live) section.append(ask("A word of the texts", [suggested.word], (words) => inContext(context, shownHere, words[0])));
  section.append(shownHere);
  if (suggested.word) await inContext(context, shownHere, suggested.word);
  else shownHere.replaceChildren(note("No word of this text has a vector of its own in this model."));
  section.append(await inPlane(context, suggested));
  if (suggested.analogy.length || source.live) section.append(await analogyOf(context, suggested.analogy));
  return section;
}

/**
 * Static vectors of words in a plane.
 * @param {Context} context
 * @param {{words: string[], own: string[], methods: string[]}} suggested
 */
async function inPlane(context, suggested) {
  const { source, state } = context;
  const picture = make("div", {});
  let method = suggested.methods[0];
  let chosenWords = suggested.words;
  const draw = async () => {
    const isUsual = chosenWords === suggested.words && method === suggested.methods[0];
    const plane = await source.ask("scatter", { side: state.side, ...(isUsual ? {} : { words: chosenWords.join(" "), method }) });
    const own = new Set(chosenWords === suggested.words ? suggested.own : chosenWords);
    const { values } = unpack(plane.points);
    const points = plane.words.map((/** @type {string} */ text, /** @type {number} */ i) => ({ text, x: values[2 * i], y: values[2 * i + 1], filled: own.has(text) }));
    const axes = plane.variance?.map((/** @type {number} */ share, /** @type {number} */ i) => `principal component ${i + 1} (${percent(share)}${i ? "" : " of the variance"})`);
    picture.replaceChildren(
      scatter("Static vectors of words, in a plane", points, { axes, width: context.root.clientWidth - 90 }),
      note(`${chosenWords === suggested.words ? "Filled: words of the text. Open: their nearest neighbours in the vocabulary. " : ""}Similar vectors stand close together; words that stand close may still differ, since a plane keeps only a part of the distances.`),
    );
    if (plane.unknown.length) picture.append(note(`Without a vector in this model: ${plane.unknown.map((/** @type {string} */ word) => plain(word)).join(", ")}.`));
  };
  const panel = make("div", { class: "panel" });
  if (source.live) {
    panel.append(
      ask("Words, with spaces between", [suggested.words.join(" ")], async ([text]) => {
        const words = text.split(/\s+/u).filter(Boolean);
        chosenWords = words.join(" ") === suggested.words.join(" ") ? suggested.words : words;
        await draw();
      }, "long"),
    );
    if (suggested.methods.length > 1) {
      panel.append(choice("Method", suggested.methods.map((name) => [name, name.toUpperCase()]), method, async (chosen) => {
        method = chosen;
        await draw().catch((error) => picture.replaceChildren(note(error.message, "problem")));
      }));
    }
  }
  panel.append(picture);
  if (suggested.words.length > 2) await draw();
  else picture.replaceChildren(note("A plane needs at least three words that have vectors."));
  return panel;
}

/**
 * An analogy of static vectors.
 * @param {Context} context
 * @param {string[]} usual
 */
async function analogyOf(context, usual) {
  const answers = make("div", {});
  const show = async (/** @type {string[]} */ [a, b, c]) => {
    const { words } = await context.source.ask("analogy", { side: context.state.side, a, b, c });
    answers.replaceChildren(near(words));
  };
  if (usual.length) await show(usual);
  const [a, b, c] = usual.length ? usual : ["", "", ""];
  return make(
    "div", { class: "panel" }, make("h3", {}, "Analogy, of static vectors"),
    context.source.live ? ask("… is to … as … is to what?", [a, b, c], show) : make("p", {}, `${plain(a)} is to ${plain(b)} as ${plain(c)} is to …`),
    answers,
  );
}

/**
 * Show all occurrences of a word: the similarity of their vectors in each layer, and their nearest tokens.
 * @param {Context} context
 * @param {HTMLElement} where
 * @param {string} word
 */
async function inContext(context, where, word) {
  const similarity = await context.source.ask("words", { word });
  const names = similarity.places.map((/** @type {any} */ _, /** @type {number} */ i) => `${i + 1}`);
  const layers = similarity.layers.map(unpack);
  const picture = make("div", {});
  const slide = /** @type {HTMLInputElement} */ (
    make("input", { type: "range", min: 0, max: layers.length - 1, value: layers.length - 1, "aria-label": "Layer", oninput: () => draw() })
  );
  const draw = () => {
    const layer = Number(slide.value);
    const { values } = layers[layer];
    const least = Math.min(...values);
    picture.replaceChildren(
      heatmap(context.root, values.map((/** @type {number} */ cosine) => (cosine - least) / (1 - least || 1)), {
        rows: names, columns: names, size: 320, gain: 1, unit: (value) => short(least + value * (1 - least)),
        name: `Cosines ${similarity.names[layer]}`,
        say: (i, j) => `${i + 1} and ${j + 1}: ${short(values[i * names.length + j])}`,
      }),
    );
  };
  if (names.length > 1) draw();
  const texts = make("ol", { class: "texts" });
  for (const place of similarity.places) {
    const letters = [...String(place.text)]; // code points, which positions count: an emoji is one
    const around = (/** @type {number} */ from, /** @type {number} */ to) => (to > from ? plain(letters.slice(from, to).join(""), 160) : "");
    const [before, after] = [around(Math.max(0, place.start - 60), place.start), around(place.stop, Math.min(place.stop + 60, letters.length))];
    texts.append(make("li", {}, make("bdi", {}, before, make("mark", {}, around(place.start, place.stop)), after)));
  }
  const several = names.length > 1;
  const mean = layers.map((/** @type {any} */ layer) => meanOff(layer.values, names.length));
  where.replaceChildren(
    make("div", { class: "panel" }, make("h3", {}, "Occurrences"), texts),
    several ? make(
      "div", { class: "beside" },
      make("div", { class: "panel" }, layers.length > 1 ? make("label", { class: "field" }, make("span", {}, "Layer"), slide) : "", picture),
      layers.length > 1 ? lines("Mean cosine of different occurrences", [Float32Array.from(mean)], { across: "0: embedding; then after each layer" }) : "",
    ) : note("The word occurs once. If it occurs several times, or in several texts given with --word, the vectors of its occurrences are compared layer by layer."),
    make(
      "div", { class: "beside near" },
      savable(make("div", { class: "panel" }, make("h3", {}, "Static neighbours"), note(similarity.unknown ? sentence(similarity.unknown) : "In the embedding table, which has one vector for each token in all texts."), near(similarity.static)), "static neighbours"),
      ...similarity.neighbours.slice(0, 4).map((/** @type {any[]} */ words, /** @type {number} */ i) =>
        savable(make("div", { class: "panel" }, make("h3", {}, `In occurrence ${i + 1}`), note(`Words of the same text, by cosine ${similarity.names[layers.length - 1]}.`), near(words)), `words near occurrence ${i + 1}`),
      ),
    ),
  );
}

/**
 * The mean of the elements of a matrix that are not on its diagonal; 1 if there are none.
 * @param {Float32Array} values
 * @param {number} n rows and columns
 */
function meanOff(values, n) {
  let sum = 0;
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) if (i !== j) sum += values[i * n + j];
  return n > 1 ? sum / (n * n - n) : 1;
}

/**
 * Words with cosines, as bars.
 * @param {{text: string, cosine: number}[]} words
 */
function near(words) {
  return bars(words.map((word) => ({ text: word.text, value: word.cosine, told: short(word.cosine) })), { signed: words.some((word) => word.cosine < 0) });
}

/**
 * A form of text fields, with a button.
 * @param {string} name
 * @param {string[]} usual
 * @param {(words: string[]) => Promise<void>} done
 * @param {string} [kind] "long": the field takes the whole line
 */
function ask(name, usual, done, kind = "") {
  const fields = usual.map((value, i) => /** @type {HTMLInputElement} */ (make("input", { type: "text", value, dir: "auto", "aria-label": usual.length > 1 ? `${name} ${i + 1}` : name, class: kind, spellcheck: "false" })));
  const problem = make("p", { class: "problem", role: "status" });
  return make(
    "form",
    {
      class: "another",
      onsubmit: async (event) => {
        event.preventDefault();
        problem.textContent = "";
        try {
          await done(fields.map((field) => field.value));
        } catch (error) {
          problem.textContent = /** @type {Error} */ (error).message;
        }
      },
    },
    make("span", { class: "label" }, name), ...fields, make("button", { type: "submit" }, "Show"), problem,
  );
}

/**
 * The view of a head's query-key matrix.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function similarityView(context) {
  const spectrum = await context.source.ask("similarity", context.place());
  if (spectrum.told) return make("section", { class: "similarity-view" }, note(sentence(spectrum.told)));
  return make(
    "section", { class: "similarity-view" },
    make(
      "div", { class: "panel" },
      make("h2", {}, `Layer ${context.state.layer}, head ${context.state.head}`),
      make("p", {}, "Without biases and positions a score is ", formula("x M y"), " with M made of ", formula("W_Q"), " and ", formula("W_K"), ": a learned similarity of two rows."),
      make("p", { class: "answer" }, spectrum.summary),
      note(`${percent(spectrum.symmetric)} of M is symmetric; ${percent(spectrum.positive)} of its symmetric part is positive.`),
      make(
        "div", { class: "beside" },
        lines("Eigenvalues of the symmetric part", [unpack(spectrum.eigenvalues).values], { across: "largest first; a metric has none below 0" }),
        lines("Singular values of M", [unpack(spectrum.singular).values], { across: "largest first; their number is the head's width" }),
      ),
    ),
  );
}
