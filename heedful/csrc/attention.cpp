// Attention of packed sequences: softmax(scale q k') v for each sequence and head, and its gradient.
//
// A sequence's keys and values are packed once for each head; its queries are taken in blocks whose scores stay in the
// cache. Scores are computed again in the backward pass, from the logarithm of each row's sum (Dao et al. 2022).
#include "tiles.h"

static constexpr int64_t BLOCK = 48;  // queries in a block; where tiles compute the products, a block has 2 * TILE

static inline int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

static constexpr int64_t MARGIN = 2 * LANES;  // rounding up a number of keys adds fewer than this

// The terms q K(p) + k Q(p) of disentangled attention, where p is the embedding of the relative position, and K and Q
// project it as keys and queries (He et al. 2021, arXiv:2006.03654, section 3.1).
struct RelativePositions {
    const void *position_q, *position_k;  // Q(p) and K(p) of `count` embeddings, heads side by side in a row
    int64_t count;
    // the index of the embedding: ascending[query - key] and descending[key - query]; steps are 0 or 1, and 0 or -1.
    // Both can be read MARGIN beyond the longest distance.
    const int32_t *ascending, *descending;
};

struct Call {  // the arguments of one call
    int64_t sequences, heads, kv_heads, width;    // a key and value head is shared by heads / kv_heads query heads
    const int64_t* spans;                         // start and stop of each sequence's queries and keys
    int64_t q_stride, k_stride, v_stride, out_stride;  // elements between rows; heads are `width` elements apart
    float scale;
    int causal;
    int64_t window;  // -1: no window
    Dropout dropout;
    uint64_t seed;
    const RelativePositions* positions;  // may be null; otherwise a sequence's queries and keys are the same rows
};

// items, which are heads of sequences, that a thread takes at a time
static inline int64_t items_per_chunk(int64_t items, int64_t threads) {
    return std::max<int64_t>(1, items / (32 * threads));
}

struct KeyRange {
    int64_t first, last;  // `last` excluded
};

// the keys that a query attends to; the last query and the last key have the same position
static inline KeyRange visible_keys(const Call& c, int64_t query, int64_t n, int64_t m) {
    int64_t here = query + m - n, first = 0, last = m;
    if (c.causal) last = std::min(last, here + 1);
    if (c.window >= 0) {
        first = std::max(first, here - c.window);
        last = std::min(last, here + c.window + 1);
    }
    return {std::min(first, std::max<int64_t>(last, 0)), std::max<int64_t>(last, 0)};
}

// x, or `otherwise` in the lanes of a vector from `column` on that lie outside of the range
static inline V mask_outside(V x, KeyRange s, int64_t column, V otherwise) {
    if (s.first <= column && column + LANES <= s.last) return x;  // the usual case
    VI place = lanes() + (int32_t)column;
    return where((place >= (int32_t)s.first) & (place < (int32_t)s.last), x, otherwise);
}

struct RowSum {  // of a row of weights: `sum` of 2^(s - top), where `top` is the largest s
    float top, sum;
};

// weights 2^(s scale log2 e - top) of the visible keys, 0 where dropped; their sum is taken before dropout
template <class E>
static inline RowSum softmax(const float* scores, KeyRange s, int64_t from, int64_t to, float scale,
                             const Dropout& dropout, uint32_t key, typename E::T* weights) {
    int64_t first = s.first / LANES * LANES, last = rounded_up(s.last, LANES);
    V most = broadcast(-INFINITY), total = {};
    for (int64_t j = first; j < last; j += LANES)
        most = vector_max(most, mask_outside(*(const AnyV*)(scores + j), s, j, broadcast(-INFINITY)));
    float top = max_element(most) * scale;
    for (int64_t j = from; j < first; j += LANES) E::store(weights + j, V{});
    for (int64_t j = first; j < last; j += LANES) {
        V e = mask_outside(exp2_of(*(const AnyV*)(scores + j) * scale - top), s, j, V{});
        total += e;
        if (dropout.threshold) e *= dropout.factors(key, j);
        E::store(weights + j, e);
    }
    for (int64_t j = last; j < to; j += LANES) E::store(weights + j, V{});
    return {top, sum(total)};
}

