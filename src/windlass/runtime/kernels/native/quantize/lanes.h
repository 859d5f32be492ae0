// The arithmetic of quantization, W groups side by side, one in each lane of a vector.
//
// quantize.cpp includes this file once per instruction set, with WINDLASS_ISA (a namespace) and WINDLASS_LANES (W) defined.
// A lane never meets its neighbours, so the width of a vector cannot change a result: each group is summed in the order of its
// elements, in fp32, with no fused multiply-add (-ffp-contract=off) and every rounding to nearest, ties to even. That is what
// quantize_reference.py does too, and why all paths give identical bytes. Vectors are GCC's and clang's generic ones.

namespace WINDLASS_ISA {

constexpr int W = WINDLASS_LANES;
typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));

INLINE F splat(float value) { return value - F{}; }
INLINE F minimum(F a, F b) { return a < b ? a : b; }
INLINE F maximum(F a, F b) { return a > b ? a : b; }

// Adding 1.5 * 2^23 leaves no bits for a fraction: to nearest even, for |x| < 2^22.
constexpr float MAGIC = 12582912.0f;
INLINE F round_even(F x) { return (x + MAGIC) - MAGIC; }

// x rounded, kept within low .. high, and shifted by MAGIC (as those must be). Bits of floats of one sign are ordered as integers
// are, and compilers know the integer minimum; of floats with a constant they make a comparison and a blend.
INLINE I shifted_code(F x, I low, I high) {
    I bits = (I)(x + MAGIC);
    bits = bits > low ? bits : low;
    return bits < high ? bits : high;
}
INLINE I shifted(F integer) { return (I)(integer + MAGIC); }
INLINE F unshifted(I bits) { return (F)bits - MAGIC; }

INLINE I magnitude_bits(F x) { return (I)x & 0x7fffffff; }

// A scale as it will be stored: bf16 to nearest even, never below the smallest normal number, so that 1 / scale is finite.
INLINE F bf16_scale(F scale) {
    I sign = (I)scale & (int32_t)0x80000000;
    I bits = (I)scale & 0x7fffffff;
    bits = bits > SMALLEST_SCALE_BITS ? bits : SMALLEST_SCALE_BITS - I{};
    bits += 0x7fff + ((bits >> 16) & 1);
    return (F)((bits & (int32_t)0xffff0000) | sign);
}

// --- reading ----------------------------------------------------------------------------------------------------------

struct Bf16 {
    static constexpr int BYTES = 2, PER_WORD = 2;
    static INLINE void expand(I word, F *out) {
        out[0] = (F)(word << 16);
        out[1] = (F)(word & (int32_t)0xffff0000);
    }
};

struct Fp16 {
    static constexpr int BYTES = 2, PER_WORD = 2;
    // Subnormal halves are made by a subtraction (2^-14 * 1.m - 2^-14), which never touches a subnormal float: those are slow.
    static INLINE F expand_one(I half) {
        I shifted = (half & 0x7fff) << 13;
        I exponent = shifted & 0x0f800000;
        I normal = shifted + (112 << 23);
        I special = exponent == 0x0f800000 ? normal + (112 << 23) : normal;
        F subnormal = (F)(normal + (1 << 23)) - splat(6.103515625e-05f);
        I bits = exponent == 0 ? (I)subnormal : special;
        return (F)(bits | ((half & 0x8000) << 16));
    }
    static INLINE void expand(I word, F *out) {
        out[0] = expand_one(word & 0xffff);
        out[1] = expand_one((word >> 16) & 0xffff);
    }
};

struct Fp32 {
    static constexpr int BYTES = 4, PER_WORD = 1;
    static INLINE void expand(I word, F *out) { out[0] = (F)word; }
};

#if WINDLASS_LANES == 16
#define WINDLASS_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define WINDLASS_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif WINDLASS_LANES == 8
#define WINDLASS_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define WINDLASS_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define WINDLASS_LOW 0, 4, 1, 5
#define WINDLASS_HIGH 2, 6, 3, 7
#endif

