// @ts-check
// Heads that follow a pattern in one text, as telling_heads of head_patterns.py, computed in the page.

import { headWeights } from "./computed.js";

/** @typedef {import("./computed.js").Inspection} Inspection */
/** @typedef {import("./tokens.js").Token} Token */
/** @typedef {(row: number, key: number) => boolean} Target whether a pattern points at a key from a row */

const ENOUGH_ROWS = 4; // minimum words of the text for which the pattern points at a key
const MAX_COMPARED = 1024; // tokens of a text up to which its words are compared with each other
const MIN_LIFT = 0.3; // minimum lift of a head that follows a pattern
const ONLY_PUNCTUATION = /^[.,;:!?。、…]*$/u;

/**
 * A token without the marks of its vocabulary, in lower case.
 * @param {string} name
 */
function bareWord(name) {
  return name.replace(/^##/u, "").replace(/^[\u2581\u0120]+/u, "").toUpperCase().toLowerCase();
}

/**
 * Whether two words share a prefix of at least four letters and half of the longer word.
 * @param {string} a
 * @param {string} b
 */
function shareStem(a, b) {
  const [one, other] = [[...a], [...b]];
  let common = 0;
  while (common < Math.min(one.length, other.length) && one[common] === other[common]) common++;
  return common >= 4 && common >= 0.5 * Math.max(one.length, other.length) && /^\p{L}+$/u.test(one.slice(0, common).join(""));
}

/**
 * For each pattern, whether it points at a key from a row.
 * @param {Token[]} tokens
 * @returns {Record<string, Target>}
 */
function patternTargets(tokens) {
  /** @type {Record<string, Target>} */
  const neighbours = { previous: (i, j) => j === i - 1, next: (i, j) => j === i + 1 };
  if (tokens.length > MAX_COMPARED) return neighbours;
  const words = tokens.map(({ text }) => bareWord(text));
  const delimiters = tokens.map(({ special }, i) => special || ONLY_PUNCTUATION.test(words[i]));
  /** @type {Map<string, boolean>} */
  const known = new Map();
  const related = (/** @type {string} */ a, /** @type {string} */ b) => {
    const key = `${a}\n${b}`;
    if (!known.has(key)) known.set(key, a === b || shareStem(a, b));
    return known.get(key);
  };
  const sameWord = (/** @type {number} */ i, /** @type {number} */ j) => i !== j && !delimiters[i] && !delimiters[j] && related(words[i], words[j]);
  const sameText = (/** @type {number} */ i, /** @type {number} */ j) => tokens[i].segment === tokens[j].segment;
  return {
    ...neighbours,
    same: (i, j) => Boolean(sameWord(i, j)) && sameText(i, j),
    other: (i, j) => Boolean(sameWord(i, j)) && !sameText(i, j),
    delimiters: (i, j) => i !== j && delimiters[j],
  };
}

/**
 * The heads that follow a pattern, those with the largest lift first.
 * @param {Inspection} inspection
 * @param {{layers: number, heads: number}} shape
 * @returns {import("./tokens.js").Named[]}
 */
export function tellingHeads(inspection, { layers, heads }) {
  const { tokens } = inspection;
  const n = tokens.length;
  const targets = Object.entries(patternTargets(tokens)).map(([name, points]) => {
    /** @type {number[][]} */
    const keys = tokens.map((_, i) => tokens.flatMap((_, j) => (points(i, j) ? [j] : [])));
    return { name, keys };
  });
  /** @type {{order: number, named: import("./tokens.js").Named}[]} */
  const byLift = [];
  for (let layer = 0; layer < layers; layer++) {
    const scores = inspection.trace().scores(layer, 0); // all heads of a layer see the same keys
    const sees = (/** @type {number} */ i, /** @type {number} */ j) => scores[i * n + j] > -Infinity;
    const visible = tokens.map((_, i) => tokens.filter((_, j) => sees(i, j)).length);
    const weights = Array.from({ length: heads }, (_, head) => headWeights(inspection, layer, head).values);
    for (const { name, keys } of targets) {
      const seen = keys.map((own, i) => own.filter((j) => sees(i, j)));
      const rows = tokens.flatMap(({ special }, i) => (!special && seen[i].length && visible[i] > seen[i].length ? [i] : []));
      if (rows.length < ENOUGH_ROWS) continue;
      const mean = (/** @type {(row: number) => number} */ value) => rows.reduce((sum, row) => sum + value(row), 0) / rows.length;
      const chance = mean((row) => seen[row].length / visible[row]);
      for (let head = 0; head < heads; head++) {
        const share = mean((row) => seen[row].reduce((sum, key) => sum + weights[head][row * n + key], 0));
        const lift = (share - chance) / (1 - chance);
        if (lift >= MIN_LIFT) byLift.push({ order: lift - Number(name === "delimiters"), named: { part: "encoder", layer, head, name, share, chance } });
      }
    }
  }
  return byLift.sort((a, b) => b.order - a.order).map(({ named }) => named);
}
