// Many rows of 8-bit activations against 4-bit weights, in integer warpgroup products: codes are exact as signed bytes, and Hopper multiplies these
// twice as fast as bf16. x is rounded to 8 bits beforehand (quantize_rows in small.cu), with a scale for each row and block of 128 inputs; the sums of a
// block are exact, and are scaled and added up in fp32. Weights in groups of 128.
//
// WGS warpgroups of consumers take two times 64 rows of weights each, a warp two tiles that follow one another. One more streams weights by tensor copies
// and rows of x, and runs ahead into the next unit. A tile's products are made in one or two halves of the columns, and while the sums of one are scaled the
// products of the next are under way, as they are in the other warpgroup. What a product and its scaling take adds up all the same (docs/reference/cuda-notes.md,
// 38 and 39), so that every instruction counts.
//
// Compiled with: KIND (as wide.cu), N (16, 32, 48, 64, 80 or 128), ITEMS as wide.cu; WGS (2 or 3), STAGES; SPLIT: columns of the first half, 0 for one
// whole; FRAGMENTS of weights (1 or 2: with two, one is made while the other is used).

#define CLUSTER 1
#define X_MAP
constexpr u32 DEEP = 2, CONSUMERS = WGS * 128, LOADERS = 128, TILES = WGS * 4 * DEEP, LAG = STAGES / 2;  // stages of x under way
constexpr u32 WEIGHTS_BYTES = TILES * BLOCK_BYTES, X_BYTES = N * 128;
constexpr u32 WEIGHTS_AT = (X_BYTES + N * 4 + 127) / 128 * 128;  // behind x and its scales
constexpr u32 STAGE_BYTES = (WEIGHTS_AT + WEIGHTS_BYTES + 1023) / 1024 * 1024;
constexpr u32 REGISTERS = WGS == 3 ? 152 : ITEMS ? 232 : 240, LOADER_REGISTERS = WGS == 3 ? 56 : ITEMS ? 40 : 24;
constexpr u32 HALVES = SPLIT ? 2 : 1;
// Whether units whose last 16 columns are empty leave them out.
constexpr bool NARROW = ITEMS && N > 32 && N <= 80;
// Whether the scales of x stay in registers for the second tile of a warp; else a few are loaded ahead of their use.
constexpr bool KEEP = N <= 80;
constexpr u32 AHEAD = 3;
static_assert((ITEMS || WGS == 2) && (FRAGMENTS == 2 || HALVES == 2) && N <= LOADERS && GROUP == 128 && WEIGHTS_BYTES % 128 == 0);

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

// Of the first lane: the compiler does not know that a quotient is the same in all lanes, and would keep what depends on it out of uniform registers.
DEVICE u32 same(u32 value) { return __shfl_sync(~0u, value, 0); }

// Computed once: the compiler would do it again in every turn of a loop.
DEVICE u32 kept(u32 value) {
    if constexpr (N <= 80) asm volatile("" : "+r"(value));
    return value;
}

