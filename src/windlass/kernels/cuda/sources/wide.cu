// Many rows of activations against 4-bit weights on Hopper's warpgroup products: a unit is 128 or 256 rows of weights against up to N rows of x.
// Weights become bf16 in registers (the left operand): codes as they are with EXACT, which is for few rows, else times their scale and rounded;
// x comes from shared memory (the right one). Two warpgroups of 64 or 128 rows each
// (what is read of x per product is what limits large units: the more rows of weights see it the better); a third one
// streams weights by bulk copies and gathers rows of x, and runs ahead into the next unit while the others write results.
//
// Compiled with: EXACT, KIND (0 bf16 with bias, 1 gate and up, 2 fp32 partial results of slices, 3 bf16), N (16, 32, 64, 128, 144, 160 or 256), DEEP (1
// or 2: 64 rows of weights of a warpgroup), STAGES, STAGE_BLOCKS (along the inputs), ITEMS (1: items of up to N rows that share an expert, from a list; 0:
// blocks of N rows, slices of the inputs), CLUSTER (1, or DEEP: so many blocks take slices of the inputs of the same unit and add up their sums in
// each other's memory. Each then reads a part of x for as many more rows of weights; x is most of what few rows read).

#ifndef CLUSTER
#define CLUSTER 1
#endif
constexpr u32 CONSUMERS = 256, LOADERS = 128, TILES = 8 * DEEP, LAG = STAGES > 3 ? 2 : 1;
constexpr u32 TILE_BYTES = STAGE_BLOCKS * BLOCK_BYTES, HALF_BYTES = N * 128, X_BYTES = STAGE_BLOCKS * 2 * HALF_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + (TILES * TILE_BYTES + 1023) / 1024 * 1024;
static_assert(CLUSTER == 1 || (CLUSTER == DEEP && EXACT && !ITEMS && (CLUSTER - 1) * N * 512 <= STAGES * STAGE_BYTES));

struct Arguments {
    const u8* weights;
    const u16* x;
    const float* bias;
    void* out;
    const int* num_items;
    const int* item_expert;
    const int* item_rows;    // [items, N], -1 for none
    const int* item_places;  // [items, N]
    u64 expert_stride;       // bytes
    u64 tile_stride;         // bytes
    u64 out_stride;          // elements between rows of out
    u64 slice_stride;        // elements between slices' results
    u32 x_stride;            // elements
    u32 tiles;               // of one matrix
    u32 slices;
    u32 slice_blocks;
    u32 rows;                // of x, where there is no list
};

