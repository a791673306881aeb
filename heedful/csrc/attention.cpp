// Attention of packed sequences: softmax(scale q k') v for each sequence and head, and its gradient.
//
// q is [query rows, heads, width], k and v are [key rows, kv heads, width]; rows of all sequences are concatenated. One
// head of one sequence is an item of work for a thread: n queries, m keys, and d = width. The thread packs the keys and
// values of the item once (see products.h), and computes its queries in blocks whose scores [block, m] stay in the
// cache. The backward pass computes the scores again, from the logarithm of the sum of each row of weights (Dao et al.
// 2022).
#include "tiles.h"

static constexpr int64_t BLOCK = 48;  // queries in a block; if tile registers compute the products, it is 2 * TILE

static inline int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

static constexpr int64_t MARGIN = 2 * LANES;  // numbers of keys are rounded up by less than this

// The terms q K(p) + k Q(p) of disentangled attention, where p is the embedding of the relative position, and K and Q
// project it as keys and queries (He et al. 2021, arXiv:2006.03654, section 3.1).
struct RelativePositions {
    const void *position_q, *position_k;  // Q(p) and K(p) of all embeddings, [count, heads, width]
    int64_t count;
    // Index of the embedding for a query and a key: ascending[query - key], or descending[key - query]. From one
    // distance to the next, the first grows by 0 or 1, and the second falls by 0 or 1. Both have MARGIN entries more on
    // each side than there are distances.
    const int32_t *ascending, *descending;
};

struct Call {  // the arguments of one call
    int64_t sequences, heads, kv_heads, width;  // heads / kv_heads query heads share a head of keys and values
    const int64_t* spans;  // [sequences, 4]: start and stop of the query rows, start and stop of the key rows
    int64_t q_stride, k_stride, v_stride, out_stride;  // elements between rows; heads are `width` elements apart
    float scale;
    int causal;
    int64_t window;  // keys on each side that a query attends to; -1: all
    Dropout dropout;
    uint64_t seed;
    const RelativePositions* positions;  // may be null; otherwise a sequence's queries and keys are the same rows
};

// number of items that a thread takes at a time
static inline int64_t items_per_chunk(int64_t items, int64_t threads) {
    return std::max<int64_t>(1, items / (32 * threads));
}

struct KeyRange {
    int64_t first, last;  // `last` is excluded
};

// returns the keys that a query attends to; the last query and the last key of a sequence have the same position
static inline KeyRange visible_keys(const Call& c, int64_t query, int64_t n, int64_t m) {
    int64_t position = query + m - n, first = 0, last = m;
    if (c.causal) last = std::min(last, position + 1);
    if (c.window >= 0) {
        first = std::max(first, position - c.window);
        last = std::min(last, position + c.window + 1);
    }
    return {std::min(first, std::max<int64_t>(last, 0)), std::max<int64_t>(last, 0)};
}

// x is a vector of values of the keys from `key` on; values of keys outside of the range are replaced by `otherwise`
static inline V mask_outside(V x, KeyRange range, int64_t key, V otherwise) {
    if (range.first <= key && key + LANES <= range.last) return x;  // the usual case
    VI keys = lanes() + (int32_t)key;
    return where((keys >= (int32_t)range.first) & (keys < (int32_t)range.last), x, otherwise);
}

struct RowSum {  // of a row of scores s, in units of log2 e: `top` is the largest s, and `sum` the sum of 2^(s - top)
    float top, sum;
};

// Computes the row of weights 2^(score * scale - top) from a row of scores, where `scale` includes the factor log2 e.
// Weights are 0 for keys that are not visible, in the range [from, to), and for dropped ones. The returned sum is that
// of the weights before dropout; the caller divides by it later. `key` is the key of the row's random numbers.
template <class E>
static inline RowSum softmax(const float* scores, KeyRange visible, int64_t from, int64_t to, float scale,
                             const Dropout& dropout, uint32_t key, typename E::T* weights) {
    int64_t first = visible.first / LANES * LANES, last = rounded_up(visible.last, LANES);
    V maxima = broadcast(-INFINITY), total = {};
    for (int64_t j = first; j < last; j += LANES)
        maxima = vector_max(maxima, mask_outside(*(const AnyV*)(scores + j), visible, j, broadcast(-INFINITY)));
    float top = max_element(maxima) * scale;
    for (int64_t j = from; j < first; j += LANES) E::store(weights + j, V{});
    for (int64_t j = first; j < last; j += LANES) {
        V e = mask_outside(exp2_of(*(const AnyV*)(scores + j) * scale - top), visible, j, V{});
        total += e;
        if (dropout.threshold) e *= dropout.factors(key, j);
        E::store(weights + j, e);
    }
    for (int64_t j = last; j < to; j += LANES) E::store(weights + j, V{});
    return {top, sum(total)};
}

// returns whether tile registers compute the products of a sequence of n queries; this depends on the sequence alone,
// so that its result does not depend on its batch
template <class E> static inline bool by_tiles([[maybe_unused]] const Call& c, [[maybe_unused]] int64_t n) {
#if defined(HAS_TILES)
    if constexpr (std::is_same_v<E, BFloat16>)
        return n >= MIN_AMX_ROWS && c.width % (TILE * E::IN_WORD) == 0 && tiles_allowed();
#endif
    return false;
}

