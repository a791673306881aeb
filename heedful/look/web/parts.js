// @ts-check
// Small parts of a page. Text from outside only ever becomes a text node.

/** @typedef {Record<string, string | number | boolean | ((event: any) => void)>} Wanted */

/**
 * An element with attributes, listeners ("on...") and children; a child that is text becomes a text node.
 * @param {string} name
 * @param {Wanted} [wanted]
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function make(name, wanted = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(wanted)) {
    if (typeof value === "function") made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false) made.setAttribute(key, String(value));
  }
  made.append(...children);
  return made;
}

/**
 * An element of a drawing.
 * @param {string} name
 * @param {Record<string, string | number>} wanted
 * @param {...(Node | string)} children
 * @returns {SVGElement}
 */
export function svg(name, wanted, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(wanted)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu; // controls, bidi marks, what has no shape
const LONGEST_SHOWN = 24;

/**
 * The beginning of a text, without half a character at its end.
 * @param {string} text
 * @param {number} most
 */
export function cut(text, most) {
  return text.slice(0, most).replace(/\p{Cs}$/u, "");
}

/**
 * A token as it is shown: what cannot be seen, or would turn the line around, is written out; long ones are cut.
 * The mark of a space before a token (\u2581, which many fonts draw as a bar) becomes \u2423.
 * @param {string} text
 * @param {number} [most]
 */
export function plain(text, most = LONGEST_SHOWN) {
  const held = text.length > most ? `${cut(text, most - 1)}…` : text;
  return held.replaceAll("\u2581", "\u2423").replace(HIDDEN, (each) => `⟨${(each.codePointAt(0) ?? 0).toString(16).toUpperCase()}⟩`) || "∅";
}

/**
 * A token, kept apart from the direction of what stands around it.
 * @param {string} text
 */
export function shown(text) {
  return make("bdi", { dir: "ltr", title: plain(text, 200) }, plain(text));
}

/**
 * A formula: letters after "_" are set low, up to a space or bracket.
 * @param {string} text
 */
export function formula(text) {
  const made = make("span", { class: "formula" });
  for (const [number, part] of text.split(/_(\w+)/u).entries()) made.append(number % 2 ? make("sub", {}, part) : part);
  return made;
}

/**
 * A choice with a label.
 * @param {string} name
 * @param {[string, string][]} options value and text
 * @param {string} chosen
 * @param {(value: string) => void} change
 */
export function choice(name, options, chosen, change) {
  const select = /** @type {HTMLSelectElement} */ (
    make("select", { onchange: (event) => change(event.target.value) })
  );
  for (const [value, text] of options) select.append(new Option(plain(text, 48), value, false, value === chosen));
  return make("label", { class: "field" }, make("span", {}, name), select);
}

/**
 * A switch with a label.
 * @param {string} name
 * @param {boolean} on
 * @param {(on: boolean) => void} change
 */
export function toggle(name, on, change) {
  const box = make("input", { type: "checkbox", checked: on, onchange: (event) => change(event.target.checked) });
  return make("label", { class: "field switch" }, box, make("span", {}, name));
}

/**
 * What is told beside or in place of a picture.
 * @param {string} text
 * @param {string} [kind]
 */
export function note(text, kind = "note") {
  return make("p", { class: kind }, text);
}

/**
 * What an error says, as a sentence.
 * @param {string} text
 */
export function sentence(text) {
  const told = plain(text, 300);
  return told.charAt(0).toUpperCase() + told.slice(1) + (/[.…]$/u.test(told) ? "" : ".");
}

/**
 * A share in percent, as `heedful predict` prints it.
 * @param {number} value
 */
export function percent(value) {
  return `${(100 * value).toFixed(1)} %`;
}

/**
 * A number in few digits.
 * @param {number} value
 */
export function short(value) {
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 1 ? 2 : 3;
  const text = value.toFixed(digits);
  return Number(text) === 0 ? "0" : text.replace("-", "−");
}

/**
 * The element that has the focus, as what finds it again after a part of the page was drawn anew.
 * @param {HTMLElement} root
 * @returns {{key: string, among: number} | null} null: the focus is not within the page
 */
export function focusKey(root) {
  const active = /** @type {any} */ (root.getRootNode()).activeElement;
  if (!(active instanceof HTMLElement) || active === root || !root.contains(active)) return null;
  const key = nameOfControl(active);
  return { key, among: controlsNamed(root, key).indexOf(active) };
}

/**
 * Give the focus back to the element that had it, or to what takes its place; nothing happens where it was not lost.
 * @param {HTMLElement} root
 * @param {{key: string, among: number} | null} kept
 */
export function restoreFocus(root, kept) {
  if (!kept || focusKey(root)) return;
  const named = controlsNamed(root, kept.key);
  const to = named[Math.min(kept.among, named.length - 1)] ?? root.querySelector(".body");
  if (to instanceof HTMLElement) to.focus({ preventScroll: true });
}

/** @param {HTMLElement} element */
function nameOfControl(element) {
  const label = element.getAttribute("aria-label") ?? element.closest("label")?.firstElementChild?.textContent ?? "";
  const own = element.matches("select, input, textarea, canvas") ? "" : element.textContent;
  return [element.tagName, element.getAttribute("class") ?? "", label, label ? "" : own].join("|");
}

/**
 * @param {HTMLElement} root
 * @param {string} key
 */
function controlsNamed(root, key) {
  const all = /** @type {HTMLElement[]} */ ([...root.querySelectorAll("button, select, input, textarea, [tabindex]")]);
  return all.filter((each) => nameOfControl(each) === key);
}

/**
 * Arrow keys move the focus within a group of elements, of which the Tab key reaches one.
 * @param {HTMLElement} group
 * @param {string} which a selector
 * @param {number} across how many stand in a line; 1: a list
 */
export function arrows(group, which, across = 1) {
  const all = () => /** @type {HTMLElement[]} */ ([...group.querySelectorAll(which)]);
  for (const [number, each] of all().entries()) each.tabIndex = number ? -1 : 0;
  group.addEventListener("focusin", (event) => {
    for (const each of all()) each.tabIndex = each === event.target ? 0 : -1;
  });
  group.addEventListener("keydown", (event) => {
    const places = all();
    const at = places.indexOf(/** @type {HTMLElement} */ (document.activeElement ?? document.body));
    const root = /** @type {any} */ (group.getRootNode());
    const now = at >= 0 ? at : places.indexOf(root.activeElement);
    const steps = /** @type {Record<string, number>} */ ({
      ArrowDown: across, ArrowUp: -across, ArrowRight: 1, ArrowLeft: -1, Home: -now, End: places.length - 1 - now,
    });
    const to = places[now + (steps[event.key] ?? NaN)];
    if (now < 0 || !to) return;
    event.preventDefault();
    to.focus();
  });
}
