// Many rows of activations against 4-bit weights on Hopper's warpgroup products: a unit is 128 or 256 rows of weights against up to N rows of x.
// Weights become bf16 in registers (the left operand): codes as they are with EXACT, which is for few rows, else times their scale and rounded;
// x comes from shared memory (the right one). Two warpgroups of 64 or 128 rows each
// (what is read of x per product is what limits large units: the more rows of weights see it the better); a third one
// streams weights by tensor copies and gathers rows of x, and runs ahead into the next unit while the others write results.
//
// Compiled with: EXACT, KIND (0 bf16 with bias, 1 gate and up, 2 fp32 partial results of slices, 3 bf16), N (16, 32, 64, 128, 144, 160 or 256), DEEP (1
// or 2: 64 rows of weights of a warpgroup), STAGES, STAGE_BLOCKS (along the inputs), ITEMS (1: items of up to N rows that share an expert, from a list; 0:
// blocks of N rows, slices of the inputs), CLUSTER (1, or DEEP: so many blocks take slices of the inputs of the same unit and add up their sums in
// each other's memory. Each then reads a part of x for as many more rows of weights; x is most of what few rows read).

#ifndef CLUSTER
#define CLUSTER 1
#endif
constexpr u32 CONSUMERS = 256, LOADERS = 128, TILES = 8 * DEEP, LAG = STAGES / 2;  // stages of x under way
constexpr u32 WEIGHTS_BYTES = TILES * BLOCK_BYTES, HALF_BYTES = N * 128, X_BYTES = STAGE_BLOCKS * 2 * HALF_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + (STAGE_BLOCKS * WEIGHTS_BYTES + 1023) / 1024 * 1024;  // weights: [STAGE_BLOCKS][TILES] blocks
static_assert(CLUSTER == 1 || (CLUSTER == DEEP && EXACT && !ITEMS && (CLUSTER - 1) * N * 512 <= STAGES * STAGE_BYTES));

#include "units.cuh"

#define O(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
// The first WIDTH columns.
template <u32 WIDTH>
DEVICE void product(float* c, const u32* f, u64 b, u32 add);
#define PRODUCT(WIDTH, NAMES, REST, ADD, ...)                                                                                                        \
    template <>                                                                                                                                      \
    DEVICE void product<WIDTH>(float* c, const u32* f, u64 b, u32 add) {                                                                             \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #WIDTH "k16.f32.bf16.bf16 {" NAMES "}, " REST    \
                     ", 1, 1, 0; }"                                                                                                                  \
                     : __VA_ARGS__                                                                                                                   \
                     : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(b), "r"(add));                                                                \
    }
PRODUCT(16, L0, "{%8,%9,%10,%11}, %12, p", "%13", O(0))
PRODUCT(32, L0 "," L1, "{%16,%17,%18,%19}, %20, p", "%21", O(0), O(8))
PRODUCT(64, L0 "," L1 "," L2 "," L3, "{%32,%33,%34,%35}, %36, p", "%37", O(0), O(8), O(16), O(24))
PRODUCT(96, L0 "," L1 "," L2 "," L3 "," L4 "," L5, "{%48,%49,%50,%51}, %52, p", "%53", O(0), O(8), O(16), O(24), O(32), O(40))
PRODUCT(128, L0 "," L1 "," L2 "," L3 "," L4 "," L5 "," L6 "," L7, "{%64,%65,%66,%67}, %68, p", "%69", O(0), O(8), O(16), O(24), O(32), O(40), O(48), O(56))
PRODUCT(144, L0 "," L1 "," L2 "," L3 "," L4 "," L5 "," L6 "," L7 "," L8, "{%72,%73,%74,%75}, %76, p", "%77", O(0), O(8), O(16), O(24), O(32), O(40), O(48), O(56), O(64))
PRODUCT(160, L0 "," L1 "," L2 "," L3 "," L4 "," L5 "," L6 "," L7 "," L8 "," L9, "{%80,%81,%82,%83}, %84, p", "%85", O(0), O(8), O(16), O(24), O(32), O(40), O(48), O(56), O(64), O(72))
PRODUCT(256, L0 "," L1 "," L2 "," L3 "," L4 "," L5 "," L6 "," L7 "," L8 "," L9 "," L10 "," L11 "," L12 "," L13 "," L14 "," L15, "{%128,%129,%130,%131}, %132, p", "%133", O(0), O(8), O(16), O(24), O(32), O(40), O(48), O(56), O(64), O(72), O(80), O(88), O(96), O(104), O(112), O(120))

