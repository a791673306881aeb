// @ts-check
// Small elements of a page. Untrusted text only ever becomes a text node.

/** @typedef {Record<string, string | number | boolean | ((event: any) => void)>} Attributes */

/**
 * Make an HTML element with attributes, event listeners ("on...") and children; a child that is text becomes a text node.
 * @param {string} name
 * @param {Attributes} [attributes] true: an attribute without a value; false: no attribute
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false) element.setAttribute(key, String(value));
  }
  element.append(...children);
  return element;
}

/**
 * Make an SVG element with attributes and children.
 * @param {string} name
 * @param {Record<string, string | number>} attributes
 * @param {...(Node | string)} children
 * @returns {SVGElement}
 */
export function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}

const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu; // control characters, bidi marks, characters without a glyph
const MAX_SHOWN = 24; // characters after which a token is cut

/**
 * The first characters of a text, without half a surrogate pair at the end.
 * @param {string} text
 * @param {number} most
 */
export function cut(text, most) {
  return text.slice(0, most).replace(/\p{Cs}$/u, "");
}

/**
 * A text for the page: long ones are cut, and characters that are invisible or change the direction become their code.
 * The mark of a space before a token (\u2581, which many fonts draw as a bar) becomes \u2423.
 * @param {string} text
 * @param {number} [most]
 */
export function plain(text, most = MAX_SHOWN) {
  const beginning = text.length > most ? `${cut(text, most - 1)}…` : text;
  return beginning.replaceAll("\u2581", "\u2423").replace(HIDDEN, (character) => `⟨${(character.codePointAt(0) ?? 0).toString(16).toUpperCase()}⟩`) || "∅";
}

/**
 * A token as an element that does not change the direction of the text around it.
 * @param {string} text
 */
export function tokenElement(text) {
  return make("bdi", { dir: "ltr", title: plain(text, 200) }, plain(text));
}

/**
 * A formula: letters after "_" become a subscript, up to a space or bracket.
 * @param {string} text
 */
export function formula(text) {
  const element = make("span", { class: "formula" });
  for (const [number, part] of text.split(/_(\w+)/u).entries()) element.append(number % 2 ? make("sub", {}, part) : part);
  return element;
}

/**
 * A select element with a label.
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
 * A checkbox with a label.
 * @param {string} name
 * @param {boolean} on
 * @param {(on: boolean) => void} change
 */
export function toggle(name, on, change) {
  const box = make("input", { type: "checkbox", checked: on, onchange: (event) => change(event.target.checked) });
  return make("label", { class: "field switch" }, box, make("span", {}, name));
}

/**
 * A paragraph beside or in place of a picture.
 * @param {string} text
 * @param {string} [kind]
 */
export function note(text, kind = "note") {
  return make("p", { class: kind }, text);
}

/**
 * The message of an error as a sentence.
 * @param {string} text
 */
export function sentence(text) {
  const message = plain(text, 300);
  return message.charAt(0).toUpperCase() + message.slice(1) + (/[.…]$/u.test(message) ? "" : ".");
}

/**
 * A share in percent, as `heedful predict` prints it.
 * @param {number} value
 */
export function percent(value) {
  return `${(100 * value).toFixed(1)} %`.replace("-", "\u2212");
}

/**
 * A number with three significant digits or so.
 * @param {number} value
 */
export function short(value) {
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 1 ? 2 : 3;
  const text = value.toFixed(digits);
  return Number(text) === 0 ? "0" : text.replace("-", "−");
}

/**
 * A key that finds the element with the focus again after a part of the page was replaced.
 * @param {HTMLElement} root
 * @returns {{key: string, among: number} | null} name, and number among the controls of this name; null: the focus is elsewhere
 */
export function focusKey(root) {
  const active = /** @type {any} */ (root.getRootNode()).activeElement;
  if (!(active instanceof HTMLElement) || active === root || !root.contains(active)) return null;
  const key = nameOfControl(active);
  return { key, among: controlsNamed(root, key).indexOf(active) };
}

/**
 * Focus the control with the saved key, or else the body of the page; do nothing if the focus is in the page already.
 * @param {HTMLElement} root
 * @param {{key: string, among: number} | null} saved
 */
export function restoreFocus(root, saved) {
  if (!saved || focusKey(root)) return;
  const named = controlsNamed(root, saved.key);
  const to = named[Math.min(saved.among, named.length - 1)] ?? root.querySelector(".body");
  if (to instanceof HTMLElement) to.focus({ preventScroll: true });
}

/**
 * A name that a control has again after it was replaced by an equal one.
 * @param {HTMLElement} element
 */
function nameOfControl(element) {
  const label = element.getAttribute("aria-label") ?? element.closest("label")?.firstElementChild?.textContent ?? "";
  const own = element.matches("select, input, textarea, canvas") ? "" : element.textContent;
  return [element.tagName, element.getAttribute("class") ?? "", label, label ? "" : own].join("|");
}

/**
 * The controls of a name.
 * @param {HTMLElement} root
 * @param {string} key
 */
function controlsNamed(root, key) {
  const controls = /** @type {HTMLElement[]} */ ([...root.querySelectorAll("button, select, input, textarea, [tabindex]")]);
  return controls.filter((control) => nameOfControl(control) === key);
}

/**
 * Let arrow keys move the focus within a group of elements. The Tab key reaches only one of them (a roving tabindex).
 * @param {HTMLElement} group
 * @param {string} selector of the elements
 * @param {number} across number of elements in a row; 1: a list
 */
export function arrows(group, selector, across = 1) {
  const members = () => /** @type {HTMLElement[]} */ ([...group.querySelectorAll(selector)]);
  for (const [number, member] of members().entries()) member.tabIndex = number ? -1 : 0;
  group.addEventListener("focusin", (event) => {
    for (const member of members()) member.tabIndex = member === event.target ? 0 : -1;
  });
  group.addEventListener("keydown", (event) => {
    const all = members();
    const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement ?? document.body));
    const root = /** @type {any} */ (group.getRootNode());
    const now = at >= 0 ? at : all.indexOf(root.activeElement); // within a shadow root, document.activeElement is its host
    const steps = /** @type {Record<string, number>} */ ({
      ArrowDown: across, ArrowUp: -across, ArrowRight: 1, ArrowLeft: -1, Home: -now, End: all.length - 1 - now,
    });
    const to = all[now + (steps[event.key] ?? NaN)];
    if (now < 0 || !to) return;
    event.preventDefault();
    to.focus();
  });
}
