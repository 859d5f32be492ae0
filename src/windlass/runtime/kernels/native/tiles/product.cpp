#include "tiles/tiles.h"

#include <cmath>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

struct Places {
    uint8_t of[HALF];
    constexpr Places() : of() {
        for (int i = 0; i < HALF; i++) of[i] = uint8_t(i % 8 / 2 * 16 + i / 16 * 4 + i % 2 * 2 + i / 8 % 2);
    }
};
static constexpr Places PLACES;

void round_block(const float* x, float factor, Activations& out) {
    float largest = 0.f;
    for (int i = 0; i < BLOCK; i++) largest = std::fmax(largest, std::fabs(x[i]));
    const float inverse = largest > 1e-30f ? 16256.f / largest : 0.f;
    out.step = largest > 1e-30f ? largest / 16256.f * factor : 0.f;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < HALF; i++) {
            const int number = (int)std::lrintf(x[half * HALF + i] * inverse), high = (number + 64) >> 7, at = half * HALF + PLACES.of[i];
            out.high[at] = (int8_t)high;
            out.low[at] = (int8_t)(number - high * 128);
        }
    for (int half = 0; half < 2; half++)
        for (int lane = 0; lane < LANES; lane++) {
            int sum = 0;
            for (int i = 0; i < 4; i++) sum += out.high[half * HALF + lane * 4 + i] * 128 + out.low[half * HALF + lane * 4 + i];
            out.start[half][lane] = -8 * sum;
        }
}

void add_lanes(const float* sums, float* out) {
    for (int row = 0; row < ROWS; row++) {
        float part[8];
        for (int i = 0; i < 8; i++) part[i] = sums[row * LANES + i] + sums[row * LANES + 8 + i];
        out[row] = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    }
}

static float bf16(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Which group of weights a lane of a half belongs to, of the groups of its block.
template <int GROUP>
static int group_of(int half, int lane) {
    return GROUP == 128 ? 0 : GROUP == 64 ? half : half * 2 + lane % 4 / 2;
}

template <int GROUP>
static void plain(const uint8_t* tile, int blocks, const Activations* x, float* sums, const uint8_t*) {
    for (int block = 0; block < blocks; block++, x++, tile += block_bytes(GROUP))
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++) {
                const uint8_t* codes = tile + half * 512 + row % 8 * 64;
                for (int lane = 0; lane < LANES; lane++) {
                    int sum = x->start[half][lane];
                    for (int i = lane * 4; i < lane * 4 + 4; i++)
                        sum += (row < 8 ? codes[i] & 15 : codes[i] >> 4) * (x->high[half * HALF + i] * 128 + x->low[half * HALF + i]);
                    const float scale = bf16(tile + CODE_BYTES + (group_of<GROUP>(half, lane) * ROWS + row % 8 * 2 + row / 8) * 2);
                    sums[row * LANES + lane] += float(sum) * (scale * x->step);
                }
            }
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#ifndef AHEAD
#define AHEAD 4  // blocks; of 1 to 16 the fastest (docs/reference/cuda-notes.md, 28)
#endif
#define MIDDLE __attribute__((target("avx2,fma")))

// The hardware's own prefetching stops at the end of a page, and knows nothing of what is read after this tile.
static inline void fetch_ahead(const uint8_t* tile, int block, int blocks, const uint8_t* next, size_t size) {
    const int ahead = block + AHEAD;
    const uint8_t* from = ahead < blocks ? tile + ahead * size : next ? next + (ahead - blocks) * size : nullptr;
    if (!from) return;
    for (size_t line = 0; line < size; line += 64) _mm_prefetch((const char*)from + line, _MM_HINT_T1);
}

// Scales of the 16 rows of a group, times the step of the activations: row g beside row g + 8.
WIDE static inline void scales_avx512(const uint8_t* at, float step, float* out) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
    _mm512_store_ps(out, _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(step)));
}

