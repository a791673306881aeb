// Linear layers: y = activation(x W' + b), the gradient of x, and those of W and b.
#include "tiles.h"

static constexpr int64_t BLOCK_ROWS = 96;    // rows of x at a time, about: they stay in the L2 cache with a panel of W
static constexpr int64_t FEW_ROWS = 64;      // up to this many rows, threads share the columns instead of the rows
static constexpr int64_t DEPTH_BLOCK = 256;  // words of the depth of a weight's gradient at a time

struct RowBlocks {
    int64_t blocks, size;  // number of blocks, and rows of each
};

static RowBlocks divide_rows(int64_t count, int64_t threads) {
    int64_t blocks = std::max<int64_t>(1, (count + BLOCK_ROWS * threads - 1) / (BLOCK_ROWS * threads)) * threads;
    int64_t size = ((count + blocks - 1) / blocks + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    return {(count + size - 1) / size, size};
}

#if defined(HAS_TILES)
// computes what `multiply_rows` does, by tiles; `depth` is a multiple of TILE
template <class E, class Store>
static void multiply_rows_by_tiles(const uint32_t* x, int64_t in_row, int64_t rows, const uint32_t* b, int64_t depth,
                                   int64_t columns, int threads, Store store) {
    const int64_t count = panels(columns), size = depth * PANEL;
    // few rows: a task is a panel; otherwise a block of rows that stays in the L2 cache
    RowBlocks row_blocks = rows <= FEW_ROWS ? RowBlocks{1, rows} : divide_rows(rows, threads);
    row_blocks.size = (row_blocks.size + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    row_blocks.blocks = (rows + row_blocks.size - 1) / row_blocks.size;
    const int64_t panels_each = rows <= FEW_ROWS ? 1 : count, tasks = row_blocks.blocks * (count / panels_each);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t first = task / (count / panels_each) * row_blocks.size, last = std::min(rows, first + row_blocks.size);
        int64_t begin = task % (count / panels_each) * panels_each;
        TileShapes shapes;
        for (int64_t p = begin; p < begin + panels_each; p++)
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

// store(row, column, sums) for every vector of x B
template <class E, class Store>
static inline INLINE void multiply_rows(const void* x, int64_t stride, int64_t rows, const uint32_t* b, int64_t depth,
                                        int64_t columns, int threads, Store store) {
    int64_t in_row = stride / E::IN_WORD, count = panels(columns);
    const uint32_t* a = (const uint32_t*)x;
#if defined(HAS_TILES)
    // sums of bytes are exact; those of bfloat16 are by tiles for any number of rows, so that a row has the same bits
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

// GELU as exact as the kind of its result
template <class Out> static inline V gelu_for(V x) {
    if constexpr (std::is_same_v<Out, Float32>) {
        V bell;
        return x * normal(x, bell);
    } else {
        return gelu_of(x);
    }
}

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
// x as uint8, whose row is bytes * scale + least (`scales` [rows, 2]); `weights` are the scales of columns, and `sums`
// the sums of the int8 weights in each column
template <class Out>
static void linear8(const uint8_t* x, const float* scales, int64_t rows, const uint32_t* b, int64_t depth,
                    int64_t columns, const float* weights, const float* sums, const float* bias, int gelu,
                    typename Out::T* y, int threads) {
    auto finish = [=](int64_t row, int64_t column, VI product) INLINE {
        V z = __builtin_convertvector(product, V) * scales[2 * row];
        z += *(const AnyV*)(sums + column) * scales[2 * row + 1];
        z *= *(const AnyV*)(weights + column);
        if (bias) z += *(const AnyV*)(bias + column);
        if (gelu) z = gelu_of(z);
        Out::store(y + row * columns + column, z);
    };
    multiply_rows<Int8>(x, depth, rows, b, words(depth, 4), columns, threads, finish);
}
#endif

// quantise each row from its minimum to its maximum as bytes 0 to 255; the scale of a row with a NaN is NaN
template <class E>
static void round_rows(const typename E::T* x, int64_t stride, int64_t rows, int64_t width, uint8_t* to, float* scales,
                       int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const typename E::T* line = x + row * stride;
        V low = E::load(line), high = low;
        for (int64_t i = LANES; i < width; i += LANES) {
            V v = E::load(line + i);
            high = vector_max(high, v);
            low = vector_min(low, v);
        }
        float least = -max_element(-low), span = max_element(high) - least, by = span > 0 ? 255 / span : 0;
        V total = {};
        for (int64_t i = 0; i < width; i += LANES) {
            V v = (E::load(line + i) - least) * by;
            total += v;
            store_bytes(to + row * width + i, (VU)(v + 12582912.f));  // 1.5 * 2^23: v, to nearest, ties to even
        }
        scales[2 * row] = span / 255 + 0 * sum(total);  // adds 0, or NaN
        scales[2 * row + 1] = least;
    }
}

// gradient of the weight: dW[n, k] = sum over rows dy[row, n] x[row, k]
template <class E, class From>
static void weight_gradient(const typename E::T* dy, int64_t columns, const typename From::T* x, int64_t stride,
                            int64_t depth, int64_t rows, uint32_t* space, float* dw, float* db, int threads) {
    int64_t steps = words(rows, E::IN_WORD), of_y = panels(columns), of_x = panels(depth);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t q = 0; q < of_x; q++) pack<E, From>(x, stride, rows, depth, q, space + q * steps * PANEL);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t p = 0; p < of_y; p++) {
        static thread_local Scratch scratch;
        scratch.begin(steps * PANEL * 4);
        uint32_t* left = scratch.take<uint32_t>(steps * PANEL);
        pack<E, E>(dy, columns, rows, columns, p, left, db);
        int64_t first = p * PANEL, num_columns = std::min(PANEL, columns - first);
        for (int64_t q = 0; q < of_x; q++)
            for (int64_t k = 0; k < steps; k += DEPTH_BLOCK) {
                int64_t depth_here = std::min(DEPTH_BLOCK, steps - k);
                auto add = [&](int64_t row, int64_t column, V sums) INLINE {
                    float* to = dw + (first + row) * depth + q * PANEL + column;
                    if (depth_here == steps)
                        store_nontemporal(to, sums);
                    else
                        *(AnyV*)to = k ? *(AnyV*)to + sums : sums;
                };
                LeftOperand a = {left + k * PANEL, 1, PANEL};
                const uint32_t* b = space + (q * steps + k) * PANEL;
                multiply<E>(a, num_columns, b, depth_here, std::min(PANEL, depth - q * PANEL), 0, 1, add);
            }
        store_fence();
    }
}

template <class E, class From>
static void pack_weight(const typename From::T* w, int64_t rows, int64_t columns, int turned, uint32_t* out,
                        int threads) {
    int64_t count = panels(turned ? rows : columns), depth = words(turned ? columns : rows, E::IN_WORD);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < count; p++) {
        uint32_t* panel = out + p * depth * PANEL;
        if (turned || E::IN_WORD == 4)
            pack_transposed<E, From>(w, columns, rows, columns, p, panel);
        else if constexpr (E::IN_WORD < 4)
            pack<E, From>(w, columns, rows, columns, p, panel);
    }
}

