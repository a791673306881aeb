// A model in WebAssembly: the rows of scores of one text, and what its blocks computed.

const POINTERS = ["input", "qkv", "joined", "attended", "middle", "inner", "mlp", "output", "attention"]; // BlockTrace
const PARTS = ["tokens", "positions", "types"]; // of the embedding

// `data`: the serialized model; `ops_offset` and `num_ops`: where its ops are, and how many. For traces, `encoder`: the
// ops of the encoder alone, and its shape.
export async function openModel(code, data, { ops_offset, num_ops, encoder }) {
  const { instance } = await WebAssembly.instantiate(code);
  const { memory, reserve_model, reserve_input, run, rows, columns, scores } = instance.exports;
  const model = reserve_model(data.length);
  new Uint8Array(memory.buffer, model, data.length).set(data);
  const words = (address, length) => new Int32Array(memory.buffer, address, length);
  const floats = (address, length) => new Float32Array(memory.buffer, address, length);
  let traced = {}; // what the memory holds, until the next run

  // Runs at most `most` ops. `gates`: a factor for each head of each block; `room`: words for a trace.
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

  // `wanted`: the rows that a head of tokens scores.
  function score(encoding, wanted = [], most = num_ops, gates = null) {
    const { result } = compute(encoding, wanted, most, gates, 0);
    const width = columns();
    const all = floats(result, rows() * width).slice();
    if (!all.every(Number.isFinite)) throw new Error("the scores are not finite: the model has wrong weights");
    return Array.from({ length: rows() }, (_, row) => all.subarray(row * width, (row + 1) * width));
  }

  // What the encoder computes for a text: copies of rows, as flat arrays. It may be asked until the model is run again.
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
      // the vectors of "tokens", "positions" or "types" that are added; null: the model has none
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

// The bytes of an element: base64 of what zlib compressed. The element is removed.
export async function unpackElement(id) {
  const element = document.getElementById(id);
  const text = atob(element.textContent);
  element.remove();
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
