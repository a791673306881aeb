// @ts-check
// Words in context: one word's vectors in several texts, layer by layer; its static neighbours; analogies; W_Q W_K.

import { formula, make, note, percent, plain, sentence, short } from "./parts.js";
import { unpack } from "./numbers.js";
import { heatmap } from "./draw.js";
import { bars, lines } from "./plots.js";
import { savable } from "./save.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function wordsView(context) {
  const made = make("section", { class: "words-view" });
  const shownHere = make("div", {});
  if (context.source.live) made.append(ask("A word of the texts", [context.word], (words) => inContext(context, shownHere, words[0])));
  made.append(shownHere);
  if (context.word) await inContext(context, shownHere, context.word);
  else shownHere.replaceChildren(note("Give a word that stands in the texts, several times or in several of them."));
  if (context.source.live) {
    const answers = make("div", {});
    made.append(
      make(
        "div", { class: "panel" }, make("h3", {}, "Analogy, of static vectors"),
        ask("… is to … as … is to what?", ["man", "king", "woman"], async ([a, b, c]) => {
          const { words } = await context.source.ask("analogy", { side: context.state.side, a, b, c });
          answers.replaceChildren(near(words));
        }),
        answers,
      ),
    );
  }
  return made;
}

/**
 * @param {Context} context
 * @param {HTMLElement} where
 * @param {string} word
 */
async function inContext(context, where, word) {
  const found = await context.source.ask("words", { word });
  const names = found.places.map((/** @type {any} */ each, /** @type {number} */ i) => `${i + 1}`);
  const layers = found.layers.map(unpack);
  const picture = make("div", {});
  const slide = /** @type {HTMLInputElement} */ (
    make("input", { type: "range", min: 0, max: layers.length - 1, value: layers.length - 1, "aria-label": "Layer", oninput: () => draw() })
  );
  const draw = () => {
    const layer = Number(slide.value);
    const { values } = layers[layer];
    const least = Math.min(...values);
    picture.replaceChildren(
      heatmap(context.root, values.map((/** @type {number} */ each) => (each - least) / (1 - least || 1)), {
        rows: names, columns: names, size: 320, gain: 1, unit: (value) => short(least + value * (1 - least)),
        name: `Cosines ${found.names[layer]}`,
        say: (i, j) => `${i + 1} and ${j + 1}: ${short(values[i * names.length + j])}`,
      }),
    );
  };
  draw();
  const texts = make("ol", { class: "texts" });
  for (const each of found.places) {
    const letters = [...String(each.text)]; // places count characters, of which an emoji is one
    const around = (/** @type {number} */ from, /** @type {number} */ to) => (to > from ? plain(letters.slice(from, to).join(""), 160) : "");
    const [before, after] = [around(Math.max(0, each.start - 60), each.start), around(each.stop, Math.min(each.stop + 60, letters.length))];
    texts.append(make("li", {}, make("bdi", {}, before, make("mark", {}, around(each.start, each.stop)), after)));
  }
  const mean = layers.map((/** @type {any} */ each) => meanOff(each.values, names.length));
  where.replaceChildren(
    make("div", { class: "panel" }, make("h3", {}, "Where it stands"), texts),
    make(
      "div", { class: "beside" },
      make("div", { class: "panel" }, layers.length > 1 ? make("label", { class: "field" }, make("span", {}, "Layer"), slide) : "", picture),
      names.length > 1 && layers.length > 1 ? lines("Mean cosine of different occurrences", [Float32Array.from(mean)], { across: "0: embedding; then after each layer" }) : "",
    ),
    make(
      "div", { class: "beside near" },
      savable(make("div", { class: "panel" }, make("h3", {}, "Static neighbours"), note(found.unknown ? sentence(found.unknown) : "Of the embedding table: one vector, whatever the text."), near(found.static)), "static neighbours"),
      ...found.neighbours.slice(0, 4).map((/** @type {any[]} */ each, /** @type {number} */ i) =>
        savable(make("div", { class: "panel" }, make("h3", {}, `Around ${i + 1}`), note(`The words around it that are nearest ${found.names[layers.length - 1]}.`), near(each)), `words around ${i + 1}`),
      ),
    ),
  );
}

/**
 * @param {Float32Array} values
 * @param {number} n
 */
function meanOff(values, n) {
  let sum = 0;
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) if (i !== j) sum += values[i * n + j];
  return n > 1 ? sum / (n * n - n) : 1;
}

/** @param {{text: string, cosine: number}[]} words */
function near(words) {
  return bars(words.map((each) => ({ text: each.text, value: each.cosine, told: short(each.cosine) })));
}

/**
 * A form of some fields.
 * @param {string} name
 * @param {string[]} usual
 * @param {(words: string[]) => Promise<void>} done
 */
function ask(name, usual, done) {
  const fields = usual.map((value, i) => /** @type {HTMLInputElement} */ (make("input", { type: "text", value, "aria-label": `${name} ${i + 1}`, spellcheck: "false" })));
  const problem = make("p", { class: "problem", role: "status" });
  return make(
    "form",
    {
      class: "another",
      onsubmit: async (event) => {
        event.preventDefault();
        problem.textContent = "";
        try {
          await done(fields.map((each) => each.value));
        } catch (error) {
          problem.textContent = /** @type {Error} */ (error).message;
        }
      },
    },
    make("span", { class: "label" }, name), ...fields, make("button", { type: "submit" }, "Show"), problem,
  );
}

/**
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function similarityView(context) {
  const found = await context.source.ask("similarity", context.place());
  return make(
    "section", { class: "similarity-view" },
    make(
      "div", { class: "panel" },
      make("h2", {}, `Layer ${context.state.layer}, head ${context.state.head}`),
      make("p", {}, "Without biases and positions a score is ", formula("x M y"), " with M made of ", formula("W_Q"), " and ", formula("W_K"), ": a learned similarity of two rows."),
      make("p", { class: "answer" }, found.summary),
      note(`${percent(found.symmetric)} of M is symmetric; ${percent(found.positive)} of its symmetric part is positive.`),
      make(
        "div", { class: "beside" },
        lines("Eigenvalues of the symmetric part", [unpack(found.eigenvalues).values], { across: "largest first; a metric has none below 0" }),
        lines("Singular values of M", [unpack(found.singular).values], { across: "largest first; their number is the head's width" }),
      ),
    ),
  );
}
