// Reads of a file into memory by threads of their own, many at a time. Python only begins and awaits them: threads of Python's would hold its
// lock between two reads, on cores that kernels keep busy. Reads that a step
// waits for go before those that are made ahead, and these before those that only use an idle disk.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace windlass {
namespace {

// Mirrored by `_State` in runtime/kernels/program/reads.py, which keeps it until nothing is left.
struct State {
    int64_t left;       // pieces that are not over
    int64_t cancelled;  // of these, pieces that were never begun
    int64_t error;      // errno of the first that failed; -1: the file ends there
    int64_t error_at;   // where in the file
};

struct Piece {
    State* state;
    int64_t offset;
    char* to;
    int64_t size;
};

constexpr int RANKS = 3;  // as runtime/kernels/program/reads.py numbers them

class Reads {
public:
    Reads(int file, int depth) : file(file) {
        for (int i = 0; i < depth; i++) threads.emplace_back([this] { work(); });
    }

    ~Reads() {
        {
            std::lock_guard<std::mutex> hold(lock);
            closing = true;
            for (auto& queue : queues) {
                for (const Piece& piece : queue) drop(piece);
                queue.clear();
            }
        }
        wake.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    void begin(State* state, int64_t offset, char* to, int64_t size, int64_t piece_bytes, int rank) {
        int64_t count = 0;
        {
            std::lock_guard<std::mutex> hold(lock);
            if (!in_flight) since = Clock::now();
            for (int64_t at = 0; at < size; at += piece_bytes, count++)
                queues[rank].push_back({state, offset + at, to + at, std::min(piece_bytes, size - at)});
            state->left = count;
            in_flight += count;
        }
        if (count == 1) wake.notify_one();
        else wake.notify_all();
    }

    bool is_over(State* state) {
        std::lock_guard<std::mutex> hold(lock);
        return !state->left;
    }

    void await(State* state) {
        std::unique_lock<std::mutex> hold(lock);
        over.wait(hold, [&] { return !state->left; });
    }

    // Drops pieces that have not begun.
    void cancel(State* state) {
        std::lock_guard<std::mutex> hold(lock);
        const auto is_its = [&](const Piece& piece) { return piece.state == state; };
        for (auto& queue : queues) {
            const auto rest = std::stable_partition(queue.begin(), queue.end(), [&](const Piece& piece) { return !is_its(piece); });
            std::for_each(rest, queue.end(), [&](const Piece& piece) { drop(piece); });
            queue.erase(rest, queue.end());
        }
        over.notify_all();
    }

    // What is waited for now goes before what is not.
    void hurry(State* state) {
        std::lock_guard<std::mutex> hold(lock);
        for (int rank = 1; rank < RANKS; rank++) {
            auto& queue = queues[rank];
            const auto rest = std::stable_partition(queue.begin(), queue.end(), [&](const Piece& piece) { return piece.state != state; });
            queues[0].insert(queues[0].end(), rest, queue.end());
            queue.erase(rest, queue.end());
        }
    }

    void counts(int64_t* bytes, double* seconds) {
        std::lock_guard<std::mutex> hold(lock);
        *bytes = num_bytes;
        *seconds = busy + (in_flight ? std::chrono::duration<double>(Clock::now() - since).count() : 0.0);
    }

private:
    using Clock = std::chrono::steady_clock;

    void work() {
        std::unique_lock<std::mutex> hold(lock);
        while (true) {
            wake.wait(hold, [&] { return closing || first(); });
            std::deque<Piece>* queue = first();
            if (!queue) return;
            const Piece piece = queue->front();
            queue->pop_front();
            hold.unlock();
            int64_t done = 0, error = 0;
            while (done < piece.size && !error) {
                const ssize_t count = pread(file, piece.to + done, piece.size - done, piece.offset + done);
                if (count > 0) done += count;
                else if (count == 0) error = -1;
                else if (errno != EINTR) error = errno;
            }
            hold.lock();
            num_bytes += done;
            if (error && !piece.state->error) {
                piece.state->error = error;
                piece.state->error_at = piece.offset + done;
            }
            end(piece);
        }
    }

    std::deque<Piece>* first() {
        for (auto& queue : queues)
            if (!queue.empty()) return &queue;
        return nullptr;
    }

    void drop(const Piece& piece) {
        piece.state->cancelled++;
        end(piece);
    }

    // The last piece of a read: its state may be gone as soon as the lock is.
    void end(const Piece& piece) {
        if (!--in_flight) busy += std::chrono::duration<double>(Clock::now() - since).count();
        if (!--piece.state->left) over.notify_all();
    }

    const int file;
    std::mutex lock;
    std::condition_variable wake, over;
    std::deque<Piece> queues[RANKS];  // in the order in which they are served
    std::vector<std::thread> threads;
    bool closing = false;
    int64_t in_flight = 0, num_bytes = 0;
    double busy = 0.0;
    Clock::time_point since;
};

Reads* of(void* reads) { return static_cast<Reads*>(reads); }

}  // namespace
}  // namespace windlass

extern "C" {

using windlass::State;

void* windlass_reads_open(int file, int depth) { return new windlass::Reads(file, depth); }
void windlass_reads_close(void* reads) { delete windlass::of(reads); }
void windlass_reads_begin(void* reads, State* state, int64_t offset, void* to, int64_t size, int64_t piece_bytes, int rank) {
    windlass::of(reads)->begin(state, offset, static_cast<char*>(to), size, piece_bytes, rank);
}
int windlass_reads_over(void* reads, State* state) { return windlass::of(reads)->is_over(state); }
void windlass_reads_await(void* reads, State* state) { windlass::of(reads)->await(state); }
void windlass_reads_cancel(void* reads, State* state) { windlass::of(reads)->cancel(state); }
void windlass_reads_hurry(void* reads, State* state) { windlass::of(reads)->hurry(state); }
void windlass_reads_counts(void* reads, int64_t* bytes, double* seconds) { windlass::of(reads)->counts(bytes, seconds); }
}