template <class E> struct HeadShape {  // sizes of an item
    int64_t n, m, d;           // queries, keys, width
    int64_t depth_d, depth_m;  // words of d elements, and of m or, with tiles, padded_m elements
    int64_t padded_m;          // m, rounded up to whole vectors or, with tiles, to pairs of vectors
    HeadShape(const Call& c, const int64_t* span, bool tiles = false)
        : n(span[1] - span[0]),
          m(span[3] - span[2]),
          d(c.width),
          depth_d(words(c.width, E::IN_WORD)),
          depth_m(words(span[3] - span[2], E::IN_WORD)),
          padded_m(rounded_up(std::max<int64_t>(1, span[3] - span[2]), tiles ? 2 * LANES : LANES)) {
        if (tiles) depth_m = padded_m / E::IN_WORD;
    }
    int64_t transposed_words() const { return panels(padded_m) * PANEL * depth_d; }  // of B = k', [d, padded_m]
    int64_t packed_words() const { return panels(d) * PANEL * depth_m; }             // of B = v, [depth_m words, d]
};

// packs B = x', for x [count, d]; the columns of B from `count` to `columns` are 0
template <class E>
static void pack_all_transposed(const typename E::T* x, int64_t stride, int64_t count, int64_t d, int64_t columns,
                                uint32_t* out) {
    const int64_t depth = words(d, E::IN_WORD);
    for (int64_t p = 0; p < panels(count); p++) pack_transposed<E, E>(x, stride, count, d, p, out + p * depth * PANEL);
    for (int64_t column = rounded_up(count, LANES); column < columns; column += LANES) {
        uint32_t* panel = out + column / PANEL * depth * PANEL + column % PANEL;
        for (int64_t k = 0; k < depth; k++) *(AnyVU*)(panel + k * PANEL) = VU{};
    }
}

// packs B = x, for x [count, d], in panels of `depth` words; words beyond the last row of x are 0
template <class E>
static void pack_all(const typename E::T* x, int64_t stride, int64_t count, int64_t d, int64_t depth, uint32_t* out) {
    int64_t used = words(count, E::IN_WORD);
    for (int64_t p = 0; p < panels(d); p++) {
        uint32_t* panel = out + p * depth * PANEL;
        pack<E, E>(x, stride, count, d, p, panel);
        memset(panel + used * PANEL, 0, (depth - used) * PANEL * 4);
    }
}

// A pointer to Tiles is null if vectors compute the products, and not tile registers.
#if defined(HAS_TILES)
typedef TileShapes Tiles;
#else
struct Tiles {};
#endif

// Computes the panels [first, last) of A B, and writes them to `to`, with `stride` float32 between rows; column
// first * PANEL is the first one written. Tile registers write whole pairs of vectors, also beyond `columns`, for which
// rows must have room.
template <class E>
__attribute__((noinline)) static void multiply_into(LeftOperand a, int64_t rows, const uint32_t* b, int64_t depth,
                                                    int64_t columns, int64_t first, int64_t last, float* to,
                                                    int64_t stride, Tiles* tiles = nullptr) {
#if defined(HAS_TILES)
    if constexpr (std::is_same_v<E, BFloat16>)
        if (tiles) {
            for (int64_t row = 0; row < rows; row += 2 * TILE) {
                tiles->configure(rows - row);
                const uint32_t* left = a.at + row * a.row;
                for (int64_t column = first * PANEL; column < std::min(last * PANEL, columns); column += 2 * LANES) {
                    multiply_tiles<E>(left, a.row, depth, tiles->lower,
                                      b + column / PANEL * depth * PANEL + column % PANEL);
                    float* out = to + row * stride + column - first * PANEL;
                    _tile_stored(0, out, stride * 4);
                    _tile_stored(1, out + LANES, stride * 4);
                    if (!tiles->lower) continue;
                    _tile_stored(2, out + TILE * stride, stride * 4);
                    _tile_stored(3, out + TILE * stride + LANES, stride * 4);
                }
            }
            return;
        }
#endif
    multiply<E>(a, rows, b, depth, columns, first, last, [&](int64_t row, int64_t column, V x) INLINE {
        *(AnyV*)(to + row * stride + column - first * PANEL) = x;
    });
}

typedef int32_t AnyVI __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// returns from[indexes[i] - first] for LANES indexes, which change by at most 1 from one to the next, all upwards or
// all downwards; if they change by 1 each, one load of adjacent numbers replaces LANES loads
static inline V gather(const float* from, const int32_t* indexes, int64_t first) {
    from -= first;
    int32_t slope = indexes[LANES - 1] - indexes[0];
    if (slope == LANES - 1) return *(const AnyV*)(from + indexes[0]);
#if defined(__AVX512F__)
    if (slope == 1 - LANES) {
        __m512i reversed = _mm512_sub_epi32(_mm512_set1_epi32(LANES - 1), (__m512i)lanes());
        return (V)_mm512_permutexvar_ps(reversed, _mm512_loadu_ps(from + indexes[LANES - 1]));
    }
    return (V)_mm512_i32gather_ps(_mm512_loadu_si512(indexes), from, 4);
#else
    V x;
    for (int i = 0; i < LANES; i++) x[i] = from[indexes[i]];
    return x;
#endif
}

