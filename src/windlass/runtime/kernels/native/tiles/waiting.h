// How threads wait for each other: they spin for a while, then sleep.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>
#include <thread>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline void wait_changed(std::atomic<uint32_t>& word, uint32_t old) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::this_thread::yield();
#endif
}
inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}
inline double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

}  // namespace tiles
