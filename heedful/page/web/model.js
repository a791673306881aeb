// A model in WebAssembly: the rows of scores of one text.

// `data`: the serialized model; `ops_offset` and `num_ops`: where its ops are, and how many.
export async function openModel(code, data, { ops_offset, num_ops }) {
  const { instance } = await WebAssembly.instantiate(code);
  const { memory, reserve_model, reserve_input, run, rows, columns } = instance.exports;
  const model = reserve_model(data.length);
  new Uint8Array(memory.buffer, model, data.length).set(data);
  // `wanted`: the rows that a head of tokens scores; `most`: ops that are computed.
  return ({ ids, types }, wanted = [], most = num_ops) => {
    const count = ids.length;
    const input = reserve_input(2 * count + wanted.length);
    new Int32Array(memory.buffer, input, 2 * count + wanted.length).set([...ids, ...types, ...wanted]);
    const result = run(model, ops_offset, input, input + 4 * count, count, input + 8 * count, wanted.length, most);
    const width = columns();
    const scores = new Float32Array(memory.buffer, result, rows() * width).slice();
    if (!scores.every(Number.isFinite)) throw new Error("the scores are not finite: the model has wrong weights");
    return Array.from({ length: rows() }, (_, row) => scores.subarray(row * width, (row + 1) * width));
  };
}
