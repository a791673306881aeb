// Matrix products C = A B by the tile registers of AMX. B is packed as in products.h, and depths are numbers of words.
//
// A step computes up to 2 * TILE rows and 2 * LANES columns. Its products of int8 have the same bits as those of
// `multiply`; its products of bfloat16 may be rounded differently.
#pragma once

#include "products.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && \
    defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t TILE = 16;         // a tile register has TILE rows of TILE words or sums
constexpr int64_t MIN_AMX_ROWS = 5;  // for fewer rows of A, vectors are faster than tiles
static_assert(TILE == LANES);

// whether the operating system lets this process use tile registers
static bool tiles_allowed() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

// The configuration of this thread's tile registers; a thread has one TileShapes at a time. Tiles 4 and 5 hold the
// upper and lower rows of A, tiles 6 and 7 the left and right columns of B, and tiles 0 to 3 the sums: upper left,
// upper right, lower left, lower right.
struct TileShapes {
    int64_t upper = 0, lower = 0;  // rows of A in tile 4 and in tile 5
    // sets the shapes for up to 2 * TILE rows of A
    void configure(int64_t rows) {
        int64_t first = std::min(TILE, rows), second = std::clamp<int64_t>(rows - TILE, 0, TILE);
        if (first == upper && second == lower) return;
        upper = first, lower = second;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        second = std::max<int64_t>(1, second);  // multiply_tiles clears tiles 2 and 3 too, which needs a row
        const int64_t all_rows[8] = {first, first, second, second, first, second, TILE, TILE};
        for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = (uint8_t)all_rows[i];
        _tile_loadconfig(&shapes);
    }
    ~TileShapes() {
        if (upper) _tile_release();
    }
};

// Multiplies the configured rows with 2 * LANES columns of a panel, which begin at `b`; the sums are in tiles 0 to 3.
// `stride` is the number of words between rows of `a`, `depth` is a multiple of TILE, and `has_lower` is true if there
// are more than TILE rows.
template <class E>
static inline INLINE void multiply_tiles(const uint32_t* a, int64_t stride, int64_t depth, bool has_lower,
                                         const uint32_t* b) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += TILE, b += TILE * PANEL) {
        _tile_loadd(6, b, PANEL * 4);
        _tile_loadd(7, b + LANES, PANEL * 4);
        _tile_loadd(4, a + k, stride * 4);
        if (has_lower) _tile_loadd(5, a + TILE * stride + k, stride * 4);
        if constexpr (std::is_same_v<E, BFloat16>) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!has_lower) continue;
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            if (!has_lower) continue;
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
}

// Multiplies the configured rows with `columns` columns of a panel, and calls store(row, column, sums) with the LANES
// sums from `column` on; the other arguments are those of `multiply_tiles`.
template <class E, class Store>
static inline INLINE void multiply_by_tiles(const TileShapes& shapes, const uint32_t* a, int64_t stride, int64_t depth,
                                            const uint32_t* panel, int64_t columns, Store store) {
    alignas(64) typename E::Sum sums[4][TILE];
    for (int64_t column = 0; column < columns; column += 2 * LANES) {
        multiply_tiles<E>(a, stride, depth, shapes.lower, panel + column);
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        if (shapes.lower) {
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
        }
        for (int64_t i = 0; i < shapes.upper + shapes.lower; i++)
            for (int64_t j = 0; j < 2 && column + j * LANES < columns; j++)
                store(i, column + j * LANES, sums[i / TILE * 2 + j][i % TILE]);
    }
}
#endif
