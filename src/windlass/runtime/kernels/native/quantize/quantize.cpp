// Quantization of weights to int4, int8 and fp8: the loop that conversion spends its time in.
//
// lanes.h has the arithmetic; here it is compiled for each instruction set, and the best one is chosen at run time.
// Called through ctypes (runtime/kernels/packing/quantize.py), which lets go of Python's lock: callers bring their own threads.

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packing assumes little-endian words"
#endif

#define INLINE inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

enum Kind { INT4, INT8, FP8 };
enum Input { BF16, FP16, FP32 };
enum InstructionSet { BASELINE, AVX2, AVX512 };  // the baseline is SSE2 on x86-64 and NEON on AArch64

constexpr int MAX_GROUP = 128;  // of int4, whose groups are held in floats while scales are tried
constexpr int32_t SMALLEST_SCALE_BITS = 0x00800000;  // 2^-126, the smallest normal float
constexpr int32_t LARGEST_WEIGHT_BITS = 0x7e800000;  // 2^126: beyond it code * scale might overflow; also above it: Inf and NaN

struct Statistics {
    double squared_error, squared_weight, worst_error;
    int64_t worst_group, num_unusable;
};

struct Search {
    const float *factors;  // scale over the largest magnitude (or over the range, with zero points); 1 or a multiple of 4
    int32_t num_factors, num_fits;
};

struct Job {
    const char *input;
    int64_t element_bytes, num_groups, length;
    char *codes, *scales;
    int64_t code_stride;
    Statistics *total;
};

static INLINE void store_word(char *out, int32_t word) { std::memcpy(out, &word, 4); }

#define WINDLASS_ISA baseline
#define WINDLASS_LANES 4
#include "quantize/lanes.h"
#undef WINDLASS_ISA
#undef WINDLASS_LANES

#if defined(__x86_64__)

// The whole text is compiled under the target, not only the outermost function: generic vectors are cut to the size of a
// register before functions are inlined.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define WINDLASS_ISA avx2
#define WINDLASS_LANES 8
#include "quantize/lanes.h"
#undef WINDLASS_ISA
#undef WINDLASS_LANES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define WINDLASS_ISA avx512
#define WINDLASS_LANES 16
#include "quantize/lanes.h"
#undef WINDLASS_ISA
#undef WINDLASS_LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

extern "C" {

int windlass_instruction_set() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return BASELINE;
}

// `set` must not be above windlass_instruction_set(). `zeros` (one per group) asks for int4 with zero points.
void windlass_quantize(int set, int kind, int input, const Job *job, const Search *how, int8_t *zeros) {
    // A library compiled with -ffast-math may have made this thread flush subnormals; the reference does not.
    std::fenv_t before;
    std::fegetenv(&before);
    std::fesetenv(FE_DFL_ENV);
#if defined(__x86_64__)
    if (set == AVX512)
        avx512::quantize(*job, (Kind)kind, (Input)input, how, zeros);
    else if (set == AVX2)
        avx2::quantize(*job, (Kind)kind, (Input)input, how, zeros);
    else
#endif
        baseline::quantize(*job, (Kind)kind, (Input)input, how, zeros);
    std::fesetenv(&before);
}
}
