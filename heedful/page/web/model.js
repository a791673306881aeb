// A model in WebAssembly: the scores of one text, and a trace of the vectors that its blocks compute.

const POINTERS = ["input", "qkv", "joined", "attended", "middle", "inner", "mlp", "output", "attention"]; // BlockTrace
const PARTS = ["tokens", "positions", "types"]; // parts of the embedding

// Opens a serialized model.
// * code: the bytes of forward.wasm
// * data: the model, from serialize.py
// * ops_offset, num_ops: offset of its ops in `data`, and their number
// * encoder: for traces, the number of ops and the shape of the encoder
export async function openModel(code, data, { ops_offset, num_ops, encoder }) {
  const { instance } = await WebAssembly.instantiate(code);
  const { memory, reserve_model, reserve_input, run, rows, columns, scores } = instance.exports;
  const model = reserve_model(data.length);
  new Uint8Array(memory.buffer, model, data.length).set(data);
  const words = (address, length) => new Int32Array(memory.buffer, address, length);
  const floats = (address, length) => new Float32Array(memory.buffer, address, length);
  let traced = {}; // the trace that the memory holds until the next run

  // Runs at most `most` ops.
  // * wanted: indices of the tokens that the head scores
  // * gates: a factor for each head of each block, or null
  // * room: number of words to reserve for a trace
  function compute({ ids, types }, wanted, most, gates, room) {
    traced = {};
    const count = ids.length;
    const numbers = [...ids, ...types, ...wanted, ...Array(room).fill(0)];
    const input = reserve_input(numbers.length + (gates?.length ?? 0));
    words(input, numbers.length).set(numbers);
    const table = input + 4 * (2 * count + wanted.length);
    const factors = gates ? input + 4 * numbers.length : 0;
    if (gates) floats(factors, gates.length).set(gates);
    const [embedded, blocks] = room ? [table, table + 4 * PARTS.length] : [0, 0];
    const result = run(
      model, ops_offset, input, input + 4 * count, count, input + 8 * count, wanted.length, most, factors, embedded, blocks,
    );
    return { table, result };
  }

  // The scores of a text, an array for each scored item. A head of tokens scores the tokens with the indices `wanted`.
  function score(encoding, wanted = [], most = num_ops, gates = null) {
    const { result } = compute(encoding, wanted, most, gates, 0);
    const width = columns();
    const all = floats(result, rows() * width).slice();
    if (!all.every(Number.isFinite)) throw new Error("the scores are not finite: the model has wrong weights");
    return Array.from({ length: rows() }, (_, row) => all.subarray(row * width, (row + 1) * width));
  }

  // A reader of the vectors that the encoder computes for a text. Its methods return copies as flat arrays, and can be
  // called until the model runs again.
  function trace(encoding) {
    if (traced.encoding === encoding) return traced.reader;
    const { layers, width, heads, kv_heads, head_width, inner_width, embedding_width } = encoder;
    const { table, result } = compute(encoding, [], encoder.num_ops, null, PARTS.length + POINTERS.length * layers);
    const count = encoding.ids.length;
    const pointers = words(table, PARTS.length + POINTERS.length * layers).slice();
    const widths = { qkv: (heads + 2 * kv_heads) * head_width, joined: heads * head_width, inner: inner_width };
    const last = floats(result, count * width).slice();
    if (!last.every(Number.isFinite)) throw new Error("the hidden states are not finite: the model has wrong weights");
    const reader = {
      last,
      block: (layer, name) => {
        const address = pointers[PARTS.length + layer * POINTERS.length + POINTERS.indexOf(name)];
        return floats(address, count * (widths[name] ?? width)).slice();
      },
      scores: (layer, head) => {
        const block = table + 4 * (PARTS.length + layer * POINTERS.length);
        return floats(scores(block, head, count), count * count).slice();
      },
      // the embeddings of "tokens", "positions" or "types", or null if the model has none
      embedded: (part) => {
        const address = pointers[PARTS.indexOf(part)];
        return address ? floats(address, count * embedding_width).slice() : null;
      },
    };
    traced = { encoding, reader };
    return reader;
  }

  return { score, trace };
}

// Removes an element whose text is base64 of zlib-compressed bytes, and returns these bytes.
export async function unpackElement(id) {
  const element = document.getElementById(id);
  const text = atob(element.textContent);
  element.remove();
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
