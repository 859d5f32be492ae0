// Packed products with AVX2 and no VNNI: half a panel, 8 outputs, in a vector; bytes are multiplied in pairs that add up in 16 bits.

namespace windlass {
namespace {
namespace avx2 {

// Half of the 16 numbers at `from`.
INLINE __m256 widened(const Matrix& matrix, const uint8_t* from, int half_index) {
    if (matrix.scales == ScaleType::FLOAT32) return _mm256_loadu_ps((const float*)from + 8 * half_index);
    const __m128i half = _mm_loadu_si128((const __m128i*)from + half_index);
    return matrix.scales == ScaleType::FLOAT16 ? _mm256_cvtph_ps(half)
                                               : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE void group_scales(const Matrix& matrix, const uint8_t* at, __m256* scale, __m256* offset) {
    for (int half = 0; half < 2; half++) {
        scale[half] = widened(matrix, at, half);
        if (matrix.kind == Kind::INT4_MINIMA) offset[half] = widened(matrix, at + matrix.scale_bytes, half);
        if (matrix.kind == Kind::INT4_ZEROS) {
            const __m128i zeros = _mm_loadl_epi64((const __m128i*)(at + matrix.scale_bytes + 8 * half));
            offset[half] = _mm256_mul_ps(
                _mm256_sub_ps(_mm256_setzero_ps(), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(zeros))), scale[half]);
        }
    }
}

// Sums are made in this order: left alone, the compiler regroups them and runs out of registers.
#define WINDLASS_IN_ORDER(x) asm("" : "+x"(x))

// Four inputs of each row by both halves of a panel.
template <int R, bool FIRST> INLINE void add_pairs(__m256i (*pairs)[2], __m256i first, __m256i second, const int32_t* codes) {
#pragma GCC unroll 4
    for (int row = 0; row < R; row++) {
        const __m256i code = _mm256_set1_epi32(codes[row * 8]);
        const __m256i one = _mm256_maddubs_epi16(first, code), other = _mm256_maddubs_epi16(second, code);
        pairs[row][0] = FIRST ? one : _mm256_add_epi16(pairs[row][0], one);
        pairs[row][1] = FIRST ? other : _mm256_add_epi16(pairs[row][1], other);
        WINDLASS_IN_ORDER(pairs[row][0]);
        WINDLASS_IN_ORDER(pairs[row][1]);
    }
}

// 15 * 127 * 2 a pair, 8 pairs to a block: 30,480 fits in 16 bits.
template <int R> INLINE void add_block_int4(__m256i (*sums)[2], const uint8_t* weights, const int32_t* codes) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i pairs[R][2];
#pragma GCC unroll 4
    for (int chunk = 0; chunk < 4; chunk++) {
        const __m256i first = _mm256_loadu_si256((const __m256i*)(weights + 64 * chunk));
        const __m256i second = _mm256_loadu_si256((const __m256i*)(weights + 64 * chunk + 32));
        const __m256i first_low = _mm256_and_si256(first, low), second_low = _mm256_and_si256(second, low);
        if (chunk == 0) add_pairs<R, true>(pairs, first_low, second_low, codes);
        else add_pairs<R, false>(pairs, first_low, second_low, codes + 2 * chunk);
        add_pairs<R, false>(pairs, _mm256_and_si256(_mm256_srli_epi16(first, 4), low),
                            _mm256_and_si256(_mm256_srli_epi16(second, 4), low), codes + 2 * chunk + 1);
    }
#pragma GCC unroll 4
    for (int row = 0; row < R; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            sums[row][half] = _mm256_add_epi32(sums[row][half], _mm256_madd_epi16(pairs[row][half], ones));
}

// Signed bytes: |weight| times the activation with the weight's sign; 128 * 127 * 2 fits in 16 bits, once.
template <int R> INLINE void add_block_int8(__m256i (*sums)[2], const uint8_t* weights, const int32_t* codes) {
    const __m256i top = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int chunk = 0; chunk < 8; chunk++) {
        __m256i weight[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            weight[half] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(weights + 64 * chunk + 32 * half)), top);
#pragma GCC unroll 4
        for (int row = 0; row < R; row++) {
            const __m256i code = _mm256_set1_epi32(codes[row * 8 + chunk]);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight[half]), _mm256_sign_epi8(code, weight[half]));
                sums[row][half] = _mm256_add_epi32(sums[row][half], _mm256_madd_epi16(pairs, ones));
                WINDLASS_IN_ORDER(sums[row][half]);
            }
        }
    }
}

// Rows first .. first + R of a tile `height` rows high.
template <int R, int BITS, bool OFFSETS>
void multiply_rows(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, int first, float* result) {
    __m256 totals[R][2];
    for (int row = 0; row < R; row++) totals[row][0] = totals[row][1] = _mm256_setzero_ps();
    const int64_t groups = matrix.groups, blocks = matrix.blocks, step = matrix.group_bytes;
    for (int64_t group = 0; group < groups; group++, panel += step) {
        __m256 scale[2], offset[2];
        group_scales(matrix, panel + matrix.codes_bytes, scale, offset);
        for (int64_t block = 0; block < blocks; block++, tile += height * TILE_BYTES) {
            const float* scales = (const float*)tile + first;
            const int32_t* corrections = (const int32_t*)(tile + 4 * height) + first;
            const int32_t* codes = (const int32_t*)(tile + 8 * height) + 8 * first;
            __m256i sums[R][2];
#pragma GCC unroll 4
            for (int row = 0; row < R; row++)
                sums[row][0] = sums[row][1] = BITS == 8 || OFFSETS ? _mm256_setzero_si256() : _mm256_set1_epi32(corrections[row]);
            if (R >= PREFETCHED_ROWS && first == 0)
#pragma GCC unroll 8
                for (int chunk = 0; chunk < BITS; chunk++) __builtin_prefetch(panel + (block * BITS + chunk) * 64 + PREFETCH_BYTES);
            if (BITS == 8) add_block_int8<R>(sums, panel + block * 512, codes);
            else add_block_int4<R>(sums, panel + block * 256, codes);
#pragma GCC unroll 4
            for (int row = 0; row < R; row++) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    __m256* total = &totals[row][half];
                    const __m256 factor = _mm256_mul_ps(scale[half], _mm256_set1_ps(scales[row]));
                    *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[row][half]), factor, *total);
                    if (OFFSETS) *total = _mm256_fmadd_ps(offset[half], _mm256_set1_ps(((const float*)corrections)[row]), *total);
                }
            }
        }
    }
    for (int row = 0; row < R; row++)
        for (int half = 0; half < 2; half++) _mm256_storeu_ps(result + PANEL_ROWS * (first + row) + 8 * half, totals[row][half]);
}

template <int BITS, bool OFFSETS>
void multiply_kind(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    int row = 0;
    for (; row + 4 <= height; row += 4) multiply_rows<4, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
    if (height - row == 3) multiply_rows<3, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
    if (height - row == 2) multiply_rows<2, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
    if (height - row == 1) multiply_rows<1, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
}

void multiply(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    if (is_ggml(matrix.kind)) return multiply_ggml_avx2(matrix, panel, tile, height, sums);
    if (matrix.kind == Kind::INT8) return multiply_kind<8, false>(matrix, panel, tile, height, sums);
    if (matrix.kind == Kind::INT4) return multiply_kind<4, false>(matrix, panel, tile, height, sums);
    return multiply_kind<4, true>(matrix, panel, tile, height, sums);
}

#undef WINDLASS_IN_ORDER

}  // namespace avx2
}  // namespace
}  // namespace windlass
