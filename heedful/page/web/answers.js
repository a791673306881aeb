// Converts the scores of a model to answers, for each kind of head, with the same results as tasks/*.py.
import { bestContext, promptWindows, splitWindows, windowAt } from "./windows.js";

const EDGE = /^[\p{White_Space}\x1c-\x1f]+|[\p{White_Space}\x1c-\x1f]+$/gu;

const softmax = (scores) => {
  const most = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = Array.from(scores, (score) => Math.exp(score - most));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / total);
};
const sigmoid = (score) => 1 / (1 + Math.exp(-score));
const meanOf = (rows) => Array.from(rows[0], (_, i) => rows.reduce((total, row) => total + row[i], 0) / rows.length);
const indexOfMost = (numbers) => numbers.reduce((best, number, i) => (number > numbers[best] ? i : best), 0);
const named = (names, values) => Object.fromEntries(names.map((name, i) => [name, values[i]]));

// A span of a text without the white space at its ends; `chars` are the characters of the text.
function stripSpan(chars, start, stop) {
  const part = chars.slice(start, stop).join("");
  const stripped = part.replace(EDGE, "");
  const first = start + (stripped ? [...part.slice(0, part.indexOf(stripped))].length : 0);
  return [first, first + [...stripped].length];
}

// For each window, the positions in it, from a list of [window index, position].
function byWindow(places, windows) {
  return windows.map((_, index) => places.filter(([window]) => window === index).map(([, position]) => position));
}
const countScored = (positions) => positions.filter(({ length }) => length).length;

// -- classification and regression ----------------------------------------------------------------------------------------

const THRESHOLD = 0.5; // minimum probability of a predicted label of a multi-label model, if it was not tuned

function classify({ about, tokenizer, score }, { text, second }) {
  const windows = splitWindows(tokenizer.encode(text, second), about.max_length);
  const scores = windows.map((window) => score(window)[0]);
  const { labels, thresholds, problem_type: problem } = about;
  if (problem === "regression") {
    const values = about.score_activation === "sigmoid" ? scores.map((row) => Array.from(row, sigmoid)) : scores;
    return { values: named(labels, meanOf(values)), windows: windows.length };
  }
  if (problem === "multi_label_classification") {
    const probabilities = meanOf(scores.map((row) => Array.from(row, sigmoid)));
    const chosen = labels.filter((label, i) => probabilities[i] >= (thresholds[label] ?? THRESHOLD));
    return { labels: chosen, probabilities: named(labels, probabilities), windows: windows.length };
  }
  const probabilities = meanOf(scores.map(softmax));
  const best = indexOfMost(probabilities);
  return {
    label: labels[best], probability: probabilities[best], probabilities: named(labels, probabilities), windows: windows.length,
  };
}

// -- tags -----------------------------------------------------------------------------------------------------------------

const BEGIN = ["B", "S", "U"];
const INSIDE = ["I", "E", "L", "M"];
const OPEN = ["B", "I", "M"];

function tag({ about, tokenizer, score }, { text }) {
  const chars = [...text];
  const windows = splitWindows(tokenizer.encode(text), about.max_length);
  const firstPieces = new Map();
  for (const [number, position] of bestContext(windows)) {
    const word = windows[number].words[position];
    if (!firstPieces.has(word)) firstPieces.set(word, [number, position]);
  }
  const labels = new Map();
  const spans = new Map();
  const scored = byWindow([...firstPieces.values()], windows);
  scored.forEach((positions, number) => {
    const rows = positions.length ? score(windows[number], positions) : [];
    rows.forEach((row, i) => {
      const probabilities = softmax(row);
      const best = indexOfMost(probabilities);
      labels.set(windows[number].words[positions[i]], [about.labels[best], probabilities[best]]);
    });
    windows[number].rows.forEach(({ word, offset: [start, stop] }) => {
      if (word === null) return;
      const [low, high] = spans.get(word) ?? [start, stop];
      spans.set(word, [Math.min(low, start), Math.max(high, stop)]);
    });
  });
  const nothing = [about.labels.includes("O") ? "O" : null, null];
  const words = [...spans.keys()].sort((a, b) => a - b).map((number) => {
    const [start, end] = stripSpan(chars, ...spans.get(number));
    const [label, probability] = labels.get(number) ?? nothing;
    return { text: chars.slice(start, end).join(""), label, probability, start, end };
  });
  return { words, entities: entities(chars, words), windows: countScored(scored) };
}

// Joins neighbouring words of one type into entities, as conlleval does.
function entities(chars, words) {
  const groups = [];
  let previous = "";
  for (const word of words) {
    const label = word.label ?? "O";
    const dash = label.indexOf("-");
    const [mark, kind] = dash < 0 ? ["", ""] : [label.slice(0, dash), label.slice(dash + 1)];
    if (INSIDE.includes(mark) && kind === previous) groups.at(-1).push(word);
    else if (BEGIN.includes(mark) || INSIDE.includes(mark)) groups.push([word]);
    previous = OPEN.includes(mark) ? kind : "";
  }
  return groups.map((group) => {
    const { start, label } = group[0];
    const { end } = group.at(-1);
    const probability = group.reduce((total, word) => total + word.probability, 0) / group.length;
    return { label: label.slice(label.indexOf("-") + 1), text: chars.slice(start, end).join(""), start, end, probability };
  });
}

