// Linear layers: y = GELU(x W' + b) or x W' + b, and the gradients of x, W and b. `heedful_linear` also computes the
// gradient of x, dx = dy W, from another packing of W.
#include "tiles.h"

static constexpr int64_t BLOCK_ROWS = 96;    // about this many rows of x stay in the L2 cache with a panel of B
static constexpr int64_t FEW_ROWS = 64;      // up to this many rows, threads share the columns instead of the rows
static constexpr int64_t DEPTH_BLOCK = 256;  // words of rows that are summed at a time for the gradient of a weight

struct RowBlocks {
    int64_t blocks, size;  // number of blocks, and rows of a block; the last block may have fewer
};

// divides rows into blocks of about BLOCK_ROWS, so that all threads get equally many
static RowBlocks divide_rows(int64_t count, int64_t threads) {
    int64_t blocks = std::max<int64_t>(1, (count + BLOCK_ROWS * threads - 1) / (BLOCK_ROWS * threads)) * threads;
    int64_t size = ((count + blocks - 1) / blocks + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    return {(count + size - 1) / size, size};
}

#if defined(HAS_TILES)
// computes the result of `multiply_rows` by tile registers; `in_row` is the number of words between rows of x, and
// `depth` is a multiple of TILE
template <class E, class Store>
static void multiply_rows_by_tiles(const uint32_t* x, int64_t in_row, int64_t rows, const uint32_t* b, int64_t depth,
                                   int64_t columns, int threads, Store store) {
    const int64_t count = panels(columns), size = depth * PANEL;
    // a task of a thread is one panel for all rows if there are few rows, otherwise all panels for a block of rows
    RowBlocks row_blocks = rows <= FEW_ROWS ? RowBlocks{1, rows} : divide_rows(rows, threads);
    row_blocks.size = (row_blocks.size + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    row_blocks.blocks = (rows + row_blocks.size - 1) / row_blocks.size;
    const int64_t task_panels = rows <= FEW_ROWS ? 1 : count, tasks = row_blocks.blocks * (count / task_panels);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t first = task / (count / task_panels) * row_blocks.size, last = std::min(rows, first + row_blocks.size);
        int64_t begin = task % (count / task_panels) * task_panels;
        TileShapes shapes;
        for (int64_t p = begin; p < begin + task_panels; p++)
            for (int64_t row = first; row < last; row += 2 * TILE) {
                shapes.configure(last - row);
                multiply_by_tiles<E>(shapes, x + row * in_row, in_row, depth, b + p * size,
                                     std::min(PANEL, columns - p * PANEL),
                                     [&](int64_t i, int64_t column, typename E::Sum sums) INLINE {
                                         store(row + i, p * PANEL + column, sums);
                                     });
            }
    }
}
#endif

// Computes x B for x [rows, depth] and a packed B, and calls store(row, column, sums) with the LANES sums from `column`
// on. `stride` counts elements of x, `depth` words.
template <class E, class Store>
static inline INLINE void multiply_rows(const void* x, int64_t stride, int64_t rows, const uint32_t* b, int64_t depth,
                                        int64_t columns, int threads, Store store) {
    int64_t in_row = stride / E::IN_WORD, count = panels(columns);
    const uint32_t* a = (const uint32_t*)x;
#if defined(HAS_TILES)
    // Sums of int8 are exact. Sums of bfloat16 are computed by tiles for any number of rows, so that the result of a
    // row does not depend on the other rows.
    if constexpr (!std::is_same_v<E, Float32>)
        if (depth % TILE == 0 && rows >= (std::is_same_v<E, BFloat16> ? 1 : MIN_AMX_ROWS) && tiles_allowed())
            return multiply_rows_by_tiles<E>(a, in_row, rows, b, depth, columns, threads, store);
#endif
    if (rows <= FEW_ROWS) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t p = 0; p < count; p++) multiply<E>({a, in_row, 1}, rows, b, depth, columns, p, p + 1, store);
        return;
    }
    RowBlocks row_blocks = divide_rows(rows, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < row_blocks.blocks; block++) {
        int64_t first = block * row_blocks.size, num_rows = std::min(row_blocks.size, rows - first);
        multiply<E>({a + first * in_row, in_row, 1}, num_rows, b, depth, columns, 0, count,
                    [&](int64_t row, int64_t column, typename E::Sum sums) INLINE {
                        store(first + row, column, sums);
                    });
    }
}

