// Attention of one tile of queries that share a head of keys and values. Included once per instruction set.
//
// Tokens are taken in pieces of 64, and pieces in chunks of 256, both counted from the start of the sequence. Within a chunk softmax is
// made as the pieces come (arXiv 1805.02867); chunks are then folded together in order. So a query's result is the same sums in the same
// order whether it comes alone or in a long prompt, whether its chunks go to one thread or to many.

namespace windlass {
namespace {
namespace WINDLASS_ISA {

constexpr int64_t CHUNK_TOKENS = 256;
constexpr int64_t MAX_PAIRS = 96;        // pairs of a row and a head in a tile
constexpr int64_t PAIRS_FOR_PANELS = 12;  // from so many on, keys and values are made fp32 once and not once per six pairs
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// What does not change from tile to tile.
struct Batch {
    const float* q;
    const void *keys, *values;
    const uint8_t* scales;  // of e4m3, else null
    const float *sinks, *slopes;
    float* result;
    const int32_t *starts, *lengths, *blocks;
    int64_t num_sequences, num_heads, num_kv_heads, group, dim, value_dim, q_row_stride, q_head_stride, blocks_stride, window;
    int64_t result_heads, cache_heads;
    bool latent, narrow;
    float scale;

    int64_t mixed_stride() const { return (value_dim + W - 1) / W * W; }
    // Elements of a block, all its heads.
    int64_t head_elements() const { return BLOCK_TOKENS * dim; }
    int64_t value_elements() const { return BLOCK_TOKENS * (latent ? dim : value_dim); }
    int64_t value_stride() const { return latent ? dim : value_dim; }
};

// Pairs first .. first + count of a sequence, row by row and within a row head by head of the group.
struct Tile {
    int64_t sequence, kv_head, first, count, first_row, first_position;

    int64_t row(const Batch& batch, int64_t pair) const { return first_row + (first + pair) / batch.group; }
    int64_t head(const Batch& batch, int64_t pair) const { return kv_head * batch.group + (first + pair) % batch.group; }
    int64_t position(const Batch& batch, int64_t pair) const { return first_position + (first + pair) / batch.group; }
    int64_t first_token(const Batch& batch) const { return std::max<int64_t>(0, position(batch, 0) - batch.window + 1); }
    int64_t end(const Batch& batch) const { return position(batch, count - 1) + 1; }
};

// Of each pair: its largest score, the sum of its weights (relative to that score), and the values summed by those weights.
struct Mixture {
    float *peak, *total, *mixed;

    static int64_t floats(const Batch& batch, int64_t pairs) { return pairs * (2 + batch.mixed_stride()); }
    Mixture(float* memory, int64_t pairs) : peak(memory), total(memory + pairs), mixed(memory + 2 * pairs) {}
};

struct Scratch {
    float *queries, *scores, *totals, *corrections, *keys, *values, *one, *other;
    float* slopes;       // of each pair; zero where there are none
    int32_t* positions;  // of each pair

    static constexpr int64_t aligned(int64_t floats) { return (floats + 15) / 16 * 16; }

