// @ts-check
// Heads: what each was found to do over many texts, how sure that is, and what masking it costs.

import { headColour } from "./tokens.js";
import { arrows, make, note, percent, plain, short } from "./parts.js";
import { lines } from "./plots.js";
import { savable } from "./save.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function headsView(context) {
  const report = await context.source.ask("heads");
  const names = Object.keys(report.patterns);
  const made = make("section", { class: "heads-view" });
  const detail = make("div", { class: "panel detail" });
  for (const part of new Set(report.heads.map((/** @type {any} */ each) => each.part))) {
    const heads = report.heads.filter((/** @type {any} */ each) => each.part === part);
    const across = 1 + Math.max(...heads.map((/** @type {any} */ each) => each.head));
    const grid = make("div", { class: "named", role: "group", "aria-label": `Heads of the ${part}` });
    grid.style.gridTemplateColumns = `auto repeat(${across}, minmax(4.6rem, 9rem))`;
    grid.append(make("span", { class: "corner" }));
    for (let head = 0; head < across; head++) grid.append(make("span", { class: "across" }, String(head)));
    for (const each of heads) {
      if (each.head === 0) grid.append(make("span", { class: "down" }, String(each.layer)));
      const cell = make(
        "button",
        {
          type: "button", class: "head", "aria-label": `layer ${each.layer}, head ${each.head}: ${each.name}`,
          onclick: () => detail.replaceChildren(...detailOf(context, report, each)),
          onfocus: () => detail.replaceChildren(...detailOf(context, report, each)),
        },
        make("b", {}, plain(each.name)),
        make("small", {}, each.patterns[each.name] ? percent(each.patterns[each.name].score) : "–"),
      );
      cell.style.setProperty("--mine", `var(${headColour(Math.max(0, names.indexOf(each.name)))})`);
      if (each.name === "mixed" || each.name === "broad") cell.classList.add("pale");
      grid.append(cell);
    }
    arrows(grid, ".head", across);
    made.append(make("h2", {}, `${part}: layers down, heads across`), savable(make("div", {}, grid), `heads of the ${part}`));
  }
  made.append(make("div", { class: "beside" }, detail, legendOf(report)));
  detail.replaceChildren(...detailOf(context, report, report.heads[0]));
  if (report.price) {
    made.append(
      make(
        "div", { class: "panel" }, make("h2", {}, "The price of pruning"),
        lines(plain(report.price.measure, 60), [report.price.values], { across: "heads masked, the least important ones first", ticks: report.price.masked.map(String) }),
        note(plain(report.price.summary, 300)),
      ),
    );
  }
  return made;
}

/**
 * @param {Context} context
 * @param {any} report
 * @param {any} head
 */
function detailOf(context, report, head) {
  const table = make("table", { class: "table" });
  const title = ["pattern", "share", "by chance", "lift", "z"];
  table.append(make("tr", {}, ...title.map((each, place) => make("th", { class: place ? "number" : "" }, each))));
  for (const [name, each] of Object.entries(head.patterns)) {
    table.append(
      make(
        "tr", { class: name === head.name ? "chosen" : "" },
        make("td", {}, name), make("td", { class: "number" }, percent(each.score)), make("td", { class: "number" }, percent(each.chance)),
        make("td", { class: "number" }, short(each.lift)), make("td", { class: "number" }, each.z ? short(each.z) : "–"),
      ),
    );
  }
  const { part, layer } = head;
  const kept = context.look.views.some((each) => each.part === part) && context.source.keeps("weights", { side: context.state.side, part, layer, head: head.head });
  const look = make("button", { type: "button", onclick: () => context.set({ view: "head", part, layer, head: head.head, heads: [head.head] }) }, "See it in the text above");
  const told = [make("h3", {}, `Layer ${head.layer}, head ${head.head}: ${head.name}`), table];
  if (head.importance !== undefined) {
    told.push(note(`Importance (mean |gradient| of its gate): ${tiny(head.importance)}. Masked alone, the ${plain(report.measure, 80)} changes by ${tiny(head.effect)}.`));
  }
  if (kept) told.push(make("p", {}, look));
  return told;
}

/**
 * Small differences in two digits.
 * @param {number} value
 */
function tiny(value) {
  return value === 0 ? "0" : value.toPrecision(2).replaceAll("-", "\u2212");
}

/** @param {any} report */
function legendOf(report) {
  const list = make("dl", { class: "panel legend-of" });
  for (const [name, about] of Object.entries(report.patterns)) {
    const best = report.strongest?.find((/** @type {any} */ each) => each.name === name);
    const share = best?.patterns[name];
    const told = best ? `: strongest in layer ${best.layer}, head ${best.head}, ${percent(share.score)} (${percent(share.chance)} by chance)` : "";
    list.append(make("dt", {}, name), make("dd", {}, plain(String(about), 120) + told));
  }
  list.append(make("dt", {}, "mixed"), make("dd", {}, "none of these stands out"));
  return make("div", { class: "detail" }, list, note(plain(report.summary, 400)));
}
