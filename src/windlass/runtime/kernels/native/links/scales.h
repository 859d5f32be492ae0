// Scales of a byte, and the order of candidates. See links.h.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>

#include "links/links.h"

namespace windlass {
namespace {

constexpr int STEPS = 6, LOWEST_OCTAVE = -24, NOT_A_NUMBER = 255;
// 2^(j / 6) with 17 digits.
constexpr float WITHIN[STEPS] = {65536 / 65536.0f, 73562 / 65536.0f, 82570 / 65536.0f, 92682 / 65536.0f, 104032 / 65536.0f, 116772 / 65536.0f};

struct Scales {
    float scale[256], inverse[256];
    Scales() {
        for (int code = 0; code < NOT_A_NUMBER; code++) {
            scale[code] = std::ldexp(WITHIN[code % STEPS], code / STEPS + LOWEST_OCTAVE);
            inverse[code] = 1.0f / scale[code];
        }
        scale[NOT_A_NUMBER] = std::numeric_limits<float>::quiet_NaN();
        inverse[NOT_A_NUMBER] = 0.0f;
    }
};
const Scales SCALES;

// The least scale that is not below 1/127 of a magnitude, given by its bits.
inline int scale_code(int32_t magnitude_bits) {
    float magnitude, mantissa;
    std::memcpy(&magnitude, &magnitude_bits, 4);
    const float least = magnitude * (1.0f / 127.0f);
    int32_t bits;
    std::memcpy(&bits, &least, 4);
    if (bits >= 0x7f800000) return NOT_A_NUMBER;
    const int32_t mantissa_bits = (bits & 0x7fffff) | 0x3f800000;
    std::memcpy(&mantissa, &mantissa_bits, 4);
    int code = ((bits >> 23) - 127 - LOWEST_OCTAVE) * STEPS;
    for (int step = 0; step < STEPS; step++) code += mantissa > WITHIN[step];
    return code < 0 ? 0 : code < NOT_A_NUMBER ? code : NOT_A_NUMBER;
}

// Whether candidate a ranks before b.
inline bool precedes(const Candidate& a, const Candidate& b) {
    const bool a_is_none = a.value != a.value, b_is_none = b.value != b.value;
    if (a_is_none || b_is_none) return a_is_none && (!b_is_none || a.id < b.id);
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

}  // namespace
}  // namespace windlass
