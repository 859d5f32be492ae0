// Attention over the paged cache: scheduling over threads. The kernel itself is in tile.h.
#ifndef WINDLASS_ISA
#include <cstddef>

namespace windlass {
namespace {

// Partial results of threads that share a sequence. Operations run one at a time, so one buffer is enough.
struct HandedOver {
    float* floats = nullptr;
    size_t size = 0;
} handed_over;

}  // namespace
}  // namespace windlass

#define WINDLASS_EACH "attention/attention.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(attention) { WINDLASS_PICK(attention)(op, worker); }

}  // namespace windlass

#else
#include <cstdlib>

#include "simd/product.h"
#include "attention/scores.h"
#include "attention/tile.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

// data: result [rows, heads * value dim], q, keys, values (latent: the keys), starts, lengths, blocks, counts, sinks or null, slopes or
// null, scales of e4m3 or null. ints: heads, kv heads, dim, value dim, row and head strides of q, blocks per sequence, window, type of the cache, whether it
// is latent, heads in a row of the result, kv heads of the cache (where the operation is for some of both). floats: scale.
Batch batch_of(const Op& op) {
    Batch batch;
    batch.result = op.at<float>(0);
    batch.q = op.at<float>(1);
    batch.keys = op.data[2];
    batch.values = op.data[3];
    batch.starts = op.at<int32_t>(4);
    batch.lengths = op.at<int32_t>(5);
    batch.blocks = op.at<int32_t>(6);
    batch.num_sequences = op.at<int32_t>(7)[1];
    batch.sinks = op.at<float>(8);
    batch.slopes = op.at<float>(9);
    batch.scales = op.at<uint8_t>(10);
    batch.num_heads = op.ints[0];
    batch.num_kv_heads = op.ints[1];
    batch.group = op.ints[0] / op.ints[1];
    batch.dim = op.ints[2];
    batch.value_dim = op.ints[3];
    batch.q_row_stride = op.ints[4];
    batch.q_head_stride = op.ints[5];
    batch.blocks_stride = op.ints[6];
    batch.window = op.ints[7];
    batch.narrow = op.ints[8] == BF16_TYPE;
    batch.latent = op.ints[9];
    batch.result_heads = op.ints[10];
    batch.cache_heads = op.ints[11];
    batch.scale = op.floats[0];
    return batch;
}

// Goes over the tiles of all sequences, those of the longest prompts' ends first within a sequence: they take longest.
class Tiles {
public:
    explicit Tiles(const Batch& batch) : batch(batch) {}

    // False: no more.
    bool next() {
        while (left == 0) {
            if (++sequence >= batch.num_sequences) return false;
            open();
        }
        left--;
        tile.first = left * pairs_each;
        tile.count = std::min(pairs_each, num_pairs - tile.first);
        first_chunk = tile.first_token(batch) / CHUNK_TOKENS;
        num_chunks = (tile.end(batch) - 1) / CHUNK_TOKENS + 1 - first_chunk;
        return true;
    }

    int64_t cost() const { return tile.count * (tile.end(batch) - tile.first_token(batch)); }
    // Of what the chunks of all heads leave.
    int64_t floats_each() const { return Mixture::floats(batch, tile.count); }
    int64_t floats() const { return batch.num_kv_heads * num_chunks * floats_each(); }

    Tile tile{};
    int64_t first_chunk = 0, num_chunks = 0;

private:
    void open() {
        const int64_t rows = batch.starts[sequence + 1] - batch.starts[sequence];
        num_pairs = rows * batch.group;
        left = (num_pairs + MAX_PAIRS - 1) / MAX_PAIRS;
        if (left == 0) return;
        pairs_each = ((num_pairs + left - 1) / left + 5) / 6 * 6;
        left = (num_pairs + pairs_each - 1) / pairs_each;
        tile.sequence = sequence;
        tile.first_row = batch.starts[sequence];
        tile.first_position = batch.lengths[sequence] - rows;
    }

    const Batch& batch;
    int64_t sequence = -1, num_pairs = 0, pairs_each = 0, left = 0;
};

// What a thread takes at a time: a tile with a head of keys, and some of its chunks.
struct Item {
    Tile tile;
    int64_t first_chunk, num_chunks;
    float* left_at;  // what is left of a single chunk, for `combine`
};

// Items of one thread: a tile's chunks all together, or one by one.
class Items {
public:
    Items(const Batch& batch, Worker& worker, float* memory) : batch(batch), worker(worker), tiles(batch), memory(memory) {
        has_tile = tiles.next();
    }

    bool next(Item* item) {
        const int64_t taken = worker.take();
        for (; has_tile && taken >= first + num_items(); has_tile = tiles.next()) {
            first += num_items();
            if (memory) memory += tiles.floats();
        }
        if (!has_tile) return false;
        const int64_t index = taken - first;
        item->tile = tiles.tile;
        item->tile.kv_head = memory ? index / tiles.num_chunks : index;
        item->first_chunk = tiles.first_chunk + (memory ? index % tiles.num_chunks : 0);
        item->num_chunks = memory ? 1 : tiles.num_chunks;
        item->left_at = memory ? memory + index * tiles.floats_each() : nullptr;
        return true;
    }

private:
    int64_t num_items() const { return batch.num_kv_heads * (memory ? tiles.num_chunks : 1); }

