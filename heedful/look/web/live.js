// @ts-check
// The page of a file with the model in it: answers that only Python computes were saved for the first texts, all others are
// computed.

import { headWeights, meanWeights, neuron, encodeTensor, rolloutFrom, steps, thumbnails } from "./computed.js";
import { compareTexts } from "./difference.js";
import { tellingHeads } from "./telling.js";
import { keptSource, remembering } from "./source.js";
import { open } from "./main.js";

/** @typedef {import("./source.js").Params} Params */
/** @typedef {import("./source.js").Source} Source */
/** @typedef {import("./computed.js").Inspection} Inspection */
/** @typedef {string | [string, string]} Item */
/** @typedef {{answers: Record<string, any>, left_out: Record<string, number>, bytes: number}} Kept */
/** @typedef {{facts: any, tokenizer: any, score: any, trace: any}} Model */
/** @typedef {{ANSWERS: any, vectorOf: any, cosine: any, makeTokenizer: any, openModel: any, unpackElement: any}} Engine what heedful/page/web exports */

const MAX_NAME = 200; // characters after which the name of a token is cut
const MAX_WORD = 200; // maximum characters of a word that replaces a token
const OF_MODEL = ["heads", "positions", "similarity"]; // questions about the model, whose answers do not depend on the text
const NOT_COMPUTED = /** @type {Record<string, string>} */ ({
  words: "Words as vectors are not computed in this page: it shows those of the text that the file was written with. Start heedful look with this text to see its words.",
  gradients: "Integrated gradients are not computed in this page, which has no gradients: it shows those of the text that the file was written with. Start heedful look with this text to see them.",
  other: "This is not computed in the page: start heedful look to see it.",
});
const OF_WORDS = ["words", "suggested", "scatter", "analogy"]; // questions about words

/**
 * A source that answers from the file if it can, and computes other answers with the model.
 * @param {Kept} saved answers of the file
 * @param {Promise<Model>} opening
 * @param {Engine} engine
 * @returns {Source}
 */
