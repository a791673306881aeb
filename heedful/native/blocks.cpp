// A whole block of an encoder in inference, in bfloat16: norm(x + attention(x)), then norm(y + mlp(y)). It is one call
// instead of seven, which is what counts for a short text alone.
#include "vectors.h"

extern "C" {
void heedful_linear(const void*, int64_t, int64_t, const uint32_t*, int64_t, int64_t, const float*, int, int, int,
                    void*, int);
void heedful_round_rows(const void*, int64_t, int64_t, int64_t, int, uint8_t*, float*, int);
void heedful_linear8(const uint8_t*, const float*, int64_t, const uint32_t*, int64_t, int64_t, const float*,
                     const float*, const float*, int, int, void*, int);
void heedful_add_norm(int64_t, int64_t, float, const float*, const float*, double, uint64_t, const void*, int,
                      const void*, int, void*, int, float*, float*, int);
void heedful_attention(int64_t, int64_t, int64_t, const int64_t*, const void*, int64_t, const void*, int64_t,
                       const void*, int64_t, float, int, int64_t, double, uint64_t, int, void*, int64_t, float*, int);
}

struct Linear {
    const uint32_t* panels;
    const float *bias, *scales, *sums;  // scales and sums: of whole numbers, else null
    int64_t depth, columns, gelu;
};

struct Norm {
    const float *gain, *bias;
    double eps;
};

struct Block {
    Linear qkv, out, up, down;
    Norm attended, done;
    int64_t heads, causal;
    double scale;
};

static void apply(const Linear& l, const uint16_t* x, int64_t rows, uint16_t* y, char* space, int threads) {
    int gelu = (int)l.gelu;
    if (!l.scales)
        return heedful_linear(x, l.depth, rows, l.panels, l.depth, l.columns, l.bias, gelu, 1, 0, y, threads);
    float* scales = (float*)space;
    uint8_t* whole = (uint8_t*)(scales + 2 * rows);
    heedful_round_rows(x, l.depth, rows, l.depth, 1, whole, scales, threads);
    heedful_linear8(whole, scales, rows, l.panels, l.depth, l.columns, l.scales, l.sums, l.bias, gelu, 1, y,
                    threads);
}

static void add_norm(const Norm& n, const uint16_t* x, const uint16_t* y, int64_t rows, int64_t width, uint16_t* z,
                     int threads) {
    heedful_add_norm(rows, width, (float)n.eps, n.gain, n.bias, 0, 0, x, 1, y, 1, z, 1, nullptr, nullptr, threads);
}

// x and z [rows, width] may not be the same. `space` has, for each row, 2 bytes for each column of all four layers and
// for another row, and 8, and 1 for each number of the widest input.
extern "C" void heedful_block(const void* block, const uint16_t* x, int64_t rows, int64_t sequences,
                              const int64_t* spans, int64_t window, uint16_t* z, char* space, int threads) {
    const Block& b = *(const Block*)block;
    int64_t width = b.qkv.depth, inner = b.out.depth;
    uint16_t *qkv = (uint16_t*)space, *mixed = qkv + rows * b.qkv.columns, *y = mixed + rows * inner;
    uint16_t *attended = y + rows * width, *up = attended + rows * width;
    char* rest = (char*)(up + rows * b.up.columns);
    apply(b.qkv, x, rows, qkv, rest, threads);
    heedful_attention(sequences, b.heads, inner / b.heads, spans, qkv, 3 * inner, qkv + inner, 3 * inner,
                      qkv + 2 * inner, 3 * inner, (float)b.scale, (int)b.causal, window, 0, 0, 1, mixed, inner, nullptr,
                      threads);
    apply(b.out, mixed, rows, y, rest, threads);
    add_norm(b.attended, x, y, rows, width, attended, threads);
    apply(b.up, attended, rows, up, rest, threads);
    apply(b.down, up, rows, y, rest, threads);
    add_norm(b.done, attended, y, rows, width, z, threads);
}
