// The forward pass of an encoder and its head for one text, in WebAssembly: no libraries, one thread.
//
// A model is a block of memory with its tensors, followed by its ops. serialize.py writes it. An op is a list of 32-bit
// words: its code, sizes, and offsets of tensors in the block. Rows of matrices are padded with zeros to a multiple of 16
// values. `run` computes the ops one after the other on `State`: a row for each token, and after pooling one row.

#include <stddef.h>
#include <stdint.h>

#ifdef __wasm__
#define EXPORT(name) extern "C" __attribute__((export_name(#name)))
#else
#define EXPORT(name) extern "C"
#endif

typedef float V __attribute__((vector_size(16)));
typedef float AnyV __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(16)));
typedef int16_t H __attribute__((vector_size(16)));
typedef int16_t AnyH __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint16_t U __attribute__((vector_size(16)));
typedef uint16_t AnyU __attribute__((vector_size(16), aligned(2), may_alias));
typedef int8_t AnyB __attribute__((vector_size(8), aligned(1), may_alias));

constexpr int PAD = 16;  // rows of matrices are padded to a multiple of this number of values
constexpr int ROWS = 4;  // rows of a tile

// -- memory: the model, followed by the tensors of the current run -----------------------------------------------------

#ifdef __wasm__
extern char __heap_base;
static char* const START = &__heap_base;
static bool grow(char* end) {
    size_t pages = ((size_t)end + 65535) / 65536, present = __builtin_wasm_memory_size(0);
    return pages <= present || __builtin_wasm_memory_grow(0, pages - present) != (size_t)-1;
}
#else
static char STORAGE[1 << 26];
static char* const START = STORAGE;
static bool grow(char* end) { return end <= STORAGE + sizeof STORAGE; }
#endif

static char* top = START;
static char* model_end = START;

static char* take_bytes(size_t bytes) {
    char* piece = (char*)(((size_t)top + 15) & ~(size_t)15);
    if (!grow(piece + bytes)) __builtin_trap();
    top = piece + bytes;
    return piece;
}

template <class T> static T* take(int count) { return (T*)take_bytes((size_t)count * sizeof(T)); }

// -- functions --------------------------------------------------------------------------------------------------------

static inline V all(float x) { return V{x, x, x, x}; }
static inline float sum(V x) { return (x[0] + x[1]) + (x[2] + x[3]); }
static inline V where(I mask, V one, V other) { return (V)(((I)one & mask) | ((I)other & ~mask)); }
static inline V larger(V x, V y) { return where(x > y, x, y); }

// e^x for x <= 88, within 2 units in the last place
static inline V exponential(V x) {
    x = larger(all(-126.f), x * 1.44269504f);
    V whole = (x + 12582912.f) - 12582912.f;  // adding 1.5 * 2^23 rounds to an integer
    V part = x - whole, y = all(1.5403530e-4f);
    constexpr float COEFFICIENTS[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f};
    for (float coefficient : COEFFICIENTS) y = y * part + coefficient;
    return y * (V)((__builtin_convertvector(whole, I) + 127) << 23);
}

static inline V hyperbolic_tangent(V x) {
    V limited = where(x > 15.f, all(15.f), where(x < -15.f, all(-15.f), x));
    return 1.f - 2.f / (exponential(limited + limited) + 1.f);
}

// x Phi(x), with Phi by Abramowitz and Stegun 1964, 7.1.26: within 1e-7
static inline V gelu(V x) {
    V scaled = where(x < 0.f, -x, x) * 0.70710678f, t = 1.f / (scaled * 0.3275911f + 1.f);
    V y = t * 1.061405429f - 1.453152027f;
    constexpr float COEFFICIENTS[] = {1.421413741f, -0.284496736f, 0.254829592f};
    for (float coefficient : COEFFICIENTS) y = y * t + coefficient;
    V tail = y * t * exponential(-scaled * scaled) * 0.5f;
    return x * where(x < 0.f, tail, 1.f - tail);
}

enum Activation { IDENTITY, RELU, GELU, GELU_TANH, SILU, TANH, SIGMOID };