template <int GROUP>
WIDE static void avx512(const uint8_t* first, int blocks, const Activations* x, float* sums, const uint8_t* next) {
    __m512 acc[ROWS];
    for (int row = 0; row < ROWS; row++) acc[row] = _mm512_loadu_ps(sums + row * LANES);
    const __m512i nibble = _mm512_set1_epi8(15);
    alignas(64) float scales[BLOCK / GROUP][ROWS];
    for (int block = 0; block < blocks; block++, x++) {
        const uint8_t* tile = first + block * block_bytes(GROUP);
        fetch_ahead(first, block, blocks, next, block_bytes(GROUP));
        for (int group = 0; group < BLOCK / GROUP; group++) scales_avx512(tile + CODE_BYTES + group * ROWS * 2, x->step, scales[group]);
        const __m512i h0 = _mm512_load_si512(x->high), h1 = _mm512_load_si512(x->high + HALF);
        const __m512i l0 = _mm512_load_si512(x->low), l1 = _mm512_load_si512(x->low + HALF);
        const __m512i s0 = _mm512_load_si512(x->start[0]), s1 = _mm512_load_si512(x->start[1]), both = _mm512_add_epi32(s0, s1);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const __m512i v0 = _mm512_loadu_si512(tile + g * 64), v1 = _mm512_loadu_si512(tile + 512 + g * 64);
#pragma GCC unroll 2
            for (int upper = 0; upper < 2; upper++) {
                const __m512i c0 = _mm512_and_si512(upper ? _mm512_srli_epi16(v0, 4) : v0, nibble);
                const __m512i c1 = _mm512_and_si512(upper ? _mm512_srli_epi16(v1, 4) : v1, nibble);
                const int row = g + upper * 8, at = g * 2 + upper;
                if (GROUP == 128) {
                    const __m512i high = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), c0, h0), c1, h1);
                    const __m512i low = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(both, c0, l0), c1, l1);
                    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
                    acc[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scales[0][at]), acc[row]);
                } else {
                    const __m512i a = _mm512_add_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), c0, h0), 7), _mm512_dpbusd_epi32(s0, c0, l0));
                    const __m512i b = _mm512_add_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), c1, h1), 7), _mm512_dpbusd_epi32(s1, c1, l1));
                    constexpr int per_half = GROUP == 64 ? 1 : 2;
                    // Lanes s = 2, 3 of each four belong to the second group of a half.
                    const __mmask16 second = GROUP == 32 ? 0xcccc : 0;
                    const __m512 sa = _mm512_mask_blend_ps(second, _mm512_set1_ps(scales[0][at]), _mm512_set1_ps(scales[per_half - 1][at]));
                    const __m512 sb = _mm512_mask_blend_ps(second, _mm512_set1_ps(scales[per_half][at]), _mm512_set1_ps(scales[BLOCK / GROUP - 1][at]));
                    acc[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a), sa, acc[row]);
                    acc[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(b), sb, acc[row]);
                }
            }
        }
    }
    for (int row = 0; row < ROWS; row++) _mm512_storeu_ps(sums + row * LANES, acc[row]);
}

#if defined(__linux__)
#define MATRIX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8")))

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The system lets a process use the tile registers once it has asked.
static bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

