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

// --- int4: a search over scales ---------------------------------------------------------------------------------------

// How a group is coded: value = scale * clamp(round(x / scale), low, low + 15); low = -8 without a zero point. `low` is shifted.
struct Grid {
    F scale, inverse;
    I low;
};

INLINE Grid make_grid(F scale, I low) { return {scale, 1.0f / scale, low}; }

struct Range {
    F lowest, highest;  // lowest <= 0 <= highest: zero must stay representable
};

template <bool ZERO_POINT> INLINE Grid candidate(const Range &range, float factor) {
    if (ZERO_POINT) {
        F scale = bf16_scale(range.highest * factor - range.lowest * factor);
        F inverse = 1.0f / scale;
        F middle = (range.highest * inverse + range.lowest * inverse) * 0.5f;
        F zero = round_even(splat(-0.5f) - middle);
        zero = minimum(maximum(zero, splat(-8.0f)), splat(7.0f));
        return {scale, inverse, shifted(splat(-8.0f) - zero)};
    }
    // The end with the larger magnitude goes to code -8, the one that has no positive twin: the scale takes the other sign.
    F extreme = range.highest >= -range.lowest ? range.highest : range.lowest;
    return make_grid(bf16_scale(extreme * -factor), shifted(splat(-8.0f)));
}

template <bool ZERO_POINT> INLINE I shifted_int4(F t, I low) {
    I floor = ZERO_POINT ? low : shifted(splat(-8.0f));
    return shifted_code(t, floor, floor + 15);
}

// Squared errors of N grids, each in units of its own scale.
template <bool ZERO_POINT, int N> INLINE void squared_errors(const F *x, int length, const Grid *grids, F *errors) {
    F sums[N] = {};
    for (int i = 0; i < length; ++i) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            F t = x[i] * grids[n].inverse;
            F rest = t - unshifted(shifted_int4<ZERO_POINT>(t, grids[n].low));
            sums[n] = sums[n] + rest * rest;
        }
    }
    for (int n = 0; n < N; ++n) errors[n] = sums[n];
}

struct Best {
    Grid grid;
    F error, unit;  // error is in units of the first candidate's scale, of which `unit` is the inverse
};

INLINE void offer(Best &best, const Grid &grid, F error) {
    F ratio = grid.scale * best.unit;
    F common = error * (ratio * ratio);
    I better = common < best.error;
    best.error = better ? common : best.error;
    best.grid.scale = better ? grid.scale : best.grid.scale;
    best.grid.inverse = better ? grid.inverse : best.grid.inverse;
    best.grid.low = better ? grid.low : best.grid.low;
}

// The scale that is best for the codes at hand: least squares.
template <bool ZERO_POINT> INLINE void refit(const F *x, int length, Best &best) {
    F products = {}, squares = {};
    for (int i = 0; i < length; ++i) {
        F t = x[i] * best.grid.inverse;
        F code = unshifted(shifted_int4<ZERO_POINT>(t, best.grid.low));
        products = products + t * code;
        squares = squares + code * code;
    }
    Grid grid = make_grid(bf16_scale(best.grid.scale * (products / maximum(squares, splat(1.0f)))), best.grid.low);
    F error;
    squared_errors<ZERO_POINT, 1>(x, length, &grid, &error);
    offer(best, grid, error);
}

template <bool ZERO_POINT> INLINE Grid search(const F *x, int length, const Range &range, const Search &how) {
    Best best = {candidate<ZERO_POINT>(range, how.factors[0]), splat(INFINITY), F{}};
    best.unit = best.grid.inverse;
    if (how.num_factors == 1) return best.grid;
    for (int first = 0; first < how.num_factors; first += 4) {
        Grid grids[4];
        F errors[4];
        for (int n = 0; n < 4; ++n) grids[n] = candidate<ZERO_POINT>(range, how.factors[first + n]);
        squared_errors<ZERO_POINT, 4>(x, length, grids, errors);
        for (int n = 0; n < 4; ++n) offer(best, grids[n], errors[n]);
    }
    for (int fit = 0; fit < how.num_fits; ++fit) refit<ZERO_POINT>(x, length, best);
    return best.grid;
}