// Row i, column j of W words by W lanes to row j, column i: perfect shuffles, log2(W) times.
INLINE void transpose(I *rows) {
#pragma GCC unroll 4
    for (int stage = 1; stage < W; stage *= 2) {
        I next[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; ++i) {
            next[2 * i] = SHUFFLE(rows[i], rows[i + W / 2], WINDLASS_LOW);
            next[2 * i + 1] = SHUFFLE(rows[i], rows[i + W / 2], WINDLASS_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) rows[i] = next[i];
    }
}
#undef WINDLASS_LOW
#undef WINDLASS_HIGH

// W consecutive groups of `length` elements; those beyond `lanes` do not exist and read as zeros.
struct Source {
    const char *first;
    int64_t length;
    int lanes;
};

constexpr int CHUNK = 32;

// Elements start .. start + CHUNK of every lane, zeros beyond the end of a group. A function of its own, called through a
// pointer, so that what follows is compiled once and not once per type of input.
typedef void (*Load)(const Source &source, int64_t start, F *x);

template <class In> void load_chunk(const Source &source, int64_t start, F *x) {
    constexpr int TILE = W * In::PER_WORD;
    int64_t group_bytes = source.length * In::BYTES, offset = start * In::BYTES;
    for (int tile = 0; tile < CHUNK / TILE; ++tile, offset += 4 * W) {
        I words[W];
        if (group_bytes - offset >= 4 * W && source.lanes == W) {
#pragma GCC unroll 16
            for (int lane = 0; lane < W; ++lane) std::memcpy(&words[lane], source.first + lane * group_bytes + offset, 4 * W);
        } else {
            int64_t left = group_bytes - offset, bytes = left < 0 ? 0 : left < 4 * W ? left : 4 * W;
            for (int lane = 0; lane < W; ++lane) {
                words[lane] = I{};
                if (lane < source.lanes) std::memcpy(&words[lane], source.first + lane * group_bytes + offset, bytes);
            }
        }
        transpose(words);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) In::expand(words[i], x + tile * TILE + i * In::PER_WORD);
    }
}

// --- what comes of a group --------------------------------------------------------------------------------------------

// Sums are in units of the scale, so that nothing over- or underflows; they become squares of weights here, in double.
INLINE void add_group(Statistics &total, int64_t group, double error, double weight, double scale) {
    total.squared_error += error * (scale * scale);
    total.squared_weight += weight * (scale * scale);
    double relative = weight > 0 ? error / weight : 0;
    if (relative > total.worst_error) {
        total.worst_error = relative;
        total.worst_group = group;
    }
}

// A mask that keeps usable groups and makes the others zero; counts what is wrong with them.
INLINE I usable(const Source &source, Load load, I largest, Statistics &total) {
    I keep = largest <= LARGEST_WEIGHT_BITS;
    bool all = true;
    for (int lane = 0; lane < W; ++lane) all = all && keep[lane];
    for (int64_t start = 0; !all && start < source.length; start += CHUNK) {
        F x[CHUNK];
        load(source, start, x);
        for (int i = 0; i < CHUNK; ++i)
            for (int lane = 0; lane < W; ++lane) total.num_unusable += magnitude_bits(x[i])[lane] > LARGEST_WEIGHT_BITS;
    }
    return keep;
}

}  // namespace WINDLASS_ISA

#include "quantize/bytes.h"
#include "quantize/int4.h"

namespace WINDLASS_ISA {

void quantize(const Job &job, Kind kind, Input input, const Search *how, int8_t *zeros) {
    Load load = input == BF16 ? load_chunk<Bf16> : input == FP16 ? load_chunk<Fp16> : load_chunk<Fp32>;
    if (kind == INT8) return byte_groups<Int8>(job, load);
    if (kind == FP8) return byte_groups<Fp8>(job, load);
    if (zeros) return int4_groups<true>(job, load, *how, zeros);
    return int4_groups<false>(job, load, *how, nullptr);
}

}  // namespace WINDLASS_ISA