MATRIX static void amx(const PackedWork& work, float* out) {
    static thread_local bool configured = false;
    if (!configured) {
        const TileConfig config;
        _tile_loadconfig(&config);
        configured = true;
    }
    constexpr size_t SIZE = ROWS * COLUMNS;
    // Sums twice: those of one group are added up while the next is multiplied.
    alignas(64) uint8_t codes[MOST_TILES][2][ROWS][HALF];
    alignas(64) int32_t sums[2][MOST_TILES][ROWS][COLUMNS];
    alignas(64) float scales[2][MOST_TILES][ROWS];
    const __m512i nibble = _mm512_set1_epi8(15);
    std::memset(out, 0, work.tiles * work.groups * SIZE * sizeof(float));
    auto unpack = [&](int block, int tile) MATRIX {
        const uint8_t* first = work.weights + tile * work.stride;
        const uint8_t* from = first + block * block_bytes(128);
        fetch_ahead(first, block, work.blocks, work.next ? work.next + tile * work.stride : nullptr, block_bytes(128));
        for (int half = 0; half < 2; half++)
            for (int g = 0; g < 8; g++) {
                const __m512i v = _mm512_loadu_si512(from + half * 512 + g * 64);
                _mm512_store_si512(codes[tile][half][g], _mm512_and_si512(v, nibble));
                _mm512_store_si512(codes[tile][half][g + 8], _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
            }
        scales_avx512(from + CODE_BYTES, 1.f, scales[block & 1][tile]);
    };
    auto add = [&](int number) MATRIX {
        const int block = number / work.groups, group = number % work.groups;
        const __m512 steps = _mm512_load_ps(work.x[group][block].steps);
        const __m512i start = _mm512_load_si512(work.x[group][block].start);  // the same for all rows of weights
        for (int tile = 0; tile < work.tiles; tile++) {
            float* to = out + (tile * work.groups + group) * SIZE;
            for (int row = 0; row < ROWS; row++) {
                const __m512 scale = _mm512_mul_ps(steps, _mm512_set1_ps(scales[block & 1][tile][row % 8 * 2 + row / 8]));
                const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(sums[number & 1][tile][row]), start));
                _mm512_store_ps(to + row * COLUMNS, _mm512_fmadd_ps(sum, scale, _mm512_load_ps(to + row * COLUMNS)));
            }
        }
    };
#define MULTIPLY(tile, to, low, high)                          \
    if (tile < work.tiles) {                                    \
        _tile_zero(to);                                         \
        _tile_loadd(low, codes[tile][0], 64);                   \
        _tile_dpbusd(to, low, 6);                               \
        _tile_loadd(high, codes[tile][1], 64);                  \
        _tile_dpbusd(to, high, 7);                              \
        _tile_stored(to, sums[number & 1][tile], 64);           \
    }
    const int count = work.blocks * work.groups;
    for (int number = 0; number < count; number++) {
        const int block = number / work.groups, group = number % work.groups;
        if (group == 0)
            for (int tile = 0; tile < work.tiles; tile++) unpack(block, tile);
        _tile_loadd(6, work.x[group][block].inputs[0], 64);
        _tile_loadd(7, work.x[group][block].inputs[1], 64);
        MULTIPLY(0, 0, 2, 3)
        MULTIPLY(1, 1, 4, 5)
        MULTIPLY(2, 0, 2, 3)
        MULTIPLY(3, 1, 4, 5)
        if (number) add(number - 1);
    }
#undef MULTIPLY
    add(count - 1);
}

static bool has_tiles() {
    unsigned a, b, c, d;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    return (d >> 24 & 1) && (d >> 25 & 1) && __builtin_cpu_supports("avx512vnni") && may_use_tiles();
}
#endif

MIDDLE static inline __m256i dot_avx2(__m256i codes, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1));
}

template <int GROUP>
MIDDLE static void avx2(const uint8_t* first, int blocks, const Activations* x, float* sums, const uint8_t* next) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int block = 0; block < blocks; block++, x++) {
        const uint8_t* tile = first + block * block_bytes(GROUP);
        fetch_ahead(first, block, blocks, next, block_bytes(GROUP));
        for (int half = 0; half < 2; half++)
            for (int side = 0; side < 2; side++) {
                const int from = half * HALF + side * 32;
                const __m256i high = _mm256_load_si256((const __m256i*)(x->high + from)), low = _mm256_load_si256((const __m256i*)(x->low + from));
                const __m256i start = _mm256_load_si256((const __m256i*)(x->start[half] + side * 8));
                for (int g = 0; g < 8; g++) {
                    const __m256i v = _mm256_loadu_si256((const __m256i*)(tile + half * 512 + g * 64 + side * 32));
                    for (int upper = 0; upper < 2; upper++) {
                        const __m256i codes = _mm256_and_si256(upper ? _mm256_srli_epi16(v, 4) : v, nibble);
                        const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(dot_avx2(codes, high), 7), dot_avx2(codes, low)), start);
                        auto scale = [&](int group) { return bf16(tile + CODE_BYTES + (group * ROWS + g * 2 + upper) * 2) * x->step; };
                        const __m256 first = _mm256_set1_ps(scale(group_of<GROUP>(half, 0)));
                        const __m256 scales = GROUP == 32 ? _mm256_blend_ps(first, _mm256_set1_ps(scale(group_of<GROUP>(half, 2))), 0xcc) : first;
                        float* to = sums + (g + upper * 8) * LANES + side * 8;
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scales, _mm256_loadu_ps(to)));
                    }
                }
            }
    }
}
#endif