static inline V activated(V x, int activation) {
    switch (activation) {
        case RELU: return larger(x, V{});
        case GELU: return gelu(x);
        case GELU_TANH:
            return x * 0.5f * (hyperbolic_tangent((x + 0.044715f * x * x * x) * 0.7978845608f) + 1.f);
        case SILU: return x * (hyperbolic_tangent(x * 0.5f) * 0.5f + 0.5f);
        case TANH: return hyperbolic_tangent(x);
        case SIGMOID: return hyperbolic_tangent(x * 0.5f) * 0.5f + 0.5f;
        default: return x;
    }
}

static void activate(float* x, int count, int activation) {
    if (activation == IDENTITY) return;
    int i = 0;
    for (; i + 4 <= count; i += 4) *(AnyV*)(x + i) = activated(*(const AnyV*)(x + i), activation);
    for (; i < count; i++) x[i] = activated(all(x[i]), activation)[0];
}

// sine (quarter 0) and cosine (quarter 1): Taylor series after a reduction to 45 degrees, within 1e-10
static double wave(double angle, int quarter) {
    double turns = __builtin_floor(angle * 0.63661977236758134 + 0.5), rest = angle - turns * 1.5707963267948966;
    int64_t part = (int64_t)turns + quarter;
    double square = rest * rest, term = part & 1 ? 1 : rest, total = term;
    for (int n = part & 1 ? 0 : 1; n < 12; n += 2) total += term *= -square / ((n + 1) * (n + 2));
    return part & 2 ? -total : total;
}

// -- tensors ----------------------------------------------------------------------------------------------------------

enum Format { NONE, FLOAT32, FLOAT16, INT8 };

struct Matrix {
    int format, rows, columns;
    const char* data;
    const float* scales;  // scale of each row of an int8 matrix
    int stride() const { return (columns + PAD - 1) / PAD * PAD; }
};

struct Linear {
    Matrix weight;
    const float* bias;
};

struct Norm {
    int kind;  // 0 for no norm, 1 for layer norm, 2 for RMS norm
    float eps;
    const float *gain, *bias;
};

struct Reader {
    const char* model;
    const int32_t* next;
    int word() { return *next++; }
    float number() {
        float x;
        __builtin_memcpy(&x, next++, 4);
        return x;
    }
    const char* at() {
        int offset = word();
        return offset < 0 ? nullptr : model + offset;
    }
    const float* floats() { return (const float*)at(); }
    Matrix matrix() {
        Matrix matrix = {word(), 0, 0, nullptr, nullptr};
        if (matrix.format == NONE) return matrix;
        matrix.rows = word(), matrix.columns = word(), matrix.data = at(), matrix.scales = floats();
        return matrix;
    }
    Linear linear() {
        Linear linear = {matrix(), nullptr};
        if (linear.weight.format != NONE) linear.bias = floats();
        return linear;
    }
    Norm norm() {
        Norm norm = {word(), 0, nullptr, nullptr};
        if (norm.kind) norm.eps = number(), norm.gain = floats(), norm.bias = floats();
        return norm;
    }
};

// float16 in the low halves to float32: exponent and mantissa are shifted, and a factor of 2^112 corrects the exponent
static inline V widened(I bits) {
    return (V)((I)((V)((bits & 0x7fff) << 13) * 5.192296858534828e33f) | ((bits & 0x8000) << 16));
}

static void read_row(const Matrix& matrix, int row, float* to) {  // [stride]
    int stride = matrix.stride();
    if (matrix.format == FLOAT32) {
        const float* from = (const float*)matrix.data + (size_t)row * stride;
        for (int i = 0; i < stride; i++) to[i] = from[i];
    } else if (matrix.format == FLOAT16) {
        const uint16_t* from = (const uint16_t*)matrix.data + (size_t)row * stride;
        for (int i = 0; i < stride; i += 8) {
            U halves = *(const AnyU*)(from + i), zeros = {};
            *(AnyV*)(to + i) = widened((I)__builtin_shufflevector(halves, zeros, 0, 8, 1, 9, 2, 10, 3, 11));
            *(AnyV*)(to + i + 4) = widened((I)__builtin_shufflevector(halves, zeros, 4, 12, 5, 13, 6, 14, 7, 15));
        }
    } else {
        const int8_t* from = (const int8_t*)matrix.data + (size_t)row * stride;
        for (int i = 0; i < stride; i++) to[i] = from[i] * matrix.scales[row];
    }
}