// whether a sequence of `n` queries is computed by tiles: decided for each sequence alone, so that its bits do not
// depend on its batch
template <class E> static inline bool by_tiles([[maybe_unused]] const Call& c, [[maybe_unused]] int64_t n) {
#if defined(HAS_TILES)
    if constexpr (std::is_same_v<E, BFloat16>)
        return n >= MIN_AMX_ROWS && c.width % (TILE * E::IN_WORD) == 0 && tiles_allowed();
#endif
    return false;
}

template <class E> struct HeadShape {  // one head of one sequence
    int64_t n, m, d;                 // queries, keys, width
    int64_t depth_d, depth_m, wide;  // words of the width and of the keys; keys in whole vectors, or in pairs of tiles
    HeadShape(const Call& c, const int64_t* span, bool tiles = false)
        : n(span[1] - span[0]),
          m(span[3] - span[2]),
          d(c.width),
          depth_d(words(c.width, E::IN_WORD)),
          depth_m(words(span[3] - span[2], E::IN_WORD)),
          wide(rounded_up(std::max<int64_t>(1, span[3] - span[2]), tiles ? 2 * LANES : LANES)) {
        if (tiles) depth_m = wide / E::IN_WORD;
    }
    int64_t transposed_words() const { return panels(wide) * PANEL * depth_d; }
    int64_t packed_words() const { return panels(d) * PANEL * depth_m; }
};

// packs the transpose of x [count, d] as the right side of a product; its columns from `count` to `columns` are 0
template <class E>
static void pack_all_transposed(const typename E::T* x, int64_t stride, int64_t count, int64_t d, int64_t columns,
                                uint32_t* out) {
    const int64_t deep = words(d, E::IN_WORD);
    for (int64_t p = 0; p < panels(count); p++) pack_transposed<E, E>(x, stride, count, d, p, out + p * deep * PANEL);
    for (int64_t column = rounded_up(count, LANES); column < columns; column += LANES) {
        uint32_t* panel = out + column / PANEL * deep * PANEL + column % PANEL;
        for (int64_t k = 0; k < deep; k++) *(AnyVU*)(panel + k * PANEL) = VU{};
    }
}

// packs x [count, d] as the right side of a product, panel after panel; a panel has `deep` lines of words, and those
// beyond the last row of x are 0
template <class E>
static void pack_all(const typename E::T* x, int64_t stride, int64_t count, int64_t d, int64_t deep, uint32_t* out) {
    int64_t used = words(count, E::IN_WORD);
    for (int64_t p = 0; p < panels(d); p++) {
        uint32_t* panel = out + p * deep * PANEL;
        pack<E, E>(x, stride, count, d, p, panel);
        memset(panel + used * PANEL, 0, (deep - used) * PANEL * 4);
    }
}

#if defined(HAS_TILES)
typedef TileShapes Tiles;
#else
struct Tiles {};
#endif

// writes the panels [first, last) of a product to `to`, with `stride` floats between rows; by tiles unless `tiles` is
// null: then whole pairs of vectors, also beyond `columns`, for which a row must have room
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

// from[indexes[i] - first] for LANES indexes, which ascend or descend by at most 1 a step; one load if all steps are 1
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

// Products of rows with the embeddings of relative positions from index `lowest` to `highest`, in row-major order.
struct PositionScores {
    float* at;
    int64_t first, stride;  // index of the first embedding, a multiple of PANEL; floats between rows
    PositionScores(float* at, int64_t lowest, int64_t highest)
        : at(at), first(lowest / PANEL * PANEL), stride((highest / PANEL + 1) * PANEL - first) {}
    template <class E>
    void compute(LeftOperand rows, int64_t row_count, const uint32_t* packed, int64_t depth, int64_t count,
                 Tiles* tiles) {
        int64_t columns = rounded_up(count, LANES), last = (first + stride) / PANEL;
        multiply_into<E>(rows, row_count, packed, depth, columns, first / PANEL, last, at, stride, tiles);
    }
    V of(int64_t row, const int32_t* indexes) const { return gather(at + row * stride, indexes, first); }
};

