// A tokenizer with the same tokens as the `tokenizers` library: a text is normalised and split into words, and each word
// is split into tokens.
//
// A "piece" is a text as characters (code points), with the span of each character in the original text:
// {chars, starts, stops}.

const MARK = /\p{Mn}/u;
const COMBINING = /\p{M}/u;
const SPACE = /\p{White_Space}/u;
const WORD = /[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]/u;
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}]/u;
const OTHER = /[\p{Cc}\p{Cf}\p{Co}]/u;
const IDEOGRAPHS = [
  [0x4e00, 0x9fff], [0x3400, 0x4dbf], [0x20000, 0x2a6df], [0x2a700, 0x2b73f], [0x2b740, 0x2b81f], [0x2b920, 0x2ceaf],
  [0xf900, 0xfaff], [0x2f800, 0x2fa1f],
];
// a character and the characters after it that a normal form can join to it: marks, vowels and final consonants of
// Hangul, and the results of NFKC for compatibility letters and half-width characters
const CLUSTER = /[^][\u1160-\u11ff\u3133-\u3163\uff9e-\uffdc\p{M}]*/gu;

const pieceOf = (text) => {
  const chars = [...text];
  return { chars, starts: chars.map((_, i) => i), stops: chars.map((_, i) => i + 1) };
};
const slice = ({ chars, starts, stops }, from, to) => (
  { chars: chars.slice(from, to), starts: starts.slice(from, to), stops: stops.slice(from, to) }
);

// Replaces each character by the characters of a text, which get the span of the replaced one.
function replaceChars(piece, replacement) {
  const replaced = { chars: [], starts: [], stops: [] };
  piece.chars.forEach((char, i) => {
    for (const newChar of replacement(char)) {
      replaced.chars.push(newChar);
      replaced.starts.push(piece.starts[i]);
      replaced.stops.push(piece.stops[i]);
    }
  });
  return replaced;
}

// Replaces each group [from, to, text] of characters by the characters of its text. The i-th new character has the span
// of the i-th old one, or of the last old one if there are fewer.
function replaceGroups(piece, groups) {
  const replaced = { chars: [], starts: [], stops: [] };
  for (const [from, to, text] of groups) {
    [...text].forEach((char, i) => {
      const at = Math.min(from + i, to - 1);
      replaced.chars.push(char);
      replaced.starts.push(piece.starts[at]);
      replaced.stops.push(piece.stops[at]);
    });
  }
  return replaced;
}

// The groups into which a regular expression divides a piece: [from, to, whether it matches], in characters.
function groupsOf({ chars }, pattern) {
  const groups = [];
  const place = [];
  for (const [i, char] of chars.entries()) for (let unit = 0; unit < char.length; unit++) place.push(i);
  place.push(chars.length);
  let end = 0;
  for (const match of chars.join("").matchAll(pattern)) {
    const [from, to] = [place[match.index], place[match.index + match[0].length]];
    if (from === to) continue;
    if (from > end) groups.push([end, from, false]);
    groups.push([from, to, true]);
    end = to;
  }
  if (end < chars.length) groups.push([end, chars.length, false]);
  return groups;
}

// -- normalisers ------------------------------------------------------------------------------------------------------

// Normalises each character alone, or a cluster as one group if that gives another result.
const normalForm = (form) => (piece) => replaceGroups(piece, groupsOf(piece, CLUSTER).flatMap(([from, to]) => {
  const chars = piece.chars.slice(from, to);
  const whole = chars.join("").normalize(form);
  const alone = chars.map((char) => char.normalize(form));
  return alone.join("") === whole ? alone.map((text, i) => [from + i, from + i + 1, text]) : [[from, to, whole]];
}));
const without = (pattern) => (piece) => replaceChars(piece, (char) => (pattern.test(char) ? "" : char));
const lowercase = (piece) => replaceChars(piece, (char) => char.toLowerCase());

function isIdeograph(char) {
  const code = char.codePointAt(0);
  return IDEOGRAPHS.some(([first, last]) => first <= code && code <= last);
}

