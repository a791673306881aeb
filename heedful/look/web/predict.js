// @ts-check
// Prediction: the answer of the head, its attribution to tokens, and beside it the attention to the same tokens.

import { choice, make, note, percent, plain, sentence, short, tokenElement } from "./parts.js";
import { reach, unpack } from "./numbers.js";
import { savable } from "./save.js";
import { colourBar, colours, HEAT, isRelative, SIGNED, strength } from "./draw.js";
import { bars } from "./plots.js";
import { tokensOf } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

const CAUTION =
  "Attention tells where information could come from, not what was made of it: another pattern can give the same " +
  "answer, and a token that is attended to may add nothing. Where both pictures differ, trust the first, and test " +
  "it by changing the word.";

/**
 * The prediction view.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function predictionView(context) {
  const explanation = await context.source.ask("prediction", { side: context.state.side });
  const panel = make("div", { class: "panel wide" });
  explain(context, panel, explanation);
  return make(
    "section", { class: "prediction-view" },
    savable(make("div", { class: "panel" }, make("h3", {}, "Prediction"), explanation.told ? note(sentence(explanation.told)) : answerOf(context, explanation.answer)), "the prediction"),
    panel,
  );
}

/**
 * Show the attribution of one score, and a choice of other scores.
 * @param {Context} context
 * @param {HTMLElement} panel
 * @param {any} explanation
 */
function explain(context, panel, explanation) {
  const bar = others(context, panel, explanation);
  panel.replaceChildren(make("h3", {}, "What it rests on"), ...(bar.childElementCount ? [bar] : []));
  if (!explanation.texts) {
    if (!explanation.attribution) panel.append(note(sentence(explanation.why || "There is nothing to explain.")));
    panel.append(...reasons(context, tokensOf(context, "source").map((token) => token.text), explanation));
  }
  for (const [number, text] of (explanation.texts ?? []).entries()) {
    panel.append(make("h3", {}, number ? "The other text" : "This text"), ...reasons(context, text.tokens, text));
  }
  if (explanation.attention || explanation.texts) {
    panel.append(note(CAUTION));
    savable(panel, "what the prediction rests on");
  }
}

/**
 * Attribution and attention of a text, if there are any.
 * @param {Context} context
 * @param {string[]} names of the tokens
 * @param {any} explanation of the text
 */
function reasons(context, names, explanation) {
  const elements = [];
  if (explanation.attribution) {
    const { score, at_text: text, at_baseline: baseline, missing } = explanation.attribution;
    const small = Math.abs(missing) < 0.001 * Math.abs(text - baseline);
    elements.push(
      note(`Integrated gradients of ${plain(score, 120)}: what each token adds to it.`),
      tinted(context, names, unpack(explanation.attribution.values).values, true),
      note(
        `The score is ${short(text)} for the text and ${short(baseline)} with its words masked; the tokens' shares sum to ` +
          `that difference${small ? "" : ` but for ${short(missing)}, which more steps would make smaller`}.`,
      ),
    );
  }
  if (explanation.attention) {
    elements.push(
      make("h3", {}, "What attention shows"), note(plain(explanation.from, 120)),
      tinted(context, names, unpack(explanation.attention).values, false),
    );
  }
  return elements;
}

/**
 * Controls to explain another score: of another token, or of another class.
 * @param {Context} context
 * @param {HTMLElement} panel
 * @param {any} explanation
 */
function others(context, panel, explanation) {
  const { places = [], labels = [], place, label } = explanation.choices ?? {};
  const bar = make("div", { class: "bar-of" });
  const named = (/** @type {[number, string][]} */ all, /** @type {boolean} */ counted) =>
    all.map(([number, text]) => /** @type {[string, string]} */ ([String(number), counted ? `${number}: ${text}` : text]));
  const ask = async (/** @type {Record<string, string | number>} */ what) => {
    try {
      explain(context, panel, await context.source.ask("prediction", { side: context.state.side, ...what }));
    } catch (error) {
      bar.append(note(/** @type {Error} */ (error).message, "problem"));
    }
  };
  const here = /** @type {Record<string, string | number>} */ (places.length ? { place } : {});
  /**
   * The choices for which there is an answer, with the current one.
   * @param {[number, string][]} all
   * @param {number} now
   * @param {(to: number) => Record<string, string | number>} what
   */
  const withAnswers = (all, now, what) =>
    all.filter(([to]) => to === now || context.source.keeps("prediction", { side: context.state.side, ...what(to) }));
  const tokens = withAnswers(places, place, (to) => ({ place: to }));
  if (tokens.length > 1) bar.append(choice("Token", named(tokens, true), String(place), (to) => ask({ place: to })));
  const scores = withAnswers(labels, label, (to) => ({ ...here, label: to }));
  if (scores.length > 1) {
    bar.append(choice("Score of", named(scores, false), String(label), (to) => ask({ ...here, label: to })));
  }
  return bar;
}

