// A matrix per head: x [rows, heads, a] @ weight [heads, a, b]. At few rows it is bound by reading the weights, once.
#ifndef WINDLASS_ISA
#define WINDLASS_EACH "attention/heads.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(heads_matmul) { WINDLASS_PICK(heads_matmul)(op, worker); }

}  // namespace windlass

#else
#include "simd/product.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

constexpr int64_t DEPTH = 32;          // rows of a matrix that are read together: one after another as they lie in memory
constexpr int64_t ROWS_AT_A_TIME = 48;

// data: result [rows, heads, b], x, weight; ints: heads, a, b, row and head strides of x.
template <class T> void heads_matmul_of(const Op& op, Worker& worker) {
    const int64_t heads = op.ints[0], depth = op.ints[1], width = op.ints[2], rows = op.rows();
    const int64_t num_tiles = (rows + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;
    for (int64_t item = worker.take(); item < heads * num_tiles; item = worker.take()) {
        const int64_t head = item / num_tiles, row = item % num_tiles * ROWS_AT_A_TIME;
        const float* x = op.at<float>(1) + row * op.ints[3] + head * op.ints[4];
        float* result = op.at<float>(0) + (row * heads + head) * width;
        float ones[ROWS_AT_A_TIME];
        std::fill(ones, ones + ROWS_AT_A_TIME, 1.0f);
        for (int64_t start = 0; start < depth; start += DEPTH) {
            const int64_t here = head * depth + start, count = std::min(DEPTH, depth - start);
            const bool last = here + 2 * DEPTH > heads * depth;
            const T *piece = op.at<T>(2) + here * width, *next = piece + count * width;
            const Pieces<T> matrix{&piece, DEPTH, width, last ? nullptr : &next};
            product(std::min(ROWS_AT_A_TIME, rows - row), x + start, op.ints[3], matrix, count, width, start ? ones : nullptr, result,
                    heads * width);
        }
    }
}

// ints, further: type of the weight.
void heads_matmul(const Op& op, Worker& worker) {
    if (op.ints[5] == BF16_TYPE) heads_matmul_of<Bf16>(op, worker);
    else if (op.ints[5] == FP16_TYPE) heads_matmul_of<Fp16>(op, worker);
    else heads_matmul_of<float>(op, worker);
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
