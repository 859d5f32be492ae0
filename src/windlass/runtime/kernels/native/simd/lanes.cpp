// Which instruction set operations use.
#include "simd/lanes.h"

#include <cstdlib>

namespace windlass {

namespace {

InstructionSet best() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return AVX2;
#endif
    return PLAIN;
}

InstructionSet asked() {
    const char* name = std::getenv("WINDLASS_ISA");
    InstructionSet wanted = AVX512;
    if (name && !std::strcmp(name, "plain")) wanted = PLAIN;
    if (name && !std::strcmp(name, "avx2")) wanted = AVX2;
    return std::min(wanted, best());
}

std::atomic<int> chosen{-1};

}  // namespace

InstructionSet instruction_set() {
    int set = chosen.load(std::memory_order_relaxed);
    if (set < 0) chosen.store(set = asked(), std::memory_order_relaxed);
    return InstructionSet(set);
}

}  // namespace windlass

// For tests: operations use `set` from now on, or the best below it. Negative: what the environment asks for. Returns what it is.
extern "C" int windlass_use_instruction_set(int set) {
    using namespace windlass;
    chosen.store(set < 0 ? asked() : std::min(InstructionSet(set), best()));
    return instruction_set();
}
