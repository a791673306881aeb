// @ts-check
// Types and helpers that views share: tokens, layers and heads, the state of the page.

import { make, plain, tokenElement } from "./parts.js";

/** @typedef {{text: string, id: number | null, segment: number | null, special: boolean, continues: boolean}} Token TokenRecord of inspection.py */
/** @typedef {{part: string, layers: number, heads: number, rows: string, keys: string, names: string[]}} Part View of inspection.py */
/** @typedef {{part: string, layer: number, head: number, name: string, share: number, chance: number}} Named NamedHead of head_patterns.py */
/**
 * One text in one model, as PageAPI.about returns it.
 * @typedef {{
 *   name: string, title: string, telling: Named[], family: string, head: string | null, parameters: number, item: string | [string, string],
 *   choices: string[],
 *   written: boolean, sides: Record<string, Token[]>, views: Part[], takes_target: boolean,
 * }} Look
 */
/**
 * The state of the page. `side`: number of the text that is shown; `heads`: heads of the head view, null: `head` alone;
 * `words`: whether tokens are joined to words; `relative`: whether colours are relative to the largest weight, null: by the
 * number of tokens; `numbers`: whether the neuron view shows numbers beside its colours; `tall`: whether every token is named;
 * `step`: step of a block; `lecture`: whether letters are large.
 * @typedef {{
 *   view: string, side: number, part: string, layer: number, head: number, row: number, heads: number[] | null,
 *   words: boolean, filter: string, relative: boolean | null, numbers: boolean, tall: boolean, step: number, lecture: boolean,
 * }} State
 */
/**
 * What a view is drawn from. `set` changes the state and draws the page again; `note` changes the state only; `place`
 * returns the parameters of questions about a head; `reload` asks for the texts again.
 * @typedef {{
 *   looks: Look[], look: Look, part: Part, state: State, root: HTMLElement, word: string, report: boolean,
 *   layers: number[], heads: number[],
 *   source: import("./source.js").Source, set: (changed: Partial<State>) => void, note: (changed: Partial<State>) => void,
 *   place: (head?: number) => Record<string, string | number>, reload: () => Promise<void>,
 * }} Context
 */

/**
 * The tokens of a side ("source", "target", ...) of the text that is shown.
 * @param {Context} context
 * @param {string} side
 */
export function tokensOf(context, side) {
  return context.look.sides[side] ?? [];
}

/**
 * The names of tokens; with groups the names of words.
 * @param {Token[]} side
 * @param {number[][]} [groups] positions of the tokens of each word
 */
export function namesOf(side, groups) {
  if (!groups) return side.map((token) => token.text);
  return groups.map((group) => {
    const [first, ...rest] = group.map((place) => side[place].text);
    return [first.replace(/^\u2581(?=.)/u, ""), ...rest.map((text) => text.replace(/^##/u, ""))].join("");
  });
}

/**
 * Height of a token, in pixels.
 * @param {HTMLElement} root
 */
export function rowHeight(root) {
  return parseFloat(getComputedStyle(root).getPropertyValue("--row"));
}

/**
 * A list of tokens as buttons.
 * @param {string[]} names
 * @param {{label: string, chosen?: (place: number) => boolean, pick?: (place: number, event: Event) => void,
 *   over?: (place: number | null) => void}} how
 */
export function tokenList(names, { label, chosen, pick, over }) {
  const list = make("div", { class: "tokens", role: "group", "aria-label": label });
  for (const [place, name] of names.entries()) {
    list.append(
      make(
        "button",
        {
          type: "button",
          class: "token",
          "aria-pressed": String(chosen?.(place) ?? false),
          "data-place": place,
          onclick: (event) => pick?.(place, event),
          onpointerenter: () => over?.(place),
          onpointerleave: () => over?.(null),
          onfocus: () => over?.(place),
          onblur: () => over?.(null),
        },
        tokenElement(name),
      ),
    );
  }
  return list;
}

/**
 * The heads of a part that can be shown, by layer. If none was saved in the file all are returned, and the view shows why.
 * @param {import("./source.js").Source} source
 * @param {number} side
 * @param {Part} part
 * @param {string} [question] that the view asks about a head
 * @returns {Map<number, number[]>}
 */
export function placesOf(source, side, part, question = "weights") {
  const all = [...Array(part.heads).keys()];
  const layers = [...Array(part.layers).keys()];
  const headsOfLayers = layers.map((layer) => all.filter((head) => source.keeps(question, { side, part: part.part, layer, head })));
  const none = headsOfLayers.every((heads) => !heads.length);
  return new Map(layers.filter((layer) => none || headsOfLayers[layer].length).map((layer) => [layer, none ? all : headsOfLayers[layer]]));
}

/**
 * The largest number up to the wanted one, or else the first.
 * @param {number[]} all in ascending order
 * @param {number} wanted
 */
export function nearest(all, wanted) {
  return all.filter((number) => number <= wanted).at(-1) ?? all[0];
}

/**
 * The name of a head of the part that is shown.
 * @param {Context} context
 * @param {number} head
 */
export function headName(context, head) {
  return context.part.names[head] ? plain(context.part.names[head]) : `head ${head}`;
}

const COLOURS = 8; // number of head colours; colour-blind readers can tell them apart too

/**
 * The colour of a head, as the name of a custom property.
 * @param {number} head
 */
export function headColour(head) {
  return `--head-${head % COLOURS}`;
}

/**
 * Whether the lines of a head are dashed, since an earlier head has its colour.
 * @param {number} head
 */
export function isDashed(head) {
  return head % (2 * COLOURS) >= COLOURS;
}

/**
 * The name of a model.
 * @param {Look} look
 */
export function nameOf(look) {
  return plain(look.title, 60);
}