static void normalise(const Norm& norm, float* x, int rows, int width) {
    if (!norm.kind) return;
    for (int row = 0; row < rows; row++, x += width) {
        float mean = 0, square = 0;
        if (norm.kind == 1) {
            for (int i = 0; i < width; i++) mean += x[i];
            mean /= width;
        }
        for (int i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
        float factor = 1 / __builtin_sqrtf(square / width + norm.eps);
        for (int i = 0; i < width; i++)
            x[i] = (x[i] - mean) * factor * norm.gain[i] + (norm.bias ? norm.bias[i] : 0.f);
    }
}

// -- products: tiles of 4 rows and 2 columns; a tile at the edge repeats the last row or column ------------------------

static inline I dot(H x, H y) {  // sums of products of neighbours
#ifdef __wasm__
    return __builtin_wasm_dot_s_i32x4_i16x8(x, y);
#else
    I sums;
    for (int i = 0; i < 4; i++) sums[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return sums;
#endif
}

static inline int clamped(int index, int count) { return index < count ? index : count - 1; }

static void tile_of_floats(const float* const* x, const float* const* w, int count, float (*y)[2]) {
    V sums[ROWS][2] = {};
    for (int i = 0; i < count; i += 4)
        for (int column = 0; column < 2; column++) {
            V weight = *(const AnyV*)(w[column] + i);
            for (int row = 0; row < ROWS; row++) sums[row][column] += *(const AnyV*)(x[row] + i) * weight;
        }
    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < 2; column++) y[row][column] = sum(sums[row][column]);
}

static void tile_of_integers(const int16_t* const* x, const int8_t* const* w, int count, float (*y)[2]) {
    I sums[ROWS][2] = {};
    for (int i = 0; i < count; i += 8)
        for (int column = 0; column < 2; column++) {
            H weight = __builtin_convertvector(*(const AnyB*)(w[column] + i), H);
            for (int row = 0; row < ROWS; row++) sums[row][column] += dot(*(const AnyH*)(x[row] + i), weight);
        }
    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < 2; column++) y[row][column] = sum(__builtin_convertvector(sums[row][column], V));
}

// Rows as 16-bit integers, and the scale of each row. Sums of their products with int8 values fit 32 bits.
static int16_t* quantized(const float* x, int rows, int width, int stride, float* scales) {
    int16_t* result = take<int16_t>(rows * stride);
    float limit = 4.f * 2147483000.f / (127.f * stride);
    if (limit > 32767.f) limit = 32767.f;
    for (int row = 0; row < rows; row++, x += width) {
        float most = 1e-30f;
        for (int i = 0; i < width; i++) most = x[i] > most ? x[i] : -x[i] > most ? -x[i] : most;
        float factor = limit / most;
        scales[row] = most / limit;
        int16_t* to = result + row * stride;
        for (int i = 0; i < width; i++) {
            float scaled = x[i] * factor;
            to[i] = (int16_t)(int)(scaled + (scaled < 0 ? -0.5f : 0.5f));
        }
        for (int i = width; i < stride; i++) to[i] = 0;
    }
    return result;
}

static float* padded(const float* x, int rows, int width, int stride) {
    float* result = take<float>(rows * stride);
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < stride; i++) result[row * stride + i] = i < width ? x[row * width + i] : 0.f;
    return result;
}