// adds both terms to the scores of `num_queries` queries from `query` on, and of the keys from `left` to `right`
static inline void add_position_scores(const RelativePositions& positions, const PositionScores& content_to_position,
                                       const PositionScores& position_to_content, int64_t query, int64_t num_queries,
                                       int64_t left, int64_t right, int64_t m, int64_t wide, float* scores) {
    for (int64_t row = 0; row < num_queries; row += LANES)
        for (int64_t j = left; j < right; j += LANES) {
            VU by_key[LANES];  // a vector for each key, over queries
            float by_query[LANES * LANES];  // the transpose
            for (int64_t i = 0; i < LANES; i++) {
                const int32_t* indexes = positions.ascending + query + row - j - i;
                by_key[i] = j + i < m ? (VU)position_to_content.of(j + i, indexes) : VU{};
            }
            transpose_block(by_key, (uint32_t*)by_query, LANES);
            for (int64_t i = 0; i < std::min(LANES, num_queries - row); i++)
                *(AnyV*)(scores + (row + i) * wide + j) +=
                    *(const AnyV*)(by_query + i * LANES) +
                    content_to_position.of(row + i, positions.descending + j - query - row - i);
        }
}

// store(row, column, sums) for the product of weights, `wide` numbers between rows, with the values of `d` columns,
// over the words [skip, skip + deep) of the keys; a packed panel of values has `depth` words
template <class E, class Store>
static inline INLINE void weigh_values(const typename E::T* weights, int64_t rows, int64_t wide, const uint32_t* packed,
                                       int64_t depth, int64_t skip, int64_t deep, int64_t d, Tiles* tiles,
                                       Store store) {
    LeftOperand a = {(const uint32_t*)weights + skip, wide / E::IN_WORD, 1};
    for (int64_t p = 0; p < panels(d); p++) {
        const uint32_t* panel = packed + (p * depth + skip) * PANEL;
        int64_t columns = std::min(PANEL, d - p * PANEL);
        auto here = [&](int64_t row, int64_t column, V x) INLINE { store(row, p * PANEL + column, x); };
#if defined(HAS_TILES)
        if constexpr (std::is_same_v<E, BFloat16>)
            if (tiles) {
                for (int64_t row = 0; row < rows; row += 2 * TILE) {
                    tiles->configure(rows - row);
                    multiply_by_tiles<E>(*tiles, a.at + row * a.row, a.row, deep, panel, columns,
                                         [&](int64_t i, int64_t column, V x) INLINE { here(row + i, column, x); });
                }
                continue;
            }
#endif
        multiply<E>(a, rows, panel, deep, columns, 0, 1, here);
    }
}

