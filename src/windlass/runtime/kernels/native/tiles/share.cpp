// The CPU's share of a routed layer whose experts lie in host memory: a thread waits for the device to ask, all threads compute, the thread answers.
//
// The device asks through a mailbox in pinned memory: items (expert, rows, weights), the rows, then a number that is one higher than the last. The
// answer is the weighted sum of the experts' first `blocks` * 128 intermediate outputs; the device computes the others itself. Of experts whose home is
// a file (places from DISK_PLACES on) all outputs are computed here, from slots that they are read into (disk.h).
//
// With a question or without, the device may tell which experts the next layer will probably need. Between questions every thread fetches its own
// part of these into its second-level cache (ahead.h). Nothing depends on it: a wrong guess is lines that nobody uses.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "tiles/ahead.h"
#include "tiles/disk.h"
#include "tiles/mailbox.h"
#include "tiles/tiles.h"
#include "tiles/waiting.h"

namespace tiles {

constexpr int RUN = 2, MAX_GROUPS = 8;  // of an expert: 64 rows
constexpr size_t SOON_BYTES = 128 << 10;  // of a thread: what it fetches at most while it waits for the others within a question

class Share {
public:
    explicit Share(const Shape& shape)
        : s(shape), product(product_for((int)shape.group)), packed_kernels(packed_kernels_for((int)shape.group, shape.plain)), up_turns(shape.threads), down_turns(shape.threads), ahead_bytes(shape.threads) {
        last = box().asked.load(std::memory_order_acquire);  // here: the first question may come before the thread runs
        tile_blocks = s.hidden / BLOCK;
        gate_up_tile = tile_blocks * block_bytes((int)s.group);
        gate_up_bytes = s.width / 8 * gate_up_tile;
        home_tile = s.blocks * block_bytes((int)s.group);
        home_bytes = s.hidden / ROWS * home_tile;
        x.resize(s.max_rows * tile_blocks);
        ends.resize(s.threads);
        first_told = box().told.load(std::memory_order_acquire);
        try {
            for (int i = 1; i < s.threads; i++) helpers.emplace_back([this, i] { help(i); });
            leader = std::thread([this] { lead(); });
        } catch (...) {
            end_helpers();
            throw;
        }
    }
    ~Share() {
        stop.store(true);
        leader.join();  // with its helpers, which go on until the last question is answered
        end_helpers();
    }
    double busy_seconds() const { return busy.load(); }
    uint64_t bytes_read() const { return bytes.load(); }
    uint64_t bytes_ahead() const {
        uint64_t sum = 0;
        for (const auto& one : ahead_bytes) sum += one.value.load(std::memory_order_relaxed);
        return sum;
    }

private:
    struct Use {  // of an expert by a row
        int number, row;  // of the expert, among those of the pass
        float weight;
    };
    struct Group {  // uses of an expert that are computed together
        int first, count;
    };
    struct Worker {  // a thread
        size_t number;
        uint32_t told;  // the last guess that it has seen
        uint64_t met = 0;
        uint32_t ahead_layer = 0;
        Reading ahead, soon;  // of a guess, and of what is asked for
    };
    void end_helpers() {
        over.store(true);
        epoch.fetch_add(1);
        wake_all(epoch);
        for (auto& helper : helpers) helper.join();
    }
    Mailbox& box() const { return *(Mailbox*)s.mailbox; }