// y = W x + b, [rows, linear.weight.rows]
static void multiply(const Linear& linear, const float* x, int rows, float* y) {
    const Matrix& matrix = linear.weight;
    int stride = matrix.stride(), outputs = matrix.rows;
    char* mark = top;
    float *scales = take<float>(rows), *decoded[2] = {take<float>(stride), take<float>(stride)};
    bool integers = matrix.format == INT8;
    int16_t* whole = integers ? quantized(x, rows, matrix.columns, stride, scales) : nullptr;
    float* wide = integers ? nullptr : padded(x, rows, matrix.columns, stride);
    for (int first = 0; first < outputs; first += 2) {
        int columns[2] = {first, clamped(first + 1, outputs)};
        const float* w[2];
        const int8_t* bytes[2];
        for (int i = 0; i < 2; i++) {
            if (matrix.format == FLOAT16) read_row(matrix, columns[i], decoded[i]);
            w[i] = matrix.format == FLOAT16 ? decoded[i] : (const float*)matrix.data + (size_t)columns[i] * stride;
            bytes[i] = (const int8_t*)matrix.data + (size_t)columns[i] * stride;
        }
        for (int row = 0; row < rows; row += ROWS) {
            const float* from[ROWS];
            const int16_t* whole_from[ROWS];
            for (int i = 0; i < ROWS; i++) {
                from[i] = wide + clamped(row + i, rows) * stride;
                whole_from[i] = whole + clamped(row + i, rows) * stride;
            }
            float results[ROWS][2];
            if (integers)
                tile_of_integers(whole_from, bytes, stride, results);
            else
                tile_of_floats(from, w, stride, results);
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < 2; j++) {
                    int at = clamped(row + i, rows), column = columns[j];
                    float factor = integers ? scales[at] * matrix.scales[column] : 1.f;
                    y[at * outputs + column] = results[i][j] * factor + (linear.bias ? linear.bias[column] : 0.f);
                }
        }
    }
    top = mark;
}

static float* multiplied(const Linear& linear, const float* x, int rows) {
    float* y = take<float>(rows * linear.weight.rows);
    multiply(linear, x, rows, y);
    return y;
}

// -- attention --------------------------------------------------------------------------------------------------------

struct Attention {
    int heads, kv_heads, width;  // `width` is the head dimension
    float scale;
    int window;                 // visible positions on each side, or -1 for all
    const double* frequencies;  // frequencies of rotary positions, [width / 2]
    float magnitude;            // factor of rotated queries and keys
    const float* distances;     // bias of each distance from -reach to reach, and each head
    int reach;
};

static inline float product(const float* x, const float* y, int count) {
    V sums = {};
    int i = 0;
    for (; i + 4 <= count; i += 4) sums += *(const AnyV*)(x + i) * *(const AnyV*)(y + i);
    float total = sum(sums);
    for (; i < count; i++) total += x[i] * y[i];
    return total;
}

static void rotate(const Attention& a, float* x, int rows, int heads, int stride) {
    int half = a.width / 2;
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < half; i++) {
            double angle = row * a.frequencies[i];
            float sine = (float)wave(angle, 0) * a.magnitude, cosine = (float)wave(angle, 1) * a.magnitude;
            for (int head = 0; head < heads; head++) {
                float *first = x + (size_t)row * stride + head * a.width + i, *second = first + half, kept = *first;
                *first = kept * cosine - *second * sine;
                *second = *second * cosine + kept * sine;
            }
        }
}

// softmax of scores, in place; the memory must have room for three more values
static void softmax(float* scores, int count) {
    float most = -3e38f, total = 0;
    for (int i = 0; i < count; i++) most = scores[i] > most ? scores[i] : most;
    for (int i = 0; i < count; i += 4) *(AnyV*)(scores + i) = exponential(*(const AnyV*)(scores + i) - most);
    for (int i = 0; i < count; i++) total += scores[i];
    for (int i = 0; i < count; i++) scores[i] /= total;
}

// the sum of weighted rows
static void mix(const float* weights, const float* rows, int count, int stride, int width, float* to) {
    for (int i = 0; i < width; i++) to[i] = 0;
    for (int row = 0; row < count; row++)
        for (int i = 0; i < width; i++) to[i] += weights[row] * rows[(size_t)row * stride + i];
}

// The keys that a token attends to: from `first` to before `stop`.
struct Keys {
    int first, stop;
};

static Keys visible_keys(const Attention& a, int row, int rows) {
    return {
        a.window < 0 || row < a.window ? 0 : row - a.window,
        a.window < 0 || row + a.window >= rows ? rows : row + a.window + 1,
    };
}

