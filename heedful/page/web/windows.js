// Splitting of long texts into windows of tokens, with the same results as tasks/answering.py and tokenizer/encoding.py.
import { encodingOf } from "./tokenizer.js";

const count = (whole, segment) => whole.segments.filter((of) => of === segment).length;
const specialTokens = (whole) => count(whole, null);

// The starts of windows of `room` tokens that cover `length` tokens.
function windowStarts(length, room, stride) {
  const starts = [0];
  while (starts.at(-1) + room < length) starts.push(starts.at(-1) + Math.min(room, stride));
  return starts;
}

// The encoding with only `room` tokens of one text, from its token `start`. All tokens outside that text remain.
export function windowAt(whole, segment, start, room) {
  const first = Math.max(0, whole.segments.indexOf(segment));
  const last = whole.segments.lastIndexOf(segment) + 1;
  const [low, high] = [Math.min(first + start, last), Math.min(first + start + room, last)];
  const rows = [...whole.rows.slice(0, first), ...whole.rows.slice(low, high), ...whole.rows.slice(last)];
  return encodingOf(rows, { start, firstTextStart: whole.firstTextStart });
}

const windowsOf = (whole, segment, length, room) => (
  windowStarts(length, room, Math.max(1, Math.floor(room / 2))).map((start) => windowAt(whole, segment, start, room))
);

function cutWindows(whole, segment, maxLength) {
  const length = count(whole, segment);
  return windowsOf(whole, segment, length, maxLength - (whole.ids.length - length));
}

// Splits an encoding of a text or a pair into windows of at most `maxLength` tokens, which overlap by half.
export function splitWindows(whole, maxLength) {
  if (whole.ids.length <= maxLength) return [whole];
  if (!whole.segments.includes(1)) return cutWindows(whole, 0, maxLength);
  const [room, second] = [maxLength - specialTokens(whole), count(whole, 1)];
  let parts = [whole];
  if (count(whole, 0) > Math.floor(room / 2)) {
    const roomOfSecond = Math.min(second, room - Math.floor(room / 2));
    parts = cutWindows(whole, 0, maxLength + second - roomOfSecond).map(
      (window) => ({ ...window, start: 0, firstTextStart: window.start }),
    );
  }
  return parts.flatMap((part) => (part.ids.length <= maxLength ? [part] : cutWindows(part, 1, maxLength)));
}

// Splits each encoding of a prompt and a choice into windows of both texts. All encodings get the same number of windows.
export function promptWindows(encodings, maxLength) {
  if (Math.max(...encodings.map(({ ids }) => ids.length)) <= maxLength) return encodings.map((encoding) => [encoding]);
  const [prompt, longest] = [0, 1].map((segment) => Math.max(...encodings.map((encoding) => count(encoding, segment))));
  const room = maxLength - specialTokens(encodings[0]);
  const choiceRoom = Math.min(longest, room - Math.min(prompt, Math.floor(room / 2)));
  const choices = encodings.map((encoding) => windowsOf(encoding, 1, count(encoding, 1), choiceRoom));
  const most = Math.max(...choices.map(({ length }) => length));
  return choices.map((own) => Array.from({ length: most }, (_, index) => own[index % own.length]).flatMap(
    (window) => windowsOf(window, 0, prompt, room - choiceRoom),
  ));
}

// For each token of a text, the window in which it has the most context, and its position there: [window index, position].
export function bestContext(windows, segment = 0) {
  const best = new Map();
  windows.forEach((window, windowIndex) => {
    const positions = window.segments.flatMap((of, position) => (of === segment ? [position] : []));
    positions.forEach((position, index) => {
      const context = Math.min(index, positions.length - 1 - index) + 0.01 * positions.length;
      const token = `${window.firstTextStart} ${window.start + index}`;
      if (context > (best.get(token)?.[0] ?? -1)) best.set(token, [context, [windowIndex, position]]);
    });
  });
  return [...best.values()].map(([, place]) => place);
}
