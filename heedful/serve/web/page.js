// The page of the server: the routes of its models, a request to send, and the answer. Text that comes from the server
// or the user becomes text nodes, never HTML.
import { getJson, keyHeader } from "./client.js";
import { element, rowOf } from "./rows.js";

const at = (id) => document.getElementById(id);
const MAX_SHOWN = 100_000; // characters of an answer
const RETRY = 1_000; // milliseconds until the next request to a server that loads
let paths = {}; // of the server's /openapi.json
let info; // /info of the model that is shown
let infoRequests = 0; // how many; only the reply to the last one is used

const headers = () => keyHeader(at("key").value);
const get = (path) => getJson(path, { headers: headers() });

function options(select, values) {
  select.replaceChildren(...values.map((value) => new Option(value, value)));
}

// Show the model of a name; "" loads the list of models and shows the first one.
async function showModel(name) {
  const request = ++infoRequests;
  try {
    if (!name) ({ paths } = await get("/openapi.json"));
    const reply = await get(name ? `/info?model=${encodeURIComponent(name)}` : "/info");
    if (request !== infoRequests) return;
    if (!name) options(at("model"), reply.models);
    showInfo(reply);
  } catch (error) {
    if (request !== infoRequests) return;
    const message = error.status === 401 ? "401 · give a key" : error.message;
    if (name) {
      say(message, true);
      at("model").value = info.model_id;
    } else {
      at("facts").textContent = message + (error.status === 503 ? "; asked again until it answers" : "");
      if (error.status === 503) setTimeout(() => request === infoRequests && showModel(""), RETRY);
    }
  }
}

function showInfo(newInfo) {
  info = newInfo;
  at("model").value = info.model_id;
  at("facts").textContent = [
    info.family, Object.keys(info.model_type)[0], `${info.parameters.toLocaleString("en")} parameters`, info.model_dtype,
  ].join(" · ");
  at("search").hidden = !info.routes.includes("/search");
  options(at("route"), info.routes);
  showRoute();
}

// The form of a route: its fields with their labels, a function that reads their values from an example, and one that
// writes the request's body. The field "lines" has one text on each line. Routes without a form have a field of JSON.
const oneText = (label) => ({
  fields: { text: label },
  read: ({ inputs }) => ({ text: Array.isArray(inputs) ? inputs[0] : inputs }),
  write: ({ text }) => ({ inputs: text }),
});
const manyTexts = (name) => ({
  fields: { lines: "Texts, one on each line" },
  read: (example) => ({ lines: [example[name]].flat() }),
  write: ({ lines }) => ({ [name]: lines }),
});
const FORMS = {
  "/predict": {
    fields: { text: "Text", second: "Second text, if the model reads pairs" },
    read: ({ inputs }) => ({ text: typeof inputs === "string" ? inputs : (inputs.text ?? [inputs].flat(2)[0]) }),
    write: ({ text, second }) => ({ inputs: second ? { text, text_pair: second } : text }),
  },
  "/zero-shot-classification": {
    fields: { text: "Text", lines: "Candidate labels, one on each line" },
    read: ({ inputs, parameters }) => ({ text: [inputs].flat()[0], lines: parameters.candidate_labels }),
    write: ({ text, lines }) => ({ inputs: text, parameters: { candidate_labels: lines } }),
  },
  "/token-classification": oneText("Text"),
  "/fill-mask": oneText("Text with the mask token"),
  "/tokenize": oneText("Text"),
  "/generate": {
    fields: { text: "Text" },
    read: ({ inputs }) => ({ text: [inputs].flat()[0] }),
    write: ({ text }) => ({ inputs: text, max_new_tokens: 64 }),
  },
  "/embed": manyTexts("inputs"),
  "/v1/embeddings": manyTexts("input"),
  "/rerank": {
    fields: { text: "Query", lines: "Texts, one on each line" },
    read: ({ query, texts }) => ({ text: query, lines: texts }),
    write: ({ text, lines }) => ({ query: text, texts: lines }),
  },
  "/search": {
    fields: { text: "Query" },
    read: ({ query }) => ({ text: query }),
    write: ({ text }) => ({ query: text, top_k: 10 }),
  },
  "/similarity": {
    fields: { text: "Sentence", lines: "Sentences to compare it with, one on each line" },
    read: ({ inputs }) => ({ text: inputs.source_sentence, lines: inputs.sentences }),
    write: ({ text, lines }) => ({ inputs: { source_sentence: text, sentences: lines } }),
  },
  "/question-answering": {
    fields: { text: "Question", second: "Text that has the answer" },
    read: ({ inputs }) => ({ text: [inputs].flat()[0].question, second: [inputs].flat()[0].context }),
    write: ({ text, second }) => ({ inputs: { question: text, context: second } }),
  },
  "/multiple-choice": {
    fields: { text: "Prompt", lines: "Choices, one on each line" },
    read: ({ inputs }) => ({ text: [inputs].flat()[0].prompt, lines: [inputs].flat()[0].choices }),
    write: ({ text, lines }) => ({ inputs: { prompt: text, choices: lines } }),
  },
  "/next-sentence": {
    fields: { text: "First text", second: "Text that may follow it" },
    read: ({ inputs }) => ({ text: inputs[0][0], second: inputs[0][1] }),
    write: ({ text, second }) => ({ inputs: [[text, second]] }),
  },
};

