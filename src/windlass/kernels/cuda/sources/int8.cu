// Many rows of 8-bit activations against 4-bit weights, in integer warpgroup products: codes are exact as signed bytes, and Hopper multiplies these
// twice as fast as bf16. x is rounded to 8 bits beforehand (quantize_rows in small.cu), with a scale for each row and block of 128 inputs; the sums of a
// block are exact, and are scaled and added up in fp32. Weights in groups of 128.
//
// WGS warpgroups of consumers take 64 * DEEP rows of weights each, a warp DEEP tiles that follow one another: a warpgroup scales its sums while the others multiply. One more streams weights
// by tensor copies and gathers rows of x, and runs ahead into the next unit.
//
// Compiled with: KIND, N (16, 32, 48, 64, 80 or 128), ITEMS as wide.cu; WGS (2 or 3), DEEP (1 or 2), STAGES, STAGE_BLOCKS, and TAIL (blocks of the last stage, if fewer; else 0),
// SETS of integer sums and FRAGMENTS of weights (1 or 2: with two, one is made while the other is used).

#define CLUSTER 1
constexpr u32 CONSUMERS = WGS * 128, LOADERS = 128, TILES = WGS * 4 * DEEP, LAG = STAGES / 2;  // stages of x under way
constexpr u32 WEIGHTS_BYTES = TILES * BLOCK_BYTES, X_BLOCK_BYTES = N * 128, X_BYTES = STAGE_BLOCKS * X_BLOCK_BYTES, SCALES_BYTES = STAGE_BLOCKS * N * 4;
constexpr u32 WEIGHTS_AT = (X_BYTES + SCALES_BYTES + 127) / 128 * 128;  // [STAGE_BLOCKS][TILES] blocks
constexpr u32 STAGE_BYTES = (WEIGHTS_AT + STAGE_BLOCKS * WEIGHTS_BYTES + 1023) / 1024 * 1024;
constexpr u32 REGISTERS = WGS == 3 ? 152 : 232, LOADER_REGISTERS = WGS == 3 ? 56 : 40;
// Whether units whose last 16 columns are empty leave them out.
constexpr bool NARROW = ITEMS && N > 32 && N <= 80;
// Whether the scales of x stay in registers for the second tile of a warp: where there is room, the measured difference decides.
constexpr bool KEEP = DEEP == 2 && (N <= 64 || (N == 80 && KIND == 1));
static_assert(N <= LOADERS && GROUP == 128 && WEIGHTS_BYTES % 128 == 0);

#include "units.cuh"

// An integer n with |n| < 2^22, added to these bits, makes the bits of the float 1.5 * 2^23 + n: conversion costs nothing.
constexpr u32 MAGIC_BITS = 0x4b400000u;
constexpr float MAGIC = 12582912.f;

#define I(i) "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3]), "+r"(c[i + 4]), "+r"(c[i + 5]), "+r"(c[i + 6]), "+r"(c[i + 7])
// c (if `add`) plus weights times x, the first COLUMNS of it.
template <u32 COLUMNS>
DEVICE void product(u32* c, const u32* f, u64 b, u32 add) {
#define PRODUCT(WIDTH, NAMES, REST, ADD, ...)                                                                                            \
    if constexpr (COLUMNS == WIDTH)                                                                                                      \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #WIDTH "k32.s32.s8.s8 {" NAMES "}, " \
                     REST ", p; }"                                                                                                       \
                     : __VA_ARGS__                                                                                                       \
                     : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(b), "r"(add));
    PRODUCT(16, L0, "{%8,%9,%10,%11}, %12", "%13", I(0))
    PRODUCT(32, L0 "," L1, "{%16,%17,%18,%19}, %20", "%21", I(0), I(8))
    PRODUCT(48, L0 "," L1 "," L2, "{%24,%25,%26,%27}, %28", "%29", I(0), I(8), I(16))
    PRODUCT(64, L0 "," L1 "," L2 "," L3, "{%32,%33,%34,%35}, %36", "%37", I(0), I(8), I(16), I(24))
    PRODUCT(80, L0 "," L1 "," L2 "," L3 "," L4, "{%40,%41,%42,%43}, %44", "%45", I(0), I(8), I(16), I(24), I(32))
    PRODUCT(128, L0 "," L1 "," L2 "," L3 "," L4 "," L5 "," L6 "," L7, "{%64,%65,%66,%67}, %68", "%69", I(0), I(8), I(16), I(24), I(32), I(40), I(48), I(56))
#undef PRODUCT
    static_assert(COLUMNS == 16 || COLUMNS == 32 || COLUMNS == 48 || COLUMNS == 64 || COLUMNS == 80 || COLUMNS == 128);
}

