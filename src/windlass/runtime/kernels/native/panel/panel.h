// Weights in panels of 16 output rows, activations in tiles of up to 12 rows, and the products of the two.
//
// One layout serves every instruction set. A panel is a row of groups, one after another, so that a product with a vector reads one
// contiguous stream (two streams, codes here and scales there, reach less than half the bandwidth on Zen 4):
//
//   int4   group/32 times 256 bytes: 4 chunks of 64, chunk c byte 4 r + j = code(row r, input 8 c + j) | code(row r, 8 c + 4 + j) << 4
//   int8   group/32 times 512 bytes: 8 chunks of 64, chunk c byte 4 r + j = code(row r, input 4 c + j)
//   then   16 scales (bf16, fp16 or fp32), and 16 zero points (bytes) or 16 minima (typed as the scales are) where the kind has them
//
// Codes are stored unsigned. value = (code - 8) * scale, (code - 128) * scale, (code - zero) * scale or code * scale + minimum.
// ggml's other block types have panels of their own (ggml/forms.h).
// fp8 has no panels: a row is its codes followed by its fp32 scales, one per group.
//
// A tile holds rows of activations as int8, with a scale per 32 inputs. Per block of 32, for `height` rows: fp32 scales, corrections
// (see `Correction`), then 32 codes of each row: what the inner loop broadcasts lies within reach of one pointer.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ggml/forms.h"
#include "program/program.h"

namespace windlass {

constexpr int PANEL_ROWS = 16;
constexpr int BLOCK = 32;
constexpr int TILE_ROWS = 12;
constexpr int TILE_BYTES = BLOCK + 8;  // of one row and block
// Weights that stay in a core's own cache while tiles of activations pass.
constexpr int64_t CACHED_BYTES = 256 << 10;
// From this many rows on, products are compute-bound, and hardware prefetchers no longer run ahead by themselves.
constexpr int PREFETCHED_ROWS = 3;
constexpr int64_t PREFETCH_BYTES = 2048;

// As runtime/kernels/packing/panels.py numbers them.
enum class Kind : int64_t {
    INT4, INT4_ZEROS, INT4_MINIMA, INT8, FP8, FLOAT32, BFLOAT16, FLOAT16,
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q5_0, Q5_1, IQ4_NL, IQ4_XS, MXFP4, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S
};
constexpr bool is_ggml(Kind kind) { return kind >= Kind::Q2_K; }
constexpr Form form_of(Kind kind) { return FORMS[int64_t(kind) - int64_t(Kind::Q2_K)]; }
// Scales of 16 inputs, not of 32.
constexpr bool is_by_16(Kind kind) {
    return kind == Kind::Q2_K || kind == Kind::Q3_K || kind == Kind::Q6_K || kind == Kind::IQ2_XS || kind == Kind::IQ2_S;
}
constexpr bool has_minima(Kind kind) { return kind == Kind::Q4_K || kind == Kind::Q5_K || kind == Kind::Q5_1; }
constexpr bool is_signed(Kind kind) { return kind >= Kind::IQ4_NL; }
// The code that stands for zero; what is signed is stored plus 128 where codes have to be unsigned.
constexpr int zero_of(Kind kind) {
    return kind == Kind::Q3_K ? 4 : kind == Kind::Q6_K ? 32 : kind == Kind::Q5_0 ? 16 : is_signed(kind) ? 128 : 0;
}
enum class ScaleType : int64_t { BFLOAT16, FLOAT16, FLOAT32 };

struct Matrix {
    Kind kind;
    ScaleType scales;
    int64_t outputs, inputs, group;
    const uint8_t* data;
    int64_t groups;       // of a row
    int64_t blocks;       // of 32 inputs in a group
    int64_t codes_bytes;  // of a group's codes in a panel
    int64_t scale_bytes;  // of its 16 scales, which follow them
    int64_t group_bytes;
    int64_t row_bytes;    // where there are no panels
    int64_t panel_bytes;  // from one set of 16 rows to the next, packed or not
    int64_t total_bytes;