#if CLUSTER > 1
// A thread's sums, N / 2 of them, in the memory of block `rank` of the cluster: there they are the ones of block `from`.
DEVICE void send(const float (&v)[N / 2], u32 base, u32 rank, u32 from, u32 thread) {
    u32 to;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(base), "r"(rank));
    to += (from - (from > rank)) * (N * 512) + thread * 16;
#pragma unroll
    for (u32 i = 0; i < N / 2; i += 4)
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to + i * 1024), "f"(v[i]), "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3]) : "memory");
}
// Waits for all threads of the cluster that have not ended; what they wrote is then visible.
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif

extern "C" __global__ void IN_CLUSTER __launch_bounds__(CONSUMERS + LOADERS, 1) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    u64* barriers = (u64*)(memory + STAGES * STAGE_BYTES);
    int* rows = (int*)(barriers + 2 * STAGES);  // [N]: of x, of the unit that is being loaded
    u32* widths = (u32*)(rows + N);             // [STAGES]: how many of a stage's columns there are, at least
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, ring_at = shared_address(memory);
    const u32 thread = thread_number(), warp = thread / 32, lane = thread & 31;
    if (thread == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1 + LOADERS / 32), barrier_init(empty + i * 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();
    const u32 groups = (a.tiles + TILES - 1) / TILES, stages = a.slice_blocks / STAGE_BLOCKS;
#if ITEMS
    wait_previous();
    const u32 units = (u32)__ldcg(a.num_items) * groups;
#else
    const u32 units = (a.rows + N - 1) / N * a.slices * groups;
#endif

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const u64 policy = read_once_policy();
        const u32 number = thread - CONSUMERS, chunk = number % 8, first_row = number / 8;  // a thread: one 16-byte chunk of every 16th row
        u32 stage = 0, phase = 1, sent = 0, flying = 0;
        bool waited = ITEMS;
        auto announce = [&]() {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) barrier_arrive(full + sent * 8);  // one for each warp: arrivals of single threads queue
            if (++sent == STAGES) sent = 0;
        };
        auto fetch = [&](const Unit& unit, u32 s, u32 stage) {
            if (number != 0) return;
            barrier_expect(full + stage * 8, STAGE_BLOCKS * WEIGHTS_BYTES);
#pragma unroll
            for (u32 b = 0; b < STAGE_BLOCKS; b++)
                copy_tiles(ring_at + stage * STAGE_BYTES + X_BYTES + b * WEIGHTS_BYTES, a.weights,
                           (unit.slice * a.slice_blocks + s * STAGE_BLOCKS + b) * (BLOCK_BYTES / 8), unit.first_row, full + stage * 8, policy);
        };
        // As many weights as the ring holds are under way before x may be read.
        const u32 early = blockIdx.x < units ? min(stages, STAGES) : 0;
        if (early) {
            const Unit unit = unit_of(a, blockIdx.x, groups);
            for (u32 s = 0; s < early; s++) fetch(unit, s, s);
        }
        for (u32 u = blockIdx.x; u < units; u += gridDim.x) {
            const Unit unit = unit_of(a, u, groups);
            named_barrier(2, LOADERS);
            for (u32 n = number; n < N; n += LOADERS) rows[n] = column(a, a.item_rows, unit.item, n);
            named_barrier(2, LOADERS);
            const u32 width = ITEMS ? width_of(rows) : N;
            // Columns that no row belongs to are read from the first row, and their results are not written.
            u32 offsets[N / 16];
#pragma unroll
            for (u32 i = 0; i < N / 16; i++) offsets[i] = max(rows[i * 16 + first_row], 0) * a.x_stride * 2 + chunk * 16;
            for (u32 s = 0; s < stages; s++) {
                barrier_wait(empty + stage * 8, phase);
                const u32 at = ring_at + stage * STAGE_BYTES;
                if (u != blockIdx.x || s >= early) fetch(unit, s, stage);
                if (!waited) wait_previous(), waited = true;
                if (number == 0) widths[stage] = width;
                const u8* source = (const u8*)a.x + (unit.slice * a.slice_blocks + s * STAGE_BLOCKS) * BLOCK_K * 2;
#pragma unroll
                for (u32 i = 0; i < N / 16; i++) {
                    if (ITEMS && i * 16 >= width) break;
                    const u32 n = i * 16 + first_row, to = at + n * 128 + (chunk ^ (n & 7)) * 16;
#pragma unroll
                    for (u32 h = 0; h < STAGE_BLOCKS * 2; h++)
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + h * HALF_BYTES), "l"(source + offsets[i] + h * 128) : "memory");
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

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_previous();
    const u32 g = lane / 4, t = lane & 3;
    u32 stage = 0, phase = 0;
    for (u32 u = blockIdx.x; u < units; u += gridDim.x) {
        const Unit unit = unit_of(a, u, groups);
        const Places places = places_of(a, unit, lane);
        const u32 first_tile = unit.first + warp * DEEP;
#if EXACT
        // Scales multiply the sums of a group, in fp32: those of one block while the products of the next one run, within a stage.
        constexpr u32 TURNS = STAGE_BLOCKS * DEEP;
        float acc[DEEP][N / 2] = {};
        for (u32 s = 0; s < stages; s++) {
            barrier_wait(full + stage * 8, phase);
            float c[2][N / 2], low[2] = {1.f, 1.f}, high[2] = {1.f, 1.f};
            u32 f[2][8][4];
            auto collect = [&](u32 turn) {
#pragma unroll
                for (u32 i = 0; i < N / 2; i++) acc[turn % DEEP][i] += (i & 2 ? high : low)[turn % 2] * c[turn % 2][i];
            };
#pragma unroll
            for (u32 turn = 0; turn < TURNS; turn++) {
                const u32 m = turn % DEEP, b = turn / DEEP, set = turn % 2;
                const u8* weights = memory + stage * STAGE_BYTES + X_BYTES + b * WEIGHTS_BYTES + (warp * DEEP + m) * BLOCK_BYTES;
                const u64 x = descriptor(ring_at + stage * STAGE_BYTES + b * 2 * HALF_BYTES);
                const uint4 q0 = *(const uint4*)(weights + lane * 16), q1 = *(const uint4*)(weights + 512 + lane * 16);
                const u32 words[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#if GROUP == 128
                const u32 scale = *(const u32*)(weights + CODE_BYTES + g * 4);
                low[set] = bf16_float(scale), high[set] = __uint_as_float(scale & 0xffff0000u);
#endif
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
#pragma unroll
                    for (u32 j = 0; j < 4; j++)
                        asm volatile("sub.rn.bf16x2 %0, %1, %2;" : "=r"(f[set][i][j]) : "r"(codes_raised(words[i] >> (4 * j))), "r"(0x43084308u));
#if GROUP != 128
                    const u32 scale = *(const u32*)(weights + CODE_BYTES + i * 16 / GROUP * 32 + g * 4);
#pragma unroll
                    for (u32 j = 0; j < 4; j++)
                        asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(f[set][i][j]) : "r"(__byte_perm(scale, scale, j & 1 ? 0x3232 : 0x1010)));
#endif
                }
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (u32 i = 0; i < 8; i++) product<N>(c[set], f[set][i], x + i / 4 * (HALF_BYTES >> 4) + i % 4 * 2, i > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (turn > 0) products_done<1>(), collect(turn - 1);
            }
            products_done<0>();
            if (lane == 0) barrier_arrive(empty + stage * 8);
            collect(TURNS - 1);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
#if CLUSTER > 1
        // Block `rank` of the cluster has the last word on the warpgroups' rank-th 64 rows. All rings are at rest, so sums may lie there.
        const u32 rank = blockIdx.x % CLUSTER;
        cluster_barrier();
#pragma unroll
        for (u32 m = 0; m < DEEP; m++)
            if (m != rank) send(acc[m], ring_at, m, rank, thread);
        cluster_barrier();
#endif
#pragma unroll
        for (u32 m = 0; m < DEEP; m++) {
#if CLUSTER > 1
            if (m != rank) continue;
#pragma unroll
            for (u32 r = 0; r < CLUSTER - 1; r++)
#pragma unroll
                for (u32 i = 0; i < N / 2; i += 4) {
                    const float4 v = *(const float4*)(memory + r * (N * 512) + i * 1024 + thread * 16);
                    acc[m][i] += v.x, acc[m][i + 1] += v.y, acc[m][i + 2] += v.z, acc[m][i + 3] += v.w;
                }
#endif
            write<N, 1>(a, (const float (&)[1][N / 2])acc[m], unit, first_tile + m, places, g, t);
        }
#else
        float acc[DEEP][N / 2];
        // Most items are not full, and products need only be as wide as these are.
        barrier_wait(full + stage * 8, phase);
        const u32 width = widths[stage];
        u32 f[2][4][4];
        u32 last = 0;
        for (u32 s = 0; s < stages; s++) {
            barrier_wait(full + stage * 8, phase);
#pragma unroll
            for (u32 b = 0; b < STAGE_BLOCKS; b++) {
                const u8* first = memory + stage * STAGE_BYTES + X_BYTES + b * WEIGHTS_BYTES + warp * DEEP * BLOCK_BYTES;
                const u64 x = descriptor(ring_at + stage * STAGE_BYTES + b * 2 * HALF_BYTES);
#pragma unroll
                for (u32 turn = 0; turn < 2 * DEEP; turn++) {
                    const u32 half = turn / DEEP, m = turn % DEEP;
                    const u8* weights = first + m * BLOCK_BYTES;
                    const uint4 q = *(const uint4*)(weights + half * 512 + lane * 16);
                    const u32 words[4] = {q.x, q.y, q.z, q.w};
                    // All products but the last four are done: these registers are free, and so is the stage before this one.
                    products_done<1>();
                    if (b == 0 && turn == 1 && s > 0 && lane == 0) barrier_arrive(empty + last * 8);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 scale = *(const u32*)(weights + CODE_BYTES + (half * 64 + i * 16) / GROUP * 32 + g * 4);
                        const u32 low = __byte_perm(scale, scale, 0x1010), high = __byte_perm(scale, scale, 0x3232);
#pragma unroll
                        for (u32 j = 0; j < 4; j++)
                            asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(f[turn & 1][i][j]) : "r"(codes_bf16(words[i] >> (4 * j))), "r"(j & 1 ? high : low));
                    }
                    const u64 at = x + half * (HALF_BYTES >> 4);
                    const u32 add = s + b + half > 0;
                    auto multiply = [&](auto columns) {
                        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                        for (u32 i = 0; i < 4; i++) product<decltype(columns)::value>(acc[m], f[turn & 1][i], at + i * 2, i ? 1 : add);
                        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    };
#if ITEMS && N > 64
                    if (width <= 32) multiply(Number<32>());
                    else if (width <= 64) multiply(Number<64>());
                    else
#endif
#if ITEMS && N > 128
                    if (width <= 96) multiply(Number<96>());
                    else if (width <= 128) multiply(Number<128>());
                    else
#endif
#if ITEMS && N > 144
                    if (width <= 144) multiply(Number<144>());
                    else
#endif
                        multiply(Number<N>());
                }
            }
            last = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        products_done<0>();
        if (lane == 0) barrier_arrive(empty + last * 8);
        write<N, DEEP>(a, acc, unit, first_tile, places, g, t);
#endif
    }
}
