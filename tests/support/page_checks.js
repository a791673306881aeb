// What tests/support/page_checks.py asks of a page.

function layoutProblems() {
  const found = [];
  const root = document.documentElement;
  const seen = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && e.getClientRects().length > 0;
  const name = (e) => `${e.tagName.toLowerCase()}.${e.getAttribute("class") ?? ""} "${(e.textContent ?? "").trim().slice(0, 40)}"`;
  const hasOwnText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const scrolls = (e) => { for (let p = e; p && p !== document.body; p = p.parentElement)
    if (/auto|scroll/.test(getComputedStyle(p).overflowX) && p.scrollWidth > p.clientWidth) return true; return false; };
  if (root.scrollWidth > root.clientWidth + 1) {
    const wide = [...document.querySelectorAll("body *")].filter((e) => seen(e) && !scrolls(e) && e.getBoundingClientRect().right > root.clientWidth + 1);
    found.push(`the page is ${root.scrollWidth} wide in a window of ${root.clientWidth}: ${wide.slice(0, 3).map(name).join("; ")}`);
  }
  for (const e of document.querySelectorAll("body *")) {
    if (!seen(e) || e.closest(".unseen, svg, title, textarea, select")) continue;
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    const clips = style.overflowX === "hidden" || style.overflowX === "clip";
    if (clips && hasOwnText(e) || clips && e.querySelector(":scope > bdi")) {
      const isTitled = e.title || e.querySelector("[title]") || e.closest("[title]");
      const sideways = style.writingMode.startsWith("vertical");
      const cutAcross = e.scrollWidth > e.clientWidth + 1 && !(style.textOverflow === "ellipsis" && isTitled);
      const cutDown = e.scrollHeight > e.clientHeight + 4 && !(sideways && isTitled);
      if (cutAcross || cutDown) found.push(`cut: ${name(e)} ${e.scrollWidth}x${e.scrollHeight} in ${e.clientWidth}x${e.clientHeight}`);
    }
    if (e.matches(".panel, .figure, .card, figure, article") && (box.height < 12 || !(e.innerText.trim() || e.querySelector("canvas, svg, img")))) found.push(`empty: ${name(e)}`);
    if (e.matches(".problem") && e.textContent.trim()) found.push(`problem: ${e.textContent}`);
    if (e.matches("button, select, input, a") && !e.closest(".tight") && (box.width < 4 || box.height < 4)) found.push(`too small: ${name(e)}`);
    if (hasOwnText(e) && box.width > 0 && box.width < 40 && box.height > 8 * parseFloat(style.fontSize) && !style.writingMode.startsWith("vertical")) found.push(`one letter a line: ${name(e)}`);
  }
  return [...new Set(found)];
}

function labelProblems() {
  const cut = [], words = [...document.querySelectorAll("svg text")].filter((e) => e.textContent.trim() && e.checkVisibility());
  for (const e of words) {
    const box = e.getBoundingClientRect(), drawing = e.ownerSVGElement.getBoundingClientRect();
    if (box.left < drawing.left - 2 || box.right > drawing.right + 2 || box.top < drawing.top - 2 || box.bottom > drawing.bottom + 2) cut.push(`outside of its drawing: ${e.textContent}`);
  }
  return cut;
}

/** Relative luminance, as WCAG 2.2 defines it, of an sRGB colour [red, green, blue] with levels from 0 to 255. */
function relativeLuminance(colour) {
  const [r, g, b] = colour.map((level) => level / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Contrast ratio, from 1 to 21, of two such colours. */
function contrastRatio(one, two) {
  const [dark, light] = [one, two].map(relativeLuminance).sort((x, y) => x - y);
  return (light + 0.05) / (dark + 0.05);
}

/** A computed colour, rgb(), rgba() or color(srgb), as [red, green, blue, alpha]; levels from 0 to 255, alpha from 0 to 1. */
function rgbaOf(colour) {
  if (!/^(rgba?\(|color\(srgb )/.test(colour)) throw new Error(`cannot read the colour ${colour}`);
  const [r, g, b, a = 1] = colour.match(/[\d.]+(?:e-?\d+)?/g).map(Number);
  const largest = colour.startsWith("color(") ? 1 : 255;
  return [...[r, g, b].map((level) => (255 * level) / largest), a];
}

/** The opaque colour that a colour [red, green, blue, alpha] has over an opaque one. */
function over([r, g, b, a], ground) {
  return [r, g, b].map((level, i) => a * level + (1 - a) * ground[i]);
}

/** The colour behind the text of an element: the backgrounds of its ancestors over white, the outermost first. */
function groundOf(element) {
  const above = element.parentElement ? groundOf(element.parentElement) : [255, 255, 255];
  return over(rgbaOf(getComputedStyle(element).backgroundColor), above);
}

/**
 * Elements whose text has a contrast below 4.5 (WCAG AA), with the ratio. Transparency of text and backgrounds counts;
 * `opacity` (of disabled controls, which WCAG exempts), background images, and what an SVG or a canvas draws behind text do not.
 */
function lowContrast() {
  const low = [];
  for (const e of document.querySelectorAll(".heedful *")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), ground = groundOf(e);
    const ratio = contrastRatio(over(rgbaOf(e instanceof SVGElement ? style.fill : style.color), ground), ground);
    if (ratio < 4.5) low.push(`${e.getAttribute("class") ?? ""} ${e.textContent.slice(0, 20)} ${ratio}`);
  }
  return low;
}

const kindOf = (element) => `${element.tagName} ${(element.getAttribute("class") ?? "").split(" ")[0]} ${element.type ?? ""}`;
const usable = (where) => [...document.querySelectorAll(where)].filter((e) => e.checkVisibility() && !e.disabled && !e.closest(".save"));

function kindsOfControls(where) {
  return [...new Set(usable(where).map(kindOf))];
}

/** Use the first control of a kind; false if there is none now. */
function useControl(where, kind) {
  const element = usable(where).find((e) => kindOf(e) === kind);
  if (!element) return false;
  element.focus();
  if (element.tagName === "SELECT") {
    element.selectedIndex = element.length - 1;
    element.dispatchEvent(new Event("change"));
  } else if (element.type !== "text") element.click();
  return true;
}

const nameOf = (e) => `${e.tagName.toLowerCase()}.${e.getAttribute("class") ?? ""} "${(e.getAttribute("aria-label") ?? e.textContent ?? "").trim().slice(0, 40)}"`;

/** Record every element that gets the focus from now on. */
function watchFocus() {
  window.focused = new Set();
  document.addEventListener("focusin", (event) => window.focused.add(event.target));
}

const ROVING = ".tokens, .chips, .thumbs, .stages, .gates, .named";

/** The groups in which arrow keys move the focus: number of members of each. */
function rovingGroups() {
  return [...document.querySelectorAll(ROVING)].map((group) => group.querySelectorAll("button:enabled").length);
}

/** Focus the member of a roving group that the Tab key reaches; false if there is none. */
function focusGroup(number) {
  const group = document.querySelectorAll(ROVING)[number];
  const first = [...(group?.querySelectorAll("button:enabled") ?? [])].find((e) => e.tabIndex === 0);
  first?.focus();
  return first !== undefined;
}

/** Controls that had no focus since `watchFocus`. */
function unreached() {
  const controls = document.querySelectorAll("button, select, input, textarea, canvas[role=img], [tabindex='0']");
  const usable = [...controls].filter((e) => e.checkVisibility() && !e.disabled && e.getAttribute("role") !== "tab");
  return [...new Set(usable.filter((e) => !window.focused.has(e)).map(nameOf))];
}