template <int GROUP>
static Product best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) return avx512<GROUP>;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2<GROUP>;
#endif
    return plain<GROUP>;
}

Product product_for(int group) { return group == 128 ? best<128>() : group == 64 ? best<64>() : group == 32 ? best<32>() : nullptr; }

// For tests on machines without such instructions.
static void plain_packed(const PackedWork& work, float* out) {
    std::memset(out, 0, work.tiles * work.groups * ROWS * COLUMNS * sizeof(float));
    for (int t = 0; t < work.tiles; t++)
        for (int group = 0; group < work.groups; group++)
            for (int block = 0; block < work.blocks; block++) {
                const uint8_t* tile = work.weights + t * work.stride + block * block_bytes(128);
                const Packed& x = work.x[group][block];
                float* to = out + (t * work.groups + group) * ROWS * COLUMNS;
                for (int row = 0; row < ROWS; row++)
                    for (int column = 0; column < COLUMNS; column++) {
                        int sum = x.start[column];
                        for (int half = 0; half < 2; half++)
                            for (int i = 0; i < HALF; i++) {
                                const uint8_t code = tile[half * 512 + row % 8 * 64 + i];
                                sum += (row < 8 ? code & 15 : code >> 4) * ((const int8_t*)&x.inputs[half][i / 4][column])[i % 4];
                            }
                        to[row * COLUMNS + column] += float(sum) * (bf16(tile + CODE_BYTES + (row % 8 * 2 + row / 8) * 2) * x.steps[column]);
                    }
            }
}

static void pack_bytes(const Activations* const* rows, int count, Packed& out) {
    std::memset((void*)&out, 0, sizeof out);
    out.count = count;
    for (int row = 0; row < count; row++)
        for (int plane = 0; plane < 2; plane++) {
            const int column = row * 2 + plane;
            const int8_t* from = plane ? rows[row]->low : rows[row]->high;
            int sum = 0;
            for (int i = 0; i < BLOCK; i++) sum += from[i];
            for (int half = 0; half < 2; half++)
                for (int lane = 0; lane < LANES; lane++) std::memcpy(&out.inputs[half][lane][column], from + half * HALF + lane * 4, 4);
            out.start[column] = -8 * sum;
            out.steps[column] = plane ? rows[row]->step : rows[row]->step * 128.f;
        }
}

#if defined(__x86_64__)
static void pack_wide(const Activations* const* rows, int count, Packed& out) {
    out.count = count;
    for (int row = 0; row < count; row++) {
        for (int i = 0; i < BLOCK; i++) out.wide[row][i] = int16_t(rows[row]->high[i] * 128 + rows[row]->low[i]);
        out.steps[row] = rows[row]->step;
    }
}

