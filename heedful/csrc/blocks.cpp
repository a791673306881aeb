// A post-norm encoder block for inference, in float32 or bfloat16: y = norm(x + attention(x)), z = norm(y + mlp(y)).
// For a short text, one call from Python instead of seven saves time. For many rows, a thread computes all operations
// after the attention for some rows while they are in its cache.
#include <type_traits>

#include "vectors.h"

extern "C" {
void heedful_linear(const void*, int64_t, int64_t, const uint32_t*, int64_t, int64_t, const float*, int, int, int,
                    void*, int);
void heedful_round_rows(const void*, int64_t, int64_t, int64_t, int, uint8_t*, float*, int);
void heedful_linear8(const uint8_t*, const float*, int64_t, const uint32_t*, int64_t, int64_t, const float*,
                     const float*, const float*, int, int, void*, int);
void heedful_add_norm(int64_t, int64_t, float, const float*, const float*, double, uint64_t, const void*, int,
                      const void*, int, void*, int, float*, float*, int);
void heedful_attention(int64_t, int64_t, int64_t, int64_t, const int64_t*, const void*, int64_t, const void*, int64_t,
                       const void*, int64_t, float, int, int64_t, double, uint64_t, int, void*, int64_t, float*, int);
}

// The caller describes a block by these structs; infer/tuning/fused_block.py has the same fields in the same order.

struct Linear {  // inputs have `depth` elements, outputs `columns`
    const uint32_t* panels;             // weight, packed by heedful_pack or heedful_pack8
    const float *bias, *scales, *sums;  // scales and sums of the columns of an int8 weight, otherwise null
    int64_t depth, columns, gelu;       // gelu: 1 if GELU is applied to the output
};

struct Norm {
    const float *gain, *bias;
    double eps;
};

struct Block {
    Linear qkv, out, up, down;        // attention's projections, and the layers of the MLP
    Norm attention_norm, mlp_norm;    // after x + attention(x), and after y + mlp(y)
    int64_t heads, causal;            // causal: 1 if a row attends to no later row
    double scale;                     // factor of q k
};

// T is float, or uint16_t for bfloat16
template <class T> static constexpr int HALF = std::is_same_v<T, uint16_t>;

// computes y [rows, columns] from x [rows, depth]; for an int8 weight, `space` has room for x in uint8 and its scales
template <class T>
static void apply(const Linear& l, const T* x, int64_t rows, T* y, char* space, int threads) {
    int gelu = (int)l.gelu;
    if (!l.scales)
        return heedful_linear(x, l.depth, rows, l.panels, l.depth, l.columns, l.bias, gelu, HALF<T>, !HALF<T>, y,
                              threads);
    float* scales = (float*)space;
    uint8_t* quantized = (uint8_t*)(scales + 2 * rows);
    heedful_round_rows(x, l.depth, rows, l.depth, HALF<T>, quantized, scales, threads);
    heedful_linear8(quantized, scales, rows, l.panels, l.depth, l.columns, l.scales, l.sums, l.bias, gelu, HALF<T>, y,
                    threads);
}

// z = norm(x + y), [rows, width] each
template <class T>
static void add_norm(const Norm& n, const T* x, const T* y, int64_t rows, int64_t width, T* z, int threads) {
    int half = HALF<T>;
    heedful_add_norm(rows, width, (float)n.eps, n.gain, n.bias, 0, 0, x, half, y, half, z, half, nullptr, nullptr,
                     threads);
}

static constexpr int64_t FEW_ROWS = 512;   // up to this many rows, all threads compute each operation together
static constexpr int64_t CHUNK_ROWS = 96;  // with more rows, a thread computes chunks of at most this many rows

// Computes z from x and from `mixed` [rows, heads * head dimension], the result of attention before its output
// projection. `space` has row_bytes for each row.
template <class T>
static void after_attention(const Block& b, const T* x, const T* mixed, int64_t rows, T* z, char* space, int threads) {
    int64_t width = b.qkv.depth;
    T *y = (T*)space, *attended = y + rows * width, *up = attended + rows * width;
    space = (char*)(up + rows * b.up.columns);
    apply(b.out, mixed, rows, y, space, threads);
    add_norm(b.attention_norm, x, y, rows, width, attended, threads);
    apply(b.up, attended, rows, up, space, threads);
    apply(b.down, up, rows, y, space, threads);
    add_norm(b.mlp_norm, attended, y, rows, width, z, threads);
}

