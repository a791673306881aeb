// @ts-check
// Where answers come from: a server, the file itself, or a notebook's kernel. All are asked in the same way.

/** @typedef {Record<string, string | number>} Params */
/**
 * `keeps` tells whether a question has an answer here: a server and a kernel answer all, a file what it holds.
 * @typedef {{
 *   ask: (name: string, params?: Params) => Promise<any>, keeps: (name: string, params?: Params) => boolean,
 *   live: boolean, leftOut: Record<string, number>, bytes: number,
 * }} Source
 */

const KEPT_BYTES = 64_000_000; // of answers that are remembered
const LINE = 65_000; // characters of a question; the server reads lines of 65,536

/**
 * @param {string} name
 * @param {Params} params
 */
function question(name, params) {
  const told = Object.keys(params).sort().map((key) => `${key}=${encodeURIComponent(params[key])}`);
  return `${name}?${told.join("&")}`;
}

/**
 * One that can be asked anything, with the newest answers remembered.
 * @param {(name: string, params: Params) => Promise<any>} ask
 * @returns {Source}
 */
export function remembering(ask) {
  /** @type {Map<string, {answer: Promise<any>, bytes: number}>} */
  const known = new Map();
  let bytes = 0;
  return {
    live: true,
    leftOut: {},
    bytes: 0,
    keeps: () => true,
    async ask(name, params = {}) {
      const key = question(name, params);
      const held = known.get(key);
      if (held) {
        known.delete(key);
        known.set(key, held);
        return held.answer;
      }
      if (name === "look") {
        known.clear();
        bytes = 0;
      }
      const made = { answer: ask(name, params), bytes: 0 };
      if (name !== "look") known.set(key, made);
      try {
        const answer = await made.answer;
        made.bytes = sizeOf(answer);
        bytes += made.bytes;
        for (const [oldest, each] of known) {
          if (bytes <= KEPT_BYTES || oldest === key) break;
          bytes -= each.bytes;
          known.delete(oldest);
        }
        return answer;
      } catch (error) {
        known.delete(key);
        throw error;
      }
    },
  };
}

/**
 * @param {any} answer
 * @returns {number}
 */
function sizeOf(answer) {
  if (typeof answer === "string") return answer.length;
  if (answer === null || typeof answer !== "object") return 8;
  return Object.values(answer).reduce((sum, each) => sum + sizeOf(each), 0);
}

/** @returns {Source} */
export function serverSource() {
  return remembering(async (name, params) => {
    const asked = question(name, params);
    if (asked.length > LINE) throw new Error("The text is too long to be sent from the page: start heedful look with it.");
    const answer = await fetch(`ask/${asked}`).catch(() => {
      throw new Error("There is no answer: heedful look has ended.");
    });
    const found = await answer.json();
    if (found.error) throw new Error(found.error);
    return found;
  });
}

/**
 * What a file holds.
 * @param {{answers: Record<string, any>, left_out: Record<string, number>, bytes: number}} kept
 * @returns {Source}
 */
export function keptSource(kept) {
  return {
    live: false,
    leftOut: kept.left_out,
    bytes: kept.bytes,
    keeps: (name, params = {}) => question(name, params) in kept.answers,
    async ask(name, params = {}) {
      const found = kept.answers[question(name, params)];
      if (found === undefined) {
        throw new Error("This was not kept in the file: open the page with heedful look, or write the file with this layer and head.");
      }
      if (found.error) throw new Error(found.error);
      return found;
    },
  };
}

/**
 * A notebook's kernel, by messages with numbers.
 * @param {any} model
 * @returns {Source}
 */
export function kernelSource(model) {
  /** @type {Map<number, {done: (found: any) => void, failed: (error: Error) => void}>} */
  const waiting = new Map();
  let last = 0;
  model.on("msg:custom", (/** @type {any} */ told) => {
    const one = waiting.get(told.number);
    waiting.delete(told.number);
    if (told.error) one?.failed(new Error(told.error));
    else one?.done(told.answer);
  });
  return remembering(
    (name, params) =>
      new Promise((done, failed) => {
        last += 1;
        waiting.set(last, { done, failed });
        const asked = Object.fromEntries(Object.entries(params).map(([key, value]) => [key, String(value)]));
        model.send({ number: last, name, params: asked });
      }),
  );
}
