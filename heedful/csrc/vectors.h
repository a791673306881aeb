// Vectors of float32, and the element types of tensors: bfloat16, float32 and int8. All kernels include this file.
//
// It uses the vector extensions of GCC and Clang, so that the same source compiles to AVX-512, AVX2 or other vectors.
// Products of bfloat16 need AVX-512 BF16, and products of int8 AVX-512 VNNI.
//
// In the functions that csrc/abi.py declares, matrices are row-major, `half` is 1 for tensors of bfloat16 and 0 for
// float32, `stride` is the number of elements between rows, and `threads` is the number of OpenMP threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;        // float32 numbers in a vector
constexpr int64_t TILE_VECTORS = 4;  // vectors in a row of a tile of products.h
#else
constexpr int64_t LANES = 8;
constexpr int64_t TILE_VECTORS = 2;
#endif

// vectors of LANES float32, int32, uint32 and uint16 (the bits of bfloat16); the types Any... may be at any address
typedef float V __attribute__((vector_size(LANES * 4)));
typedef int32_t VI __attribute__((vector_size(LANES * 4)));
typedef uint32_t VU __attribute__((vector_size(LANES * 4)));
typedef uint16_t VH __attribute__((vector_size(LANES * 2)));
typedef float AnyV __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t AnyVU __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t AnyVH __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

static inline V broadcast(float x) { return x - V{}; }
static inline VU broadcast_u32(uint32_t x) { return x - VU{}; }
static inline V where(VI condition, V x, V y) { return condition ? x : y; }
static inline V vector_max(V x, V y) {  // y where either is NaN
#if defined(__AVX512F__)
    return (V)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return where(x > y, x, y);
#endif
}
static inline V vector_min(V x, V y) {  // y where either is NaN
#if defined(__AVX512F__)
    return (V)_mm512_min_ps((__m512)x, (__m512)y);
#else
    return where(x < y, x, y);
#endif
}
static inline V as_floats(VU x) { return (V)x; }

// stores the lowest byte of each lane
static inline void store_bytes(uint8_t* to, VU x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));  // GCC would handle the lanes one by one
#else
    for (int i = 0; i < LANES; i++) to[i] = (uint8_t)x[i];
#endif
}

// returns 0, 1, ..., LANES - 1
static inline VI lanes() {
    VI numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

// stores a vector without loading its cache line, for results that are not read again soon; other threads may read them
// after `store_fence`
static inline void store_nontemporal(float* to, V x) {
#if defined(__AVX512F__)
    if (((uintptr_t)to & 63) == 0) return _mm512_stream_ps(to, (__m512)x);
#endif
    *(AnyV*)to = x;
}
static inline void store_fence() {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

// folds the upper half of the lanes into the lower half, until one is left: the order of a sum is fixed, and does not
// depend on the compiler
template <class Fold> static inline float reduce(V x, Fold fold) {
#if defined(__AVX__)
#if defined(__AVX512F__)
    auto upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1));
    auto eight = fold(_mm512_castps512_ps256((__m512)x), upper);
#else
    auto eight = (__m256)x;
#endif
    auto four = fold(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = fold(four, _mm_movehl_ps(four, four));
    return fold(four, _mm_shuffle_ps(four, four, 1))[0];
#else
    float parts[LANES];
    memcpy(parts, &x, sizeof x);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) parts[i] = fold(parts[i], parts[i + half]);
    return parts[0];
#endif
}

static inline float sum(V x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}