function cleanChar(char) {
  if (SPACE.test(char)) return " ";
  return char === "\ufffd" || OTHER.test(char) ? "" : char;
}

const bertNormalizer = ({ clean_text, handle_chinese_chars, strip_accents, lowercase: lower }) => {
  const steps = [];
  if (clean_text) steps.push((piece) => replaceChars(piece, cleanChar));
  if (handle_chinese_chars) steps.push((piece) => replaceChars(piece, (char) => (isIdeograph(char) ? ` ${char} ` : char)));
  if (strip_accents ?? lower) steps.push(normalForm("NFD"), without(MARK));
  if (lower) steps.push(lowercase);
  return inTurn(steps);
};

const inTurn = (steps) => (piece) => steps.reduce((result, step) => step(result), piece);
const escaped = (text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");

// Translations of patterns of tokenizer.json (Oniguruma's Ruby syntax) to JavaScript: character classes are those of
// Unicode, \A and \z are the ends of the text, ^ and $ those of a line, and only a line feed ends a line.
const TRANSLATIONS = {
  "\\s": "\\p{White_Space}", "\\S": "\\P{White_Space}", "\\d": "\\p{Nd}", "\\D": "\\P{Nd}",
  "\\A": "(?<![^])", "\\z": "(?![^])",
};
const TRANSLATIONS_OUTSIDE_CLASSES = { "^": "(?<![^\n])", $: "(?![^\n])", ".": "[^\n]" };

// tokenizer_state.py refuses other syntax that JavaScript interprets differently.
function regexOf({ String: text, Regex: source }) {
  if (text !== undefined) return new RegExp(escaped(text), "gu");
  let inClass = false;
  const translated = source.replace(/\\.|[[\]^$.]/gsu, (part) => {
    if (part === "[") inClass = true;
    if (part === "]") inClass = false;
    return TRANSLATIONS[part] ?? (inClass ? part : TRANSLATIONS_OUTSIDE_CLASSES[part] ?? part);
  });
  return new RegExp(translated, "gu");
}

// SentencePiece's cleaning for machine translation: most control characters are removed, and separators and characters
// of no width become a space.
const REMOVED_BY_NMT = /[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]/u;
const SPACE_OF_NMT = /[\t\n\f\r\u1680\u200b-\u200f\u2028\u2029\u2581\ufeff\ufffd]/u;
const nmt = (piece) => replaceChars(piece, (char) => {
  if (REMOVED_BY_NMT.test(char)) return "";
  return SPACE_OF_NMT.test(char) ? " " : char;
});

// Reads SentencePiece's table of replacements, which tokenizer.json has as base64: the size of a double-array trie
// (Darts) in bytes (uint32), the trie's units (uint32), and the replacements, each UTF-8 with a zero byte at its end.
// Integers are little-endian.
function replacementTable(base64) {
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const size = view.getUint32(0, true);
  const units = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
  const replacements = bytes.subarray(4 + size);
  const childrenOf = (unit) => (unit >>> 10) << ((unit & 0x200) >>> 6);

  // The replacement of the shortest prefix that is in the trie, which the library uses for the whole text, or undefined.
  return (text) => {
    let node = childrenOf(units[0]);
    for (const byte of utf8.encode(text)) {
      node ^= byte;
      const unit = units[node];
      if (byte === 0 || unit === undefined || ((unit & 0x800000ff) >>> 0) !== byte) return undefined;
      node ^= childrenOf(unit);
      if (unit & 0x100) { // a replacement ends here
        const start = units[node] & 0x7fffffff;
        return new TextDecoder().decode(replacements.subarray(start, replacements.indexOf(0, start)));
      }
    }
    return undefined;
  };
}

const MOST_CLUSTER_BYTES = 5; // longer clusters are replaced character by character

// Replaces each grapheme that is in the table, and each character of other graphemes.
function precompiled({ precompiled_charsmap: base64 }) {
  if (!base64) return (piece) => piece;
  const replacementOf = replacementTable(base64);
  const segmenter = new Intl.Segmenter("und", { granularity: "grapheme" });
  return (piece) => {
    const groups = [];
    let from = 0;
    for (const { segment } of segmenter.segment(piece.chars.join(""))) {
      const chars = [...segment];
      const whole = utf8.encode(segment).length <= MOST_CLUSTER_BYTES ? replacementOf(segment) : undefined;
      if (whole !== undefined) groups.push([from, from + chars.length, whole]);
      else chars.forEach((char, i) => groups.push([from + i, from + i + 1, replacementOf(char) ?? char]));
      from += chars.length;
    }
    return replaceGroups(piece, groups);
  };
}

const NORMALIZERS = {
  BertNormalizer: bertNormalizer,
  Lowercase: () => lowercase,
  NFC: () => normalForm("NFC"),
  NFD: () => normalForm("NFD"),
  NFKC: () => normalForm("NFKC"),
  NFKD: () => normalForm("NFKD"),
  Nmt: () => nmt,
  Precompiled: precompiled,
  StripAccents: () => without(COMBINING),
  Prepend: ({ prepend }) => (piece) => (
    piece.chars.length ? replaceGroups(piece, [[0, 1, prepend + piece.chars[0]], [1, piece.chars.length, piece.chars.slice(1).join("")]]) : piece
  ),
  Replace: ({ pattern, content }) => (piece) => replaceGroups(piece, groupsOf(piece, regexOf(pattern)).map( // the last span
    ([from, to, matches]) => (matches ? [to - 1, to, content] : [from, to, piece.chars.slice(from, to).join("")]),
  )),
  Strip: ({ strip_left, strip_right }) => (piece) => {
    let [from, to] = [0, piece.chars.length];
    while (strip_left && from < to && SPACE.test(piece.chars[from])) from++;
    while (strip_right && to > from && SPACE.test(piece.chars[to - 1])) to--;
    return slice(piece, from, to);
  },
};

// -- splitting into words: each function returns the pieces of a piece ---------------------------------------------------

// Splits a piece at the matches of a pattern. A match is removed, a separate piece, or joined with a neighbour.
function split(piece, pattern, behavior, invert = false) {
  const groups = groupsOf(piece, pattern).map(([from, to, matches]) => [from, to, matches !== invert]);
  const spans = [];
  let before; // whether the group before matched
  for (const [from, to, matches] of groups) {
    const joins = (behavior === "MergedWithPrevious" && matches && before === false) ||
      (behavior === "MergedWithNext" && !matches && before === true) || (behavior === "Contiguous" && matches === before);
    if (behavior === "Removed" && matches) {
      before = matches;
      continue;
    }
    if (joins) spans.at(-1)[1] = to;
    else spans.push([from, to]);
    before = matches;
  }
  return spans.map(([from, to]) => slice(piece, from, to));
}

// The character of each byte in byte-level vocabularies: the byte itself if it is printable, else one from U+0100 on.
const BYTE_CHARS = Array.from({ length: 256 }, (_, byte) => byte);
let next = 256;
for (const byte of BYTE_CHARS) {
  const printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte !== 173);
  BYTE_CHARS[byte] = String.fromCodePoint(printable ? byte : next++);
}
const BYTE_OF = new Map(BYTE_CHARS.map((char, byte) => [char, byte]));
const utf8 = new TextEncoder();
const GPT2 = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

