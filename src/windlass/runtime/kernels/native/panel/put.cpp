// Codes as checkpoints have them to panels, rows of panels to floats, and panels of random numbers.
#include <algorithm>
#include <cmath>

#include "ggml/number.h"
#include "ggml/stored.h"
#include "program/program.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packing assumes little-endian words"
#endif

namespace windlass {

namespace {

// Where codes come from: compressed-tensors' words along the input, or GGML's blocks of 32 with their numbers in front.
enum class Source : int64_t { WORDS, BLOCKS };

struct Put {
    Matrix matrix;
    uint8_t* to;
    const uint8_t *codes, *scale, *offset;
    int64_t first, rows;  // of the matrix, and how many
    Source source;
    int64_t code_stride, scale_stride, offset_stride;  // bytes from row to row

    int64_t scale_size() const { return matrix.scale_bytes / PANEL_ROWS; }
    int64_t numbers_size() const { return matrix.kind == Kind::INT4_MINIMA ? 4 : 2; }  // of a GGML block, in front of its codes
    int64_t source_block_bytes() const {
        const int64_t codes = matrix.kind == Kind::INT8 ? BLOCK : BLOCK / 2;
        return source == Source::BLOCKS ? codes + numbers_size() : codes;
    }
};

// Eight nibbles of a word, lowest first, to four bytes: 0 with 4, 1 with 5, 2 with 6, 3 with 7.
inline uint32_t spread(uint32_t half) {
    half = (half | half << 8) & 0x00ff00ff;
    return (half | half << 4) & 0x0f0f0f0f;
}
inline uint32_t paired(uint32_t word) { return spread(word & 0xffff) | spread(word >> 16) << 4; }

// 32 codes of one row as the words that a panel's chunks hold of it.
template <class From> inline void row_words(const uint8_t* from, uint32_t* words) {
    uint32_t in[From::WORDS];
    std::memcpy(in, from + From::SKIP, sizeof in);
    From::arrange(in, words);
}
struct Int4Words {
    static constexpr int WORDS = 4, CHUNKS = 4, SKIP = 0;
    static void arrange(const uint32_t* in, uint32_t* out) {
        for (int i = 0; i < 4; i++) out[i] = paired(in[i]);
    }
};
struct Int8Words {
    static constexpr int WORDS = 8, CHUNKS = 8, SKIP = 0;
    static void arrange(const uint32_t* in, uint32_t* out) {
        for (int i = 0; i < 8; i++) out[i] = in[i];
    }
};
// Byte j holds code j below and code j + 16 above.
template <int NUMBERS> struct Int4Blocks {
    static constexpr int WORDS = 4, CHUNKS = 4, SKIP = NUMBERS;
    static void arrange(const uint32_t* in, uint32_t* out) {
        for (int half = 0; half < 2; half++) {
            const uint32_t one = in[2 * half], two = in[2 * half + 1];
            out[half] = (one & 0x0f0f0f0f) | (two & 0x0f0f0f0f) << 4;
            out[2 + half] = (one >> 4 & 0x0f0f0f0f) | (two & 0xf0f0f0f0);
        }
    }
};
// Two's complement with the top bit turned over is the code + 128.
struct Int8Blocks {
    static constexpr int WORDS = 8, CHUNKS = 8, SKIP = 2;
    static void arrange(const uint32_t* in, uint32_t* out) {
        for (int i = 0; i < 8; i++) out[i] = in[i] ^ 0x80808080;
    }
};

// Rows of the source that fall on lanes `lane` .. `lane` + `count` of one panel.
template <class From> void put_codes(const Put& put, uint8_t* panel, const uint8_t* codes, int lane, int count) {
    for (int64_t block = 0; block < put.matrix.inputs / BLOCK; block++) {
        uint32_t words[PANEL_ROWS][From::CHUNKS];
        const uint8_t* from = codes + block * put.source_block_bytes();
        for (int row = 0; row < count; row++) row_words<From>(from + row * put.code_stride, words[row]);
        uint8_t* to = panel + block / put.matrix.blocks * put.matrix.group_bytes + block % put.matrix.blocks * From::CHUNKS * 64;
        for (int chunk = 0; chunk < From::CHUNKS; chunk++)
            for (int row = 0; row < count; row++) std::memcpy(to + 64 * chunk + 4 * (lane + row), &words[row][chunk], 4);
    }
}

void put_numbers(const Put& put, uint8_t* panel, int64_t first, int lane, int count) {
    const int64_t size = put.scale_size();
    const bool is_blocks = put.source == Source::BLOCKS;
    for (int64_t group = 0; group < put.matrix.groups; group++) {
        uint8_t* to = panel + group * put.matrix.group_bytes + put.matrix.codes_bytes;
        uint8_t* offsets = to + put.matrix.scale_bytes;
        for (int row = 0; row < count; row++) {
            const uint8_t* scale = is_blocks ? put.codes + (first + row) * put.code_stride + group * put.source_block_bytes()
                                             : put.scale + (first + row) * put.scale_stride + group * size;
            std::memcpy(to + (lane + row) * size, scale, size);
            const uint8_t* offset = is_blocks ? scale + size : put.offset + (first + row) * put.offset_stride;
            if (put.matrix.kind == Kind::INT4_MINIMA)
                std::memcpy(offsets + (lane + row) * size, is_blocks ? offset : offset + group * size, size);
            if (put.matrix.kind == Kind::INT4_ZEROS) offsets[lane + row] = uint8_t(int8_t(offset[group]) + 8);
        }
    }
}

// Rows of ggml's blocks: formed, and each number and word put next to those of the other rows.
void put_form(const Put& put, uint8_t* panel, const uint8_t* rows, int lane, int count) {
    const Kind kind = put.matrix.kind;
    const Form form = form_of(kind);
    for (int64_t group = 0; group < put.matrix.groups; group++, panel += put.matrix.group_bytes, rows += stored_bytes(kind)) {
        uint8_t *singles_to = panel + 2 * PANEL_ROWS * form.halves, *words_to = singles_to + PANEL_ROWS * form.singles;
        uint16_t halves[PANEL_ROWS][2];
        uint8_t singles[PANEL_ROWS][16];
        uint32_t words[PANEL_ROWS][48];
        for (int row = 0; row < count; row++) form_block(kind, rows + row * put.code_stride, (uint8_t*)halves[row], singles[row], words[row]);
        for (int i = 0; i < form.halves; i++)
            for (int row = 0; row < count; row++) std::memcpy(panel + 2 * (PANEL_ROWS * i + lane + row), &halves[row][i], 2);
        for (int i = 0; i < form.singles; i++)
            for (int row = 0; row < count; row++) singles_to[PANEL_ROWS * i + lane + row] = singles[row][i];
        for (int i = 0; i < form.words; i++)
            for (int row = 0; row < count; row++) std::memcpy(words_to + 4 * (PANEL_ROWS * i + lane + row), &words[row][i], 4);
    }
}

// Panel number `index` of those that the rows touch.
void put_panel(const Put& put, int64_t index) {
    const int64_t panel = put.first / PANEL_ROWS + index;
    const int64_t begin = std::max(panel * PANEL_ROWS, put.first), end = std::min((panel + 1) * PANEL_ROWS, put.first + put.rows);
    const int lane = int(begin % PANEL_ROWS), count = int(end - begin);
    uint8_t* to = put.to + panel * put.matrix.panel_bytes;
    const uint8_t* codes = put.codes + (begin - put.first) * put.code_stride;
    const bool is_int8 = put.matrix.kind == Kind::INT8;
    if (is_ggml(put.matrix.kind)) return put_form(put, to, codes, lane, count);
    if (put.source == Source::WORDS) (is_int8 ? put_codes<Int8Words> : put_codes<Int4Words>)(put, to, codes, lane, count);
    else if (is_int8) put_codes<Int8Blocks>(put, to, codes, lane, count);
    else (put.matrix.kind == Kind::INT4 ? put_codes<Int4Blocks<2>> : put_codes<Int4Blocks<4>>)(put, to, codes, lane, count);
    put_numbers(put, to, begin - put.first, lane, count);
}

void put_fp8_row(const Put& put, int64_t row) {
    uint8_t* to = put.to + (put.first + row) * put.matrix.row_bytes;
    std::memcpy(to, put.codes + row * put.code_stride, put.matrix.inputs);
    std::memcpy(to + put.matrix.inputs, put.scale + row * put.scale_stride, 4 * put.matrix.groups);
}

// A row as floats.
void read_row(const Matrix& matrix, int64_t row, float* out) {
    const uint8_t* panel = matrix.panel(row / PANEL_ROWS);
    const int lane = int(row % PANEL_ROWS);
    for (int64_t group = 0; group < matrix.groups; group++, panel += matrix.group_bytes) {
        const float scale = scale_number(matrix, panel + matrix.codes_bytes, lane);
        const float offset = offset_number(matrix, panel + matrix.codes_bytes, lane);
        // (code - zero) * scale rounds once; code * scale + minimum rounds the product, as the reference does.
        const float zero = matrix.kind == Kind::INT4_ZEROS ? float(panel[matrix.codes_bytes + matrix.scale_bytes + lane])
                                                           : float(correction_of(matrix.kind).times);
        for (int64_t block = 0; block < matrix.blocks; block++, out += BLOCK) {
            const uint8_t* codes = panel + block * (matrix.kind == Kind::INT8 ? 512 : 256);
            for (int i = 0; i < BLOCK; i++) {
                const float code = float(code_number(matrix, codes, lane, i));
                const float product = (matrix.kind == Kind::INT4_MINIMA ? code : code - zero) * scale;
                out[i] = matrix.kind == Kind::INT4_MINIMA ? product + offset : product;
            }
        }
    }
}

float fp8_number(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    return code & 128 ? -magnitude : magnitude;
}

void read_fp8_row(const Matrix& matrix, int64_t row, float* out) {
    const uint8_t* codes = matrix.data + row * matrix.row_bytes;
    for (int64_t i = 0; i < matrix.inputs; i++) {
        float scale;
        std::memcpy(&scale, codes + matrix.inputs + 4 * (i / matrix.group), 4);
        out[i] = fp8_number(codes[i]) * scale;
    }
}

struct Random {
    uint64_t state;
    // SplitMix64 (Steele, Lea and Flood 2014).
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    void fill(uint8_t* to, int64_t bytes, uint64_t keep, uint64_t set) {
        for (int64_t i = 0; i < bytes; i += 8) {
            const uint64_t word = (next() & keep) | set;
            std::memcpy(to + i, &word, std::min<int64_t>(8, bytes - i));
        }
    }
};

void put_scale(const Matrix& matrix, uint8_t* to, int lane, float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = (bits >> 13) - (112 << 10);  // of an fp16 that is not subnormal
    const uint16_t half = uint16_t(matrix.scales == ScaleType::BFLOAT16 ? bits >> 16 : sign | (magnitude & 0x7fff));
    if (matrix.scales == ScaleType::FLOAT32) std::memcpy(to + 4 * lane, &number, 4);
    else std::memcpy(to + 2 * lane, &half, 2);
}

// Scales between half and one and a half times `typical`; offsets that take the codes' mean away.
void random_panel(const Matrix& matrix, uint8_t* panel, float typical, Random random) {
    for (int64_t group = 0; group < matrix.groups; group++, panel += matrix.group_bytes) {
        random.fill(panel, matrix.codes_bytes, ~uint64_t(0), 0);
        uint8_t* numbers = panel + matrix.codes_bytes;
        for (int lane = 0; lane < PANEL_ROWS; lane++) {
            const float scale = typical * (0.5f + float(random.next() >> 40) * 0x1p-24f);
            put_scale(matrix, numbers, lane, scale);
            if (matrix.kind == Kind::INT4_MINIMA) put_scale(matrix, numbers + matrix.scale_bytes, lane, -7.5f * scale);
            if (matrix.kind == Kind::INT4_ZEROS) numbers[matrix.scale_bytes + lane] = uint8_t(7 + (random.next() & 1));
        }
    }
}

// Magnitudes between 0.5 and 1.
void random_fp8_row(const Matrix& matrix, uint8_t* row, float typical, Random random) {
    random.fill(row, matrix.inputs, 0x8787878787878787, 0x3030303030303030);
    for (int64_t group = 0; group < matrix.groups; group++) std::memcpy(row + matrix.inputs + 4 * group, &typical, 4);
}

}  // namespace

// data: panels, codes, scales, offsets; ints: the matrix, first row, source, strides of codes, scales and offsets in bytes.
WINDLASS_OP(panels_put) {
    const int64_t* ints = op.ints + MATRIX_INTS;
    const Put put{matrix_of(op.ints, op.data[0]), op.at<uint8_t>(0), op.at<uint8_t>(1), op.at<uint8_t>(2), op.at<uint8_t>(3),
                  ints[0], op.rows(), Source(ints[1]), ints[2], ints[3], ints[4]};
    const int64_t end = put.first + put.rows, touched = (end + PANEL_ROWS - 1) / PANEL_ROWS - put.first / PANEL_ROWS;
    const int64_t pieces = put.matrix.kind == Kind::FP8 ? put.rows : touched;
    for (int64_t piece = worker.take(); piece < pieces; piece = worker.take())
        (put.matrix.kind == Kind::FP8 ? put_fp8_row : put_panel)(put, piece);
}

// data: out [rows, inputs], panels, row numbers (int32 or int64); ints: the matrix, bytes of a row number.
WINDLASS_OP(panels_rows) {
    const Matrix matrix = matrix_of(op.ints, op.data[1]);
    int64_t first, last;
    worker.share(op.rows(), 1, &first, &last);
    for (int64_t i = first; i < last; i++) {
        const int64_t row = op.ints[MATRIX_INTS] == 8 ? op.at<int64_t>(2)[i] : op.at<int32_t>(2)[i];
        (is_ggml(matrix.kind) ? read_ggml_row : matrix.kind == Kind::FP8 ? read_fp8_row : read_row)(matrix, row, op.at<float>(0) + i * matrix.inputs);
    }
}

// data: panels; ints: the matrix, seed; floats: a typical scale. Rows are panels of all experts, one after another.
WINDLASS_OP(panels_random) {
    const Matrix matrix = matrix_of(op.ints, op.data[0]);
    for (int64_t piece = worker.take(); piece < op.rows(); piece = worker.take()) {
        const Random random{uint64_t(op.ints[MATRIX_INTS]) * 0xd1342543de82ef95 + uint64_t(piece) * 0xaf251af3b0f025b5};
        if (matrix.kind == Kind::FP8) random_fp8_row(matrix, op.at<uint8_t>(0) + piece * matrix.row_bytes, op.floats[0], random);
        else random_panel(matrix, op.at<uint8_t>(0) + piece * matrix.panel_bytes, op.floats[0], random);
    }
}

}  // namespace windlass