/**
 * Tokens with backgrounds that show a number of each.
 * @param {Context} context
 * @param {string[]} names
 * @param {Float32Array} values
 * @param {boolean} signed whether numbers may be negative
 */
function tinted(context, names, values, signed) {
  const lut = colours(context.root, signed ? SIGNED : HEAT);
  const relative = signed || isRelative(context.state.relative, names.length);
  const most = relative ? reach(values) || 1 : 1;
  const line = make("p", { class: "tinted" });
  for (const [place, name] of names.entries()) {
    const share = signed ? (values[place] / most + 1) / 2 : strength(values[place], most);
    const level = Math.max(0, Math.min(255, Math.round(255 * share)));
    const [r, g, b] = lut.slice(3 * level, 3 * level + 3);
    const label = signed ? short(values[place]) : percent(values[place]);
    const token = make("span", { class: "tint", title: label, tabindex: 0, "aria-label": `${plain(name)}: ${label}` }, tokenElement(name));
    token.style.background = `rgb(${r} ${g} ${b})`;
    token.style.color = 0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2 > 0.18 ? "#000" : "#fff";
    line.append(token, " ");
  }
  const scale = { relative, change: (/** @type {boolean} */ chosen) => context.set({ relative: chosen }) };
  return make("div", {}, line, colourBar(context.root, signed ? { signed: most } : { most, scale }));
}

/**
 * The engine's answer, for any kind of head.
 * @param {Context} context
 * @param {any} answer
 * @returns {Node}
 */
export function answerOf(context, answer) {
  if (!answer) return note(context.look.head ? "This head makes no prediction for a single text." : "This model has no head: it returns hidden states and makes no prediction.");
  const element = make("div", {});
  if (answer.choices) {
    const rows = answer.choices.map((/** @type {string} */ text, /** @type {number} */ number) => ({
      text, value: answer.probabilities[number], marked: number === answer.index, long: true,
    }));
    element.append(bars(rows), note("Each candidate is read beside the prompt; choose one above to see what its score rests on."));
  } else if (answer.probabilities && !Array.isArray(answer.probabilities)) {
    const rows = Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]);
    element.append(bars(rows.map(([text, value]) => ({ text, value, marked: text === answer.label }))));
  } else if (answer.masks) {
    for (const mask of answer.masks) {
      element.append(bars(mask.candidates.map((/** @type {any} */ candidate) => ({ text: candidate.text || candidate.token, value: candidate.probability }))));
    }
    if (!answer.masks.length) element.append(note(sentence(answer.note ?? "there is no mask")));
  } else if (answer.entities) element.append(entities(context, answer));
  else if (answer.is_next_probability !== undefined) element.append(bars([{ text: "the second text follows", value: answer.is_next_probability }]));
  else if (answer.answer !== undefined) {
    const both = `The best span in the text scores ${short(answer.score ?? NaN)}, no answer ${short(answer.no_answer_score ?? NaN)}.`;
    element.append(make("p", { class: "answer" }, shownLong(answer.answer || "(no answer)")), note(both));
    if (!answer.answer) element.append(note("The model prefers no answer. Beside this stands what the best span rests on."));
  } else if (answer.values) {
    for (const [name, value] of Object.entries(answer.values)) element.append(note(`${plain(name)}: ${short(value)}`));
  } else if (answer.similarity !== undefined) element.append(make("p", { class: "answer" }, `similarity ${short(answer.similarity)}`), note("The cosine of the two texts' vectors; each is read by itself."));
  else if (answer.text !== undefined) element.append(make("p", { class: "answer" }, shownLong(answer.text || "(nothing)")));
  else element.append(note("A vector: give a second text, and see how alike both are."));
  return element;
}

/**
 * A text of up to 400 characters.
 * @param {string} text
 */
function shownLong(text) {
  return make("bdi", {}, plain(text, 400));
}

/**
 * The text with its entities marked.
 * @param {Context} context
 * @param {any} answer
 */
function entities(context, answer) {
  const line = make("p", { class: "entities" });
  for (const entity of answer.entities) {
    line.append(
      make("span", { class: "entity" }, make("bdi", {}, plain(entity.text ?? "", 80)), make("b", {}, plain(entity.label ?? ""))),
      " ", make("span", { class: "number" }, percent(entity.probability ?? 0)), " ",
    );
  }
  if (!answer.entities.length) line.append("no entity was found");
  return line;
}