// A run of blocks of inputs of a unit.
struct Segment {
    u32 unit, first, last;
};
#if ITEMS
// Whole units, one of each wave: unit `at`, if there is one.
DEVICE u32 first_place() { return blockIdx.x; }
DEVICE u32 next_place(u32 at, const Segment&) { return at + gridDim.x; }
DEVICE bool segment_at(const Arguments& a, u32 units, u32 at, Segment& segment) {
    segment = {at, 0, a.slice_blocks};
    return at < units;
}
#else
// How the work is shared out: `whole` units for every thread block, one of each wave, and of the rest (one to two waves) as many blocks of inputs for each.
// So a unit may be cut between thread blocks: the one that has its first block adds up the sums of the others, in their order.
struct Shares {
    u32 grid, whole, cut;  // thread blocks; units of each; blocks of the units that are cut
    DEVICE Shares(const Arguments& a) {
        asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(grid));  // read anew each time: all of this would take registers from the products
        const u32 units = (a.rows + N - 1) / N * a.slices * ((a.tiles + TILES - 1) / TILES);
        whole = same(max(units / grid, 1u) - 1), cut = (units - whole * grid) * a.slice_blocks;
    }
    DEVICE u32 begin_of(u32 number) const { return same(number * cut / grid); }  // of those
};
// That which begins with block `at` of this thread block's, if there is one.
DEVICE u32 first_place() { return 0; }
DEVICE u32 next_place(u32 at, const Segment& segment) { return at + segment.last - segment.first; }
DEVICE bool segment_at(const Arguments& a, u32, u32 at, Segment& segment) {
    const Shares shares(a);
    if (at < shares.whole * a.slice_blocks) {
        segment = {same(at / a.slice_blocks) * shares.grid + blockIdx.x, 0, a.slice_blocks};
        return true;
    }
    const u32 place = shares.begin_of(blockIdx.x) + at - shares.whole * a.slice_blocks, end = shares.begin_of(blockIdx.x + 1);
    segment.unit = shares.whole * shares.grid + same(place / a.slice_blocks), segment.first = same(place % a.slice_blocks);
    segment.last = min(a.slice_blocks, segment.first + end - place);
    return place < end;
}
#endif