INLINE Range load_groups(const Source &source, Load load, F *x, Statistics &total) {
    Range range = {};
    I largest = {};
    for (int64_t start = 0; start < source.length; start += CHUNK) load(source, start, x + start);
    for (int i = 0; i < source.length; ++i) {
        I bits = magnitude_bits(x[i]);
        largest = bits > largest ? bits : largest;
        range.lowest = minimum(x[i], range.lowest);
        range.highest = maximum(x[i], range.highest);
    }
    I keep = usable(source, load, largest, total);
    for (int lane = 0; lane < source.lanes; ++lane) {
        if (keep[lane]) continue;
        for (int i = 0; i < source.length; ++i) x[i][lane] = 0;
        range.lowest[lane] = range.highest[lane] = 0;
    }
    return range;
}

// A code low + n is stored as n, eight to a word, lowest nibble first; and the exact error of what was stored.
template <bool ZERO_POINT> INLINE void emit(const F *x, int length, const Grid &grid, I *words, F &error, F &weight) {
    error = weight = F{};
    for (int word = 0; word < length / 8; ++word) {
        I packed = {};
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            F value = x[8 * word + i];
            F t = value * grid.inverse;
            I code = shifted_int4<ZERO_POINT>(t, grid.low);
            F rest = (value - unshifted(code) * grid.scale) * grid.inverse;
            error = error + rest * rest;
            weight = weight + t * t;
            packed |= (code - grid.low) << (4 * i);
        }
        words[word] = packed;
    }
}

template <bool ZERO_POINT> void int4_groups(const Job &job, Load load, const Search &how, int8_t *zeros) {
    F x[MAX_GROUP];
    I words[MAX_GROUP / 8];
    int length = (int)job.length, num_words = length / 8;
    for (int64_t group = 0; group < job.num_groups; group += W) {
        int lanes = job.num_groups - group < W ? (int)(job.num_groups - group) : W;
        Source source = {job.input + group * length * job.element_bytes, length, lanes};
        Range range = load_groups(source, load, x, *job.total);
        Grid grid = search<ZERO_POINT>(x, length, range, how);
        F error, weight;
        emit<ZERO_POINT>(x, length, grid, words, error, weight);
        for (int lane = 0; lane < lanes; ++lane) {
            char *out = job.codes + (group + lane) * num_words * 4;
            for (int word = 0; word < num_words; ++word) store_word(out + 4 * word, words[word][lane]);
            ((uint16_t *)job.scales)[group + lane] = (uint16_t)((uint32_t)((I)grid.scale)[lane] >> 16);
            if (ZERO_POINT) zeros[group + lane] = (int8_t)(-8.0f - unshifted(grid.low)[lane]);
            add_group(*job.total, group + lane, error[lane], weight[lane], grid.scale[lane]);
        }
    }
}

// --- int8 and fp8: the largest magnitude decides ----------------------------------------------------------------------

// Offset binary: the byte is the code + 128.
struct Int8 {
    static INLINE F scale(F largest) { return bf16_scale(largest / 127.0f); }
    static INLINE I code(F t, F &value) {
        I low = shifted(splat(-128.0f)), code = shifted_code(t, low, low + 255);
        value = unshifted(code);
        return code - low;
    }
    static INLINE void store(char *scales, int64_t group, float scale) {
        int32_t bits;
        std::memcpy(&bits, &scale, 4);
        ((uint16_t *)scales)[group] = (uint16_t)((uint32_t)bits >> 16);
    }
    static constexpr bool PADDED = true;  // a row ends on a whole int32
};

