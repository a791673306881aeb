// @ts-check
// Change: heads switched off and tokens replaced, and the prediction before and after.

import { arrows, make, note, plain, sentence, short } from "./parts.js";
import { savable } from "./save.js";
import { answerOf } from "./predict.js";
import { headName } from "./tokens.js";

/** @typedef {import("./tokens.js").Context} Context */

const FIELDS = 80; // maximum tokens that can be replaced here
const OFFLINE = "A file cannot compute a new prediction: open the page with heedful look to switch heads off and to replace tokens.";

/**
 * The view of changes.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function changeView(context) {
  const { live } = context.source;
  /** @type {Set<string>} */
  const off = new Set();
  /** @type {Map<number, string>} */
  const words = new Map();
  const results = make("div", { class: "beside apart changed" });
  let turn = 0;
  const apply = async () => {
    turn += 1;
    const mine = turn;
    try {
      const answer = await context.source.ask("changed", { side: context.state.side, off: [...off].sort().join(","), tokens: JSON.stringify(Object.fromEntries(words)) });
      if (mine === turn) results.replaceChildren(...outcome(context, answer, off.size, words.size));
    } catch (error) {
      if (mine === turn) results.replaceChildren(note(sentence(/** @type {Error} */ (error).message), "problem"));
    }
  };
  const section = make("section", { class: "change-view" });
  if (!live) section.append(note(OFFLINE));
  section.append(
    make("div", { class: "panel" }, make("h3", {}, "Tokens: write another word in a field"), fields(context, words, live, apply)),
    ...context.look.views.filter((view) => ["encoder", "decoder", "cross"].includes(view.part)).map((part) => gates(context, part, off, live, apply)),
  );
  if (!live) return section;
  await apply();
  section.append(savable(make("div", {}, results), "prediction before and after"));
  return section;
}

/**
 * A field for each token of the text.
 * @param {Context} context
 * @param {Map<number, string>} words
 * @param {boolean} live
 * @param {() => void} apply
 */
function fields(context, words, live, apply) {
  const line = make("div", { class: "chips" });
  const all = context.look.sides.source ?? [];
  for (const [place, token] of all.slice(0, FIELDS).entries()) {
    const field = /** @type {HTMLInputElement} */ (
      make("input", {
        type: "text", dir: "auto", "aria-label": `Token ${place}: ${plain(token.text)}`, spellcheck: "false", size: Math.max(2, Math.min(16, token.text.length)),
        disabled: !live || token.segment === null || context.look.choices.length > 0,
        onchange: (event) => {
          if (event.target.value === token.text) words.delete(place);
          else words.set(place, event.target.value);
          event.target.classList.toggle("other", words.has(place));
          apply();
        },
      })
    );
    field.value = plain(token.text);
    line.append(field);
  }
  if (all.length > FIELDS) line.append(note(`The first ${FIELDS} of ${all.length} tokens; change others in the text above.`));
  return line;
}

/**
 * A switch for each head of a part.
 * @param {Context} context
 * @param {import("./tokens.js").Part} part
 * @param {Set<string>} off
 * @param {boolean} live
 * @param {() => void} apply
 */
function gates(context, part, off, live, apply) {
  const grid = make("div", { class: "gates", role: "group", "aria-label": `Heads of the ${part.part}` });
  grid.style.gridTemplateColumns = `auto repeat(${part.heads}, 1.9rem)`;
  grid.append(make("span", {}));
  for (let head = 0; head < part.heads; head++) grid.append(make("span", { class: "across" }, String(head)));
  const press = (/** @type {HTMLElement} */ gate, /** @type {boolean} */ on) => {
    const place = String(gate.dataset.place);
    if (on) off.delete(place);
    else off.add(place);
    gate.setAttribute("aria-pressed", String(on));
    gate.textContent = on ? "" : "×";
  };
  for (let layer = 0; layer < part.layers; layer++) {
    grid.append(make("span", { class: "down" }, String(layer)));
    for (let head = 0; head < part.heads; head++) {
      grid.append(
        make("button", {
          type: "button", class: "gate", "data-place": `${part.part}.${layer}.${head}`, "aria-pressed": "true", disabled: !live,
          "aria-label": `layer ${layer}, ${headName(context, head)}`,
          onclick: (event) => {
            press(event.currentTarget, event.currentTarget.getAttribute("aria-pressed") !== "true");
            apply();
          },
        }),
      );
    }
  }
  arrows(grid, ".gate", part.heads);
  const all = (/** @type {boolean} */ on) =>
    make(
      "button",
      {
        type: "button", class: "quiet", disabled: !live,
        onclick: () => {
          for (const gate of grid.querySelectorAll(".gate")) press(/** @type {HTMLElement} */ (gate), on);
          apply();
        },
      },
      on ? "all on" : "all off",
    );
  return make(
    "div", { class: "panel" }, make("h3", {}, `Heads of the ${part.part}: layers down, heads across; a cross is switched off`),
    make("div", { class: "scrolled" }, grid), make("div", {}, all(true), all(false)),
  );
}

/**
 * The prediction before and after the change.
 * @param {Context} context
 * @param {any} changed the answer
 * @param {number} heads that are off
 * @param {number} words that are replaced
 */
function outcome(context, changed, heads, words) {
  const what = [heads ? `${heads} ${heads === 1 ? "head" : "heads"} off` : "", words ? `${words} ${words === 1 ? "token" : "tokens"} replaced` : ""].filter(Boolean).join(", ") || "nothing changed yet";
  if (changed.cosine !== null) {
    return [make("div", { class: "panel" }, make("h3", {}, `After: ${what}`), make("p", { class: "answer" }, `cosine ${short(changed.cosine)}`), note("Of the text's embedding after the change with the one before: 1 is the same direction."))];
  }
  const panel = (/** @type {string} */ name, /** @type {any} */ answer) => make("div", { class: "panel" }, make("h3", {}, name), answerOf(context, answer));
  return [panel("Before", changed.before), panel(`After: ${what}`, changed.after)];
}