#if !ITEMS
// Sums for another thread block, warp by warp: each has a flag, zero between launches.
constexpr u32 SUMS = CONSUMERS * DEEP * N / 2;  // of a thread block
template <u32 COUNT>
DEVICE void store_sums(const Arguments& a, const float* sums, u32 thread) {
    float* to = a.sums + blockIdx.x * SUMS + thread;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) __stcg(to + i * CONSUMERS, sums[i]);
    __threadfence();
    __syncwarp();
    if (thread % 32 == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(a.flags + (blockIdx.x * CONSUMERS + thread) / 32) : "memory");
}
template <u32 COUNT>
DEVICE void add_sums(const Arguments& a, float* sums, u32 thread, u32 number) {
    u32* flag = a.flags + (number * CONSUMERS + thread) / 32;
    u32 is_there;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_there) : "l"(flag) : "memory");
    while (!__all_sync(~0u, is_there));
    const float* from = a.sums + number * SUMS + thread;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) sums[i] += __ldcg(from + i * CONSUMERS);
    __syncwarp();
    if (thread % 32 == 0) *flag = 0;
}
// Of the blocks of a unit from `next` on, which the next thread blocks have.
template <u32 COUNT>
DEVICE void add_others(const Arguments& a, float* sums, u32 thread, u32 next) {
    const Shares shares(a);
    for (u32 other = blockIdx.x + 1; next < a.slice_blocks; other++) {
        add_sums<COUNT>(a, sums, thread, other);
        next += shares.begin_of(other + 1) - shares.begin_of(other);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + LOADERS, 1) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    u64* barriers = (u64*)(memory + STAGES * STAGE_BYTES);
    int* rows = (int*)(barriers + 2 * STAGES);  // [N]: of x, of the unit that is being loaded
    u32* is_narrow = (u32*)(rows + N);              // [STAGES]: whether the last 16 columns of a stage's unit are empty
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, ring_at = shared_address(memory);
    const u32 thread = thread_number(), warp = same(thread / 32), lane = thread & 31;
    if (thread == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1 + (ITEMS ? LOADERS / 32 : 32)), barrier_init(empty + i * 8, WGS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();
    const u32 groups = (a.tiles + TILES - 1) / TILES;
#if ITEMS
    wait_previous();
    const u32 units = (u32)__ldcg(a.num_items) * groups;
#else
    constexpr u32 units = 0;  // counted anew by `Shares`
#endif
    u32 stage = 0;
    Segment segment;

    if (warp >= WGS * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        const u64 policy = read_once_policy();
        const u32 x_blocks = a.x_stride / BLOCK_K;
        u32 phase = 1;
#if ITEMS
        const u32 number = thread - CONSUMERS, chunk = number % 8, first_row = number / 8;  // a thread: one 16-byte chunk of every 16th row
        u32 sent = 0, flying = 0;
        auto announce = [&]() {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) barrier_arrive(full + sent * 8);  // one for each warp: arrivals of single threads queue
            if (++sent == STAGES) sent = 0;
        };
        for (u32 at = first_place(); segment_at(a, units, at, segment); at = next_place(at, segment)) {
            const Unit unit = unit_of(a, segment.unit, groups);
            named_barrier(2, LOADERS);
            for (u32 n = number; n < N; n += LOADERS) rows[n] = column(a, a.item_rows, unit.item, n);
            named_barrier(2, LOADERS);
            // Columns that no row belongs to are read from the first row, and their results are not written.
            const bool narrow = NARROW && rows[NARROW ? N - 16 : 0] < 0;
            u32 offsets[N / 16];
#pragma unroll
            for (u32 i = 0; i < N / 16; i++) offsets[i] = max(rows[i * 16 + first_row], 0) * a.x_stride + chunk * 16;
            const float* scales = a.x_scales + (number < N ? max(rows[number], 0) : 0) * x_blocks;
            for (u32 block = 0; block < a.slice_blocks; block++) {
                barrier_wait(empty + stage * 8, phase);
                const u32 to = ring_at + stage * STAGE_BYTES;
                if (number == 0) {
                    barrier_expect(full + stage * 8, WEIGHTS_BYTES);
                    copy_tiles(to + WEIGHTS_AT, a.weights, block * (BLOCK_BYTES / 8), unit.first_row, full + stage * 8, policy);
                    is_narrow[stage] = narrow;
                }
                const u8* source = (const u8*)a.x + block * BLOCK_K;
#pragma unroll
                for (u32 i = 0; i < N / 16; i++) {
                    if (i + 1 == N / 16 && narrow) break;
                    const u32 n = i * 16 + first_row;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + n * 128 + (chunk ^ (n & 7)) * 16), "l"(source + offsets[i]) : "memory");
                }
                if (number < N) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + X_BYTES + number * 4), "l"(scales + block) : "memory");
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
#else
        auto ask_weights = [&](const Unit& unit, u32 block, u32 stage) {
            const u32 barrier = full + stage * 8;
            barrier_expect(barrier, WEIGHTS_BYTES + X_BYTES);
            copy_tiles(ring_at + stage * STAGE_BYTES + WEIGHTS_AT, a.weights, (unit.slice * a.slice_blocks + block) * (BLOCK_BYTES / 8), unit.first_row, barrier, policy);
        };
        // Rows follow one another: one thread asks for weights and rows, its warp for scales. Rows behind the last one are zero.
        if (warp > WGS * 4) return;
        // Weights were there before the previous kernel: those of the first stages arrive while it ends.
        segment_at(a, units, first_place(), segment);
        u32 early = min(STAGES, segment.last - segment.first);
        if (lane == 0) {
            const Unit unit = unit_of(a, segment.unit, groups);
            for (u32 i = 0; i < early; i++) ask_weights(unit, segment.first + i, i);
        }
        wait_previous();
        for (u32 at = first_place(); segment_at(a, units, at, segment); at = next_place(at, segment)) {
            const Unit unit = unit_of(a, segment.unit, groups);
            u32 offsets[(N + 31) / 32];
#pragma unroll
            for (u32 i = 0; i < (N + 31) / 32; i++) offsets[i] = min(unit.item * N + i * 32 + lane, a.rows - 1) * x_blocks;
            for (u32 block = segment.first; block < segment.last; block++) {
                barrier_wait(empty + stage * 8, phase);
                const u32 to = ring_at + stage * STAGE_BYTES, barrier = full + stage * 8, from = unit.slice * a.slice_blocks + block;
                if (lane == 0) {
                    if (!early) ask_weights(unit, block, stage);
                    copy_rows(to, &a.x_map, from * BLOCK_K, unit.item * N, barrier);
                }
#pragma unroll
                for (u32 i = 0; i < (N + 31) / 32; i++)
                    if (i * 32 + lane < N)
                        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + X_BYTES + (i * 32 + lane) * 4), "l"(a.x_scales + from + offsets[i])
                                     : "memory");
                asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
                early -= early > 0;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
