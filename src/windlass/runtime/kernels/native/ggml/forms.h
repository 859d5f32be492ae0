// ggml's block types as panels hold them; core/ggml/forms.py draws them. In a panel each number and each word of a block lies next to those of
// the other 15 rows: all halves, then all single bytes, then all words.
#pragma once
#include <cstdint>
#include <cstring>

namespace windlass {

// Blocks of 32 inputs in a block of the file, and its parts.
struct Form {
    int blocks, halves, singles, words;
    constexpr int bytes() const { return 2 * halves + singles + 4 * words; }
    constexpr int block_words() const { return words / blocks; }
};

// As core/ggml/forms.py orders them.
constexpr Form FORMS[] = {
    {8, 2, 16, 16}, {8, 1, 16, 24}, {8, 2, 16, 32}, {8, 2, 16, 40}, {8, 1, 16, 48},  // Q2_K .. Q6_K
    {1, 1, 0, 5},   {1, 2, 0, 5},                                                    // Q5_0 Q5_1
    {1, 1, 0, 4},   {8, 1, 8, 32},  {1, 0, 1, 4},                                    // IQ4_NL IQ4_XS MXFP4
    {8, 1, 0, 16},  {8, 1, 8, 16},  {8, 1, 16, 16}, {8, 1, 0, 24},  {8, 1, 12, 24},  // IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S
};

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FP4_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Magnitudes of a code, four to a word: IQ2_XXS, IQ2_XS, IQ2_S (two words each), IQ3_XXS, IQ3_S. Filled when the library is loaded.
constexpr int GRID_STARTS[] = {0, 512, 1536, 3584, 3840, 4352};
extern uint32_t GRIDS[4352];

// Four times seven signs, or (of one byte) eight: the eighth is such that the number of negative ones is even.
inline uint32_t with_parity(uint32_t seven) {
    uint32_t parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    return seven | ((parity ^ parity >> 1) & 1) << 7;
}

// Half of two to the exponent less 127; the smallest are subnormal.
inline float e8m0_half(int exponent) {
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : uint32_t(exponent - 1) << 23;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

}  // namespace windlass
