// Vectors of W floats and what operations do with them. Included by lanes.h once per instruction set.

namespace windlass {
namespace {
namespace WINDLASS_ISA {

constexpr int W = WINDLASS_LANES;
typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));

INLINE F splat(float value) { return value - F{}; }
INLINE I splat_int(int32_t value) { return value - I{}; }
// Where b is not a number, so is the result: bounds go first.
INLINE F minimum(F a, F b) { return a < b ? a : b; }
INLINE F maximum(F a, F b) { return a > b ? a : b; }

// a * b + c, rounded once where the machine can. Said outright where bits must not depend on how the compiler reads an expression.
INLINE F multiply_add(F a, F b, F c) {
#if WINDLASS_LANES == 16
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WINDLASS_LANES == 8
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE float multiply_add(float a, float b, float c) {
#if WINDLASS_LANES > 4 || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// --- memory -----------------------------------------------------------------------------------------------------------

INLINE F load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }

// Intrinsics, because GCC 12 converts generic vectors of 16 in two halves.
INLINE I widened(const uint16_t* from) {
#if WINDLASS_LANES == 16
    return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif WINDLASS_LANES == 8
    return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    H bits;
    std::memcpy(&bits, from, sizeof bits);
    return __builtin_convertvector(bits, I);
#endif
}
INLINE I widened(const uint8_t* from) {
#if WINDLASS_LANES == 16
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif WINDLASS_LANES == 8
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    return I{from[0], from[1], from[2], from[3]};
#endif
}
INLINE void narrow(uint16_t* to, I low_bits) {
#if WINDLASS_LANES == 16
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)low_bits));
#else
    H bits = __builtin_convertvector(low_bits & 0xffff, H);
    std::memcpy(to, &bits, sizeof bits);
#endif
}
INLINE F load(const Bf16* from) { return (F)(widened(&from->bits) << 16); }

// Subnormal halves are made by a subtraction (2^-14 * 1.m - 2^-14), which never touches a subnormal float: those are slow.
INLINE F load(const Fp16* from) {
    I half = widened(&from->bits);
    I shifted = (half & 0x7fff) << 13;
    I exponent = shifted & 0x0f800000;
    I normal = shifted + (112 << 23);
    I special = exponent == 0x0f800000 ? normal + (112 << 23) : normal;
    F subnormal = (F)(normal + (1 << 23)) - splat(6.103515625e-05f);
    I bits = exponent == 0 ? (I)subnormal : special;
    return (F)(bits | ((half & 0x8000) << 16));
}

// Subnormals likewise.
INLINE F load(const E4m3* from) {
    I code = widened(&from->bits);
    I shifted = (code & 0x7f) << 20;
    I normal = shifted + (120 << 23);
    F subnormal = (F)(normal + (1 << 23)) - splat(0.015625f);
    I bits = shifted < 0x00800000 ? (I)subnormal : normal;
    bits = shifted == 0x07f00000 ? splat_int(0x7fc00000) : bits;
    return (F)(bits | ((code & 0x80) << 24));
}

// To nearest, ties to even; what is not a number stays so.
INLINE I bf16_bits(F x) {
    I bits = (I)x;
    I rounded = (bits + (0x7fff + ((bits >> 16) & 1))) >> 16;
    return x == x ? rounded : splat_int(0x7fc0);
}
INLINE void store(Bf16* to, F x) { narrow(&to->bits, bf16_bits(x)); }

// Into the second level of caches, where there is room for more than is in use. (Zen 4 makes nothing of fetching to the first.)
INLINE void fetch(const void* from, int64_t bytes) {
    for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(static_cast<const char*>(from) + offset, 0, 2);
}

// The first `count` (fewer than W) elements; the others read as zeros and are not written.
template <class T> INLINE F load_part(const T* from, int64_t count) {
    T part[W] = {};
    for (int64_t i = 0; i < count; i++) part[i] = from[i];
    return load(part);
}
template <class T> INLINE void store_part(T* to, F x, int64_t count) {
    T part[W];
    store(part, x);
    for (int64_t i = 0; i < count; i++) to[i] = part[i];
}

