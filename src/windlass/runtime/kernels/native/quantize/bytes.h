// int8 and fp8: the largest magnitude of a group or row decides its scale. Included by lanes.h.

namespace WINDLASS_ISA {

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

}  // namespace WINDLASS_ISA
