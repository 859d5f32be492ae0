// The function between the two matrices of a feed-forward, with its gate.
#ifndef WINDLASS_ISA
#define WINDLASS_EACH "ops/activate.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(activate) { WINDLASS_PICK(activate)(op, worker); }

}  // namespace windlass

#else
#include "ops/activate_lanes.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

constexpr int64_t PIECE = 256;  // elements that a thread takes at a time

template <int Which> INLINE F activated(F x) { return Which == 0 ? silu(x) : Which == 1 ? gelu(x) : Which == 2 ? gelu_tanh(x) : swish(x); }

// Both halves are kept within the clamp (the gate from above only); the fourth kind adds one to the second.
template <int Which> INLINE F gated(F gate, F up, F clamp) {
    up = maximum(-clamp, minimum(clamp, up));
    return activated<Which>(minimum(clamp, gate)) * (Which == 3 ? up + 1.0f : up);
}

// `up` null: not gated.
template <int Which> void activate_piece(const float* gate, const float* up, float clamp, int64_t count, float* result) {
    int64_t i = 0;
    if (!up) {
        for (; i + W <= count; i += W) store(result + i, activated<Which>(load(gate + i)));
        if (i < count) store_part(result + i, activated<Which>(load_part(gate + i, count - i)), count - i);
        return;
    }
    const F limit = splat(clamp);
    for (; i + W <= count; i += W) store(result + i, gated<Which>(load(gate + i), load(up + i), limit));
    if (i == count) return;
    store_part(result + i, gated<Which>(load_part(gate + i, count - i), load_part(up + i, count - i), limit), count - i);
}

// data: result [rows, width], x; ints: width of the result, x's row stride, activation (as runtime/kernels/cpu/activate.py numbers them),
// whether gated; floats: clamp (or infinity).
void activate(const Op& op, Worker& worker) {
    constexpr decltype(&activate_piece<0>) KINDS[] = {activate_piece<0>, activate_piece<1>, activate_piece<2>, activate_piece<3>};
    const auto kind = KINDS[op.ints[2]];
    const int64_t width = op.ints[0], pieces = (width + PIECE - 1) / PIECE;
    int64_t first, last;
    worker.share(op.rows() * pieces, 1, &first, &last);
    for (int64_t piece = first; piece < last; piece++) {
        const int64_t row = piece / pieces, start = piece % pieces * PIECE;
        const float* gate = op.at<float>(1) + row * op.ints[1] + start;
        float* result = op.at<float>(0) + row * width + start;
        kind(gate, op.ints[3] ? gate + width : nullptr, op.floats[0], std::min(PIECE, width - start), result);
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