// Dot products of rows (queries or keys) with the embeddings of relative positions from index `lowest` to `highest`:
// the product with embedding i is at[row * stride + i - first].
struct PositionScores {
    float* at;
    int64_t first, stride;  // first: `lowest`, rounded down to a multiple of PANEL
    PositionScores(float* at, int64_t lowest, int64_t highest)
        : at(at), first(lowest / PANEL * PANEL), stride((highest / PANEL + 1) * PANEL - first) {}
    template <class E>
    void compute(LeftOperand rows, int64_t row_count, const uint32_t* packed, int64_t depth, int64_t count,
                 Tiles* tiles) {
        int64_t columns = rounded_up(count, LANES), last = (first + stride) / PANEL;
        multiply_into<E>(rows, row_count, packed, depth, columns, first / PANEL, last, at, stride, tiles);
    }
    // returns the products of a row with the embeddings of LANES indexes
    V of(int64_t row, const int32_t* indexes) const { return gather(at + row * stride, indexes, first); }
};

// Adds q K(p) from `content_to_position`, whose rows are queries of the block, and k Q(p) from `position_to_content`,
// whose rows are keys of the sequence, to scores [num_queries, padded_m]: for the queries from `query` on and the keys
// [left, right).
static inline void add_position_scores(const RelativePositions& positions, const PositionScores& content_to_position,
                                       const PositionScores& position_to_content, int64_t query, int64_t num_queries,
                                       int64_t left, int64_t right, int64_t m, int64_t padded_m, float* scores) {
    for (int64_t row = 0; row < num_queries; row += LANES)
        for (int64_t j = left; j < right; j += LANES) {
            VU by_key[LANES];               // k Q(p), [keys, queries]
            float by_query[LANES * LANES];  // k Q(p), [queries, keys]
            for (int64_t i = 0; i < LANES; i++) {
                const int32_t* indexes = positions.ascending + query + row - j - i;
                by_key[i] = j + i < m ? (VU)position_to_content.of(j + i, indexes) : VU{};
            }
            transpose_block(by_key, (uint32_t*)by_query, LANES);
            for (int64_t i = 0; i < std::min(LANES, num_queries - row); i++)
                *(AnyV*)(scores + (row + i) * padded_m + j) +=
                    *(const AnyV*)(by_query + i * LANES) +
                    content_to_position.of(row + i, positions.descending + j - query - row - i);
        }
}

// Computes weights * values for weights [rows, padded_m] and packed values of d columns, and calls store(row, column,
// sums) with the LANES sums from `column` on. Only `used` words of keys from word `skip` on are multiplied, since the
// weights of other keys are 0; the panels of the values have `depth` words.
template <class E, class Store>
static inline INLINE void weigh_values(const typename E::T* weights, int64_t rows, int64_t padded_m,
                                       const uint32_t* packed, int64_t depth, int64_t skip, int64_t used, int64_t d,
                                       Tiles* tiles, Store store) {
    LeftOperand a = {(const uint32_t*)weights + skip, padded_m / E::IN_WORD, 1};
    for (int64_t p = 0; p < panels(d); p++) {
        const uint32_t* panel = packed + (p * depth + skip) * PANEL;
        int64_t columns = std::min(PANEL, d - p * PANEL);
        auto store_in_panel = [&](int64_t row, int64_t column, V x) INLINE { store(row, p * PANEL + column, x); };
#if defined(HAS_TILES)
        if constexpr (std::is_same_v<E, BFloat16>)
            if (tiles) {
                for (int64_t row = 0; row < rows; row += 2 * TILE) {
                    tiles->configure(rows - row);
                    multiply_by_tiles<E>(*tiles, a.at + row * a.row, a.row, used, panel, columns,
                                         [&](int64_t i, int64_t column, V x) INLINE {
                                             store_in_panel(row + i, column, x);
                                         });
                }
                continue;
            }
#endif
        multiply<E>(a, rows, panel, used, columns, 0, 1, store_in_panel);
    }
}

// -- attention to every key -------------------------------------------------------------------------------------------
//
// Where every query attends to every key and nothing is added to its score, weights are 2^(score * scale), computed
// while the scores are in registers. The usual softmax writes scores to memory and reads them twice, since it subtracts
// the largest score of a row. Without that, the sum of a row may be so large or so small that weights have overflowed
// or lost bits; then the usual softmax is computed instead.

constexpr float LARGEST_SUM = 0x1p90f, SMALLEST_SUM = 0x1p-60f;
constexpr int64_t MIN_QUERIES = 4;  // fewer queries are not worth the conversion of keys and values

static inline V as_numbers(V x) { return x; }
static inline V as_numbers(VI x) { return __builtin_convertvector(x, V); }

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__) && !defined(FAST_BFLOAT16)  // FAST_BFLOAT16: for a test
#define HAS_FIXED_POINT 1
// Whether scores are computed from int16, and the result from float32, if the tensors are bfloat16. An Intel processor
// takes four times as long for a `dot` of BFloat16 as for one of Int16 or Float32, an AMD processor as long for each.
static bool bfloat16_is_slow() {
    static const bool slow = __builtin_cpu_is("intel");
    return slow;
}

// Rounds x [count, d] to whole multiples of a step, which are so small that the products of two rows of them cannot
// overflow; returns the step, or infinity if x has a number that is not finite.
static inline float to_fixed_point(const uint16_t* x, int64_t stride, int64_t count, int64_t d, int16_t* out) {
    VI largest = {};
    for (int64_t row = 0; row < count; row++)
        for (int64_t column = 0; column < d; column += LANES) {
            VI size = (VI)BFloat16::load(x + row * stride + column) & 0x7fffffff;  // as the bits of a float32
            largest = (VI)_mm512_max_epi32((__m512i)largest, (__m512i)size);
        }
    int32_t bits = _mm512_reduce_max_epi32((__m512i)largest);
    float size;
    memcpy(&size, &bits, 4);
    if (!(size < INFINITY)) return INFINITY;
    float limit = std::min(32767.f, std::floor(std::sqrt(0x1p31f / d) - 1)), factor = size > 0 ? limit / size : 0;
    for (int64_t row = 0; row < count; row++)
        for (int64_t column = 0; column < d; column += LANES) {
            V scaled = BFloat16::load(x + row * stride + column) * factor;
            __m256i rounded = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)scaled));
            _mm256_storeu_si256((__m256i*)(out + row * d + column), rounded);
        }
    return size / limit;
}
#endif