static inline float max_element(V x) {  // NaN if the last value is NaN, and possibly if another one is
    return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

// -- powers of two ----------------------------------------------------------------------------------------------------

// 2^x for x <= 127, with an error of at most 2 units in the last place; 2^-126, about 1e-38, for x below -126; NaN for
// NaN
static inline V exp2_of(V x) {
    x = vector_max(broadcast(-126.f), x);
#if defined(__AVX512F__)
    V whole = (V)_mm512_roundscale_ps((__m512)x, 0);
#else
    V whole = (x + 12582912.f) - 12582912.f;  // 1.5 * 2^23: rounds to a whole number
#endif
    V part = x - whole, y = broadcast(1.5403530e-4f);
    y = y * part + 1.3333558e-3f;
    y = y * part + 9.6181291e-3f;
    y = y * part + 5.5504109e-2f;
    y = y * part + 2.4022651e-1f;
    y = y * part + 6.9314718e-1f;
    y = y * part + 1.f;
#if defined(__AVX512F__)
    return (V)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
    VI power = (__builtin_convertvector(whole, VI) + 127) << 23;
    return y * (V)power;
#endif
}

// 2^x with an error of at most 8e-5 of the result, for results that are rounded to bfloat16; 0 and infinity where
// they are the nearest float32
static inline V rough_exp2(V x) {
#if defined(__AVX512DQ__)
    V part = (V)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF), y = broadcast(7.8024521e-2f);  // part: 0 to 1
    y = y * part + 2.2606716e-1f;
    y = y * part + 6.9583356e-1f;
    y = y * part + 9.9992520e-1f;
    return (V)_mm512_scalef_ps((__m512)y, (__m512)x);  // y * 2^floor(x)
#else
    return exp2_of(vector_min(x, broadcast(127.f)));
#endif
}

// -- element types ----------------------------------------------------------------------------------------------------
//
// T is the type of an element in memory, and Sum the vector type of sums of products. A "word" is 32 bits: IN_WORD
// adjacent elements, which are two bfloat16, one float32 or four int8.
//
// load, store           LANES elements from or to memory, as a vector of float32
// pair(first, second)   words whose elements are first[i] and, if a word has two, second[i]
// scalar                one element as float32
// dot(sum, words, word) sum[i] + the dot product of words[i] and `word`
// exp2(x)               2^x, as exact as the type

struct BFloat16 {
    typedef uint16_t T;
    typedef V Sum;
    static constexpr int64_t IN_WORD = 2;
    static inline V load(const T* from) {
        VH bits = *(const AnyVH*)from;
        return (V)(__builtin_convertvector(bits, VU) << 16);
    }
    static inline VH rounded(V x) {  // to nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
        __m256bh converted = _mm512_cvtneps_pbh((__m512)x);
        VH bits;
        memcpy(&bits, &converted, sizeof bits);
        return bits;
#else
        VU bits = (VU)x, near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return __builtin_convertvector((VU)where(x == x, (V)near, (V)((bits >> 16) | 64)), VH);
#endif
    }
    static inline void store(T* to, V x) { *(AnyVH*)to = rounded(x); }
    static inline VU pair(V first, V second) {
        return __builtin_convertvector(rounded(first), VU) | (__builtin_convertvector(rounded(second), VU) << 16);
    }
    static inline float scalar(T x) {
        uint32_t bits = (uint32_t)x << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    static inline V exp2(V x) { return rough_exp2(x); }
#if defined(__AVX512BF16__)
    static inline V dot(V sum, VU words, uint32_t word) {
        return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)words, (__m512bh)_mm512_set1_epi32((int)word));
    }
#endif
};

struct Float32 {
    typedef float T;
    typedef V Sum;
    static constexpr int64_t IN_WORD = 1;
    static inline V load(const T* from) { return *(const AnyV*)from; }
    static inline void store(T* to, V x) { *(AnyV*)to = x; }
    static inline VU pair(V first, V) { return (VU)first; }
    static inline float scalar(T x) { return x; }
    static inline V exp2(V x) { return exp2_of(vector_min(x, broadcast(127.f))); }
    static inline V dot(V sum, VU words, uint32_t word) { return sum + (V)words * (V)broadcast_u32(word); }
};

#if defined(__AVX512VNNI__)
struct Int8 {  // exact integer products: elements of the left operand are 0 to 255, of the right one -128 to 127
    typedef int8_t T;
    typedef VI Sum;
    static constexpr int64_t IN_WORD = 4;
    static inline VI dot(VI sum, VU words, uint32_t word) {
        return (VI)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)word), (__m512i)words);
    }
};
#endif

#if defined(__AVX512VNNI__)
struct Int16 {  // exact integer products, while the sum is below 2^31
    typedef int16_t T;
    typedef VI Sum;
    static constexpr int64_t IN_WORD = 2;
    static inline VI dot(VI sum, VU words, uint32_t word) {
        return (VI)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32((int)word), (__m512i)words);
    }
};
#endif

