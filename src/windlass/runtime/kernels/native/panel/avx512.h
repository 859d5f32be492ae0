// Packed products with AVX-512 and VNNI: 16 outputs are the lanes of a vector, and four inputs are one instruction.

namespace windlass {
namespace {
namespace vnni512 {

// Scales of the group, and what is added per unit of the activations' sum.
INLINE void group_scales(const Matrix& matrix, const uint8_t* at, __m512* scale, __m512* offset) {
    auto widened = [&](const uint8_t* from) {
        if (matrix.scales == ScaleType::FLOAT32) return _mm512_loadu_ps(from);
        const __m256i half = _mm256_loadu_si256((const __m256i*)from);
        return matrix.scales == ScaleType::FLOAT16 ? _mm512_cvtph_ps(half)
                                                   : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    };
    *scale = widened(at);
    if (matrix.kind == Kind::INT4_MINIMA) *offset = widened(at + matrix.scale_bytes);
    if (matrix.kind == Kind::INT4_ZEROS) {
        const __m512 zeros = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(at + matrix.scale_bytes))));
        *offset = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), zeros), *scale);
    }
}

template <int R> INLINE void add_chunk(__m512i* sums, __m512i weights, const int32_t* codes) {
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) sums[row] = _mm512_dpbusd_epi32(sums[row], weights, _mm512_set1_epi32(codes[row * 8]));
}

template <int R, int BITS> INLINE void add_block(__m512i* sums, const uint8_t* weights, const int32_t* codes) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int chunk = 0; chunk < BITS; chunk++) {
        const __m512i loaded = _mm512_loadu_si512(weights + 64 * chunk);
        if (R >= PREFETCHED_ROWS) __builtin_prefetch(weights + 64 * chunk + PREFETCH_BYTES);
        if (BITS == 8) {
            add_chunk<R>(sums, loaded, codes + chunk);
        } else {
            add_chunk<R>(sums, _mm512_and_si512(loaded, low), codes + 2 * chunk);
            add_chunk<R>(sums, _mm512_and_si512(_mm512_srli_epi16(loaded, 4), low), codes + 2 * chunk + 1);
        }
    }
}

template <int R, int BITS, bool OFFSETS>
void multiply_rows(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, float* result) {
    __m512 totals[R];
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) totals[row] = _mm512_setzero_ps();
    const int64_t groups = matrix.groups, blocks = matrix.blocks, step = matrix.group_bytes;
    for (int64_t group = 0; group < groups; group++, panel += step) {
        __m512 scale, offset;
        group_scales(matrix, panel + matrix.codes_bytes, &scale, &offset);
        for (int64_t block = 0; block < blocks; block++, tile += R * TILE_BYTES) {
            const float* scales = (const float*)tile;
            const int32_t* corrections = (const int32_t*)(tile + 4 * R);
            __m512i sums[R];
#pragma GCC unroll 16
            for (int row = 0; row < R; row++) sums[row] = OFFSETS ? _mm512_setzero_si512() : _mm512_set1_epi32(corrections[row]);
            add_block<R, BITS>(sums, panel + block * BITS * 64, (const int32_t*)(tile + 8 * R));
#pragma GCC unroll 16
            for (int row = 0; row < R; row++) {
                const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(scales[row]));
                totals[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row]), factor, totals[row]);
                if (OFFSETS) totals[row] = _mm512_fmadd_ps(offset, _mm512_set1_ps(((const float*)corrections)[row]), totals[row]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < R; row++) _mm512_storeu_ps(result + PANEL_ROWS * row, totals[row]);
}

template <int BITS, bool OFFSETS>
void multiply_kind(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    switch (height) {
        case 1: return multiply_rows<1, BITS, OFFSETS>(matrix, panel, tile, sums);
        case 2: return multiply_rows<2, BITS, OFFSETS>(matrix, panel, tile, sums);
        case 3: return multiply_rows<3, BITS, OFFSETS>(matrix, panel, tile, sums);
        case 4: return multiply_rows<4, BITS, OFFSETS>(matrix, panel, tile, sums);
        case 6: return multiply_rows<6, BITS, OFFSETS>(matrix, panel, tile, sums);
        case 8: return multiply_rows<8, BITS, OFFSETS>(matrix, panel, tile, sums);
        case 10: return multiply_rows<10, BITS, OFFSETS>(matrix, panel, tile, sums);
        default: return multiply_rows<12, BITS, OFFSETS>(matrix, panel, tile, sums);
    }
}

void multiply(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    if (is_ggml(matrix.kind)) return multiply_ggml_avx512(matrix, panel, tile, height, sums);
    if (matrix.kind == Kind::INT8) return multiply_kind<8, false>(matrix, panel, tile, height, sums);
    if (matrix.kind == Kind::INT4) return multiply_kind<4, false>(matrix, panel, tile, height, sums);
    return multiply_kind<4, true>(matrix, panel, tile, height, sums);
}

}  // namespace vnni512
}  // namespace
}  // namespace windlass
