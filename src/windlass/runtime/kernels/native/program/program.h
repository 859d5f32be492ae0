// An operation, and the threads that run it. Every operation of the library is a function `void op_NAME(const Op&, Worker&)` that all
// threads enter together; WINDLASS_OP(NAME) makes it known to Python (runtime/kernels/program/program.py) by name.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace windlass {

class Worker;

// Mirrored by `_Op` in runtime/kernels/program/program.py.
struct Op {
    void (*run)(const Op&, Worker&);
    const int32_t* counter;  // where the runner keeps the true number of rows; null: num_rows
    int64_t num_rows;        // most rows there may be
    void* data[16];
    int64_t ints[16];
    float floats[8];
    int64_t is_invariant;    // whether a row's result must be the same however many rows there are
    int64_t nanoseconds;     // spent, where the run is timed

    int64_t rows() const { return counter ? *counter : num_rows; }
    template <class T> T* at(int index) const { return static_cast<T*>(data[index]); }
};

using Run = void (*)(const Op&, Worker&);

class Pool;

// One thread's view of a run.
class Worker {
public:
    int index = 0;
    int count = 1;

    // Waits for all threads; whatever they wrote before is seen after. Starts the counting of `take` again.
    void barrier();
    // 0, 1, 2, ... over all threads, each number once: dynamic scheduling of chunks.
    int64_t take();
    // Thread-local scratch memory, 64-byte aligned, until the next call or the end of the operation.
    void* scratch(size_t bytes);
    // Rows first .. last of `total` that are this thread's share, in units of `quantum`.
    void share(int64_t total, int64_t quantum, int64_t* first, int64_t* last) const;

    Pool* pool = nullptr;
    void* memory = nullptr;
    size_t memory_bytes = 0;
};

struct Registration {
    Registration(const char* name, Run run);
};

}  // namespace windlass

#define WINDLASS_OP(NAME)                                                   \
    static void op_##NAME(const windlass::Op&, windlass::Worker&);          \
    static windlass::Registration registered_##NAME(#NAME, op_##NAME);      \
    static void op_##NAME(const windlass::Op& op, windlass::Worker& worker)
