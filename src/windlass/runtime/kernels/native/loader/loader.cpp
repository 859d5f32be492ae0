// Fills a device's memory from files: threads read pieces into pinned buffers, copy them and have them rearranged there. Each thread has two
// buffers, each with a stream of its own, so that it reads into one while the other is on its way. Python only says what is to be read.
// The functions of the CUDA driver are given by address (runtime/kernels/program/loader.py), so that nothing here needs CUDA to compile, or to be tested.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace windlass {
namespace {

// The following are mirrored in runtime/kernels/program/loader.py.

struct Functions {
    int (*set_context)(void* context);
    int (*exchange_capture_mode)(int* mode);
    int (*copy)(uint64_t to, const void* from, size_t size, void* stream);
    int (*launch)(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream,
                  void** arguments, void** extra);
    int (*synchronize)(void* stream);
};

struct Slot {
    char* buffer;      // pinned
    uint64_t staging;  // on the device
    void* stream;
};

struct Read {
    int32_t file;
    int32_t unused;
    int64_t offset, size;
    int64_t to;  // where in the buffer
};

// What fits into a buffer, and what becomes of it.
struct Chunk {
    int64_t num_reads;
    int64_t size;
    void* repack;  // the kernel; none: bytes go to the target as they are
    uint64_t target;
    int64_t scales;  // where in the buffer
    uint32_t rows, inputs, tile_blocks, paired;
    uint64_t blocks;
};

struct State {
    int64_t is_over;  // nothing is queued or under way, or something failed and nothing is under way
    int64_t num_bytes;
    double first, last;  // seconds of the steady clock: of the first and the last byte that was read
    int64_t error;       // errno, -1 where a file ends, or the driver's status
    int64_t error_file;  // -1: the driver's
    int64_t error_at;
};

constexpr int RELAXED = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED: another thread may capture a graph meanwhile
constexpr unsigned REPACK_THREADS = 256, REPACK_BLOCKS = REPACK_THREADS / 32;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Work {
    Chunk chunk;
    std::vector<Read> reads;
};

class Loader {
public:
    Loader(const Functions& driver, void* context, const Slot* slots, int num_workers) : driver(driver), context(context) {
        for (int i = 0; i < num_workers; i++) threads.emplace_back([this, a = slots[2 * i], b = slots[2 * i + 1]] { work(a, b); });
    }

    // Work that has begun is waited for; what a stream still does is not.
    ~Loader() {
        {
            std::lock_guard<std::mutex> hold(lock);
            closing = true;
            queue.clear();
        }
        wake.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    void add_file(int file) {
        std::lock_guard<std::mutex> hold(lock);
        files.push_back(file);
    }

    void submit(const Chunk* chunks, int64_t count, const Read* reads) {
        {
            std::lock_guard<std::mutex> hold(lock);
            for (int64_t i = 0; i < count; reads += chunks[i++].num_reads)
                queue.push_back({chunks[i], std::vector<Read>(reads, reads + chunks[i].num_reads)});
        }
        wake.notify_all();
    }

    void wait(double seconds, State* state) {
        std::unique_lock<std::mutex> hold(lock);
        const auto is_over = [&] { return !active && (queue.empty() || error); };
        over.wait_for(hold, std::chrono::duration<double>(seconds), is_over);
        *state = {is_over(), num_bytes.load(), first, last, error, error_file, error_at};
    }

private:
    void work(Slot a, Slot b) {
        int mode = RELAXED;
        int status = driver.set_context(context);
        if (!status) status = driver.exchange_capture_mode(&mode);
        if (status) fail(status, -1, 0);
        while (true) {
            Work next;
            {
                std::unique_lock<std::mutex> hold(lock);
                wake.wait(hold, [&] { return closing || (!queue.empty() && !error); });
                if (closing) return;
                next = std::move(queue.front());
                queue.pop_front();
                active++;
                if (!first) first = now();
            }
            place(next, a);
            std::swap(a, b);
            std::lock_guard<std::mutex> hold(lock);
            last = now();
            if (!--active) over.notify_all();
        }
    }

    void place(const Work& work, const Slot& slot) {
        // What came through this buffer before has arrived.
        if (const int status = driver.synchronize(slot.stream)) return fail(status, -1, 0);
        for (const Read& read : work.reads)
            if (!fill(read, slot.buffer + read.to)) return;
        const Chunk& chunk = work.chunk;
        int status = driver.copy(chunk.repack ? slot.staging : chunk.target, slot.buffer, chunk.size, slot.stream);
        if (!status && chunk.repack) status = launch(chunk, slot);
        if (status) fail(status, -1, 0);
    }

    // The arguments of `repack` in runtime/kernels/cuda/sources/small.cu.
    int launch(const Chunk& chunk, const Slot& slot) {
        uint64_t codes = slot.staging, scales = slot.staging + chunk.scales, to = chunk.target, blocks = chunk.blocks;
        uint32_t rows = chunk.rows, inputs = chunk.inputs, tile_blocks = chunk.tile_blocks, paired = chunk.paired;
        void* arguments[] = {&codes, &scales, &to, &rows, &inputs, &tile_blocks, &paired, &blocks};
        const unsigned grid = (unsigned)((blocks + REPACK_BLOCKS - 1) / REPACK_BLOCKS);
        return driver.launch(chunk.repack, grid, 1, 1, REPACK_THREADS, 1, 1, 0, slot.stream, arguments, nullptr);
    }

    bool fill(const Read& read, char* to) {
        int file;
        {
            std::lock_guard<std::mutex> hold(lock);
            file = files[read.file];
        }
        for (int64_t done = 0; done < read.size;) {
            const ssize_t count = pread(file, to + done, read.size - done, read.offset + done);
            if (count > 0) {
                done += count;
                num_bytes += count;
            } else if (count == 0 || errno != EINTR) {
                fail(count == 0 ? -1 : errno, read.file, read.offset + done);
                return false;
            }
        }
        return true;
    }

    void fail(int64_t code, int64_t file, int64_t at) {
        std::lock_guard<std::mutex> hold(lock);
        if (error) return;  // the first one counts
        error = code, error_file = file, error_at = at;
        over.notify_all();
    }

    const Functions driver;
    void* const context;
    std::mutex lock;
    std::condition_variable wake, over;
    std::deque<Work> queue;
    std::vector<int> files;
    std::vector<std::thread> threads;
    bool closing = false;
    int64_t active = 0, error = 0, error_file = -1, error_at = 0;
    std::atomic<int64_t> num_bytes{0};
    double first = 0.0, last = 0.0;
};

Loader* of(void* loader) { return static_cast<Loader*>(loader); }

}  // namespace
}  // namespace windlass

extern "C" {

using namespace windlass;

void* windlass_loader_open(const Functions* driver, void* context, const Slot* slots, int num_workers) {
    return new Loader(*driver, context, slots, num_workers);
}
void windlass_loader_close(void* loader) { delete of(loader); }
void windlass_loader_file(void* loader, int file) { of(loader)->add_file(file); }
void windlass_loader_submit(void* loader, const Chunk* chunks, int64_t count, const Read* reads) { of(loader)->submit(chunks, count, reads); }
void windlass_loader_wait(void* loader, double seconds, State* state) { of(loader)->wait(seconds, state); }
}