// returns GELU, in the precision that its result of type Out has
template <class Out> static inline V gelu_for(V x) {
    if constexpr (std::is_same_v<Out, Float32>) {
        V bell;
        return x * normal(x, bell);
    } else {
        return gelu_of(x);
    }
}

// Computes y = x B + bias, or GELU of it, for elements E of x [rows, depth] and Out of y [rows, columns]; `bias`
// [columns] may be null.
template <class E, class Out>
static void linear(const typename E::T* x, int64_t stride, int64_t rows, const uint32_t* b, int64_t depth,
                   int64_t columns, const float* bias, int gelu, typename Out::T* y, int threads) {
    multiply_rows<E>(x, stride, rows, b, words(depth, E::IN_WORD), columns, threads,
                     [=](int64_t row, int64_t column, V sums) INLINE {
                         if (bias) sums += *(const AnyV*)(bias + column);
                         if (gelu) sums = gelu_for<Out>(sums);
                         Out::store(y + row * columns + column, sums);
                     });
}

#if defined(__AVX512VNNI__)
// Computes `linear` in int8. Row r of the input is x[r] * scales[2 r] + scales[2 r + 1], where x [rows, depth] is
// uint8. Column c of the weight is column_scales[c] times column c of the packed int8 matrix B, whose sum is
// column_sums[c].
template <class Out>
static void linear8(const uint8_t* x, const float* scales, int64_t rows, const uint32_t* b, int64_t depth,
                    int64_t columns, const float* column_scales, const float* column_sums, const float* bias, int gelu,
                    typename Out::T* y, int threads) {
    auto finish = [=](int64_t row, int64_t column, VI product) INLINE {
        V z = __builtin_convertvector(product, V) * scales[2 * row];
        z += *(const AnyV*)(column_sums + column) * scales[2 * row + 1];
        z *= *(const AnyV*)(column_scales + column);
        if (bias) z += *(const AnyV*)(bias + column);
        if (gelu) z = gelu_of(z);
        Out::store(y + row * columns + column, z);
    };
    multiply_rows<Int8>(x, depth, rows, b, words(depth, 4), columns, threads, finish);
}
#endif

// Quantizes each row of x [rows, width] to integers from 0, its minimum, to 255, its maximum: row r of x is about
// quantized[r] * scales[2 r] + scales[2 r + 1]. The scale of a row with a NaN is NaN.
template <class E>
static void round_rows(const typename E::T* x, int64_t stride, int64_t rows, int64_t width, uint8_t* quantized,
                       float* scales, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const typename E::T* line = x + row * stride;
        V low = E::load(line), high = low;
        for (int64_t i = LANES; i < width; i += LANES) {
            V v = E::load(line + i);
            high = vector_max(high, v);
            low = vector_min(low, v);
        }
        float minimum = -max_element(-low), span = max_element(high) - minimum, factor = span > 0 ? 255 / span : 0;
        V total = {};
        for (int64_t i = 0; i < width; i += LANES) {
            V v = (E::load(line + i) - minimum) * factor;
            total += v;
            // adding 1.5 * 2^23 rounds v to nearest, ties to even, and puts the integer into the lowest byte
            store_bytes(quantized + row * width + i, (VU)(v + 12582912.f));
        }
        scales[2 * row] = span / 255 + 0 * sum(total);  // 0 * sum is NaN if the row has a NaN
        scales[2 * row + 1] = minimum;
    }
}

