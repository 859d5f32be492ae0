// Rows of a table of numbers as activations, and rows of a second table, of positions, added to them.
#ifndef WINDLASS_ISA
#define WINDLASS_EACH "ops/embed.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(embed) { WINDLASS_PICK(embed)(op, worker); }

}  // namespace windlass

#else

namespace windlass {
namespace {
namespace WINDLASS_ISA {

int64_t index_of(const void* indices, bool wide, int64_t row) {
    return wide ? static_cast<const int64_t*>(indices)[row] : static_cast<const int32_t*>(indices)[row];
}

template <bool Add, class T> void embed_row(const T* from, int64_t width, float* result) {
    int64_t i = 0;
    for (; i + W <= width; i += W) store(result + i, Add ? load(result + i) + load(from + i) : load(from + i));
    for (; i < width; i++) result[i] = Add ? result[i] + number(from + i) : number(from + i);
}

template <bool Add> void embed_from(const void* table, int64_t type, int64_t index, int64_t width, float* result) {
    if (type == BF16_TYPE) embed_row<Add>(static_cast<const Bf16*>(table) + index * width, width, result);
    else if (type == FP16_TYPE) embed_row<Add>(static_cast<const Fp16*>(table) + index * width, width, result);
    else embed_row<Add>(static_cast<const float*>(table) + index * width, width, result);
}

// data: result, tokens, table, positions or null, their table; ints: width, type of the table, of the positions' table, whether
// tokens and positions are int64.
void embed(const Op& op, Worker& worker) {
    const int64_t width = op.ints[0];
    int64_t first, last;
    share_rows(worker, op.rows(), width, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float* result = op.at<float>(0) + row * width;
        embed_from<false>(op.data[2], op.ints[1], index_of(op.data[1], op.ints[3], row), width, result);
        if (op.data[3]) embed_from<true>(op.data[4], op.ints[2], index_of(op.data[3], op.ints[4], row), width, result);
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
