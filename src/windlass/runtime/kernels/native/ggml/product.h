// Products of a panel of one of ggml's block types with a tile, by instruction set. See MultiplyPacked in panel/panel.h.
#pragma once
#include "panel/panel.h"

namespace windlass {

void multiply_ggml_avx512(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums);
void multiply_ggml_avx2(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums);
void multiply_ggml_plain(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums);

}  // namespace windlass

// FUNCTION<Kind> for every type, in the order of `Kind`.
#define WINDLASS_EACH_GGML(FUNCTION)                                                                                          \
    FUNCTION<Kind::Q2_K>, FUNCTION<Kind::Q3_K>, FUNCTION<Kind::Q4_K>, FUNCTION<Kind::Q5_K>, FUNCTION<Kind::Q6_K>,             \
        FUNCTION<Kind::Q5_0>, FUNCTION<Kind::Q5_1>, FUNCTION<Kind::IQ4_NL>, FUNCTION<Kind::IQ4_XS>, FUNCTION<Kind::MXFP4>,    \
        FUNCTION<Kind::IQ2_XXS>, FUNCTION<Kind::IQ2_XS>, FUNCTION<Kind::IQ2_S>, FUNCTION<Kind::IQ3_XXS>, FUNCTION<Kind::IQ3_S>