    void lead() {
        Worker me{0, first_told};
        uint32_t idle = 0;
        while (!stop.load(std::memory_order_relaxed)) {
            const uint32_t asked = box().asked.load(std::memory_order_acquire);
            if (asked == last) {
                if (reads_ahead(me)) continue;
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
            // Copied: a device that has given up on an answer may ask the next question meanwhile.
            num_rows = std::min<uint32_t>(box().rows, (uint32_t)s.max_rows), layer = std::min<uint32_t>(box().layer, (uint32_t)s.num_layers - 1);
            const Item* items = (const Item*)(s.mailbox + s.items_at);
            asked_items.assign(items, items + box().items);
            answer(me);
            box().answered.store(asked, std::memory_order_release);
        }
    }
    // What is on disk is asked of it before anything is computed, and is computed as it comes.
    void answer(Worker& me) {
        find_on_disk(asked_items, s.disk ? s.disk_experts : 0, wanted);
        patience.store(wanted.empty() ? 20000 : 200, std::memory_order_relaxed);
        if (!wanted.empty()) s.disk->begin((int)layer, wanted);
        blocks = s.blocks, adds = false;
        gather([&](const Item& item) { return item.expert < DISK_PLACES; },
               [&](int expert) { gate_up_of.push_back(s.gate_up[layer] + expert * gate_up_bytes), down_of.push_back(s.down[layer] + expert * home_bytes); });
        if (experts.size() || wanted.empty()) run(me);
        else std::memset(sums_of(0), 0, num_rows * s.hidden * sizeof(float));
        if (wanted.empty()) return;
        blocks = s.width / BLOCK, adds = true;
        for (std::vector<DiskCache::Ready> ready; next_from_disk(ready);) {
            auto find = [&](int expert) {
                return std::find_if(ready.begin(), ready.end(), [&](const auto& one) { return one.expert == expert - DISK_PLACES; });
            };
            gather([&](const Item& item) { return find(item.expert) != ready.end(); },
                   [&](int expert) { gate_up_of.push_back(find(expert)->gate_up), down_of.push_back(find(expert)->down); });
            run(me);
        }
    }
    // Threads that spin meanwhile would keep reads from being completed.
    bool next_from_disk(std::vector<DiskCache::Ready>& ready) {
        const bool waits = s.disk->would_wait();
        if (waits) resting.store(true, std::memory_order_relaxed);
        const bool found = s.disk->next(ready);
        if (waits) resting.store(false, std::memory_order_relaxed);
        return found;
    }
    size_t down_tile() const { return blocks * block_bytes((int)s.group); }
    // Some of the question's experts, for one pass of all threads. `place`: where the weights of the next of them are.
    template <class Takes, class Place>
    void gather(Takes&& takes, Place&& place) {
        uses.clear(), experts.clear(), first_use.clear(), gate_up_of.clear(), down_of.clear();
        for (const Item& item : asked_items) {
            if (!takes(item)) continue;
            if (experts.empty() || experts.back() != item.expert) experts.push_back(item.expert), first_use.push_back((int)uses.size()), place(item.expert);
            for (int j = 0; j < item.count; j++) uses.push_back({(int)experts.size() - 1, item.rows[j], item.weights[j]});
        }
        first_use.push_back((int)uses.size());
        const size_t width = blocks * BLOCK;
        if (act.size() < uses.size() * width) act.resize(uses.size() * width);
        if (inner.size() < uses.size() * blocks) inner.resize(uses.size() * blocks);
        by_row.assign(num_rows, {});
        groups.clear(), first_group.clear();
        if (packed_kernels.product && uses.size() >= packed_kernels.least * experts.size())
            for (size_t i = 0; i < experts.size(); i++) {
                first_group.push_back((int)groups.size());
                for (int use = first_use[i]; use < first_use[i + 1]; use += PACKED_ROWS)
                    groups.push_back({use, std::min(PACKED_ROWS, first_use[i + 1] - use)});
            }
        first_group.push_back((int)groups.size());
        find_distinct();
        if (packed.size() < distinct.size() * tile_blocks) packed.resize(distinct.size() * tile_blocks);
        if (packed_inner.size() < groups.size() * blocks) packed_inner.resize(groups.size() * blocks);
        for (size_t i = 0; i < uses.size(); i++) by_row[uses[i].row].push_back((int)i);
        in_order.clear();
        for (const auto& row : by_row) in_order.insert(in_order.end(), row.begin(), row.end());
        for (auto& next : counters) next.store(0, std::memory_order_relaxed);
        share_out();
    }
    // Units of gate and up: a tile, or several of them where rows are computed together. A thread's are in the order of experts.
    void share_out() {
        unit_tiles = groups.empty() ? 1 : MOST_TILES;
        for (size_t thread = 0; thread < (size_t)s.threads; thread++) {
            ends[thread].clear();
            size_t end = 0;
            for (int expert : experts) ends[thread].push_back(end += tiles_of(thread, expert, units(), s.threads).size());
            up_turns.set(thread, end);
            down_turns.set(thread, part_of(thread, runs(), s.threads).size());
        }
    }
    size_t units() const { return blocks * BLOCK / 8 / unit_tiles; }
    // Which of the experts, and which unit of it.
    std::pair<size_t, size_t> unit_of(const Turns::Turn& turn) const {
        const auto& mine = ends[turn.thread];
        const size_t number = std::upper_bound(mine.begin(), mine.end(), turn.number) - mine.begin();
        return {number, tiles_of(turn.thread, experts[number], units(), s.threads).first + turn.number - (number ? mine[number - 1] : 0)};
    }
    size_t run_of(const Turns::Turn& turn) const { return part_of(turn.thread, runs(), s.threads).first + turn.number; }
    // Groups of different experts often have the same rows, which are packed once: slices of a dense layer always.
    void find_distinct() {
        distinct.clear(), packed_of.clear();
        auto row = [&](int group, int k) { return uses[groups[group].first + k].row; };
        for (int g = 0; g < (int)groups.size(); g++) {
            int found = (int)distinct.size();
            for (int i = found - 1; i >= 0 && i >= (int)distinct.size() - 16; i--) {
                bool same = groups[distinct[i]].count == groups[g].count;
                for (int k = 0; same && k < groups[g].count; k++) same = row(distinct[i], k) == row(g, k);
                if (same) found = i;
            }
            if (found == (int)distinct.size()) distinct.push_back(g);
            packed_of.push_back(found);
        }
    }
    // Between questions: whether there was something to fetch.
    bool reads_ahead(Worker& me) {
        const uint32_t told = box().told.load(std::memory_order_acquire);
        if (told != me.told) me.told = told, take_guess(me);
        const size_t read = me.ahead.step();
        auto& sum = ahead_bytes[me.number].value;  // only this thread's
        if (read) sum.store(sum.load(std::memory_order_relaxed) + read, std::memory_order_relaxed);
        return read;
    }
    void take_guess(Worker& me) {
        me.ahead.clear();
        const uint32_t count = std::min(box().told_count, MAX_GUESSES), of = box().told_layer;
        if (of >= s.num_layers) return;
        me.ahead_layer = of;
        me.ahead.begin(s.ahead_bytes);
        uint32_t guessed[MAX_GUESSES], found = 0;
        for (uint32_t i = 0; i < count; i++)
            if ((guessed[found] = box().told_experts[i]) < s.num_experts) found++;
        for (uint32_t i = 0; i < found; i++) add_up(me, me.ahead, s.gate_up[of] + guessed[i] * gate_up_bytes, guessed[i], s.blocks);
        const Part mine = part_of(me.number, runs(), s.threads);
        for (uint32_t i = 0; i < found; i++) me.ahead.add(s.down[of] + guessed[i] * home_bytes + mine.first * RUN * home_tile, mine.size() * RUN * home_tile);
    }
    // A thread's part of an expert's gate and up, which begin at `from` and of which so many blocks of outputs are computed.
    void add_up(const Worker& me, Reading& to, const uint8_t* from, size_t expert, size_t of_blocks) {
        const Part part = tiles_of(me.number, expert, of_blocks * BLOCK / 8, s.threads);
        to.add(from + part.first * gate_up_tile, part.size() * gate_up_tile);
    }
    void run(Worker& me) {
        const double began = seconds();
        epoch.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) wake_all(epoch);
        work(me);
        // Counted before the answer: whoever asked may look at once.
        busy.store(busy.load() + seconds() - began);
        bytes.fetch_add(experts.size() * blocks * (BLOCK / 8 * gate_up_tile + s.hidden / ROWS * block_bytes((int)s.group)));
    }
    void help(size_t number) {
        uint32_t seen = 0;
        Worker me{number, first_told};
        for (;;) {
            uint32_t now;
            for (int spins = 0; (now = epoch.load(std::memory_order_acquire)) == seen; spins++) {
                if (spins < 100000 && !resting.load(std::memory_order_relaxed)) {
                    if (!reads_ahead(me)) relax();
                    continue;
                }
                sleepers.fetch_add(1, std::memory_order_seq_cst);
                wait_changed(epoch, seen);
                sleepers.fetch_sub(1, std::memory_order_seq_cst);
                spins = 0;
            }
            seen = now;
            if (over.load()) return;
            work(me);
        }
    }
    // All threads pass it together. The count is never reset: a thread may still be looking at it when the next run begins. Whoever waits fetches what it
    // will compute with next.
    void meet(Worker& me) {
        const uint64_t everyone = ++me.met * s.threads;
        arrived.fetch_add(1, std::memory_order_acq_rel);
        for (uint32_t spins = 0; arrived.load(std::memory_order_acquire) < everyone; spins++) {
            if (me.soon.step()) continue;
            // Where others run on the same cores, the thread that is waited for may need this one: while the disk is read, soon.
            spins < patience.load(std::memory_order_relaxed) ? relax() : std::this_thread::yield();
        }
    }
    template <class F>
    void each(int counter, size_t count, F&& body) {
        for (;;) {
            const size_t i = counters[counter].fetch_add(1, std::memory_order_relaxed);
            if (i >= count) return;
            body(i);
        }
    }
    // The same for work that reads weights: body(turn, next turn or null), so that what comes next can be fetched ahead.
    template <class F>
    void each_ahead(const Worker& me, Turns& turns, F&& body) {
        Turns::Turn now, next;
        for (bool is_more = turns.take(me.number, now); is_more; now = next) {
            is_more = turns.take(me.number, next);
            body(now, is_more ? &next : nullptr);
        }
    }
    size_t runs() const { return (s.hidden / ROWS + RUN - 1) / RUN; }
    size_t run_tiles(size_t run) const { return std::min<size_t>(RUN, s.hidden / ROWS - run * RUN); }
    void work(Worker& me) {
        // A guess for this layer or an earlier one is no longer one.
        if (me.ahead_layer <= layer) me.ahead.clear();
        me.soon.begin(SOON_BYTES);
        for (size_t i = 0; i < experts.size(); i++) add_up(me, me.soon, gate_up_of[i], experts[i], blocks);
        each(0, num_rows * tile_blocks, [&](size_t i) { round_input(i); });
        meet(me);
        if (groups.empty()) each_alone(me);
        else each_packed(me);
        meet(me);
    }
    void read_down_soon(Worker& me) {
        me.soon.begin(SOON_BYTES);
        const Part part = part_of(me.number, runs(), s.threads);
        for (size_t run = part.first; run < part.last; run++)
            for (const uint8_t* down : down_of)
                if (!me.soon.add(down + run * RUN * down_tile(), run_tiles(run) * down_tile())) return;
    }
    void round_input(size_t i) {
        if (by_row[i / tile_blocks].empty()) return;
        const uint16_t* from = (const uint16_t*)(s.mailbox + s.rows_at) + i * BLOCK;
        float wide[BLOCK];
        for (int k = 0; k < BLOCK; k++) {
            const uint32_t bits = uint32_t(from[k]) << 16;
            std::memcpy(wide + k, &bits, 4);
        }
        round_block(wide, 1.f, x[i]);
    }
    void activate(int use, size_t tile, const float* gates, const float* ups, int stride) {
        float* to = &act[use * blocks * BLOCK + tile * 8];
        for (int k = 0; k < 8; k++) to[k] = gates[k * stride] / (1.f + std::exp(-gates[k * stride])) * ups[k * stride];
    }
    float* sums_of(size_t row) const { return (float*)(s.mailbox + s.sums_at) + row * s.hidden; }