export function modelSource(saved, opening, engine) {
  const file = keptSource(saved);
  const about = saved.answers["about?"];
  /** @type {Item[]} */
  const first = about.looks.map((/** @type {any} */ look) => look.item);
  let items = first;
  /** @type {string[]} */
  let choices = about.looks[0].choices;
  /** @type {Map<Item, Inspection>} */
  let inspections = new Map();
  const isFirst = () => JSON.stringify(items) === JSON.stringify(first);

  const inspect = (/** @type {Model} */ model, /** @type {Item} */ item) => {
    const inspection = inspections.get(item) ?? inspectText(model, item);
    inspections.set(item, inspection);
    return inspection;
  };

  // Replaces a text, or adds one beside it.
  const look = async (/** @type {Params} */ { side = 0, text, pair = "" }) => {
    const model = await opening;
    const item = /** @type {Item} */ (pair ? [String(text), String(pair)] : String(text));
    const place = Math.min(Number(side), items.length);
    const options = choices.length && pair ? choices.map((choice, i) => (i === place ? String(pair) : choice)) : choices;
    const next = choices.length && pair ? options.map((choice) => /** @type {Item} */ ([String(text), choice])) : withItem(items, place, item);
    const inspected = new Map(next.map((one) => [one, inspectText(model, one)]));
    [items, choices, inspections] = [next, options, inspected];
    return describe(model);
  };

  const describe = (/** @type {Model} */ model) => {
    if (isFirst()) return about;
    const looks = items.map((item) => {
      const text = inspect(model, item);
      return { ...about.looks[0], item, choices, sides: { source: text.tokens }, telling: tellingHeads(text, model.facts.encoder) };
    });
    return { ...about, looks };
  };

  const prediction = (/** @type {Model} */ model, /** @type {number} */ side) => {
    const [{ facts }, text] = [model, inspect(model, items[side])];
    const explanation = { answer: null, told: "", attribution: null, why: whyNotExplained(facts, text, comparedTexts(items, side)), choices: null, texts: null, attention: null, from: "" };
    try {
      explanation.answer = answerTo(engine, model, items, side, choices, null);
    } catch (error) {
      explanation.told = /** @type {Error} */ (error).message;
    }
    if (facts.head === "embedding" && Array.isArray(items[side])) return explanation; // each of both texts is read by itself
    const mask = text.encoding.ids.indexOf(facts.mask);
    const row = facts.head === "masked_lm" && mask >= 0 ? mask : facts.pooled_row === -1 ? text.tokens.length - 1 : facts.pooled_row;
    const shares = rolloutFrom(text, facts.encoder, row);
    const from = `Attention through all layers (rollout), from ${row === null ? "all rows" : `the row of ${text.tokens[row].text}`}.`;
    return { ...explanation, attention: encodeTensor(shares, [shares.length]), from };
  };

  const changed = (/** @type {Model} */ model, /** @type {Params} */ params) => {
    const side = Number(params.side ?? 0);
    const item = replaceTokens(inspect(model, items[side]), JSON.parse(String(params.tokens || "{}")));
    const isNew = JSON.stringify(item) !== JSON.stringify(items[side]);
    if (isNew && choices.length) throw new Error("tokens of one candidate cannot be replaced here: change the text in the field above");
    const others = withItem(items, side, item);
    if (isNew) inspectText(model, item); // raises if it is too long
    const gates = gatesOf(model.facts.encoder, String(params.off ?? ""));
    if (model.facts.head === "embedding" && !comparedTexts(items, side)) {
      const [before, after] = [pageOf(model, null), pageOf(model, gates)].map((page, i) => engine.vectorOf(page, i ? item : items[side]));
      return { before: null, after: null, item, cosine: engine.cosine(before, after) };
    }
    return {
      before: answerTo(engine, model, items, side, choices, null), after: answerTo(engine, model, others, side, choices, gates), item,
      cosine: null,
    };
  };

  /** @type {Record<string, (model: Model, params: Params, text: Inspection) => any>} */
  const computed = {
    about: describe,
    weights: (_, { layer, head }, text) => {
      const { values, shape } = headWeights(text, Number(layer), Number(head));
      return { weights: encodeTensor(values, shape) };
    },
    thumbnails: ({ facts }, { layer }, text) => thumbnails(text, facts.encoder, Number(layer)),
    neuron: ({ facts }, { layer, head }, text) => neuron(text, facts.encoder, Number(layer), Number(head)),
    steps: ({ facts }, { layer, row }, text) => steps(text, facts.steps[Number(layer)], Number(layer), Number(row)),
    prediction: (model, { side }) => prediction(model, Number(side ?? 0)),
    changed,
    compare: (model, params) => {
      if (items.length < 2) throw new Error("there is one text: give another one to compare it with");
      return compareTexts([inspect(model, items[0]), inspect(model, items[1])], model.facts.encoder, params);
    },
  };

  const ofFirstSide = (/** @type {string} */ name, /** @type {Params} */ params) => (OF_MODEL.includes(name) && "side" in params ? { ...params, side: 0 } : params);
  const isInFile = (/** @type {string} */ name, /** @type {Params} */ params) => (OF_MODEL.includes(name) || isFirst()) && file.keeps(name, ofFirstSide(name, params));
  const answer = async (/** @type {string} */ name, /** @type {Params} */ params) => {
    if (name === "look") return look(params);
    if (isInFile(name, params)) return file.ask(name, ofFirstSide(name, params));
    if (OF_WORDS.includes(name)) throw new Error(NOT_COMPUTED.words);
    if (!(name in computed)) throw new Error(NOT_COMPUTED.other);
    const model = await opening;
    return computed[name](model, params, inspect(model, items[Number(params.side ?? 0)]));
  };
  return {
    ...remembering(answer),
    leftOut: saved.left_out,
    bytes: saved.bytes,
    keeps: (name, params = {}) => isInFile(name, params) || (name in computed && !("label" in params || "place" in params)),
  };
}

