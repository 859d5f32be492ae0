// Queries times keys that lie across their blocks, so that the scores of a block's 16 tokens are one vector (or two, or four).
// Included once per instruction set.

namespace windlass {
namespace {
namespace WINDLASS_ISA {

constexpr int64_t PIECE_TOKENS = 64;  // whose scores are made, weighed and spent together
constexpr int PIECE_BLOCKS = PIECE_TOKENS / BLOCK_TOKENS;
constexpr int VECTORS = BLOCK_TOKENS / W;  // in a block

// Blocks side by side in a tile of R queries: as many as there are registers for.
constexpr int tile_blocks(int rows) { return W == 16 ? 4 : W == 8 ? (rows == 1 ? 4 : rows <= 3 ? 2 : 1) : rows == 1 ? 2 : 1; }

// Where keys and values of the blocks of a piece lie. Those of the piece after this one are fetched while this one is worked on: a
// head's blocks are far apart, and a processor that waits for each of them reaches a tenth of the memory's bandwidth.
template <class T> struct Piece {
    const T *keys[PIECE_BLOCKS], *values[PIECE_BLOCKS];
    const uint8_t* scales[PIECE_BLOCKS];  // of e4m3: those of keys, then (not latent) those of values
    int64_t start, end;
};

INLINE int64_t blocks_of(int64_t tokens) { return (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }

// scores [R, PIECE_TOKENS]: every one a chain of multiply-adds in the order of the dimensions.
template <int R, int B, class T>
INLINE void scores_tile(const float* queries, int64_t dim, const T* const* keys, const Piece<T>* ahead, float* scores) {
    F sums[R][B * VECTORS] = {};
    auto add = [&](int64_t d) __attribute__((always_inline)) {
        F key[B * VECTORS];
#pragma GCC unroll 16
        for (int b = 0; b < B; b++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) key[b * VECTORS + v] = load(keys[b] + d * BLOCK_TOKENS + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const F query = splat(queries[r * dim + d]);
#pragma GCC unroll 16
            for (int v = 0; v < B * VECTORS; v++) sums[r][v] = multiply_add(query, key[v], sums[r][v]);
        }
    };
    int64_t d = 0;
    if (ahead)
        for (; d + 2 <= dim; d += 2) {
#pragma GCC unroll 4
            for (int b = 0; b < PIECE_BLOCKS; b++) fetch(ahead->keys[b] + d * BLOCK_TOKENS, 2 * BLOCK_TOKENS * sizeof(T));
            add(d);
            add(d + 1);
        }
    for (; d < dim; d++) add(d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < B * VECTORS; v++) store(scores + r * PIECE_TOKENS + v * W, sums[r][v]);
}

template <int R, class T>
void scores_rows(const float* queries, int64_t dim, const T* const* keys, int64_t num_blocks, const Piece<T>* ahead, float* scores) {
    constexpr int B = tile_blocks(R);
    int64_t block = 0;
    for (; block + B <= num_blocks; block += B, ahead = nullptr)
        scores_tile<R, B>(queries, dim, keys + block, ahead, scores + block * BLOCK_TOKENS);
    if (B > 2 && block + 2 <= num_blocks) {
        scores_tile<R, 2>(queries, dim, keys + block, ahead, scores + block * BLOCK_TOKENS);
        block += 2;
        ahead = nullptr;
    }
    for (; block < num_blocks; block++, ahead = nullptr)
        scores_tile<R, 1>(queries, dim, keys + block, ahead, scores + block * BLOCK_TOKENS);
}

// `rows` queries (1, 2, 3, 4 or 6) by the keys of some blocks; the piece `ahead` (or null) is fetched meanwhile.
template <class T>
void make_scores(int64_t rows, const float* queries, int64_t dim, const T* const* keys, int64_t num_blocks, const Piece<T>* ahead,
                 float* scores) {
    switch (rows) {
        case 1: return scores_rows<1>(queries, dim, keys, num_blocks, ahead, scores);
        case 2: return scores_rows<2>(queries, dim, keys, num_blocks, ahead, scores);
        case 3: return scores_rows<3>(queries, dim, keys, num_blocks, ahead, scores);
        case 4: return scores_rows<4>(queries, dim, keys, num_blocks, ahead, scores);
        default: return scores_rows<6>(queries, dim, keys, num_blocks, ahead, scores);
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