const prefixed = (piece, prefix) => (
  piece.chars.length
    ? { chars: [prefix, ...piece.chars], starts: [piece.starts[0], ...piece.starts], stops: [piece.stops[0], ...piece.stops] }
    : piece
);

const byteLevel = ({ add_prefix_space, use_regex = true }) => (piece) => {
  const whole = add_prefix_space && piece.chars[0] !== " " ? prefixed(piece, " ") : piece;
  const words = use_regex ? split(whole, GPT2, "Isolated") : [whole];
  return words.map((word) => replaceChars(word, (char) => Array.from(utf8.encode(char), (byte) => BYTE_CHARS[byte])));
};

const metaspace = ({ replacement, prepend_scheme, split: splits = true }) => (piece) => {
  let marked = replaceChars(piece, (char) => (char === " " ? replacement : char));
  const first = prepend_scheme === "always" || (prepend_scheme === "first" && piece.starts[0] === 0);
  if (first && marked.chars[0] !== replacement) marked = prefixed(marked, replacement);
  return splits ? split(marked, new RegExp(escaped(replacement), "gu"), "MergedWithNext") : [marked];
};

const bertPreTokenizer = (piece) => split(piece, /\p{White_Space}/gu, "Removed").flatMap(
  (word) => split(word, new RegExp(PUNCTUATION.source, "gu"), "Isolated"),
);

