// @ts-check
// Saving figures: an element is drawn again as one SVG with a caption, and from that as PNG.

import { make, plain, svg } from "./parts.js";

const MARGIN = 14; // pixels around a picture
const PNG_SCALE = 2; // pixels of a PNG for each pixel of the page
const VECTOR_CELLS = 4_096; // maximum cells of a heat map that is saved as rectangles; larger ones are images
const STRIP_GAP = 2; // pixels between the rows of strips, as in look.css
const CAPTION_SIZE = 12; // font size of the caption, in pixels

/** @type {WeakMap<Element, () => string[]>} */
const captions = new WeakMap();

/**
 * Set the caption of every picture of a page that is saved.
 * @param {HTMLElement} root
 * @param {() => string[]} caption lines: model, text, layer and head
 */
export function setCaption(root, caption) {
  captions.set(root, caption);
}

/**
 * Add buttons to an element that save it as a picture.
 * @param {HTMLElement} element
 * @param {string} name title of the picture
 * @returns {HTMLElement} the element
 */
export function savable(element, name) {
  const button = (/** @type {string} */ kind) =>
    make("button", { type: "button", class: "quiet", "aria-label": `Save picture of ${plain(name, 60)} as ${kind}`, onclick: () => saveAs(element, name, kind) }, kind);
  element.append(make("div", { class: "save" }, make("span", { class: "label" }, "Save picture"), button("SVG"), button("PNG")));
  return element;
}

/**
 * Save an element as a file.
 * @param {HTMLElement} element
 * @param {string} name
 * @param {string} kind "SVG" or "PNG"
 */
async function saveAs(element, name, kind) {
  const root = /** @type {HTMLElement} */ (element.closest(".heedful"));
  const title = plain(name.charAt(0).toUpperCase() + name.slice(1), 120);
  const { text, width, height } = drawing(element, [title, ...(captions.get(root)?.() ?? [])]);
  const blob = kind === "SVG" ? new Blob([text], { type: "image/svg+xml" }) : await rasterized(text, width, height);
  const link = /** @type {HTMLAnchorElement} */ (make("a", { download: `heedful ${name}.${kind.toLowerCase()}`.replace(/[^\w.-]+/gu, "-").slice(-80) }));
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/**
 * An SVG as PNG.
 * @param {string} text of the SVG
 * @param {number} width
 * @param {number} height
 * @returns {Promise<Blob>}
 */
async function rasterized(text, width, height) {
  const image = new Image();
  await new Promise((done, failed) => {
    image.onload = done;
    image.onerror = () => failed(new Error("The picture could not be drawn."));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  });
  const canvas = document.createElement("canvas");
  const sharp = Math.min(PNG_SCALE, 16_000 / Math.max(width, height));
  [canvas.width, canvas.height] = [Math.ceil(width * sharp), Math.ceil(height * sharp)];
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) => canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("The picture is too large."))), "image/png"));
}

/**
 * An element as an SVG of rectangles, text and lines.
 * @param {HTMLElement} element
 * @param {string[]} caption
 * @returns {{text: string, width: number, height: number}}
 */
function drawing(element, caption) {
  const root = /** @type {HTMLElement} */ (element.closest(".heedful"));
  const focused = /** @type {any} */ (root.getRootNode()).activeElement;
  root.classList.add("saving");
  try {
    const origin = element.getBoundingClientRect();
    const group = svg("g", {});
    const reached = { right: 0, bottom: 0 };
    render(element, { group, origin, reached, clip: null });
    const style = getComputedStyle(root);
    const width = Math.ceil(Math.max(reached.right, 200) + 2 * MARGIN);
    const lines = caption.flatMap((line) => folded(line, Math.floor((width - 2 * MARGIN) / (0.52 * CAPTION_SIZE))));
    const height = Math.ceil(reached.bottom + 2 * MARGIN + (lines.length ? 8 + 1.4 * CAPTION_SIZE * lines.length : 0));
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "font-family": style.fontFamily });
    picture.append(svg("rect", { width, height, ...paintOf("fill", style.getPropertyValue("--panel")) }));
    group.setAttribute("transform", `translate(${MARGIN} ${MARGIN})`);
    picture.append(group);
    for (const [number, line] of lines.entries()) {
      const y = reached.bottom + 2 * MARGIN + 8 + 1.4 * CAPTION_SIZE * number;
      picture.append(lettersAt(line, MARGIN, y, { "font-size": CAPTION_SIZE, ...paintOf("fill", number ? style.getPropertyValue("--soft") : style.color) }));
    }
    return { text: new XMLSerializer().serializeToString(picture), width, height };
  } finally {
    root.classList.remove("saving");
    if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  }
}

