// Matrix products C = A B of A [rows, depth] and B [depth, columns], in tiles whose sums stay in registers.
//
// Both operands are read in words (see vectors.h), so depths in this file are numbers of words: word k of a row of A or
// of a column of B holds its elements k * IN_WORD to (k + 1) * IN_WORD - 1.
//
// B is packed: it is divided into panels of PANEL columns, and panel p is an array of words [depth, PANEL], in which
// word (k, c) is word k of column p * PANEL + c. The last panel has the same size, but only its vectors of LANES
// columns that contain columns of B are written.
//
// A may have any layout: its word (row, k) is at a.at[row * a.row + k * a.step]. A transpose therefore needs no copy.
#pragma once

#include <type_traits>

#include "vectors.h"

constexpr int64_t PANEL = TILE_VECTORS * LANES;  // columns of a panel
// rows of a tile of PANEL columns: its sums take 6 x 4 of the 32 registers of AVX-512, or 6 x 2 of the 16 of AVX2
constexpr int64_t TILE_ROWS = 6;

#define INLINE __attribute__((always_inline))  // so that sums stay in registers until `store` has used them

static inline int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
static inline int64_t words(int64_t count, int64_t in_word) { return (count + in_word - 1) / in_word; }

struct LeftOperand {
    const uint32_t* at;
    int64_t row, step;  // words from a row to the next one, and from word k to word k + 1 of a row
};

// Computes R rows and W vectors of columns of C, and calls store(row, vector, sums) for each vector of LANES sums.
// `panel` is at the first column in row 0 of a panel, and `width` the number of words between its rows.
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

// Computes all rows and W vectors of columns of C, in tiles of as many rows as fit in registers; other arguments are
// those of `multiply_tile`.
template <class E, int W, class Store>
static inline INLINE void multiply_panel(LeftOperand a, int64_t rows, const uint32_t* panel, int64_t width,
                                         int64_t depth, Store store) {
    constexpr int64_t MAX_ROWS = TILE_ROWS * TILE_VECTORS / W > 12 ? 12 : TILE_ROWS * TILE_VECTORS / W;
    int64_t row = 0;
    auto next_tile = [&](auto tile_rows) INLINE {
        multiply_tile<E, decltype(tile_rows)::value, W>({a.at + row * a.row, a.row, a.step}, panel, width, depth,
                                                        [&](int r, int j, typename E::Sum x) INLINE {
                                                            store(row + r, j, x);
                                                        });
        row += decltype(tile_rows)::value;
    };
    while (row + MAX_ROWS <= rows) next_tile(std::integral_constant<int, MAX_ROWS>{});
    if (MAX_ROWS > 6 && row + 6 <= rows) next_tile(std::integral_constant<int, 6>{});
    if (row + 4 <= rows) next_tile(std::integral_constant<int, 4>{});
    if (row + 2 <= rows) next_tile(std::integral_constant<int, 2>{});
    if (row < rows) next_tile(std::integral_constant<int, 1>{});
}

// Computes the panels [first, last) of C, and calls store(row, column, sums) with the LANES sums from `column` on. b is
// the packed B, which has `columns` columns.
template <class E, class Store>
static inline INLINE void multiply(LeftOperand a, int64_t rows, const uint32_t* b, int64_t depth, int64_t columns,
                                   int64_t first, int64_t last, Store store) {
    for (int64_t p = first; p < last; p++) {
        const uint32_t* panel = b + p * depth * PANEL;
        auto store_in_panel = [&](int64_t row, int j, typename E::Sum x) INLINE {
            store(row, p * PANEL + j * LANES, x);
        };
        switch (std::min(TILE_VECTORS, (columns - p * PANEL + LANES - 1) / LANES)) {
            case 1: multiply_panel<E, 1>(a, rows, panel, PANEL, depth, store_in_panel); break;
            case 2: multiply_panel<E, 2>(a, rows, panel, PANEL, depth, store_in_panel); break;
#if defined(__AVX512F__)
            case 3: multiply_panel<E, 3>(a, rows, panel, PANEL, depth, store_in_panel); break;
            default: multiply_panel<E, 4>(a, rows, panel, PANEL, depth, store_in_panel); break;
#endif
        }
    }
}

// -- packing ----------------------------------------------------------------------------------------------------------

// transposes LANES x LANES words: out[j * width + i] = in[i][j]
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

// distance from the elements that are read to those that are prefetched; the processor does not prefetch LANES rows by
// itself
constexpr int64_t PREFETCH_BYTES = 256;

// prefetches two cache lines
static inline void prefetch_row(const void* from) {
    __builtin_prefetch(from);
    __builtin_prefetch((const char*)from + 64);
}

// Returns the first LANES words of a row, converted from elements From to elements E: the same type, or float32 to
// bfloat16. Elements from index `count` on are not read, and are 0 in the words.
template <class E, class From> static inline VU words_of(const typename From::T* row, int64_t count) {
    constexpr int64_t ELEMENTS = LANES * E::IN_WORD;
    typename From::T padded[ELEMENTS] = {};
    if (count < ELEMENTS) {
        if (count > 0) memcpy(padded, row, count * sizeof(typename From::T));
        row = padded;
    }
    if constexpr (E::IN_WORD == From::IN_WORD) {
        return *(const AnyVU*)row;
    } else {
        uint16_t halves[ELEMENTS];
        for (int64_t i = 0; i < ELEMENTS; i += LANES) BFloat16::store(halves + i, From::load(row + i));
        return *(const AnyVU*)halves;
    }
}

// Packs panel p of B = x', for x [count, depth] with `stride` elements between rows: column c of B is row c of x. Here
// `depth` counts elements. Columns that fill up the last vector are 0.
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
                uint32_t block[LANES * LANES];
                transpose_block(in, block, LANES);
                for (int64_t i = 0; k + i < steps; i++)
                    memcpy(out + (k + i) * PANEL + column, block + i * LANES, LANES * 4);
            }
        }
}

// Packs panel p of B = x, for x [depth, columns] with `stride` elements between rows; `depth` counts elements, and
// `columns` is a multiple of LANES. Unless `sums` is null, sums[c] is set to the sum of column c of x.
template <class E, class From>
static inline void pack(const typename From::T* x, int64_t stride, int64_t depth, int64_t columns, int64_t p,
                        uint32_t* out, float* sums = nullptr) {
    int64_t steps = words(depth, E::IN_WORD);
    int64_t vectors = std::min(TILE_VECTORS, (columns - p * PANEL) / LANES);
    V totals[TILE_VECTORS] = {};
    for (int64_t k = 0; k < steps; k++) {
        const typename From::T* row = x + k * E::IN_WORD * stride + p * PANEL;
        bool has_second = E::IN_WORD == 2 && 2 * k + 1 < depth;
        for (int64_t j = 0; j < vectors; j++) {
            V first = From::load(row + j * LANES), second = {};
            if (has_second) second = From::load(row + stride + j * LANES);
            *(AnyVU*)(out + k * PANEL + j * LANES) = E::pair(first, second);
            if (sums) totals[j] += first + second;
        }
    }
    if (sums)
        for (int64_t j = 0; j < vectors; j++) *(AnyV*)(sums + p * PANEL + j * LANES) = totals[j];
}
