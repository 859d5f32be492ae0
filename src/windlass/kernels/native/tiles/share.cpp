// The CPU's share of a routed layer whose experts lie in host memory: a thread waits for the device to ask, all threads compute, the thread answers.
//
// The device asks through a mailbox in pinned memory: items (expert, rows, weights), the rows, then a number that is one higher than the last. The
// answer is the weighted sum of the experts' first `blocks` * 128 intermediate outputs; the device computes the others itself.
#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "tiles.h"

namespace tiles {

constexpr int ITEM_ROWS = 8, MEETINGS = 4;

struct Item {
    int32_t expert, count, rows[ITEM_ROWS];
    float weights[ITEM_ROWS];
};

struct Mailbox {  // kernels/cuda/sources/offload.cu and kernels/cuda/tiered.py have the same
    alignas(64) std::atomic<uint32_t> asked;
    uint32_t rows, items, layer;
    alignas(64) std::atomic<uint32_t> answered;
};

struct Shape {  // kernels/cpu/tile_share.py has the same
    int64_t hidden, width, group, blocks, max_rows, threads, num_layers;
    const uint8_t* mailbox;
    int64_t items_at, rows_at, sums_at;
    const uint8_t* const* gate_up;  // of each layer: its experts in host memory, one after another
    const uint8_t* const* down;
};

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static void wait_changed(std::atomic<uint32_t>& word, uint32_t old) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::this_thread::yield();
#endif
}
static void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}
static double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

class Share {
public:
    explicit Share(const Shape& shape) : s(shape), product(product_for((int)shape.group)) {
        last = box().asked.load(std::memory_order_acquire);  // here: the first question may come before the thread runs
        tile_blocks = s.hidden / BLOCK;
        gate_up_tile = tile_blocks * block_bytes((int)s.group);
        gate_up_bytes = s.width / 8 * gate_up_tile;
        down_tile = s.width / BLOCK * block_bytes((int)s.group);
        down_bytes = s.hidden / ROWS * down_tile;
        x.resize(s.max_rows * tile_blocks);
        for (int i = 1; i < s.threads; i++) helpers.emplace_back([this] { help(); });
        leader = std::thread([this] { lead(); });
    }
    ~Share() {
        stop.store(true);
        leader.join();
        epoch.fetch_add(1);
        wake_all(epoch);
        for (auto& helper : helpers) helper.join();
    }
    double busy_seconds() const { return busy.load(); }
    uint64_t bytes_read() const { return bytes.load(); }

private:
    struct Use {  // of an expert by a row
        int expert, row;
        float weight;
    };
    Mailbox& box() const { return *(Mailbox*)s.mailbox; }