/**
 * @typedef {{
 *   group: SVGElement, origin: DOMRect, reached: {right: number, bottom: number},
 *   clip: {left: number, top: number, right: number, bottom: number} | null,
 * }} Sheet `group`: where to draw; `origin`: box of the element that is saved; `reached`: right and bottom end of what was
 *   drawn; `clip`: the clipping box, in pixels of the window
 */

/**
 * Draw an element with its children.
 * @param {Element} element
 * @param {Sheet} sheet
 */
function render(element, sheet) {
  const style = getComputedStyle(element);
  if (style.display === "none" || style.visibility === "hidden") return;
  const box = element.getBoundingClientRect();
  if (element instanceof SVGElement) {
    if (box.width) sheet.group.append(copiedSvg(element, placedAt(sheet, box)));
    return extend(sheet, box);
  }
  renderGround(element, style, box, sheet);
  if (element instanceof HTMLCanvasElement) return renderCanvas(element, box, sheet);
  const hides = style.overflowX !== "visible" && style.display !== "inline";
  const inner = hides ? { ...sheet, clip: clipped(sheet.clip, box) } : sheet;
  for (const child of element.childNodes) {
    if (child instanceof Element) render(child, inner);
    else if (child instanceof Text && child.data.trim()) renderText(child, style, inner);
  }
}

/**
 * The intersection of two boxes.
 * @param {Sheet["clip"]} clip
 * @param {DOMRect} box
 */
function clipped(clip, box) {
  if (!clip) return { left: box.left, top: box.top, right: box.right, bottom: box.bottom };
  return { left: Math.max(clip.left, box.left), top: Math.max(clip.top, box.top), right: Math.min(clip.right, box.right), bottom: Math.min(clip.bottom, box.bottom) };
}

/**
 * A box of the window as attributes of the picture.
 * @param {Sheet} sheet
 * @param {{left: number, top: number, width: number, height: number}} box
 */
function placedAt(sheet, box) {
  return { x: rounded(box.left - sheet.origin.left), y: rounded(box.top - sheet.origin.top), width: rounded(box.width), height: rounded(box.height) };
}

/**
 * Extend the size of the picture by a box.
 * @param {Sheet} sheet
 * @param {{right: number, bottom: number}} box
 */
function extend(sheet, box) {
  sheet.reached.right = Math.max(sheet.reached.right, box.right - sheet.origin.left);
  sheet.reached.bottom = Math.max(sheet.reached.bottom, box.bottom - sheet.origin.top);
}

/**
 * Draw background and border of an element.
 * @param {Element} element
 * @param {CSSStyleDeclaration} style
 * @param {DOMRect} box
 * @param {Sheet} sheet
 */
function renderGround(element, style, box, sheet) {
  if (!box.width || !box.height) return;
  const fill = paintOf("fill", style.backgroundColor);
  const sides = ["Top", "Right", "Bottom", "Left"].map((side) => ({
    width: style[/** @type {any} */ (`border${side}Style`)] === "none" ? 0 : parseFloat(style[/** @type {any} */ (`border${side}Width`)]),
    colour: style[/** @type {any} */ (`border${side}Color`)],
  }));
  const even = sides.every((side) => side.width === sides[0].width && side.colour === sides[0].colour);
  const stroke = even && sides[0].width ? { ...paintOf("stroke", sides[0].colour), "stroke-width": sides[0].width } : {};
  const { x, y, width, height } = placedAt(sheet, box);
  if (!("fill-opacity" in fill && fill["fill-opacity"] === 0) || "stroke" in stroke) {
    const half = even ? sides[0].width / 2 : 0;
    const rx = Math.min(parseFloat(style.borderTopLeftRadius) || 0, height / 2);
    /** @type {Record<string, string>} */
    const dash = style.borderTopStyle === "dashed" && "stroke" in stroke ? { "stroke-dasharray": "4 3" } : {};
    sheet.group.append(svg("rect", { x: x + half, y: y + half, width: Math.max(0, width - 2 * half), height: Math.max(0, height - 2 * half), rx, ...fill, ...stroke, ...dash }));
    extend(sheet, box);
  }
  if (!even) {
    const ends = [[x, y, x + width, y], [x + width, y, x + width, y + height], [x, y + height, x + width, y + height], [x, y, x, y + height]];
    for (const [number, side] of sides.entries()) {
      const [x1, y1, x2, y2] = ends[number];
      if (side.width) sheet.group.append(svg("line", { x1, y1, x2, y2, ...paintOf("stroke", side.colour), "stroke-width": side.width }));
    }
  }
}

