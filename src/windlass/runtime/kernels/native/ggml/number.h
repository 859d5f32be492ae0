// Single blocks of ggml's types as integers, for loops that need not be fast.
#pragma once
#include "panel/number.h"

namespace windlass {

// 32 inputs of one row: value = scale[half] * code - minimum[half].
struct BlockOfRow {
    int codes[BLOCK];
    int scale[2], minimum[2];
    float d, dmin;
    float scale_number(int half) const { return d * float(scale[half]); }
    float minimum_number(int half) const { return dmin * float(minimum[half]); }
};

// One group (a block of the file) of a panel.
struct GroupAt {
    const uint8_t *halves, *singles, *words;
    GroupAt(Form form, const uint8_t* group) : halves(group), singles(group + 32 * form.halves), words(singles + 16 * form.singles) {}
    float half(int index, int lane) const {
        uint16_t bits;
        std::memcpy(&bits, halves + 32 * index + 2 * lane, 2);
        return fp16_number(bits);
    }
    int single(int index, int lane) const { return singles[16 * index + lane]; }
    uint32_t word(int index, int lane) const {
        uint32_t bits;
        std::memcpy(&bits, words + 64 * index + 4 * lane, 4);
        return bits;
    }
};

inline int signed_byte(int byte) { return byte < 128 ? byte : byte - 256; }

inline void read_grid(Kind kind, const GroupAt& at, int block, int lane, BlockOfRow* out) {
    const bool is_three = kind >= Kind::IQ3_XXS;
    const int first = block * (is_three ? 3 : 2);
    const uint32_t last = at.word(first + (is_three ? 2 : 1), lane);
    const uint32_t* grid = GRIDS + GRID_STARTS[int(kind) - int(Kind::IQ2_XXS)];
    for (int chunk = 0; chunk < 8; chunk++) {
        const int eight = chunk / 2;  // of 8 inputs
        uint32_t index, signs;
        if (kind == Kind::IQ2_XS) {
            const uint32_t both = at.word(first + eight / 2, lane) >> 16 * (eight % 2) & 0xffff;
            index = both & 511;
            signs = with_parity(both >> 9);
        } else {
            const int part = is_three ? chunk : eight;
            index = at.word(first + part / 4, lane) >> 8 * (part % 4) & 255;
            if (kind == Kind::IQ2_S) index |= (at.single(8 + block, lane) >> 2 * eight & 3) << 8;
            if (kind == Kind::IQ3_S) index |= (at.single(4 + block, lane) >> chunk & 1) << 8;
            const bool is_full = kind == Kind::IQ2_S || kind == Kind::IQ3_S;
            signs = is_full ? last >> 8 * eight & 255 : with_parity(last >> 7 * eight & 127);
        }
        const uint32_t four = is_three ? grid[index] : grid[2 * index + chunk % 2];
        for (int j = 0; j < 4; j++) {
            const int magnitude = four >> 8 * j & 255;
            out->codes[4 * chunk + j] = signs >> (chunk % 2 * 4 + j) & 1 ? -magnitude : magnitude;
        }
    }
    int scales = int(last >> 28) * 17;
    if (kind == Kind::IQ2_XS || kind == Kind::IQ2_S) scales = at.single(block, lane);
    if (kind == Kind::IQ3_S) scales = (at.single(block / 2, lane) >> 4 * (block % 2) & 15) * 17;
    out->scale[0] = 2 * (scales & 15) + 1;
    out->scale[1] = 2 * (scales >> 4) + 1;
    out->d = at.half(0, lane) * (kind == Kind::IQ3_S ? 1.0f : kind == Kind::IQ3_XXS ? 0.25f : 0.125f);
}

inline int read_code(Kind kind, const GroupAt& at, int first, int lane, int input) {
    const int chunk = input / 4, shift = 8 * (input % 4);
    const auto byte = [&](int word) { return int(at.word(first + word, lane) >> shift & 255); };
    if (kind == Kind::Q2_K || kind == Kind::Q3_K) {
        const int low = byte(chunk / 4) >> 2 * (chunk % 4) & 3;
        return kind == Kind::Q2_K ? low : (low | (byte(2) >> chunk & 1) << 2) - 4;
    }
    const int low = byte(chunk / 2) >> 4 * (chunk % 2) & 15;
    switch (kind) {
        case Kind::Q6_K: return (low | (byte(4 + chunk / 4) >> 2 * (chunk % 4) & 3) << 4) - 32;
        case Kind::Q5_K: case Kind::Q5_1: return low | (byte(4) >> chunk & 1) << 4;
        case Kind::Q5_0: return (low | (byte(4) >> chunk & 1) << 4) - 16;
        case Kind::IQ4_NL: case Kind::IQ4_XS: return IQ4_VALUES[low];
        case Kind::MXFP4: return FP4_DOUBLED[low];
        default: return low;
    }
}

inline void read_scales(Kind kind, const GroupAt& at, int block, int lane, BlockOfRow* out) {
    const Form form = form_of(kind);
    out->d = form.halves ? at.half(0, lane) : 0.0f;
    out->dmin = form.halves > 1 ? at.half(1, lane) : 0.0f;
    for (int half = 0; half < 2; half++) {
        int &scale = out->scale[half], &minimum = out->minimum[half];
        scale = 1;
        minimum = 0;
        switch (kind) {
            case Kind::Q2_K:
                scale = at.single(2 * block + half, lane) & 15;
                minimum = at.single(2 * block + half, lane) >> 4;
                break;
            case Kind::Q3_K: case Kind::Q6_K: scale = signed_byte(at.single(2 * block + half, lane)); break;
            case Kind::Q4_K: case Kind::Q5_K:
                scale = at.single(block, lane);
                minimum = at.single(8 + block, lane);
                break;
            case Kind::Q5_1: minimum = -1; break;
            case Kind::IQ4_XS: scale = signed_byte(at.single(block, lane)); break;
            case Kind::MXFP4: out->d = e8m0_half(at.single(0, lane)); break;
            default: break;
        }
    }
}

inline BlockOfRow block_of_row(Kind kind, const uint8_t* group, int block, int lane) {
    const Form form = form_of(kind);
    const GroupAt at(form, group);
    BlockOfRow out;
    read_scales(kind, at, block, lane, &out);
    if (kind >= Kind::IQ2_XXS) read_grid(kind, at, block, lane, &out);
    else
        for (int input = 0; input < BLOCK; input++) out.codes[input] = read_code(kind, at, block * form.block_words(), lane, input);
    return out;
}

// A row as floats.
inline void read_ggml_row(const Matrix& matrix, int64_t row, float* out) {
    const uint8_t* group = matrix.panel(row / PANEL_ROWS);
    for (int64_t index = 0; index < matrix.groups; index++, group += matrix.group_bytes)
        for (int block = 0; block < matrix.blocks; block++, out += BLOCK) {
            const BlockOfRow one = block_of_row(matrix.kind, group, block, int(row % PANEL_ROWS));
            for (int i = 0; i < BLOCK; i++) {
                volatile float product = one.scale_number(i / 16) * float(one.codes[i]);  // rounded before the sum, as the reference does
                out[i] = product - one.minimum_number(i / 16);
            }
        }
}

}  // namespace windlass
