// The routed feed-forward: gate and up, activation, down and the weighted sum, for every row and each of its experts.
//
// Pairs of (row, expert) are sorted by expert, so that an expert's weights are read once for all rows that chose it. Packed weights take
// two steps: a thread that has made 32 activated values of a row quantizes them on the spot, as the down product wants them. In the
// second step a thread owns some outputs and adds up all experts for them, in the order of experts: a result depends on neither
// the threads nor the other rows. Other weights take one step more, with floats in between. (A feed-forward that is not routed gains nothing
// from being fused: gate and up are two regions of memory here, one there.)
#ifndef WINDLASS_ISA
#include "panel/panel.h"
#include "panel/vectors.h"

namespace windlass {

// Rows that share a tile belong to one expert.
struct Tile {
    int32_t expert, first, rows, height;  // `first`: position among the sorted pairs
    int64_t above;                        // rows of all tiles before, empty ones included
};

// Up to so many rows every thread quantizes them for itself, and every pair is a tile.
constexpr int64_t FEW_ROWS = 2;

}  // namespace windlass

#define WINDLASS_EACH "ops/experts.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(experts) { WINDLASS_PICK(experts)(op, worker); }

}  // namespace windlass

#else
#include "ops/activate_lanes.h"
#include "panel/quantize.h"

namespace windlass {
namespace {
namespace WINDLASS_ISA {

constexpr int TILE_FLOATS = TILE_ROWS * PANEL_ROWS;

struct Experts {
    const Op& op;
    Worker& worker;
    Matrix gate_up, down;
    int64_t rows, num_experts, active, x_stride, add_stride, width;
    const float *x, *weights, *gate_up_bias, *down_bias, *add;
    const int32_t* ids;
    float *out, *inner;                  // inner: [pairs][2 width], then [pairs][width], where floats stand in between
    uint8_t *x_tiles, *inner_tiles;      // or, for plain weights, x_tiles holds gathered rows of floats
    MultiplyPacked multiply;
    MultiplyFloats floats;
    // This thread's own.
    int32_t *order, *runs;               // pairs by expert; first tiles of experts that have any
    Tile* tiles;
    int64_t num_tiles, num_runs;
    uint8_t* few;                        // tiles of one row each
    const void* const* table;            // [experts][2]: where gate and up, and down, of each expert are; null: one after another