INLINE float number(const float* from) { return *from; }
INLINE float number(const Bf16* from) {
    uint32_t bits = uint32_t(from->bits) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
INLINE float number(const E4m3* from) { return load_part(from, 1)[0]; }
INLINE float number(const Fp16* from) { return load_part(from, 1)[0]; }

// --- across lanes -----------------------------------------------------------------------------------------------------

#if WINDLASS_LANES == 16
#define WINDLASS_SWAP_8(x) SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define WINDLASS_SWAP_4(x) SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define WINDLASS_SWAP_2(x) SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define WINDLASS_SWAP_1(x) SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define WINDLASS_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define WINDLASS_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define WINDLASS_IOTA 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define WINDLASS_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define WINDLASS_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif WINDLASS_LANES == 8
#define WINDLASS_SWAP_4(x) SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#define WINDLASS_SWAP_2(x) SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5)
#define WINDLASS_SWAP_1(x) SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6)
#define WINDLASS_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define WINDLASS_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define WINDLASS_IOTA 0, 1, 2, 3, 4, 5, 6, 7
#define WINDLASS_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define WINDLASS_ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define WINDLASS_SWAP_2(x) SHUFFLE(x, x, 2, 3, 0, 1)
#define WINDLASS_SWAP_1(x) SHUFFLE(x, x, 1, 0, 3, 2)
#define WINDLASS_LOW 0, 4, 1, 5
#define WINDLASS_HIGH 2, 6, 3, 7
#define WINDLASS_IOTA 0, 1, 2, 3
#define WINDLASS_EVEN 0, 2, 4, 6
#define WINDLASS_ODD 1, 3, 5, 7
#endif

INLINE float sum(F x) {
#if WINDLASS_LANES == 16
    x += WINDLASS_SWAP_8(x);
#endif
#if WINDLASS_LANES >= 8
    x += WINDLASS_SWAP_4(x);
#endif
    x += WINDLASS_SWAP_2(x);
    x += WINDLASS_SWAP_1(x);
    return x[0];
}

INLINE float largest(F x) {
#if WINDLASS_LANES == 16
    x = maximum(x, WINDLASS_SWAP_8(x));
#endif
#if WINDLASS_LANES >= 8
    x = maximum(x, WINDLASS_SWAP_4(x));
#endif
    x = maximum(x, WINDLASS_SWAP_2(x));
    x = maximum(x, WINDLASS_SWAP_1(x));
    return x[0];
}

// Row i, column j of W rows to row j, column i: perfect shuffles, log2(W) times.
INLINE void transpose(F* rows) {
#pragma GCC unroll 4
    for (int stage = 1; stage < W; stage *= 2) {
        F next[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; i++) {
            next[2 * i] = SHUFFLE(rows[i], rows[i + W / 2], WINDLASS_LOW);
            next[2 * i + 1] = SHUFFLE(rows[i], rows[i + W / 2], WINDLASS_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) rows[i] = next[i];
    }
}

INLINE I iota() { return I{WINDLASS_IOTA}; }

// 2 W numbers that lie as pairs to first and second of each pair, and back.
INLINE void part(F* a, F* b) {
    F even = SHUFFLE(*a, *b, WINDLASS_EVEN);
    *b = SHUFFLE(*a, *b, WINDLASS_ODD);
    *a = even;
}
INLINE void pair(F* a, F* b) {
    F low = SHUFFLE(*a, *b, WINDLASS_LOW);
    *b = SHUFFLE(*a, *b, WINDLASS_HIGH);
    *a = low;
}

#undef WINDLASS_SWAP_8
#undef WINDLASS_SWAP_4
#undef WINDLASS_SWAP_2
#undef WINDLASS_SWAP_1
#undef WINDLASS_LOW
#undef WINDLASS_HIGH
#undef WINDLASS_IOTA
#undef WINDLASS_EVEN
#undef WINDLASS_ODD

// --- functions --------------------------------------------------------------------------------------------------------

// e^x within 2 ulp, and nothing below e^-87.3 (nor of minus infinity): a power of two times a polynomial of what is left (Cephes).
#if WINDLASS_LANES == 16
INLINE F exponential(F x) {
    x = maximum(splat(-110.0f), minimum(splat(89.0f), x));
    const __m512 wide = (__m512)x, log2e = _mm512_set1_ps(1.44269502f);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(wide, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F rest = (F)_mm512_fmadd_ps(wide, _mm512_set1_ps(1.92596299e-8f), _mm512_fmsub_ps(wide, log2e, n));
    F y = splat(1.535336188319500e-4f);
    y = multiply_add(y, rest, splat(1.339887440266574e-3f));
    y = multiply_add(y, rest, splat(9.618437357674640e-3f));
    y = multiply_add(y, rest, splat(5.550332471162809e-2f));
    y = multiply_add(y, rest, splat(2.402264791363012e-1f));
    y = multiply_add(y, rest, splat(6.931472028550421e-1f));
    y = multiply_add(y, rest, splat(1.0f));
    return (F)_mm512_scalef_ps((__m512)y, n);
}
#else
INLINE F exponential(F x) {
    const F kept = maximum(splat(-87.3f), minimum(splat(88.72f), x));
    // Adding 1.5 * 2^23 leaves no bits for a fraction, and the integer in the lowest bits.
    const F shifted = kept * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;
    const F rest = kept - n * 0.693359375f + n * 2.12194440e-4f;
    F y = splat(1.9875691500e-4f);
    y = multiply_add(y, rest, splat(1.3981999507e-3f));
    y = multiply_add(y, rest, splat(8.3334519073e-3f));
    y = multiply_add(y, rest, splat(4.1665795894e-2f));
    y = multiply_add(y, rest, splat(1.6666665459e-1f));
    y = multiply_add(y, rest, splat(5.0000001201e-1f));
    y = multiply_add(y, rest * rest, rest) + 1.0f;
    return x < -87.3f ? F{} : (F)((I)y + ((I)shifted << 23));
}
#endif

INLINE F sigmoid(F x) { return 1.0f / (1.0f + exponential(-x)); }

// The complementary error function of z >= 0 with a fractional error of 1.2e-7 (Numerical Recipes, erfcc): no digits are lost to
// 1 - erf in the tail.
INLINE F erfc_positive(F z) {
    F t = 1.0f / (1.0f + 0.5f * z);
    F p = splat(0.17087277f);
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    return t * exponential(p * t - 1.26551223f - z * z);
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
