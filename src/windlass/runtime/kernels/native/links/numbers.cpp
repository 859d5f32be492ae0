// Numbers exchanged between ranks: sums, packing to int8 and back, and top-k.
#ifndef WINDLASS_ISA
#include "links/scales.h"
#include "panel/panel.h"

#define WINDLASS_EACH "links/numbers.cpp"
#include "simd/lanes.h"

namespace windlass {

void pack_numbers(const float* x, int64_t count, uint8_t* to) { WINDLASS_PICK(pack)(x, count, to); }
void unpack_numbers(const uint8_t* from, int64_t count, float* x) { WINDLASS_PICK(unpack<false>)(from, count, x); }
void add_packed(const uint8_t* from, int64_t count, float* x) { WINDLASS_PICK(unpack<true>)(from, count, x); }
void add_parts(void* to, const void* const* parts, int num_parts, int64_t count, int64_t type) {
    WINDLASS_PICK(add_parts)(to, parts, num_parts, count, type);
}
void pick_largest(const float* x, int64_t count, int64_t wanted, int32_t first_id, Candidate* found) {
    WINDLASS_PICK(pick_largest)(x, count, wanted, first_id, found);
}

}  // namespace windlass

#else
#include "panel/quantize.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

void pack_block(const float* x, uint8_t* to) {
    constexpr float MAGIC = 12582912.0f;  // see panel/quantize.h
    constexpr int32_t MAGIC_BITS = 0x4b400000;
    constexpr int VECTORS = QUANTUM / W;
    F values[VECTORS];
    I most{}, integers[VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) {
        values[i] = load(x + i * W);
        const I magnitude = (I)values[i] & 0x7fffffff;
        most = most > magnitude ? most : magnitude;
    }
    const int code = scale_code(joined(most, [](Four a, Four b) { return a > b ? a : b; }));
    const float inverse = SCALES.inverse[code];
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) integers[i] = (I)(values[i] * inverse + MAGIC) - MAGIC_BITS;
    to[0] = uint8_t(code);
    store_bytes(integers, (int8_t*)to + 1);
    store_bytes(integers + VECTORS / 2, (int8_t*)to + 1 + BLOCK);
}

void pack(const float* x, int64_t count, uint8_t* to) {
    for (; count >= QUANTUM; count -= QUANTUM, x += QUANTUM, to += QUANTUM + 1) pack_block(x, to);
    if (!count) return;
    float padded[QUANTUM] = {};
    uint8_t block[QUANTUM + 1];
    std::memcpy(padded, x, count * sizeof(float));
    pack_block(padded, block);
    std::memcpy(to, block, count + 1);
}

template <bool Add> void unpack(const uint8_t* from, int64_t count, float* x) {
    for (; count > 0; count -= QUANTUM, x += QUANTUM, from += QUANTUM + 1) {
        const float scale = SCALES.scale[from[0]];
        const int8_t* codes = (const int8_t*)from + 1;
        if (count >= QUANTUM)
            for (int i = 0; i < QUANTUM; i++) x[i] = Add ? x[i] + float(codes[i]) * scale : float(codes[i]) * scale;
        else
            for (int i = 0; i < count; i++) x[i] = Add ? x[i] + float(codes[i]) * scale : float(codes[i]) * scale;
    }
}

void add_floats(float* to, const float* const* parts, int num_parts, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        F sum = load(parts[0] + i);
        for (int part = 1; part < num_parts; part++) sum += load(parts[part] + i);
        store(to + i, sum);
    }
    for (; i < count; i++) {
        float sum = parts[0][i];
        for (int part = 1; part < num_parts; part++) sum += parts[part][i];
        to[i] = sum;
    }
}

void add_parts(void* to, const void* const* parts, int num_parts, int64_t count, int64_t type) {
    if (type == FLOAT32) return add_floats((float*)to, (const float* const*)parts, num_parts, count);
    for (int64_t i = 0; i < count; i++) {
        if (type == FLOAT64) {
            double sum = ((const double*)parts[0])[i];
            for (int part = 1; part < num_parts; part++) sum += ((const double*)parts[part])[i];
            ((double*)to)[i] = sum;
            continue;
        }
        float sum = number((const Bf16*)parts[0] + i);  // rounded once, when all is added
        for (int part = 1; part < num_parts; part++) sum += number((const Bf16*)parts[part] + i);
        store_part((Bf16*)to + i, splat(sum), 1);
    }
}

// Whether any of W * 4 numbers at x is a candidate: not below `least`, or NaN.
INLINE bool may_hold(const float* x, float least) {
    I seen{};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) seen |= (I)!(load(x + i * W) < least);
    return joined(seen, [](Four a, Four b) { return a | b; }) != 0;
}

void pick_largest(const float* x, int64_t count, int64_t wanted, int32_t first_id, Candidate* found) {
    if (wanted <= 0) return;
    int64_t held = 0;  // size of the heap, whose top is the least candidate
    const auto meet = [&](int64_t at) {
        const Candidate one{x[at], int32_t(first_id + at)};
        if (held < wanted) {
            found[held++] = one;
            if (held == wanted) std::make_heap(found, found + held, precedes);
        } else if (precedes(one, found[0])) {
            std::pop_heap(found, found + held, precedes);
            found[held - 1] = one;
            std::push_heap(found, found + held, precedes);
        }
    };
    int64_t at = 0;
    for (; at < count && held < wanted; at++) meet(at);
    for (; at + 4 * W <= count; at += 4 * W) {
        if (!may_hold(x + at, found[0].value)) continue;
        for (int i = 0; i < 4 * W; i++) meet(at + i);
    }
    for (; at < count; at++) meet(at);
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