function showRoute() {
  const operation = paths[at("route").value]?.post;
  at("told").textContent = operation?.summary ?? "";
  const example = operation?.requestBody.content["application/json"].example ?? {};
  at("body").value = JSON.stringify(example, null, 2);
  const form = FORMS[at("route").value];
  at("raw").open = !form;
  at("inputs").replaceChildren(...(form ? fieldsOf(form, valuesOf(form, example)) : []));
  showRequest();
}

function valuesOf(form, example) {
  try {
    return form.read(example);
  } catch { // the example has another form, so the fields are empty
    return {};
  }
}

function fieldsOf(form, values) {
  return Object.entries(form.fields).map(([name, label]) => {
    const area = element("textarea");
    const value = values[name] ?? "";
    area.name = name;
    area.dir = "auto";
    area.rows = name === "lines" ? 4 : 2;
    area.value = Array.isArray(value) ? value.join("\n") : value;
    area.addEventListener("input", () => {
      at("body").value = JSON.stringify(form.write(fieldValues()), null, 2);
      showRequest();
    });
    area.addEventListener("keydown", askByKey);
    const field = element("label", label);
    field.append(area);
    return field;
  });
}

function fieldValues() {
  const areas = [...at("inputs").querySelectorAll("textarea")];
  return Object.fromEntries(areas.map(({ name, value }) => [
    name, name === "lines" ? value.split("\n").filter((line) => line.trim()) : value.trim(),
  ]));
}

// Show whether the request is read as one pair of texts, and the curl command that sends it.
function showRequest() {
  let inputs;
  try {
    ({ inputs } = JSON.parse(at("body").value));
  } catch {
    inputs = undefined;
  }
  const pairs = [inputs].flat().some((text) => text?.text_pair) ||
    (at("route").value === "/predict" && Array.isArray(inputs) && inputs.length === 2 && inputs.every((text) => typeof text === "string"));
  at("pairs").textContent = pairs ? "The two texts are read as one pair." : "";
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = at("key").value ? " -H 'authorization: Bearer KEY'" : "";
  at("curl").textContent =
    `curl ${quoted(location.origin + at("route").value)} -H 'content-type: application/json'${key} -d ${quoted(at("body").value)}`;
}

function askByKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
}