// Two groups of rows at a time, so that their sums stay in the nearest cache.
WIDE static void vnni_packed(const PackedWork& work, float* out) {
    constexpr int PAIR = 2;
    alignas(64) int16_t codes[ROWS][BLOCK];
    alignas(64) float acc[PAIR][ROWS][PACKED_ROWS][LANES], weight_scales[ROWS], scales[PACKED_ROWS][ROWS];
    const __m512i nibble = _mm512_set1_epi8(15), eight = _mm512_set1_epi16(8);
    auto spread = [&](__m512i v, int16_t* to) WIDE {
        const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(v)), high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(v, 1));
        _mm512_store_si512(to, _mm512_sub_epi16(low, eight));
        _mm512_store_si512(to + 32, _mm512_sub_epi16(high, eight));
    };
    for (int tile = 0; tile < work.tiles; tile++)
        for (int first = 0; first < work.groups; first += PAIR) {
            const uint8_t* weights = work.weights + tile * work.stride;
            const bool is_last = first + PAIR >= work.groups;
            const uint8_t* next = !is_last ? nullptr : tile + 1 < work.tiles ? weights + work.stride : work.next;
            const int pair = work.groups - first < PAIR ? work.groups - first : PAIR;
            std::memset(acc, 0, pair * sizeof acc[0]);
            for (int block = 0; block < work.blocks; block++) {
                const uint8_t* from = weights + block * block_bytes(128);
                if (first == 0 || block + AHEAD >= work.blocks) fetch_ahead(weights, block, work.blocks, next, block_bytes(128));
                for (int half = 0; half < 2; half++)
                    for (int g = 0; g < 8; g++) {
                        const __m512i v = _mm512_loadu_si512(from + half * 512 + g * 64);
                        spread(_mm512_and_si512(v, nibble), &codes[g][half * HALF]);
                        spread(_mm512_and_si512(_mm512_srli_epi16(v, 4), nibble), &codes[g + 8][half * HALF]);
                    }
                scales_avx512(from + CODE_BYTES, 1.f, weight_scales);
                for (int g = 0; g < pair; g++) {
                    const Packed& x = work.x[first + g][block];
                    for (int k = 0; k < x.count; k++)
                        _mm512_store_ps(scales[k], _mm512_mul_ps(_mm512_load_ps(weight_scales), _mm512_set1_ps(x.steps[k])));
                    for (int row = 0; row < ROWS; row++) {
                        const __m512i c0 = _mm512_load_si512(codes[row]), c1 = _mm512_load_si512(codes[row] + 32);
                        const __m512i c2 = _mm512_load_si512(codes[row] + 64), c3 = _mm512_load_si512(codes[row] + 96);
                        for (int k = 0; k < x.count; k++) {
                            __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), c0, _mm512_load_si512(x.wide[k]));
                            sum = _mm512_dpwssd_epi32(sum, c1, _mm512_load_si512(x.wide[k] + 32));
                            sum = _mm512_dpwssd_epi32(sum, c2, _mm512_load_si512(x.wide[k] + 64));
                            sum = _mm512_dpwssd_epi32(sum, c3, _mm512_load_si512(x.wide[k] + 96));
                            float* to = acc[g][row][k];
                            const __m512 scale = _mm512_set1_ps(scales[k][row % 8 * 2 + row / 8]);
                            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_load_ps(to)));
                        }
                    }
                }
            }
            for (int g = 0; g < pair; g++) {
                float* to = out + (tile * work.groups + first + g) * ROWS * COLUMNS;
                for (int row = 0; row < ROWS; row++)
                    for (int k = 0; k < work.x[first + g]->count; k++) {
                        to[row * COLUMNS + k * 2] = _mm512_reduce_add_ps(_mm512_load_ps(acc[g][row][k]));
                        to[row * COLUMNS + k * 2 + 1] = 0.f;
                    }
            }
        }
}
#endif

PackedKernels packed_kernels_for(int group, bool plain) {
    if (group != 128) return {};
    if (plain) return {plain_packed, pack_bytes, 1.001f};
#if defined(__x86_64__)
#if defined(__linux__)
    static const bool usable = has_tiles();
    if (usable) return {amx, pack_bytes, 1.001f};
#endif
    if (product_for(128) == (Product)avx512<128>) return {vnni_packed, pack_wide, 2.5f};
#endif
    return {};
}

// For tests: `level` 0 plain, 1 as above.
extern "C" void tiles_product(const uint8_t* tile, int blocks, int group, const float* x, int level, float* out) {
    Activations* rounded = new Activations[blocks];
    for (int block = 0; block < blocks; block++) round_block(x + block * BLOCK, 1.f, rounded[block]);
    alignas(64) float sums[ROWS * LANES] = {};
    const Product product = level ? product_for(group) : group == 128 ? plain<128> : group == 64 ? plain<64> : plain<32>;
    product(tile, blocks, rounded, sums, nullptr);
    add_lanes(sums, out);
    delete[] rounded;
}

}  // namespace tiles