/**
 * Draw a canvas: small maps as rectangles, which are sharp in any program, others as an image.
 * @param {HTMLCanvasElement} canvas
 * @param {DOMRect} box
 * @param {Sheet} sheet
 */
function renderCanvas(canvas, box, sheet) {
  const { x, y, width, height } = placedAt(sheet, box);
  const [n, m] = [canvas.height, canvas.width];
  if (!width || !height) return;
  extend(sheet, box);
  if (n * m > VECTOR_CELLS || getComputedStyle(canvas).imageRendering !== "pixelated") {
    sheet.group.append(svg("image", { x, y, width, height, preserveAspectRatio: "none", "image-rendering": "pixelated", href: enlarged(canvas, width, height) }));
  } else {
    const data = numbersOf(canvas);
    const filled = canvas.matches(".strips") ? 1 - STRIP_GAP / (height / n) : 1; // of each row
    const group = svg("g", { transform: `translate(${x} ${y}) scale(${width / m} ${height / n})`, "shape-rendering": "crispEdges" });
    for (let i = 0; i < n; i++) {
      for (let j = 0, k; j < m; j = k) {
        const colour = (/** @type {number} */ column) => [...data.subarray(4 * (i * m + column), 4 * (i * m + column) + 4)].join();
        for (k = j + 1; k < m && colour(k) === colour(j); k++); // equal neighbours are one rectangle
        const [r, g, b, a] = colour(j).split(",").map(Number);
        if (a) group.append(svg("rect", { x: j, y: i, width: k - j, height: rounded(filled), fill: hexOf(r, g, b), ...(a < 255 ? { "fill-opacity": rounded(a / 255) } : {}) }));
      }
    }
    sheet.group.append(group);
  }
  const outline = getComputedStyle(canvas);
  if (outline.outlineStyle === "solid") sheet.group.append(svg("rect", { x, y, width, height, fill: "none", ...paintOf("stroke", outline.outlineColor) }));
}

/**
 * The colours of a canvas, four bytes each. They are read from a copy, so that the canvas itself stays on the GPU.
 * @param {HTMLCanvasElement} canvas
 */
function numbersOf(canvas) {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = /** @type {CanvasRenderingContext2D} */ (copy.getContext("2d", { willReadFrequently: true }));
  pen.drawImage(canvas, 0, 0);
  return pen.getImageData(0, 0, canvas.width, canvas.height).data;
}

/**
 * A canvas as an image in which each cell is a block of pixels, since programs smooth images that they enlarge.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
function enlarged(canvas, width, height) {
  const large = document.createElement("canvas");
  [large.width, large.height] = [canvas.width, canvas.height].map((count, axis) => count * Math.max(1, Math.round((PNG_SCALE * (axis ? height : width)) / count)));
  const pen = large.getContext("2d");
  if (!pen) return canvas.toDataURL();
  pen.imageSmoothingEnabled = false;
  pen.drawImage(canvas, 0, 0, large.width, large.height);
  return large.toDataURL();
}

/**
 * A copy of an SVG element with the properties of the style sheet as attributes.
 * @param {SVGElement} element
 * @param {Record<string, number>} box
 */
function copiedSvg(element, box) {
  const copy = /** @type {SVGElement} */ (element.cloneNode(true));
  const pairs = [[element, copy], ...[...element.querySelectorAll("*")].map((child, i) => [child, copy.querySelectorAll("*")[i]])];
  for (const [from, to] of pairs) {
    const style = getComputedStyle(from);
    to.removeAttribute("class");
    to.removeAttribute("style");
    for (const name of ["stroke-width", "stroke-dasharray", "opacity", "font-size", "text-anchor", "stroke-linecap"]) {
      const value = style.getPropertyValue(name);
      if (value && value !== "none") to.setAttribute(name, value);
    }
    for (const name of ["fill", "stroke"]) for (const [key, value] of Object.entries(paintOf(name, style.getPropertyValue(name)))) to.setAttribute(key, String(value));
  }
  for (const [key, value] of Object.entries(box)) copy.setAttribute(key, String(value));
  if (!copy.hasAttribute("viewBox")) copy.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  return copy;
}

/**
 * Draw the lines of a text; a line that is clipped ends in an ellipsis.
 * @param {Text} text
 * @param {CSSStyleDeclaration} style
 * @param {Sheet} sheet
 */
