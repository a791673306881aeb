// AdamW (Loshchilov and Hutter 2019): a step of many tensors, and lazy steps of the rows of an embedding table.
//
// A row of an embedding table that no token of a batch uses has the gradient 0, but AdamW changes it all the same: its
// moments decrease and its weights decay. These steps are applied when the row is next needed, one by one with the
// factors of each step, so that the row has the same bits as if it had been updated in every step.
#include "vectors.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

struct Step {  // the factors of step t, with the learning rate lr and the weight decay wd
    float decay, rate, root;  // 1 - lr * wd, lr / (1 - b1^t), 1 / sqrt(1 - b2^t)
};

struct Adam {
    // new1 = 1 - b1 and new2 = 1 - b2 are computed in float64, since the difference in float32 has few correct digits
    float b1, b2, new1, new2, eps;
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

static inline bool any_nonzero(V x) {
    VI is_nonzero = x != 0.f;
    for (int i = 0; i < LANES; i++)
        if (is_nonzero[i]) return true;
    return false;
}

// updates parameters p, first moments m and second moments v by one step with the gradients g
static inline void update(V& p, V& m, V& v, V g, Adam a, Step s) {
    m = m * a.b1 + g * a.new1;
    v = v * a.b2 + g * g * a.new2;
    p = p * s.decay - m / (square_root(v) * s.root + a.eps) * s.rate;
}

// loads the next LANES numbers, or the next `count` followed by zeros if there are fewer
static inline V load_up_to(const float* from, int64_t count) {
    if (count >= LANES) return *(const AnyV*)from;
    float padded[LANES] = {};
    memcpy(padded, from, count * sizeof(float));
    return *(const AnyV*)padded;
}

// stores LANES numbers, or the first `count` if that is less
static inline void store_up_to(float* to, V x, int64_t count) {
    if (count >= LANES)
        *(AnyV*)to = x;
    else
        memcpy(to, &x, count * sizeof(float));
}

// applies steps with the gradient 0 to a row of `count` numbers, 4 vectors at a time; the last vector may be partial
static void update_without_gradient(float* p, float* m, float* v, int64_t count, const Step* steps, int64_t num_steps,
                                    Adam a) {
    for (int64_t first = 0; first < count; first += 4 * LANES) {
        V P[4], M[4], W[4];
        int n = (int)std::min<int64_t>(4, (count - first + LANES - 1) / LANES);
        bool has_moments = false;
        for (int i = 0; i < n; i++) {
            int64_t at = first + i * LANES, left = count - at;
            P[i] = load_up_to(p + at, left);
            M[i] = load_up_to(m + at, left);
            W[i] = load_up_to(v + at, left);
            has_moments = has_moments || any_nonzero(M[i]) || any_nonzero(W[i]);
        }
        for (int64_t s = 0; s < num_steps; s++) {
            if (has_moments)
                for (int i = 0; i < n; i++) update(P[i], M[i], W[i], V{}, a, steps[s]);
            else  // the row never had a gradient, so only the weight decay changes it
                for (int i = 0; i < n; i++) P[i] *= steps[s].decay;
        }
        for (int i = 0; i < n; i++) {
            int64_t at = first + i * LANES, left = count - at;
            store_up_to(p + at, P[i], left);
            store_up_to(m + at, M[i], left);
            store_up_to(v + at, W[i], left);
        }
    }
}

static constexpr int64_t CHUNK = 1 << 14;  // numbers of a tensor that a thread updates at a time

struct Tensors {  // a parameter with its moments and its gradient, `count` numbers each
    float *p, *m, *v;
    const float* g;
    int64_t count, before;  // before: number of chunks of all earlier parameters
};

extern "C" {

// Applies one step to `num_tensors` parameters of any size; gradients are multiplied by `scale`. `tensors` is an array
// of Tensors, and `step` a Step.
void heedful_adamw(int64_t num_tensors, const void* tensors, const void* step, float scale, double b1, double b2,
                   double eps, int threads) {
    const Tensors* all_tensors = (const Tensors*)tensors;
    Step s = *(const Step*)step;
    Adam a(b1, b2, eps);
    const Tensors& end = all_tensors[num_tensors - 1];
    int64_t chunks = end.before + (end.count + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        // the parameter that the chunk belongs to
        const Tensors* t = std::upper_bound(all_tensors, all_tensors + num_tensors, chunk,
                                            [](int64_t x, const Tensors& other) { return x < other.before; }) -
                           1;
        int64_t first = (chunk - t->before) * CHUNK, last = std::min(t->count, first + CHUNK), i = first;
        for (; i + LANES <= last; i += LANES) {
            V P = *(AnyV*)(t->p + i), M = *(AnyV*)(t->m + i), W = *(AnyV*)(t->v + i);
            update(P, M, W, *(const AnyV*)(t->g + i) * scale, a, s);
            *(AnyV*)(t->p + i) = P;
            *(AnyV*)(t->m + i) = M;
            *(AnyV*)(t->v + i) = W;
        }
        if (int64_t left = last - i; left > 0) {  // the end of a tensor, as a partial vector
            V P = load_up_to(t->p + i, left), M = load_up_to(t->m + i, left), W = load_up_to(t->v + i, left);
            update(P, M, W, load_up_to(t->g + i, left) * scale, a, s);
            store_up_to(t->p + i, P, left);
            store_up_to(t->m + i, M, left);
            store_up_to(t->v + i, W, left);
        }
    }
}

// Applies all missing steps to `count` rows of a table p and its moments m and v, [table rows, width] each.
//
// The rows are row_indices[0] to row_indices[count - 1], or the first `count` rows if `row_indices` is null. `steps` is
// an array of `num_steps` Steps, and applied[row] says how many of them a row has had; it is set to `num_steps`. The
// gradient of all steps is 0, except that the last step has the gradient g[i] * scale for row_indices[i], unless g
// [count, width] is null. The width need not be a multiple of LANES.
void heedful_adamw_rows(float* p, float* m, float* v, int32_t* applied, int64_t width, const int64_t* row_indices,
                        int64_t count, const void* steps, int64_t num_steps, const float* g, float scale, double b1,
                        double b2, double eps, int threads) {
    const Step* history = (const Step*)steps;
    Adam a(b1, b2, eps);
#pragma omp parallel num_threads(threads)
    {
#if defined(__SSE__)
        unsigned outer_flags = _mm_getcsr();
        _mm_setcsr(outer_flags | 0x8040);  // treat denormal numbers as 0: they would take a hundred times as long
#endif
#pragma omp for schedule(dynamic, 64)
        for (int64_t i = 0; i < count; i++) {
            int64_t row = row_indices ? row_indices[i] : i, at = row * width;
            int64_t without_gradient = g ? num_steps - 1 : num_steps;
            if (applied[row] < without_gradient)
                update_without_gradient(p + at, m + at, v + at, width, history + applied[row],
                                        without_gradient - applied[row], a);
            if (g)
                for (int64_t j = 0; j < width; j += LANES) {
                    int64_t k = at + j, left = width - j;
                    V P = load_up_to(p + k, left), M = load_up_to(m + k, left), W = load_up_to(v + k, left);
                    update(P, M, W, load_up_to(g + i * width + j, left) * scale, a, history[num_steps - 1]);
                    store_up_to(p + k, P, left);
                    store_up_to(m + k, M, left);
                    store_up_to(v + k, W, left);
                }
            applied[row] = (int32_t)num_steps;
        }
#if defined(__SSE__)
        _mm_setcsr(outer_flags);
#endif
    }
}
}
