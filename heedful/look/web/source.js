// @ts-check
// Sources of answers: the local server, the file itself, or the kernel of a notebook.

/** @typedef {Record<string, string | number>} Params */
/**
 * `ask` answers a question. `keeps` returns whether it can: a server and a kernel answer every question, a file those that
 * were saved in it. `live`: whether new texts can be entered. `leftOut`: number of answers that were not saved, by name.
 * @typedef {{
 *   ask: (name: string, params?: Params) => Promise<any>, keeps: (name: string, params?: Params) => boolean,
 *   live: boolean, leftOut: Record<string, number>, bytes: number,
 * }} Source
 */

const CACHE_BYTES = 64_000_000; // maximum bytes of cached answers
const MAX_QUESTION_CHARS = 65_000; // the server reads lines of 65,536 characters

/**
 * The key of a question, as question_key of page.py.
 * @param {string} name
 * @param {Params} params
 */
function question(name, params) {
  const pairs = Object.keys(params).sort().map((key) => `${key}=${encodeURIComponent(params[key])}`);
  return `${name}?${pairs.join("&")}`;
}

/**
 * A source that answers every question, with a cache of the latest answers. "look" changes the text and clears the cache.
 * @param {(name: string, params: Params) => Promise<any>} ask
 * @returns {Source}
 */
export function remembering(ask) {
  /** @type {Map<string, {answer: Promise<any>, bytes: number}>} */
  const cache = new Map(); // by question, the most recently used last
  let bytes = 0;
  return {
    live: true,
    leftOut: {},
    bytes: 0,
    keeps: () => true,
    async ask(name, params = {}) {
      const key = question(name, params);
      const cached = cache.get(key);
      if (cached) {
        cache.delete(key);
        cache.set(key, cached);
        return cached.answer;
      }
      if (name === "look") {
        cache.clear();
        bytes = 0;
      }
      const entry = { answer: ask(name, params), bytes: 0 };
      if (name !== "look") cache.set(key, entry);
      try {
        const answer = await entry.answer;
        entry.bytes = sizeOf(answer);
        bytes += entry.bytes;
        for (const [oldestKey, oldest] of cache) {
          if (bytes <= CACHE_BYTES || oldestKey === key) break;
          bytes -= oldest.bytes;
          cache.delete(oldestKey);
        }
        return answer;
      } catch (error) {
        cache.delete(key);
        throw error;
      }
    },
  };
}

/**
 * The approximate size of an answer, in bytes.
 * @param {any} answer
 * @returns {number}
 */
function sizeOf(answer) {
  if (typeof answer === "string") return answer.length;
  if (answer === null || typeof answer !== "object") return 8;
  return Object.values(answer).reduce((sum, value) => sum + sizeOf(value), 0);
}

/**
 * The local server of `heedful look`.
 * @returns {Source}
 */
export function serverSource() {
  return remembering(async (name, params) => {
    const key = question(name, params);
    if (key.length > MAX_QUESTION_CHARS) throw new Error("The text is too long to be sent from the page: start heedful look with it.");
    const response = await fetch(`ask/${key}`).catch(() => {
      throw new Error("There is no answer: heedful look has ended.");
    });
    const answer = await response.json();
    if (answer.error) throw new Error(answer.error);
    return answer;
  });
}

/**
 * The answers that were saved in a file.
 * @param {{answers: Record<string, any>, left_out: Record<string, number>, bytes: number}} saved
 * @returns {Source}
 */
export function keptSource(saved) {
  return {
    live: false,
    leftOut: saved.left_out,
    bytes: saved.bytes,
    keeps: (name, params = {}) => question(name, params) in saved.answers,
    async ask(name, params = {}) {
      const answer = saved.answers[question(name, params)];
      if (answer === undefined) {
        throw new Error("This was not kept in the file: open the page with heedful look, or write the file with this layer and head.");
      }
      if (answer.error) throw new Error(answer.error);
      return answer;
    },
  };
}

/**
 * The kernel of a notebook: messages with numbers, so that answers belong to questions.
 * @param {any} model
 * @returns {Source}
 */
export function kernelSource(model) {
  /** @type {Map<number, {resolve: (answer: any) => void, reject: (error: Error) => void}>} */
  const waiting = new Map(); // by number of the message
  let last = 0;
  model.on("msg:custom", (/** @type {any} */ message) => {
    const promise = waiting.get(message.number);
    waiting.delete(message.number);
    if (message.error) promise?.reject(new Error(message.error));
    else promise?.resolve(message.answer);
  });
  return remembering(
    (name, params) =>
      new Promise((resolve, reject) => {
        last += 1;
        waiting.set(last, { resolve, reject });
        const texts = Object.fromEntries(Object.entries(params).map(([key, value]) => [key, String(value)]));
        model.send({ number: last, name, params: texts });
      }),
  );
}
