// @ts-check
// Numbers as they come, and the little arithmetic that is done here.

/** @typedef {{kind: "f4" | "f2" | "u2" | "u1", shape: number[], data: string}} Sent */
/** @typedef {{shape: number[], values: Float32Array}} Numbers */

/**
 * Numbers out of their bytes; whole ones become shares from 0 to 1.
 * @param {Sent} sent
 * @returns {Numbers}
 */
export function unpack(sent) {
  const raw = atob(sent.data);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  if (sent.kind === "f4") return { shape: sent.shape, values: new Float32Array(bytes.buffer) };
  if (sent.kind === "f2") return { shape: sent.shape, values: Float32Array.from(new Uint16Array(bytes.buffer), fromHalf) };
  const whole = sent.kind === "u2" ? new Uint16Array(bytes.buffer) : bytes;
  const most = sent.kind === "u2" ? 65535 : 255;
  const values = new Float32Array(whole.length);
  for (let i = 0; i < whole.length; i++) values[i] = whole[i] / most;
  return { shape: sent.shape, values };
}

/**
 * The number that 16 bits stand for: a sign, five bits of the exponent and ten of the fraction (IEEE 754).
 * @param {number} bits
 */
function fromHalf(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/**
 * Row number i of a matrix, without a copy.
 * @param {Numbers} matrix
 * @param {number} i
 */
export function rowOf(matrix, i) {
  const width = matrix.shape[matrix.shape.length - 1];
  return matrix.values.subarray(i * width, (i + 1) * width);
}

/**
 * Which places belong to one word: a token that goes on with the word before it is part of it.
 * @param {{continues: boolean}[]} side
 * @returns {number[][]}
 */
export function wordsOf(side) {
  /** @type {number[][]} */
  const groups = [];
  for (const [place, token] of side.entries()) {
    if (token.continues && groups.length) groups[groups.length - 1].push(place);
    else groups.push([place]);
  }
  return groups;
}

/**
 * Weights between words: summed over the tokens that are attended to, the mean over those that attend (Clark et al. 2019).
 * @param {Numbers} weights [rows, keys]
 * @param {number[][]} rows
 * @param {number[][]} keys
 * @returns {Numbers}
 */
export function merged(weights, rows, keys) {
  const found = new Float32Array(rows.length * keys.length);
  for (const [i, group] of rows.entries()) {
    for (const row of group) {
      const line = rowOf(weights, row);
      for (const [j, places] of keys.entries()) {
        for (const place of places) found[i * keys.length + j] += line[place] / group.length;
      }
    }
  }
  return { shape: [rows.length, keys.length], values: found };
}

/**
 * Which text of a pair a token stands in; those around the texts belong to the one before them.
 * @param {{segment: number | null}[]} side
 */
export function segmentsOf(side) {
  let last = 0;
  return side.map((token) => (last = token.segment ?? last));
}

/**
 * softmax of scores, of which some are -infinity.
 * @param {ArrayLike<number>} scores
 */
export function softmax(scores) {
  let most = -Infinity;
  for (let i = 0; i < scores.length; i++) most = Math.max(most, scores[i]);
  const found = new Float64Array(scores.length);
  if (most === -Infinity) return found;
  let sum = 0;
  for (let i = 0; i < scores.length; i++) sum += found[i] = Math.exp(scores[i] - most);
  return found.map((each) => each / sum);
}

/**
 * The largest distance from 0 among numbers that are finite.
 * @param {ArrayLike<number>} values
 */
export function reach(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) if (Number.isFinite(values[i])) most = Math.max(most, Math.abs(values[i]));
  return most;
}