// Computes the result of an item whose queries attend to every key and, unless `sums` is null, the logarithm of the sum
// of each row of weights at sums[row * c.heads]. Returns false if the usual softmax is needed. Scores are products of
// elements S, and the result is a product of elements W.
template <class E, class S, class W>
static bool attend_with_operands(const Call& c, const int64_t* span, const typename E::T* queries,
                                const typename E::T* keys, const typename E::T* values, typename E::T* out, float* sums,
                                Scratch& scratch) {
    constexpr bool IS_FIXED = !std::is_same_v<S, E>;
    const HeadShape<S> scored(c, span);
    const HeadShape<W> weighed(c, span);
    const int64_t n = scored.n, m = scored.m, d = scored.d, padded_m = scored.padded_m;
    const int64_t fixed_words = IS_FIXED ? std::max(m, BLOCK) * d / 2 : 0;
    scratch.begin((scored.transposed_words() + weighed.packed_words() + fixed_words) * 4 +
                  BLOCK * padded_m * sizeof(typename W::T) + 1024);
    uint32_t* transposed_k = scratch.take<uint32_t>(scored.transposed_words());
    uint32_t* packed_v = scratch.take<uint32_t>(weighed.packed_words());
    typename W::T* weights = scratch.take<typename W::T>(BLOCK * padded_m);
    [[maybe_unused]] float key_step = 1;
#if defined(HAS_FIXED_POINT)
    int16_t* fixed = scratch.take<int16_t>(2 * fixed_words);  // the keys, and later the queries of a block
    if constexpr (IS_FIXED) {
        key_step = to_fixed_point(keys, c.k_stride, m, d, fixed);
        pack_all_transposed<S>(fixed, d, m, d, padded_m, transposed_k);
    }
#endif
    if constexpr (!IS_FIXED) pack_all_transposed<S>(keys, c.k_stride, m, d, padded_m, transposed_k);
    for (int64_t p = 0; p < panels(d); p++)
        pack<W, E>(values, c.v_stride, m, d, p, packed_v + p * weighed.depth_m * PANEL);
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t rows = std::min(BLOCK, n - first);
        LeftOperand a = {(const uint32_t*)(queries + first * c.q_stride), c.q_stride / E::IN_WORD, 1};
        float factor = c.scale * LOG2_E;
#if defined(HAS_FIXED_POINT)
        if constexpr (IS_FIXED) {
            factor *= key_step * to_fixed_point(queries + first * c.q_stride, c.q_stride, rows, d, fixed);
            if (!(factor < INFINITY)) return false;
            a = {(const uint32_t*)fixed, d / 2, 1};
        }
#endif
        V totals[BLOCK] = {};
        multiply<S>(a, rows, transposed_k, scored.depth_d, padded_m, 0, panels(m),
                    [&](int64_t row, int64_t column, auto x) INLINE {
                        V weight = mask_outside(E::exp2(as_numbers(x) * factor), {0, m}, column, V{});
                        totals[row] += weight;
                        W::store(weights + row * padded_m + column, weight);
                    });
        float inverse[BLOCK];
        for (int64_t row = 0; row < rows; row++) {
            float total = sum(totals[row]);
            if (!(total >= SMALLEST_SUM && total <= LARGEST_SUM)) return false;  // also for NaN
            if (sums) sums[(first + row) * c.heads] = std::log2(total);
            inverse[row] = 1 / total;
        }
        weigh_values<W>(weights, rows, padded_m, packed_v, weighed.depth_m, 0, weighed.depth_m, d, nullptr,
                        [&](int64_t row, int64_t column, V x) INLINE {
                            E::store(out + (first + row) * c.out_stride + column, x * inverse[row]);
                        });
    }
    return true;
}

// calls attend_with_operands with the operands that are fast on this processor
template <class E>
static inline bool attend_to_every_key(const Call& c, const int64_t* span, const typename E::T* queries,
                                       const typename E::T* keys, const typename E::T* values, typename E::T* out,
                                       float* sums, Scratch& scratch) {
#if defined(HAS_FIXED_POINT)
    if constexpr (std::is_same_v<E, BFloat16>)
        if (bfloat16_is_slow())
            return attend_with_operands<E, Int16, Float32>(c, span, queries, keys, values, out, sums, scratch);
#endif
    return attend_with_operands<E, E, E>(c, span, queries, keys, values, out, sums, scratch);
}