// bytes of `space` for each row: the intermediate results of `after_attention`, and the widest input of a linear layer
// in uint8 with two scales
template <class T> static int64_t row_bytes(const Block& b) {
    int64_t widest = std::max(b.qkv.depth, std::max(b.out.depth, b.down.depth));
    return (int64_t)sizeof(T) * (2 * b.qkv.depth + b.up.columns) + widest + 8;
}

// Calls function(first, count, space, threads) for chunks that together are all rows: for one chunk that all threads
// share, or, with more than FEW_ROWS rows, for chunks that one thread each computes in its own `space`.
template <class T, class Function>
static void for_each_chunk(const Block& b, int64_t rows, char* space, int threads, Function function) {
    if (rows <= FEW_ROWS) return function(0, rows, space, threads);
    int64_t chunks = (rows + CHUNK_ROWS * threads - 1) / (CHUNK_ROWS * threads) * threads;
    int64_t size = (rows + chunks - 1) / chunks;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t first = 0; first < rows; first += size) {
        static thread_local Scratch scratch;
        scratch.begin(size * row_bytes<T>(b) + 64);
        function(first, std::min(size, rows - first), scratch.take<char>(0), 1);
    }
}

// bytes of memory that `block` needs: qkv, the result of attention and, unless each thread has its own, row_bytes
template <class T> static int64_t space_of(const Block& b, int64_t rows) {
    return rows * (int64_t)sizeof(T) * (b.qkv.columns + b.out.depth) + (rows <= FEW_ROWS ? rows * row_bytes<T>(b) : 0);
}

// Computes the block for x [rows, width]. `spans` and `window` are those of heedful_attention.
template <class T>
static void block(const Block& b, const T* x, int64_t rows, int64_t sequences, const int64_t* spans, int64_t window,
                  T* z, char* space, int threads) {
    int64_t width = b.qkv.depth, inner = b.out.depth;
    T *qkv = (T*)space, *mixed = qkv + rows * 3 * inner;
    space = (char*)(mixed + rows * inner);
    for_each_chunk<T>(b, rows, space, threads, [&](int64_t first, int64_t count, char* to, int shared) {
        apply(b.qkv, x + first * width, count, qkv + first * 3 * inner, to, shared);
    });
    heedful_attention(sequences, b.heads, b.heads, inner / b.heads, spans, qkv, 3 * inner, qkv + inner, 3 * inner,
                      qkv + 2 * inner, 3 * inner, (float)b.scale, (int)b.causal, window, 0, 0, HALF<T>, mixed, inner,
                      nullptr, threads);
    for_each_chunk<T>(b, rows, space, threads, [&](int64_t first, int64_t count, char* to, int shared) {
        after_attention(b, x + first * width, mixed + first * inner, count, z + first * width, to, shared);
    });
}

// returns the bytes of memory that heedful_block needs for `rows` rows; `descriptor` is a Block
extern "C" int64_t heedful_block_space(const void* descriptor, int64_t rows, int half) {
    const Block& b = *(const Block*)descriptor;
    return half ? space_of<uint16_t>(b, rows) : space_of<float>(b, rows);
}

// Computes z from x, [rows, width] both, which must not be the same memory. `descriptor` is a Block, and `space` has
// heedful_block_space bytes. `spans` and `window` are those of heedful_attention.
extern "C" void heedful_block(const void* descriptor, int half, const void* x, int64_t rows, int64_t sequences,
                              const int64_t* spans, int64_t window, void* z, char* space, int threads) {
    const Block& b = *(const Block*)descriptor;
    if (half)
        block(b, (const uint16_t*)x, rows, sequences, spans, window, (uint16_t*)z, space, threads);
    else
        block(b, (const float*)x, rows, sequences, spans, window, (float*)z, space, threads);
}
