// Queries, keys and values between their projection and attention: norms, rotary embedding, and the write to the cache.
#ifndef WINDLASS_ISA
#define WINDLASS_EACH "attention/qkv.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(split_qkv) { WINDLASS_PICK(split_qkv)(op, worker); }
WINDLASS_OP(join_latent) { WINDLASS_PICK(join_latent)(op, worker); }

}  // namespace windlass

#else
#include "ops/norm_row.h"
#include "attention/rotate.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

// A key lies across its block: element d of all 16 tokens side by side, then element d + 1.
INLINE void store_across(float* to, const float* from, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) to[d * BLOCK_TOKENS] = from[d];
}
INLINE void store_across(Bf16* to, const float* from, int64_t dim) {
    int64_t d = 0;
    for (; d + W <= dim; d += W) {
        I bits = bf16_bits(load(from + d));
        for (int lane = 0; lane < W; lane++) to[(d + lane) * BLOCK_TOKENS].bits = uint16_t(bits[lane]);
    }
    for (; d < dim; d++) to[d * BLOCK_TOKENS].bits = uint16_t(bf16_bits(splat(from[d]))[0]);
}

template <class T> INLINE void store_along(T* to, const float* from, int64_t dim) {
    int64_t d = 0;
    for (; d + W <= dim; d += W) store(to + d, load(from + d));
    if (d < dim) store_part(to + d, load_part(from + d, dim - d), dim - d);
}

// Keys and values in e4m3 (runtime/kernels/fp8_cache.py): the exponent of the power of two by which a vector fits, and its codes.
INLINE uint8_t power_for(const float* x, int64_t dim) {
    uint32_t most = 0;  // magnitudes are in the order of their bits
    for (int64_t d = 0; d < dim; d++) {
        uint32_t bits;
        std::memcpy(&bits, x + d, 4);
        most = std::max(most, bits & 0x7fffffff);
    }
    return uint8_t(std::min(std::max(int32_t((most + 0x1fffff) >> 23) - 8, 87), 167));
}
INLINE uint8_t code_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, magnitude = std::min(bits & 0x7fffffff, 0x43e00000u);  // at most 448
    if ((bits & 0x7fffffff) > 0x7f800000) return uint8_t(sign | 0x7f);  // not a number
    float positive;
    std::memcpy(&positive, &magnitude, 4);
    if (positive < 0.015625f) return uint8_t(sign | uint32_t(std::nearbyint(positive * 512.0f)));
    return uint8_t(sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3)));
}
INLINE void store_codes(E4m3* to, int64_t stride, uint8_t* power, const float* x, int64_t dim) {
    *power = power_for(x, dim);
    const uint32_t bits = uint32_t(254 - *power) << 23;
    float inverse;
    std::memcpy(&inverse, &bits, 4);
    for (int64_t d = 0; d < dim; d++) to[d * stride].bits = code_of(x[d] * inverse);
}

// data: qkv [rows, (heads + 2 kv heads) * dim], changed in place; norm weights of q and k or null; table or null; positions; keys,
// values or null; slots; scales of e4m3 or null. ints: heads, kv heads, dim, qkv's row stride, half the rotary dimensions, whether pairs are neighbours.
// floats: eps.
template <class T> void split_qkv_into(const Op& op, Worker& worker) {
    const int64_t heads = op.ints[0], kv_heads = op.ints[1], dim = op.ints[2], half = op.ints[4], all = heads + 2 * kv_heads;
    const float* table = op.at<float>(3);
    int64_t first, last;
    share_rows(worker, op.rows() * all, dim, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t row = unit / all, head = unit % all, kv = (head - heads) % kv_heads;
        const bool is_query = head < heads, is_value = head >= heads + kv_heads;
        float* x = op.at<float>(0) + row * op.ints[3] + head * dim;
        const float* norm = op.at<float>(is_query ? 1 : 2);
        if (!is_value && norm) rms_row(x, norm, op.floats[0], dim, x);
        if (!is_value && table) rotate(x, table + op.at<int32_t>(4)[row] * 2 * half, half, op.ints[5], x);
        if (is_query || !op.data[5]) continue;
        const int64_t slot = op.at<int32_t>(7)[row], block = (slot / BLOCK_TOKENS * kv_heads + kv) * BLOCK_TOKENS * dim;
        const int64_t offset = slot % BLOCK_TOKENS;
        if constexpr (std::is_same<T, E4m3>::value) {
            uint8_t* power = op.at<uint8_t>(8) + (slot / BLOCK_TOKENS * kv_heads + kv) * 2 * BLOCK_TOKENS + offset;
            if (is_value) store_codes(op.at<T>(6) + block + offset * dim, 1, power + BLOCK_TOKENS, x, dim);
            else store_codes(op.at<T>(5) + block + offset, BLOCK_TOKENS, power, x, dim);
        } else {
            if (is_value) store_along(op.at<T>(6) + block + offset * dim, x, dim);
            else store_across(op.at<T>(5) + block + offset, x, dim);
        }
    }
}

// ints, further: type of the cache.
void split_qkv(const Op& op, Worker& worker) {
    if (op.ints[6] == BF16_TYPE) split_qkv_into<Bf16>(op, worker);
    else if (op.ints[6] == E4M3_TYPE) split_qkv_into<E4m3>(op, worker);
    else split_qkv_into<float>(op, worker);
}

// data: queries [rows, heads, latent + rope], keys [rows, latent + rope], absorbed [rows, heads, latent], q, kv, norm weight, table,
// positions, cache or null, slots, scales of e4m3 or null. ints: heads, latent, half of rope, row and head strides of q, row stride of kv, whether pairs are
// neighbours, type of the cache, row stride of absorbed, where in a head of q its rope begins. floats: eps.
void join_latent(const Op& op, Worker& worker) {
    const int64_t heads = op.ints[0], latent = op.ints[1], half = op.ints[2], width = latent + 2 * half, all = heads + 1;
    int64_t first, last;
    share_rows(worker, op.rows() * all, width, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t row = unit / all, head = unit % all;
        const float* angles = op.at<float>(6) + op.at<int32_t>(7)[row] * 2 * half;
        if (head < heads) {
            float* query = op.at<float>(0) + (row * heads + head) * width;
            std::memcpy(query, op.at<float>(2) + row * op.ints[8] + head * latent, latent * sizeof(float));
            rotate(op.at<float>(3) + row * op.ints[3] + head * op.ints[4] + op.ints[9], angles, half, op.ints[6], query + latent);
            continue;
        }
        const float* kv = op.at<float>(4) + row * op.ints[5];
        float* key = op.at<float>(1) + row * width;
        rms_row(kv, op.at<float>(5), op.floats[0], latent, key);
        rotate(kv + latent, angles, half, op.ints[6], key + latent);
        if (!op.data[8]) continue;
        const int64_t slot = op.at<int32_t>(9)[row];
        if (op.ints[7] == BF16_TYPE) store_along(op.at<Bf16>(8) + slot * width, key, width);
        else if (op.ints[7] == E4M3_TYPE) store_codes(op.at<E4m3>(8) + slot * width, 1, op.at<uint8_t>(10) + slot, key, width);
        else store_along(op.at<float>(8) + slot * width, key, width);
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