// -- question answering ---------------------------------------------------------------------------------------------------

function answerQuestion({ about, tokenizer, score }, { question, context }) {
  const windows = splitWindows(tokenizer.encode(question, context), about.max_length);
  const scores = windows.map((window) => score(window, window.ids.map((_, position) => position)));
  let best;
  byWindow(bestContext(windows, 1), windows).forEach((positions, number) => {
    const last = windows[number].segments.lastIndexOf(1);
    for (const start of positions) {
      for (let stop = start; stop <= Math.min(last, start + about.max_answer_tokens - 1); stop++) {
        const sum = Math.fround(scores[number][start][0] + scores[number][stop][1]);
        if (best === undefined || sum > best.score) best = { score: sum, window: windows[number], start, stop };
      }
    }
  });
  const answer = { answer: "", start: 0, end: 0, score: null };
  if (best) {
    const chars = [...context];
    const [start, end] = stripSpan(chars, best.window.offsets[best.start][0], best.window.offsets[best.stop][1]);
    Object.assign(answer, { answer: chars.slice(start, end).join(""), start, end, score: best.score });
  }
  const none = scores.map((rows) => rows.at(about.no_answer_row)).map(([start, stop]) => start + stop);
  Object.assign(answer, { no_answer_score: Math.min(...none), windows: windows.length });
  if (about.thresholds.no_answer === undefined) return answer;
  answer.best_answer = answer.answer;
  if (answer.score === null || answer.no_answer_score - answer.score > about.thresholds.no_answer) {
    Object.assign(answer, { answer: "", start: 0, end: 0 });
  }
  return answer;
}

// -- other heads ----------------------------------------------------------------------------------------------------------

function choose({ about, tokenizer, score }, { prompt, choices }) {
  const windows = promptWindows(choices.map((choice) => tokenizer.encode(prompt, choice)), about.max_length);
  const scores = windows.map((own) => own.map((window) => score(window)[0][0]));
  const probabilities = meanOf(scores[0].map((_, window) => softmax(scores.map((row) => row[window]))));
  const index = indexOfMost(probabilities);
  return { choice: choices[index], index, probability: probabilities[index], probabilities, windows: scores[0].length };
}

export function vectorOf({ about, tokenizer, score }, text) {
  const whole = tokenizer.encode(about.prompt + text);
  const room = about.max_length - whole.segments.filter((segment) => segment === null).length;
  return score(windowAt(whole, 0, 0, room))[0].slice(0, about.dimensions ?? undefined);
}

export function cosine(a, b) {
  const dot = (x, y) => x.reduce((total, number, i) => total + number * y[i], 0);
  return Math.min(1, Math.max(-1, dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b)))); // rounding may exceed 1
}

function compare(page, { text, lines }) {
  const [first, ...others] = [text, ...lines].map((line) => vectorOf(page, line));
  return { similarities: others.map((other) => cosine(Array.from(first), Array.from(other))) };
}

const LISTED = 5; // candidates of a mask, if `about.top_k` is not set

// The ids with the `listed` largest probabilities among the ids that pass a test. There may be more scores than tokens.
function mostLikely(probabilities, listed, passes) {
  const best = [];
  probabilities.forEach((probability, id) => {
    if ((best.length === listed && probability <= probabilities[best[listed - 1]]) || !passes(id)) return;
    const place = best.findIndex((other) => probabilities[other] < probability);
    best.splice(place < 0 ? best.length : place, 0, id);
    best.length = Math.min(best.length, listed);
  });
  return best;
}

function fillMasks({ about, tokenizer, score }, { text }) {
  const windows = splitWindows(tokenizer.encode(text), about.max_length);
  const places = bestContext(windows).filter(([number, position]) => windows[number].ids[position] === about.mask);
  const scored = byWindow(places, windows);
  const masks = scored.flatMap((positions, number) => {
    const rows = positions.length ? score(windows[number], positions) : [];
    return rows.map((row, i) => {
      const probabilities = softmax(row);
      const best = mostLikely(probabilities, about.top_k ?? LISTED, (id) => tokenizer.name(id) !== undefined);
      const [start, end] = windows[number].offsets[positions[i]];
      return { start, end, candidates: best.map((id) => (
        { token: tokenizer.name(id), text: tokenizer.text(id), probability: probabilities[id] }
      )) };
    });
  });
  const note = masks.length ? {} : { note: `nothing to fill in: write ${about.mask_name} where a token is wanted` };
  return { masks: masks.sort((a, b) => a.start - b.start), windows: countScored(scored), ...note };
}

// The function of each kind of head. It takes {about, tokenizer, score} and the values of the form.
export const ANSWERS = {
  sequence_classification: classify, token_classification: tag, question_answering: answerQuestion,
  multiple_choice: choose, embedding: compare, masked_lm: fillMasks,
};
