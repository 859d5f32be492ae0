// Products with ggml's block types, AVX2. Bytes are multiplied in pairs that add up in 16 bits, as long as they fit; the multiplication that
// adds up neighbours applies the scale of 16 inputs too.
#if defined(__x86_64__)
#include <immintrin.h>

#include "ggml/product.h"

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace windlass {
namespace {
namespace avx2 {

struct V {
    __m256i half[2];
};
struct W16 {
    __m256i half[2];
};

#define WINDLASS_BOTH(EXPRESSION)                     \
    V result;                                         \
    for (int h = 0; h < 2; h++) result.half[h] = EXPRESSION; \
    return result

INLINE V load_bytes(const uint8_t* from) { WINDLASS_BOTH(_mm256_loadu_si256((const __m256i*)from + h)); }
INLINE V every(int byte) { WINDLASS_BOTH(_mm256_set1_epi8(char(byte))); }
INLINE V every_word(int word) { WINDLASS_BOTH(_mm256_set1_epi32(word)); }
INLINE V operator&(V a, V b) { WINDLASS_BOTH(_mm256_and_si256(a.half[h], b.half[h])); }
INLINE V operator|(V a, V b) { WINDLASS_BOTH(_mm256_or_si256(a.half[h], b.half[h])); }
INLINE V operator^(V a, V b) { WINDLASS_BOTH(_mm256_xor_si256(a.half[h], b.half[h])); }
template <int N> INLINE V shifted_up(V x) { WINDLASS_BOTH(_mm256_slli_epi16(x.half[h], N)); }
template <int N> INLINE V shifted_down(V x) { WINDLASS_BOTH(_mm256_srli_epi16(x.half[h], N)); }
template <int N> INLINE V up_words(V x) { WINDLASS_BOTH(_mm256_slli_epi32(x.half[h], N)); }
template <int N> INLINE V down_words(V x) { WINDLASS_BOTH(_mm256_srli_epi32(x.half[h], N)); }
INLINE V wide_bytes(const uint8_t* from) { WINDLASS_BOTH(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * h)))); }
INLINE V looked_up(const int8_t* values, V index) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
    WINDLASS_BOTH(_mm256_shuffle_epi8(table, index.half[h]));
}
template <int SIZE> INLINE V gathered(const uint32_t* grid, V index) {
    WINDLASS_BOTH(_mm256_i32gather_epi32((const int*)grid, index.half[h], SIZE));
}
INLINE V with_signs(V magnitudes, V signs) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    const __m256i bits = _mm256_set1_epi32(0x08040201);
    V result;
    for (int h = 0; h < 2; h++) {
        const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(signs.half[h], order), bits);
        const __m256i negative = _mm256_cmpeq_epi8(spread, bits);  // all ones: x becomes ~x + 1
        result.half[h] = _mm256_sub_epi8(_mm256_xor_si256(magnitudes.half[h], negative), negative);
    }
    return result;
}
INLINE W16 words_of(V x) { return {{x.half[0], x.half[1]}}; }
INLINE W16 wide_unsigned(const uint8_t* from) { return words_of(wide_bytes(from)); }
INLINE W16 wide_signed(const uint8_t* from) {
    return {{_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))}};
}
INLINE W16 wide_low(const uint8_t* from) { return words_of(wide_bytes(from) & every_word(15)); }
INLINE W16 wide_high(const uint8_t* from) { return words_of(down_words<4>(wide_bytes(from))); }
INLINE W16 top_four(const uint8_t* words) { return words_of(down_words<28>(load_bytes(words))); }
INLINE W16 twice_plus_one(W16 x) {
    for (int h = 0; h < 2; h++) x.half[h] = _mm256_add_epi32(_mm256_add_epi32(x.half[h], x.half[h]), _mm256_set1_epi32(1));
    return x;
}

#undef WINDLASS_BOTH
#include "ggml/codes.h"

INLINE __m256 half_floats(const uint8_t* from, int half) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + half)); }

template <Kind K> INLINE __m256 group_scale(const Group<K>& group, int half) {
    if constexpr (K == Kind::MXFP4) {
        const __m256i exponent = wide_unsigned(group.singles).half[half];
        const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponent);
        const __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(1)), 23);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponent)));
    } else {
        const __m256 d = half_floats(group.halves, half);
        return unit<K>() == 1.0f ? d : _mm256_mul_ps(d, _mm256_set1_ps(unit<K>()));
    }
}

