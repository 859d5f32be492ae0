// Which thread computes which part of an expert, and lines that a thread fetches into its own caches before it computes with them.
//
// An expert is cut over all threads in the same way whatever else is asked for: what a thread fetched for a guess is what it will need, even where
// other experts were guessed wrongly. Threads that are done early take over what others have not begun.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tiles {

struct Part {
    size_t first, last;
    size_t size() const { return last - first; }
};
inline Part part_of(size_t number, size_t count, size_t threads) { return {number * count / threads, (number + 1) * count / threads}; }
// Of an expert's tiles. Threads take turns in having one more of them, from one expert to the next.
inline Part tiles_of(size_t thread, size_t expert, size_t count, size_t threads) { return part_of((thread + expert) % threads, count, threads); }

struct alignas(64) Counter {  // in a line of its own
    std::atomic<size_t> value{0};
};
// What each thread is to do of some work, in its order.
class Turns {
public:
    struct Turn {
        size_t thread, number;  // number: of that thread's
    };
    explicit Turns(size_t threads) : next(threads), counts(threads) {}
    // Before the threads begin.
    void set(size_t thread, size_t count) { counts[thread] = count, next[thread].value.store(0, std::memory_order_relaxed); }
    // The caller's own first, then others'. False: nothing is left.
    bool take(size_t thread, Turn& turn) {
        for (size_t i = 0, owner = thread; i < counts.size(); i++, owner = owner + 1 < counts.size() ? owner + 1 : 0) {
            if (next[owner].value.load(std::memory_order_relaxed) >= counts[owner]) continue;
            const size_t number = next[owner].value.fetch_add(1, std::memory_order_relaxed);
            if (number < counts[owner]) {
                turn = {owner, number};
                return true;
            }
        }
        return false;
    }

private:
    std::vector<Counter> next;
    std::vector<size_t> counts;
};

// Pieces of memory that a thread fetches while it would only wait, a few lines at a time.
class Reading {
public:
    static constexpr size_t STEP = 256;  // bytes between two looks at what the thread waits for
    void clear() { pieces.clear(), piece = at = 0, room = 0; }
    void begin(size_t most_bytes) { clear(), room = most_bytes; }
    // False: there is no room for more.
    bool add(const uint8_t* from, size_t bytes) {
        if (bytes > room) bytes = room;
        if (bytes) pieces.push_back({from, bytes});
        room -= bytes;
        return room;
    }
    // Fetches some bytes, and returns how many. 0: all is under way.
    size_t step() {
        if (piece == pieces.size()) return 0;
        const Piece& now = pieces[piece];
        const size_t from = at, end = at + STEP < now.bytes ? at + STEP : now.bytes;
        for (; at < end; at += 64) __builtin_prefetch(now.from + at, 0, 2);
        if (end == now.bytes) piece++, at = 0;
        return end - from;
    }

private:
    struct Piece {
        const uint8_t* from;
        size_t bytes;
    };
    std::vector<Piece> pieces;
    size_t piece = 0, at = 0, room = 0;
};

}  // namespace tiles