// Computes dW = dy' x, dW[n, k] = sum over rows of dy[row, n] x[row, k], and unless `db` is null the sums of the
// columns of dy. A thread packs a panel of dy and multiplies it with all panels of x, which are in `space`.
template <class E, class From>
static void weight_gradient(const typename E::T* dy, int64_t columns, const typename From::T* x, int64_t stride,
                            int64_t depth, int64_t rows, uint32_t* space, float* dw, float* db, int threads) {
    int64_t steps = words(rows, E::IN_WORD), panels_of_dy = panels(columns), panels_of_x = panels(depth);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t q = 0; q < panels_of_x; q++) pack<E, From>(x, stride, rows, depth, q, space + q * steps * PANEL);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t p = 0; p < panels_of_dy; p++) {
        static thread_local Scratch scratch;
        scratch.begin(steps * PANEL * 4);
        uint32_t* left = scratch.take<uint32_t>(steps * PANEL);
        pack<E, E>(dy, columns, rows, columns, p, left, db);
        int64_t first = p * PANEL, num_columns = std::min(PANEL, columns - first);
        for (int64_t q = 0; q < panels_of_x; q++)
            for (int64_t k = 0; k < steps; k += DEPTH_BLOCK) {
                int64_t block_steps = std::min(DEPTH_BLOCK, steps - k);
                auto add = [&](int64_t row, int64_t column, V sums) INLINE {
                    float* to = dw + (first + row) * depth + q * PANEL + column;
                    if (block_steps == steps)
                        store_nontemporal(to, sums);
                    else
                        *(AnyV*)to = k ? *(AnyV*)to + sums : sums;
                };
                LeftOperand a = {left + k * PANEL, 1, PANEL};
                const uint32_t* b = space + (q * steps + k) * PANEL;
                multiply<E>(a, num_columns, b, block_steps, std::min(PANEL, depth - q * PANEL), 0, 1, add);
            }
        store_fence();
    }
}

// packs B = W' if `transpose`, otherwise B = W, of W [rows, columns]
template <class E, class From>
static void pack_weight(const typename From::T* w, int64_t rows, int64_t columns, int transpose, uint32_t* out,
                        int threads) {
    int64_t count = panels(transpose ? rows : columns), depth = words(transpose ? columns : rows, E::IN_WORD);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < count; p++) {
        uint32_t* panel = out + p * depth * PANEL;
        if (transpose || E::IN_WORD == 4)
            pack_transposed<E, From>(w, columns, rows, columns, p, panel);
        else if constexpr (E::IN_WORD < 4)
            pack<E, From>(w, columns, rows, columns, p, panel);
    }
}

