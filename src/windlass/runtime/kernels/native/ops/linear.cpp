// x @ weight.T + bias + add, for weights in panels or in plain rows.
#ifndef WINDLASS_ISA
#include "panel/panel.h"
#include "panel/vectors.h"

namespace windlass {

// Up to so many rows every thread quantizes them for itself: less than the wait for one another would cost.
constexpr int64_t PRIVATE_ROWS = 2;
// Chunks of work per thread: small enough that a thread which is held up leaves little for the others to wait for.
constexpr int64_t CHUNKS = 8;

}  // namespace windlass

#define WINDLASS_EACH "ops/linear.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(linear) { WINDLASS_PICK(linear)(op, worker); }

}  // namespace windlass

#else
#include "panel/quantize.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

struct Result {
    float* out;
    const float *bias, *add;
    int64_t out_stride, add_stride;
};

// sums [rows][16] to rows from `row` on and up to 16 outputs from `output` on.
INLINE void finish(const Result& result, const float* sums, int64_t row, int rows, int64_t output, int outputs) {
    float* out = result.out + row * result.out_stride + output;
    const float* add = result.add ? result.add + row * result.add_stride + output : nullptr;
    const float* bias = result.bias ? result.bias + output : nullptr;
    for (int i = 0; i < rows; i++, sums += PANEL_ROWS, out += result.out_stride) {
        if (outputs == PANEL_ROWS) {
#pragma GCC unroll 4
            for (int j = 0; j < PANEL_ROWS; j += W) {
                F x = load(sums + j);
                if (bias) x += load(bias + j);
                if (add) x += load(add + j);
                store(out + j, x);
            }
        } else {
            for (int j = 0; j < outputs; j++) out[j] = sums[j] + (bias ? bias[j] : 0.0f) + (add ? add[j] : 0.0f);
        }
        if (add) add += result.add_stride;
    }
}

// Panels that a thread takes at a time.
inline int64_t chunk_panels(const Matrix& matrix, int64_t rows, int threads) {
    const int64_t even = (matrix.panels() + threads * CHUNKS - 1) / (threads * CHUNKS);
    const int64_t cached = std::max<int64_t>(CACHED_BYTES / matrix.panel_bytes, 1);
    return rows > TILE_ROWS ? std::min(even, cached) : even;
}

// Every row in the tile it belongs to; pieces of rows are shared among `count` threads.
inline void quantize_rows(const Matrix& matrix, const float* x, int64_t stride, int64_t rows, uint8_t* tiles, int index, int count) {
    constexpr int64_t PIECE = 32;  // blocks
    const int64_t blocks = matrix.inputs / BLOCK, pieces = (blocks + PIECE - 1) / PIECE;
    const Correction correction = correction_of(matrix.kind);
    for (int64_t piece = rows * pieces * index / count; piece < rows * pieces * (index + 1) / count; piece++) {
        const int64_t row = piece / pieces, first = piece % pieces * PIECE, tile = row / TILE_ROWS;
        const int count = int(std::min<int64_t>(rows - tile * TILE_ROWS, TILE_ROWS));
        quantize_row(x + row * stride, first, std::min(first + PIECE, blocks), correction,
                     tiles + tile * tile_bytes(matrix.inputs, TILE_ROWS), tile_height(count), count, int(row % TILE_ROWS));
    }
}

// data: out, x, weight, bias, add, tiles; ints: the matrix, strides of x, add and out.
void linear(const Op& op, Worker& worker) {
    const Matrix matrix = matrix_of(op.ints, op.data[2]);
    const int64_t rows = op.rows(), stride = op.ints[MATRIX_INTS];
    const float* x = op.at<float>(1);
    const Result result{op.at<float>(0), op.at<float>(3), op.at<float>(4), op.ints[MATRIX_INTS + 2], op.ints[MATRIX_INTS + 1]};
    uint8_t* tiles = op.at<uint8_t>(5);
    if (matrix.is_packed() && rows <= PRIVATE_ROWS) {
        tiles = static_cast<uint8_t*>(worker.scratch(tiles_bytes(matrix.inputs, rows)));
        quantize_rows(matrix, x, stride, rows, tiles, 0, 1);
    } else if (matrix.is_packed()) {
        quantize_rows(matrix, x, stride, rows, tiles, worker.index, worker.count);
        worker.barrier();
    }
    const MultiplyPacked multiply = packed_kernels().multiply;
    const MultiplyFloats floats = floats_kernel();
    const int64_t panels = matrix.panels(), chunk = chunk_panels(matrix, rows, worker.count);
    alignas(64) float sums[TILE_ROWS * PANEL_ROWS];
    for (int64_t first = worker.take() * chunk; first < panels; first = worker.take() * chunk) {
        const int64_t last = std::min(first + chunk, panels);
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int count = int(std::min<int64_t>(rows - row, TILE_ROWS));
            for (int64_t panel = first; panel < last; panel++) {
                const int outputs = int(std::min<int64_t>(PANEL_ROWS, matrix.outputs - panel * PANEL_ROWS));
                if (matrix.is_packed()) {
                    const uint8_t* tile = tiles + row / TILE_ROWS * tile_bytes(matrix.inputs, TILE_ROWS);
                    multiply(matrix, matrix.panel(panel), tile, tile_height(count), sums);
                } else {
                    floats(matrix, panel, x + row * stride, stride, count, rows_met(op, rows), sums);
                }
                finish(result, sums, row, count, panel * PANEL_ROWS, outputs);
            }
        }
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