function renderText(text, style, sheet) {
  const look = {
    "font-size": parseFloat(style.fontSize), "font-weight": style.fontWeight, ...paintOf("fill", style.color),
    ...(style.fontFamily === getComputedStyle(/** @type {Element} */ (text.parentElement?.closest(".heedful"))).fontFamily ? {} : { "font-family": style.fontFamily }),
  };
  const upright = style.writingMode.startsWith("vertical");
  for (const { line, box } of linesOf(text)) {
    const clip = sheet.clip;
    if (clip && (box.right <= clip.left || box.left >= clip.right || box.bottom <= clip.top + 1 || box.top >= clip.bottom - 1)) continue;
    const room = clip ? (upright ? Math.min(box.bottom, clip.bottom) - Math.max(box.top, clip.top) : clip.right - box.left) : Infinity;
    const long = upright ? box.height : box.width;
    const fittedLine = long > room + 1 ? `${line.slice(0, Math.max(1, Math.floor((line.length * room) / long) - 1))}…` : line;
    const { x, y, width, height } = placedAt(sheet, box);
    if (upright) {
      const end = clip ? Math.min(box.bottom, clip.bottom) - sheet.origin.top : y + height;
      const group = lettersAt(fittedLine, 0, 0, look);
      group.setAttribute("transform", `translate(${rounded(x + width / 2 + 0.34 * look["font-size"])} ${rounded(end)}) rotate(-90)`);
      sheet.group.append(group);
    } else sheet.group.append(lettersAt(fittedLine, x, rounded(y + height / 2 + 0.35 * look["font-size"]), look));
    extend(sheet, { right: Math.min(box.right, clip?.right ?? Infinity), bottom: Math.min(box.bottom, clip?.bottom ?? Infinity) });
  }
}

/**
 * The lines of a text node with their boxes.
 * @param {Text} text
 * @returns {{line: string, box: DOMRect}[]}
 */
function linesOf(text) {
  const range = document.createRange();
  range.selectNodeContents(text);
  const whole = [...range.getClientRects()];
  if (whole.length === 1) return [{ line: text.data, box: whole[0] }];
  /** @type {{line: string, box: DOMRect}[]} */
  const lines = [];
  for (const word of text.data.matchAll(/\S+\s*/gu)) {
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    const [box] = range.getClientRects();
    const last = lines.at(-1);
    if (!box) continue;
    if (last && Math.abs(last.box.top - box.top) < 2) {
      last.line += word[0];
      last.box = new DOMRect(last.box.left, last.box.top, box.right - last.box.left, last.box.height);
    } else lines.push({ line: word[0], box });
  }
  return lines;
}

/**
 * A line wrapped at words.
 * @param {string} line
 * @param {number} most letters of a line
 */
function folded(line, most) {
  const lines = [""];
  for (const word of line.split(" ")) {
    const last = lines[lines.length - 1];
    if (last && last.length + word.length >= most) lines.push(word);
    else lines[lines.length - 1] = last ? `${last} ${word}` : word;
  }
  return lines;
}

/**
 * An SVG text.
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {Record<string, string | number>} look attributes
 */
function lettersAt(text, x, y, look) {
  return svg("text", { x, y, ...look }, text.replace(/\s+/gu, " "));
}

/**
 * A CSS colour as SVG attributes that every program reads.
 * @param {string} what "fill" or "stroke"
 * @param {string} colour
 * @returns {Record<string, string | number>}
 */
function paintOf(what, colour) {
  if (!colour || colour === "none") return { [what]: "none" };
  if (colour.trim().startsWith("#")) return { [what]: colour.trim() };
  const [r, g, b, a = 1] = (colour.match(/[\d.]+(?:e-?\d+)?/gu) ?? ["0", "0", "0"]).map(Number);
  const large = colour.startsWith("color(") ? 255 : 1;
  if (!a) return { [what]: "none", [`${what}-opacity`]: 0 };
  return { [what]: hexOf(r * large, g * large, b * large), ...(a < 1 ? { [`${what}-opacity`]: rounded(a) } : {}) };
}

/**
 * A colour as #rrggbb.
 * @param {...number} levels from 0 to 255
 */
function hexOf(...levels) {
  return `#${levels.map((level) => Math.round(level).toString(16).padStart(2, "0")).join("")}`;
}

/**
 * A number with two decimals.
 * @param {number} value
 */
function rounded(value) {
  return Math.round(100 * value) / 100;
}
