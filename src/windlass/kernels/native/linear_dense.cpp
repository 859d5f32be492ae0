// Products with weights that are floats in rows: fp32, bf16, fp16, and fp8 with scales. Activations and sums are fp32.
//
// Few rows: one row of weights at a time, so that memory is read as one stream. More: several rows of weights against several of
// activations, so that what is loaded is used more than once. Sums are in the lanes of vectors, added up at the end.
#ifndef WINDLASS_ISA
#include "panel.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define WINDLASS_EACH "linear_dense.cpp"
#include "lanes.h"

namespace windlass {

MultiplyFloats floats_kernel() { return WINDLASS_PICK(multiply_floats); }

}  // namespace windlass

#else

namespace windlass {
namespace {
namespace WINDLASS_ISA {

#if WINDLASS_LANES == 16 && defined(__x86_64__)
#define WINDLASS_HALVES(from) (F) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from)))
#elif WINDLASS_LANES == 8 && defined(__x86_64__)
#define WINDLASS_HALVES(from) (F) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from)))
#else
#define WINDLASS_HALVES(from) load((const Fp16*)(from))
#endif

// A row of weights from some group on: `at(k)` are W of them.
template <class Number> struct Floats {
    const Number* row;
    Floats(const Matrix& matrix, const uint8_t* from, int64_t) : row((const Number*)from) {}
    INLINE F at(int64_t k) const { return load(row + k); }
    INLINE F part(int64_t k, int64_t count) const { return load_part(row + k, count); }
};
template <> struct Floats<Fp16> {
    const Fp16* row;
    Floats(const Matrix& matrix, const uint8_t* from, int64_t) : row((const Fp16*)from) {}
    INLINE F at(int64_t k) const { return WINDLASS_HALVES(row + k); }
    INLINE F part(int64_t k, int64_t count) const { return load_part(row + k, count); }
};

typedef uint8_t EightBits __attribute__((vector_size(W)));

// E4M3: a float with its exponent 120 too low. Subnormals (exponent 0) are made by a subtraction, as load(Fp16) makes them.
struct Fp8 {
    const uint8_t* row;
    F scale;
    Fp8(const Matrix& matrix, const uint8_t* from, int64_t group) : row(from + group * matrix.group) {
        float number;
        std::memcpy(&number, from + matrix.inputs + 4 * group, 4);
        scale = splat(number);
    }
    INLINE F at(int64_t k) const {
        EightBits bytes;
        std::memcpy(&bytes, row + k, W);
        const I bits = __builtin_convertvector(bytes, I);
        const I magnitude = (bits & 0x7f) << 20;
        const F normal = (F)(magnitude + (120 << 23));
        const F subnormal = (F)(magnitude + (121 << 23)) - splat(0.015625f);
        const F number = magnitude < (1 << 23) ? subnormal : normal;
        return (F)((I)number | (bits & 0x80) << 24) * scale;
    }
    INLINE F part(int64_t k, int64_t count) const { return at(k); }  // groups are whole vectors
};

// Sums of R rows of x with one row of weights; four sums to each, so that they need not wait for one another.
template <class Weights, int R> INLINE void stream_rows(const Matrix& matrix, const uint8_t* row, const float* x, int64_t stride, float* sums) {
    F totals[R][4];
#pragma GCC unroll 6
    for (int i = 0; i < R; i++) totals[i][0] = totals[i][1] = totals[i][2] = totals[i][3] = F{};
    const int64_t groups = matrix.kind == Kind::FP8 ? matrix.groups : 1, length = matrix.inputs / groups;
    for (int64_t group = 0; group < groups; group++, x += length) {
        const Weights weights(matrix, row, group);
        int64_t k = 0;
        for (; k + 4 * W <= length; k += 4 * W) {
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                const F weight = weights.at(k + part * W);
#pragma GCC unroll 6
                for (int i = 0; i < R; i++) totals[i][part] += weight * load(x + i * stride + k + part * W);
            }
        }
        for (; k + W <= length; k += W)
            for (int i = 0; i < R; i++) totals[i][0] += weights.at(k) * load(x + i * stride + k);
        if (k < length)
            for (int i = 0; i < R; i++) totals[i][1] += weights.part(k, length - k) * load_part(x + i * stride + k, length - k);
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; i++) sums[i * PANEL_ROWS] = sum((totals[i][0] + totals[i][1]) + (totals[i][2] + totals[i][3]));
}

// Rows of activations that share a pass over a row of weights: what registers hold.
constexpr int STREAM_ROWS = W == 16 ? 6 : 3;
// Rows of weights and of activations of a block.
constexpr int BLOCK_OUTPUTS = W == 16 ? 4 : 2, BLOCK_ROWS = W == 16 ? 6 : 4;

template <class Weights> void stream(const Matrix& matrix, const uint8_t* row, const float* x, int64_t stride, int rows, float* sums) {
    for (; rows > 0; rows -= STREAM_ROWS, x += STREAM_ROWS * stride, sums += STREAM_ROWS * PANEL_ROWS) {
        switch (rows) {
            case 1: stream_rows<Weights, 1>(matrix, row, x, stride, sums); break;
            case 2: stream_rows<Weights, 2>(matrix, row, x, stride, sums); break;
            case 3: stream_rows<Weights, 3>(matrix, row, x, stride, sums); break;
#if WINDLASS_LANES == 16
            case 4: stream_rows<Weights, 4>(matrix, row, x, stride, sums); break;
            case 5: stream_rows<Weights, 5>(matrix, row, x, stride, sums); break;
#endif
            default: stream_rows<Weights, STREAM_ROWS>(matrix, row, x, stride, sums);
        }
    }
}

// BLOCK_OUTPUTS rows of weights (of which the last may be repeated) with R of activations.
template <class Weights, int R>
INLINE void block_rows(const Matrix& matrix, const uint8_t* const* outputs, const float* x, int64_t stride, float* sums) {
    F totals[R][BLOCK_OUTPUTS];
#pragma GCC unroll 6
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int output = 0; output < BLOCK_OUTPUTS; output++) totals[i][output] = F{};
    const int64_t groups = matrix.kind == Kind::FP8 ? matrix.groups : 1, length = matrix.inputs / groups;
    for (int64_t group = 0; group < groups; group++, x += length) {
        const Weights w0(matrix, outputs[0], group), w1(matrix, outputs[1], group);
        const Weights w2(matrix, outputs[BLOCK_OUTPUTS - 2], group), w3(matrix, outputs[BLOCK_OUTPUTS - 1], group);
        int64_t k = 0;
        for (; k + W <= length; k += W) {
            F weights[BLOCK_OUTPUTS];
            weights[0] = w0.at(k);
            weights[1] = w1.at(k);
            if (BLOCK_OUTPUTS == 4) {
                weights[BLOCK_OUTPUTS - 2] = w2.at(k);
                weights[BLOCK_OUTPUTS - 1] = w3.at(k);
            }
#pragma GCC unroll 6
            for (int i = 0; i < R; i++) {
                const F value = load(x + i * stride + k);
#pragma GCC unroll 4
                for (int output = 0; output < BLOCK_OUTPUTS; output++) totals[i][output] += weights[output] * value;
            }
        }
        if (k < length) {
            for (int i = 0; i < R; i++) {
                for (int output = 0; output < BLOCK_OUTPUTS; output++) {
                    const Weights last(matrix, outputs[output], group);
                    totals[i][output] += last.part(k, length - k) * load_part(x + i * stride + k, length - k);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int output = 0; output < BLOCK_OUTPUTS; output++) sums[i * PANEL_ROWS + output] = sum(totals[i][output]);
}

template <class Weights>
void block(const Matrix& matrix, const uint8_t* const* outputs, const float* x, int64_t stride, int rows, float* sums) {
    for (; rows > 0; rows -= BLOCK_ROWS, x += BLOCK_ROWS * stride, sums += BLOCK_ROWS * PANEL_ROWS) {
        switch (rows) {
            case 1: block_rows<Weights, 1>(matrix, outputs, x, stride, sums); break;
            case 2: block_rows<Weights, 2>(matrix, outputs, x, stride, sums); break;
            case 3: block_rows<Weights, 3>(matrix, outputs, x, stride, sums); break;
#if WINDLASS_LANES == 16
            case 4: block_rows<Weights, 4>(matrix, outputs, x, stride, sums); break;
            case 5: block_rows<Weights, 5>(matrix, outputs, x, stride, sums); break;
#endif
            default: block_rows<Weights, BLOCK_ROWS>(matrix, outputs, x, stride, sums);
        }
    }
}

template <class Weights>
void multiply_dense(const Matrix& matrix, int64_t panel, const float* x, int64_t stride, int rows, bool is_stream, float* sums) {
    const uint8_t* first = matrix.panel(panel);
    const int outputs = int(std::min<int64_t>(PANEL_ROWS, matrix.outputs - panel * PANEL_ROWS));
    if (is_stream) {
        for (int output = 0; output < outputs; output++)
            stream<Weights>(matrix, first + output * matrix.row_bytes, x, stride, rows, sums + output);
        return;
    }
    for (int output = 0; output < outputs; output += BLOCK_OUTPUTS) {
        const uint8_t* from[BLOCK_OUTPUTS];
        for (int i = 0; i < BLOCK_OUTPUTS; i++) from[i] = first + std::min(output + i, outputs - 1) * matrix.row_bytes;
        block<Weights>(matrix, from, x, stride, rows, sums + output);
    }
}

void multiply_floats(const Matrix& matrix, int64_t panel, const float* x, int64_t stride, int rows, bool is_stream, float* sums) {
    switch (matrix.kind) {
        case Kind::FLOAT32: return multiply_dense<Floats<float>>(matrix, panel, x, stride, rows, is_stream, sums);
        case Kind::BFLOAT16: return multiply_dense<Floats<Bf16>>(matrix, panel, x, stride, rows, is_stream, sums);
        case Kind::FLOAT16: return multiply_dense<Floats<Fp16>>(matrix, panel, x, stride, rows, is_stream, sums);
        default: return multiply_dense<Fp8>(matrix, panel, x, stride, rows, is_stream, sums);
    }
}

#undef WINDLASS_HALVES

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