extern "C" {

// number of float32 in a vector
int64_t heedful_lanes() { return LANES; }

// whether the library multiplies bfloat16
int heedful_half() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// the compiler that built the library
const char* heedful_compiler() {
#if defined(__clang__)
    return __VERSION__;
#else
    return "GCC " __VERSION__;
#endif
}

// whether the library multiplies int8
int heedful_bytes() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

// whether the library multiplies by the tile registers of AMX, and the operating system allows that
int heedful_tiles() {
#if defined(HAS_TILES)
    return tiles_allowed();
#else
    return 0;
#endif
}

// number of words of a packed matrix B of `depth` elements in each column, with `in_word` elements in a word
int64_t heedful_packed_words(int64_t columns, int64_t depth, int64_t in_word) {
    return panels(columns) * words(depth, in_word) * PANEL;
}

// Packs W [rows, columns] as B of `heedful_linear`: B = W' for x W' if `transpose`, otherwise B = W for dy W. W is
// float32 if `float32`, otherwise bfloat16. B is bfloat16 if `half`; otherwise both are float32.
void heedful_pack(const void* w, int float32, int64_t rows, int64_t columns, int transpose, int half, uint32_t* out,
                  int threads) {
    if (!half) return pack_weight<Float32, Float32>((const float*)w, rows, columns, transpose, out, threads);
    if (float32)
        pack_weight<BFloat16, Float32>((const float*)w, rows, columns, transpose, out, threads);
    else
        pack_weight<BFloat16, BFloat16>((const uint16_t*)w, rows, columns, transpose, out, threads);
}

// packs W [rows, columns] of int8 as B = W' of `heedful_linear8`; `columns` is a multiple of 4
void heedful_pack8(const int8_t* w, int64_t rows, int64_t columns, uint32_t* out, int threads) {
#if defined(__AVX512VNNI__)
    pack_weight<Int8, Int8>(w, rows, columns, 1, out, threads);
#else
    (void)w, (void)rows, (void)columns, (void)out, (void)threads;
#endif
}

// quantizes x [rows, width] to `quantized` [rows, width] with `scales` [rows, 2]; see `round_rows`
void heedful_round_rows(const void* x, int64_t stride, int64_t rows, int64_t width, int half, uint8_t* quantized,
                        float* scales, int threads) {
    if (half)
        round_rows<BFloat16>((const uint16_t*)x, stride, rows, width, quantized, scales, threads);
    else
        round_rows<Float32>((const float*)x, stride, rows, width, quantized, scales, threads);
}

// Computes y [rows, columns], bfloat16 if `half`, by `linear8`: from `quantized` and `scales` of `heedful_round_rows`,
// and from B of `heedful_pack8` with its `column_scales` and `column_sums` [columns].
void heedful_linear8(const uint8_t* quantized, const float* scales, int64_t rows, const uint32_t* b, int64_t depth,
                     int64_t columns, const float* column_scales, const float* column_sums, const float* bias, int gelu,
                     int half, void* y, int threads) {
#if defined(__AVX512VNNI__)
    if (half)
        linear8<BFloat16>(quantized, scales, rows, b, depth, columns, column_scales, column_sums, bias, gelu,
                          (uint16_t*)y, threads);
    else
        linear8<Float32>(quantized, scales, rows, b, depth, columns, column_scales, column_sums, bias, gelu, (float*)y,
                         threads);
#else
    (void)quantized, (void)scales, (void)rows, (void)b, (void)depth, (void)columns, (void)column_scales;
    (void)column_sums, (void)bias, (void)gelu, (void)half, (void)y, (void)threads;
#endif
}

// Computes y [rows, columns] = x B + bias, or GELU of it if `gelu`, for x [rows, depth] and B of `heedful_pack`. `bias`
// [columns] may be null. x and B are bfloat16 if `half`; y is float32 if `float32`, otherwise of the type of x.
void heedful_linear(const void* x, int64_t stride, int64_t rows, const uint32_t* b, int64_t depth, int64_t columns,
                    const float* bias, int gelu, int half, int float32, void* y, int threads) {
    if (!half)
        linear<Float32, Float32>((const float*)x, stride, rows, b, depth, columns, bias, gelu, (float*)y, threads);
#if defined(__AVX512BF16__)
    else if (float32)
        linear<BFloat16, Float32>((const uint16_t*)x, stride, rows, b, depth, columns, bias, gelu, (float*)y, threads);
    else
        linear<BFloat16, BFloat16>((const uint16_t*)x, stride, rows, b, depth, columns, bias, gelu, (uint16_t*)y,
                                   threads);
#endif
}

// Computes dW [columns, depth] and, unless null, db [columns] from dy [rows, columns] and x [rows, depth]; `space` has
// room for the packed x: heedful_packed_words(depth, rows, IN_WORD) words.
void heedful_weight_gradient(const void* dy, int64_t columns, const void* x, int64_t stride, int64_t depth,
                             int64_t rows, int half, uint32_t* space, float* dw, float* db, int threads) {
    if (!half)
        weight_gradient<Float32, Float32>((const float*)dy, columns, (const float*)x, stride, depth, rows, space, dw,
                                          db, threads);
#if defined(__AVX512BF16__)
    else
        weight_gradient<BFloat16, BFloat16>((const uint16_t*)dy, columns, (const uint16_t*)x, stride, depth, rows,
                                            space, dw, db, threads);
#endif
}
}
