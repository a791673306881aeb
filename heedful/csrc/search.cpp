// Brute-force search among vectors: inner products of int8 vectors with queries of up to 15 bits, stored as int16, and
// Hamming distances of binary vectors. The vectors of an index are called rows; they are read from memory once for all
// queries.
#include "vectors.h"

static constexpr int64_t BLOCK_ROWS = 512;  // rows that stay in the cache while all queries are compared with them

static constexpr int UNROLLED_ROWS = 4;       // rows that are multiplied with a query at the same time
static constexpr int64_t PREFETCH_ROWS = 16;  // prefetch distance in rows

// Sets totals[n] to the exact dot product of row n with a query, for N adjacent rows. For a width of up to 1024 and
// coordinates of at most 127 and 2^14, sums are below 2^31.
template <int N> static inline void dots(const int8_t* rows, const int16_t* query, int64_t width, int32_t* totals) {
    int64_t i = 0;
    for (int n = 0; n < N; n++) totals[n] = 0;
#if defined(__AVX512BW__)
    __m512i sums[N] = {};
    for (; i + 32 <= width; i += 32) {
        __m512i y = _mm512_loadu_si512(query + i);
        for (int n = 0; n < N; n++) {
            const int8_t* row = rows + n * width + i;
            __builtin_prefetch(row + PREFETCH_ROWS * width);
            __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)row));
            sums[n] = _mm512_add_epi32(sums[n], _mm512_madd_epi16(x, y));
        }
    }
    for (int n = 0; n < N; n++) totals[n] = _mm512_reduce_add_epi32(sums[n]);
#endif
    for (; i < width; i++)
        for (int n = 0; n < N; n++) totals[n] += (int32_t)rows[n * width + i] * query[i];
}

extern "C" {

// out[q, r] = scales[r] * query_scales[q] * dot(rows[r], queries[q]), for rows [count, width] and queries
// [query_count, width]
void heedful_scores8(const int8_t* rows, const float* scales, int64_t count, int64_t width, const int16_t* queries,
                     const float* query_scales, int64_t query_count, float* out, int threads) {
    const int64_t blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK_ROWS, last = std::min(count, first + BLOCK_ROWS);
        for (int64_t q = 0; q < query_count; q++) {
            int32_t sums[BLOCK_ROWS];
            const int16_t* query = queries + q * width;
            int64_t row = first;
            for (; row + UNROLLED_ROWS <= last; row += UNROLLED_ROWS)
                dots<UNROLLED_ROWS>(rows + row * width, query, width, sums + row - first);
            for (; row < last; row++) dots<1>(rows + row * width, query, width, sums + row - first);
            for (row = first; row < last; row++)
                out[q * count + row] = (float)sums[row - first] * scales[row] * query_scales[q];
        }
    }
}

// out[q, r] = -(Hamming distance of rows[r] and queries[q]), for rows [count, words] and queries [query_count, words]
// of 64 bits in a word
void heedful_matches(const uint64_t* rows, int64_t count, int64_t words, const uint64_t* queries, int64_t query_count,
                     float* out, int threads) {
    const int64_t blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK_ROWS, last = std::min(count, first + BLOCK_ROWS);
        for (int64_t q = 0; q < query_count; q++)
            for (int64_t row = first; row < last; row++) {
                int64_t different = 0;
                for (int64_t i = 0; i < words; i++)
                    different += __builtin_popcountll(rows[row * words + i] ^ queries[q * words + i]);
                out[q * count + row] = -(float)different;
            }
    }
}
}