template <class E>
static void forward(const Call& c, const typename E::T* q, const typename E::T* k, const typename E::T* v,
                    typename E::T* out, float* sums, int threads) {
    typedef typename E::T T;
    const int64_t items = c.sequences * c.heads, chunk = items_per_chunk(items, threads);
    static thread_local Scratch shared_scratch;  // embeddings of relative positions, packed for each head
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
            int64_t plane = BLOCK * shape.wide, position_stride = 0, lowest = 0, highest = 0;
            if (c.positions) {
                lowest = c.positions->ascending[1 - shape.wide];
                highest = c.positions->ascending[shape.n + LANES - 2];
                position_stride = PositionScores(nullptr, lowest, highest).stride;
            }
            int64_t num_words =
                shape.transposed_words() + shape.packed_words() + plane + (shape.m + BLOCK) * position_stride;
            scratch.begin(num_words * 4 + plane * sizeof(T) + 1024);
            uint32_t* transposed = scratch.take<uint32_t>(shape.transposed_words());
            uint32_t* packed = scratch.take<uint32_t>(shape.packed_words());
            float* scores = scratch.take<float>(plane);
            T* weights = scratch.take<T>(plane);
            pack_all_transposed<E>(keys, c.k_stride, shape.m, shape.d, shape.wide, transposed);
            pack_all<E>(values, c.v_stride, shape.m, shape.d, shape.depth_m, packed);
            PositionScores position_to_content(scratch.take<float>(shape.m * position_stride), lowest, highest);
            float* block_scores = scratch.take<float>(BLOCK * position_stride);
            if (c.positions) {
                LeftOperand rows = {(const uint32_t*)keys, c.k_stride / E::IN_WORD, 1};
                position_to_content.compute<E>(rows, shape.m, transposed_pq + head * position_words, shape.depth_d,
                                               count, tiles);
            }
            for (int64_t first = 0; first < shape.n; first += block) {
                int64_t num_queries = std::min(block, shape.n - first);
                KeyRange low = visible_keys(c, first, shape.n, shape.m);
                KeyRange high = visible_keys(c, first + num_queries - 1, shape.n, shape.m);
                int64_t from = low.first / PANEL, last = panels(high.last), left = from * PANEL;
                int64_t right = std::min(shape.wide, last * PANEL);
                LeftOperand a = {(const uint32_t*)(queries + first * c.q_stride), c.q_stride / E::IN_WORD, 1};
                multiply_into<E>(a, num_queries, transposed, shape.depth_d, shape.wide, from, last, scores + left,
                                 shape.wide, tiles);
                if (c.positions) {
                    const int32_t* ascending = c.positions->ascending + first;
                    PositionScores content_to_position(block_scores, ascending[1 - right],
                                                       ascending[num_queries - 1 - left]);
                    content_to_position.compute<E>(a, num_queries, transposed_pk + head * position_words, shape.depth_d,
                                                   count, tiles);
                    add_position_scores(*c.positions, content_to_position, position_to_content, first, num_queries,
                                        left, right, shape.m, shape.wide, scores);
                }
                float inverse[BLOCK];
                for (int64_t row = 0; row < num_queries; row++) {
                    KeyRange s = visible_keys(c, first + row, shape.n, shape.m);
                    int64_t query = span[0] + first + row;
                    uint32_t key = c.dropout.threshold ? key_of(c.seed, query * c.heads + head) : 0;
                    T* w = weights + row * shape.wide;
                    if (s.first >= s.last) {  // the query sees no key
                        if (sums) sums[query * c.heads + head] = INFINITY;
                        inverse[row] = 0;
                        for (int64_t j = left; j < right; j += LANES) E::store(w + j, V{});
                        continue;
                    }
                    RowSum row_sum = softmax<E>(scores + row * shape.wide, s, left, right, c.scale * LOG2_E,
                                                c.dropout, key, w);
                    if (sums) sums[query * c.heads + head] = row_sum.top + std::log2(row_sum.sum);
                    inverse[row] = 1 / row_sum.sum;
                }
                // skip the values of keys that no query of the block sees
                int64_t skip = left / E::IN_WORD, deep = std::min(shape.depth_m, right / E::IN_WORD) - skip;
                weigh_values<E>(weights, num_queries, shape.wide, packed, shape.depth_m, skip,
                                std::max<int64_t>(deep, 0), shape.d, tiles,
                                [&](int64_t row, int64_t column, V x) INLINE {
                                    E::store(to + (first + row) * c.out_stride + column, x * inverse[row]);
                                });
            }
        }
    }
}

