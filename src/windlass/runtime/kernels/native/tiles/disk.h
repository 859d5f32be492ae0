// Experts whose home is a file: some slots of host memory are a cache of them. A question names experts of a layer; they are handed out as their
// weights are there, those in memory at once, the others as they are read, many at a time.
//
// Which expert makes room: as in runtime/offload/experts/cache.py, the one with the fewest uses, each counting half as much after `half_life` steps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "tiles/mailbox.h"

namespace tiles {

struct ReadState {  // runtime/kernels/native/program/reads.cpp has the same
    int64_t left, cancelled, error, error_at;
};

// The reader is another library's, and Python's too: one file, one set of threads, one count of bytes.
struct Reader {
    void* reads;
    void (*begin)(void* reads, ReadState* state, int64_t offset, void* to, int64_t size, int64_t piece_bytes, int rank);
    int (*over)(void* reads, ReadState* state);
    void (*await)(void* reads, ReadState* state);
};

struct DiskShape {  // runtime/offload/device/cache.py has the same
    int64_t layers, experts, slots, block_bytes, down_at, piece_bytes;
    double half_life;        // in steps
    const int64_t* offsets;  // in the file: of the first expert of each layer
    uint8_t* memory;         // slots of block_bytes each
    Reader reader;
};

struct DiskCounts {  // runtime/offload/device/cache.py has the same
    int64_t hits, misses;            // uses of experts that were found in memory, and of those that were read
    int64_t errors, error, error_at;  // reads that failed; errno (-1: the file ends there) and place of the first
};

class DiskCache {
public:
    explicit DiskCache(const DiskShape& shape);
    ~DiskCache();

    // --- for the one thread that answers

    struct Ready {
        int expert;
        const uint8_t *gate_up, *down;
    };
    // Experts of a layer, each once, with the number of their uses. All that are missing are asked of the disk at once, as far as there are slots.
    void begin(int layer, const std::vector<std::pair<int, int>>& experts);
    // Some that are there; waits for one if none is. Those of the last call may be overwritten from now on. False: all were given.
    bool next(std::vector<Ready>& ready);
    // Whether `next` would wait.
    bool would_wait() const { return present.empty(); }

    // --- for any thread

    // For each expert of a layer its slot, or -1: not in memory. They stay until they are let go. No more than half of the slots are held.
    void hold(int layer, int32_t* slots);
    void let_go(const int32_t* slots, int count);
    DiskCounts counts();

private:
    struct Coming {
        int expert, slot;
    };
    void fill();
    int make_room();
    void forget(int slot);
    int64_t key(int expert) const { return (int64_t)layer * s.experts + expert; }
    Ready ready_in(int expert, int slot) const;

    const DiskShape s;
    std::mutex lock;                // of what follows, except for the answering thread's own
    std::vector<int> slot_of;       // of each expert of each layer; -1: none
    std::vector<int64_t> owner;     // of each slot; -1: free
    std::vector<int> pins;          // of each slot: by the question under way, and by those who hold it
    std::vector<char> filled;       // whether the owner's weights are there
    std::vector<double> worth;      // log2 of the decayed uses, times 2^(now / half_life)
    std::vector<ReadState> states;  // of each slot
    DiskCounts found{};
    int64_t held = 0;

    int layer = -1;
    uint64_t step = 0;
    std::vector<Coming> present, given;
    std::deque<Coming> coming;
    std::deque<int> waiting;  // without a slot
};

// Experts of a question that are in the file, of so many of a layer, with the number of their uses.
inline void find_on_disk(const std::vector<Item>& items, int64_t experts, std::vector<std::pair<int, int>>& found) {
    found.clear();
    for (const Item& item : items) {
        const int expert = item.expert - DISK_PLACES;
        if (expert < 0 || expert >= experts) continue;
        if (found.empty() || found.back().first != expert) found.push_back({expert, 0});
        found.back().second += item.count;
    }
}

}  // namespace tiles