    void lead() {
        uint32_t idle = 0;
        while (!stop.load(std::memory_order_relaxed)) {
            const uint32_t asked = box().asked.load(std::memory_order_acquire);
            if (asked == last) {
                // A layer is asked for every hundred microseconds while a model runs; later, the thread sleeps between looks.
                if (++idle < 200000) relax();
                else {
                    const timespec pause{0, idle < 400000 ? 20000 : 200000};
                    nanosleep(&pause, nullptr);
                    if (idle < 500000) idle += 100;
                }
                continue;
            }
            idle = 0, last = asked;
            const double began = seconds();
            gather();
            run();
            box().answered.store(asked, std::memory_order_release);
            busy.store(busy.load() + seconds() - began);
            bytes.fetch_add(experts.size() * s.blocks * (BLOCK / 8 * gate_up_tile + s.hidden / ROWS * block_bytes((int)s.group)));
        }
    }
    void gather() {
        uses.clear(), experts.clear(), first_use.clear();
        const Item* items = (const Item*)(s.mailbox + s.items_at);
        for (uint32_t i = 0; i < box().items; i++) {
            if (experts.empty() || experts.back() != items[i].expert) experts.push_back(items[i].expert), first_use.push_back((int)uses.size());
            for (int j = 0; j < items[i].count; j++) uses.push_back({items[i].expert, items[i].rows[j], items[i].weights[j]});
        }
        first_use.push_back((int)uses.size());
        const size_t width = s.blocks * BLOCK;
        if (act.size() < uses.size() * width) act.resize(uses.size() * width);
        if (inner.size() < uses.size() * s.blocks) inner.resize(uses.size() * s.blocks);
        by_row.assign(box().rows, {});
        for (size_t i = 0; i < uses.size(); i++) by_row[uses[i].row].push_back((int)i);
        for (auto& next : counters) next.store(0, std::memory_order_relaxed);
    }
    void run() {
        const uint32_t now = epoch.fetch_add(1, std::memory_order_seq_cst) + 1;
        if (sleepers.load(std::memory_order_seq_cst)) wake_all(epoch);
        work(now);
    }
    void help() {
        uint32_t seen = 0;
        for (;;) {
            uint32_t now;
            for (int spins = 0; (now = epoch.load(std::memory_order_acquire)) == seen; spins++) {
                if (spins < 100000) {
                    relax();
                    continue;
                }
                sleepers.fetch_add(1, std::memory_order_seq_cst);
                wait_changed(epoch, seen);
                sleepers.fetch_sub(1, std::memory_order_seq_cst);
                spins = 0;
            }
            seen = now;
            if (stop.load()) return;
            work(now);
        }
    }
    // All threads pass it together, MEETINGS times a run. The count is never reset: a thread may still be looking at it when the next run begins.
    void meet(uint32_t run, uint32_t number) {
        const uint64_t everyone = (uint64_t(run - 1) * MEETINGS + number) * s.threads;
        arrived.fetch_add(1, std::memory_order_acq_rel);
        // Where others run on the same cores, the thread that is waited for may need this one.
        for (uint32_t spins = 0; arrived.load(std::memory_order_acquire) < everyone; spins++) spins < 20000 ? relax() : std::this_thread::yield();
    }
    template <class F>
    void each(int counter, size_t count, size_t chunk, F&& body) {
        for (;;) {
            const size_t first = counters[counter].fetch_add(chunk, std::memory_order_relaxed);
            if (first >= count) return;
            for (size_t i = first; i < count && i < first + chunk; i++) body(i);
        }
    }
    void work(uint32_t run) {
        const uint32_t rows = box().rows;
        const uint16_t* from = (const uint16_t*)(s.mailbox + s.rows_at);
        each(0, rows * tile_blocks, 4, [&](size_t i) {
            if (by_row[i / tile_blocks].empty()) return;
            float wide[BLOCK];
            for (int k = 0; k < BLOCK; k++) {
                const uint32_t bits = uint32_t(from[i * BLOCK + k]) << 16;
                std::memcpy(wide + k, &bits, 4);
            }
            round_block(wide, 1.f, x[i]);
        });
        meet(run, 1);
        const size_t tiles = s.blocks * BLOCK / 8, width = s.blocks * BLOCK;
        const uint8_t *gate_up = s.gate_up[box().layer], *down = s.down[box().layer];
        each(1, experts.size() * tiles, 2, [&](size_t i) {
            const size_t number = i / tiles, tile = i % tiles;
            const uint8_t* weights = gate_up + experts[number] * gate_up_bytes + tile * gate_up_tile;
            for (int use = first_use[number]; use < first_use[number + 1]; use++) {
                alignas(64) float sums[ROWS * LANES] = {}, out[ROWS];
                product(weights, (int)tile_blocks, &x[uses[use].row * tile_blocks], sums);
                add_lanes(sums, out);
                for (int k = 0; k < 8; k++) act[use * width + tile * 8 + k] = out[k] / (1.f + std::exp(-out[k])) * out[8 + k];
            }
        });
        meet(run, 2);
        each(2, uses.size() * s.blocks, 1, [&](size_t i) { round_block(&act[i * BLOCK], uses[i / s.blocks].weight, inner[i]); });
        meet(run, 3);
        float* sums_to = (float*)(s.mailbox + s.sums_at);
        each(3, s.hidden / ROWS, 2, [&](size_t tile) {
            for (uint32_t row = 0; row < rows; row++) {
                alignas(64) float sums[ROWS * LANES] = {};
                for (int use : by_row[row]) product(down + uses[use].expert * down_bytes + tile * down_tile, (int)s.blocks, &inner[use * s.blocks], sums);
                add_lanes(sums, sums_to + row * s.hidden + tile * ROWS);
            }
        });
        meet(run, 4);
    }

    const Shape s;
    const Product product;
    uint32_t last;  // question
    size_t tile_blocks, gate_up_tile, gate_up_bytes, down_tile, down_bytes;
    std::vector<Activations> x, inner;
    std::vector<float> act;
    std::vector<Use> uses;
    std::vector<int> experts, first_use;
    std::vector<std::vector<int>> by_row;
    std::atomic<bool> stop{false};
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    alignas(64) std::atomic<uint64_t> arrived{0};
    alignas(64) std::atomic<size_t> counters[4];
    std::atomic<double> busy{0.0};
    std::atomic<uint64_t> bytes{0};
    std::vector<std::thread> helpers;
    std::thread leader;
};

extern "C" {
void* share_start(const Shape* shape) { return product_for((int)shape->group) ? new Share(*shape) : nullptr; }
void share_stop(void* share) { delete (Share*)share; }
void share_counts(void* share, double* busy, uint64_t* bytes) { *busy = ((Share*)share)->busy_seconds(), *bytes = ((Share*)share)->bytes_read(); }
// For tests: asks as the device does, and waits.
void share_ask(const Shape* shape) {
    Mailbox& box = *(Mailbox*)shape->mailbox;
    const uint32_t number = box.asked.load() + 1;
    box.asked.store(number, std::memory_order_release);
    while (box.answered.load(std::memory_order_acquire) != number) std::this_thread::yield();
}
}

}  // namespace tiles