    Matrix(Kind kind, ScaleType scales, int64_t outputs, int64_t inputs, int64_t group, const void* data)
        : kind(kind), scales(scales), outputs(outputs), inputs(inputs), group(group), data(static_cast<const uint8_t*>(data)) {
        groups = group ? inputs / group : 0;
        blocks = group / BLOCK;
        codes_bytes = blocks * (kind == Kind::INT8 ? 512 : 256);
        scale_bytes = PANEL_ROWS * (scales == ScaleType::FLOAT32 ? 4 : 2);
        group_bytes = codes_bytes + scale_bytes + (kind == Kind::INT4_ZEROS ? PANEL_ROWS : kind == Kind::INT4_MINIMA ? scale_bytes : 0);
        row_bytes = inputs * (kind == Kind::FLOAT32 ? 4 : kind == Kind::FP8 ? 1 : 2) + (kind == Kind::FP8 ? 4 * groups : 0);
        panel_bytes = is_packed() ? groups * group_bytes : PANEL_ROWS * row_bytes;
        if (is_ggml(kind)) set_form(form_of(kind));
        total_bytes = is_packed() ? panels() * panel_bytes : outputs * row_bytes;
    }

    void set_form(Form form) {
        groups = inputs / (BLOCK * form.blocks);
        blocks = form.blocks;
        codes_bytes = PANEL_ROWS * 4 * form.words;
        group_bytes = PANEL_ROWS * form.bytes();
        panel_bytes = groups * group_bytes;
    }

    bool is_packed() const { return kind <= Kind::INT8 || is_ggml(kind); }
    bool has_offsets() const { return kind == Kind::INT4_ZEROS || kind == Kind::INT4_MINIMA; }
    int64_t panels() const { return (outputs + PANEL_ROWS - 1) / PANEL_ROWS; }
    const uint8_t* panel(int64_t index) const { return data + index * panel_bytes; }
    // The same matrix somewhere else.
    Matrix at(const void* place) const {
        Matrix one = *this;
        one.data = static_cast<const uint8_t*>(place);
        return one;
    }
    Matrix expert(int64_t index) const { return at(data + index * total_bytes); }
};

// Kind, type of scales, outputs, inputs, group.
constexpr int MATRIX_INTS = 5;
inline Matrix matrix_of(const int64_t* ints, const void* data) {
    return Matrix(Kind(ints[0]), ScaleType(ints[1]), ints[2], ints[3], ints[4], data);
}

// What makes up for codes that are stored unsigned: an integer to start from, the sum that offsets multiply, or sums of 16 inputs.
struct Correction {
    int32_t times;  // start from -times * (sum of the row's codes in the block)
    bool is_sum;    // the float scale * (sum of codes)
    bool is_pair;   // two 16-bit integers: the sum of the first 16 codes, and of the others
};
inline Correction correction_of(Kind kind) {
    if (is_ggml(kind)) return {zero_of(kind), has_minima(kind), is_by_16(kind)};
    return {kind == Kind::INT4 ? 8 : kind == Kind::INT8 ? 128 : 0, kind == Kind::INT4_ZEROS || kind == Kind::INT4_MINIMA, false};
}

// Heights that products are compiled for; the last rows of a tile may be empty.
inline int tile_height(int64_t rows) {
    const int height = rows < TILE_ROWS ? int(rows) : TILE_ROWS;
    return height <= 4 ? height : (height + 1) / 2 * 2;
}
inline int64_t tile_bytes(int64_t inputs, int height) { return inputs / BLOCK * height * TILE_BYTES; }
// Tiles one after another: all but the last are full.
inline int64_t tiles_bytes(int64_t inputs, int64_t rows) {
    const int64_t full = rows / TILE_ROWS, rest = rows % TILE_ROWS;
    return full * tile_bytes(inputs, TILE_ROWS) + (rest ? tile_bytes(inputs, tile_height(rest)) : 0);
}

// sums[row][output], [height][16]: one panel times one tile. Integers are exact, and floats are added in the order of the inputs
// with one fused multiply-add per block, so a result depends on neither the height, nor the threads, nor the instruction set
// (the plain one excepted, which rounds the product).
using MultiplyPacked = void (*)(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums);

struct PackedKernels {
    const char* name;
    MultiplyPacked multiply;
};
const PackedKernels& packed_kernels();

// The same of up to 12 rows of floats and the 16 outputs of a matrix of floats (ops/linear_dense.cpp). `total_rows`: how many will meet these
// weights in all (see `rows_met`). A result depends on whether those are one or more, and on the instruction set.
using MultiplyFloats = void (*)(const Matrix& matrix, int64_t panel, const float* x, int64_t stride, int rows, int64_t total_rows, float* sums);
MultiplyFloats floats_kernel();

// One row alone is multiplied as one of several are, where it must be.
inline int64_t rows_met(const Op& op, int64_t rows) { return op.is_invariant ? std::max<int64_t>(rows, 2) : rows; }

}  // namespace windlass
