// Row-wise operations: GELU, norm(x + dropout(y)), and cross-entropy over a vocabulary, each with its gradient.
#include "vectors.h"

static constexpr int64_t BLOCK = 32;  // rows whose share of a gain's gradient is summed at a time

// calls function(first) for each whole vector of `count` numbers
template <class E, class Function> static void for_each_vector(int64_t count, int threads, Function function) {
    int64_t vectors = count / LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < vectors; i++) function(i * LANES);
}

template <class E> static void gelu(const typename E::T* x, int64_t count, typename E::T* y, int threads) {
    for_each_vector<E>(count, threads, [=](int64_t i) {
        V at = E::load(x + i), bell;
        E::store(y + i, E::IN_WORD == 2 ? gelu_of(at) : at * normal(at, bell));
    });
}

// dx = dy (Phi(x) + x phi(x))
template <class E>
static void gelu_gradient(const typename E::T* x, const typename E::T* dy, int64_t count, typename E::T* dx,
                          int threads) {
    for_each_vector<E>(count, threads, [=](int64_t i) {
        V at = E::load(x + i), bell, below = normal(at, bell);
        E::store(dx + i, E::load(dy + i) * (below + at * bell * 0.39894228f));
    });
}

struct Norm {
    int64_t rows, width;
    float eps;
    const float *gain, *bias;  // bias may be null
    Dropout dropout;
    uint64_t seed;
};

// z = (s - mean) / sqrt(variance + eps) gain + bias with s = x + dropout(y); `sums` takes s, and `moments` (mean, 1 /
// deviation) of each row, where they are not null
template <class X, class Y, class Z>
static void add_norm(Norm n, const typename X::T* x, const typename Y::T* y, typename Z::T* z, float* sums,
                     float* moments, int threads) {
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch scratch;
        scratch.begin(n.width * 4 + 64);
        float* line = scratch.take<float>(n.width);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n.rows; row++) {
            uint32_t key = n.dropout.threshold ? key_of(n.seed, row) : 0;
            V total = {}, squares = {};
            float* s = sums ? sums + row * n.width : line;
            for (int64_t i = 0; i < n.width; i += LANES) {
                V added = Y::load(y + row * n.width + i);
                if (n.dropout.threshold) added *= n.dropout.factors(key, i);
                V v = X::load(x + row * n.width + i) + added;
                *(AnyV*)(s + i) = v;
                total += v;
            }
            float mean = sum(total) / n.width;
            for (int64_t i = 0; i < n.width; i += LANES) {
                V off = *(const AnyV*)(s + i) - mean;
                squares += off * off;
            }
            float scale = 1 / std::sqrt(sum(squares) / n.width + n.eps);
            for (int64_t i = 0; i < n.width; i += LANES) {
                V v = (*(const AnyV*)(s + i) - mean) * scale * *(const AnyV*)(n.gain + i);
                if (n.bias) v += *(const AnyV*)(n.bias + i);
                Z::store(z + row * n.width + i, v);
            }
            if (moments) {
                moments[2 * row] = mean;
                moments[2 * row + 1] = scale;
            }
        }
    }
}

// of dz: dx = ds, dy = ds times the same factors of dropout, and the sums of `gains` [2, width]: dgain, dbias
template <class Y>
static void add_norm_gradient(Norm n, const float* sums, const float* moments, const float* dz, float* dx,
                              typename Y::T* dy, float* gains, float* parts, int threads) {
    int64_t blocks = (n.rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        float* part = parts + block * 2 * n.width;
        memset(part, 0, 2 * n.width * sizeof(float));
        for (int64_t row = block * BLOCK; row < std::min(n.rows, (block + 1) * BLOCK); row++) {
            const float *s = sums + row * n.width, *d = dz + row * n.width;
            float mean = moments[2 * row], scale = moments[2 * row + 1];
            V total = {}, along = {};
            for (int64_t i = 0; i < n.width; i += LANES) {
                V normed = (*(const AnyV*)(s + i) - mean) * scale, g = *(const AnyV*)(d + i);
                *(AnyV*)(part + i) = *(const AnyV*)(part + i) + g * normed;
                *(AnyV*)(part + n.width + i) = *(const AnyV*)(part + n.width + i) + g;
                g *= *(const AnyV*)(n.gain + i);
                total += g;
                along += g * normed;
            }
            float level = sum(total) / n.width, slope = sum(along) / n.width;
            uint32_t key = n.dropout.threshold ? key_of(n.seed, row) : 0;
            for (int64_t i = 0; i < n.width; i += LANES) {
                V normed = (*(const AnyV*)(s + i) - mean) * scale;
                V ds = (*(const AnyV*)(d + i) * *(const AnyV*)(n.gain + i) - level - normed * slope) * scale;
                *(AnyV*)(dx + row * n.width + i) = ds;
                if (n.dropout.threshold) ds *= n.dropout.factors(key, i);
                Y::store(dy + row * n.width + i, ds);
            }
        }
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < 2 * n.width / LANES; i++) {
        V total = {};
        const float* part = parts + i * LANES;
        for (int64_t block = 0; block < blocks; block++) total += *(const AnyV*)(part + block * 2 * n.width);
        *(AnyV*)(gains + i * LANES) = total;
    }
}

