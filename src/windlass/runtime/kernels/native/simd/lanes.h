// Compiles one source for every instruction set, and chooses among the results at run time.
//
// A file asks for it by naming itself in WINDLASS_EACH before it includes this one. It is then included again, once per set, with
// WINDLASS_ISA (a namespace) and WINDLASS_LANES (floats in a vector) defined, and finds the vectors of vector.h. The whole
// text stands under the compiler's switch for the set, not only the outermost function: generic vectors are cut to the size of a
// register before functions are inlined. Everything is in unnamed namespaces, so that no two files' functions meet in the linker.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "program/program.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

namespace windlass {

enum InstructionSet { PLAIN, AVX2, AVX512 };  // plain is SSE2 on x86-64 and NEON on AArch64

// The best this machine has, or what WINDLASS_ISA (plain, avx2, avx512) asks for.
InstructionSet instruction_set();

// Types of stored numbers. The values are those of runtime/kernels/cpu/types.py.
enum StoredType { FP32_TYPE, BF16_TYPE, FP16_TYPE, E4M3_TYPE };
struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };
struct E4m3 { uint8_t bits; };

constexpr int64_t BLOCK_TOKENS = 16;  // of the cache, as in core/constants.py

// Below this many elements an operation is not worth sharing among threads, which would fetch each other's cache lines.
constexpr int64_t SMALL = 4096;

// A thread's share of `total` pieces of work; small work is all the first thread's.
inline void share_rows(const Worker& worker, int64_t total, int64_t elements_each, int64_t* first, int64_t* last) {
    if (total * elements_each > SMALL) return worker.share(total, 1, first, last);
    *first = 0;
    *last = worker.index == 0 ? total : 0;
}

}  // namespace windlass

#ifdef WINDLASS_EACH

#define WINDLASS_ISA plain
#define WINDLASS_LANES 4
#include "simd/vector.h"
#include WINDLASS_EACH
#undef WINDLASS_ISA
#undef WINDLASS_LANES

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define WINDLASS_ISA avx2
#define WINDLASS_LANES 8
#include "simd/vector.h"
#include WINDLASS_EACH
#undef WINDLASS_ISA
#undef WINDLASS_LANES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define WINDLASS_ISA avx512
#define WINDLASS_LANES 16
#include "simd/vector.h"
#include WINDLASS_EACH
#undef WINDLASS_ISA
#undef WINDLASS_LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define WINDLASS_PICK(FUNCTION)                                         \
    (windlass::instruction_set() == windlass::AVX512 ? avx512::FUNCTION \
     : windlass::instruction_set() == windlass::AVX2 ? avx2::FUNCTION   \
                                                     : plain::FUNCTION)
#else
#define WINDLASS_PICK(FUNCTION) (plain::FUNCTION)
#endif

#endif  // WINDLASS_EACH
