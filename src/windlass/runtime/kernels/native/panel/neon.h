// Packed products with NEON's dot product: 4 outputs by 4 inputs an instruction; the 4 inputs are one lane of the activations' vector.

namespace windlass {
namespace {
namespace neon {

// A quarter of the 16 numbers at `from`.
INLINE float32x4_t widened(const Matrix& matrix, const uint8_t* from, int part) {
    if (matrix.scales == ScaleType::FLOAT32) return vreinterpretq_f32_u8(vld1q_u8(from + 16 * part));
    const uint16x4_t half = vreinterpret_u16_u8(vld1_u8(from + 8 * part));
    return matrix.scales == ScaleType::FLOAT16 ? vcvt_f32_f16(vreinterpret_f16_u16(half))
                                               : vreinterpretq_f32_u32(vshll_n_u16(half, 16));
}

INLINE void group_scales(const Matrix& matrix, const uint8_t* at, float32x4_t* scale, float32x4_t* offset) {
    const uint8x16_t zeros = matrix.kind == Kind::INT4_ZEROS ? vld1q_u8(at + matrix.scale_bytes) : vdupq_n_u8(0);
    const uint16x8_t wide[2] = {vmovl_u8(vget_low_u8(zeros)), vmovl_u8(vget_high_u8(zeros))};
    for (int part = 0; part < 4; part++) {
        scale[part] = widened(matrix, at, part);
        if (matrix.kind == Kind::INT4_MINIMA) offset[part] = widened(matrix, at + matrix.scale_bytes, part);
        if (matrix.kind == Kind::INT4_ZEROS) {
            const uint16x4_t quarter = part % 2 ? vget_high_u16(wide[part / 2]) : vget_low_u16(wide[part / 2]);
            offset[part] = vmulq_f32(vnegq_f32(vcvtq_f32_u32(vmovl_u16(quarter))), scale[part]);
        }
    }
}

// 16 outputs by the 4 inputs in lane LANE of each row's codes.
template <int R, int LANE> INLINE void add_chunk(int32x4_t (*sums)[4], const int8x16_t* weights, const int8x16_t* codes) {
    for (int row = 0; row < R; row++)
        for (int part = 0; part < 4; part++) sums[row][part] = vdotq_laneq_s32(sums[row][part], weights[part], codes[row], LANE);
}

// Two chunks of int4 are 16 inputs: all lanes of the codes.
template <int R, int CHUNK> INLINE void add_int4(int32x4_t (*sums)[4], const uint8_t* weights, const int8x16_t* codes) {
    int8x16_t low[4], high[4];
    for (int part = 0; part < 4; part++) {
        const uint8x16_t loaded = vld1q_u8(weights + 16 * part);
        low[part] = vreinterpretq_s8_u8(vandq_u8(loaded, vdupq_n_u8(15)));
        high[part] = vreinterpretq_s8_u8(vshrq_n_u8(loaded, 4));
    }
    add_chunk<R, 2 * CHUNK>(sums, low, codes);
    add_chunk<R, 2 * CHUNK + 1>(sums, high, codes);
}

template <int R, int CHUNK> INLINE void add_int8(int32x4_t (*sums)[4], const uint8_t* weights, const int8x16_t* codes) {
    int8x16_t signed_codes[4];
    for (int part = 0; part < 4; part++)
        signed_codes[part] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(weights + 16 * part), vdupq_n_u8(128)));
    add_chunk<R, CHUNK>(sums, signed_codes, codes);
}

template <int R, int BITS> INLINE void add_half(int32x4_t (*sums)[4], const uint8_t* weights, const uint8_t* from) {
    int8x16_t codes[R];
    for (int row = 0; row < R; row++) codes[row] = vld1q_s8((const int8_t*)from + BLOCK * row);
    if (BITS == 4) {
        add_int4<R, 0>(sums, weights, codes);
        add_int4<R, 1>(sums, weights + 64, codes);
    } else {
        add_int8<R, 0>(sums, weights, codes);
        add_int8<R, 1>(sums, weights + 64, codes);
        add_int8<R, 2>(sums, weights + 128, codes);
        add_int8<R, 3>(sums, weights + 192, codes);
    }
}

// Rows first .. first + R of a tile `height` rows high.
template <int R, int BITS, bool OFFSETS>
void multiply_rows(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, int first, float* result) {
    float32x4_t totals[R][4];
    for (int row = 0; row < R; row++)
        for (int part = 0; part < 4; part++) totals[row][part] = vdupq_n_f32(0);
    const int64_t groups = matrix.groups, blocks = matrix.blocks, step = matrix.group_bytes;
    for (int64_t group = 0; group < groups; group++, panel += step) {
        float32x4_t scale[4], offset[4];
        group_scales(matrix, panel + matrix.codes_bytes, scale, offset);
        for (int64_t block = 0; block < blocks; block++, tile += height * TILE_BYTES) {
            const float* scales = (const float*)tile + first;
            const int32_t* corrections = (const int32_t*)(tile + 4 * height) + first;
            const uint8_t* codes = tile + 8 * height + BLOCK * first;
            int32x4_t sums[R][4];
            for (int row = 0; row < R; row++)
                for (int part = 0; part < 4; part++) sums[row][part] = vdupq_n_s32(BITS == 8 || OFFSETS ? 0 : corrections[row]);
            if (R >= PREFETCHED_ROWS && first == 0)
                for (int chunk = 0; chunk < BITS; chunk++) __builtin_prefetch(panel + (block * BITS + chunk) * 64 + PREFETCH_BYTES);
            add_half<R, BITS>(sums, panel + block * BITS * 64, codes);
            add_half<R, BITS>(sums, panel + block * BITS * 64 + BITS * 32, codes + 16);
            for (int row = 0; row < R; row++) {
                for (int part = 0; part < 4; part++) {
                    float32x4_t* total = &totals[row][part];
                    *total = vfmaq_f32(*total, vcvtq_f32_s32(sums[row][part]), vmulq_n_f32(scale[part], scales[row]));
                    if (OFFSETS) *total = vfmaq_n_f32(*total, offset[part], ((const float*)corrections)[row]);
                }
            }
        }
    }
    for (int row = 0; row < R; row++)
        for (int part = 0; part < 4; part++) vst1q_f32(result + PANEL_ROWS * (first + row) + 4 * part, totals[row][part]);
}

template <int BITS, bool OFFSETS>
void multiply_kind(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    int row = 0;
    for (; row + 4 <= height; row += 4) multiply_rows<4, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
    if (height - row == 3) multiply_rows<3, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
    if (height - row == 2) multiply_rows<2, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
    if (height - row == 1) multiply_rows<1, BITS, OFFSETS>(matrix, panel, tile, height, row, sums);
}

void multiply(const Matrix& matrix, const uint8_t* panel, const uint8_t* tile, int height, float* sums) {
    if (is_ggml(matrix.kind)) return multiply_ggml_plain(matrix, panel, tile, height, sums);
    if (matrix.kind == Kind::INT8) return multiply_kind<8, false>(matrix, panel, tile, height, sums);
    if (matrix.kind == Kind::INT4) return multiply_kind<4, false>(matrix, panel, tile, height, sums);
    return multiply_kind<4, true>(matrix, panel, tile, height, sums);
}

}  // namespace neon
}  // namespace
}  // namespace windlass