// sums[keys, d] += transpose(dS) Q, or transpose(P) dO, for a block of queries: `transposed` has dS or P as words
// [query pair, key], `wide` words between lines, and `packed` has Q or dO in panels of `deep` words
template <class E>
static inline void add_transposed(const uint32_t* transposed, int64_t wide, int64_t keys, const uint32_t* packed,
                                  int64_t deep, int64_t d, float* sums, Tiles* tiles) {
#if defined(HAS_TILES)
    if constexpr (std::is_same_v<E, BFloat16>)
        if (tiles) {  // `deep` is TILE, and `keys` a multiple of 2 * TILE
            tiles->configure(2 * TILE);
            for (int64_t key = 0; key < keys; key += 2 * TILE) {
                alignas(64) uint32_t lines[2][TILE * TILE];  // words of pairs of queries for each key
                for (int64_t half = 0; half < 2; half++) {
                    VU in[LANES];
                    for (int64_t i = 0; i < LANES; i++)
                        in[i] = *(const AnyVU*)(transposed + i * wide + key + half * TILE);
                    transpose_block(in, lines[half], TILE);
                }
                _tile_loadd(4, lines[0], 64);
                _tile_loadd(5, lines[1], 64);
                for (int64_t column = 0; column < d; column += 2 * LANES) {
                    float *upper = sums + key * d + column, *lower = upper + TILE * d;
                    const uint32_t* b = packed + column / PANEL * deep * PANEL + column % PANEL;
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
        multiply<E>({transposed, 1, wide}, keys, packed + p * deep * PANEL, deep, std::min(PANEL, d - p * PANEL), 0, 1,
                    [&](int64_t row, int64_t column, V x) INLINE {
                        *(AnyV*)(sums + row * d + p * PANEL + column) += x;
                    });
}

// What the gradient of a row of scores needs: scale s log2 e - log_sum is the binary logarithm of a weight, and `level`
// the sum of the weights times their gradients (Dao et al. 2022, appendix B).
struct GradientRow {
    KeyRange sees;
    uint32_t key;  // from which the dropout of the row is drawn
    float log_sum, level;
};

template <class E>
static void backward(const Call& c, const typename E::T* q, const typename E::T* k, const typename E::T* v,
                     const typename E::T* out, const typename E::T* dout, int64_t dout_stride, const float* sums,
                     typename E::T* dq, typename E::T* dk, typename E::T* dv, int64_t d_stride, int threads) {
    typedef typename E::T T;
    // a thread takes all query heads of a key head, whose gradients it sums
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
            const int64_t d = shape.d, wide = shape.wide;
            const T *keys = k + span[2] * c.k_stride + kv_head * d, *values = v + span[2] * c.v_stride + kv_head * d;
            T *to_k = dk + span[2] * d_stride + kv_head * d, *to_v = dv + span[2] * d_stride + kv_head * d;
            int64_t column_words = panels(d) * PANEL * block_words;
            int64_t num_words = 2 * shape.transposed_words() + shape.packed_words() + 2 * column_words +
                                2 * block * wide + 2 * block_words * wide + 2 * wide * d;
            scratch.begin(num_words * 4 + block * wide * sizeof(T) + 2048);
            uint32_t* transposed_k = scratch.take<uint32_t>(shape.transposed_words());
            uint32_t* transposed_v = scratch.take<uint32_t>(shape.transposed_words());
            uint32_t* packed_k = scratch.take<uint32_t>(shape.packed_words());
            uint32_t *packed_q = scratch.take<uint32_t>(column_words), *packed_g = scratch.take<uint32_t>(column_words);
            float *scores = scratch.take<float>(block * wide), *slopes = scratch.take<float>(block * wide);
            uint32_t* transposed_p = scratch.take<uint32_t>(block_words * wide);
            uint32_t* transposed_s = scratch.take<uint32_t>(block_words * wide);
            float *sum_k = scratch.take<float>(wide * d), *sum_v = scratch.take<float>(wide * d);
            T* ds = scratch.take<T>(block * wide);
            memset(sum_k, 0, wide * d * sizeof(float));
            memset(sum_v, 0, wide * d * sizeof(float));
            pack_all_transposed<E>(keys, c.k_stride, shape.m, d, wide, transposed_k);
            pack_all_transposed<E>(values, c.v_stride, shape.m, d, wide, transposed_v);
            pack_all<E>(keys, c.k_stride, shape.m, d, shape.depth_m, packed_k);
            const int64_t blocks = (shape.n + block - 1) / block;
            for (int64_t part = 0; part < group * blocks; part++) {
                const int64_t head = kv_head * group + part / blocks, first = part % blocks * block;
                const T *queries = q + span[0] * c.q_stride + head * d, *o = out + span[0] * c.out_stride + head * d;
                const T* g = dout + span[0] * dout_stride + head * d;
                T* to_q = dq + span[0] * d_stride + head * d;
                int64_t num_queries = std::min(block, shape.n - first), pairs = words(num_queries, E::IN_WORD);
                int64_t deep = tiles ? block_words : pairs;
                KeyRange low = visible_keys(c, first, shape.n, shape.m);
                KeyRange high = visible_keys(c, first + num_queries - 1, shape.n, shape.m);
                int64_t from = low.first / PANEL, last = panels(high.last), left = from * PANEL;
                int64_t right = std::min(wide, last * PANEL);
                LeftOperand a = {(const uint32_t*)(queries + first * c.q_stride), c.q_stride / E::IN_WORD, 1};
                LeftOperand b = {(const uint32_t*)(g + first * dout_stride), dout_stride / E::IN_WORD, 1};
                multiply_into<E>(a, num_queries, transposed_k, shape.depth_d, wide, from, last, scores + left, wide,
                                 tiles);
                multiply_into<E>(b, num_queries, transposed_v, shape.depth_d, wide, from, last, slopes + left, wide,
                                 tiles);
                // a word holds E::IN_WORD queries, which are computed together
                for (int64_t pair = 0; pair < deep; pair++) {
                    uint32_t *p_line = transposed_p + pair * wide, *s_line = transposed_s + pair * wide;
                    GradientRow rows[E::IN_WORD];
                    const int64_t row = pair * E::IN_WORD, here = std::clamp<int64_t>(num_queries - row, 0, E::IN_WORD);
                    for (int64_t i = 0; i < here; i++) {
                        int64_t query = span[0] + first + row + i;
                        V both = {};
                        for (int64_t x = 0; x < d; x += LANES)
                            both += E::load(o + (first + row + i) * c.out_stride + x) *
                                    E::load(g + (first + row + i) * dout_stride + x);
                        rows[i] = {visible_keys(c, first + row + i, shape.n, shape.m),
                                   c.dropout.threshold ? key_of(c.seed, query * c.heads + head) : 0,
                                   sums[query * c.heads + head], sum(both)};
                    }
                    for (int64_t j = left; j < right; j += LANES) {
                        V weights[2] = {}, changes[2] = {};
                        for (int64_t i = 0; i < here; i++) {
                            // a row that sees no key has an infinite log_sum, so all its weights are 0
                            V s = *(const AnyV*)(scores + (row + i) * wide + j) * (c.scale * LOG2_E) - rows[i].log_sum;
                            V w = mask_outside(exp2_of(s), rows[i].sees, j, V{});
                            V slope = *(const AnyV*)(slopes + (row + i) * wide + j);
                            weights[i] = w;
                            if (c.dropout.threshold) {
                                V factors = c.dropout.factors(rows[i].key, j);
                                slope *= factors;
                                weights[i] *= factors;
                            }
                            changes[i] = w * (slope - rows[i].level) * c.scale;
                            E::store(ds + (row + i) * wide + j, changes[i]);
                        }
                        *(AnyVU*)(p_line + j) = E::pair(weights[0], weights[1]);
                        *(AnyVU*)(s_line + j) = E::pair(changes[0], changes[1]);
                    }
                }
                int64_t skip = left, keys_here = std::min(shape.m, right) - skip;
                if (tiles) keys_here = right - skip;
                pack_all<E>(queries + first * c.q_stride, c.q_stride, num_queries, d, deep, packed_q);
                pack_all<E>(g + first * dout_stride, dout_stride, num_queries, d, deep, packed_g);
                int64_t skipped = skip / E::IN_WORD, deep_m = words(std::max<int64_t>(0, keys_here), E::IN_WORD);
                weigh_values<E>(ds, num_queries, wide, packed_k, shape.depth_m, skipped, deep_m, d, tiles,
                                [&](int64_t row, int64_t column, V x) INLINE {
                                    E::store(to_q + (first + row) * d_stride + column, x);
                                });
                if (keys_here <= 0) continue;
                add_transposed<E>(transposed_s + skip, wide, keys_here, packed_q, deep, d, sum_k + skip * d, tiles);
                add_transposed<E>(transposed_p + skip, wide, keys_here, packed_g, deep, d, sum_v + skip * d, tiles);
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

// q, k, v, out are bfloat16 where `half`; widths are whole vectors; sums [queries, heads] may be null
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

// Disentangled attention, without dropout and gradient. `indexes` [2, 2 (reach + MARGIN) + 1] has the index of
// the embedding for each distance of a query to a key, from -reach - MARGIN to reach + MARGIN, and then the same
// reversed.
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

// gradients of keys that belong to no sequence are not written: pass tensors of zeros
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
