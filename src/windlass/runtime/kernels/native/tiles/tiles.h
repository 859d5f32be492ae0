// 4-bit weights as the GPU's kernels have them (runtime/kernels/cuda/layout.py), multiplied on the CPU: what lies in host memory can be computed where it
// is, or copied to the device as it is.
//
// A tile is 16 rows, in blocks of 128 inputs: 1,024 bytes of codes, then bf16 scales [128 / group][8][2], row g beside row g + 8. Codes are two
// halves of 64 inputs; 64 bytes belong to rows g (low nibbles) and g + 8 (high nibbles). Byte t * 16 + s * 4 + e * 2 + p of them is input
// s * 16 + p * 8 + t * 2 + e of the half. Activations are laid out alike, as fixed-point numbers of 15 bits in two bytes each.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tiles {

constexpr int BLOCK = 128, HALF = 64, ROWS = 16, LANES = 16, CODE_BYTES = 1024;

// Of 128 inputs: x = step * (128 * high + low). `start`: -8 times the sums of four bytes each, as codes are 8 too high.
struct alignas(64) Activations {
    int8_t high[BLOCK], low[BLOCK];
    int32_t start[2][LANES];
    float step;
    float unused[15];
};

// Up to 8 rows of activations. For matrix instructions (AMX): of each half, four inputs of every column; a row has two columns, high and low.
// For others: numbers of 16 bits, a row after the other.
constexpr int PACKED_ROWS = 8, COLUMNS = 16;
struct alignas(64) Packed {
    union {
        int32_t inputs[2][LANES][COLUMNS];
        int16_t wide[PACKED_ROWS][BLOCK];
    };
    int32_t start[COLUMNS];
    float steps[COLUMNS];
    int32_t count, unused[15];
};

inline size_t block_bytes(int group) { return CODE_BYTES + size_t(BLOCK / group) * ROWS * 2; }

void round_block(const float* x, float factor, Activations& out);

// Adds to sums[ROWS][LANES]: their sum over lanes is the product of a row. `next`: what this thread reads after it, or null; fetched ahead.
using Product = void (*)(const uint8_t* tile, int blocks, const Activations* x, float* sums, const uint8_t* next);
Product product_for(int group);

// Several tiles with several groups of packed rows at once: weights are unpacked once for all rows, and rows are loaded once for several tiles. `x`: of each group, its blocks. out[tiles][groups][ROWS][COLUMNS], two columns of which are to be added.
constexpr int MOST_TILES = 4;
struct PackedWork {
    const uint8_t* weights;  // of the first tile
    size_t stride;           // from one tile to the next
    int tiles, blocks;
    const Packed* const* x;
    int groups;
    const uint8_t* next;  // as above, of the first of as many tiles
};
struct PackedKernels {
    void (*product)(const PackedWork& work, float* out);  // null: there are none for such weights or such a CPU
    void (*pack)(const Activations* const* rows, int count, Packed& out);
    float least;  // rows of an expert, on average, from which this is faster than row by row
};
PackedKernels packed_kernels_for(int group, bool plain);

void add_lanes(const float* sums, float* out);  // [ROWS][LANES] -> [ROWS]

}  // namespace tiles
