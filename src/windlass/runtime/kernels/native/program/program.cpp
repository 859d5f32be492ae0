// The thread pool and the loop that replays a list of operations. The calling thread is worker 0.
#include "program/program.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { __asm__ __volatile__("yield"); }
#else
static inline void relax() {}
#endif

namespace windlass {

namespace {

constexpr int SPINS_BEFORE_YIELD = 2000;                            // about 30 us; then the core is yielded
constexpr auto AWAKE = std::chrono::microseconds(2000);             // threads stay awake this long between runs: a token's host work

std::map<std::string, Run>& operations() {
    static std::map<std::string, Run> found;
    return found;
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Registration::Registration(const char* name, Run run) { operations()[name] = run; }

class Pool {
public:
    explicit Pool(int count) : workers(count) {
        for (int index = 0; index < count; index++) {
            workers[index].index = index;
            workers[index].count = count;
            workers[index].pool = this;
        }
        for (int index = 1; index < count; index++) threads.emplace_back([this, index] { serve(workers[index]); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(sleeping);
            closing = true;
            epoch.fetch_add(1);
        }
        wake.notify_all();
        for (auto& thread : threads) thread.join();
        for (auto& worker : workers) std::free(worker.memory);
    }

    void run(Op* list, int64_t length, bool is_timed) {
        if (length == 0) return;
        std::lock_guard<std::mutex> one_at_a_time(running);
        ops = list;
        num_ops = length;
        timed = is_timed;
        resting.store(false, std::memory_order_relaxed);
        chunk.store(0, std::memory_order_relaxed);
        if (workers.size() > 1) {
            epoch.fetch_add(1);  // sequentially consistent, as is the count of sleepers: one of the two sides sees the other
            if (sleepers.load() > 0) {
                std::lock_guard<std::mutex> hold(sleeping);
                wake.notify_all();
            }
        }
        work(workers[0]);
    }

    // Until the next run threads sleep: there is something else to wait for, which needs the cores.
    void rest() { resting.store(true, std::memory_order_relaxed); }

    void barrier() {
        const int size = int(workers.size());
        if (size == 1) {
            chunk.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t before = phase.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            chunk.store(0, std::memory_order_relaxed);
            phase.store(before + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase.load(std::memory_order_acquire) == before; spins++) {
            if (spins < SPINS_BEFORE_YIELD) relax();
            else std::this_thread::yield();
        }
    }

    alignas(64) std::atomic<int64_t> chunk{0};

private:
    void work(Worker& worker) {
        // Copies: after the last barrier the caller may begin another run before this thread has left the loop.
        Op* const list = ops;
        const int64_t length = num_ops;
        const bool is_timed = timed;
        for (int64_t index = 0; index < length; index++) {
            const int64_t started = is_timed && worker.index == 0 ? now() : 0;
            list[index].run(list[index], worker);
            barrier();
            if (started) list[index].nanoseconds += now() - started;
        }
    }

    void serve(Worker& worker) {
        uint64_t seen = 0;
        for (;;) {
            wait_for_work(seen);
            seen = epoch.load(std::memory_order_acquire);
            if (closing) return;
            work(worker);
        }
    }

    void wait_for_work(uint64_t seen) {
        const auto until = std::chrono::steady_clock::now() + AWAKE;
        do {
            for (int spins = 0; spins < 256; spins++) {
                if (epoch.load(std::memory_order_acquire) != seen) return;
                relax();
            }
        } while (std::chrono::steady_clock::now() < until && !resting.load(std::memory_order_relaxed));
        std::unique_lock<std::mutex> hold(sleeping);
        sleepers.fetch_add(1);
        wake.wait(hold, [&] { return epoch.load() != seen; });
        sleepers.fetch_sub(1);
    }

    std::vector<Worker> workers;
    std::vector<std::thread> threads;
    std::mutex running, sleeping;
    std::condition_variable wake;
    std::atomic<int> sleepers{0};
    std::atomic<bool> closing{false}, resting{false};
    alignas(64) std::atomic<uint64_t> epoch{0};
    alignas(64) std::atomic<uint32_t> phase{0};
    alignas(64) std::atomic<int> arrived{0};
    Op* ops = nullptr;
    int64_t num_ops = 0;
    bool timed = false;
};

void Worker::barrier() { pool->barrier(); }

int64_t Worker::take() { return pool->chunk.fetch_add(1, std::memory_order_relaxed); }

void* Worker::scratch(size_t bytes) {
    if (bytes > memory_bytes) {
        std::free(memory);
        memory_bytes = (bytes + 4095) / 4096 * 4096;
        memory = std::aligned_alloc(4096, memory_bytes);
        if (!memory) std::abort();
    }
    return memory;
}

void Worker::share(int64_t total, int64_t quantum, int64_t* first, int64_t* last) const {
    const int64_t pieces = (total + quantum - 1) / quantum;
    const int64_t begin = pieces * index / count * quantum, end = pieces * (index + 1) / count * quantum;
    *first = begin < total ? begin : total;
    *last = end < total ? end : total;
}

namespace {
std::mutex making;
std::unique_ptr<Pool> pool;
int pool_threads = 0;
}  // namespace

}  // namespace windlass

extern "C" {

void* windlass_find(const char* name) {
    auto found = windlass::operations().find(name);
    return found == windlass::operations().end() ? nullptr : reinterpret_cast<void*>(found->second);
}

// The number of threads of every later run; threads that exist already are ended first.
void windlass_threads(int count) {
    std::lock_guard<std::mutex> hold(windlass::making);
    if (count == windlass::pool_threads) return;
    windlass::pool.reset();
    windlass::pool.reset(new windlass::Pool(count));
    windlass::pool_threads = count;
}

void windlass_rest() {
    if (windlass::pool) windlass::pool->rest();
}

void windlass_run(windlass::Op* ops, int64_t count, int timed) { windlass::pool->run(ops, count, timed != 0); }
}