    // Every use of an expert by itself.
    void each_alone(Worker& me) {
        auto weights = [&](std::pair<size_t, size_t> unit) { return gate_up_of[unit.first] + unit.second * gate_up_tile; };
        each_ahead(me, up_turns, [&](const Turns::Turn& now, const Turns::Turn* next) {
            const auto unit = unit_of(now);
            const auto [number, tile] = unit;
            const uint8_t* then = next ? weights(unit_of(*next)) : nullptr;
            for (int use = first_use[number]; use < first_use[number + 1]; use++) {
                alignas(64) float sums[ROWS * LANES] = {}, out[ROWS];
                const bool is_last = use + 1 == first_use[number + 1];
                product(weights(unit), (int)tile_blocks, &x[uses[use].row * tile_blocks], sums, is_last ? then : nullptr);
                add_lanes(sums, out);
                activate(use, tile, out, out + 8, 1);
            }
        });
        read_down_soon(me);
        meet(me);
        each(2, uses.size() * blocks, [&](size_t i) { round_block(&act[i * BLOCK], uses[i / blocks].weight, inner[i]); });
        meet(me);
        // Tiles of down, several at a time: they are one run in memory, which is read quicker than its pieces.
        auto place = [&](size_t at, size_t run) { return down_of[uses[in_order[at]].number] + run * RUN * down_tile(); };
        each_ahead(me, down_turns, [&](const Turns::Turn& now, const Turns::Turn* next) {
            const size_t run = run_of(now);
            size_t at = 0;
            for (uint32_t row = 0; row < num_rows; row++) {
                alignas(64) float sums[RUN][ROWS * LANES] = {};
                for (int use : by_row[row]) {
                    at++;
                    const uint8_t* then = at < in_order.size() ? place(at, run) : next ? place(0, run_of(*next)) : nullptr;
                    for (size_t i = 0; i < run_tiles(run); i++) {
                        const uint8_t* tile = place(at - 1, run) + i * down_tile();
                        product(tile, (int)blocks, &inner[use * blocks], sums[i], i + 1 < run_tiles(run) ? tile + down_tile() : then);
                    }
                }
                if (adds && by_row[row].empty()) continue;
                for (size_t i = 0; i < run_tiles(run); i++) set_sums(sums[i], sums_of(row) + (run * RUN + i) * ROWS);
            }
        });
    }