/**
 * The texts with one replaced or appended.
 * @param {Item[]} items
 * @param {number} place
 * @param {Item} item
 */
function withItem(items, place, item) {
  return [...items.slice(0, place), item, ...items.slice(place + 1)];
}

/**
 * Tokenize a text. Its trace is computed when it is needed.
 * @param {Model} model
 * @param {Item} item
 * @returns {Inspection}
 */
function inspectText({ facts, tokenizer, trace }, item) {
  const encoding = Array.isArray(item) ? tokenizer.encode(...item) : tokenizer.encode(facts.prompt + item);
  const count = encoding.ids.length;
  if (count < 1 || count > facts.max_length) {
    throw new Error(`the text has ${count} tokens, and this model reads 1 to ${facts.max_length} at once: give ${count ? "a shorter one" : "one with words"}`);
  }
  return { item, encoding, tokens: tokensIn(facts, tokenizer, encoding, Array.isArray(item) ? item : [item]), trace: () => trace(encoding) };
}

/**
 * The tokens of a text, as text_token_records of inspection.py.
 * @param {any} facts
 * @param {any} tokenizer
 * @param {import("./computed.js").Encoding} encoding
 * @param {string[]} texts
 */
function tokensIn(facts, tokenizer, { ids, segments, words, offsets }, texts) {
  const chars = texts.map((text) => [...text]);
  return ids.map((id, i) => {
    const [segment, [start, stop]] = [segments[i], offsets[i]];
    const written = id === facts.unknown && segment !== null && stop > start ? ` ${chars[segment].slice(start, stop).join("")}` : "";
    const name = [...`${tokenizer.readable(id)}${written}`];
    const text = name.length > MAX_NAME ? `${name.slice(0, MAX_NAME).join("")}… (${name.length.toLocaleString("en")} characters)` : name.join("");
    const continues = i > 0 && words[i] !== null && segment === segments[i - 1] && words[i] === words[i - 1];
    return { text, id, segment, special: segment === null, continues, start, stop };
  });
}

/**
 * The text with words in place of tokens.
 * @param {Inspection} text
 * @param {Record<string, string>} words by the position of the token that they replace
 * @returns {Item}
 */
function replaceTokens({ item, tokens }, words) {
  const texts = (Array.isArray(item) ? item : [item]).map((text) => [...text]);
  const unchangedStops = texts.map((chars) => chars.length); // for each text, the end of its part without replacements
  for (const [place, word] of Object.entries(words).sort(([a], [b]) => Number(b) - Number(a))) {
    const { text, segment, start, stop } = /** @type {any} */ (tokens[Number(place)]);
    if (segment === null) throw new Error(`${text} is in no text: replace another token`);
    if (stop > unchangedStops[segment]) throw new Error(`${text} shares characters with another replaced token: replace one of them`);
    unchangedStops[segment] = start;
    if (word.length > MAX_WORD) throw new Error(`a word of ${word.length} characters was given: give one of up to ${MAX_WORD}`);
    texts[segment].splice(start, stop - start, ...word);
  }
  const joined = texts.map((chars) => chars.join(""));
  return Array.isArray(item) ? [joined[0], joined[1]] : joined[0];
}

/**
 * Gates of all heads, [layers, heads]: 0 for those that are switched off; null: all are open.
 * @param {{layers: number, heads: number}} shape
 * @param {string} off PART.LAYER.HEAD, with commas between
 */
function gatesOf({ layers, heads }, off) {
  if (!off) return null;
  const gates = new Float32Array(layers * heads).fill(1);
  for (const place of off.split(",")) {
    const [, layer, head] = place.split(".").map(Number);
    gates[layer * heads + head] = 0;
  }
  return gates;
}

