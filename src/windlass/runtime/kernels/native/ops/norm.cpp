// Norms of rows, and sums. One thread handles a row, so results do not depend on the batch or the number of threads.
#ifndef WINDLASS_ISA
#define WINDLASS_EACH "ops/norm.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(norm) { WINDLASS_PICK(norm)(op, worker); }
WINDLASS_OP(add) { WINDLASS_PICK(add)(op, worker); }

}  // namespace windlass

#else
#include "ops/norm_row.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

void layer_row(const float* x, const float* weight, const float* bias, float eps, int64_t width, float* result) {
    const float mean = row_sum(x, width, [](auto value) { return value; }) / width;
    const float squares = row_sum(x, width, [&](auto value) { return (value - mean) * (value - mean); });
    const float scale = 1.0f / std::sqrt(squares / width + eps);
    int64_t i = 0;
    if (bias) {
        for (; i + W <= width; i += W) store(result + i, (load(x + i) - mean) * scale * load(weight + i) + load(bias + i));
        for (; i < width; i++) result[i] = (x[i] - mean) * scale * weight[i] + bias[i];
        return;
    }
    for (; i + W <= width; i += W) store(result + i, (load(x + i) - mean) * scale * load(weight + i));
    for (; i < width; i++) result[i] = (x[i] - mean) * scale * weight[i];
}

// data: result, x, weight, bias or null; ints: width, x's row stride, whether the mean is taken off; floats: eps.
void norm(const Op& op, Worker& worker) {
    const int64_t width = op.ints[0], stride = op.ints[1];
    const float *weight = op.at<float>(2), *bias = op.at<float>(3), eps = op.floats[0];
    int64_t first, last;
    share_rows(worker, op.rows(), width, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const float* x = op.at<float>(1) + row * stride;
        float* result = op.at<float>(0) + row * width;
        if (op.ints[2]) layer_row(x, weight, bias, eps, width, result);
        else rms_row(x, weight, eps, width, result);
    }
}

// data: result, x, y; ints: width, row strides of x and y.
void add(const Op& op, Worker& worker) {
    const int64_t width = op.ints[0];
    int64_t first, last;
    share_rows(worker, op.rows(), width, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const float *x = op.at<float>(1) + row * op.ints[1], *y = op.at<float>(2) + row * op.ints[2];
        float* result = op.at<float>(0) + row * width;
        int64_t i = 0;
        for (; i + W <= width; i += W) store(result + i, load(x + i) + load(y + i));
        for (; i < width; i++) result[i] = x[i] + y[i];
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