// -- functions --------------------------------------------------------------------------------------------------------

constexpr float LOG2_E = 1.44269504f;

// returns Phi(x), the cumulative distribution function of the normal distribution, with an error of at most 1e-7
// (Abramowitz and Stegun 1964, 7.1.26); sets `bell` to e^(-x^2 / 2)
static inline V normal(V x, V& bell) {
    V positive = where(x < 0.f, -x, x), scaled = positive * 0.70710678f;
    V t = 1.f / (scaled * 0.3275911f + 1.f);
    V y = t * 1.061405429f - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    bell = exp2_of(scaled * scaled * -LOG2_E);
    V tail = y * t * bell * 0.5f;
    return where(x < 0.f, tail, 1.f - tail);
}

// GELU, x Phi(x), with an error of at most 5e-6, for results that are rounded to bfloat16: for |x| <= 4.8, Phi(x) is
// 1/2 + x P(x^2) with a polynomial P whose largest error is minimal. It takes half the time of `normal`.
static inline V gelu_of(V x) {
    constexpr float EDGE = 4.8f;
    V near = vector_min(broadcast(EDGE), vector_max(broadcast(-EDGE), x));
    V u = near * near * (2 / (EDGE * EDGE)) - 1.f, y = broadcast(0.00144375314f);
    for (float coefficient : {-0.00419462379f, 0.00539230974f, -0.00744336518f, 0.0138641298f,
                              -0.0221875459f, 0.0307208113f, -0.0405659266f, 0.0529040992f,
                              -0.0729797632f, 0.147212788f})
        y = y * u + coefficient;
    return where(x <= -EDGE, V{}, x * (near * y + 0.5f));
}

// -- dropout ----------------------------------------------------------------------------------------------------------
//
// The random number of an element is a hash of its row's key and its index in the row. The backward pass computes the
// numbers again, so that no mask is stored.

// the finaliser of MurmurHash3 (Appleby 2011): every bit of the input changes half of the bits of the output
static inline uint32_t murmur_mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// returns the key of a row, such as a row of attention weights
static inline uint32_t key_of(uint64_t seed, uint64_t row) {
    uint32_t key = murmur_mix((uint32_t)seed ^ murmur_mix((uint32_t)(seed >> 32) + 0x9e3779b9u));
    key = murmur_mix(key ^ murmur_mix((uint32_t)row + 0x7f4a7c15u));
    return murmur_mix(key ^ (uint32_t)(row >> 32));
}

struct Dropout {
    uint32_t threshold;  // an element is dropped if its random number is below this; 0: no dropout
    float scale;         // factor of the elements that are not dropped, 1 / (1 - p)
    explicit Dropout(double p)
        : threshold((uint32_t)std::min(4294967295.0, p * 4294967296.0)), scale(p < 1 ? 1 / (1 - p) : 0) {}
    // returns the factors, 0 or `scale`, of the LANES elements from index `first` on of the row with this key
    inline V factors(uint32_t key, int64_t first) const {
        VU x = (VU)(lanes() + (int32_t)first) * 0x9e3779b9u + key;
        x ^= x >> 16;
        x *= 0x85ebca6bu;
        x ^= x >> 13;
        x *= 0xc2b2ae35u;
        x ^= x >> 16;
        return where((VI)(x < broadcast_u32(threshold)), V{}, broadcast(scale));
    }
};

// -- memory -----------------------------------------------------------------------------------------------------------

// Memory for intermediate results of one thread, which later calls reuse. `begin` makes room for a number of bytes, and
// may lose the contents; `take` returns memory for the next `count` elements, aligned to 64 bytes.
struct Scratch {
    char* start = nullptr;
    size_t size = 0, used = 0;
    ~Scratch() { free(start); }
    void begin(size_t bytes) {
        used = 0;
        if (size >= bytes) return;
        free(start);
        size = (bytes + 4095) / 4096 * 4096;
        start = (char*)aligned_alloc(4096, size);
        if (!start) abort();
    }
    template <class T> T* take(int64_t count) {
        T* block = (T*)(start + used);
        used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return block;
    }
};
