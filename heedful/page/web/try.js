// The script of an exported page: a form for the model in it, and the model's answers as rows of a table. Every text
// from outside becomes a text node.
import { ANSWERS } from "./answers.js";
import { openModel, unpackElement } from "./model.js";
import { element, rowOf } from "./rows.js";
import { makeTokenizer } from "./tokenizer.js";

const at = (id) => document.getElementById(id);
const lines = (label) => ({ lines: `${label}, one on each line` });
const pairText = ({ pairs }) => (pairs === false ? {} : { second: pairs ? "Second text" : "Second text, if the model reads pairs" });

// For each kind of head: the names and labels of the form's fields.
const FIELDS = {
  sequence_classification: (about) => ({ text: "Text", ...pairText(about) }),
  token_classification: () => ({ text: "Text" }),
  question_answering: () => ({ question: "Question", context: "Text that has the answer" }),
  multiple_choice: () => ({ prompt: "Prompt", ...lines("Choices") }),
  embedding: () => ({ text: "Sentence", ...lines("Sentences to compare it with") }),
  masked_lm: ({ mask_name }) => ({ text: `Text with ${mask_name}` }),
};

const listOf = (values, key) => Object.entries(values).map(([name, value]) => ({ name, [key]: value }));
const highest = (key) => (a, b) => b[key] - a[key];

// For each kind of head: converts an answer to groups of rows.
const GROUPS = {
  sequence_classification: ({ values, probabilities }) => (
    [values ? listOf(values, "number") : listOf(probabilities, "probability").sort(highest("probability"))]
  ),
  token_classification: ({ entities, words }) => [(entities.length ? entities : words).map(
    ({ text, label, probability }) => ({ name: text, kind: label ?? "", probability }),
  )],
  question_answering: ({ answer, score, no_answer_score }) => (
    [[{ name: answer || "(none)", number: answer ? score : no_answer_score }]]
  ),
  multiple_choice: ({ probabilities }, { choices }) => [
    choices.map((name, i) => ({ name, probability: probabilities[i] })).sort(highest("probability")),
  ],
  embedding: ({ similarities }, input) => [
    input.lines.map((name, i) => ({ name, number: similarities[i] })).sort(highest("number")),
  ],
  masked_lm: ({ masks }) => masks.map(
    ({ candidates }) => candidates.map(({ text, token, probability }) => ({ name: text || token, probability })),
  ),
};

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").className = wrong ? "wrong" : "";
}

function showForm(about, ask) {
  at("inputs").replaceChildren(...Object.entries(FIELDS[about.head](about)).map(([name, label]) => {
    const area = element("textarea");
    Object.assign(area, { name, dir: "auto", rows: ["lines", "context"].includes(name) ? 4 : 2 });
    area.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && ask(event));
    const field = element("label", label);
    field.append(area);
    return field;
  }));
}

// The values of the form, as the functions in `ANSWERS` take them.
function inputOf() {
  const input = {};
  for (const { name, value } of at("inputs").querySelectorAll("textarea")) {
    if (name === "lines") input.lines = value.split("\n").filter((line) => line.trim());
    else if (name !== "second" || value.trim()) input[name] = value.trim();
  }
  if ("prompt" in input) input.choices = input.lines;
  if (input.lines?.length === 0) throw new Error("write at least one line");
  return input;
}

function show(head, answer, input) {
  const table = element("table");
  table.setAttribute("aria-labelledby", "answer-heading");
  const groups = GROUPS[head](answer, input);
  groups.forEach((rows, index) => {
    const body = table.createTBody();
    if (groups.length > 1) {
      const heading = element("th", `mask ${index + 1}`);
      Object.assign(heading, { colSpan: 4, scope: "rowgroup" });
      body.insertRow().append(heading);
    }
    body.append(...rows.map(rowOf));
  });
  at("answer-section").hidden = false; // first of all, since screen readers do not announce changes in a hidden region
  at("shown").replaceChildren(...(table.rows.length ? [table] : [element("p", answer.note ?? "(nothing)")]));
  at("answer").textContent = JSON.stringify(answer, null, 2);
}

export async function startPage() {
  try {
    const [about, code, weights] = await Promise.all(["about", "code", "weights"].map(unpackElement));
    const facts = JSON.parse(new TextDecoder().decode(about));
    const { score } = await openModel(code, weights, facts);
    const page = { about: facts, tokenizer: makeTokenizer(facts.tokenizer), score };
    const ask = (event) => {
      event.preventDefault();
      try {
        const start = performance.now();
        const input = inputOf();
        const answer = ANSWERS[facts.head](page, input);
        const milliseconds = performance.now() - start;
        show(facts.head, answer, input);
        say(`${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`);
      } catch (error) {
        say(error.message, true);
        at("answer-section").hidden = true;
      }
    };
    showForm(facts, ask);
    at("form").addEventListener("submit", ask);
    say("ready");
  } catch (error) {
    say(`this browser cannot run the model: ${error.message}`, true);
  }
}