    void set_sums(const float* lanes, float* to) const {
        float out[ROWS];
        add_lanes(lanes, out);
        for (int k = 0; k < ROWS; k++) to[k] = adds ? to[k] + out[k] : out[k];
    }

    // Uses of the same expert together.
    void each_packed(Worker& me) {
        each(1, distinct.size() * tile_blocks, [&](size_t i) {
            const Group& group = groups[distinct[i / tile_blocks]];
            const Activations* rows[PACKED_ROWS];
            for (int k = 0; k < group.count; k++) rows[k] = &x[uses[group.first + k].row * tile_blocks + i % tile_blocks];
            packed_kernels.pack(rows, group.count, packed[i]);
        });
        meet(me);
        auto weights = [&](std::pair<size_t, size_t> unit) { return gate_up_of[unit.first] + unit.second * MOST_TILES * gate_up_tile; };
        each_ahead(me, up_turns, [&](const Turns::Turn& now, const Turns::Turn* next) {
            const auto unit = unit_of(now);
            const int first = first_group[unit.first], groups_here = first_group[unit.first + 1] - first;
            const Packed* of_groups[MAX_GROUPS];
            for (int g = 0; g < groups_here; g++) of_groups[g] = &packed[packed_of[first + g] * tile_blocks];
            // Few tiles at a time where there are many groups: sums of all of them should stay in the nearest cache.
            const int step = groups_here > 2 ? MOST_TILES / 2 : MOST_TILES;
            for (int tile = 0; tile < MOST_TILES; tile += step) {
                const uint8_t* at = weights(unit) + tile * gate_up_tile;
                const uint8_t* then = tile + step < MOST_TILES ? at + step * gate_up_tile : next ? weights(unit_of(*next)) : nullptr;
                alignas(64) float out[MOST_TILES / 2 * MAX_GROUPS * ROWS * COLUMNS];
                packed_kernels.product({at, gate_up_tile, step, (int)tile_blocks, of_groups, groups_here, then}, out);
                for (int t = 0; t < step; t++)
                    for (int g = 0; g < groups_here; g++) activate_group(groups[first + g], unit.second * MOST_TILES + tile + t, out + (t * groups_here + g) * ROWS * COLUMNS);
            }
        });
        read_down_soon(me);
        meet(me);
        each(2, groups.size() * blocks, [&](size_t i) {
            const Group& group = groups[i / blocks];
            Activations rounded[PACKED_ROWS];
            const Activations* rows[PACKED_ROWS];
            for (int k = 0; k < group.count; k++) {
                const int use = group.first + k;
                round_block(&act[(use * blocks + i % blocks) * BLOCK], uses[use].weight, rounded[k]);
                rows[k] = &rounded[k];
            }
            packed_kernels.pack(rows, group.count, packed_inner[i]);
        });
        meet(me);
        auto place = [&](size_t expert, size_t run) { return down_of[expert] + run * RUN * down_tile(); };
        each_ahead(me, down_turns, [&](const Turns::Turn& now, const Turns::Turn* next) {
            const size_t run = run_of(now);
            for (uint32_t row = 0; row < num_rows && !adds; row++) std::memset(sums_of(row) + run * RUN * ROWS, 0, run_tiles(run) * ROWS * sizeof(float));
            for (size_t i = 0; i < experts.size(); i++) {
                const int first = first_group[i], groups_here = first_group[i + 1] - first, tiles_here = (int)run_tiles(run);
                const Packed* of_groups[MAX_GROUPS];
                for (int g = 0; g < groups_here; g++) of_groups[g] = &packed_inner[(first + g) * blocks];
                const uint8_t* then = i + 1 < experts.size() ? place(i + 1, run) : next ? place(0, run_of(*next)) : nullptr;
                alignas(64) float out[RUN * MAX_GROUPS * ROWS * COLUMNS];
                packed_kernels.product({place(i, run), down_tile(), tiles_here, (int)blocks, of_groups, groups_here, then}, out);
                for (int t = 0; t < tiles_here; t++)
                    for (int g = 0; g < groups_here; g++) add_down(groups[first + g], run * RUN + t, out + (t * groups_here + g) * ROWS * COLUMNS);
            }
        });
    }
    void activate_group(const Group& group, size_t tile, float* out) {
        for (int k = 0; k < group.count; k++) {
            for (int row = 0; row < ROWS; row++) out[row * COLUMNS + k * 2] += out[row * COLUMNS + k * 2 + 1];
            activate(group.first + k, tile, out + k * 2, out + 8 * COLUMNS + k * 2, COLUMNS);
        }
    }
    void add_down(const Group& group, size_t tile, const float* out) {
        for (int k = 0; k < group.count; k++) {
            float* to = sums_of(uses[group.first + k].row) + tile * ROWS;
            for (int row = 0; row < ROWS; row++) to[row] += out[row * COLUMNS + k * 2] + out[row * COLUMNS + k * 2 + 1];
        }
    }

