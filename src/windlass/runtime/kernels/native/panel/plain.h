// Packed products in portable C++, for machines without a specialized kernel.

namespace windlass {
namespace {
namespace plain {

// One block of one row of activations: exact sums of 16 outputs.
template <int BITS> INLINE void block_sums(const uint8_t* weights, const int8_t* codes, int32_t start, int32_t* sums) {
    for (int output = 0; output < PANEL_ROWS; output++) sums[output] = start;
    for (int chunk = 0; chunk < BITS; chunk++) {
        const uint8_t* from = weights + 64 * chunk;
        for (int output = 0; output < PANEL_ROWS; output++) {
            for (int j = 0; j < 4; j++) {
                const int byte = from[4 * output + j];
                if (BITS == 8) sums[output] += byte * codes[4 * chunk + j];
                else sums[output] += (byte & 15) * codes[8 * chunk + j] + (byte >> 4) * codes[8 * chunk + 4 + j];
            }
        }
    }
}

template <int BITS> void multiply_row(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, int row, float* result) {
    const int64_t groups = matrix.groups, blocks = matrix.blocks, step = matrix.group_bytes;
    for (int output = 0; output < PANEL_ROWS; output++) result[output] = 0;
    for (int64_t group = 0; group < groups; group++, panel += step) {
        const uint8_t* numbers = panel + matrix.codes_bytes;
        float scale[PANEL_ROWS], offset[PANEL_ROWS];
        for (int output = 0; output < PANEL_ROWS; output++) {
            scale[output] = scale_number(matrix, numbers, output);
            offset[output] = matrix.has_offsets() ? offset_number(matrix, numbers, output) : 0;
        }
        for (int64_t block = 0; block < blocks; block++, tile += height * TILE_BYTES) {
            const float factor = ((const float*)tile)[row], sum = ((const float*)tile)[height + row];
            const int32_t start = matrix.has_offsets() ? 0 : ((const int32_t*)tile)[height + row];
            int32_t sums[PANEL_ROWS];
            block_sums<BITS>(panel + block * BITS * 64, (const int8_t*)tile + 8 * height + BLOCK * row, start, sums);
            for (int output = 0; output < PANEL_ROWS; output++) result[output] += float(sums[output]) * (scale[output] * factor);
            if (matrix.has_offsets())
                for (int output = 0; output < PANEL_ROWS; output++) result[output] += offset[output] * sum;
        }
    }
}

void multiply(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    if (is_ggml(matrix.kind)) return multiply_ggml_plain(matrix, panel, tile, height, sums);
    for (int row = 0; row < height; row++) {
        if (matrix.kind == Kind::INT8) multiply_row<8>(matrix, panel, tile, height, row, sums + PANEL_ROWS * row);
        else multiply_row<4>(matrix, panel, tile, height, row, sums + PANEL_ROWS * row);
    }
}

}  // namespace plain
}  // namespace
}  // namespace windlass