// scale q k + bias of one token and the keys that it attends to; qkv is [rows, (heads + 2 kv_heads) * width]
static void score_keys(const Attention& a, const float* qkv, int head, int row, Keys keys, float* scores) {
    size_t stride = (a.heads + 2 * a.kv_heads) * a.width;
    const float* q = qkv + row * stride + head * a.width;
    const float* k = qkv + (a.heads + head / (a.heads / a.kv_heads)) * a.width;
    for (int key = keys.first; key < keys.stop; key++) {
        float score = a.scale * product(q, k + key * stride, a.width);
        if (a.distances) {
            int distance = key - row;
            distance = distance < -a.reach ? -a.reach : distance > a.reach ? a.reach : distance;
            score += a.distances[(distance + a.reach) * a.heads + head];
        }
        scores[key - keys.first] = score;
    }
}

// gate softmax(scores) v of all heads, [rows, heads * width]; `gates` has a factor for each head, or is null
static void attend(const Attention& a, const float* qkv, int rows, const float* gates, float* out) {
    int stride = (a.heads + 2 * a.kv_heads) * a.width, group = a.heads / a.kv_heads;
    float* weights = take<float>(rows + 4);
    for (int head = 0; head < a.heads; head++) {
        const float* v = qkv + (a.heads + a.kv_heads + head / group) * a.width;
        for (int row = 0; row < rows; row++) {
            Keys keys = visible_keys(a, row, rows);
            score_keys(a, qkv, head, row, keys, weights);
            softmax(weights, keys.stop - keys.first);
            float* to = out + (size_t)row * a.heads * a.width + head * a.width;
            mix(weights, v + (size_t)keys.first * stride, keys.stop - keys.first, stride, a.width, to);
            for (int i = 0; gates && i < a.width; i++) to[i] *= gates[head];
        }
    }
}

// -- ops --------------------------------------------------------------------------------------------------------------

// Tensors of a block that a traced run stores until the next run; each has a row for each token.
struct BlockTrace {
    const float *input, *qkv;        // `qkv` is after norms and rotation
    const float *joined, *attended;  // the concatenated outputs of all heads, and their projection
    const float* middle;             // after the residual connection of attention, and after the norm of post-norm
    const float *inner, *mlp;        // input and output of `down` of the feed-forward network
    const float* output;
    const Attention* attention;
};

struct Input {
    const int32_t *tokens, *types;
    int count;
    const int32_t* wanted;  // indices of the tokens that `select` keeps
    int wanted_count;
    const float* gates;      // factors of the outputs of heads, from the next block on, or null if all are 1
    const float** embedded;  // traced embeddings of tokens, positions and types, or null without trace
    BlockTrace* trace;       // trace of the next block, or null without trace
};

struct State {
    float* x;
    int rows, width;
};

static void embed(Reader& read, const Input& input, State& state) {
    Matrix tokens = read.matrix();
    float scale = read.number();
    Matrix positions = read.matrix();
    int offset = read.word();
    Matrix types = read.matrix();
    Norm norm = read.norm();
    Linear project = read.linear();
    state = {take<float>(input.count * tokens.columns), input.count, tokens.columns};
    float* row = take<float>(tokens.stride());
    const Matrix* tables[] = {&tokens, &positions, &types};
    for (int part = 0; part < 3; part++) {
        if (!tables[part]->format) continue;
        float* vectors = input.embedded ? take<float>(input.count * state.width) : nullptr;
        for (int i = 0; i < input.count; i++) {
            float* to = state.x + (size_t)i * state.width;
            read_row(*tables[part], part == 0 ? input.tokens[i] : part == 1 ? i + offset : input.types[i], row);
            for (int j = 0; j < state.width; j++) {
                float x = part ? row[j] : row[j] * scale;
                to[j] = part ? to[j] + x : x;
                if (vectors) vectors[(size_t)i * state.width + j] = x;
            }
        }
        if (vectors) input.embedded[part] = vectors;
    }
    normalise(norm, state.x, state.rows, state.width);
    if (!project.weight.format) return;
    state.x = multiplied(project, state.x, state.rows);
    state.width = project.weight.rows;
}