const PRE_TOKENIZERS = {
  BertPreTokenizer: () => bertPreTokenizer,
  ByteLevel: byteLevel,
  Metaspace: metaspace,
  WhitespaceSplit: () => (piece) => split(piece, /\p{White_Space}/gu, "Removed"),
  Whitespace: () => (piece) => split(piece, new RegExp(`${WORD.source}+|(?:(?!${WORD.source})\\P{White_Space})+`, "gu"), "Removed", true),
  Punctuation: ({ behavior }) => (piece) => split(piece, new RegExp(PUNCTUATION.source, "gu"), behavior),
  Digits: ({ individual_digits }) => (piece) => split(piece, /\p{N}/gu, individual_digits ? "Isolated" : "Contiguous"),
  Split: ({ pattern, behavior, invert }) => (piece) => split(piece, regexOf(pattern), behavior, invert),
};

// -- models: each splits a word into tokens [id, from, to], in characters of the word --------------------------------------

function wordPiece({ vocab, unk_token, continuing_subword_prefix: prefix, max_input_chars_per_word: most }) {
  const ids = new Map(Object.entries(vocab));
  return ({ chars }) => {
    const unknown = [[ids.get(unk_token), 0, chars.length]];
    if (chars.length > most) return unknown;
    const tokens = [];
    for (let from = 0; from < chars.length;) {
      let to = chars.length;
      const name = () => (from ? prefix : "") + chars.slice(from, to).join("");
      while (to > from && !ids.has(name())) to--;
      if (to === from) return unknown;
      tokens.push([ids.get(name()), from, to]);
      from = to;
    }
    return tokens;
  };
}

function wordLevel({ vocab, unk_token }) {
  const ids = new Map(Object.entries(vocab));
  return ({ chars }) => {
    const id = ids.get(chars.join("")) ?? ids.get(unk_token);
    return id === undefined ? [] : [[id, 0, chars.length]];
  };
}

