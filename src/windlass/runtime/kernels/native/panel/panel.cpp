// Packed products for every instruction set, and the choice among them.
#include "panel/panel.h"

#include <cstdlib>
#include <cstring>

#include "ggml/product.h"
#include "simd/lanes.h"
#include "panel/number.h"
#include "panel/vectors.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "panel/plain.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include "panel/avx2.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#include "panel/avx512.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include "panel/neon.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static bool is_plain_asked() {
    const char* name = std::getenv("WINDLASS_ISA");
    return name && !std::strcmp(name, "plain");
}

static bool has_dot_product() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & (1 << 20);  // HWCAP_ASIMDDP
#else
    return true;  // every Apple core that runs 64-bit macOS
#endif
}
#endif

namespace windlass {

const PackedKernels& packed_kernels() {
    static const PackedKernels plain_kernels{"plain", plain::multiply};
#if defined(__x86_64__)
    static const PackedKernels avx512_kernels{"avx512", vnni512::multiply}, avx2_kernels{"avx2", avx2::multiply};
    static const bool has_vnni = __builtin_cpu_supports("avx512vnni");
    if (instruction_set() == AVX512 && has_vnni) return avx512_kernels;
    if (instruction_set() >= AVX2) return avx2_kernels;
#elif defined(__aarch64__)
    static const PackedKernels neon_kernels{"neon", neon::multiply};
    static const bool uses_neon = has_dot_product() && !is_plain_asked();
    if (uses_neon) return neon_kernels;
#endif
    return plain_kernels;
}

}  // namespace windlass

extern "C" const char* windlass_packed_kernels() { return windlass::packed_kernels().name; }
