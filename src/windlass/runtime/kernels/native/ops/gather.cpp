// Rows picked from a matrix of activations.
#include <cstring>

#include "program/program.h"

namespace windlass {

// data: result, x, rows (int32); ints: width, x's row stride.
WINDLASS_OP(gather) {
    const int64_t width = op.ints[0];
    int64_t first, last;
    worker.share(op.rows(), 1, &first, &last);
    for (int64_t row = first; row < last; row++)
        std::memcpy(op.at<float>(0) + row * width, op.at<float>(1) + op.at<int32_t>(2)[row] * op.ints[1], width * sizeof(float));
}

}  // namespace windlass