static void add(float* x, const float* y, int count) {
    for (int i = 0; i < count; i++) x[i] += y[i];
}

static void copy(float* to, const float* from, int count) {
    for (int i = 0; i < count; i++) to[i] = from[i];
}

static void norm_heads(const Norm& norm, float* x, int rows, int heads, int width, int stride) {
    for (int row = 0; norm.kind && row < rows; row++) normalise(norm, x + (size_t)row * stride, heads, width);
}

static const float* copied(const float* x, int count) {
    float* result = take<float>(count);
    copy(result, x, count);
    return result;
}

static float* self_attention(Reader& read, Input& input, const float* x, int rows) {
    Attention& a = *take<Attention>(1);
    a.heads = read.word(), a.kv_heads = read.word(), a.width = read.word();
    a.scale = read.number(), a.window = read.word();
    a.frequencies = (const double*)read.at(), a.magnitude = read.number();
    a.distances = read.floats(), a.reach = read.word();
    Linear qkv = read.linear();
    Norm q_norm = read.norm(), k_norm = read.norm();
    Linear out = read.linear();
    int stride = qkv.weight.rows;
    float *projected = multiplied(qkv, x, rows), *keys = projected + a.heads * a.width;
    norm_heads(q_norm, projected, rows, a.heads, a.width, stride);
    norm_heads(k_norm, keys, rows, a.kv_heads, a.width, stride);
    if (a.frequencies) {
        rotate(a, projected, rows, a.heads, stride);
        rotate(a, keys, rows, a.kv_heads, stride);
    }
    float* mixed = take<float>(rows * a.heads * a.width);
    attend(a, projected, rows, input.gates, mixed);
    if (input.gates) input.gates += a.heads;
    float* y = multiplied(out, mixed, rows);
    if (BlockTrace* trace = input.trace)
        trace->attention = &a, trace->qkv = projected, trace->joined = mixed, trace->attended = y;
    return y;
}

// down(activation(up x)), or down(activation(gate x) * up x)
static float* feed_forward(Reader& read, Input& input, const float* x, int rows) {
    Linear up = read.linear();
    int gated = read.word(), activation = read.word();
    Linear down = read.linear();
    int width = up.weight.rows, inner = gated ? width / 2 : width;
    float* y = multiplied(up, x, rows);
    if (!gated) activate(y, rows * width, activation);
    for (int row = 0; gated && row < rows; row++) {
        float *gate = y + (size_t)row * width, *to = y + (size_t)row * inner;  // `to` is never behind `gate`
        activate(gate, inner, activation);
        for (int i = 0; i < inner; i++) to[i] = gate[i] * gate[inner + i];
    }
    float* z = multiplied(down, y, rows);
    if (input.trace) input.trace->inner = y, input.trace->mlp = z;
    return z;
}

static void block(Reader& read, Input& input, State& state) {
    int norm_first = read.word(), count = state.rows * state.width;
    char* mark = top;
    if (input.trace) input.trace->input = copied(state.x, count);
    float* before = take<float>(count);
    for (int part = 0; part < 2; part++) {
        Norm norm = read.norm();
        copy(before, state.x, count);
        if (norm_first) normalise(norm, before, state.rows, state.width);
        add(state.x, (part ? feed_forward : self_attention)(read, input, before, state.rows), count);
        if (!norm_first) normalise(norm, state.x, state.rows, state.width);
        if (input.trace) (part ? input.trace->output : input.trace->middle) = copied(state.x, count);
    }
    if (input.trace)
        input.trace++;
    else
        top = mark;
}

static void dense(Reader& read, State& state) {
    Linear linear = read.linear();
    int activation = read.word();
    Norm norm = read.norm();
    state.x = multiplied(linear, state.x, state.rows);
    state.width = linear.weight.rows;
    activate(state.x, state.rows * state.width, activation);
    normalise(norm, state.x, state.rows, state.width);
}

