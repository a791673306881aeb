// Row-wise operations: GELU, norm(x + dropout(y)), and cross-entropy over a vocabulary, each with its gradient.
// Matrices have no gaps between rows. Widths, but not numbers of classes, are multiples of LANES.
#include "vectors.h"

static constexpr int64_t BLOCK = 32;  // rows in a partial sum of the gradients of gain and bias

// calls function(first) with the index of the first element of each vector; `count` is a multiple of LANES
template <class E, class Function> static void for_each_vector(int64_t count, int threads, Function function) {
    int64_t vectors = count / LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < vectors; i++) function(i * LANES);
}

// y = x Phi(x), with the error that suits the type of y
template <class E> static void gelu(const typename E::T* x, int64_t count, typename E::T* y, int threads) {
    for_each_vector<E>(count, threads, [=](int64_t i) {
        V at = E::load(x + i), bell;
        E::store(y + i, E::IN_WORD == 2 ? gelu_of(at) : at * normal(at, bell));
    });
}

// dx = dy (Phi(x) + x phi(x)), where phi is the density of the normal distribution, `bell` / sqrt(2 pi)
template <class E>
static void gelu_gradient(const typename E::T* x, const typename E::T* dy, int64_t count, typename E::T* dx,
                          int threads) {
    for_each_vector<E>(count, threads, [=](int64_t i) {
        V at = E::load(x + i), bell, phi = normal(at, bell);
        E::store(dx + i, E::load(dy + i) * (phi + at * bell * 0.39894228f));
    });
}

struct Norm {  // a layer norm of rows, and the dropout before it
    int64_t rows, width;
    float eps;
    const float *gain, *bias;  // bias may be null
    Dropout dropout;
    uint64_t seed;
};

// Computes z = (s - mean) / sqrt(variance + eps) * gain + bias, with s = x + dropout(y) and the mean and variance of
// each row of s; x, y and z are [rows, width] of the element types X, Y and Z. Unless they are null, `sums`
// [rows, width] is set to s, and `moments` [rows, 2] to (mean, 1 / sqrt(variance + eps)).
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

// Computes the gradients of `add_norm` from dz [rows, width] and from its `sums` and `moments`: dx, which is the
// gradient of s; dy, which is dx times the same factors of dropout; and `gains` [2, width], the gradients of gain and
// bias. `parts` [blocks, 2, width] is memory for the sums of `gains` over each block of rows.
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
            V total = {}, products = {};
            for (int64_t i = 0; i < n.width; i += LANES) {
                V normed = (*(const AnyV*)(s + i) - mean) * scale, g = *(const AnyV*)(d + i);
                *(AnyV*)(part + i) = *(const AnyV*)(part + i) + g * normed;
                *(AnyV*)(part + n.width + i) = *(const AnyV*)(part + n.width + i) + g;
                g *= *(const AnyV*)(n.gain + i);
                total += g;
                products += g * normed;
            }
            // g is the gradient of the normed row: its mean, and the mean of its products with the normed row
            float mean_g = sum(total) / n.width, projection = sum(products) / n.width;
            uint32_t key = n.dropout.threshold ? key_of(n.seed, row) : 0;
            for (int64_t i = 0; i < n.width; i += LANES) {
                V normed = (*(const AnyV*)(s + i) - mean) * scale;
                V ds = (*(const AnyV*)(d + i) * *(const AnyV*)(n.gain + i) - mean_g - normed * projection) * scale;
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

// Computes losses[row] = -log softmax(scores[row])[targets[row]] for scores [rows, classes], and the gradients
// softmax(scores) - onehot(target) [rows, classes]. The tail of a row is the elements after its last whole vector.
template <class E>
static void cross_entropy(const typename E::T* scores, int64_t rows, int64_t classes, const int64_t* targets,
                          typename E::T* gradients, float* losses, int threads) {
    int64_t tail_start = classes / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const typename E::T* x = scores + row * classes;
        typename E::T *dx = gradients + row * classes, tail[LANES];
        for (int64_t i = 0; i < LANES; i++) tail[i] = x[std::min(tail_start + i, classes - 1)];
        VI is_class = lanes() < (int32_t)(classes - tail_start);
        V tail_scores = where(is_class, E::load(tail), broadcast(-INFINITY)), maxima = tail_scores;
        for (int64_t j = 0; j < tail_start; j += LANES) maxima = vector_max(maxima, E::load(x + j));
        float top = max_element(maxima);
        V total = where(is_class, exp2_of((tail_scores - top) * LOG2_E), V{});
        for (int64_t j = 0; j < tail_start; j += LANES) total += exp2_of((E::load(x + j) - top) * LOG2_E);
        float log_sum = std::log(sum(total)), log2_sum = log_sum * LOG2_E;
        losses[row] = log_sum - (E::scalar(x[targets[row]]) - top);
        for (int64_t j = 0; j < tail_start; j += LANES)
            E::store(dx + j, exp2_of((E::load(x + j) - top) * LOG2_E - log2_sum));
        E::store(tail, exp2_of((tail_scores - top) * LOG2_E - log2_sum));
        for (int64_t i = tail_start; i < classes; i++) dx[i] = tail[i - tail_start];
        // the gradient of the target is computed in float32: of a probability near 1 in bfloat16, 1 - p has few digits
        float target_gradient = std::exp(-losses[row]) - 1;
        V rounded = broadcast(target_gradient);
        E::store(tail, rounded);
        dx[targets[row]] = tail[0];
    }
}

extern "C" {

// computes `cross_entropy`; `gradients` must not be the same memory as `scores`
void heedful_cross_entropy(const void* scores, int64_t rows, int64_t classes, const int64_t* targets, int half,
                           void* gradients, float* losses, int threads) {
    if (half)
        cross_entropy<BFloat16>((const uint16_t*)scores, rows, classes, targets, (uint16_t*)gradients, losses, threads);
    else
        cross_entropy<Float32>((const float*)scores, rows, classes, targets, (float*)gradients, losses, threads);
}

// computes GELU of `count` elements, a multiple of LANES
void heedful_gelu(const void* x, int64_t count, int half, void* y, int threads) {
    if (half)
        gelu<BFloat16>((const uint16_t*)x, count, (uint16_t*)y, threads);
    else
        gelu<Float32>((const float*)x, count, (float*)y, threads);
}

// computes dx from x and dy, `count` elements each, a multiple of LANES
void heedful_gelu_gradient(const void* x, const void* dy, int64_t count, int half, void* dx, int threads) {
    if (half)
        gelu_gradient<BFloat16>((const uint16_t*)x, (const uint16_t*)dy, count, (uint16_t*)dx, threads);
    else
        gelu_gradient<Float32>((const float*)x, (const float*)dy, count, (float*)dx, threads);
}

// Computes `add_norm`; x, y and z are bfloat16 if x_half, y_half and z_half are 1. `bias`, `sums` and `moments` may be
// null. p is the probability of dropout.
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

// Computes `add_norm_gradient` with the p and the seed of `heedful_add_norm`; dy is bfloat16 if `y_half`. `parts` has
// room for 2 * width float32 for each BLOCK rows, and for an incomplete last block.
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