// E4M3 without infinities (OCP 8-bit Floating Point, revision 1.0): bias 7, three bits of mantissa, at most 448.
struct Fp8 {
    static constexpr int32_t LARGEST_FP8_BITS = 0x43e00000;  // of the float 448
    static INLINE F scale(F largest) { return maximum(largest / 448.0f, (F)(SMALLEST_SCALE_BITS - I{})); }
    static INLINE I code(F t, F &value) {
        I bits = magnitude_bits(t);
        bits = bits < LARGEST_FP8_BITS ? bits : LARGEST_FP8_BITS - I{};
        F size = (F)bits;
        bits = (bits + 0x7ffff + ((bits >> 20) & 1)) & (int32_t)0xfff00000;
        F subnormal = size + 16384.0f;  // where the last bit of a float is 2^-9, the step below 2^-6
        I small = size < 0.015625f;
        I code = small ? (I)subnormal & 0xff : (bits >> 20) - (120 << 3);
        I sign = (I)t & (int32_t)0x80000000;
        value = (F)((small ? (I)(subnormal - 16384.0f) : bits) | sign);
        return code | ((sign >> 24) & 0x80);
    }
    static INLINE void store(char *scales, int64_t group, float scale) { ((float *)scales)[group] = scale; }
    static constexpr bool PADDED = false;
};

// `bytes` of one lane's codes; the rest of the last word is zero where rows end on a whole word.
template <class Code> INLINE void store_codes(char *out, const I *words, int lane, int64_t bytes) {
    int64_t word = 0;
    for (; 4 * word + 4 <= bytes; ++word) store_word(out + 4 * word, words[word][lane]);
    int rest = (int)(bytes - 4 * word);
    if (rest == 0) return;
    uint32_t last = (uint32_t)words[word][lane] & ((1u << (8 * rest)) - 1);
    std::memcpy(out + 4 * word, &last, Code::PADDED ? 4 : rest);
}

INLINE I largest_bits(const Source &source, Load load) {
    I largest = {};
    for (int64_t start = 0; start < source.length; start += CHUNK) {
        F x[CHUNK];
        load(source, start, x);
        for (int i = 0; i < CHUNK; ++i) {
            I bits = magnitude_bits(x[i]);
            largest = bits > largest ? bits : largest;
        }
    }
    return largest;
}

// Codes of a chunk, four to a word, and its squares in units of the scale.
template <class Code> INLINE void emit_bytes(const F *x, F scale, F inverse, I keep, I *words, F &error, F &weight) {
    error = weight = F{};
    for (int word = 0; word < CHUNK / 4; ++word) {
        I packed = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            F value = (F)((I)x[4 * word + i] & keep), t = value * inverse, coded;
            packed |= Code::code(t, coded) << (8 * i);
            F rest = (value - coded * scale) * inverse;
            error = error + rest * rest;
            weight = weight + t * t;
        }
        words[word] = packed;
    }
}

template <class Code> void byte_groups(const Job &job, Load load) {
    F x[CHUNK], error, weight;
    I words[CHUNK / 4];
    for (int64_t group = 0; group < job.num_groups; group += W) {
        int lanes = job.num_groups - group < W ? (int)(job.num_groups - group) : W;
        Source source = {job.input + group * job.length * job.element_bytes, job.length, lanes};
        I largest = largest_bits(source, load);
        I keep = usable(source, load, largest, *job.total);
        F scale = Code::scale((F)(largest & keep)), inverse = 1.0f / scale;
        double errors[W] = {}, weights[W] = {};
        for (int64_t start = 0; start < job.length; start += CHUNK) {
            load(source, start, x);
            emit_bytes<Code>(x, scale, inverse, keep, words, error, weight);
            int64_t bytes = job.length - start < CHUNK ? job.length - start : CHUNK;
            for (int lane = 0; lane < lanes; ++lane) {
                store_codes<Code>(job.codes + (group + lane) * job.code_stride + start, words, lane, bytes);
                errors[lane] += error[lane], weights[lane] += weight[lane];
            }
        }
        for (int lane = 0; lane < lanes; ++lane) {
            Code::store(job.scales, group + lane, scale[lane]);
            add_group(*job.total, group + lane, errors[lane], weights[lane], scale[lane]);
        }
    }
}

void quantize(const Job &job, Kind kind, Input input, const Search *how, int8_t *zeros) {
    Load load = input == BF16 ? load_chunk<Bf16> : input == FP16 ? load_chunk<Fp16> : load_chunk<Fp32>;
    if (kind == INT8) return byte_groups<Int8>(job, load);
    if (kind == FP8) return byte_groups<Fp8>(job, load);
    if (zeros) return int4_groups<true>(job, load, *how, zeros);
    return int4_groups<false>(job, load, *how, nullptr);
}

}  // namespace WINDLASS_ISA