static void select(const Input& input, State& state) {
    float* chosen = take<float>(input.wanted_count * state.width);
    for (int i = 0; i < input.wanted_count; i++)
        copy(chosen + i * state.width, state.x + (size_t)input.wanted[i] * state.width, state.width);
    state.x = chosen, state.rows = input.wanted_count;
}

static void clear(float* x, int count) {
    for (int i = 0; i < count; i++) x[i] = 0;
}

enum Pooling { MEAN, FIRST, MAX, MEAN_SQRT_LENGTH, LAST, SUM };

// the concatenated results of all poolings; zeros for a text without tokens
static void pool(Reader& read, State& state) {
    int count = read.word(), width = state.width;
    float* pooled = take<float>(count * width);
    clear(pooled, count * width);
    for (int index = 0; index < count; index++) {
        int pooling = read.word();
        float* to = pooled + index * width;
        if (state.rows == 0) continue;
        copy(to, state.x + (pooling == LAST ? (size_t)(state.rows - 1) * width : 0), width);
        if (pooling == FIRST || pooling == LAST) continue;
        for (int row = 1; row < state.rows; row++)
            for (int i = 0; i < width; i++) {
                float x = state.x[(size_t)row * width + i];
                to[i] = pooling == MAX ? (x > to[i] ? x : to[i]) : to[i] + x;
            }
        float divisor = pooling == MEAN ? state.rows : pooling == MEAN_SQRT_LENGTH ? __builtin_sqrtf(state.rows) : 1.f;
        for (int i = 0; i < width; i++) to[i] /= divisor;
    }
    state = {pooled, 1, count * width};
}

// softmax(scale K q) V for each trained query: a row for each query, or one row with all results
static void pool_by_queries(Reader& read, State& state) {
    Linear key = read.linear();
    int activation = read.word();
    Linear value = read.linear();
    const float* queries = read.floats();
    int count = read.word();
    float scale = read.number();
    int joined = read.word(), rows = state.rows, width = state.width;
    int inner = key.weight.format ? key.weight.rows : width;
    float* keys = key.weight.format ? multiplied(key, state.x, rows) : state.x;
    activate(keys, rows * inner, activation);
    float* values = value.weight.format ? multiplied(value, state.x, rows) : state.x;
    float *pooled = take<float>(count * width), *weights = take<float>(rows + 4);
    for (int query = 0; query < count; query++) {
        for (int row = 0; row < rows; row++)
            weights[row] = scale * product(queries + query * inner, keys + (size_t)row * inner, inner);
        softmax(weights, rows);
        mix(weights, values, rows, width, width, pooled + query * width);
    }
    state = {pooled, joined ? 1 : count, joined ? count * width : width};
}

// the product of row c and row c of the matrix, for each class c
static void score_rows(Reader& read, State& state) {
    Linear linear = read.linear();
    float *row = take<float>(linear.weight.stride()), *scores = take<float>(state.rows);
    for (int i = 0; i < state.rows; i++) {
        read_row(linear.weight, i, row);
        scores[i] = product(row, state.x + i * state.width, state.width) + (linear.bias ? linear.bias[i] : 0.f);
    }
    state = {scores, 1, state.rows};
}

enum Cell { LSTM, GRU };

// One direction of a layer: gates i, f, g, o of an LSTM, or r, z, n of a GRU, as in PyTorch.
static void run_cells(Reader& read, const State& state, int cell, int width, bool reverse, float* out) {
    Linear input = read.linear(), hidden = read.linear();
    int count = input.weight.rows;
    float *gates = multiplied(input, state.x, state.rows), *from_h = take<float>(count);
    float *h = take<float>(width), *c = take<float>(width);
    clear(h, width);
    clear(c, width);
    for (int step = 0; step < state.rows; step++) {
        int row = reverse ? state.rows - 1 - step : step;
        float* gate = gates + (size_t)row * count;
        multiply(hidden, h, 1, from_h);
        if (cell == LSTM) {
            add(gate, from_h, count);
            activate(gate, 2 * width, SIGMOID);
            activate(gate + 2 * width, width, TANH);
            activate(gate + 3 * width, width, SIGMOID);
            for (int i = 0; i < width; i++) c[i] = gate[width + i] * c[i] + gate[i] * gate[2 * width + i];
            copy(h, c, width);
            activate(h, width, TANH);
            for (int i = 0; i < width; i++) h[i] *= gate[3 * width + i];
        } else {
            add(gate, from_h, 2 * width);
            activate(gate, 2 * width, SIGMOID);
            for (int i = 2 * width; i < count; i++) gate[i] += gate[i - 2 * width] * from_h[i];
            activate(gate + 2 * width, width, TANH);
            for (int i = 0; i < width; i++) h[i] = gate[2 * width + i] + gate[width + i] * (h[i] - gate[2 * width + i]);
        }
        copy(out + (size_t)row * 2 * width, h, width);
    }
}

