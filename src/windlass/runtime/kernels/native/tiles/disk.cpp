#include "tiles/disk.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

namespace tiles {

constexpr double NEVER = -std::numeric_limits<double>::infinity();
constexpr int NOW = 0;  // runtime/kernels/program/reads.py: a step waits for it. Experts that are only guessed would be read with the next rank.

static double log_sum(double a, double b) {  // of powers of two
    if (a < b) std::swap(a, b);
    return b == NEVER ? a : a + std::log2(1.0 + std::exp2(b - a));
}

DiskCache::DiskCache(const DiskShape& shape)
    : s(shape), slot_of(s.layers * s.experts, -1), owner(s.slots, -1), pins(s.slots, 0), filled(s.slots, 0), worth(s.layers * s.experts, NEVER),
      states(s.slots) {}

DiskCache::~DiskCache() {
    for (const Coming& one : coming) s.reader.await(s.reader.reads, &states[one.slot]);
}

void DiskCache::begin(int of_layer, const std::vector<std::pair<int, int>>& experts) {
    std::lock_guard<std::mutex> guard(lock);
    if (of_layer < layer) step++;
    layer = of_layer;
    const double now = step / s.half_life;
    for (const auto& [expert, uses] : experts) {
        worth[key(expert)] = log_sum(worth[key(expert)], now);
        const int slot = slot_of[key(expert)];
        if (slot >= 0) pins[slot]++, present.push_back({expert, slot}), found.hits += uses;
        else waiting.push_back(expert), found.misses += uses;
    }
    fill();
}

bool DiskCache::next(std::vector<Ready>& ready) {
    ready.clear();
    std::unique_lock<std::mutex> guard(lock);
    for (const Coming& one : given) pins[one.slot]--;
    given.clear();
    fill();
    if (!present.empty()) {
        given.swap(present);
        for (const Coming& one : given) ready.push_back(ready_in(one.expert, one.slot));
        return true;
    }
    while (ready.empty() && !coming.empty()) {
        guard.unlock();
        s.reader.await(s.reader.reads, &states[coming.front().slot]);
        guard.lock();
        std::deque<Coming> left;
        for (const Coming& one : coming) {
            const ReadState& state = states[one.slot];
            if (!s.reader.over(s.reader.reads, &states[one.slot])) {
                left.push_back(one);
            } else if (state.error || state.cancelled) {
                if (!found.errors++) found.error = state.error, found.error_at = state.error_at;
                forget(one.slot);
            } else {
                filled[one.slot] = 1;
                given.push_back(one);
                ready.push_back(ready_in(one.expert, one.slot));
            }
        }
        coming.swap(left);
        fill();
    }
    return !ready.empty();
}

void DiskCache::hold(int of_layer, int32_t* slots) {
    std::lock_guard<std::mutex> guard(lock);
    for (int64_t expert = 0; expert < s.experts; expert++) {
        const int slot = slot_of[of_layer * s.experts + expert];
        const bool can = slot >= 0 && filled[slot] && held < s.slots / 2;
        slots[expert] = can ? slot : -1;
        if (can) pins[slot]++, held++;
    }
}

void DiskCache::let_go(const int32_t* slots, int count) {
    std::lock_guard<std::mutex> guard(lock);
    for (int i = 0; i < count; i++) pins[slots[i]]--, held--;
}

DiskCounts DiskCache::counts() {
    std::lock_guard<std::mutex> guard(lock);
    return found;
}

// Reads of experts that are waited for begin while there are slots: where a question needs more than all of them, those that were computed make room.
void DiskCache::fill() {
    while (!waiting.empty()) {
        const int slot = make_room();
        if (slot < 0) return;
        const int expert = waiting.front();
        waiting.pop_front();
        if (owner[slot] >= 0) slot_of[owner[slot]] = -1;
        owner[slot] = key(expert), slot_of[key(expert)] = slot, pins[slot] = 1, filled[slot] = 0;
        states[slot] = {};
        coming.push_back({expert, slot});
        s.reader.begin(s.reader.reads, &states[slot], s.offsets[layer] + expert * s.block_bytes, s.memory + slot * s.block_bytes, s.block_bytes, s.piece_bytes, NOW);
    }
}

int DiskCache::make_room() {
    int best = -1;
    double least = std::numeric_limits<double>::infinity();
    for (int slot = 0; slot < (int)s.slots; slot++) {
        if (pins[slot]) continue;
        const double value = owner[slot] < 0 ? NEVER : worth[owner[slot]];
        if (best < 0 || value < least) best = slot, least = value;
    }
    return best;
}

void DiskCache::forget(int slot) { slot_of[owner[slot]] = -1, owner[slot] = -1, pins[slot] = 0; }

DiskCache::Ready DiskCache::ready_in(int expert, int slot) const {
    const uint8_t* block = s.memory + slot * s.block_bytes;
    return {expert, block, block + s.down_at};
}

extern "C" {
// Null: there is no memory for it.
void* disk_open(const DiskShape* shape) {
    try {
        return new DiskCache(*shape);
    } catch (const std::exception&) {
        return nullptr;
    }
}
void disk_close(void* disk) { delete (DiskCache*)disk; }
void disk_hold(void* disk, int layer, int32_t* slots) { ((DiskCache*)disk)->hold(layer, slots); }
void disk_let_go(void* disk, const int32_t* slots, int count) { ((DiskCache*)disk)->let_go(slots, count); }
void disk_counts(void* disk, DiskCounts* counts) { *counts = ((DiskCache*)disk)->counts(); }
}

}  // namespace tiles
