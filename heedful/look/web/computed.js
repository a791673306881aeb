// @ts-check
// Answers about attention and blocks, as those of page_api.py, computed in the page from the trace of a text.

import { rowOf, softmax } from "./numbers.js";

/** @typedef {import("./tokens.js").Token} Token */
/** @typedef {import("./numbers.js").Numbers} Numbers */
/** @typedef {{ids: number[], types: number[], segments: (number | null)[], offsets: [number, number][], words: (number | null)[]}} Encoding */
/**
 * The record of a forward pass, from heedful/page/web/model.js: matrices as flat arrays, row by row.
 * @typedef {{
 *   last: Float32Array, block: (layer: number, name: string) => Float32Array, scores: (layer: number, head: number) => Float32Array,
 *   embedded: (part: string) => Float32Array | null,
 * }} Trace
 */
/** @typedef {{layers: number, width: number, heads: number, kv_heads: number, head_width: number, embedding_width: number, scale: number}} Shape */
/** @typedef {{item: string | [string, string], encoding: Encoding, tokens: Token[], trace: () => Trace}} Inspection a text in the model */

const THUMB = 48; // maximum rows and columns of a thumbnail
const BIASED = 1e-4; // minimum difference of a score from scale q k that shows that there is a bias

/**
 * Encode a tensor in float32, as encode_tensor of page_api.py.
 * @param {ArrayLike<number>} values
 * @param {number[]} shape
 * @returns {import("./numbers.js").Sent}
 */
export function encodeTensor(values, shape) {
  const bytes = new Uint8Array(Float32Array.from(values).buffer);
  let text = "";
  for (let i = 0; i < bytes.length; i += 4096) text += String.fromCharCode(...bytes.subarray(i, i + 4096));
  return { kind: "f4", shape, data: btoa(text) };
}

/**
 * The attention weights of one head.
 * @param {Inspection} inspection
 * @param {number} layer
 * @param {number} head
 * @returns {Numbers}
 */
export function headWeights(inspection, layer, head) {
  const n = inspection.tokens.length;
  const scores = { shape: [n, n], values: inspection.trace().scores(layer, head) };
  const values = new Float32Array(n * n);
  for (let row = 0; row < n; row++) values.set(softmax(rowOf(scores, row)), row * n);
  return { shape: [n, n], values };
}

/**
 * The mean of the weights of all heads of a layer.
 * @param {Inspection} inspection
 * @param {Shape} shape
 * @param {number} layer
 * @returns {Numbers}
 */
export function meanWeights(inspection, { heads }, layer) {
  const n = inspection.tokens.length;
  const values = new Float32Array(n * n);
  for (let head = 0; head < heads; head++) headWeights(inspection, layer, head).values.forEach((weight, i) => (values[i] += weight / heads));
  return { shape: [n, n], values };
}

/**
 * The weights of all heads of a layer, each in at most 48 rows and columns: the largest weight of each tile.
 * @param {Inspection} inspection
 * @param {Shape} shape
 * @param {number} layer
 */
export function thumbnails(inspection, { heads }, layer) {
  const n = inspection.tokens.length;
  const size = Math.min(THUMB, n);
  const edge = (/** @type {number} */ i) => [Math.floor((i * n) / size), Math.ceil(((i + 1) * n) / size)];
  const values = new Float32Array(heads * size * size);
  for (let head = 0; head < heads; head++) {
    const weights = headWeights(inspection, layer, head).values;
    for (let i = 0; i < size; i++) {
      for (let j = 0; j < size; j++) {
        const [[top, bottom], [left, right]] = [edge(i), edge(j)];
        let most = 0;
        for (let row = top; row < bottom; row++) for (let key = left; key < right; key++) most = Math.max(most, weights[row * n + key]);
        values[(head * size + i) * size + j] = most;
      }
    }
  }
  return { heads: encodeTensor(values, [heads, size, size]) };
}

/**
 * Queries, keys, values and scores of one head.
 * @param {Inspection} inspection
 * @param {Shape} shape
 * @param {number} layer
 * @param {number} head
 */
export function neuron(inspection, { heads, kv_heads, head_width: width, scale }, layer, head) {
  const n = inspection.tokens.length;
  const trace = inspection.trace();
  const qkv = { shape: [n, (heads + 2 * kv_heads) * width], values: trace.block(layer, "qkv") };
  const scores = trace.scores(layer, head);
  const shared = Math.floor(head / (heads / kv_heads)); // number of the key and value head
  const columns = (/** @type {number} */ number) => {
    const values = new Float32Array(n * width);
    for (let row = 0; row < n; row++) values.set(rowOf(qkv, row).subarray(number * width, (number + 1) * width), row * width);
    return values;
  };
  const [q, k, v] = [head, heads + shared, heads + kv_heads + shared].map(columns);
  let bias = 0;
  for (let row = 0; row < n; row++) {
    for (let key = 0; key < n; key++) {
      let dot = 0;
      for (let i = 0; i < width; i++) dot += q[row * width + i] * k[key * width + i];
      const score = scores[row * n + key];
      if (Number.isFinite(score)) bias = Math.max(bias, Math.abs(scale * dot - score));
    }
  }
  const rows = (/** @type {Float32Array} */ values) => encodeTensor(values, [n, width]);
  return { q: rows(q), k: rows(k), v: rows(v), scale, biased: bias > BIASED, scores: encodeTensor(scores, [n, n]) };
}

/**
 * The steps of a block for one token, from templates without values.
 * @param {Inspection} inspection
 * @param {any[]} templates of the layer, from page_with_model.py
 * @param {number} layer
 * @param {number} row
 */
export function steps(inspection, templates, layer, row) {
  const n = inspection.tokens.length;
  const trace = inspection.trace();
  const states = ["input", "middle", "output"]; // names of x in the trace, in the order of the steps
  const block = /** @type {Record<string, string>} */ ({ "[z]": "joined", a: "attended", inner: "inner", m: "mlp" });
  const embedded = /** @type {Record<string, string>} */ ({ e: "tokens", p: "positions", s: "types" });
  const numbers = (/** @type {string} */ name) => {
    const rows = name in embedded ? trace.embedded(embedded[name]) : trace.block(layer, name === "x" ? states.shift() ?? "" : block[name]);
    return rows ? { name, values: encodeTensor(rows.subarray((row * rows.length) / n, ((row + 1) * rows.length) / n), [rows.length / n]) } : { name };
  };
  return {
    steps: templates.map(({ of_head, vectors, ...step }) => ({
      ...step, vectors: vectors.map((/** @type {string} */ name) => (of_head ? { name } : numbers(name))),
    })),
  };
}

/**
 * Attention through all layers (rollout, Abnar and Zuidema 2020) from one row, or the mean of all rows.
 * @param {Inspection} inspection
 * @param {Shape} shape
 * @param {number | null} row
 */
export function rolloutFrom(inspection, shape, row) {
  const n = inspection.tokens.length;
  let shares = new Float64Array(n).map((_, i) => (row === null ? 1 / n : Number(i === row)));
  for (let layer = shape.layers - 1; layer >= 0; layer--) {
    const { values } = meanWeights(inspection, shape, layer);
    const mixed = shares.map((share) => 0.5 * share);
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) mixed[j] += 0.5 * shares[i] * values[i * n + j];
    shares = mixed;
  }
  return shares;
}
