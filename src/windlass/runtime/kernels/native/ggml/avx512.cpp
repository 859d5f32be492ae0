// Products with ggml's block types, AVX-512 and VNNI. Integers are exact; floats are added as panel.h says.
#if defined(__x86_64__)
#include <immintrin.h>

#include "ggml/product.h"

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif

namespace windlass {
namespace {
namespace vnni512 {

// 64 bytes, with operators.
typedef uint64_t V __attribute__((vector_size(64)));
typedef __m512i W16;  // 16 integers

INLINE V load_bytes(const uint8_t* from) { return (V)_mm512_loadu_si512(from); }
INLINE V every(int byte) { return (V)_mm512_set1_epi8(char(byte)); }
INLINE V every_word(int word) { return (V)_mm512_set1_epi32(word); }
template <int N> INLINE V shifted_up(V x) { return (V)_mm512_slli_epi16((__m512i)x, N); }
template <int N> INLINE V shifted_down(V x) { return (V)_mm512_srli_epi16((__m512i)x, N); }
template <int N> INLINE V up_words(V x) { return (V)_mm512_slli_epi32((__m512i)x, N); }
template <int N> INLINE V down_words(V x) { return (V)_mm512_srli_epi32((__m512i)x, N); }
INLINE V wide_bytes(const uint8_t* from) { return (V)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
// Codes are unsigned here: plus 128.
INLINE V looked_up(const int8_t* values, V index) {
    const __m128i table = _mm_xor_si128(_mm_loadu_si128((const __m128i*)values), _mm_set1_epi8(-128));
    return (V)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)index);
}
template <int SIZE> INLINE V gathered(const uint32_t* grid, V index) { return (V)_mm512_i32gather_epi32((__m512i)index, grid, SIZE); }
INLINE V with_signs(V magnitudes, V signs) {
    const __m512i bits = _mm512_set1_epi32(0x08040201);
    // The lowest byte of each word to all four.
    const __m512i spread = _mm512_shuffle_epi8((__m512i)signs, _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c)));
    const __mmask64 negative = _mm512_test_epi8_mask(spread, bits);
    const __m512i biased = _mm512_or_si512((__m512i)magnitudes, _mm512_set1_epi8(-128));
    return (V)_mm512_mask_sub_epi8(biased, negative, _mm512_set1_epi8(-128), (__m512i)magnitudes);
}
INLINE W16 wide_unsigned(const uint8_t* from) { return (W16)wide_bytes(from); }
INLINE W16 wide_signed(const uint8_t* from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
INLINE W16 wide_low(const uint8_t* from) { return _mm512_and_si512(wide_unsigned(from), _mm512_set1_epi32(15)); }
INLINE W16 wide_high(const uint8_t* from) { return _mm512_srli_epi32(wide_unsigned(from), 4); }
INLINE W16 top_four(const uint8_t* words) { return _mm512_srli_epi32(_mm512_loadu_si512(words), 28); }
INLINE W16 twice_plus_one(W16 x) { return _mm512_add_epi32(_mm512_add_epi32(x, x), _mm512_set1_epi32(1)); }

#include "ggml/codes.h"

INLINE __m512 half_floats(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

template <Kind K> INLINE __m512 group_scale(const Group<K>& group) {
    if constexpr (K == Kind::MXFP4) {
        const __m512i exponent = wide_unsigned(group.singles);
        const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponent);
        const __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(1)), 23);
        return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, _mm512_cmplt_epi32_mask(exponent, _mm512_set1_epi32(2)), small));
    } else {
        const __m512 d = half_floats(group.halves);
        return unit<K>() == 1.0f ? d : _mm512_mul_ps(d, _mm512_set1_ps(unit<K>()));
    }
}

template <int R> INLINE void add_chunk(__m512i* sums, __m512i weights, const int32_t* codes) {
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) sums[row] = _mm512_dpbusd_epi32(sums[row], weights, _mm512_set1_epi32(codes[row * 8]));
}

template <Kind K, int R, int C, int END> INLINE void add_chunks(__m512i* sums, const uint8_t* words, const uint8_t* high, const int32_t* codes) {
    if constexpr (C < END) {
        add_chunk<R>(sums, (__m512i)chunk_codes<K, C>(words, high), codes + C);
        add_chunks<K, R, C + 1, END>(sums, words, high, codes);
    }
}

