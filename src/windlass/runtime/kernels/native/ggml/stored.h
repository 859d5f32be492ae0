// Blocks of a file (ggml-common.h) to the forms that panels hold; runtime/kernels/packing/ggml_rows.py does the same in PyTorch.
#pragma once
#include "panel/panel.h"

namespace windlass {

constexpr int STORED_BYTES[] = {84, 110, 144, 176, 210, 22, 24, 18, 136, 17, 66, 74, 82, 98, 110};
inline int stored_bytes(Kind kind) { return STORED_BYTES[int64_t(kind) - int64_t(Kind::Q2_K)]; }

inline uint32_t four_bytes(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

// Codes of 32 inputs, a byte each, to words: the lowest four bits, pairs of bits from `bit` on, one bit.
inline uint32_t* put_low(const uint8_t* codes, uint32_t* to) {
    for (int i = 0; i < 4; i++) *to++ = (four_bytes(codes + 8 * i) & 0x0f0f0f0f) | (four_bytes(codes + 8 * i + 4) & 0x0f0f0f0f) << 4;
    return to;
}
inline uint32_t* put_pairs(const uint8_t* codes, int bit, uint32_t* to) {
    for (int half = 0; half < 2; half++, to++) {
        *to = 0;
        for (int k = 0; k < 4; k++) *to |= (four_bytes(codes + 16 * half + 4 * k) >> bit & 0x03030303) << 2 * k;
    }
    return to;
}
inline uint32_t* put_bits(const uint8_t* codes, int bit, uint32_t* to) {
    *to = 0;
    for (int chunk = 0; chunk < 8; chunk++) *to |= (four_bytes(codes + 4 * chunk) >> bit & 0x01010101) << chunk;
    return to + 1;
}

// Sixteen bytes of two codes each: j and j + 16.
inline void nibbles(const uint8_t* from, int count, uint8_t* low, uint8_t* high) {
    for (int j = 0; j < count; j++) {
        low[j] = from[j] & 15;
        high[j] = from[j] >> 4;
    }
}

inline void k_codes(Kind kind, const uint8_t* from, uint8_t* codes) {
    const bool is_five = kind == Kind::Q5_K;
    for (int run = 0; run < 4; run++) {
        uint8_t *low = codes + 64 * run, *high = low + 32;
        nibbles(from + (is_five ? 48 : 16) + 32 * run, 32, low, high);
        for (int j = 0; is_five && j < 32; j++) {
            low[j] |= (from[16 + j] >> 2 * run & 1) << 4;
            high[j] |= (from[16 + j] >> (2 * run + 1) & 1) << 4;
        }
    }
}

inline void q6_codes(const uint8_t* from, uint8_t* codes) {
    for (int half = 0; half < 2; half++, codes += 128) {
        nibbles(from + 64 * half, 64, codes, codes + 64);
        for (int j = 0; j < 128; j++) codes[j] |= (from[128 + 32 * half + j % 32] >> 2 * (j / 32) & 3) << 4;
    }
}

// Third bits (`thirds`) or none.
inline void two_bit_codes(const uint8_t* pairs, const uint8_t* thirds, uint8_t* codes) {
    for (int run = 0; run < 8; run++)
        for (int j = 0; j < 32; j++)
            codes[32 * run + j] = (pairs[run / 4 * 32 + j] >> 2 * (run % 4) & 3) | (thirds ? (thirds[j] >> run & 1) << 2 : 0);
}

inline void five_bit_codes(const uint8_t* from, uint8_t* codes) {  // fifth bits, nibbles
    nibbles(from + 4, 16, codes, codes + 16);
    const uint32_t fifth = four_bytes(from);
    for (int j = 0; j < 32; j++) codes[j] |= (fifth >> j & 1) << 4;
}

inline void k_scales(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < 4; i++) {
        to[i] = from[i] & 63;
        to[4 + i] = (from[8 + i] & 15) | from[i] >> 6 << 4;
        to[8 + i] = from[4 + i] & 63;
        to[12 + i] = from[8 + i] >> 4 | from[4 + i] >> 6 << 4;
    }
}

// Words of regions `first` (with `count` bytes of every 32 inputs) and `second` (with four), those of a block together.
inline void put_regions(const uint8_t* first, int count, const uint8_t* second, uint32_t* to) {
    for (int block = 0; block < 8; block++) {
        std::memcpy(to, first + count * block, count);
        std::memcpy(to + count / 4, second + 4 * block, 4);
        to += count / 4 + 1;
    }
}

// One block. `halves`, `singles`, `words`: its parts, see Form.
inline void form_block(Kind kind, const uint8_t* from, uint8_t* halves, uint8_t* singles, uint32_t* words) {
    const Form form = form_of(kind);
    alignas(64) uint8_t codes[256];
    std::memcpy(halves, from + (kind == Kind::Q2_K ? 80 : kind == Kind::Q3_K ? 108 : kind == Kind::Q6_K ? 208 : 0), 2 * form.halves);
    switch (kind) {
        case Kind::Q2_K:
            std::memcpy(singles, from, 16);
            two_bit_codes(from + 16, nullptr, codes);
            break;
        case Kind::Q3_K:
            for (int i = 0; i < 16; i++)
                singles[i] = uint8_t(((from[96 + i % 8] >> i / 8 * 4 & 15) | (from[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
            two_bit_codes(from + 32, from, codes);
            break;
        case Kind::Q4_K: case Kind::Q5_K:
            k_scales(from + 4, singles);
            k_codes(kind, from, codes);
            break;
        case Kind::Q6_K:
            std::memcpy(singles, from + 192, 16);
            q6_codes(from, codes);
            break;
        case Kind::Q5_0: five_bit_codes(from + 2, codes); break;
        case Kind::Q5_1: five_bit_codes(from + 4, codes); break;
        case Kind::IQ4_NL: nibbles(from + 2, 16, codes, codes + 16); break;
        case Kind::MXFP4:
            singles[0] = from[0];
            nibbles(from + 1, 16, codes, codes + 16);
            break;
        case Kind::IQ4_XS:
            for (int i = 0; i < 8; i++) {
                singles[i] = uint8_t(((from[4 + i / 2] >> i % 2 * 4 & 15) | (from[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32);
                nibbles(from + 8 + 16 * i, 16, codes + 32 * i, codes + 32 * i + 16);
            }
            break;
        case Kind::IQ2_XXS: std::memcpy(words, from + 2, 64); return;
        case Kind::IQ2_XS:
            std::memcpy(singles, from + 66, 8);
            std::memcpy(words, from + 2, 64);
            return;
        case Kind::IQ2_S:
            std::memcpy(singles, from + 74, 8);
            std::memcpy(singles + 8, from + 66, 8);
            return put_regions(from + 2, 4, from + 34, words);
        case Kind::IQ3_XXS: return put_regions(from + 2, 8, from + 66, words);
        default:
            std::memcpy(singles, from + 106, 4);
            std::memcpy(singles + 4, from + 66, 8);
            return put_regions(from + 2, 8, from + 74, words);
    }
    for (int block = 0; block < form.blocks; block++) {
        const uint8_t* some = codes + BLOCK * block;
        const bool is_small = kind == Kind::Q2_K || kind == Kind::Q3_K;
        words = is_small ? put_pairs(some, 0, words) : put_low(some, words);
        if (kind == Kind::Q3_K) words = put_bits(some, 2, words);
        if (kind == Kind::Q6_K) words = put_pairs(some, 4, words);
        if (kind == Kind::Q5_K || kind == Kind::Q5_0 || kind == Kind::Q5_1) words = put_bits(some, 4, words);
    }
}

}  // namespace windlass
