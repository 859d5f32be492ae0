// Many rows of 8-bit activations against 4-bit weights, in integer warpgroup products: codes are exact as signed bytes, and Hopper multiplies these
// twice as fast as bf16. x is rounded to 8 bits beforehand (quantize_rows in small.cu), with a scale for each row and block of 128 inputs; the sums of a
// block are exact, and are scaled and added up in fp32. Weights in groups of 128.
//
// WGS warpgroups of consumers take 64 * DEEP rows of weights each, a warp DEEP tiles that follow one another. One more streams weights by tensor copies
// and gathers rows of x, and runs ahead into the next unit. A tile's products are made in one or two halves of the columns, and while the sums of one are
// scaled the products of the next are under way, as they are in the other warpgroup.
//
// Compiled with: KIND (as wide.cu, or 4: gate, up and SiLU as 1, rounded to 8 bits for the next product), N (16, 32, 48, 64, 80 or 128), ITEMS as wide.cu; WGS (2 or 3), DEEP (1 or 2), STAGES; SPLIT: columns of the first half, 0 for one
// whole; FRAGMENTS of weights (1 or 2: with two, one is made while the other is used).

#define CLUSTER 1
constexpr u32 CONSUMERS = WGS * 128, LOADERS = 128, TILES = WGS * 4 * DEEP, LAG = STAGES / 2;  // stages of x under way
constexpr u32 WEIGHTS_BYTES = TILES * BLOCK_BYTES, X_BYTES = N * 128;
constexpr u32 WEIGHTS_AT = (X_BYTES + N * 4 + 127) / 128 * 128;  // behind x and its scales
constexpr u32 STAGE_BYTES = (WEIGHTS_AT + WEIGHTS_BYTES + 1023) / 1024 * 1024;
constexpr u32 REGISTERS = WGS == 3 ? 152 : 232, LOADER_REGISTERS = WGS == 3 ? 56 : 40;
constexpr u32 HALVES = SPLIT ? 2 : 1;
constexpr u32 CHUNK = DEEP == 2 ? 1 : 2;  // blocks without a branch: more would overlap better, and be too much code
// Whether units whose last 16 columns are empty leave them out.
constexpr bool NARROW = ITEMS && N > 32 && N <= 80;
// Whether the scales of x stay in registers for the second tile of a warp; else a few are loaded ahead of their use.
constexpr bool KEEP = DEEP == 2 && N <= 80;
constexpr u32 AHEAD = 3;
static_assert((FRAGMENTS == 2 || HALVES == 2) && CHUNK <= STAGES && N <= LOADERS && GROUP == 128 && WEIGHTS_BYTES % 128 == 0);

#include "units.cuh"

// In the order in which they stand here: the compiler would load scales behind the wait for products.
DEVICE uint4 shared_16(u32 at) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(at) : "memory");
    return r;
}
DEVICE float2 shared_8(u32 at) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(at) : "memory");
    return r;
}
DEVICE u32 shared_4(u32 at) {
    u32 r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
    return r;
}

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
#undef PRODUCT
    static_assert(COLUMNS == 16 || COLUMNS == 32 || COLUMNS == 48 || COLUMNS == 64);
}

// Four codes an instruction: 16 * (code - 8) of the upper nibbles, signed bytes.
DEVICE u32 codes_bytes(u32 q) {
    u32 r;
    asm volatile("lop3.b32 %0, %1, 0xf0f0f0f0, 0x80808080, 0x6a;" : "=r"(r) : "r"(q));
    return r;
}