/**
 * The page as heedful/page/web/answers.js needs it, with gates of the heads.
 * @param {Model} model
 * @param {Float32Array | null} gates
 */
function pageOf({ facts, tokenizer, score }, gates) {
  return { about: facts, tokenizer, score: (/** @type {any} */ encoding, /** @type {number[]} */ wanted) => score(encoding, wanted, undefined, gates) };
}

/**
 * The two texts whose embeddings are compared, if there are two.
 * @param {Item[]} items
 * @param {number} side
 * @returns {[string, string] | null}
 */
function comparedTexts(items, side) {
  const [item, other] = [items[side], items.find((_, i) => i !== side)];
  if (Array.isArray(item)) return item;
  return typeof other === "string" ? [item, other] : null;
}

/**
 * Why the page does not explain the prediction for a text.
 * @param {any} facts
 * @param {Inspection} text
 * @param {[string, string] | null} pair whose embeddings are compared
 */
function whyNotExplained(facts, text, pair) {
  if (facts.head === "masked_lm" && !text.encoding.ids.includes(facts.mask)) return "the text has no mask token: write one where a token is to be predicted";
  return (!pair && facts.unexplained) || NOT_COMPUTED.gradients;
}

/**
 * The prediction for a text, as the engine's answer; null: the head predicts nothing for it.
 * @param {Engine} engine
 * @param {Model} model
 * @param {Item[]} items
 * @param {number} side
 * @param {string[]} choices
 * @param {Float32Array | null} gates
 */
function answerTo({ ANSWERS }, model, items, side, choices, gates) {
  const { facts } = model;
  if (facts.unanswered) throw new Error(facts.unanswered);
  const item = items[side];
  const [text, second] = Array.isArray(item) ? item : [item, undefined];
  const answer = (/** @type {any} */ input) => ANSWERS[facts.head](pageOf(model, gates), input);
  switch (facts.head) {
    case "sequence_classification": return answer({ text, second });
    case "question_answering": return second === undefined ? null : answer({ question: text, context: second });
    case "multiple_choice":
      if (!choices.length) throw new Error("one candidate has no probability: give all candidates, each with --choice");
      return { ...answer({ prompt: text, choices }), choices };
    case "embedding": {
      const pair = comparedTexts(items, side);
      return pair ? { similarity: answer({ text: pair[0], lines: [pair[1]] }).similarities[0] } : {};
    }
    case "token_classification":
    case "masked_lm":
      if (second !== undefined) throw new Error("this page predicts for a single text: leave out the second one");
      return answer({ text });
    default: return null;
  }
}

/**
 * Start the page of a file with the model in it.
 * @param {Engine} engine
 */
export async function startFileWithModel(engine) {
  const [root, answers] = ["look", "kept"].map((id) => document.getElementById(id));
  if (!root || !answers) return;
  const opening = openModelOfFile(engine);
  opening.then(() => (root.dataset.model = "ready"), () => (root.dataset.model = "broken"));
  await open(root, modelSource(JSON.parse(answers.textContent ?? ""), opening, engine), { remember: true });
  const footer = root.querySelector(".footer");
  try {
    const { facts } = await opening;
    footer?.append(` The model is in this file too (${facts.precision}): other texts are computed here, without a network.`);
  } catch (error) {
    footer?.append(` This browser cannot run the model in this file: ${/** @type {Error} */ (error).message}.`);
  }
}

/**
 * Open the model, its tokenizer and the code that are in the file.
 * @param {Engine} engine
 * @returns {Promise<Model>}
 */
async function openModelOfFile({ makeTokenizer, openModel, unpackElement }) {
  const [about, code, weights] = await Promise.all(["about", "code", "weights"].map(unpackElement));
  const facts = JSON.parse(new TextDecoder().decode(about));
  return { facts, tokenizer: makeTokenizer(facts.tokenizer), ...(await openModel(code, weights, facts)) };
}