extern "C" {

// target of the build: floats in a vector, and whether it multiplies bfloat16
int64_t heedful_lanes() { return LANES; }
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

// whether the library multiplies by the tile registers of AMX, and the operating system lets it
int heedful_tiles() {
#if defined(HAS_TILES)
    return tiles_allowed();
#else
    return 0;
#endif
}

// number of words that pack_weight writes
int64_t heedful_packed_words(int64_t columns, int64_t depth, int64_t in_word) {
    return panels(columns) * words(depth, in_word) * PANEL;
}

// W [rows, columns], float32 or bfloat16, as the right side of x W' (turned) or of dy W
void heedful_pack(const void* w, int wide, int64_t rows, int64_t columns, int turned, int half, uint32_t* out,
                  int threads) {
    if (!half) return pack_weight<Float32, Float32>((const float*)w, rows, columns, turned, out, threads);
    if (wide)
        pack_weight<BFloat16, Float32>((const float*)w, rows, columns, turned, out, threads);
    else
        pack_weight<BFloat16, BFloat16>((const uint16_t*)w, rows, columns, turned, out, threads);
}

// W [rows, columns] of int8, as the right side of x W'; columns are whole words
void heedful_pack8(const int8_t* w, int64_t rows, int64_t columns, uint32_t* out, int threads) {
#if defined(__AVX512VNNI__)
    pack_weight<Int8, Int8>(w, rows, columns, 1, out, threads);
#else
    (void)w, (void)rows, (void)columns, (void)out, (void)threads;
#endif
}

void heedful_round_rows(const void* x, int64_t stride, int64_t rows, int64_t width, int half, uint8_t* to,
                        float* scales, int threads) {
    if (half)
        round_rows<BFloat16>((const uint16_t*)x, stride, rows, width, to, scales, threads);
    else
        round_rows<Float32>((const float*)x, stride, rows, width, to, scales, threads);
}

void heedful_linear8(const uint8_t* x, const float* scales, int64_t rows, const uint32_t* b, int64_t depth,
                     int64_t columns, const float* weights, const float* sums, const float* bias, int gelu, int half,
                     void* y, int threads) {
#if defined(__AVX512VNNI__)
    if (half)
        linear8<BFloat16>(x, scales, rows, b, depth, columns, weights, sums, bias, gelu, (uint16_t*)y, threads);
    else
        linear8<Float32>(x, scales, rows, b, depth, columns, weights, sums, bias, gelu, (float*)y, threads);
#else
    (void)x, (void)scales, (void)rows, (void)b, (void)depth, (void)columns, (void)weights, (void)sums, (void)bias;
    (void)gelu, (void)half, (void)y, (void)threads;
#endif
}

// x [rows, depth], lines `stride` apart; y is float32 where `wide`, and in x's kind otherwise
void heedful_linear(const void* x, int64_t stride, int64_t rows, const uint32_t* b, int64_t depth, int64_t columns,
                    const float* bias, int gelu, int half, int wide, void* y, int threads) {
    if (!half)
        linear<Float32, Float32>((const float*)x, stride, rows, b, depth, columns, bias, gelu, (float*)y, threads);
#if defined(__AVX512BF16__)
    else if (wide)
        linear<BFloat16, Float32>((const uint16_t*)x, stride, rows, b, depth, columns, bias, gelu, (float*)y, threads);
    else
        linear<BFloat16, BFloat16>((const uint16_t*)x, stride, rows, b, depth, columns, bias, gelu, (uint16_t*)y,
                                   threads);
#endif
}

// dW [columns, depth] and, unless null, db [columns]; `space` has heedful_packed_words of x
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