// Chunks whose products with codes of -127 .. 127 fit in 16 bits together: 15, 31 and 63 * 127 * 2 each, 8, 4 and 2 times.
template <Kind K> constexpr int chunks_together() {
    return is_signed(K) ? 1 : K == Kind::Q6_K ? 2 : K == Kind::Q5_K || K == Kind::Q5_0 || K == Kind::Q5_1 || is_by_16(K) ? 4 : 8;
}

// sums += the chunks from C on, by `times` (ones, or scales of 16 inputs in both halves of every lane).
template <Kind K, int R, int C, int END>
INLINE void add_chunks(__m256i (*sums)[2], __m256i (*pairs)[2], const uint8_t* words, const uint8_t* high, const int32_t* codes, const __m256i* times) {
    if constexpr (C < END) {
        const V weight = chunk_codes<K, C>(words, high);
#pragma GCC unroll 4
        for (int row = 0; row < R; row++) {
            const __m256i code = _mm256_set1_epi32(codes[row * 8 + C]);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const __m256i w = weight.half[h];
                const __m256i product = is_signed(K) ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(code, w))
                                                     : _mm256_maddubs_epi16(w, code);
                pairs[row][h] = C % chunks_together<K>() == 0 ? product : _mm256_add_epi16(pairs[row][h], product);
                if ((C + 1) % chunks_together<K>() == 0) sums[row][h] = _mm256_add_epi32(sums[row][h], _mm256_madd_epi16(pairs[row][h], times[h]));
            }
        }
        add_chunks<K, R, C + 1, END>(sums, pairs, words, high, codes, times);
    }
}

// A number in both 16-bit halves of each lane; two numbers.
INLINE __m256i doubled(__m256i x) { return _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(x, 16)); }
INLINE __m256i paired(__m256i first, __m256i second) {
    return _mm256_or_si256(_mm256_and_si256(first, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(second, 16));
}

template <Kind K, int R>
INLINE void add_block_by_16(const Group<K>& group, int64_t block, const uint8_t* tile, int height, int from, const __m256* d, const __m256* dmin, __m256 (*totals)[2]) {
    const float* scales = (const float*)tile + from;
    const int32_t *sums_of_16 = (const int32_t*)(tile + 4 * height) + from, *codes = (const int32_t*)(tile + 8 * height) + 8 * from;
    const W16 first = block_scale<K, 0>(group, block), second = block_scale<K, 1>(group, block);
    __m256i sums[R][2], pairs[R][2], one[2], other[2];
    for (int h = 0; h < 2; h++) {
        one[h] = doubled(first.half[h]);
        other[h] = doubled(second.half[h]);
        const __m256i zero = _mm256_mullo_epi16(paired(first.half[h], second.half[h]), _mm256_set1_epi16(short(-zero_of(K))));
        for (int row = 0; row < R; row++)
            sums[row][h] = zero_of(K) && !is_signed(K) ? _mm256_madd_epi16(zero, _mm256_set1_epi32(sums_of_16[row])) : _mm256_setzero_si256();
    }
    add_chunks<K, R, 0, 4>(sums, pairs, group.block(block), group.high(block), codes, one);
    add_chunks<K, R, 4, 8>(sums, pairs, group.block(block), group.high(block), codes, other);
#pragma GCC unroll 4
    for (int row = 0; row < R; row++) {
        const __m256 scale = _mm256_set1_ps(scales[row]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            totals[row][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[row][h]), _mm256_mul_ps(d[h], scale), totals[row][h]);
            if constexpr (K == Kind::Q2_K) {
                const __m256i minima = paired(wide_high(group.singles + 32 * block).half[h], wide_high(group.singles + 32 * block + 16).half[h]);
                const __m256i less = _mm256_madd_epi16(minima, _mm256_set1_epi32(sums_of_16[row]));
                totals[row][h] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(less), _mm256_mul_ps(dmin[h], scale), totals[row][h]);
            }
        }
    }
}