// -log softmax(scores)[target] of each row, and its gradient, softmax(scores) - onehot(target)
template <class E>
static void cross_entropy(const typename E::T* scores, int64_t rows, int64_t classes, const int64_t* targets,
                          typename E::T* gradients, float* losses, int threads) {
    int64_t whole = classes / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const typename E::T* x = scores + row * classes;
        typename E::T *dx = gradients + row * classes, rest[LANES];
        for (int64_t i = 0; i < LANES; i++) rest[i] = x[std::min(whole + i, classes - 1)];  // the end of the row
        VI there = lanes() < (int32_t)(classes - whole);
        V last = where(there, E::load(rest), broadcast(-INFINITY)), most = last;
        for (int64_t j = 0; j < whole; j += LANES) most = vector_max(most, E::load(x + j));
        float top = max_element(most);
        V total = where(there, exp2_of((last - top) * LOG2_E), V{});
        for (int64_t j = 0; j < whole; j += LANES) total += exp2_of((E::load(x + j) - top) * LOG2_E);
        float log_sum = std::log(sum(total)), less = log_sum * LOG2_E;
        losses[row] = log_sum - (E::scalar(x[targets[row]]) - top);
        for (int64_t j = 0; j < whole; j += LANES) E::store(dx + j, exp2_of((E::load(x + j) - top) * LOG2_E - less));
        E::store(rest, exp2_of((last - top) * LOG2_E - less));
        for (int64_t i = whole; i < classes; i++) dx[i] = rest[i - whole];
        // the target's gradient in float32: near probability 1 the difference from 1 is small
        float own = std::exp(-losses[row]) - 1;
        V several = broadcast(own);
        E::store(rest, several);
        dx[targets[row]] = rest[0];
    }
}

extern "C" {

// `gradients` may not be the scores
void heedful_cross_entropy(const void* scores, int64_t rows, int64_t classes, const int64_t* targets, int half,
                           void* gradients, float* losses, int threads) {
    if (half)
        cross_entropy<BFloat16>((const uint16_t*)scores, rows, classes, targets, (uint16_t*)gradients, losses, threads);
    else
        cross_entropy<Float32>((const float*)scores, rows, classes, targets, (float*)gradients, losses, threads);
}

void heedful_gelu(const void* x, int64_t count, int half, void* y, int threads) {
    if (half)
        gelu<BFloat16>((const uint16_t*)x, count, (uint16_t*)y, threads);
    else
        gelu<Float32>((const float*)x, count, (float*)y, threads);
}

void heedful_gelu_gradient(const void* x, const void* dy, int64_t count, int half, void* dx, int threads) {
    if (half)
        gelu_gradient<BFloat16>((const uint16_t*)x, (const uint16_t*)dy, count, (uint16_t*)dx, threads);
    else
        gelu_gradient<Float32>((const float*)x, (const float*)dy, count, (float*)dx, threads);
}

// x, y, z are bfloat16 where their `_half` says so; sums and moments may be null
void heedful_add_norm(int64_t rows, int64_t width, float eps, const float* gain, const float* bias, double p,
                      uint64_t seed, const void* x, int x_half, const void* y, int y_half, void* z, int z_half,
                      float* sums, float* moments, int threads) {
    Norm n = {rows, width, eps, gain, bias, Dropout(p), seed};
    auto with = [&](auto kx, auto ky, auto kz) {
        typedef decltype(kx) X;
        typedef decltype(ky) Y;
        typedef decltype(kz) Z;
        add_norm<X, Y, Z>(n, (const typename X::T*)x, (const typename Y::T*)y, (typename Z::T*)z, sums, moments,
                          threads);
    };
    auto second = [&](auto kx, auto ky) { z_half ? with(kx, ky, BFloat16{}) : with(kx, ky, Float32{}); };
    auto first = [&](auto kx) { y_half ? second(kx, BFloat16{}) : second(kx, Float32{}); };
    x_half ? first(BFloat16{}) : first(Float32{});
}

// `parts` has 2 width floats for every 32 rows, the last ones too
void heedful_add_norm_gradient(int64_t rows, int64_t width, float eps, const float* gain, double p, uint64_t seed,
                               const float* sums, const float* moments, const float* dz, float* dx, void* dy,
                               int y_half, float* gains, float* parts, int threads) {
    Norm n = {rows, width, eps, gain, nullptr, Dropout(p), seed};
    if (y_half)
        add_norm_gradient<BFloat16>(n, sums, moments, dz, dx, (uint16_t*)dy, gains, parts, threads);
    else
        add_norm_gradient<Float32>(n, sums, moments, dz, dx, (float*)dy, gains, parts, threads);
}
}
