// AdamW (Loshchilov and Hutter 2019) of many tensors at once, and of the rows of an embedding that a step touches.
//
// Rows without a gradient move too: their moments fade and they decay. That is done when a row is next needed, step by
// step with the numbers of each step, so a row has the same bits as if it had been moved in every step.
#include "vectors.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

struct Step {
    float decay, rate, root;  // 1 - rate * decay, rate / (1 - b1^t), 1 / sqrt(1 - b2^t)
};

struct Adam {
    float b1, b2, new1, new2, eps;  // new: 1 - b, of which float32 would keep few digits
    Adam(double b1, double b2, double eps)
        : b1((float)b1), b2((float)b2), new1((float)(1 - b1)), new2((float)(1 - b2)), eps((float)eps) {}
};

static inline V root_of(V x) {
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

static inline void move(V& p, V& m, V& v, V g, Adam a, Step s) {
    m = m * a.b1 + g * a.new1;
    v = v * a.b2 + g * g * a.new2;
    p = p * s.decay - m / (root_of(v) * s.root + a.eps) * s.rate;
}

// 4 vectors of a row through steps in which it had no gradient
static void fade(float* p, float* m, float* v, int64_t count, const Step* steps, int64_t many, Adam a) {
    for (int64_t first = 0; first < count; first += 4 * LANES) {
        V P[4], M[4], W[4];
        int n = (int)std::min<int64_t>(4, (count - first) / LANES);
        bool moves = false;
        for (int i = 0; i < n; i++) {
            P[i] = *(AnyV*)(p + first + i * LANES);
            M[i] = *(AnyV*)(m + first + i * LANES);
            W[i] = *(AnyV*)(v + first + i * LANES);
            moves = moves || any(M[i]) || any(W[i]);
        }
        for (int64_t s = 0; s < many; s++) {
            if (moves)
                for (int i = 0; i < n; i++) move(P[i], M[i], W[i], V{}, a, steps[s]);
            else  // never touched: 0 / eps is 0
                for (int i = 0; i < n; i++) P[i] *= steps[s].decay;
        }
        for (int i = 0; i < n; i++) {
            *(AnyV*)(p + first + i * LANES) = P[i];
            *(AnyV*)(m + first + i * LANES) = M[i];
            *(AnyV*)(v + first + i * LANES) = W[i];
        }
    }
}

static constexpr int64_t PIECE = 1 << 14;  // numbers that a thread moves at a time

struct Tensors {
    float *p, *m, *v;
    const float* g;
    int64_t count, before;  // pieces of the tensors before this one
};

extern "C" {

// One step of `many` tensors of any size, each with the gradient g times `scale`.
void heedful_adamw(int64_t many, const void* tensors, const void* step, float scale, double b1, double b2, double eps,
                   int threads) {
    const Tensors* all_of_them = (const Tensors*)tensors;
    Step s = *(const Step*)step;
    Adam a(b1, b2, eps);
    const Tensors& end = all_of_them[many - 1];
    int64_t pieces = end.before + (end.count + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const Tensors* of = std::upper_bound(all_of_them, all_of_them + many, piece,
                                             [](int64_t x, const Tensors& t) { return x < t.before; }) - 1;
        int64_t first = (piece - of->before) * PIECE, last = std::min(of->count, first + PIECE), i = first;
        for (; i + LANES <= last; i += LANES) {
            V P = *(AnyV*)(of->p + i), M = *(AnyV*)(of->m + i), W = *(AnyV*)(of->v + i);
            move(P, M, W, *(const AnyV*)(of->g + i) * scale, a, s);
            *(AnyV*)(of->p + i) = P;
            *(AnyV*)(of->m + i) = M;
            *(AnyV*)(of->v + i) = W;
        }
        if (i < last) {  // what is left of a tensor, as a vector
            float rest[4][LANES] = {};
            float* from[4] = {of->p + i, of->m + i, of->v + i, const_cast<float*>(of->g) + i};
            for (int n = 0; n < 4; n++) memcpy(rest[n], from[n], (last - i) * sizeof(float));
            V P = *(AnyV*)rest[0], M = *(AnyV*)rest[1], W = *(AnyV*)rest[2];
            move(P, M, W, *(AnyV*)rest[3] * scale, a, s);
            *(AnyV*)rest[0] = P;
            *(AnyV*)rest[1] = M;
            *(AnyV*)rest[2] = W;
            for (int n = 0; n < 3; n++) memcpy(from[n], rest[n], (last - i) * sizeof(float));
        }
    }
}

// Rows `chosen` (null: the first `count`) of p, m and v [?, width], that have had the first moved[row] of the steps of
// this history, are brought to have had `many` of them: without a gradient; but where `g` [count, width] is given, it
// is that of the last step.
void heedful_adamw_rows(float* p, float* m, float* v, int32_t* moved, int64_t width, const int64_t* chosen,
                        int64_t count, const void* steps, int64_t many, const float* g, float scale, double b1,
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
            int64_t without = g ? many - 1 : many;
            if (moved[row] < without)
                fade(p + at, m + at, v + at, width, history + moved[row], without - moved[row], a);
            if (g)
                for (int64_t j = 0; j < width; j += LANES) {
                    V P = *(AnyV*)(p + at + j), M = *(AnyV*)(m + at + j), W = *(AnyV*)(v + at + j);
                    move(P, M, W, *(const AnyV*)(g + i * width + j) * scale, a, history[many - 1]);
                    *(AnyV*)(p + at + j) = P;
                    *(AnyV*)(m + at + j) = M;
                    *(AnyV*)(v + at + j) = W;
                }
            moved[row] = (int32_t)many;
        }
#if defined(__SSE__)
        _mm_setcsr(before);
#endif
    }
}
}
