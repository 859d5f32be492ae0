// Few rows times a matrix, in tiles that stay in registers. Included once per instruction set.
//
// Every element of a result is one chain of multiply-adds in the order of the matrix's rows, however the tiles fall: results do not
// depend on what else is in a batch.

namespace windlass {
namespace {
namespace WINDLASS_ISA {

// A matrix whose rows lie in pieces of `rows_each`, as values do in the blocks of a cache. `ahead`, unless it is null: pieces that will
// be wanted next, which are fetched meanwhile.
template <class T> struct Pieces {
    const T* const* first;
    int64_t rows_each, stride;
    const T* const* ahead = nullptr;
};

// How many of `left` rows the next tile takes: tiles come in 1, 2, 3, 4 and 6 rows.
INLINE int64_t tile_rows(int64_t left) {
    if (left == 5) return 3;
    if (left == 7 || left == 8) return 4;
    return left > 6 ? 6 : left;
}

// Vectors side by side in a tile: with these every register set is used, and multiply-adds hide their own latency.
constexpr int tile_vectors(int rows) { return W == 16 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

// V vectors of a row. Of bf16, two at a time are even and odd elements of the same 2 W numbers: one instruction each, where to keep
// them in order would take two. What they are added to is in that order too, from `part` to `pair`.
template <int V> INLINE void load_row(const float* from, F* values) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) values[v] = load(from + v * W);
}
template <int V> INLINE void load_row(const Fp16* from, F* values) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) values[v] = load(from + v * W);
}
template <int V> INLINE void load_row(const Bf16* from, F* values) {
    if (V == 1) {
        values[0] = load(from);
        return;
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2) {
        I words;
        std::memcpy(&words, from + v * W, sizeof words);
        values[v] = (F)(words << 16);
        values[v + 1] = (F)(words & int32_t(0xffff0000));
    }
}
template <class T> constexpr bool in_pairs(int vectors) { return std::is_same<T, Bf16>::value && vectors > 1; }

// result = scale * result + x @ matrix, or x @ matrix where scale is null.
template <int R, int V, bool Fetch, class T>
INLINE void product_tile(const float* x, int64_t x_stride, const Pieces<T>& matrix, int64_t num_rows, int64_t column,
                         const float* scale, float* result, int64_t result_stride) {
    F sums[R][V] = {};
    if (scale)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = load(result + r * result_stride + column + v * W) * scale[r];
            if (in_pairs<T>(V))
#pragma GCC unroll 4
                for (int v = 0; v < V; v += 2) part(&sums[r][v], &sums[r][v + 1]);
        }
    for (int64_t start = 0, piece = 0; start < num_rows; start += matrix.rows_each, piece++) {
        const T* row = matrix.first[piece] + column;
        const T* ahead = matrix.ahead ? matrix.ahead[piece] + column : row;
        const float* factors = x + start;
        const int64_t count = std::min(matrix.rows_each, num_rows - start);
        for (int64_t i = 0; i < count; i++, row += matrix.stride, ahead += matrix.stride) {
            if (Fetch) fetch(ahead, V * W * sizeof(T));
            F values[V];
            load_row<V>(row, values);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const F factor = splat(factors[r * x_stride + i]);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) sums[r][v] = multiply_add(factor, values[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        if (in_pairs<T>(V))
#pragma GCC unroll 4
            for (int v = 0; v < V; v += 2) pair(&sums[r][v], &sums[r][v + 1]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(result + r * result_stride + column + v * W, sums[r][v]);
    }
}

// Columns that do not fill a vector.
template <class T>
void product_rest(int64_t rows, const float* x, int64_t x_stride, const Pieces<T>& matrix, int64_t num_rows, int64_t column,
                  int64_t width, const float* scale, float* result, int64_t result_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = column; c < width; c++) {
            float total = scale ? result[r * result_stride + c] * scale[r] : 0.0f;
            for (int64_t i = 0; i < num_rows; i++)
                total = multiply_add(
                    x[r * x_stride + i], number(matrix.first[i / matrix.rows_each] + i % matrix.rows_each * matrix.stride + c), total);
            result[r * result_stride + c] = total;
        }
}

template <int R, class T>
void product_rows(const float* x, int64_t x_stride, const Pieces<T>& matrix, int64_t num_rows, int64_t width, const float* scale,
                  float* result, int64_t result_stride) {
    constexpr int V = tile_vectors(R);
    int64_t column = 0;
    if (matrix.ahead)
        for (; column + V * W <= width; column += V * W)
            product_tile<R, V, true>(x, x_stride, matrix, num_rows, column, scale, result, result_stride);
    for (; column + V * W <= width; column += V * W)
        product_tile<R, V, false>(x, x_stride, matrix, num_rows, column, scale, result, result_stride);
    for (; column + W <= width; column += W)
        product_tile<R, 1, true>(x, x_stride, matrix, num_rows, column, scale, result, result_stride);
    if (column < width) product_rest(R, x, x_stride, matrix, num_rows, column, width, scale, result, result_stride);
}

// result [rows, width] = scale * result + x [rows, num_rows] @ matrix [num_rows, width]; the strides are between rows.
template <class T>
void product(int64_t rows, const float* x, int64_t x_stride, const Pieces<T>& pieces, int64_t num_rows, int64_t width,
             const float* scale, float* result, int64_t result_stride) {
    Pieces<T> matrix = pieces;
    for (int64_t row = 0, count; row < rows; row += count, matrix.ahead = nullptr) {
        count = tile_rows(rows - row);
        const float *from = x + row * x_stride, *by = scale ? scale + row : nullptr;
        float* to = result + row * result_stride;
        switch (count) {
            case 1: product_rows<1>(from, x_stride, matrix, num_rows, width, by, to, result_stride); break;
            case 2: product_rows<2>(from, x_stride, matrix, num_rows, width, by, to, result_stride); break;
            case 3: product_rows<3>(from, x_stride, matrix, num_rows, width, by, to, result_stride); break;
            case 4: product_rows<4>(from, x_stride, matrix, num_rows, width, by, to, result_stride); break;
            default: product_rows<6>(from, x_stride, matrix, num_rows, width, by, to, result_stride); break;
        }
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
