// AdamW (Loshchilov and Hutter 2019) of many tensors at once, and of the rows of an embedding that a step touches.
//
// Rows without a gradient change too: their moments fade and they decay. That is done when a row is next needed, step
// by step with the numbers of each step, so a row has the same bits as if it had been updated in every step.
#include "vectors.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

struct Step {
    float decay, rate, root;  // 1 - rate * decay, rate / (1 - b1^t), 1 / sqrt(1 - b2^t)
};

struct Adam {
    float b1, b2, new1, new2, eps;  // 1 - b, the weight of the new gradient; float32 would keep few digits of it
    Adam(double b1, double b2, double eps)
        : b1((float)b1), b2((float)b2), new1((float)(1 - b1)), new2((float)(1 - b2)), eps((float)eps) {}
};

static inline V square_root(V x) {
#if defined(__AVX512F__)
    return (V)_mm512_sqrt_ps((__m512)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

static inline bool any(V x) {
    VI is = x != 0.f;
    for (int i = 0; i < LANES; i++)
        if (is[i]) return true;
    return false;
}

static inline void update(V& p, V& m, V& v, V g, Adam a, Step s) {
    m = m * a.b1 + g * a.new1;
    v = v * a.b2 + g * g * a.new2;
    p = p * s.decay - m / (square_root(v) * s.root + a.eps) * s.rate;
}

// The next `count` numbers as a vector: LANES of them at most, and 0 in place of those that are missing.
static inline V load_some(const float* from, int64_t count) {
    if (count >= LANES) return *(const AnyV*)from;
    float some[LANES] = {};
    memcpy(some, from, count * sizeof(float));
    return *(const AnyV*)some;
}

// Store the first `count` numbers of a vector, and nothing behind them.
static inline void store_some(float* to, V x, int64_t count) {
    if (count >= LANES)
        *(AnyV*)to = x;
    else
        memcpy(to, &x, count * sizeof(float));
}

// Update a row of `count` numbers in steps without a gradient, 4 vectors at a time; the last may be partial.
static void fade(float* p, float* m, float* v, int64_t count, const Step* steps, int64_t num_steps, Adam a) {
    for (int64_t first = 0; first < count; first += 4 * LANES) {
        V P[4], M[4], W[4];
        int n = (int)std::min<int64_t>(4, (count - first + LANES - 1) / LANES);
        bool moves = false;
        for (int i = 0; i < n; i++) {
            int64_t at = first + i * LANES, left = count - at;
            P[i] = load_some(p + at, left);
            M[i] = load_some(m + at, left);
            W[i] = load_some(v + at, left);
            moves = moves || any(M[i]) || any(W[i]);
        }
        for (int64_t s = 0; s < num_steps; s++) {
            if (moves)
                for (int i = 0; i < n; i++) update(P[i], M[i], W[i], V{}, a, steps[s]);
            else  // never touched: 0 / eps is 0
                for (int i = 0; i < n; i++) P[i] *= steps[s].decay;
        }
        for (int i = 0; i < n; i++) {
            int64_t at = first + i * LANES, left = count - at;
            store_some(p + at, P[i], left);
            store_some(m + at, M[i], left);
            store_some(v + at, W[i], left);
        }
    }
}

static constexpr int64_t CHUNK = 1 << 14;  // numbers that a thread updates at a time

struct Tensors {
    float *p, *m, *v;
    const float* g;
    int64_t count, before;  // chunks of the tensors before this one
};

extern "C" {

// One step of `num_tensors` tensors of any size, each with the gradient g times `scale`.
void heedful_adamw(int64_t num_tensors, const void* tensors, const void* step, float scale, double b1, double b2,
                   double eps, int threads) {
    const Tensors* all_tensors = (const Tensors*)tensors;
    Step s = *(const Step*)step;
    Adam a(b1, b2, eps);
    const Tensors& end = all_tensors[num_tensors - 1];
    int64_t chunks = end.before + (end.count + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const Tensors* of = std::upper_bound(all_tensors, all_tensors + num_tensors, chunk,
                                             [](int64_t x, const Tensors& t) { return x < t.before; }) -
                            1;
        int64_t first = (chunk - of->before) * CHUNK, last = std::min(of->count, first + CHUNK), i = first;
        for (; i + LANES <= last; i += LANES) {
            V P = *(AnyV*)(of->p + i), M = *(AnyV*)(of->m + i), W = *(AnyV*)(of->v + i);
            update(P, M, W, *(const AnyV*)(of->g + i) * scale, a, s);
            *(AnyV*)(of->p + i) = P;
            *(AnyV*)(of->m + i) = M;
            *(AnyV*)(of->v + i) = W;
        }
        if (int64_t left = last - i; left > 0) {  // the end of a tensor, as a partial vector
            V P = load_some(of->p + i, left), M = load_some(of->m + i, left), W = load_some(of->v + i, left);
            update(P, M, W, load_some(of->g + i, left) * scale, a, s);
            store_some(of->p + i, P, left);
            store_some(of->m + i, M, left);
            store_some(of->v + i, W, left);
        }
    }
}

// Brings rows of p, m and v [?, width] up to date: row `chosen[i]` (null: row i) had the first moved[row] steps of the
// history and has `num_steps` afterwards. Its gradient is 0 in all of them; where `g` [count, width] is given, it is
// the gradient of the last one. The width may be any number: a row may end in a part of a vector.
void heedful_adamw_rows(float* p, float* m, float* v, int32_t* moved, int64_t width, const int64_t* chosen,
                        int64_t count, const void* steps, int64_t num_steps, const float* g, float scale, double b1,
                        double b2, double eps, int threads) {
    const Step* history = (const Step*)steps;
    Adam a(b1, b2, eps);
#pragma omp parallel num_threads(threads)
    {
#if defined(__SSE__)
        unsigned before = _mm_getcsr();
        _mm_setcsr(before | 0x8040);  // numbers below 1e-38 are 0: they would take a hundred times as long
#endif
#pragma omp for schedule(dynamic, 64)
        for (int64_t i = 0; i < count; i++) {
            int64_t row = chosen ? chosen[i] : i, at = row * width;
            int64_t without_gradient = g ? num_steps - 1 : num_steps;
            if (moved[row] < without_gradient)
                fade(p + at, m + at, v + at, width, history + moved[row], without_gradient - moved[row], a);
            if (g)
                for (int64_t j = 0; j < width; j += LANES) {
                    int64_t place = at + j, left = width - j;
                    V P = load_some(p + place, left), M = load_some(m + place, left), W = load_some(v + place, left);
                    update(P, M, W, load_some(g + i * width + j, left) * scale, a, history[num_steps - 1]);
                    store_some(p + place, P, left);
                    store_some(m + place, M, left);
                    store_some(v + place, W, left);
                }
            moved[row] = (int32_t)num_steps;
        }
#if defined(__SSE__)
        _mm_setcsr(before);
#endif
    }
}
}