// Computes out [query rows, heads, width] and, unless `sums` is null, sums [query rows, heads]: the binary logarithm of
// the sum of 2^(score * scale * log2 e), or infinity for a query that attends to no key.
template <class E>
static void forward(const Call& c, const typename E::T* q, const typename E::T* k, const typename E::T* v,
                    typename E::T* out, float* sums, int threads) {
    typedef typename E::T T;
    const int64_t items = c.sequences * c.heads, chunk = items_per_chunk(items, threads);
    static thread_local Scratch shared_scratch;  // Q(p)' and K(p)' of relative positions, packed for each head
    const int64_t count = c.positions ? c.positions->count : 0;
    const int64_t position_words = panels(count) * PANEL * words(c.width, E::IN_WORD);
    shared_scratch.begin(2 * c.heads * position_words * 4 + 128);
    uint32_t* transposed_pq = shared_scratch.take<uint32_t>(c.heads * position_words);
    uint32_t* transposed_pk = shared_scratch.take<uint32_t>(c.heads * position_words);
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch scratch;
        Tiles shapes;
        if (c.positions) {
#pragma omp for
            for (int64_t head = 0; head < c.heads; head++) {
                int64_t stride = c.heads * c.width, from = head * c.width, to = head * position_words;
                const T* position_q = (const T*)c.positions->position_q;
                const T* position_k = (const T*)c.positions->position_k;
                pack_all_transposed<E>(position_q + from, stride, count, c.width, count, transposed_pq + to);
                pack_all_transposed<E>(position_k + from, stride, count, c.width, count, transposed_pk + to);
            }
        }
#pragma omp for schedule(dynamic, chunk)
        for (int64_t item = 0; item < items; item++) {
            int64_t head = item % c.heads, kv_head = head / (c.heads / c.kv_heads);
            const int64_t* span = c.spans + item / c.heads * 4;
            Tiles* tiles = by_tiles<E>(c, span[1] - span[0]) ? &shapes : nullptr;
            const int64_t block = tiles ? 2 * LANES : BLOCK;
            HeadShape<E> shape(c, span, tiles);
            if (shape.n == 0) continue;
            const T* queries = q + span[0] * c.q_stride + head * shape.d;
            const T* keys = k + span[2] * c.k_stride + kv_head * shape.d;
            const T* values = v + span[2] * c.v_stride + kv_head * shape.d;
            T* to = out + span[0] * c.out_stride + head * shape.d;
            bool every_key = shape.n >= MIN_QUERIES && shape.m > 0 && !c.causal && c.window < 0 &&
                             !c.dropout.threshold && !c.positions;
            float* item_sums = sums ? sums + span[0] * c.heads + head : nullptr;
            if (every_key && !tiles && attend_to_every_key<E>(c, span, queries, keys, values, to, item_sums, scratch))
                continue;
            int64_t num_scores = BLOCK * shape.padded_m, position_stride = 0, lowest = 0, highest = 0;
            if (c.positions) {
                lowest = c.positions->ascending[1 - shape.padded_m];
                highest = c.positions->ascending[shape.n + LANES - 2];
                position_stride = PositionScores(nullptr, lowest, highest).stride;
            }
            int64_t num_words =
                shape.transposed_words() + shape.packed_words() + num_scores + (shape.m + BLOCK) * position_stride;
            scratch.begin(num_words * 4 + num_scores * sizeof(T) + 1024);
            uint32_t* transposed_k = scratch.take<uint32_t>(shape.transposed_words());
            uint32_t* packed_v = scratch.take<uint32_t>(shape.packed_words());
            float* scores = scratch.take<float>(num_scores);
            T* weights = scratch.take<T>(num_scores);
            pack_all_transposed<E>(keys, c.k_stride, shape.m, shape.d, shape.padded_m, transposed_k);
            pack_all<E>(values, c.v_stride, shape.m, shape.d, shape.depth_m, packed_v);
            PositionScores position_to_content(scratch.take<float>(shape.m * position_stride), lowest, highest);
            float* block_scores = scratch.take<float>(BLOCK * position_stride);
            if (c.positions) {
                LeftOperand rows = {(const uint32_t*)keys, c.k_stride / E::IN_WORD, 1};
                position_to_content.compute<E>(rows, shape.m, transposed_pq + head * position_words, shape.depth_d,
                                               count, tiles);
            }
            for (int64_t first = 0; first < shape.n; first += block) {
                int64_t num_queries = std::min(block, shape.n - first);
                // the panels [from, last) have all keys [left, right) that a query of the block may attend to
                KeyRange low = visible_keys(c, first, shape.n, shape.m);
                KeyRange high = visible_keys(c, first + num_queries - 1, shape.n, shape.m);
                int64_t from = low.first / PANEL, last = panels(high.last), left = from * PANEL;
                int64_t right = std::min(shape.padded_m, last * PANEL);
                LeftOperand a = {(const uint32_t*)(queries + first * c.q_stride), c.q_stride / E::IN_WORD, 1};
                multiply_into<E>(a, num_queries, transposed_k, shape.depth_d, shape.padded_m, from, last, scores + left,
                                 shape.padded_m, tiles);
                if (c.positions) {
                    const int32_t* ascending = c.positions->ascending + first;
                    PositionScores content_to_position(block_scores, ascending[1 - right],
                                                       ascending[num_queries - 1 - left]);
                    content_to_position.compute<E>(a, num_queries, transposed_pk + head * position_words, shape.depth_d,
                                                   count, tiles);
                    add_position_scores(*c.positions, content_to_position, position_to_content, first, num_queries,
                                        left, right, shape.m, shape.padded_m, scores);
                }
                float inverse[BLOCK];  // 1 / the sum of each row of weights
                for (int64_t row = 0; row < num_queries; row++) {
                    KeyRange visible = visible_keys(c, first + row, shape.n, shape.m);
                    int64_t query = span[0] + first + row;
                    uint32_t key = c.dropout.threshold ? key_of(c.seed, query * c.heads + head) : 0;
                    T* w = weights + row * shape.padded_m;
                    if (visible.first >= visible.last) {  // the query attends to no key, and its result is 0
                        if (sums) sums[query * c.heads + head] = INFINITY;
                        inverse[row] = 0;
                        for (int64_t j = left; j < right; j += LANES) E::store(w + j, V{});
                        continue;
                    }
                    RowSum row_sum = softmax<E>(scores + row * shape.padded_m, visible, left, right, c.scale * LOG2_E,
                                                c.dropout, key, w);
                    if (sums) sums[query * c.heads + head] = row_sum.top + std::log2(row_sum.sum);
                    inverse[row] = 1 / row_sum.sum;
                }
                // skip the values of keys to which no query of the block attends
                int64_t skip = left / E::IN_WORD, used = std::min(shape.depth_m, right / E::IN_WORD) - skip;
                weigh_values<E>(weights, num_queries, shape.padded_m, packed_v, shape.depth_m, skip,
                                std::max<int64_t>(used, 0), shape.d, tiles,
                                [&](int64_t row, int64_t column, V x) INLINE {
                                    E::store(to + (first + row) * c.out_stride + column, x * inverse[row]);
                                });
            }
        }
    }
}

