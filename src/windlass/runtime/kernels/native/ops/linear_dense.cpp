// Products with weights that are floats in rows: fp32, bf16, fp16, and fp8 with scales. Activations and sums are fp32.
//
// One short row: one row of weights at a time, so that memory is read as one stream, with four sums, or with one where a result must not
// depend on the number of rows (for 16 lanes as fast where weights come from memory; docs/guides/run.md). Else several rows of weights against several
// of activations, so that what is loaded is used more than once. Sums are in the lanes of vectors, added up at the end.
#ifndef WINDLASS_ISA
#include "panel/panel.h"
#include "panel/vectors.h"
#define WINDLASS_EACH "ops/linear_dense.cpp"
#include "simd/lanes.h"

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
    static constexpr int64_t BYTES = sizeof(Number);
    Floats(const Matrix& matrix, const uint8_t* from, int64_t) : row((const Number*)from) {}
    INLINE F at(int64_t k) const { return load(row + k); }
    INLINE F part(int64_t k, int64_t count) const { return load_part(row + k, count); }
};
template <> struct Floats<Fp16> {
    const Fp16* row;
    static constexpr int64_t BYTES = 2;
    Floats(const Matrix& matrix, const uint8_t* from, int64_t) : row((const Fp16*)from) {}
    INLINE F at(int64_t k) const { return WINDLASS_HALVES(row + k); }
    INLINE F part(int64_t k, int64_t count) const { return load_part(row + k, count); }
};

// W bytes of E4M3 as floats 2^-8 times too small: sign, exponent and mantissa of a half with its exponent 8 too low.
#if WINDLASS_LANES == 16 && defined(__x86_64__)
INLINE F load_fp8(const uint8_t* from) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)), 8);
    return (F)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(short(0xbfff))));
}
#elif WINDLASS_LANES == 8 && defined(__x86_64__)
INLINE F load_fp8(const uint8_t* from) {
    const __m128i words = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 8);
    return (F)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(short(0xbfff))));
}
#else
INLINE F load_fp8(const uint8_t* from) {
    Fp16 halves[W];
    for (int i = 0; i < W; i++) halves[i].bits = uint16_t((from[i] & 0x80) << 8 | (from[i] & 0x7f) << 7);
    return load(halves);
}
#endif

struct Fp8 {
    const uint8_t* row;
    F scale;
    static constexpr int64_t BYTES = 1;
    Fp8(const Matrix& matrix, const uint8_t* from, int64_t group) : row(from + group * matrix.group) {
        float number;
        std::memcpy(&number, from + matrix.inputs + 4 * group, 4);
        scale = splat(number * 256.0f);
    }
    INLINE F at(int64_t k) const { return load_fp8(row + k) * scale; }
    INLINE F part(int64_t k, int64_t count) const { return at(k); }  // groups are whole vectors
};

// One row of x with one row of weights: four sums, so that they need not wait for one another, or one, which is what blocks make.
template <class Weights, int CHAINS> INLINE float stream(const Matrix& matrix, const uint8_t* row, const float* x) {
    F totals[CHAINS] = {};
    const int64_t groups = matrix.kind == Kind::FP8 ? matrix.groups : 1, length = matrix.inputs / groups;
    for (int64_t group = 0; group < groups; group++, x += length) {
        const Weights weights(matrix, row, group);
        int64_t k = 0;
        for (; k + 4 * W <= length; k += 4 * W)
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) totals[part % CHAINS] += weights.at(k + part * W) * load(x + k + part * W);
        for (; k + W <= length; k += W) totals[0] += weights.at(k) * load(x + k);
        if (k < length) totals[1 % CHAINS] += weights.part(k, length - k) * load_part(x + k, length - k);
    }
    return sum(CHAINS == 1 ? totals[0] : (totals[0] + totals[1]) + (totals[2 % CHAINS] + totals[3 % CHAINS]));
}

