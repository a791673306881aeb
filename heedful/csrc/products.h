// Matrix products C = A B of packed matrices, in tiles that stay in registers.
//
// B is stored in panels: PANEL columns side by side, one line of words for each step of the depth. A is read by words,
// from any layout: word (row, step) is at a[row * row_step + step * step_step], so that a matrix and its transpose are
// the same to the tile. The depth counts words: two bfloat16, one float32 or four bytes.
#pragma once

#include <type_traits>

#include "vectors.h"

constexpr int64_t PANEL = TILE_VECTORS * LANES;  // columns of a panel
constexpr int64_t TILE_ROWS = 6;  // in a tile: 6 x 4 sums of the 32 registers of AVX-512, 6 x 2 of the 16 of AVX2

#define INLINE __attribute__((always_inline))  // a tile and the use of its sums are one function

static inline int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
static inline int64_t words(int64_t count, int64_t in_word) { return (count + in_word - 1) / in_word; }

struct LeftOperand {
    const uint32_t* at;
    int64_t row, step;
};

// R x W vectors of the product; store(line, vector, sums) takes each
template <class E, int R, int W, class Store>
static inline INLINE void multiply_tile(LeftOperand a, const uint32_t* panel, int64_t width, int64_t depth,
                                        Store store) {
    typename E::Sum sums[R][W] = {};
    for (int64_t k = 0; k < depth; k++) {
        VU b[W];
        for (int j = 0; j < W; j++) b[j] = *(const AnyVU*)(panel + k * width + j * LANES);
        for (int r = 0; r < R; r++) {
            uint32_t word = a.at[r * a.row + k * a.step];
            for (int j = 0; j < W; j++) sums[r][j] = E::dot(sums[r][j], b[j], word);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) store(r, j, sums[r][j]);
}

// as many lines at once as fit in registers; W is the number of vectors in a line
template <class E, int W, class Store>
static inline INLINE void multiply_panel(LeftOperand a, int64_t rows, const uint32_t* panel, int64_t width,
                                         int64_t depth, Store store) {
    constexpr int64_t MOST = TILE_ROWS * TILE_VECTORS / W > 12 ? 12 : TILE_ROWS * TILE_VECTORS / W;
    int64_t row = 0;
    auto some = [&](auto lines) INLINE {
        multiply_tile<E, decltype(lines)::value, W>({a.at + row * a.row, a.row, a.step}, panel, width, depth,
                                                    [&](int r, int j, typename E::Sum x) INLINE {
                                                        store(row + r, j, x);
                                                    });
        row += decltype(lines)::value;
    };
    while (row + MOST <= rows) some(std::integral_constant<int, MOST>{});
    if (MOST > 6 && row + 6 <= rows) some(std::integral_constant<int, 6>{});
    if (row + 4 <= rows) some(std::integral_constant<int, 4>{});
    if (row + 2 <= rows) some(std::integral_constant<int, 2>{});
    if (row < rows) some(std::integral_constant<int, 1>{});
}

// the panels from `first` to `last` of a product with `columns` columns; store(row, column, LANES sums)
template <class E, class Store>
static inline INLINE void multiply(LeftOperand a, int64_t rows, const uint32_t* b, int64_t depth, int64_t columns,
                                   int64_t first, int64_t last, Store store) {
    for (int64_t p = first; p < last; p++) {
        const uint32_t* panel = b + p * depth * PANEL;
        auto here = [&](int64_t row, int j, typename E::Sum x) INLINE { store(row, p * PANEL + j * LANES, x); };
        switch (std::min(TILE_VECTORS, (columns - p * PANEL + LANES - 1) / LANES)) {
            case 1: multiply_panel<E, 1>(a, rows, panel, PANEL, depth, here); break;
            case 2: multiply_panel<E, 2>(a, rows, panel, PANEL, depth, here); break;
#if defined(__AVX512F__)
            case 3: multiply_panel<E, 3>(a, rows, panel, PANEL, depth, here); break;
            default: multiply_panel<E, 4>(a, rows, panel, PANEL, depth, here); break;
#endif
        }
    }
}

// -- packing ----------------------------------------------------------------------------------------------------------

// transpose LANES x LANES words
static inline void transpose_block(const VU* in, uint32_t* out, int64_t width) {
#if defined(__AVX512F__)
    __m512i t[16], u[16], v[16];
    const __m512i* a = (const __m512i*)in;
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        v[j] = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88);
        v[4 + j] = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
        v[8 + j] = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        v[12 + j] = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        _mm512_storeu_si512(out + j * width, _mm512_shuffle_i32x4(v[j], v[8 + j], 0x88));
        _mm512_storeu_si512(out + (8 + j) * width, _mm512_shuffle_i32x4(v[j], v[8 + j], 0xdd));
        _mm512_storeu_si512(out + (4 + j) * width, _mm512_shuffle_i32x4(v[4 + j], v[12 + j], 0x88));
        _mm512_storeu_si512(out + (12 + j) * width, _mm512_shuffle_i32x4(v[4 + j], v[12 + j], 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) out[j * width + i] = in[i][j];
#endif
}

constexpr int64_t PREFETCH_BYTES = 256;  // distance; the processor does not prefetch LANES rows by itself

// the two cache lines of a row's next numbers
static inline void prefetch_row(const void* from) {
    __builtin_prefetch(from);
    __builtin_prefetch((const char*)from + 64);
}

// LANES words of a row of kind From, as words of kind E; what lies at and after `count` numbers is 0
template <class E, class From> static inline VU words_of(const typename From::T* row, int64_t count) {
    constexpr int64_t NUMBERS = LANES * E::IN_WORD;
    typename From::T whole[NUMBERS] = {};
    if (count < NUMBERS) {
        if (count > 0) memcpy(whole, row, count * sizeof(typename From::T));
        row = whole;
    }
    if constexpr (E::IN_WORD == From::IN_WORD) {
        return *(const AnyVU*)row;
    } else {
        uint16_t halves[NUMBERS];
        for (int64_t i = 0; i < NUMBERS; i += LANES) BFloat16::store(halves + i, From::load(row + i));
        return *(const AnyVU*)halves;
    }
}

// panels of the transpose of x [count, depth]: columns are the rows of x; panel p of them, whole vectors of it
template <class E, class From>
static inline void pack_transposed(const typename From::T* x, int64_t stride, int64_t count, int64_t depth, int64_t p,
                                   uint32_t* out) {
    int64_t steps = words(depth, E::IN_WORD);
    for (int64_t column = 0; column < PANEL && p * PANEL + column < count; column += LANES)
        for (int64_t k = 0; k < steps; k += LANES) {
            VU in[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                int64_t row = p * PANEL + column + i, from = k * E::IN_WORD;
                prefetch_row(x + row * stride + from + PREFETCH_BYTES / sizeof(typename From::T));
                in[i] = row < count ? words_of<E, From>(x + row * stride + from, depth - from) : VU{};
            }
            if (k + LANES <= steps) {
                transpose_block(in, out + k * PANEL + column, PANEL);
            } else {
                uint32_t made[LANES * LANES];
                transpose_block(in, made, LANES);
                for (int64_t i = 0; k + i < steps; i++)
                    memcpy(out + (k + i) * PANEL + column, made + i * LANES, LANES * 4);
            }
        }
}

// panel p of x [depth, columns] itself, of whole vectors; and the sums of its columns, unless `sums` is null
template <class E, class From>
static inline void pack(const typename From::T* x, int64_t stride, int64_t depth, int64_t columns, int64_t p,
                        uint32_t* out, float* sums = nullptr) {
    int64_t steps = words(depth, E::IN_WORD);
    int64_t vectors = std::min(TILE_VECTORS, (columns - p * PANEL) / LANES);
    V totals[TILE_VECTORS] = {};
    for (int64_t k = 0; k < steps; k++) {
        const typename From::T* row = x + k * E::IN_WORD * stride + p * PANEL;
        bool two = E::IN_WORD == 2 && 2 * k + 1 < depth;
        for (int64_t j = 0; j < vectors; j++) {
            V one = From::load(row + j * LANES), other = {};
            if (two) other = From::load(row + stride + j * LANES);
            *(AnyVU*)(out + k * PANEL + j * LANES) = E::pair(one, other);
            if (sums) totals[j] += one + other;
        }
    }
    if (sums)
        for (int64_t j = 0; j < vectors; j++) *(AnyV*)(sums + p * PANEL + j * LANES) = totals[j];
}