    const Batch& batch;
    Worker& worker;
    Tiles tiles;
    float* memory;
    bool has_tile;
    int64_t first = 0;
};

template <class T> Piece<T> first_piece(const Batch& batch, const Item& item, int64_t chunk) {
    const int64_t start = std::max(item.tile.first_token(batch), chunk * CHUNK_TOKENS);
    return piece_at<T>(batch, item.tile, start, std::min(item.tile.end(batch), (chunk + 1) * CHUNK_TOKENS));
}

void finish_all(const Batch& batch, const Tile& tile, const Mixture& all) {
    for (int64_t pair = 0; pair < tile.count; pair++)
        finish(batch, tile, pair, all.peak[pair], all.total[pair], all.mixed + pair * batch.mixed_stride());
}

void fold_all(const Batch& batch, const Tile& tile, const Mixture& all, const Mixture& chunk) {
    const int64_t width = batch.mixed_stride();
    for (int64_t pair = 0; pair < tile.count; pair++)
        fold(all.peak + pair, all.total + pair, all.mixed + pair * width, chunk.peak[pair], chunk.total[pair],
             chunk.mixed + pair * width, width);
}

template <class T> void attend_item(const Batch& batch, const Scratch& scratch, const Item& item, const Piece<T>* after) {
    take_pairs(batch, item.tile, scratch);
    const Mixture all(item.left_at ? item.left_at : scratch.one, item.tile.count), chunk(scratch.other, item.tile.count);
    for (int64_t i = 0; i < item.num_chunks; i++) {
        const bool last = i + 1 == item.num_chunks;
        const Piece<T> next = last ? Piece<T>{} : first_piece<T>(batch, item, item.first_chunk + i + 1);
        attend_chunk<T>(batch, item.tile, scratch, item.first_chunk + i, last ? after : &next, i ? chunk : all);
        if (i) fold_all(batch, item.tile, all, chunk);
    }
    if (!item.left_at) finish_all(batch, item.tile, all);
}

// All items; those of single chunks are left at `memory`. The next item is taken early, so that its keys are on their way.
template <class T> void attend_items(const Batch& batch, Worker& worker, float* memory) {
    const Scratch scratch(batch, worker);
    Items items(batch, worker, memory);
    Item item, next;
    bool more = items.next(&item);
    if (more) {
        const Piece<T> piece = first_piece<T>(batch, item, item.first_chunk);
        for (int block = 0; block < PIECE_BLOCKS; block++) fetch(piece.keys[block], batch.head_elements() * sizeof(T));
    }
    for (; more; item = next) {
        more = items.next(&next);
        const Piece<T> after = more ? first_piece<T>(batch, next, next.first_chunk) : Piece<T>{};
        attend_item<T>(batch, scratch, item, more ? &after : nullptr);
    }
}

void combine(const Batch& batch, Worker& worker, float* memory) {
    Tiles tiles(batch);
    int64_t taken = worker.take(), first = 0;
    for (; tiles.next(); first += batch.num_kv_heads, memory += tiles.floats())
        for (; taken < first + batch.num_kv_heads; taken = worker.take()) {
            Tile tile = tiles.tile;
            tile.kv_head = taken - first;
            float* chunks = memory + tile.kv_head * tiles.num_chunks * tiles.floats_each();
            const Mixture all(chunks, tile.count);
            for (int64_t i = 1; i < tiles.num_chunks; i++)
                fold_all(batch, tile, all, Mixture(chunks + i * tiles.floats_each(), tile.count));
            finish_all(batch, tile, all);
        }
}

// Threads share the chunks of a tile where whole tiles would leave some of them idle. Also says how much memory that takes.
bool shares_chunks(const Batch& batch, int num_threads, int64_t* floats) {
    int64_t total = 0, largest_item = 0, most_chunks = 0;
    *floats = 0;
    for (Tiles tiles(batch); tiles.next();) {
        total += tiles.cost() * batch.num_kv_heads;
        largest_item = std::max(largest_item, tiles.cost());
        most_chunks = std::max(most_chunks, tiles.num_chunks);
        *floats += tiles.floats();
    }
    return num_threads > 1 && most_chunks > 1 && largest_item * num_threads * 4 > total;
}

void attend(const Batch& batch, Worker& worker, float* memory) {
    if (batch.scales) attend_items<E4m3>(batch, worker, memory);
    else if (batch.narrow) attend_items<Bf16>(batch, worker, memory);
    else attend_items<float>(batch, worker, memory);
}

void attention(const Op& op, Worker& worker) {
    const Batch batch = batch_of(op);
    int64_t floats;
    if (!shares_chunks(batch, worker.count, &floats)) return attend(batch, worker, nullptr);
    if (worker.index == 0 && size_t(floats) > handed_over.size) {
        std::free(handed_over.floats);
        handed_over.floats = static_cast<float*>(std::aligned_alloc(64, (floats + 15) / 16 * 64));
        handed_over.size = floats;
        if (!handed_over.floats) std::abort();
    }
    worker.barrier();
    attend(batch, worker, handed_over.floats);
    worker.barrier();
    combine(batch, worker, handed_over.floats);
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
