// @ts-check
// What views share: what is shown, and lists of tokens.

import { make, plain, shown } from "./parts.js";

/** @typedef {{text: string, id: number | null, segment: number | null, special: boolean, continues: boolean}} Token */
/** @typedef {{part: string, layers: number, heads: number, rows: string, keys: string, names: string[]}} Part */
/** @typedef {{part: string, layer: number, head: number, name: string, share: number, chance: number}} Named a head that follows a pattern */
/**
 * @typedef {{
 *   name: string, title: string, telling: Named[], family: string, head: string | null, parameters: number, item: string | [string, string],
 *   choices: string[],
 *   written: boolean, sides: Record<string, Token[]>, views: Part[], takes_target: boolean,
 * }} Look
 */
/**
 * @typedef {{
 *   view: string, side: number, part: string, layer: number, head: number, row: number, heads: number[] | null,
 *   words: boolean, filter: string, relative: boolean | null, tall: boolean, step: number, lecture: boolean,
 * }} State
 */
/**
 * @typedef {{
 *   looks: Look[], look: Look, part: Part, state: State, root: HTMLElement, word: string, report: boolean,
 *   layers: number[], heads: number[],
 *   source: import("./source.js").Source, set: (changed: Partial<State>) => void, note: (changed: Partial<State>) => void,
 *   place: (head?: number) => Record<string, string | number>, reload: () => Promise<void>,
 * }} Context
 */

/**
 * The tokens of a side of the present look.
 * @param {Context} context
 * @param {string} side
 */
export function tokensOf(context, side) {
  return context.look.sides[side] ?? [];
}

/**
 * Tokens as they are shown in a line, or words: those that are one word together.
 * @param {Token[]} side
 * @param {number[][]} [groups]
 */
export function namesOf(side, groups) {
  if (!groups) return side.map((token) => token.text);
  return groups.map((group) => {
    const [first, ...rest] = group.map((place) => side[place].text);
    return [first.replace(/^\u2581(?=.)/u, ""), ...rest.map((text) => text.replace(/^##/u, ""))].join("");
  });
}

/**
 * A list of tokens to choose from.
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
        shown(name),
      ),
    );
  }
  return list;
}

/**
 * The heads of each layer of a part that can be shown; all, where none was kept and so each view has to say it.
 * @param {import("./source.js").Source} source
 * @param {number} side
 * @param {Part} part
 * @param {string} [question] that a view asks of each head
 * @returns {Map<number, number[]>}
 */
export function placesOf(source, side, part, question = "weights") {
  const all = [...Array(part.heads).keys()];
  const layers = [...Array(part.layers).keys()];
  const shown = layers.map((layer) => all.filter((head) => source.keeps(question, { side, part: part.part, layer, head })));
  const none = shown.every((heads) => !heads.length);
  return new Map(layers.filter((layer) => none || shown[layer].length).map((layer) => [layer, none ? all : shown[layer]]));
}

/**
 * The last one up to the one that was wanted, or else the first.
 * @param {number[]} all
 * @param {number} wanted
 */
export function nearest(all, wanted) {
  return all.filter((number) => number <= wanted).at(-1) ?? all[0];
}

/**
 * The name of a head of the present part.
 * @param {Context} context
 * @param {number} head
 */
export function headName(context, head) {
  return context.part.names[head] ? plain(context.part.names[head]) : `head ${head}`;
}

const COLOURS = 8; // of heads, which differ for readers who confuse red and green, or blue and yellow, too

/**
 * The colour of a head, as the name of a custom property.
 * @param {number} head
 */
export function headColour(head) {
  return `--head-${head % COLOURS}`;
}

/**
 * Whether the lines of a head are dashed: those of heads whose colour an earlier head has.
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