#endif
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    wait_previous();
    const u32 g = lane / 4, t = lane & 3;
    // Of the first stage: this lane's codes, scales of its rows of weights, and those of its columns of x.
    const u32 tile_at = ring_at + WEIGHTS_AT + warp * DEEP * BLOCK_BYTES;
    const u32 codes_at = kept(tile_at + lane * 16), scale_at = kept(tile_at + CODE_BYTES + g * 4), steps_at = kept(ring_at + X_BYTES + t * 8);
    const u64 x_at = descriptor(ring_at);
    u32 phase = 0, here = 0;  // `here`: where the stage begins
    for (u32 at = first_place(); segment_at(a, units, at, segment); at = next_place(at, segment)) {
        const Unit unit = unit_of(a, segment.unit, groups);
        const Places places = places_of(a, unit, lane);
        const u32 first_tile = unit.first + warp * DEEP;
        // COLUMNS are known at compile time: products run beside the scaling of others only without branches.
        auto run_segment = [&](auto columns) {
            constexpr u32 COLUMNS = decltype(columns)::value, FIRST = HALVES == 2 ? SPLIT : COLUMNS, TOTAL = DEEP * HALVES;
            float acc[DEEP][COLUMNS / 2] = {};
            uint4 codes[FRAGMENTS][2];  // of the tiles that come next
            auto load_codes = [&](auto tile, u32 from) {
                constexpr u32 T = decltype(tile)::value;
                codes[T % FRAGMENTS][0] = shared_16(codes_at + from + T * BLOCK_BYTES), codes[T % FRAGMENTS][1] = shared_16(codes_at + from + T * BLOCK_BYTES + 512);
            };
            auto load_first = [&](u32 from) {
                load_codes(Number<0>(), from);
                if constexpr (FRAGMENTS == 2) load_codes(Number<1>(), from);
            };
            // A block. Phase P of it: tile P / HALVES, and a half of the columns.
            auto run_block = [&](bool is_last) {
                u32 c[2][(FIRST > COLUMNS - FIRST ? FIRST : COLUMNS - FIRST) / 2], f[FRAGMENTS][4][4];
                float2 steps[KEEP ? COLUMNS / 8 : AHEAD];
                float low, high;
                const bool wraps = stage + 1 == STAGES;
                const u32 next = wraps ? 0 : stage + 1, there = wraps ? 0 : here + STAGE_BYTES;
                // Before any product is under way: a branch among them would make each wait for the one before.
                if (!is_last) barrier_wait(full + next * 8, phase ^ wraps);
                auto convert = [&](auto tile) {
                    constexpr u32 T = decltype(tile)::value, F = T % FRAGMENTS;
                    const uint4 q0 = codes[F][0], q1 = codes[F][1];
                    const u32 q[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
                    for (u32 p = 0; p < 4; p++)
#pragma unroll
                        for (u32 j = 0; j < 2; j++) f[F][p][j * 2] = codes_bytes(q[p * 2 + j] << 4), f[F][p][j * 2 + 1] = codes_bytes(q[p * 2 + j]);
                };
                auto issue = [&](auto which) {
                    constexpr u32 P = decltype(which)::value, T = P / HALVES, HALF = P % HALVES, WIDTH = HALF ? COLUMNS - FIRST : FIRST;
                    const u64 x = x_at + here / 16 + HALF * FIRST * 8;
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (u32 p = 0; p < 4; p++) product<WIDTH>(c[P % 2], f[T % FRAGMENTS][p], x + p * 2, p > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                };
                // The scales of x that a phase begins with, or all of them.
                auto load_steps = [&](auto which) {
                    constexpr u32 HALF = KEEP ? 0 : decltype(which)::value % HALVES, ALL = KEEP ? COLUMNS / 8 : (HALF ? COLUMNS - FIRST : FIRST) / 8;
#pragma unroll
                    for (u32 i = 0; i < (KEEP || ALL < AHEAD ? ALL : AHEAD); i++) steps[i] = shared_8(steps_at + here + HALF * FIRST * 4 + i * 32);
                };
                auto collect = [&](auto which) {
                    constexpr u32 P = decltype(which)::value, D = P / HALVES, HALF = P % HALVES, ALL = (HALF ? COLUMNS - FIRST : FIRST) / 8;
#pragma unroll
                    for (u32 i = 0; i < ALL; i++) {
                        const float2 of = steps[KEEP ? HALF * FIRST / 8 + i : i % AHEAD];
                        float* to = acc[D] + HALF * FIRST / 2 + i * 4;
                        const u32* sums = c[P % 2] + i * 4;
                        to[0] = fmaf(low, (float)(int)sums[0] * of.x, to[0]);
                        to[1] = fmaf(low, (float)(int)sums[1] * of.y, to[1]);
                        to[2] = fmaf(high, (float)(int)sums[2] * of.x, to[2]);
                        to[3] = fmaf(high, (float)(int)sums[3] * of.y, to[3]);
                        if (!KEEP && i + AHEAD < ALL) steps[i % AHEAD] = shared_8(steps_at + here + HALF * FIRST * 4 + (i + AHEAD) * 32);
                    }
                };
                // All products of the block are done: the codes of the next one arrive while the last sums are scaled.
                auto move_on = [&]() {
                    load_first(is_last ? here : there);
                    if (KEEP && lane == 0) barrier_arrive(empty + stage * 8);
                };
                auto run_phase = [&](auto& self, auto which) {
                    constexpr u32 P = decltype(which)::value, Q = P + 2;
                    if constexpr (!KEEP) load_steps(which);
                    [[maybe_unused]] u32 scales;  // of two rows of weights
                    if constexpr (P % HALVES == 0) scales = shared_4(scale_at + here + P / HALVES * BLOCK_BYTES);
                    products_done<P + 1 == TOTAL || (FRAGMENTS == 1 && P % 2) ? 0 : 1>();
                    if constexpr (P + 1 < TOTAL && FRAGMENTS == 1 && P % 2) load_codes(Number<P / 2 + 1>(), here);
                    if constexpr (P % HALVES == 0) low = bf16_float(scales), high = __uint_as_float(scales & 0xffff0000u);
                    if constexpr (P + 1 == TOTAL) move_on();
                    // One set of bytes: a tile's are made when the products of the one before are done.
                    if constexpr (Q < TOTAL && FRAGMENTS == 2 && Q % HALVES == 0) convert(Number<Q / HALVES>());
                    if constexpr (P + 1 < TOTAL && FRAGMENTS == 1 && P % 2) convert(Number<P / 2 + 1>()), issue(Number<P + 1>());
                    collect(which);
                    if constexpr (Q < TOTAL && (FRAGMENTS == 2 || P % 2)) issue(Number<Q>());
                    if constexpr (P + 1 < TOTAL) self(self, Number<P + 1>());
                };
                if constexpr (KEEP) load_steps(Number<0>());
                convert(Number<0>());
                issue(Number<0>());
                if constexpr (HALVES == 1) convert(Number<1>());
                issue(Number<1>());
                run_phase(run_phase, Number<0>());
                if (!KEEP && lane == 0) barrier_arrive(empty + stage * 8);
                phase ^= wraps, stage = next, here = there;
            };
            load_first(here);
            for (u32 block = segment.first; block < segment.last; block++) run_block(block + 1 == segment.last);
#if !ITEMS
            if (segment.first) return store_sums<DEEP * COLUMNS / 2>(a, acc[0], thread);
            if (segment.last < a.slice_blocks) add_others<DEEP * COLUMNS / 2>(a, acc[0], thread, segment.last);
#endif
            write<COLUMNS, DEEP>(a, acc, unit, first_tile, places, g, t);
        };
        barrier_wait(full + stage * 8, phase);
        if (NARROW && is_narrow[stage]) run_segment(Number<NARROW ? N - 16 : N>());
        else run_segment(Number<N>());
    }
}
