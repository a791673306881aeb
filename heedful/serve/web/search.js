// The search page: a query, and the documents that match it. Text that comes from the server or the user becomes text
// nodes, never HTML.
import { getJson, keyHeader } from "./client.js";
import { element } from "./rows.js";

const at = (id) => document.getElementById(id);
const EXCERPT = 320; // characters of a passage that are shown at first
const BEFORE = 60; // characters of an excerpt before its first word of the query
const NEAR = 20; // characters by which an excerpt is shorter, so that it begins and ends between words
const RETRY = 1_000; // milliseconds until the next request to a server that loads
const NO_RERANKER = "";
const indexes = new Map(); // /info of each index, by name
let search = new AbortController(); // aborts the current search

const headers = () => keyHeader(at("key").value);

function show(id, isShown) {
  at(id).closest("label").hidden = !isShown;
}

function say(text, isError = false) {
  at("status").textContent = text;
  at("status").className = isError ? "wrong" : "";
}

// Ask which indexes and rerankers are served, and search if the address has a query.
async function start() {
  try {
    const first = await getJson("/info", { headers: headers() });
    const infos = await Promise.all(
      first.models.map((name) => getJson(`/info?model=${encodeURIComponent(name)}`, { headers: headers() })),
    );
    for (const info of infos) if (info.index) indexes.set(info.model_id, info);
    const rerankers = infos.filter(({ routes }) => routes.includes("/rerank") && !routes.includes("/embed"));
    fillOptions("index", [...indexes.keys()].map((name) => [name, name]));
    fillOptions("reranker", [["no reranker", NO_RERANKER], ...rerankers.map(({ model_id: name }) => [name, name])]);
    show("index", indexes.size > 1);
    show("reranker", rerankers.length > 0);
    showIndex();
    readAddress();
  } catch (error) {
    at("facts").textContent = error.status === 401 ? "This server needs a key." : error.message;
    if (error.status === 401) show("key", true);
    if (error.status === 503) setTimeout(start, RETRY);
  }
}

function fillOptions(id, options) {
  at(id).replaceChildren(...options.map(([text, value]) => new Option(text, value)));
}

function showIndex() {
  const info = indexes.get(at("index").value);
  const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  at("facts").textContent = info
    ? `${info.model_id} · ${count(info.index.documents, "document")} · ${count(info.index.passages, "passage")}`
    : "This server has no index: start it with heedful serve INDEX.";
}

const FIELDS = ["query", "index", "method", "reranker", "count"];

// Write the search behind "#" in the address, which is not sent to the server, so that a link repeats the search.
function writeAddress() {
  const fields = new URLSearchParams(FIELDS.map((id) => [id, at(id).value]));
  if (location.hash !== `#${fields}`) history.pushState(null, "", `#${fields}`);
}

function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  for (const id of FIELDS) {
    const value = fields.get(id);
    const isOffered = !at(id).options || [...at(id).options].some((option) => option.value === value);
    if (value !== null && isOffered) at(id).value = value;
  }
  showIndex();
  if (fields.get("query")) searchIndex();
}

async function searchIndex() {
  search.abort();
  search = new AbortController();
  const { signal } = search;
  const reranker = at("reranker").value;
  const started = performance.now();
  say("Searching …");
  at("results").ariaBusy = "true";
  try {
    const hits = await getJson("/search", {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json" },
      signal,
      body: JSON.stringify({
        query: at("query").value,
        model: at("index").value || null,
        method: at("method").value,
        reranker: reranker === NO_RERANKER ? null : reranker,
        top_k: Number(at("count").value),
        highlight: true,
      }),
    });
    const milliseconds = Math.round(performance.now() - started);
    const documents = hits.length === 1 ? "1 document" : `${hits.length || "No"} documents`;
    const order = at("method").value + (reranker === NO_RERANKER ? "" : `, reranked by ${reranker}`);
    say(`${documents} · ${order} · ${milliseconds} ms`);
    at("results").replaceChildren(...hits.map(resultOf));
  } catch (error) {
    if (signal.aborted) return;
    say(error.message, true);
    at("results").replaceChildren();
    if (error.status === 401) show("key", true);
  }
  at("results").ariaBusy = "false";
}

function resultOf({ id, score, title, passage, start, highlights }) {
  const characters = [...passage]; // highlights count code points
  const titleEnd = title && start === 0 ? Math.min([...title].length, characters.length) : 0;
  const result = element("li");
  const heading = element("h2");
  const name = element("bdi");
  name.append(...(titleEnd ? marked(characters, highlights, 0, titleEnd) : [title || id]));
  heading.append(name);
  const source = element("p", undefined, "source");
  if (title) source.append(element("bdi", id), " · ");
  source.append(`score ${score.toFixed(4)}`);
  result.append(heading, source, ...passageOf(characters, highlights, titleEnd && titleEnd + 1));
  return result;
}

// Return the nodes of a passage behind its title: its text or, if it is long, an excerpt and a button that shows all.
function passageOf(characters, highlights, start) {
  if (start >= characters.length) return [];
  const text = element("p", undefined, "passage");
  text.dir = "auto";
  const whole = () => marked(characters, highlights, start, characters.length);
  const [from, to] = excerptOf(characters, highlights, start);
  const excerpt = () => [
    from > start ? "… " : "", ...marked(characters, highlights, from, to), to < characters.length ? " …" : "",
  ];
  text.append(...excerpt());
  if (from === start && to === characters.length) return [text];
  const button = element("button", "Show the whole passage");
  button.type = "button";
  button.ariaExpanded = "false";
  button.addEventListener("click", () => {
    const isExpanded = button.ariaExpanded === "true";
    text.replaceChildren(...(isExpanded ? excerpt() : whole()));
    button.ariaExpanded = String(!isExpanded);
    button.textContent = isExpanded ? "Show the whole passage" : "Show less";
  });
  return [text, button];
}

// Return the start and the end of the excerpt that has the most words of the query.
function excerptOf(characters, highlights, start) {
  const end = characters.length;
  if (end - start <= 1.25 * EXCERPT) return [start, end];
  const starts = highlights.map(([from]) => from).filter((from) => from >= start);
  const wordsFrom = (from) => starts.filter((word) => word >= from && word < from + EXCERPT - BEFORE).length;
  const best = starts.reduce((first, from) => (wordsFrom(from) > wordsFrom(first) ? from : first), starts[0] ?? start);
  const isSpace = (character) => /\s/u.test(character);
  let from = Math.max(start, Math.min(best - BEFORE, end - EXCERPT));
  if (from > start) from += Math.max(0, characters.slice(from - 1, from + NEAR).findIndex(isSpace));
  let to = Math.min(end, from + EXCERPT);
  if (to < end) to -= Math.max(0, characters.slice(to - NEAR, to + 1).reverse().findIndex(isSpace));
  return [from, to];
}

// Return a part of a text as nodes, in which the words of the query are marked.
function marked(characters, highlights, start, end) {
  const nodes = [];
  const text = (from, to) => characters.slice(from, to).join("");
  let position = start;
  for (const [from, to] of highlights) {
    if (from < position || to > end) continue;
    nodes.push(text(position, from), element("mark", text(from, to)));
    position = to;
  }
  return [...nodes, text(position, end)];
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  writeAddress();
  searchIndex();
});
for (const id of ["index", "method", "reranker", "count"]) {
  at(id).addEventListener("change", () => {
    showIndex();
    if (at("query").value.trim()) at("form").requestSubmit();
  });
}
at("key").addEventListener("change", start);
addEventListener("popstate", readAddress);
start();