// A row of activations that stays in the nearest cache while weights stream by.
constexpr int64_t STREAMED_BYTES = 16 << 10;
// Rows of weights and of activations of a block.
constexpr int BLOCK_OUTPUTS = W == 16 ? 4 : 2, BLOCK_ROWS = W == 16 ? 6 : 4;

// BLOCK_OUTPUTS rows of weights (of which the last may be repeated) with R of activations.
template <class Weights, int R>
INLINE void block_rows(const Matrix& matrix, const uint8_t* const* outputs, const float* x, int64_t stride, bool is_once, float* sums) {
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
            // Several streams at once are more than processors foresee.
            if (is_once)
#pragma GCC unroll 4
                for (int output = 0; output < BLOCK_OUTPUTS; output++)
                    __builtin_prefetch(outputs[output] + BLOCK_OUTPUTS * matrix.row_bytes + (group * length + k) * Weights::BYTES);
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
void block(const Matrix& matrix, const uint8_t* const* outputs, const float* x, int64_t stride, int rows, bool is_once, float* sums) {
    while (rows > 0) {
        // The last two blocks alike: one of six rows and one of two take longer than two of four.
        const int some = rows <= BLOCK_ROWS ? rows : rows < 2 * BLOCK_ROWS ? (rows + 1) / 2 : BLOCK_ROWS;
        switch (some) {
            case 1: block_rows<Weights, 1>(matrix, outputs, x, stride, is_once, sums); break;
            case 2: block_rows<Weights, 2>(matrix, outputs, x, stride, is_once, sums); break;
            case 3: block_rows<Weights, 3>(matrix, outputs, x, stride, is_once, sums); break;
#if WINDLASS_LANES == 16
            case 4: block_rows<Weights, 4>(matrix, outputs, x, stride, is_once, sums); break;
            case 5: block_rows<Weights, 5>(matrix, outputs, x, stride, is_once, sums); break;
#endif
            default: block_rows<Weights, BLOCK_ROWS>(matrix, outputs, x, stride, is_once, sums);
        }
        rows -= some;
        x += some * stride;
        sums += some * PANEL_ROWS;
    }
}

template <class Weights>
void multiply_dense(const Matrix& matrix, int64_t panel, const float* x, int64_t stride, int rows, int64_t total_rows, float* sums) {
    const uint8_t* first = matrix.panel(panel);
    const int outputs = int(std::min<int64_t>(PANEL_ROWS, matrix.outputs - panel * PANEL_ROWS));
    if (rows == 1 && matrix.inputs * 4 <= STREAMED_BYTES) {
        for (int output = 0; output < outputs; output++, first += matrix.row_bytes)
            sums[output] = total_rows == 1 ? stream<Weights, 4>(matrix, first, x) : stream<Weights, 1>(matrix, first, x);
        return;
    }
    for (int output = 0; output < outputs; output += BLOCK_OUTPUTS) {
        const uint8_t* from[BLOCK_OUTPUTS];
        for (int i = 0; i < BLOCK_OUTPUTS; i++) from[i] = first + std::min(output + i, outputs - 1) * matrix.row_bytes;
        block<Weights>(matrix, from, x, stride, rows, total_rows <= TILE_ROWS, sums + output);
    }
}

void multiply_floats(const Matrix& matrix, int64_t panel, const float* x, int64_t stride, int rows, int64_t total_rows, float* sums) {
    switch (matrix.kind) {
        case Kind::FLOAT32: return multiply_dense<Floats<float>>(matrix, panel, x, stride, rows, total_rows, sums);
        case Kind::BFLOAT16: return multiply_dense<Floats<Bf16>>(matrix, panel, x, stride, rows, total_rows, sums);
        case Kind::FLOAT16: return multiply_dense<Floats<Fp16>>(matrix, panel, x, stride, rows, total_rows, sums);
        default: return multiply_dense<Fp8>(matrix, panel, x, stride, rows, total_rows, sums);
    }
}

#undef WINDLASS_HALVES

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