// Adds S' X to sums [keys, d], for a block of queries: S [queries, keys] are weights or gradients of scores, and X
// [queries, d] are queries or gradients of the result. `transposed` has S as words [queries / IN_WORD, padded_m], each
// of IN_WORD queries for one key; `packed` has X in panels of `depth` words.
template <class E>
static inline void add_transposed(const uint32_t* transposed, int64_t padded_m, int64_t keys, const uint32_t* packed,
                                  int64_t depth, int64_t d, float* sums, Tiles* tiles) {
#if defined(HAS_TILES)
    if constexpr (std::is_same_v<E, BFloat16>)
        if (tiles) {  // `depth` is TILE, and `keys` a multiple of 2 * TILE
            tiles->configure(2 * TILE);
            for (int64_t key = 0; key < keys; key += 2 * TILE) {
                alignas(64) uint32_t lines[2][TILE * TILE];  // S' of 2 * TILE keys: a line has the words of one key
                for (int64_t half = 0; half < 2; half++) {
                    VU in[LANES];
                    for (int64_t i = 0; i < LANES; i++)
                        in[i] = *(const AnyVU*)(transposed + i * padded_m + key + half * TILE);
                    transpose_block(in, lines[half], TILE);
                }
                _tile_loadd(4, lines[0], 64);
                _tile_loadd(5, lines[1], 64);
                for (int64_t column = 0; column < d; column += 2 * LANES) {
                    float *upper = sums + key * d + column, *lower = upper + TILE * d;
                    const uint32_t* b = packed + column / PANEL * depth * PANEL + column % PANEL;
                    _tile_loadd(6, b, PANEL * 4);
                    _tile_loadd(7, b + LANES, PANEL * 4);
                    _tile_loadd(0, upper, d * 4);
                    _tile_loadd(1, upper + LANES, d * 4);
                    _tile_loadd(2, lower, d * 4);
                    _tile_loadd(3, lower + LANES, d * 4);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                    _tile_stored(0, upper, d * 4);
                    _tile_stored(1, upper + LANES, d * 4);
                    _tile_stored(2, lower, d * 4);
                    _tile_stored(3, lower + LANES, d * 4);
                }
            }
            return;
        }
#endif
    for (int64_t p = 0; p < panels(d); p++)
        multiply<E>({transposed, 1, padded_m}, keys, packed + p * depth * PANEL, depth,
                    std::min(PANEL, d - p * PANEL), 0, 1, [&](int64_t row, int64_t column, V x) INLINE {
                        *(AnyV*)(sums + row * d + p * PANEL + column) += x;
                    });
}

// The inputs of the gradient of a row of scores s: the binary logarithm of a weight is s * scale * log2 e - log_sum,
// and `delta` is the sum over keys of weight times gradient of the weight (Dao et al. 2022, appendix B).
struct GradientRow {
    KeyRange visible;
    uint32_t key;  // key of the row's random numbers for dropout
    float log_sum, delta;
};