// Of KIND 4: a unit has 128 outputs, which are rounded together by the largest of them. A warp has 16, and a lane the four of a column that lie side by side
// as codes. They are written when all warps have been asked for their largest: with few columns while the next unit is under way, lest all wait for each other.
constexpr bool LATE = KIND == 4 && N <= 80;
struct Outputs {
    u32 values[N / 8][2];  // bf16
    Places places;
    u32 first;             // tile
};
template <u32 WIDTH>
DEVICE void find_largest(const float (&acc)[DEEP][WIDTH / 2], u32 lane, Outputs& outputs, u32* largest, u32 barrier) {
    const u32 g = lane / 4, t = lane & 3;
#pragma unroll
    for (u32 i = 0; i < WIDTH / 8; i++) {
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            const float* v = acc[m % DEEP] + i * 4;
            outputs.values[i][m] = transposed(pack_bf16(fast_silu(v[0]) * v[2], fast_silu(v[1]) * v[3]));
        }
        u32 bits = largest_bits(outputs.values[i][0], outputs.values[i][1]);
        bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
        bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
        if (t == 0) atomicMax(largest + i * 8 + g, bits);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}
// Clears `later`, the numbers of the unit after the next: whoever read them has been here for a unit since.
DEVICE void write_rounded(const Arguments& a, u32 warp, u32 lane, const Outputs& outputs, const u32* largest, u32* later, u32 barrier, u32 phase) {
    static_assert(KIND != 4 || (TILES == 16 && DEEP == 2));
    const u32 g = lane / 4, t = lane & 3;
    barrier_wait(barrier, phase);
    for (u32 n = warp * 32 + lane; n < N; n += CONSUMERS) later[n] = 0;
#pragma unroll
    for (u32 i = 0; i < N / 8; i++) {
        const int place = outputs.places.at(i, g);
        if (place < 0) continue;
        const float most = bf16_float(largest[i * 8 + g]);
        const u32 word = __byte_perm(round_bytes(outputs.values[i][0], outputs.values[i][1], inverse_of(most)), 0, 0x3120);
        *(u32*)((u8*)a.out + place * a.out_stride + outputs.first * 8 + warp * 16 + t * 4) = word;
        if (warp == 0 && t == 0) a.out_scales[place * (a.out_stride / 128) + outputs.first / TILES] = step_of(most);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + LOADERS, 1) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    u64* barriers = (u64*)(memory + STAGES * STAGE_BYTES);
    int* rows = (int*)(barriers + 2 * STAGES + 1);  // [N]: of x, of the unit that is being loaded
    u32* is_narrow = (u32*)(rows + N);          // [STAGES]: whether the last 16 columns of a stage's unit are empty
    u32* largest = is_narrow + STAGES;          // [3][N], of KIND 4
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, rounding = empty + STAGES * 8, ring_at = shared_address(memory);
    const u32 thread = thread_number(), warp = __shfl_sync(~0u, thread / 32, 0), lane = thread & 31;
    for (u32 i = thread; KIND == 4 && i < 3 * N; i += CONSUMERS + LOADERS) largest[i] = 0;
    if (thread == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1 + LOADERS / 32), barrier_init(empty + i * 8, WGS * 4);
        barrier_init(rounding, WGS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();
    wait_previous();
    const u32 groups = (a.tiles + TILES - 1) / TILES;
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
            for (u32 s = 0; s < a.slice_blocks; s++) {
                barrier_wait(empty + stage * 8, phase);
                const u32 at = ring_at + stage * STAGE_BYTES, block = unit.slice * a.slice_blocks + s;
                if (number == 0) {
                    barrier_expect(full + stage * 8, WEIGHTS_BYTES);
                    copy_tiles(at + WEIGHTS_AT, a.weights, block * (BLOCK_BYTES / 8), unit.first_row, full + stage * 8, policy);
                    is_narrow[stage] = narrow;
                }
                const u8* source = (const u8*)a.x + block * BLOCK_K;
#pragma unroll
                for (u32 i = 0; i < N / 16; i++) {
                    if (i + 1 == N / 16 && narrow) break;
                    const u32 n = i * 16 + first_row;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + n * 128 + (chunk ^ (n & 7)) * 16), "l"(source + offsets[i]) : "memory");
                }
                if (number < N) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at + X_BYTES + number * 4), "l"(scales + block) : "memory");
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
    // Of the first stage: this lane's codes, scales of its rows of weights, and those of its columns of x.
    const u32 tile_at = ring_at + WEIGHTS_AT + warp * DEEP * BLOCK_BYTES, codes_at = tile_at + lane * 16, scale_at = tile_at + CODE_BYTES + g * 4,
              steps_at = ring_at + X_BYTES + t * 8;
    u32 stage = 0, phase = 0;
    [[maybe_unused]] Outputs outputs;  // not written yet: those of unit `turn` of this thread block
    [[maybe_unused]] u32 turn = ~0u;
    auto write_outputs = [&]() { write_rounded(a, warp, lane, outputs, largest + turn % 3 * N, largest + (turn + 2) % 3 * N, rounding, turn & 1); };
    for (u32 u = blockIdx.x; u < units; u += gridDim.x) {
        const Unit unit = unit_of(a, u, groups);
        const Places places = places_of(a, unit, lane);
        const u32 first_tile = unit.first + warp * DEEP;
        // COLUMNS are known at compile time: products run beside the scaling of others only without branches.
        auto run_unit = [&](auto columns) {
            constexpr u32 COLUMNS = decltype(columns)::value, FIRST = HALVES == 2 ? SPLIT : COLUMNS;
            float acc[DEEP][COLUMNS / 2] = {};
            // Some blocks. Phase P of them: tile P / HALVES (DEEP to a block), and a half of the columns.
            auto run_chunk = [&](auto count) {
                constexpr u32 BLOCKS = decltype(count)::value, TOTAL = BLOCKS * DEEP * HALVES;
                u32 c[2][(FIRST > COLUMNS - FIRST ? FIRST : COLUMNS - FIRST) / 2], f[FRAGMENTS][4][4], word[FRAGMENTS], at[BLOCKS];
                float2 steps[KEEP ? COLUMNS / 8 : AHEAD];
                float low, high;
#pragma unroll
                for (u32 b = 0; b < BLOCKS; b++) at[b] = b == 0 ? stage : at[b - 1] + 1 == STAGES ? 0 : at[b - 1] + 1;
                auto convert = [&](auto tile) {
                    constexpr u32 T = decltype(tile)::value, B = T / DEEP, F = T % FRAGMENTS;
                    if constexpr (T % DEEP == 0) barrier_wait(full + at[B] * 8, phase ^ (at[B] < stage));
                    const u32 weights = codes_at + at[B] * STAGE_BYTES + T % DEEP * BLOCK_BYTES;
                    const uint4 q0 = shared_16(weights), q1 = shared_16(weights + 512);
                    const u32 q[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
                    word[F] = shared_4(scale_at + at[B] * STAGE_BYTES + T % DEEP * BLOCK_BYTES);
#pragma unroll
                    for (u32 p = 0; p < 4; p++)
#pragma unroll
                        for (u32 j = 0; j < 2; j++) f[F][p][j * 2] = codes_bytes(q[p * 2 + j] << 4), f[F][p][j * 2 + 1] = codes_bytes(q[p * 2 + j]);
                };
                auto issue = [&](auto which) {
                    constexpr u32 P = decltype(which)::value, T = P / HALVES, HALF = P % HALVES, WIDTH = HALF ? COLUMNS - FIRST : FIRST;
                    const u64 x = descriptor(ring_at + at[T / DEEP] * STAGE_BYTES + HALF * FIRST * 128);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (u32 p = 0; p < 4; p++) product<WIDTH>(c[P % 2], f[T % FRAGMENTS][p], x + p * 2, p > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                };
                // The scales of x that a phase begins with.
                auto load_steps = [&](auto which) {
                    constexpr u32 P = decltype(which)::value, T = P / HALVES, HALF = P % HALVES, ALL = (HALF ? COLUMNS - FIRST : FIRST) / 8;
                    if constexpr (KEEP && T % DEEP) return;
                    const u32 from = steps_at + at[T / DEEP] * STAGE_BYTES + HALF * FIRST * 4;
#pragma unroll
                    for (u32 i = 0; i < (KEEP || ALL < AHEAD ? ALL : AHEAD); i++) steps[KEEP ? HALF * FIRST / 8 + i : i] = shared_8(from + i * 32);
                };
                auto collect = [&](auto which) {
                    constexpr u32 P = decltype(which)::value, T = P / HALVES, D = T % DEEP, HALF = P % HALVES, ALL = (HALF ? COLUMNS - FIRST : FIRST) / 8;
                    const u32 from = steps_at + at[T / DEEP] * STAGE_BYTES + HALF * FIRST * 4;
#pragma unroll
                    for (u32 i = 0; i < ALL; i++) {
                        const float2 of = steps[KEEP ? HALF * FIRST / 8 + i : i % AHEAD];
                        float* to = acc[D] + HALF * FIRST / 2 + i * 4;
                        const u32* sums = c[P % 2] + i * 4;
                        to[0] = fmaf(low, (float)(int)sums[0] * of.x, to[0]);
                        to[1] = fmaf(low, (float)(int)sums[1] * of.y, to[1]);
                        to[2] = fmaf(high, (float)(int)sums[2] * of.x, to[2]);
                        to[3] = fmaf(high, (float)(int)sums[3] * of.y, to[3]);
                        if (!KEEP && i + AHEAD < ALL) steps[i % AHEAD] = shared_8(from + (i + AHEAD) * 32);
                    }
                    if constexpr ((P + 1) % (DEEP * HALVES) == 0)
                        if (lane == 0) barrier_arrive(empty + at[T / DEEP] * 8);
                };
                auto run_phase = [&](auto& self, auto which) {
                    constexpr u32 P = decltype(which)::value;
                    if constexpr (P % HALVES == 0) {
                        const u32 scale = word[P / HALVES % FRAGMENTS];
                        low = bf16_float(scale), high = __uint_as_float(scale & 0xffff0000u);
                    }
                    load_steps(which);
                    if constexpr (FRAGMENTS == 2) {
                        constexpr u32 Q = P + 2;
                        products_done<P + 1 == TOTAL ? 0 : 1>();
                        if constexpr (Q < TOTAL && Q % HALVES == 0) convert(Number<Q / HALVES>());
                        collect(which);
                        if constexpr (Q < TOTAL) issue(Number<Q>());
                    } else if constexpr (P % 2 == 0) {
                        products_done<1>();
                        collect(which);
                    } else {
                        // One set of bytes: a tile's are made when the products of the one before are done.
                        products_done<0>();
                        if constexpr (P + 1 < TOTAL) convert(Number<P / 2 + 1>()), issue(Number<P + 1>());
                        collect(which);
                        if constexpr (P + 1 < TOTAL) issue(Number<P + 2>());
                    }
                    if constexpr (P + 1 < TOTAL) self(self, Number<P + 1>());
                };
                convert(Number<0>());
                issue(Number<0>());
                if constexpr (HALVES == 1 && TOTAL > 1) convert(Number<1>());
                if constexpr (TOTAL > 1) issue(Number<1>());
                run_phase(run_phase, Number<0>());
                const u32 next = at[BLOCKS - 1] + 1 == STAGES ? 0 : at[BLOCKS - 1] + 1;
                phase ^= next <= at[0], stage = next;
            };
            for (u32 s = 0; s < a.slice_blocks / CHUNK; s++) {
                run_chunk(Number<CHUNK>());
                if (LATE && s == min(1, a.slice_blocks - 1) && turn != ~0u) write_outputs();
            }
            if (CHUNK > 1 && a.slice_blocks % CHUNK) run_chunk(Number<1>());
            if constexpr (KIND == 4) {
                outputs.places = places, outputs.first = unit.first;
                find_largest<COLUMNS>(acc, lane, outputs, largest + ++turn % 3 * N, rounding);
                if (!LATE) write_outputs();
            } else write<COLUMNS, DEEP>(a, acc, unit, first_tile, places, g, t);
        };
        barrier_wait(full + stage * 8, phase);
        if (NARROW && is_narrow[stage]) run_unit(Number<NARROW ? N - 16 : N>());
        else run_unit(Number<N>());
    }
    if (LATE && turn != ~0u) write_outputs();
}