    Scratch(const Batch& batch, Worker& worker) {
        const int64_t sizes[] = {MAX_PAIRS * batch.dim, MAX_PAIRS * PIECE_TOKENS, MAX_PAIRS * W, MAX_PAIRS,
                                 PIECE_TOKENS * batch.dim, PIECE_TOKENS * batch.value_dim, Mixture::floats(batch, MAX_PAIRS),
                                 Mixture::floats(batch, MAX_PAIRS), MAX_PAIRS};
        float** parts[] = {&queries, &scores, &totals, &corrections, &keys, &values, &one, &other, &slopes};
        int64_t total = MAX_PAIRS;
        for (int64_t size : sizes) total += aligned(size);
        float* next = static_cast<float*>(worker.scratch(total * sizeof(float)));
        for (int part = 0; part < 9; next += aligned(sizes[part++])) *parts[part] = next;
        positions = reinterpret_cast<int32_t*>(next);
    }
};

// Queries of the tile one after another, times the scale, and what else its pairs have.
void take_pairs(const Batch& batch, const Tile& tile, const Scratch& scratch) {
    float* queries = scratch.queries;
    for (int64_t pair = 0; pair < tile.count; pair++, queries += batch.dim) {
        const int64_t head = tile.head(batch, pair);
        scratch.positions[pair] = int32_t(tile.position(batch, pair));
        scratch.slopes[pair] = batch.slopes ? batch.slopes[head] : 0.0f;
        const float* q = batch.q + tile.row(batch, pair) * batch.q_row_stride + head * batch.q_head_stride;
        int64_t d = 0;
        for (; d + W <= batch.dim; d += W) store(queries + d, load(q + d) * batch.scale);
        for (; d < batch.dim; d++) queries[d] = q[d] * batch.scale;
    }
}

template <class T> void widen(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = number(from + i);
}

// Rows of `width` elements, one per token of a block, to elements of all 16 tokens side by side.
template <class T> void widen_across(const T* from, int64_t width, float* to) {
    for (int64_t token = 0; token < BLOCK_TOKENS; token += W) {
        int64_t d = 0;
        for (; d + W <= width; d += W) {
            F tile[W];
            for (int i = 0; i < W; i++) tile[i] = load(from + (token + i) * width + d);
            transpose(tile);
            for (int i = 0; i < W; i++) store(to + (d + i) * BLOCK_TOKENS + token, tile[i]);
        }
        for (; d < width; d++)
            for (int i = 0; i < W; i++) to[d * BLOCK_TOKENS + token + i] = number(from + (token + i) * width + d);
    }
}

// Powers of two of W tokens, or of one, from their bytes.
INLINE F powers(const uint8_t* scales) { return (F)(widened(scales) << 23); }
INLINE F power(uint8_t scale) { return (F)splat_int(int32_t(scale) << 23); }

// Elements of 16 tokens side by side, each times its token's power, in place.
void scale_across(float* numbers, int64_t dim, const uint8_t* scales) {
    for (int v = 0; v < VECTORS; v++) {
        const F factors = powers(scales + v * W);
        for (int64_t d = 0; d < dim; d++) store(numbers + d * BLOCK_TOKENS + v * W, load(numbers + d * BLOCK_TOKENS + v * W) * factors);
    }
}
void scale_along(float* numbers, int64_t count, F factor) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(numbers + i, load(numbers + i) * factor);
    for (; i < count; i++) numbers[i] *= factor[0];
}

// Tokens that a query sees: those behind `before` up to its own position.
struct Sight {
    int64_t position, before;
};

// Scores of one pair as softmax wants them, with the bias of distance and masked; returns the largest.
INLINE float look(float* scores, int64_t num_vectors, int64_t start, Sight sight, bool masked, float slope) {
    F most = splat(NEVER);
    for (int64_t v = 0; v < num_vectors; v++) {
        F score = load(scores + v * W);
        if (masked || slope != 0.0f) {
            const I token = iota() + int32_t(start + v * W);
            const I seen = (token <= int32_t(sight.position)) & (token > int32_t(sight.before));
            score = multiply_add(splat(slope), __builtin_convertvector(token - int32_t(sight.position), F), score);
            score = seen ? score : splat(NEVER);
            store(scores + v * W, score);
        }
        most = maximum(most, score);
    }
    return largest(most);
}

// Scores of one pair to weights, relative to its largest score so far.
INLINE void weigh(float* scores, int64_t num_vectors, float peak, float correction, float* totals) {
    if (peak == NEVER) peak = 0.0f;
    F total = load(totals) * correction;
    for (int64_t v = 0; v < num_vectors; v++) {
        const F weight = exponential(load(scores + v * W) - peak);
        store(scores + v * W, weight);
        total += weight;
    }
    store(totals, total);
}

// Pairs first .. first + count of a tile that are worked on together, and how many tokens of a piece the last of them sees.
struct Few {
    int64_t first, count, tokens;
};

// Goes over all pairs of a tile but those that see nothing of the piece.
template <class Function> INLINE void in_few(const Tile& tile, const Scratch& scratch, int64_t start, int64_t end, Function function) {
    for (int64_t first = 0, count; first < tile.count; first += count) {
        count = tile_rows(tile.count - first);
        const int64_t tokens = std::min<int64_t>(end, scratch.positions[first + count - 1] + 1) - start;
        if (tokens > 0) function(Few{first, count, tokens});
    }
}

// Scores of all pairs to weights. Corrections are what older weights must be multiplied with, now that larger scores are known.
void weigh_all(const Batch& batch, const Tile& tile, const Scratch& scratch, int64_t start, int64_t end, float* peaks) {
    in_few(tile, scratch, start, end, [&](Few few) {
        const int64_t blocks = blocks_of(few.tokens);
        for (int64_t pair = few.first; pair < few.first + few.count; pair++) {
            const int64_t position = scratch.positions[pair];
            const Sight sight{position, std::max<int64_t>(position - batch.window, -1)};
            const bool masked = start + blocks * BLOCK_TOKENS - 1 > position || start <= sight.before;
            const float most =
                look(scratch.scores + pair * PIECE_TOKENS, blocks * VECTORS, start, sight, masked, scratch.slopes[pair]);
            const float before = peaks[pair];
            peaks[pair] = std::max(before, most);
            scratch.corrections[pair] = peaks[pair] == before ? 0.0f : before - peaks[pair];
        }
    });
    for (int64_t pair = 0; pair < tile.count; pair += W)
        store(scratch.corrections + pair, exponential(load(scratch.corrections + pair)));
    in_few(tile, scratch, start, end, [&](Few few) {
        for (int64_t pair = few.first; pair < few.first + few.count; pair++)
            weigh(scratch.scores + pair * PIECE_TOKENS, blocks_of(few.tokens) * VECTORS, peaks[pair], scratch.corrections[pair],
                  scratch.totals + pair * W);
    });
}

// The piece of the sequence that holds token `start`, up to `end` at most. Blocks it does not have are its first again.
template <class T> Piece<T> piece_at(const Batch& batch, const Tile& tile, int64_t start, int64_t end) {
    Piece<T> piece;
    piece.start = start / PIECE_TOKENS * PIECE_TOKENS;
    piece.end = std::min(end, piece.start + PIECE_TOKENS);
    const int32_t* blocks = batch.blocks + tile.sequence * batch.blocks_stride + piece.start / BLOCK_TOKENS;
    const int64_t num_blocks = blocks_of(piece.end - piece.start);
    for (int64_t block = 0; block < PIECE_BLOCKS; block++) {
        const int64_t place = blocks[block < num_blocks ? block : 0] * batch.cache_heads + tile.kv_head;
        piece.keys[block] = static_cast<const T*>(batch.keys) + place * batch.head_elements();
        piece.values[block] = static_cast<const T*>(batch.values) + place * batch.value_elements();
        piece.scales[block] = batch.scales ? batch.scales + place * (batch.latent ? 1 : 2) * BLOCK_TOKENS : nullptr;
    }
    return piece;
}

// A piece into the mixture.
template <class T>
void attend_piece(const Batch& batch, const Tile& tile, const Scratch& scratch, const Piece<T>& piece, const Piece<T>* ahead,
                  int64_t value_stride, const Mixture& mixture) {
    const Piece<T>* fetched = ahead;
    in_few(tile, scratch, piece.start, piece.end, [&](Few few) {
        make_scores(few.count, scratch.queries + few.first * batch.dim, batch.dim, piece.keys, blocks_of(few.tokens), fetched,
                    scratch.scores + few.first * PIECE_TOKENS);
        fetched = nullptr;
    });
    weigh_all(batch, tile, scratch, piece.start, piece.end, mixture.peak);
    Pieces<T> values{piece.values, BLOCK_TOKENS, value_stride, ahead ? ahead->values : nullptr};
    in_few(tile, scratch, piece.start, piece.end, [&](Few few) {
        product(few.count, scratch.scores + few.first * PIECE_TOKENS, PIECE_TOKENS, values, few.tokens, batch.value_dim,
                scratch.corrections + few.first, mixture.mixed + few.first * batch.mixed_stride(), batch.mixed_stride());
        values.ahead = nullptr;
    });
}

// As above, of keys and values made fp32 first.
template <class T>
void attend_panels(const Batch& batch, const Tile& tile, const Scratch& scratch, const Piece<T>& piece, const Piece<T>* ahead,
                   const Mixture& mixture) {
    Piece<float> wide;
    wide.start = piece.start;
    wide.end = piece.end;
    for (int64_t block = 0; block < blocks_of(piece.end - piece.start); block++) {
        float* key = scratch.keys + block * BLOCK_TOKENS * batch.dim;
        float* value = scratch.values + block * BLOCK_TOKENS * batch.value_dim;
        wide.keys[block] = key;
        wide.values[block] = value;
        if (ahead) fetch(ahead->keys[block], BLOCK_TOKENS * batch.dim * sizeof(T));
        if (ahead && !batch.latent) fetch(ahead->values[block], BLOCK_TOKENS * batch.value_dim * sizeof(T));
        if (batch.latent) {
            widen_across(piece.keys[block], batch.dim, key);
            for (int64_t token = 0; token < BLOCK_TOKENS; token++)
                widen(piece.values[block] + token * batch.dim, batch.value_dim, value + token * batch.value_dim);
        } else {
            widen(piece.keys[block], BLOCK_TOKENS * batch.dim, key);
            widen(piece.values[block], BLOCK_TOKENS * batch.value_dim, value);
        }
        if (!batch.scales) continue;
        const uint8_t* of_values = piece.scales[block] + (batch.latent ? 0 : BLOCK_TOKENS);
        scale_across(key, batch.dim, piece.scales[block]);
        for (int64_t token = 0; token < BLOCK_TOKENS; token++)
            scale_along(value + token * batch.value_dim, batch.value_dim, power(of_values[token]));
    }
    attend_piece<float>(batch, tile, scratch, wide, nullptr, batch.value_dim, mixture);
}

// What the tile sees of chunk number `chunk`; its pairs are taken already. `after`: what will be wanted next, or null.
template <class T>
void attend_chunk(const Batch& batch, const Tile& tile, const Scratch& scratch, int64_t chunk, const Piece<T>* after, const Mixture& mixture) {
    std::fill(mixture.peak, mixture.peak + tile.count, NEVER);
    std::memset(scratch.totals, 0, tile.count * W * sizeof(float));
    std::memset(mixture.mixed, 0, tile.count * batch.mixed_stride() * sizeof(float));
    const int64_t end = std::min(tile.end(batch), (chunk + 1) * CHUNK_TOKENS);
    const bool panels = batch.latent || batch.scales || (batch.narrow && tile.count >= PAIRS_FOR_PANELS);
    Piece<T> piece = piece_at<T>(batch, tile, std::max(chunk * CHUNK_TOKENS, tile.first_token(batch)), end), next;
    for (;; piece = next) {
        const bool last = piece.end == end;
        if (!last) next = piece_at<T>(batch, tile, piece.end, end);
        const Piece<T>* ahead = last ? after : &next;
        if (panels) attend_panels(batch, tile, scratch, piece, ahead, mixture);
        else if constexpr (!std::is_same<T, E4m3>::value)
            attend_piece(batch, tile, scratch, piece, ahead, batch.value_stride(), mixture);
        if (last) break;
    }
    for (int64_t pair = 0; pair < tile.count; pair++) mixture.total[pair] = sum(load(scratch.totals + pair * W));
}

// What one pair has of a later chunk, added to what it has.
INLINE void fold(float* peak, float* total, float* mixed, float chunk_peak, float chunk_total, const float* chunk_mixed, int64_t width) {
    if (chunk_peak == NEVER) return;
    const float now = std::max(*peak, chunk_peak);
    const float mine = *peak == NEVER ? 0.0f : exponential(splat(*peak - now))[0], theirs = exponential(splat(chunk_peak - now))[0];
    *peak = now;
    *total = multiply_add(*total, mine, chunk_total * theirs);
    for (int64_t i = 0; i < width; i += W) store(mixed + i, multiply_add(load(mixed + i), splat(mine), load(chunk_mixed + i) * theirs));
}

// Applies the attention sink and writes the result.
INLINE void finish(const Batch& batch, const Tile& tile, int64_t pair, float peak, float total, const float* mixed) {
    const int64_t head = tile.head(batch, pair);
    if (batch.sinks) total += exponential(splat(batch.sinks[head] - peak))[0];
    const float share = 1.0f / total;
    float* result = batch.result + (tile.row(batch, pair) * batch.result_heads + head) * batch.value_dim;
    int64_t i = 0;
    for (; i + W <= batch.value_dim; i += W) store(result + i, load(mixed + i) * share);
    for (; i < batch.value_dim; i++) result[i] = mixed[i] * share;
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
