// Rows of activations to int8 tiles. Included once per instruction set, after simd/lanes.h.
//
// scale = largest magnitude of 32 inputs * (1 / 127); code = x * (127 / largest), rounded to nearest even: an input is off by at most half
// a scale, 1/254 of the largest in its block. What is not finite makes its block's scale so, and with it the result.
#include "panel/panel.h"

// Keeps a product from being fused with the sum that follows, which would round otherwise on some machines.
#if defined(__x86_64__)
#define WINDLASS_ROUNDED(x) asm("" : "+x"(x))
#elif defined(__aarch64__)
#define WINDLASS_ROUNDED(x) asm("" : "+w"(x))
#else
#define WINDLASS_ROUNDED(x)
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define WINDLASS_FOUR(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define WINDLASS_FOUR(x, ...) __builtin_shuffle(x, Four{__VA_ARGS__})
#endif

namespace windlass {
namespace {
namespace WINDLASS_ISA {

typedef int32_t Four __attribute__((vector_size(16)));
// The codes of inputs that are no numbers are any bits, and their sums may wrap: only those without a sign are allowed to.
typedef uint32_t Wrapping __attribute__((vector_size(4 * W)));
typedef uint32_t FourWrapping __attribute__((vector_size(16)));
INLINE Four wrapped_sum(Four a, Four b) { return (Four)((FourWrapping)a + (FourWrapping)b); }

// All lanes to one by `join`, in short vectors as soon as can be: wide ones take longer.
template <class Join> INLINE int32_t joined(I lanes, Join join) {
    Four parts[W / 4];
    std::memcpy(parts, &lanes, sizeof lanes);
    Four all = parts[0];
#pragma GCC unroll 4
    for (int part = 1; part < W / 4; part++) all = join(all, parts[part]);
    all = join(all, WINDLASS_FOUR(all, 2, 3, 0, 1));
    return join(all, WINDLASS_FOUR(all, 1, 0, 3, 2))[0];
}

// 32 integers of -127 .. 127 as bytes. Compilers take the general form apart.
INLINE void store_bytes(const I* from, int8_t* to) {
#if WINDLASS_LANES == 16 && defined(__x86_64__)
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)to + i, _mm512_cvtepi32_epi8((__m512i)from[i]));
#elif WINDLASS_LANES == 8 && defined(__x86_64__)
    const __m256i low = _mm256_packs_epi32((__m256i)from[0], (__m256i)from[1]);
    const __m256i high = _mm256_packs_epi32((__m256i)from[2], (__m256i)from[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#elif defined(__x86_64__)
    for (int i = 0; i < 2; i++) {
        const __m128i low = _mm_packs_epi32((__m128i)from[4 * i], (__m128i)from[4 * i + 1]);
        const __m128i high = _mm_packs_epi32((__m128i)from[4 * i + 2], (__m128i)from[4 * i + 3]);
        _mm_storeu_si128((__m128i*)to + i, _mm_packs_epi16(low, high));
    }
#elif defined(__aarch64__)
    for (int i = 0; i < 4; i++) {
        const int16x4_t low = vmovn_s32((int32x4_t)from[2 * i]), high = vmovn_s32((int32x4_t)from[2 * i + 1]);
        vst1_s8(to + 8 * i, vmovn_s16(vcombine_s16(low, high)));
    }
#else
    for (int i = 0; i < BLOCK; i++) to[i] = int8_t(from[i / W][i % W]);
#endif
}

// One block of row `row` of a tile.
INLINE void quantize_block(const float* x, Correction correction, uint8_t* block, int height, int row) {
    constexpr int VECTORS = BLOCK / W;
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction, and the integer in the lowest bits
    constexpr int32_t MAGIC_BITS = 0x4b400000;
    F values[VECTORS];
    I most{};
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        values[i] = load(x + i * W);
        const I magnitude = (I)values[i] & 0x7fffffff;
        most = most > magnitude ? most : magnitude;
    }
    // Bits of magnitudes are ordered as the numbers are; what is not a number lies above infinity, and counts as that.
    const int32_t bits = std::min(joined(most, [](Four a, Four b) { return a > b ? a : b; }), 0x7f800000);
    float amax;
    std::memcpy(&amax, &bits, 4);
    // Below this the inverse overflows; such a block becomes zero.
    const float inverse = amax < 1e-35f ? 0.0f : 127.0f / amax, scale = amax < 1e-35f ? 0.0f : amax * (1.0f / 127.0f);
    Wrapping total{};
    I integers[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        F scaled = values[i] * inverse;
        WINDLASS_ROUNDED(scaled);
        integers[i] = (I)(scaled + MAGIC) - MAGIC_BITS;
        total += (Wrapping)integers[i];
    }
    store_bytes(integers, (int8_t*)block + 8 * height + BLOCK * row);
    const int32_t sum = joined((I)total, wrapped_sum);
    ((float*)block)[row] = scale;
    if (correction.is_pair) {
        Wrapping half{};
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS / 2; i++) half += (Wrapping)integers[i];
        const uint32_t first = joined((I)half, wrapped_sum);
        ((int32_t*)block)[height + row] = int32_t((uint32_t(sum) - first) << 16 | (first & 0xffff));
    } else if (correction.is_sum) ((float*)block)[height + row] = scale * float(sum);
    else ((int32_t*)block)[height + row] = int32_t(uint32_t(-correction.times) * uint32_t(sum));
}

// Blocks first .. last of a row of `x`. `rows`: how many rows the tile has; the one below the last is cleared where it is empty, since
// what happens to be there may be numbers that processors are slow with.
inline void quantize_row(const float* x, int64_t first, int64_t last, Correction correction, uint8_t* tile, int height, int rows, int row) {
    for (int64_t index = first; index < last; index++) {
        uint8_t* block = tile + index * height * TILE_BYTES;
        quantize_block(x + index * BLOCK, correction, block, height, row);
        if (row == rows - 1 && rows < height) ((float*)block)[rows] = ((float*)block)[height + rows] = 0.0f;
    }
}

#undef WINDLASS_ROUNDED
#undef WINDLASS_FOUR

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