static void recurrent(Reader& read, State& state) {
    int cell = read.word(), width = read.word(), layers = read.word();
    for (int layer = 0; layer < layers; layer++) {
        float* both = take<float>(state.rows * 2 * width);
        for (int reverse = 0; reverse < 2; reverse++) run_cells(read, state, cell, width, reverse, both + reverse * width);
        state.x = both, state.width = 2 * width;
    }
}

static void l2_normalize(State& state) {
    float length = __builtin_sqrtf(product(state.x, state.x, state.width));
    for (int i = 0; i < state.width; i++) state.x[i] /= length > 1e-12f ? length : 1e-12f;
}

enum Op { END, EMBED, BLOCK, NORM, DENSE, SELECT, POOL, L2_NORMALIZE, RECURRENT, POOL_BY_QUERIES, SCORE_ROWS };

static State state;

// Reserves memory for the model, and frees all other memory.
EXPORT(reserve_model) char* reserve_model(int bytes) {
    top = START;
    char* model = take_bytes(bytes);
    model_end = top;
    return model;
}

// Reserves memory for tokens, types and wanted tokens, until the end of the next run.
EXPORT(reserve_input) int32_t* reserve_input(int words) {
    top = model_end;
    return take<int32_t>(words);
}

// Computes at most `num_ops` ops, and returns the resulting matrix, whose shape `rows` and `columns` return. `gates` is
// [blocks, heads] or null. `embedded` has room for three pointers and `trace` for an element for each block, or both are
// null.
EXPORT(run)
float* run(
    const char* model, int ops_offset, const int32_t* tokens, const int32_t* types, int count, const int32_t* wanted,
    int wanted_count, int num_ops, const float* gates, const float** embedded, BlockTrace* trace
) {
    Input input = {tokens, types, count, wanted, wanted_count, gates, embedded, trace};
    Reader read = {model, (const int32_t*)(model + ops_offset)};
    for (int op; num_ops-- > 0 && (op = read.word()) != END;) switch (op) {
            case EMBED: embed(read, input, state); break;
            case BLOCK: block(read, input, state); break;
            case NORM: normalise(read.norm(), state.x, state.rows, state.width); break;
            case DENSE: dense(read, state); break;
            case SELECT: select(input, state); break;
            case POOL: pool(read, state); break;
            case L2_NORMALIZE: l2_normalize(state); break;
            case RECURRENT: recurrent(read, state); break;
            case POOL_BY_QUERIES: pool_by_queries(read, state); break;
            case SCORE_ROWS: score_rows(read, state); break;
            default: __builtin_trap();
        }
    return state.x;
}

// The attention scores of one head of a traced block, [rows, rows], with -infinity for masked keys. They are valid until
// the next call.
EXPORT(scores) float* scores(const BlockTrace* block, int head, int rows) {
    const float masked = -__builtin_inff();
    char* mark = top;
    float* result = take<float>(rows * rows);
    for (int i = 0; i < rows * rows; i++) result[i] = masked;
    for (int row = 0; row < rows; row++) {
        Keys keys = visible_keys(*block->attention, row, rows);
        score_keys(*block->attention, block->qkv, head, row, keys, result + row * rows + keys.first);
    }
    top = mark;
    return result;
}

EXPORT(rows) int rows() { return state.rows; }
EXPORT(columns) int columns() { return state.width; }