// Computes the gradients dq, dk and dv from `out` and `sums` of `forward` and the gradient `dout` of `out`. With the
// weights P, their gradients dP = dO V', and D = rowsum(dO * O), the gradient of the scores is dS = scale * P * (dP -
// D), and dQ = dS K, dK = dS' Q, dV = P' dO; with dropout, its factors multiply P in dV, and dP in dS. An item of work
// for a thread is one key head of one sequence with all query heads that share it, since it sums the gradients of
// these.
template <class E>
static void backward(const Call& c, const typename E::T* q, const typename E::T* k, const typename E::T* v,
                     const typename E::T* out, const typename E::T* dout, int64_t dout_stride, const float* sums,
                     typename E::T* dq, typename E::T* dk, typename E::T* dv, int64_t d_stride, int threads) {
    typedef typename E::T T;
    const int64_t items = c.sequences * c.kv_heads, chunk = items_per_chunk(items, threads);
    const int64_t group = c.heads / c.kv_heads;
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch scratch;
        Tiles shapes;
#pragma omp for schedule(dynamic, chunk)
        for (int64_t item = 0; item < items; item++) {
            int64_t kv_head = item % c.kv_heads;
            const int64_t* span = c.spans + item / c.kv_heads * 4;
            Tiles* tiles = by_tiles<E>(c, span[1] - span[0]) ? &shapes : nullptr;
            const int64_t block = tiles ? 2 * LANES : BLOCK, block_words = words(block, E::IN_WORD);
            HeadShape<E> shape(c, span, tiles);
            const int64_t d = shape.d, padded_m = shape.padded_m;
            const T *keys = k + span[2] * c.k_stride + kv_head * d, *values = v + span[2] * c.v_stride + kv_head * d;
            T *to_k = dk + span[2] * d_stride + kv_head * d, *to_v = dv + span[2] * d_stride + kv_head * d;
            int64_t column_words = panels(d) * PANEL * block_words;
            int64_t num_words = 2 * shape.transposed_words() + shape.packed_words() + 2 * column_words +
                                2 * block * padded_m + 2 * block_words * padded_m + 2 * padded_m * d;
            scratch.begin(num_words * 4 + block * padded_m * sizeof(T) + 2048);
            uint32_t* transposed_k = scratch.take<uint32_t>(shape.transposed_words());
            uint32_t* transposed_v = scratch.take<uint32_t>(shape.transposed_words());
            uint32_t* packed_k = scratch.take<uint32_t>(shape.packed_words());
            uint32_t *packed_q = scratch.take<uint32_t>(column_words), *packed_g = scratch.take<uint32_t>(column_words);
            float *scores = scratch.take<float>(block * padded_m), *dp = scratch.take<float>(block * padded_m);
            uint32_t* transposed_p = scratch.take<uint32_t>(block_words * padded_m);
            uint32_t* transposed_ds = scratch.take<uint32_t>(block_words * padded_m);
            float *sum_k = scratch.take<float>(padded_m * d), *sum_v = scratch.take<float>(padded_m * d);
            T* ds = scratch.take<T>(block * padded_m);
            memset(sum_k, 0, padded_m * d * sizeof(float));
            memset(sum_v, 0, padded_m * d * sizeof(float));
            pack_all_transposed<E>(keys, c.k_stride, shape.m, d, padded_m, transposed_k);
            pack_all_transposed<E>(values, c.v_stride, shape.m, d, padded_m, transposed_v);
            pack_all<E>(keys, c.k_stride, shape.m, d, shape.depth_m, packed_k);
            const int64_t blocks = (shape.n + block - 1) / block;
            for (int64_t part = 0; part < group * blocks; part++) {
                const int64_t head = kv_head * group + part / blocks, first = part % blocks * block;
                const T *queries = q + span[0] * c.q_stride + head * d, *o = out + span[0] * c.out_stride + head * d;
                const T* g = dout + span[0] * dout_stride + head * d;  // dO
                T* to_q = dq + span[0] * d_stride + head * d;
                int64_t num_queries = std::min(block, shape.n - first);
                int64_t depth = tiles ? block_words : words(num_queries, E::IN_WORD);
                // the panels [from, last) have all keys [left, right) that a query of the block may attend to
                KeyRange low = visible_keys(c, first, shape.n, shape.m);
                KeyRange high = visible_keys(c, first + num_queries - 1, shape.n, shape.m);
                int64_t from = low.first / PANEL, last = panels(high.last), left = from * PANEL;
                int64_t right = std::min(padded_m, last * PANEL);
                LeftOperand a = {(const uint32_t*)(queries + first * c.q_stride), c.q_stride / E::IN_WORD, 1};
                LeftOperand b = {(const uint32_t*)(g + first * dout_stride), dout_stride / E::IN_WORD, 1};
                multiply_into<E>(a, num_queries, transposed_k, shape.depth_d, padded_m, from, last, scores + left,
                                 padded_m, tiles);
                multiply_into<E>(b, num_queries, transposed_v, shape.depth_d, padded_m, from, last, dp + left, padded_m,
                                 tiles);
                // P and dS, in words of the same key in E::IN_WORD queries, and dS of each query also in a row of `ds`
                for (int64_t line = 0; line < depth; line++) {
                    uint32_t *p_line = transposed_p + line * padded_m, *ds_line = transposed_ds + line * padded_m;
                    GradientRow rows[E::IN_WORD];
                    const int64_t row = line * E::IN_WORD;
                    const int64_t count = std::clamp<int64_t>(num_queries - row, 0, E::IN_WORD);
                    for (int64_t i = 0; i < count; i++) {
                        int64_t query = span[0] + first + row + i;
                        V products = {};
                        for (int64_t x = 0; x < d; x += LANES)
                            products += E::load(o + (first + row + i) * c.out_stride + x) *
                                        E::load(g + (first + row + i) * dout_stride + x);
                        rows[i] = {visible_keys(c, first + row + i, shape.n, shape.m),
                                   c.dropout.threshold ? key_of(c.seed, query * c.heads + head) : 0,
                                   sums[query * c.heads + head], sum(products)};
                    }
                    for (int64_t j = left; j < right; j += LANES) {
                        V weights[2] = {}, gradients[2] = {};
                        for (int64_t i = 0; i < count; i++) {
                            // a row without visible keys has an infinite log_sum, so all its weights are 0
                            V s = *(const AnyV*)(scores + (row + i) * padded_m + j) * (c.scale * LOG2_E);
                            s -= rows[i].log_sum;
                            V w = mask_outside(exp2_of(s), rows[i].visible, j, V{});
                            V dw = *(const AnyV*)(dp + (row + i) * padded_m + j);
                            weights[i] = w;
                            if (c.dropout.threshold) {
                                V factors = c.dropout.factors(rows[i].key, j);
                                dw *= factors;
                                weights[i] *= factors;
                            }
                            gradients[i] = w * (dw - rows[i].delta) * c.scale;
                            E::store(ds + (row + i) * padded_m + j, gradients[i]);
                        }
                        *(AnyVU*)(p_line + j) = E::pair(weights[0], weights[1]);
                        *(AnyVU*)(ds_line + j) = E::pair(gradients[0], gradients[1]);
                    }
                }
                int64_t num_keys = std::min(shape.m, right) - left;
                if (tiles) num_keys = right - left;
                pack_all<E>(queries + first * c.q_stride, c.q_stride, num_queries, d, depth, packed_q);
                pack_all<E>(g + first * dout_stride, dout_stride, num_queries, d, depth, packed_g);
                int64_t skip = left / E::IN_WORD, used = words(std::max<int64_t>(0, num_keys), E::IN_WORD);
                weigh_values<E>(ds, num_queries, padded_m, packed_k, shape.depth_m, skip, used, d, tiles,
                                [&](int64_t row, int64_t column, V x) INLINE {
                                    E::store(to_q + (first + row) * d_stride + column, x);
                                });
                if (num_keys <= 0) continue;
                add_transposed<E>(transposed_ds + left, padded_m, num_keys, packed_q, depth, d, sum_k + left * d,
                                  tiles);
                add_transposed<E>(transposed_p + left, padded_m, num_keys, packed_g, depth, d, sum_v + left * d,
                                  tiles);
            }
            for (int64_t row = 0; row < shape.m; row++)
                for (int64_t i = 0; i < d; i += LANES) {
                    E::store(to_k + row * d_stride + i, *(const AnyV*)(sum_k + row * d + i));
                    E::store(to_v + row * d_stride + i, *(const AnyV*)(sum_v + row * d + i));
                }
        }
    }
}