    const Shape s;
    const Product product;
    const PackedKernels packed_kernels;
    uint32_t last, first_told;  // question; guess before the first one
    uint32_t num_rows = 0, layer = 0;  // of the question under way
    size_t tile_blocks, gate_up_tile, gate_up_bytes, home_tile, home_bytes;  // home: of down in host memory, the CPU's part
    std::vector<Item> asked_items;
    std::vector<std::pair<int, int>> wanted;  // of the disk: experts and their uses
    // Of the pass under way: a part of the question's experts, whose results replace the sums or are added to them.
    size_t blocks = 0;
    bool adds = false;
    std::vector<const uint8_t*> gate_up_of, down_of;
    std::vector<Activations> x, inner;
    std::vector<Packed> packed, packed_inner;
    std::vector<Group> groups;
    Turns up_turns, down_turns;
    std::vector<std::vector<size_t>> ends;  // of each thread: how many of its units of gate and up come before the end of each expert
    size_t unit_tiles = 1;
    std::vector<float> act;
    std::vector<Use> uses;
    std::vector<int> experts, first_use, first_group, in_order, distinct, packed_of;  // in_order: uses by row
    std::vector<std::vector<int>> by_row;
    std::atomic<bool> stop{false}, over{false}, resting{false};  // for the leader, and for the others; the disk is waited for
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> patience{20000};  // looks at the others before a thread makes room
    alignas(64) std::atomic<uint64_t> arrived{0};
    alignas(64) std::atomic<size_t> counters[3];
    std::atomic<double> busy{0.0};
    std::atomic<uint64_t> bytes{0};
    std::vector<Counter> ahead_bytes;  // by threads
    std::vector<std::thread> helpers;
    std::thread leader;
};

extern "C" {
// Null: there is no kernel for such weights, or no memory or threads for it.
void* share_start(const Shape* shape) {
    if (!product_for((int)shape->group)) return nullptr;
    try {
        return new Share(*shape);
    } catch (const std::exception&) {
        return nullptr;
    }
}
void share_stop(void* share) { delete (Share*)share; }
void share_counts(void* share, double* busy, uint64_t* bytes, uint64_t* ahead) {
    *busy = ((Share*)share)->busy_seconds(), *bytes = ((Share*)share)->bytes_read(), *ahead = ((Share*)share)->bytes_ahead();
}
// Asks as the device does, and waits, without taking a core from those that answer.
void share_ask(const Shape* shape) {
    Mailbox& box = *(Mailbox*)shape->mailbox;
    const uint32_t number = box.asked.load() + 1;
    box.asked.store(number, std::memory_order_release);
    const timespec pause{0, 20000};
    while (box.answered.load(std::memory_order_acquire) != number) nanosleep(&pause, nullptr);
}
}

}  // namespace tiles