// Names of eight sums each, and the sums.
#define L0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define L2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define L3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define L4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define L5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define L6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define L7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define L8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define L9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define L10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define L11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define L12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define L13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define L14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define L15 "%120,%121,%122,%123,%124,%125,%126,%127"
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
template <u32 VALUE>
struct Number {
    static constexpr u32 value = VALUE;
};
// All products but the last `ALLOWED` groups are done.
template <u32 ALLOWED>
DEVICE void products_done() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(ALLOWED) : "memory"); }
// Rows of 128 bytes, eight to a swizzled kilobyte.
DEVICE u64 descriptor(u32 address) { return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE u32 transposed(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

struct Unit {
    u32 item, first, slice, out_slice;  // item or block of rows, first tile, slices of inputs and of results
    const u8* weights;
};
DEVICE Unit unit_of(const Arguments& a, u32 unit, u32 groups) {
    Unit r;
#if ITEMS
    r.item = unit / groups, r.first = unit % groups * TILES, r.slice = r.out_slice = 0;
    r.weights = a.weights + (u64)__ldcg(a.item_expert + r.item) * a.expert_stride + r.first * a.tile_stride;
#else
    // Units side by side take all of the weights against few rows: x, which may be larger than the cache, is read once.
    const u32 place = unit / CLUSTER, outs = a.slices / CLUSTER;
    r.first = place % groups * TILES, r.out_slice = place / groups % outs, r.item = place / groups / outs;
    r.slice = r.out_slice * CLUSTER + unit % CLUSTER;
    r.weights = a.weights + r.first * a.tile_stride + (u64)r.slice * a.slice_blocks * BLOCK_BYTES;
#endif
    return r;
}
// Row of x (or place of the result) of column n of a unit, -1 for none.
DEVICE int column(const Arguments& a, const int* list, u32 item, u32 n) {
#if ITEMS
    return __ldcg(list + item * N + n);
#else
    return item * N + n < a.rows ? (int)(item * N + n) : -1;
#endif
}

// How many columns there are, at least: they come one after another.
DEVICE u32 width_of(const int* rows) {
    u32 width = 16;
#pragma unroll
    for (u32 n = 16; n < N; n += 16)
        if (rows[n] >= 0) width = n + 16;
    return width;
}

// A warp's sums of one tile: lane (g, t) has rows g and g + 8, columns 2t and 2t + 1 of every eight.
DEVICE void write(const Arguments& a, const float (&acc)[N / 2], const Unit& unit, u32 tile, u32 width, u32 g, u32 t) {
    if (tile >= a.tiles) return;
#if KIND == 2
#pragma unroll
    for (u32 i = 0; i < N / 8; i++)
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            const int place = column(a, a.item_places, unit.item, i * 8 + t * 2 + j);
            if (place < 0) continue;
            float* to = (float*)a.out + unit.out_slice * a.slice_stride + place * a.out_stride + tile * 16 + g;
            to[0] = acc[i * 4 + j], to[8] = acc[i * 4 + 2 + j];
        }
#else
    // Transposed in registers: lane (g, t) then has rows 2t and 2t + 1 of column g.
#if KIND != 1
    float low = 0.f, high = 0.f;
    if (KIND == 0 && a.bias) low = a.bias[tile * 16 + g], high = a.bias[tile * 16 + 8 + g];
#endif
#pragma unroll
    for (u32 i = 0; i < N / 8; i++) {
        if (i * 8 >= width) break;
        const float* v = acc + i * 4;
        const int place = column(a, a.item_places, unit.item, i * 8 + g);
#if KIND == 1
        const u32 r = transposed(pack_bf16(silu(v[0]) * v[2], silu(v[1]) * v[3]));
        if (place >= 0) *(u32*)((u16*)a.out + place * a.out_stride + tile * 8 + t * 2) = r;
#else
        const u32 r = transposed(pack_bf16(v[0] + low, v[1] + low)), q = transposed(pack_bf16(v[2] + high, v[3] + high));
        if (place >= 0) {
            u16* to = (u16*)a.out + place * a.out_stride + tile * 16 + t * 2;
            *(u32*)to = r, *(u32*)(to + 8) = q;
        }
#endif
    }
#endif
}

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
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1 + LOADERS), barrier_init(empty + i * 8, 8);
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
            barrier_arrive(full + sent * 8);
            if (++sent == STAGES) sent = 0;
        };
        auto fetch = [&](const Unit& unit, u32 s, u32 stage) {
            if (warp > 8) return;
            const u32 present = min(TILES, a.tiles - unit.first);
            if (lane == 0) barrier_expect(full + stage * 8, present * TILE_BYTES);
            __syncwarp();
            if (lane < present)
                bulk_copy(ring_at + stage * STAGE_BYTES + X_BYTES + lane * TILE_BYTES, unit.weights + lane * a.tile_stride + (u64)s * TILE_BYTES, TILE_BYTES,
                          full + stage * 8, policy);
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
            const u32 width = width_of(rows);
            for (u32 s = 0; s < stages; s++) {
                barrier_wait(empty + stage * 8, phase);
                const u32 at = ring_at + stage * STAGE_BYTES;
                if (u != blockIdx.x || s >= early) fetch(unit, s, stage);
                if (!waited) wait_previous(), waited = true;
                if (number == 0) widths[stage] = width;
                const u16* source = a.x + (unit.slice * a.slice_blocks + s * STAGE_BLOCKS) * BLOCK_K + chunk * 8;
#pragma unroll
                for (u32 i = 0; i < N / 16; i++) {
                    if (i * 16 >= width) break;
                    const u32 n = i * 16 + first_row;
                    const int row = rows[n];
                    const u32 to = at + n * 128 + (chunk ^ (n & 7)) * 16, bytes = row >= 0 ? 16 : 0;
                    const u16* from = source + (u64)(row >= 0 ? row : 0) * a.x_stride;
#pragma unroll
                    for (u32 h = 0; h < STAGE_BLOCKS * 2; h++)
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + h * HALF_BYTES), "l"(from + h * 64), "r"(bytes) : "memory");
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
        const u32 first_tile = unit.first + warp / 4 * DEEP * 4 + warp % 4;
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
                const u8* weights = memory + stage * STAGE_BYTES + X_BYTES + (warp / 4 * DEEP * 4 + m * 4 + warp % 4) * TILE_BYTES + b * BLOCK_BYTES;
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
            write(a, acc[m], unit, first_tile + m * 4, N, g, t);
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
                const u8* first = memory + stage * STAGE_BYTES + X_BYTES + (warp / 4 * DEEP * 4 + warp % 4) * TILE_BYTES + b * BLOCK_BYTES;
                const u64 x = descriptor(ring_at + stage * STAGE_BYTES + b * 2 * HALF_BYTES);
#pragma unroll
                for (u32 turn = 0; turn < 2 * DEEP; turn++) {
                    const u32 half = turn / DEEP, m = turn % DEEP;
                    const u8* weights = first + m * 4 * TILE_BYTES;
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
#pragma unroll
        for (u32 m = 0; m < DEEP; m++) write(a, acc[m], unit, first_tile + m * 4, width, g, t);
#endif
    }
}