extern "C" {

// Computes `forward`. q, k, v and out are bfloat16 if `half`, and `width` is a multiple of LANES. p is the probability
// of dropout. The other arguments are those of Call; `sums` may be null.
void heedful_attention(int64_t sequences, int64_t heads, int64_t kv_heads, int64_t width, const int64_t* spans,
                       const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                       int64_t v_stride, float scale, int causal, int64_t window, double p, uint64_t seed, int half,
                       void* out, int64_t out_stride, float* sums, int threads) {
    Call c = {sequences,  heads, kv_heads, width,  spans,      q_stride, k_stride, v_stride,
              out_stride, scale, causal,   window, Dropout(p), seed,     nullptr};
    if (!half) forward<Float32>(c, (const float*)q, (const float*)k, (const float*)v, (float*)out, sums, threads);
#if defined(__AVX512BF16__)
    else
        forward<BFloat16>(c, (const uint16_t*)q, (const uint16_t*)k, (const uint16_t*)v, (uint16_t*)out, sums, threads);
#endif
}

// Computes disentangled attention, for which there is no dropout and no gradient; see RelativePositions for position_q,
// position_k and `count`. `indexes` [2, 2 (reach + MARGIN) + 1] has the index of the embedding for each distance
// query - key, from -reach - MARGIN to reach + MARGIN, and then the same in reverse order.
void heedful_disentangled_attention(int64_t sequences, int64_t heads, int64_t width, const int64_t* spans,
                                    const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                                    int64_t v_stride, float scale, int half, const void* position_q,
                                    const void* position_k, int64_t count, const int32_t* indexes, int64_t reach,
                                    void* out, int64_t out_stride, int threads) {
    const int64_t middle = reach + MARGIN;
    RelativePositions positions = {position_q, position_k, count, indexes + middle, indexes + 3 * middle + 1};
    Call c = {sequences,  heads, heads, width, spans,        q_stride, k_stride,  v_stride,
              out_stride, scale, 0,     -1,    Dropout(0.0), 0,        &positions};
    if (!half) forward<Float32>(c, (const float*)q, (const float*)k, (const float*)v, (float*)out, nullptr, threads);
#if defined(__AVX512BF16__)
    else
        forward<BFloat16>(c, (const uint16_t*)q, (const uint16_t*)k, (const uint16_t*)v, (uint16_t*)out, nullptr,
                          threads);
#endif
}

// Computes `backward`, with `out` and `sums` of heedful_attention and the same arguments; dq, dk and dv have d_stride
// elements between rows. Gradients of rows that belong to no sequence are not written: pass tensors of zeros.
void heedful_attention_gradient(int64_t sequences, int64_t heads, int64_t kv_heads, int64_t width,
                                const int64_t* spans, const void* q, int64_t q_stride, const void* k, int64_t k_stride,
                                const void* v, int64_t v_stride, float scale, int causal, int64_t window, double p,
                                uint64_t seed, int half, const void* out, int64_t out_stride, const float* sums,
                                const void* dout, int64_t dout_stride, void* dq, void* dk, void* dv, int64_t d_stride,
                                int threads) {
    Call c = {sequences,  heads, kv_heads, width,  spans,      q_stride, k_stride, v_stride,
              out_stride, scale, causal,   window, Dropout(p), seed,     nullptr};
    if (!half)
        backward<Float32>(c, (const float*)q, (const float*)k, (const float*)v, (const float*)out, (const float*)dout,
                          dout_stride, sums, (float*)dq, (float*)dk, (float*)dv, d_stride, threads);
#if defined(__AVX512BF16__)
    else
        backward<BFloat16>(c, (const uint16_t*)q, (const uint16_t*)k, (const uint16_t*)v, (const uint16_t*)out,
                           (const uint16_t*)dout, dout_stride, sums, (uint16_t*)dq, (uint16_t*)dk, (uint16_t*)dv,
                           d_stride, threads);
#endif
}
}
