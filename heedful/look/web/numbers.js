// @ts-check
// Tensors of an answer, and arithmetic on them.

/** @typedef {{kind: "f4" | "f2" | "u2" | "u1", shape: number[], data: string}} Sent EncodedTensor of page_api.py */
/** @typedef {{shape: number[], values: Float32Array}} Numbers */

/**
 * Decode a tensor; integers become numbers from 0 to 1.
 * @param {Sent} sent
 * @returns {Numbers}
 */
export function unpack(sent) {
  const raw = atob(sent.data);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  if (sent.kind === "f4") return { shape: sent.shape, values: new Float32Array(bytes.buffer) };
  if (sent.kind === "f2") return { shape: sent.shape, values: Float32Array.from(new Uint16Array(bytes.buffer), fromHalf) };
  const integers = sent.kind === "u2" ? new Uint16Array(bytes.buffer) : bytes;
  const one = sent.kind === "u2" ? 65535 : 255; // the integer that encodes 1
  const values = new Float32Array(integers.length);
  for (let i = 0; i < integers.length; i++) values[i] = integers[i] / one;
  return { shape: sent.shape, values };
}

/**
 * The number of a float16: a sign, five bits of exponent and ten of fraction (IEEE 754).
 * @param {number} bits
 */
function fromHalf(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/**
 * Row i of a matrix, as a view.
 * @param {Numbers} matrix
 * @param {number} i
 */
export function rowOf(matrix, i) {
  const width = matrix.shape[matrix.shape.length - 1];
  return matrix.values.subarray(i * width, (i + 1) * width);
}

/**
 * The positions of the tokens of each word.
 * @param {{continues: boolean}[]} side
 * @returns {number[][]}
 */
export function wordsOf(side) {
  /** @type {number[][]} */
  const groups = [];
  for (const [position, token] of side.entries()) {
    if (token.continues && groups.length) groups[groups.length - 1].push(position);
    else groups.push([position]);
  }
  return groups;
}

/**
 * Attention weights between words: summed over the tokens that are attended to, averaged over those that attend (Clark et al. 2019).
 * @param {Numbers} weights [rows, keys]
 * @param {number[][]} rows positions of the tokens of each word
 * @param {number[][]} keys positions of the tokens of each word
 * @returns {Numbers}
 */
export function merged(weights, rows, keys) {
  const values = new Float32Array(rows.length * keys.length);
  for (const [i, group] of rows.entries()) {
    for (const row of group) {
      const line = rowOf(weights, row);
      for (const [j, positions] of keys.entries()) {
        for (const position of positions) values[i * keys.length + j] += line[position] / group.length;
      }
    }
  }
  return { shape: [rows.length, keys.length], values };
}

/**
 * The number of the text of a pair that each token belongs to; special tokens belong to the text before them.
 * @param {{segment: number | null}[]} side
 */
export function segmentsOf(side) {
  let last = 0;
  return side.map((token) => (last = token.segment ?? last));
}

/**
 * Softmax of scores. A score of -Infinity gets the weight 0; if all scores are -Infinity, all weights are 0.
 * @param {ArrayLike<number>} scores
 */
export function softmax(scores) {
  let most = -Infinity;
  for (let i = 0; i < scores.length; i++) most = Math.max(most, scores[i]);
  const exponentials = new Float64Array(scores.length);
  if (most === -Infinity) return exponentials;
  let sum = 0;
  for (let i = 0; i < scores.length; i++) sum += exponentials[i] = Math.exp(scores[i] - most);
  return exponentials.map((value) => value / sum);
}

/**
 * The largest absolute value among the finite numbers.
 * @param {ArrayLike<number>} values
 */
export function reach(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) if (Number.isFinite(values[i])) most = Math.max(most, Math.abs(values[i]));
  return most;
}