template <Kind K, int R>
INLINE void add_block_by_32(const Group<K>& group, int64_t block, const uint8_t* tile, int height, int from, const __m256* d, const __m256* dmin, __m256 (*totals)[2]) {
    const float* scales = (const float*)tile + from;
    const int32_t *corrections = (const int32_t*)(tile + 4 * height) + from, *codes = (const int32_t*)(tile + 8 * height) + 8 * from;
    __m256i sums[R][2], pairs[R][2];
    const __m256i ones[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    for (int row = 0; row < R; row++)
        sums[row][0] = sums[row][1] = has_minima(K) || is_signed(K) ? _mm256_setzero_si256() : _mm256_set1_epi32(corrections[row]);
    add_chunks<K, R, 0, 8>(sums, pairs, group.block(block), group.high(block), codes, ones);
    __m256 scale[2] = {d[0], d[1]}, offset[2] = {dmin[0], dmin[1]};
    for (int h = 0; h < 2; h++) {
        if constexpr (is_scaled<K>()) scale[h] = _mm256_mul_ps(d[h], _mm256_cvtepi32_ps(block_scale<K, 0>(group, block).half[h]));
        if constexpr (K == Kind::Q4_K || K == Kind::Q5_K)  // `dmin` is negative
            offset[h] = _mm256_mul_ps(dmin[h], _mm256_cvtepi32_ps(wide_unsigned(group.singles + 128 + 16 * block).half[h]));
    }
#pragma GCC unroll 4
    for (int row = 0; row < R; row++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m256 factor = _mm256_mul_ps(scale[h], _mm256_set1_ps(scales[row]));
            totals[row][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[row][h]), factor, totals[row][h]);
            if (has_minima(K)) totals[row][h] = _mm256_fmadd_ps(offset[h], _mm256_set1_ps(((const float*)corrections)[row]), totals[row][h]);
        }
    }
}

// Rows first .. first + R of a tile `height` rows high.
template <Kind K, int R>
void multiply_ggml_rows(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, int first, float* result) {
    constexpr Form FORM = form_of(K);
    __m256 totals[R][2];
    for (int row = 0; row < R; row++) totals[row][0] = totals[row][1] = _mm256_setzero_ps();
    for (int64_t index = 0; index < matrix.groups; index++, panel += PANEL_ROWS * FORM.bytes()) {
        const Group<K> group(panel);
        __m256 d[2], dmin[2];
        for (int h = 0; h < 2; h++) {
            d[h] = group_scale<K>(group, h);
            dmin[h] = FORM.halves > 1 ? half_floats(group.halves + 32, h) : _mm256_setzero_ps();
            if (K == Kind::Q4_K || K == Kind::Q5_K) dmin[h] = _mm256_sub_ps(_mm256_setzero_ps(), dmin[h]);
        }
        for (int64_t block = 0; block < FORM.blocks; block++, tile += height * TILE_BYTES) {
            if (R >= PREFETCHED_ROWS && first == 0)
                for (int word = 0; word < FORM.block_words(); word++) __builtin_prefetch(group.block(block) + 64 * word + PREFETCH_BYTES);
            if constexpr (is_by_16(K)) add_block_by_16<K, R>(group, block, tile, height, first, d, dmin, totals);
            else add_block_by_32<K, R>(group, block, tile, height, first, d, dmin, totals);
        }
    }
    for (int row = 0; row < R; row++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(result + PANEL_ROWS * (first + row) + 8 * h, totals[row][h]);
}

template <Kind K> void multiply_ggml(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    int row = 0;
    for (; row + 4 <= height; row += 4) multiply_ggml_rows<K, 4>(matrix, panel, tile, height, row, sums);
    // Three are two and one: compiling them for 15 types would take longer than they do.
    for (; row + 2 <= height; row += 2) multiply_ggml_rows<K, 2>(matrix, panel, tile, height, row, sums);
    if (row < height) multiply_ggml_rows<K, 1>(matrix, panel, tile, height, row, sums);
}

}  // namespace avx2
}  // namespace

void multiply_ggml_avx2(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    static constexpr MultiplyPacked EACH[] = {WINDLASS_EACH_GGML(avx2::multiply_ggml)};
    EACH[int64_t(matrix.kind) - int64_t(Kind::Q2_K)](matrix, panel, tile, height, sums);
}

}  // namespace windlass

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