    bool is_few() const { return rows <= FEW_ROWS; }
    bool is_fused() const { return gate_up.is_packed() && down.is_packed() && width % BLOCK == 0; }
    const uint8_t* x_tile(const Tile& tile) const {
        if (is_few()) return few + order[tile.first] / active * tile_bytes(gate_up.inputs, 1);
        return x_tiles + tile.above * (gate_up.inputs / BLOCK * TILE_BYTES);
    }
    const float* x_rows(const Tile& tile) const {
        if (is_few()) return x + order[tile.first] / active * x_stride;
        return (const float*)x_tiles + tile.first * gate_up.inputs;
    }
    int64_t row_stride() const { return is_few() ? x_stride : gate_up.inputs; }
    uint8_t* inner_tile(const Tile& tile) const { return inner_tiles + tile.above * (width / BLOCK * TILE_BYTES); }
    // Of an expert; a table leaves out experts that take no part.
    bool is_here(int32_t id) const { return id >= 0 && id < num_experts && (!table || table[2 * id]); }
    Matrix gate_up_of(int64_t id) const { return table ? gate_up.at(table[2 * id]) : gate_up.expert(id); }
    Matrix down_of(int64_t id) const { return table ? down.at(table[2 * id + 1]) : down.expert(id); }
    float* activated() const { return inner + rows * active * 2 * width; }
};

// Counting sort; pairs whose expert is not here are left out.
inline void make_plan(Experts& all) {
    const int64_t pairs = all.rows * all.active, height = all.is_few() ? 1 : TILE_ROWS;
    const int64_t few_bytes = all.is_few() && all.gate_up.is_packed() ? all.rows * tile_bytes(all.gate_up.inputs, 1) : 0;
    const int64_t ints = pairs + 3 * (all.num_experts + 1);
    uint8_t* memory = (uint8_t*)all.worker.scratch(few_bytes + pairs * sizeof(Tile) + ints * 4);
    all.few = memory;
    all.tiles = (Tile*)(memory + few_bytes);
    all.order = (int32_t*)(all.tiles + pairs);
    int32_t *starts = all.order + pairs, *next = starts + all.num_experts + 1;
    all.runs = next + all.num_experts + 1;
    std::fill(starts, starts + all.num_experts + 1, 0);
    const auto is_here = [&](int64_t pair) { return all.is_here(all.ids[pair]); };
    for (int64_t pair = 0; pair < pairs; pair++)
        if (is_here(pair)) starts[all.ids[pair] + 1]++;
    for (int64_t expert = 0; expert < all.num_experts; expert++) {
        starts[expert + 1] += starts[expert];
        next[expert] = starts[expert];
    }
    for (int64_t pair = 0; pair < pairs; pair++)
        if (is_here(pair)) all.order[next[all.ids[pair]]++] = int32_t(pair);
    int64_t above = 0;
    all.num_tiles = all.num_runs = 0;
    for (int32_t expert = 0; expert < all.num_experts; expert++) {
        if (starts[expert] < starts[expert + 1]) all.runs[all.num_runs++] = int32_t(all.num_tiles);
        for (int64_t first = starts[expert]; first < starts[expert + 1]; first += height) {
            const int32_t count = int32_t(std::min<int64_t>(height, starts[expert + 1] - first));
            all.tiles[all.num_tiles++] = {expert, int32_t(first), count, tile_height(count), above};
            above += tile_height(count);
        }
    }
    all.runs[all.num_runs] = int32_t(all.num_tiles);
}

// `work` for this thread's share of all rows of all tiles.
template <class Work> INLINE void each_row(const Experts& all, Work work) {
    const Tile* last_tile = all.tiles + all.num_tiles - 1;
    int64_t first, last;
    all.worker.share(all.num_tiles ? last_tile->first + last_tile->rows : 0, 1, &first, &last);
    for (int64_t index = 0; index < all.num_tiles; index++) {
        const Tile& tile = all.tiles[index];
        for (int64_t i = std::max<int64_t>(first, tile.first); i < std::min<int64_t>(last, tile.first + tile.rows); i++)
            work(tile, int(i - tile.first));
    }
}

// Rows of x as the gate and up product wants them: int8 tiles, or rows of floats in the order of experts.
inline void gather_rows(const Experts& all) {
    const int64_t blocks = all.gate_up.inputs / BLOCK;
    const Correction correction = correction_of(all.gate_up.kind);
    if (all.is_few()) {
        if (!all.gate_up.is_packed()) return;
        for (int64_t row = 0; row < all.rows; row++)
            quantize_row(all.x + row * all.x_stride, 0, blocks, correction, all.few + row * tile_bytes(all.gate_up.inputs, 1), 1, 1, 0);
        return;
    }
    each_row(all, [&](const Tile& tile, int row) {
        const float* from = all.x + all.order[tile.first + row] / all.active * all.x_stride;
        if (all.gate_up.is_packed()) quantize_row(from, 0, blocks, correction, (uint8_t*)all.x_tile(tile), tile.height, tile.rows, row);
        else std::memcpy((float*)all.x_rows(tile) + row * all.gate_up.inputs, from, all.gate_up.inputs * 4);
    });
    all.worker.barrier();
}

enum class Gate : int64_t { SILU, GELU, GELU_TANH, CLAMPED_SWIGLU };  // as runtime/kernels/cpu/activate.py numbers them

INLINE F activated(Gate gate, float clamp, F x, F up) {
    x = minimum(x, splat(clamp));
    up = maximum(minimum(up, splat(clamp)), splat(-clamp));
    switch (gate) {
        case Gate::SILU: return silu(x) * up;
        case Gate::GELU: return gelu(x) * up;
        case Gate::GELU_TANH: return gelu_tanh(x) * up;
        default: return swish(x) * (up + 1.0f);
    }
}

// 32 columns of one tile: sums of two gate panels and two up panels become a block of the down product's tile.
using Sums = const float (*)[TILE_FLOATS];
inline void activate_tile(const Experts& all, const Tile& tile, int64_t block, Sums gates, Sums ups) {
    const Gate gate = Gate(all.op.ints[2 * MATRIX_INTS + 4]);
    const Correction correction = correction_of(all.down.kind);
    uint8_t* to = all.inner_tile(tile) + block * tile.height * TILE_BYTES;
    const float* bias = all.gate_up_bias ? all.gate_up_bias + tile.expert * 2 * all.width + block * BLOCK : nullptr;
    for (int row = 0; row < tile.rows; row++) {
        float values[BLOCK];
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK; i += W) {
            const int from = row * PANEL_ROWS + i % PANEL_ROWS;
            F x = load(gates[i / PANEL_ROWS] + from), up = load(ups[i / PANEL_ROWS] + from);
            if (bias) {
                x += load(bias + i);
                up += load(bias + all.width + i);
            }
            store(values + i, activated(gate, all.op.floats[0], x, up));
        }
        quantize_row(values, 0, 1, correction, to, tile.height, tile.rows, row);
    }
}

// Gate, up and activation: a thread takes some blocks of 32 columns of one expert at a time, as many as leave work for all: the longer
// a stretch of memory, the faster it is read.
inline void fused_step(const Experts& all) {
    constexpr int64_t MOST_BLOCKS = 8;
    const int64_t blocks = all.width / BLOCK, up = all.width / PANEL_ROWS;
    const int64_t even = std::min(MOST_BLOCKS, all.num_runs * blocks / (all.worker.count * 8));
    // Weights that several tiles meet should stay in a core's own cache meanwhile.
    const int64_t cached = all.rows > TILE_ROWS ? CACHED_BYTES / (4 * all.gate_up.panel_bytes) : MOST_BLOCKS;
    const int64_t some = std::max<int64_t>(1, std::min(even, cached));
    const int64_t pieces = (blocks + some - 1) / some;
    alignas(64) float sums[2][2 * MOST_BLOCKS][TILE_FLOATS];
    for (int64_t item = all.worker.take(); item < all.num_runs * pieces; item = all.worker.take()) {
        const int64_t run = item / pieces, first = item % pieces * some, last = std::min(first + some, blocks);
        const Matrix matrix = all.gate_up_of(all.tiles[all.runs[run]].expert);
        for (int64_t index = all.runs[run]; index < all.runs[run + 1]; index++) {
            const Tile& tile = all.tiles[index];
            for (int half = 0; half < 2; half++)
                for (int64_t panel = 2 * first; panel < 2 * last; panel++)
                    all.multiply(matrix, matrix.panel(panel + half * up), all.x_tile(tile), tile.height, sums[half][panel - 2 * first]);
            for (int64_t block = first; block < last; block++)
                activate_tile(all, tile, block, sums[0] + 2 * (block - first), sums[1] + 2 * (block - first));
        }
    }
    all.worker.barrier();
}

// Gate and up as floats: a thread takes some panels of one expert at a time.
inline void product_step(const Experts& all) {
    constexpr int64_t PANELS = 4;
    const int64_t panels = all.gate_up.panels(), pieces = (panels + PANELS - 1) / PANELS;
    alignas(64) float sums[TILE_FLOATS];
    for (int64_t item = all.worker.take(); item < all.num_runs * pieces; item = all.worker.take()) {
        const int64_t run = item / pieces, first = item % pieces * PANELS;
        const Matrix matrix = all.gate_up_of(all.tiles[all.runs[run]].expert);
        for (int64_t index = all.runs[run]; index < all.runs[run + 1]; index++) {
            const Tile& tile = all.tiles[index];
            for (int64_t panel = first; panel < std::min(first + PANELS, panels); panel++) {
                const int64_t column = panel * PANEL_ROWS, count = std::min<int64_t>(PANEL_ROWS, matrix.outputs - column);
                if (matrix.is_packed()) all.multiply(matrix, matrix.panel(panel), all.x_tile(tile), tile.height, sums);
                else all.floats(matrix, panel, all.x_rows(tile), all.row_stride(), tile.rows, rows_met(all.op, tile.rows), sums);
                const float* bias = all.gate_up_bias ? all.gate_up_bias + tile.expert * matrix.outputs + column : nullptr;
                for (int row = 0; row < tile.rows; row++) {
                    float* to = all.inner + (tile.first + row) * matrix.outputs + column;
                    for (int64_t i = 0; i < count; i++) to[i] = sums[row * PANEL_ROWS + i] + (bias ? bias[i] : 0.0f);
                }
            }
        }
    }
    all.worker.barrier();
}

// Activation of what product_step left, in the form that the down product wants.
inline void activate_step(const Experts& all) {
    const Gate gate = Gate(all.op.ints[2 * MATRIX_INTS + 4]);
    const int64_t width = all.width;
    each_row(all, [&](const Tile& tile, int row) {
        const float* from = all.inner + (tile.first + row) * 2 * width;
        float* to = all.activated() + (tile.first + row) * width;
        int64_t i = 0;
        for (; i + W <= width; i += W) store(to + i, activated(gate, all.op.floats[0], load(from + i), load(from + width + i)));
        if (i < width) {
            const F x = load_part(from + i, width - i), up = load_part(from + width + i, width - i);
            store_part(to + i, activated(gate, all.op.floats[0], x, up), width - i);
        }
        if (all.down.is_packed())
            quantize_row(to, 0, width / BLOCK, correction_of(all.down.kind), all.inner_tile(tile), tile.height, tile.rows, row);
    });
    all.worker.barrier();
}

// Initializes columns first .. last of the result.
inline void start_columns(const Experts& all, int64_t first, int64_t last) {
    for (int64_t row = 0; row < all.rows; row++) {
        float* out = all.out + row * all.down.outputs;
        if (all.add == all.out) continue;  // some of the experts are in it already
        if (all.add) std::memcpy(out + first, all.add + row * all.add_stride + first, (last - first) * 4);
        else std::fill(out + first, out + last, 0.0f);
    }
}

// out += weight * (sums + bias) for the rows of a tile and the 16 outputs from `column` on.
inline void add_tile(const Experts& all, const Tile& tile, int64_t column, const float* sums) {
    const int64_t count = std::min<int64_t>(PANEL_ROWS, all.down.outputs - column);
    const float* bias = all.down_bias ? all.down_bias + tile.expert * all.down.outputs + column : nullptr;
    for (int row = 0; row < tile.rows; row++, sums += PANEL_ROWS) {
        const int32_t pair = all.order[tile.first + row];
        const float weight = all.weights[pair];
        float* out = all.out + pair / all.active * all.down.outputs + column;
        if (count == PANEL_ROWS) {
#pragma GCC unroll 4
            for (int i = 0; i < PANEL_ROWS; i += W)
                store(out + i, load(out + i) + (bias ? load(sums + i) + load(bias + i) : load(sums + i)) * weight);
        } else {
            for (int64_t i = 0; i < count; i++) out[i] += (sums[i] + (bias ? bias[i] : 0.0f)) * weight;
        }
    }
}

// A thread takes some outputs at a time, and adds up all experts for them.
inline void down_step(const Experts& all) {
    const int64_t panels = all.down.panels();
    const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(4, panels / (all.worker.count * 8)));
    alignas(64) float sums[TILE_FLOATS];
    for (int64_t first = all.worker.take() * chunk; first < panels; first = all.worker.take() * chunk) {
        const int64_t last = std::min(first + chunk, panels);
        start_columns(all, first * PANEL_ROWS, std::min(last * PANEL_ROWS, all.down.outputs));
        for (int64_t index = 0; index < all.num_tiles; index++) {
            const Tile& tile = all.tiles[index];
            const Matrix matrix = all.down_of(tile.expert);
            for (int64_t panel = first; panel < last; panel++) {
                const float* values = all.activated() + tile.first * all.width;
                if (matrix.is_packed()) all.multiply(matrix, matrix.panel(panel), all.inner_tile(tile), tile.height, sums);
                else all.floats(matrix, panel, values, all.width, tile.rows, rows_met(all.op, tile.rows), sums);
                add_tile(all, tile, panel * PANEL_ROWS, sums);
            }
        }
    }
}

// data: out, x, ids, weights, gate and up, down, their biases, add, tiles of x, floats in between, tiles in between, table of experts;
// ints: both matrices, experts, active ones of a row, strides of x and add, activation; floats: clamp (or infinity).
void experts(const Op& op, Worker& worker) {
    const int64_t* ints = op.ints + 2 * MATRIX_INTS;
    const Matrix gate_up = matrix_of(op.ints, op.data[4]), down = matrix_of(op.ints + MATRIX_INTS, op.data[5]);
    Experts all{op, worker, gate_up, down, op.rows(), ints[0], ints[1], ints[2], ints[3], gate_up.outputs / 2,
                op.at<float>(1), op.at<float>(3), op.at<float>(6), op.at<float>(7), op.at<float>(8), op.at<int32_t>(2),
                op.at<float>(0), op.at<float>(10), op.at<uint8_t>(9), op.at<uint8_t>(11), packed_kernels().multiply, floats_kernel()};
    all.table = op.at<const void* const>(12);
    make_plan(all);
    gather_rows(all);
    if (all.is_fused()) {
        fused_step(all);
    } else {
        product_step(all);
        activate_step(all);
    }
    down_step(all);
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