// Both 16-bit halves of each lane: two scales.
INLINE __m512i paired(__m512i first, __m512i second) {
    return _mm512_or_si512(_mm512_and_si512(first, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(second, 16));
}

template <Kind K, int R> INLINE void add_block_by_16(const Group<K>& group, int64_t block, const uint8_t* tile, __m512 d, __m512 dmin, __m512* totals) {
    const float* scales = (const float*)tile;
    const int32_t *pairs = (const int32_t*)(tile + 4 * R), *codes = (const int32_t*)(tile + 8 * R);
    const uint8_t *words = group.block(block), *high = group.high(block);
    const __m512i first = block_scale<K, 0>(group, block), second = block_scale<K, 1>(group, block);
    // Of codes that are stored plus a zero: as many times the sums of 16 activations are taken away.
    const __m512i zero = _mm512_mullo_epi16(paired(first, second), _mm512_set1_epi16(short(-zero_of(K))));
    __m512i sums[R], others[R];
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) sums[row] = others[row] = _mm512_setzero_si512();
    add_chunks<K, R, 0, 4>(sums, words, high, codes);
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) sums[row] = _mm512_mullo_epi32(sums[row], first);
    add_chunks<K, R, 4, 8>(others, words, high, codes);
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) {
        sums[row] = _mm512_add_epi32(sums[row], _mm512_mullo_epi32(others[row], second));
        const __m512i pair = _mm512_set1_epi32(pairs[row]);
        if (zero_of(K)) sums[row] = _mm512_dpwssd_epi32(sums[row], zero, pair);
        const __m512 scale = _mm512_set1_ps(scales[row]);
        totals[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row]), _mm512_mul_ps(d, scale), totals[row]);
        if constexpr (K == Kind::Q2_K) {
            const __m512i minima = paired(wide_high(group.singles + 32 * block), wide_high(group.singles + 32 * block + 16));
            const __m512i less = _mm512_dpwssd_epi32(_mm512_setzero_si512(), minima, pair);
            totals[row] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(less), _mm512_mul_ps(dmin, scale), totals[row]);
        }
    }
}

template <Kind K, int R> INLINE void add_block_by_32(const Group<K>& group, int64_t block, const uint8_t* tile, __m512 d, __m512 dmin, __m512* totals) {
    const float* scales = (const float*)tile;
    const int32_t *corrections = (const int32_t*)(tile + 4 * R), *codes = (const int32_t*)(tile + 8 * R);
    __m512i sums[R];
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) sums[row] = has_minima(K) ? _mm512_setzero_si512() : _mm512_set1_epi32(corrections[row]);
    add_chunks<K, R, 0, 8>(sums, group.block(block), group.high(block), codes);
    __m512 scale = d, offset = dmin;
    if constexpr (is_scaled<K>()) scale = _mm512_mul_ps(d, _mm512_cvtepi32_ps(block_scale<K, 0>(group, block)));
    if constexpr (K == Kind::Q4_K || K == Kind::Q5_K)  // `dmin` is negative
        offset = _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(wide_unsigned(group.singles + 128 + 16 * block)));
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) {
        totals[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row]), _mm512_mul_ps(scale, _mm512_set1_ps(scales[row])), totals[row]);
        if (has_minima(K)) totals[row] = _mm512_fmadd_ps(offset, _mm512_set1_ps(((const float*)corrections)[row]), totals[row]);
    }
}

template <Kind K, int R> void multiply_ggml_rows(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, float* result) {
    constexpr Form FORM = form_of(K);
    __m512 totals[R];
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) totals[row] = _mm512_setzero_ps();
    for (int64_t index = 0; index < matrix.groups; index++, panel += PANEL_ROWS * FORM.bytes()) {
        const Group<K> group(panel);
        const __m512 d = group_scale<K>(group);
        __m512 dmin = _mm512_setzero_ps();
        if constexpr (FORM.halves > 1) dmin = half_floats(group.halves + 32);
        if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) dmin = _mm512_sub_ps(_mm512_setzero_ps(), dmin);
        for (int64_t block = 0; block < FORM.blocks; block++, tile += R * TILE_BYTES) {
            if (R >= PREFETCHED_ROWS)
#pragma GCC unroll 8
                for (int word = 0; word < FORM.block_words(); word++) __builtin_prefetch(group.block(block) + 64 * word + PREFETCH_BYTES);
            if constexpr (is_by_16(K)) add_block_by_16<K, R>(group, block, tile, d, dmin, totals);
            else add_block_by_32<K, R>(group, block, tile, d, dmin, totals);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) _mm512_storeu_ps(result + PANEL_ROWS * row, totals[row]);
}

template <Kind K> void multiply_ggml(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    switch (height) {
        case 1: return multiply_ggml_rows<K, 1>(matrix, panel, tile, sums);
        case 2: return multiply_ggml_rows<K, 2>(matrix, panel, tile, sums);
        case 3: return multiply_ggml_rows<K, 3>(matrix, panel, tile, sums);
        case 4: return multiply_ggml_rows<K, 4>(matrix, panel, tile, sums);
        case 6: return multiply_ggml_rows<K, 6>(matrix, panel, tile, sums);
        case 8: return multiply_ggml_rows<K, 8>(matrix, panel, tile, sums);
        case 10: return multiply_ggml_rows<K, 10>(matrix, panel, tile, sums);
        default: return multiply_ggml_rows<K, 12>(matrix, panel, tile, sums);
    }
}

}  // namespace vnni512
}  // namespace

void multiply_ggml_avx512(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    static constexpr MultiplyPacked EACH[] = {WINDLASS_EACH_GGML(vnni512::multiply_ggml)};
    EACH[int64_t(matrix.kind) - int64_t(Kind::Q2_K)](matrix, panel, tile, height, sums);
}

}  // namespace windlass

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