// Functions that return the groups of rows in which the answer to one text is shown. A row has a name, a kind or none,
// and a probability or another number.
const GROUPS = {
  "/predict": (scores, modelInfo) => {
    const kind = modelInfo.model_type.classifier.problem_type === "regression" ? "number" : "probability";
    return [scores.map(({ label, score }) => ({ name: label, [kind]: score }))];
  },
  "/zero-shot-classification": (scores) => [scores.map(({ label, score }) => ({ name: label, probability: score }))],
  "/similarity": (scores) => [scores.map((number, index) => ({ name: `sentence ${index + 1}`, number }))],
  "/generate": ({ text }) => [[{ name: text, probability: null }]],
  "/rerank": (ranks) => [ranks.map(({ index, text, score }) => ({ name: text ?? `text ${index + 1}`, number: score }))],
  "/search": (hits) => [hits.map(({ id, passage, score }) => ({ name: `${id}: ${passage}`, number: score }))],
  "/token-classification": ({ entities, words }) => [
    (entities.length ? entities : words).map(({ text, label, probability }) => (
      { name: text, kind: label ?? "", probability }
    )),
  ],
  "/question-answering": ({ answer, score, no_answer_score }) => [
    [{ name: answer || "(none)", number: answer ? score : no_answer_score }],
  ],
  "/multiple-choice": ({ choice, probability }) => [[{ name: choice, probability }]],
  "/next-sentence": ({ is_next_probability: probability }) => [
    [{ name: "the second text follows the first", probability }],
  ],
  "/fill-mask": ({ masks }) =>
    masks.map(({ candidates }) => candidates.map(({ text, token, probability }) => ({ name: text || token, probability }))),
};

const LISTS = ["/predict", "/zero-shot-classification", "/rerank", "/search", "/similarity"]; // routes that answer one text with a list

function draw(route, answer, modelInfo) {
  const isOfOneText = LISTS.includes(route) && !Array.isArray(answer[0]);
  const answers = route in GROUPS ? (Array.isArray(answer) && !isOfOneText ? answer : [answer]) : [];
  const table = element("table");
  for (const [text, answerOfText] of answers.entries()) {
    const groups = GROUPS[route](answerOfText, modelInfo);
    for (const [mask, rows] of groups.entries()) {
      const names = [answers.length > 1 && `text ${text + 1}`, groups.length > 1 && `mask ${mask + 1}`].filter(Boolean);
      const body = table.createTBody();
      if (names.length) {
        const heading = element("th", names.join(", "));
        heading.colSpan = 4;
        heading.scope = "rowgroup";
        body.insertRow().append(heading);
      }
      body.append(...rows.map(rowOf));
    }
  }
  at("shown").replaceChildren(...(table.rows.length ? [table] : []));
  at("whole").open = table.rows.length === 0;
}

function write(text) {
  const more = text.length - MAX_SHOWN;
  const end = more > 0 ? `\n… and ${more.toLocaleString("en")} more characters` : "";
  at("answer").textContent = text.slice(0, MAX_SHOWN) + end;
}

function say(text, wrong) {
  at("status").textContent = text;
  at("status").className = wrong ? "wrong" : "";
}

async function ask(event) {
  event?.preventDefault();
  const button = document.querySelector("button");
  if (button.ariaDisabled === "true") return; // `disabled` would take the focus away
  button.ariaDisabled = "true";
  say("…", false);
  const start = performance.now();
  try {
    const modelInfo = info; // another model may be shown when the answer comes
    const body = { ...JSON.parse(at("body").value), model: modelInfo.model_id };
    const route = at("route").value;
    const response = await fetch(route, {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    const answer = await response.json();
    say(`${response.status} · ${Math.round(performance.now() - start)} ms`, !response.ok);
    write(JSON.stringify(answer, null, 2));
    draw(response.ok ? route : "", answer, modelInfo);
    at("answer-section").hidden = false;
  } catch (error) {
    say(String(error.message), true);
    at("answer-section").hidden = true;
  } finally {
    button.ariaDisabled = "false";
  }
}

// Follow a link of the page with the key, which the browser would not send.
async function follow(event) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  try {
    const response = await fetch(event.currentTarget.href, { headers: headers() });
    const isJson = response.headers.get("content-type").startsWith("application/json");
    const text = isJson ? JSON.stringify(await response.json(), null, 2) : await response.text();
    say(response.status === 401 ? "401 · give a key above" : String(response.status), !response.ok);
    write(text);
    draw("", text);
    at("answer-section").hidden = false;
  } catch (error) {
    say(String(error.message), true);
    at("answer-section").hidden = true;
  }
}

at("form").addEventListener("submit", ask);
for (const link of document.querySelectorAll("nav a:not(#search)")) link.addEventListener("click", follow);
at("body").addEventListener("keydown", askByKey);
at("body").addEventListener("input", showRequest);
at("model").addEventListener("change", () => showModel(at("model").value));
at("route").addEventListener("change", showRoute);
at("key").addEventListener("change", () => showModel(""));
showModel("");
