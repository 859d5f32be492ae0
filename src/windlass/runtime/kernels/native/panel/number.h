// Single numbers out of panels, for loops that need not be fast.
#pragma once
#include <cstring>

#include "panel/panel.h"

namespace windlass {

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float bf16_number(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

inline float fp16_number(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -magnitude : magnitude;
}

// Number `row` of 16 at `from`, stored as the matrix stores scales.
inline float scale_number(const Matrix& matrix, const uint8_t* from, int row) {
    if (matrix.scales == ScaleType::FLOAT32) {
        float number;
        std::memcpy(&number, from + 4 * row, 4);
        return number;
    }
    uint16_t bits;
    std::memcpy(&bits, from + 2 * row, 2);
    return matrix.scales == ScaleType::FLOAT16 ? fp16_number(bits) : bf16_number(bits);
}

// What a code of 0 stands for, given the group's numbers at `from`.
inline float offset_number(const Matrix& matrix, const uint8_t* from, int row) {
    if (matrix.kind == Kind::INT4_MINIMA) return scale_number(matrix, from + matrix.scale_bytes, row);
    const float zero = matrix.kind == Kind::INT4 ? 8.0f : matrix.kind == Kind::INT8 ? 128.0f : float(from[matrix.scale_bytes + row]);
    return -zero * scale_number(matrix, from, row);
}

// Code of (row, input) in a block of 32 inputs.
inline int code_number(const Matrix& matrix, const uint8_t* block, int row, int input) {
    if (matrix.kind == Kind::INT8) return block[input / 4 * 64 + 4 * row + input % 4];
    const int byte = block[input / 8 * 64 + 4 * row + input % 4];
    return input % 8 < 4 ? byte & 15 : byte >> 4;
}

}  // namespace windlass