const byteName = (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;

// The tokens of a text that is not in the vocabulary: its bytes if the vocabulary has them, else the unknown token.
function unknownTokens(ids, unknown, byteFallback, text, from, to) {
  const bytes = byteFallback ? Array.from(utf8.encode(text), (byte) => ids.get(byteName(byte))) : [];
  if (bytes.length && bytes.every((id) => id !== undefined)) return bytes.map((id) => [id, from, to]);
  return unknown === undefined ? [] : [[unknown, from, to]];
}

const PAIRS = 2 ** 25; // more than there are tokens

function bpe({ vocab, merges, unk_token, fuse_unk, byte_fallback, ignore_merges }) {
  const ids = new Map(Object.entries(vocab));
  const unknown = ids.get(unk_token);
  const ranks = new Map(merges.map((merge, rank) => {
    const [left, right] = typeof merge === "string" ? merge.split(" ") : merge;
    return [ids.get(left) * PAIRS + ids.get(right), [rank, ids.get(left + right)]];
  }));
  return ({ chars }) => {
    const whole = ids.get(chars.join(""));
    if (ignore_merges && whole !== undefined) return [[whole, 0, chars.length]];
    const tokens = [];
    chars.forEach((char, i) => {
      const known = ids.get(char);
      const added = known === undefined ? unknownTokens(ids, unknown, byte_fallback, char, i, i + 1) : [[known, i, i + 1]];
      const last = tokens.at(-1);
      const fused = fuse_unk && known === undefined && added[0]?.[0] === unknown && last?.[0] === unknown && last.unknown;
      if (fused) last[2] = i + 1;
      else tokens.push(...added.map((token) => Object.assign(token, { unknown: known === undefined && token[0] === unknown })));
    });
    for (;;) {
      let best = [Infinity];
      let at = -1;
      for (let i = 0; i + 1 < tokens.length; i++) {
        const merge = ranks.get(tokens[i][0] * PAIRS + tokens[i + 1][0]);
        if (merge && merge[0] < best[0]) [best, at] = [merge, i];
      }
      if (at < 0) return tokens.map(([id, from, to]) => [id, from, to]);
      tokens.splice(at, 2, [best[1], tokens[at][1], tokens[at + 1][2]]);
    }
  };
}

const UNKNOWN_PENALTY = 10; // the score of an unknown token is that much below the smallest score

// The most likely tokens by their scores (Kudo 2018), the first ones among equals. Neighbouring unknown tokens are joined.
function unigram({ vocab, unk_id, byte_fallback }) {
  const ids = new Map(vocab.map(([name], id) => [name, id]));
  const longest = vocab.reduce((most, [name]) => Math.max(most, name.length), 0);
  const least = vocab.reduce((low, [, score]) => Math.min(low, score), Infinity) - UNKNOWN_PENALTY;
  return ({ chars }) => {
    const best = [{ score: 0 }];
    for (let from = 0; from < chars.length; from++) {
      let name = "";
      const offer = (to, id, score) => {
        const total = best[from].score + score;
        if (best[to] === undefined || total > best[to].score) best[to] = { score: total, from, id };
      };
      let alone = false;
      for (let to = from + 1; to <= chars.length && name.length <= longest; to++) {
        name += chars[to - 1];
        const id = ids.get(name);
        if (id === undefined) continue;
        offer(to, id, vocab[id][1]);
        alone ||= to === from + 1;
      }
      if (!alone) offer(from + 1, unk_id, least);
    }
    const spans = [];
    for (let to = chars.length; to > 0; to = best[to].from) {
      const { from, id } = best[to];
      if (id === unk_id && spans.at(-1)?.[0] === unk_id) spans.at(-1)[1] = from;
      else spans.push([id, from, to]);
    }
    return spans.reverse().flatMap(([id, from, to]) => (
      id === unk_id ? unknownTokens(ids, unk_id, byte_fallback, chars.slice(from, to).join(""), from, to) : [[id, from, to]]
    ));
  };
}

const MODELS = { BPE: bpe, Unigram: unigram, WordLevel: wordLevel, WordPiece: wordPiece };

// -- the tokenizer ----------------------------------------------------------------------------------------------------

// Splits a piece at the added tokens in its text. Returns pieces, and {id, start, stop, name} for added tokens, where
// `name` is the text of the token in the piece.
function addedTokens(tokens) {
  if (!tokens.length) return (piece) => [piece];
  const byName = new Map(tokens.map((token) => [token.content, token]));
  const names = [...byName.keys()].sort((a, b) => b.length - a.length).map(escaped);
  const pattern = new RegExp(names.join("|"), "gu");
  return (piece) => {
    const { chars, starts, stops } = piece;
    const parts = [];
    let end = 0;
    for (const [low, high, matches] of groupsOf(piece, pattern)) {
      if (!matches) continue;
      const token = byName.get(chars.slice(low, high).join(""));
      let [from, to] = [low, high];
      const inWord = (char) => char !== undefined && WORD.test(char);
      if (token.single_word && (inWord(chars[from - 1]) || inWord(chars[to]))) continue;
      while (token.lstrip && from > end && SPACE.test(chars[from - 1])) from--;
      while (token.rstrip && to < chars.length && SPACE.test(chars[to])) to++;
      if (from > end) parts.push(slice(piece, end, from));
      parts.push({ id: token.id, start: starts[from], stop: stops[to - 1], name: chars.slice(from, to).join("") });
      end = to;
    }
    if (end < chars.length) parts.push(slice(piece, end, chars.length));
    return parts;
  };
}

// The span of a byte-level token without the spaces at its ends.
function trimmed([start, stop], name, prefixSpace, first) {
  const chars = [...name];
  const spaces = (list) => {
    const count = list.findIndex((char) => char !== BYTE_CHARS[32] && !SPACE.test(char));
    return count < 0 ? list.length : count;
  };
  let before = spaces(chars);
  const after = spaces(chars.toReversed());
  if (before && prefixSpace && (first || start === 0)) before--;
  const from = Math.min(start + before, stop);
  return [from, after && stop >= after ? Math.max(stop - after, from) : stop];
}

// Builds a tokenizer from the result of tokenizer_state.py.
export function makeTokenizer(state) {
  const normalize = inTurn(state.normalizers.map((step) => NORMALIZERS[step.type](step)));
  const normalizedName = (token) => ({ ...token, content: normalize(pieceOf(token.content)).chars.join("") });
  const before = addedTokens(state.added.filter((token) => !token.normalized));
  const after = addedTokens(state.added.filter((token) => token.normalized).map(normalizedName));
  const splits = state.pre_tokenizers.map((step) => PRE_TOKENIZERS[step.type](step));
  const tokensOf = MODELS[state.model.type](state.model);
  const { vocab } = state.model;
  const names = new Map(Array.isArray(vocab) ? vocab.map(([name], id) => [id, name]) : Object.entries(vocab).map(([name, id]) => [id, name]));
  for (const { id, content } of state.added) names.set(id, content);

  // The tokens of a text: {id, offset, word}.
  function tokens(text) {
    const result = [];
    let word = 0;
    const add = (id, start, stop, name) => {
      const first = result.length === 0;
      const offset = state.trim ? trimmed([start, stop], name, state.trim.add_prefix_space, first) : [start, stop];
      result.push({ id, offset, word });
    };
    const normalizedParts = (part) => (part.chars ? after(normalize(part)) : [part]);
    for (const part of before(pieceOf(text)).flatMap(normalizedParts)) {
      if (!part.chars) {
        add(part.id, part.start, part.stop, part.name);
        word++;
        continue;
      }
      for (const piece of splits.reduce((pieces, step) => pieces.flatMap(step), [part])) {
        if (!piece.chars.length) continue;
        for (const [id, from, to] of tokensOf(piece)) add(id, piece.starts[from], piece.stops[to - 1], names.get(id));
        word++;
      }
    }
    return result;
  }

  // The tokens of a text or a pair, with special tokens around them.
  function encode(first, second) {
    const texts = [first, second].filter((text) => text !== undefined).map(tokens);
    const rows = state.templates[texts.length - 1].flatMap(({ special, segment, type }) => (
      special === undefined
        ? texts[segment].map((token) => ({ ...token, type, segment }))
        : [{ id: special, type, segment: null, offset: [0, 0], word: null }]
    ));
    return encodingOf(rows);
  }

  const name = (id) => names.get(id);
  const isOfBytes = (token) => state.decoder === "ByteLevel" && [...token].every((char) => BYTE_OF.has(char));
  const decoded = (token) => new TextDecoder().decode(new Uint8Array([...token].map((char) => BYTE_OF.get(char))));
  const text = (id) => {
    const token = names.get(id);
    if (isOfBytes(token)) return decoded(token).trim();
    return (state.decoder === "Metaspace" ? token.replaceAll("\u2581", " ") : token).trim();
  };
  // The name of a token with its bytes decoded if they are complete characters, and "\u2581" for a space.
  const readable = (id) => {
    const token = names.get(id);
    if (state.decoder !== "ByteLevel") return token;
    const whole = isOfBytes(token) ? decoded(token) : token;
    return !whole || whole.includes("\ufffd") ? token : whole.replaceAll(" ", "\u2581");
  };
  return { encode, name, readable, text };
}

// An encoding from its rows, one per token: columns of ids, types, segments, offsets and words. For `start`, see
// windows.js.
export function encodingOf(rows, more = {}) {
  const column = (name) => rows.map((row) => row[name]);
  return {
    rows, ids: column("id"), types: column("type"), segments: column("segment"), offsets: column("offset"),
    words: column("word"), start: 0, firstTextStart: 0, dropped: 0, ...more,
  };
}
