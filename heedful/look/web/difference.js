// @ts-check
// The difference of two texts in one model, as compare.py, computed in the page.

import { headWeights, meanWeights, encodeTensor } from "./computed.js";
import { rowOf } from "./numbers.js";

/** @typedef {import("./computed.js").Inspection} Inspection */
/** @typedef {import("./computed.js").Shape} Shape */
/** @typedef {[number, number][]} Pairs positions in the first and in the second text */

/**
 * The longest run of equal tokens within two ranges, the first one of equally long ones: [start, start, length].
 * @param {string[]} a
 * @param {string[]} b
 * @param {[number, number, number, number]} ranges from and to in a, from and to in b
 * @returns {[number, number, number]}
 */
function longestMatch(a, b, [low, high, from, to]) {
  /** @type {[number, number, number]} */
  let best = [low, from, 0];
  /** @type {Map<number, number>} */
  let lengths = new Map(); // of the runs that end at the token of a before, by their end in b
  for (let i = low; i < high; i++) {
    const next = new Map();
    for (let j = from; j < to; j++) {
      if (a[i] !== b[j]) continue;
      const length = (lengths.get(j - 1) ?? 0) + 1;
      next.set(j, length);
      if (length > best[2]) best = [i - length + 1, j - length + 1, length];
    }
    lengths = next;
  }
  return best;
}

/**
 * Align equal tokens in order, and runs of different tokens of the same length, as Python's difflib.
 * @param {string[]} a
 * @param {string[]} b
 * @returns {Pairs}
 */
export function alignTokens(a, b) {
  /** @param {[number, number, number, number]} ranges @returns {[number, number, number][]} */
  const matches = ([low, high, from, to]) => {
    const [i, j, length] = longestMatch(a, b, [low, high, from, to]);
    if (!length) return [];
    return [...matches([low, i, from, j]), [i, j, length], ...matches([i + length, high, j + length, to])];
  };
  /** @type {Pairs} */
  const pairs = [];
  let [i, j] = [0, 0];
  for (const [start, other, length] of [...matches([0, a.length, 0, b.length]), /** @type {[number, number, number]} */ ([a.length, b.length, 0])]) {
    if (start - i === other - j) for (let k = 0; k < start - i; k++) pairs.push([i + k, j + k]);
    for (let k = 0; k < length; k++) pairs.push([start + k, other + k]);
    [i, j] = [start + length, other + length];
  }
  return pairs;
}

/**
 * Attention of both texts on aligned tokens, its difference, and the similarity of hidden states.
 * @param {[Inspection, Inspection]} texts
 * @param {Shape} shape
 * @param {Record<string, string | number>} params
 */
export function compareTexts(texts, shape, { layer, other_layer, head, other_head }) {
  const names = texts.map(({ tokens }) => tokens.map(({ text }) => text));
  const pairs = alignTokens(names[0], names[1]);
  const [a, b] = texts.map((text, side) => {
    const [where, which] = side ? [Number(other_layer), other_head] : [Number(layer), head];
    const weights = which === "mean" ? meanWeights(text, shape, where) : headWeights(text, where, Number(which));
    return Float32Array.from(pairs.flatMap((row) => pairs.map((key) => rowOf(weights, row[side])[key[side]])));
  });
  const states = texts.map((text) => {
    const trace = text.trace();
    return [...Array(shape.layers).keys()].map((number) => trace.block(number, "input")).concat(trace.last);
  });
  const vector = (/** @type {number} */ side, /** @type {number} */ state, /** @type {number} */ row) => states[side][state].subarray(row * shape.width, (row + 1) * shape.width);
  const cosines = states[0].flatMap((_, state) => pairs.map(([row, other]) => cosineOf(vector(0, state, row), vector(1, state, other))));
  const square = [pairs.length, pairs.length];
  return {
    a: encodeTensor(a, square), b: encodeTensor(b, square), difference: encodeTensor(b.map((value, i) => value - a[i]), square), rows: pairs, keys: pairs,
    tokens: pairs, cosines: encodeTensor(cosines, [shape.layers + 1, pairs.length]),
  };
}

/**
 * The cosine of two vectors.
 * @param {Float32Array} x
 * @param {Float32Array} y
 */
function cosineOf(x, y) {
  const dot = (/** @type {Float32Array} */ a, /** @type {Float32Array} */ b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  return dot(x, y) / Math.max(1e-8, Math.sqrt(dot(x, x) * dot(y, y)));
}