// Four codes an instruction: 16 * (code - 8) of the upper nibbles, signed bytes.
DEVICE u32 codes_bytes(u32 q) {
    u32 r;
    asm volatile("lop3.b32 %0, %1, 0xf0f0f0f0, 0x80808080, 0x6a;" : "=r"(r) : "r"(q));
    return r;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + LOADERS, 1) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    u64* barriers = (u64*)(memory + STAGES * STAGE_BYTES);
    int* rows = (int*)(barriers + 2 * STAGES);  // [N]: of x, of the unit that is being loaded
    u32* is_narrow = (u32*)(rows + N);          // [STAGES]: whether the last 16 columns of a stage's unit are empty
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, ring_at = shared_address(memory);
    const u32 thread = thread_number(), warp = thread / 32, lane = thread & 31;
    if (thread == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1 + LOADERS / 32), barrier_init(empty + i * 8, WGS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();
    wait_previous();
    const u32 groups = (a.tiles + TILES - 1) / TILES, stages = (a.slice_blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS;
#if ITEMS
    const u32 units = (u32)__ldcg(a.num_items) * groups;
#else
    const u32 units = (a.rows + N - 1) / N * a.slices * groups;
#endif

    if (warp >= WGS * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        const u64 policy = read_once_policy();
        const u32 number = thread - CONSUMERS, chunk = number % 8, first_row = number / 8;  // a thread: one 16-byte chunk of every 16th row
        const u32 x_blocks = a.x_stride / BLOCK_K;
        u32 stage = 0, phase = 1, sent = 0, flying = 0;
        auto announce = [&]() {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) barrier_arrive(full + sent * 8);  // one for each warp: arrivals of single threads queue
            if (++sent == STAGES) sent = 0;
        };
        for (u32 u = blockIdx.x; u < units; u += gridDim.x) {
            const Unit unit = unit_of(a, u, groups);
            named_barrier(2, LOADERS);
            for (u32 n = number; n < N; n += LOADERS) rows[n] = column(a, a.item_rows, unit.item, n);
            named_barrier(2, LOADERS);
            // Columns that no row belongs to are read from the first row, and their results are not written.
            const bool narrow = NARROW && rows[NARROW ? N - 16 : 0] < 0;
            u32 offsets[N / 16];
#pragma unroll
            for (u32 i = 0; i < N / 16; i++) offsets[i] = max(rows[i * 16 + first_row], 0) * a.x_stride + chunk * 16;
            const float* scales = a.x_scales + (number < N ? max(rows[number], 0) : 0) * x_blocks;
            for (u32 s = 0; s < stages; s++) {
                barrier_wait(empty + stage * 8, phase);
                const u32 at = ring_at + stage * STAGE_BYTES, first_block = s * STAGE_BLOCKS, block = unit.slice * a.slice_blocks + first_block;
                const u32 blocks = TAIL ? min(STAGE_BLOCKS, a.slice_blocks - first_block) : STAGE_BLOCKS;
                if (number == 0) {
                    barrier_expect(full + stage * 8, blocks * WEIGHTS_BYTES);
                    for (u32 b = 0; b < blocks; b++)
                        copy_tiles(at + WEIGHTS_AT + b * WEIGHTS_BYTES, a.weights, (block + b) * (BLOCK_BYTES / 8), unit.first_row, full + stage * 8, policy);
                    is_narrow[stage] = narrow;
                }
                const u8* source = (const u8*)a.x + block * BLOCK_K;
#pragma unroll
                for (u32 i = 0; i < N / 16; i++) {
                    if (i + 1 == N / 16 && narrow) break;
                    const u32 n = i * 16 + first_row, to = at + n * 128 + (chunk ^ (n & 7)) * 16;
#pragma unroll
                    for (u32 b = 0; b < STAGE_BLOCKS; b++)
                        if (!TAIL || b < blocks)
                            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + b * X_BLOCK_BYTES), "l"(source + offsets[i] + b * BLOCK_K) : "memory");
                }
                if (number < N) {
#pragma unroll
                    for (u32 b = 0; b < STAGE_BLOCKS; b++)
                        if (!TAIL || b < blocks)
                            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at + X_BYTES + (b * N + number) * 4), "l"(scales + block + b) : "memory");
                }
                asm volatile("cp.async.commit_group;" ::: "memory");
                if (++flying > LAG) {
                    asm volatile("cp.async.wait_group %0;" ::"n"(LAG) : "memory");
                    announce();
                }
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        for (u32 i = 0; i < min(flying, LAG); i++) announce();
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    const u32 g = lane / 4, t = lane & 3;
    u32 stage = 0, phase = 0;
    for (u32 u = blockIdx.x; u < units; u += gridDim.x) {
        const Unit unit = unit_of(a, u, groups);
        const Places places = places_of(a, unit, lane);
        const u32 first_tile = unit.first + warp * DEEP;
        // COLUMNS are known at compile time, and so are BLOCKS: products run beside the scaling of others only without branches.
        auto run_unit = [&](auto columns) {
            constexpr u32 COLUMNS = decltype(columns)::value;
            float acc[DEEP][COLUMNS / 2] = {};
            auto run_stage = [&](auto count) {
                constexpr u32 TURNS = decltype(count)::value * DEEP;
                barrier_wait(full + stage * 8, phase);
                const u8* at = memory + stage * STAGE_BYTES;
                u32 c[SETS][COLUMNS / 2], f[FRAGMENTS][4][4];
                float low[SETS], high[SETS];
                auto tile = [&](u32 turn) { return at + WEIGHTS_AT + turn / DEEP * WEIGHTS_BYTES + (warp * DEEP + turn % DEEP) * BLOCK_BYTES; };
                auto convert = [&](u32 turn) {
                    const u8* weights = tile(turn);
                    const uint4 q0 = *(const uint4*)(weights + lane * 16), q1 = *(const uint4*)(weights + 512 + lane * 16);
                    const u32 q[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
                    for (u32 p = 0; p < 4; p++)
#pragma unroll
                        for (u32 j = 0; j < 2; j++)
                            f[turn % FRAGMENTS][p][j * 2] = codes_bytes(q[p * 2 + j] << 4), f[turn % FRAGMENTS][p][j * 2 + 1] = codes_bytes(q[p * 2 + j]);
                };
                auto multiply = [&](u32 turn) {
                    const u32 set = turn % SETS, scale = *(const u32*)(tile(turn) + CODE_BYTES + g * 4);
                    low[set] = bf16_float(scale), high[set] = __uint_as_float(scale & 0xffff0000u);
                    const u64 x = descriptor(ring_at + stage * STAGE_BYTES + turn / DEEP * X_BLOCK_BYTES);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (u32 p = 0; p < 4; p++) product<COLUMNS>(c[set], f[turn % FRAGMENTS][p], x + p * 2, p > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                };
                float2 kept[KEEP ? COLUMNS / 8 : 1];
                auto collect = [&](u32 turn) {
                    const float2* scales = (const float2*)((const float*)(at + X_BYTES) + turn / DEEP * N + t * 2);
                    const u32 set = turn % SETS;
#pragma unroll
                    for (u32 i = 0; i < COLUMNS / 8; i++) {
                        if (!KEEP || turn % DEEP == 0) kept[KEEP ? i : 0] = scales[i * 4];
                        const float2 of = kept[KEEP ? i : 0];
                        const float first = -MAGIC * of.x, second = -MAGIC * of.y;  // exact: see quantize_rows
                        float* to = acc[turn % DEEP] + i * 4;
                        const u32* from = c[set] + i * 4;
                        to[0] = fmaf(low[set], fmaf(__uint_as_float(from[0] + MAGIC_BITS), of.x, first), to[0]);
                        to[1] = fmaf(low[set], fmaf(__uint_as_float(from[1] + MAGIC_BITS), of.y, second), to[1]);
                        to[2] = fmaf(high[set], fmaf(__uint_as_float(from[2] + MAGIC_BITS), of.x, first), to[2]);
                        to[3] = fmaf(high[set], fmaf(__uint_as_float(from[3] + MAGIC_BITS), of.y, second), to[3]);
                    }
                };
                if constexpr (FRAGMENTS == 2) convert(0);
#pragma unroll
                for (u32 turn = 0; turn < TURNS; turn++) {
                    if constexpr (FRAGMENTS == 1) convert(turn);
                    multiply(turn);
                    if constexpr (SETS == 2)
                        if (turn > 0) products_done<1>(), collect(turn - 1);
                    if constexpr (FRAGMENTS == 2)
                        if (turn + 1 < TURNS) convert(turn + 1);
                    if (SETS == 1 || turn + 1 == TURNS) products_done<0>(), collect(turn);
                }
                if (lane == 0) barrier_arrive(empty + stage * 8);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            };
            for (u32 s = 0; s < a.slice_blocks / STAGE_BLOCKS; s++) run_stage(Number<STAGE_BLOCKS>());
#if TAIL
            run_stage(Number<TAIL>());
#endif
            write<COLUMNS, DEEP>(a, acc, unit, first_tile, places, g, t);
        };
        barrier_wait(full + stage * 8, phase);
        if (NARROW && is_narrow[stage]) run_unit(Number<NARROW ? N - 16 : N>());
        else run_unit(Number<N>());
    }
}
