// The processor's own vector instructions, where a kernel names them. Included before simd/lanes.h, outside of any instruction set.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
