// Rows of activations to int8 tiles. Included once per instruction set, after lanes.h.
//
// scale = largest magnitude of 32 inputs / 127; code = x * (127 / largest), rounded to nearest even: an input is off by at most half a
// scale, 1/254 of the largest in its block. What is not finite makes its block's scale so, and with it the result.
#include "panel.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

typedef int32_t Four __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(W)));

// Bits of magnitudes are ordered as the numbers are, and those that are not numbers lie above all.
INLINE int32_t largest_bits(I bits) {
    Four parts[W / 4];
    std::memcpy(parts, &bits, sizeof bits);
    Four most = parts[0];
    for (int part = 1; part < W / 4; part++) most = most > parts[part] ? most : parts[part];
    return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

// One block of row `row` of a tile.
INLINE void quantize_block(const float* x, Correction correction, uint8_t* block, int height, int row) {
    constexpr int VECTORS = BLOCK / W;
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
    F values[VECTORS];
    I most{};
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        values[i] = load(x + i * W);
        const I magnitude = (I)values[i] & 0x7fffffff;
        most = most > magnitude ? most : magnitude;
    }
    const int32_t bits = largest_bits(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    // Below this the inverse overflows; such a block is nothing.
    const float inverse = largest < 1e-35f ? 0.0f : 127.0f / largest, scale = largest < 1e-35f ? 0.0f : largest / 127.0f;
    F total{};
    int8_t* codes = (int8_t*)block + 8 * height + BLOCK * row;
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        // The limits also keep the compiler from fusing the product with the sum, which would round otherwise.
        const F limited = minimum(maximum(values[i] * inverse, splat(-127.0f)), splat(127.0f));
        const F shifted = limited + MAGIC;
        total += shifted - MAGIC;
        const Bytes bytes = __builtin_convertvector((I)shifted - 0x4b400000, Bytes);
        std::memcpy(codes + i * W, &bytes, W);
    }
    const float sum = windlass::WINDLASS_ISA::sum(total);
    ((float*)block)[row] = scale;
    if (correction.is_sum) ((float*)block)[height + row] = scale * sum;
    else ((int32_t*)block)[height + row] = -correction.times * int32_t(sum);
}

// Blocks first .. last of a row of `x`. `rows`: how many rows the tile has; the one below the last is cleared where it is empty, since
// what happens to be there may be numbers that processors are slow with.
inline void quantize_row(const float* x, int64_t first, int64_t last, Correction correction, uint8_t* tile, int height, int rows, int row) {
    for (int64_t index = first; index < last; index++) {
        uint8_t* block = tile + index * height * TILE_BYTES;
        quantize_block(x + index * BLOCK, correction, block, height, row);
        if (row == rows - 1 && rows < height) ((float*)block)[rows] = ((float*)block)[height + rows] = 0.0f;
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
