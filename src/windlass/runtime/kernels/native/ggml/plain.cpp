// Products with ggml's block types in portable C++.
#include "ggml/number.h"
#include "ggml/product.h"

namespace windlass {

void multiply_ggml_plain(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* result) {
    for (int i = 0; i < height * PANEL_ROWS; i++) result[i] = 0;
    for (int64_t group = 0; group < matrix.groups; group++, panel += matrix.group_bytes) {
        for (int block = 0; block < matrix.blocks; block++, tile += height * TILE_BYTES) {
            for (int lane = 0; lane < PANEL_ROWS; lane++) {
                const BlockOfRow one = block_of_row(matrix.kind, panel, block, lane);
                for (int row = 0; row < height; row++) {
                    const int8_t* codes = (const int8_t*)tile + 8 * height + BLOCK * row;
                    const float scale = ((const float*)tile)[row];
                    int32_t sums[2] = {0, 0}, plain_sums[2] = {0, 0};
                    for (int i = 0; i < BLOCK; i++) {
                        sums[i / 16] += one.codes[i] * codes[i];
                        plain_sums[i / 16] += codes[i];
                    }
                    float* to = result + PANEL_ROWS * row + lane;
                    if (is_by_16(matrix.kind)) {
                        *to += float(sums[0] * one.scale[0] + sums[1] * one.scale[1]) * (one.d * scale);
                        if (matrix.kind == Kind::Q2_K)
                            *to -= float(plain_sums[0] * one.minimum[0] + plain_sums[1] * one.minimum[1]) * (one.dmin * scale);
                    } else {
                        *to += float(sums[0] + sums[1]) * (one.scale_number(0) * scale);
                        if (has_minima(matrix.kind)) *to -= one.minimum_number(0) * (scale * float(plain_sums[0] + plain_sums[1]));
                    }
                }
            }
        }
    }
}

}  // namespace windlass
