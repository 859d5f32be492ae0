// What the device and the CPU's threads tell each other, in pinned memory, and what the threads are made with.
#pragma once
#include <atomic>
#include <cstdint>

namespace tiles {

constexpr int ITEM_ROWS = 8;
constexpr uint32_t MAX_GUESSES = 16;
constexpr int DISK_PLACES = 1 << 20;  // runtime/kernels/cuda/sources/offload.cu and runtime/kernels/cuda/tiered.py have the same

class DiskCache;

struct Item {
    int32_t expert, count, rows[ITEM_ROWS];
    float weights[ITEM_ROWS];
};

struct Mailbox {  // runtime/kernels/cuda/sources/offload.cu and runtime/kernels/cuda/tiered.py have the same
    alignas(64) std::atomic<uint32_t> asked;
    uint32_t rows, items, layer;
    alignas(64) std::atomic<uint32_t> answered;
    uint32_t failed;  // set by the device, which does not wait for ever
    // One higher with each guess: of a layer, so many experts. May change while it is read: then a guess is wrong.
    alignas(64) std::atomic<uint32_t> told;
    uint32_t told_layer, told_count;
    alignas(64) uint32_t told_experts[MAX_GUESSES];
};

struct Shape {  // runtime/offload/device/share.py has the same
    int64_t hidden, width, group, blocks, max_rows, threads, num_layers, plain;  // plain: packed products without special instructions, for tests
    int64_t num_experts, ahead_bytes;  // experts of a layer in host memory; what a thread may fetch of a guess
    const uint8_t* mailbox;
    int64_t items_at, rows_at, sums_at;
    const uint8_t* const* gate_up;  // of each layer: its experts in host memory, one after another
    const uint8_t* const* down;     // the first `blocks` blocks of their tiles
    DiskCache* disk;                // null: no expert's home is a file
    int64_t disk_experts;           // of each layer
};

}  // namespace tiles
