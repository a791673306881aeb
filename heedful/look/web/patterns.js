// @ts-check
// Heads: the report of head_report.py, with the patterns of each head, its importance and the loss after pruning.

import { headColour } from "./tokens.js";
import { arrows, make, note, percent, plain, short } from "./parts.js";
import { lines } from "./plots.js";
import { savable } from "./save.js";

/** @typedef {import("./tokens.js").Context} Context */

/**
 * The view of the report on heads.
 * @param {Context} context
 * @returns {Promise<HTMLElement>}
 */
export async function headsView(context) {
  const report = await context.source.ask("heads");
  const names = Object.keys(report.patterns);
  const section = make("section", { class: "heads-view" });
  const detail = make("div", { class: "panel detail" });
  for (const part of new Set(report.heads.map((/** @type {any} */ head) => head.part))) {
    const heads = report.heads.filter((/** @type {any} */ head) => head.part === part);
    const across = 1 + Math.max(...heads.map((/** @type {any} */ head) => head.head));
    const grid = make("div", { class: "named", role: "group", "aria-label": `Heads of the ${part}` });
    grid.style.gridTemplateColumns = `auto repeat(${across}, minmax(4.6rem, 9rem))`;
    grid.append(make("span", { class: "corner" }));
    for (let head = 0; head < across; head++) grid.append(make("span", { class: "across" }, String(head)));
    for (const head of heads) {
      if (head.head === 0) grid.append(make("span", { class: "down" }, String(head.layer)));
      const share = head.patterns[head.name] ? percent(head.patterns[head.name].score) : "–";
      const cell = make(
        "button",
        {
          type: "button", class: "head", "aria-label": `layer ${head.layer}, head ${head.head}: ${plain(head.name)} ${share}`,
          onclick: () => detail.replaceChildren(...detailOf(context, report, head)),
          onfocus: () => detail.replaceChildren(...detailOf(context, report, head)),
        },
        make("b", {}, plain(head.name)), " ", make("small", {}, share),
      );
      cell.style.setProperty("--mine", `var(${headColour(Math.max(0, names.indexOf(head.name)))})`);
      if (head.name === "mixed" || head.name === "broad") cell.classList.add("pale");
      grid.append(cell);
    }
    arrows(grid, ".head", across);
    section.append(make("h2", {}, `${part}: layers down, heads across`), savable(make("div", {}, grid), `heads of the ${part}`));
  }
  section.append(make("div", { class: "beside" }, detail, legendOf(report)));
  detail.replaceChildren(...detailOf(context, report, report.heads[0]));
  if (report.price) {
    section.append(
      make(
        "div", { class: "panel" }, make("h2", {}, "The price of pruning"),
        lines(plain(report.price.measure, 60), [report.price.values], { across: "heads masked, the least important ones first", ticks: report.price.masked.map(String) }),
        note(plain(report.price.summary, 300)),
      ),
    );
  }
  return section;
}

/**
 * The details of one head.
 * @param {Context} context
 * @param {any} report
 * @param {any} head
 */
function detailOf(context, report, head) {
  const table = make("table", { class: "table" });
  const title = ["pattern", "share", "by chance", "lift", "z"];
  table.append(make("tr", {}, ...title.map((text, place) => make("th", { class: place ? "number" : "" }, text))));
  for (const [name, score] of Object.entries(head.patterns)) {
    table.append(
      make(
        "tr", { class: name === head.name ? "chosen" : "" },
        make("td", {}, name), make("td", { class: "number" }, percent(score.score)), make("td", { class: "number" }, percent(score.chance)),
        make("td", { class: "number" }, short(score.lift)), make("td", { class: "number" }, score.z ? short(score.z) : "–"),
      ),
    );
  }
  const { part, layer } = head;
  const canShow = context.look.views.some((view) => view.part === part) && context.source.keeps("weights", { side: context.state.side, part, layer, head: head.head });
  const look = make("button", { type: "button", onclick: () => context.set({ view: "head", part, layer, head: head.head, heads: [head.head] }) }, "See it in the text above");
  const elements = [make("h3", {}, `Layer ${head.layer}, head ${head.head}: ${head.name}`), table];
  if (head.importance !== undefined) {
    elements.push(note(`Importance (mean |gradient| of its gate): ${tiny(head.importance)}. Masked alone, the ${plain(report.measure, 80)} changes by ${tiny(head.effect)}.`));
  }
  if (canShow) elements.push(make("p", {}, look));
  return elements;
}

/**
 * A number with two significant digits.
 * @param {number} value
 */
function tiny(value) {
  return value === 0 ? "0" : value.toPrecision(2).replaceAll("-", "\u2212");
}

/**
 * The patterns with the strongest head of each.
 * @param {any} report
 */
function legendOf(report) {
  const list = make("dl", { class: "panel legend-of" });
  for (const [name, about] of Object.entries(report.patterns)) {
    const best = report.strongest?.find((/** @type {any} */ record) => record.name === name);
    const share = best?.patterns[name];
    const strongest = best ? `: strongest in layer ${best.layer}, head ${best.head}, ${percent(share.score)} (${percent(share.chance)} by chance)` : "";
    list.append(make("dt", {}, name), make("dd", {}, plain(String(about), 120) + strongest));
  }
  list.append(make("dt", {}, "mixed"), make("dd", {}, "none of these stands out"));
  return make("div", { class: "detail" }, list, note(plain(report.summary, 400)));
}
