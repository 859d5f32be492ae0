// One to four rows of activations against 4-bit weights: linear, gate and up of the chosen experts, down with combination.
// Activations are fixed-point numbers of 16 bits with a scale per 128 of them (finer than bf16 for all but the smallest of these), high and low
// bytes as two columns of one integer product: codes become bytes in three instructions for eight, half of what bf16 takes, and a processor
// keeps up with its share of the memory with room to spare. A product has eight columns: four rows cost no more products than one, and a lane's
// results are those of row lane % 4.
// Experts that several rows chose are read once, against all rows; what a row did not ask for is not written, or added with a factor of zero.
// A producer warp streams blocks of weights through a ring in shared memory, ahead of the kernel before this one being done;
// WARPS consumer warps share the blocks of a tile (16 rows) and sum in a fixed order.
//
// Compiled with: KIND (0 linear, 1 gate and up, 2 down), TEAMS of TEAM_WARPS warps (a stage has a block for each warp of a team; teams take stages
// in turn, so that stages can be small and warps many), STAGES, TILE_BLOCKS (of one matrix along its inputs), NORM, and for kinds 1 and 2
// TILES (of one expert), ACTIVE (routed experts of a token; 0 is a dense feed-forward, which is a shared expert alone), SHARED (0 or 1 expert after
// the routed ones), EXPERTS. ROWS of activations: 1 to 4.

#ifndef ACTIVE
#define ACTIVE 0
#define SHARED 0
#endif
#ifndef ROWS
#define ROWS 1
#endif

constexpr u32 WARPS = TEAMS * TEAM_WARPS;
constexpr u32 CONSUMERS = WARPS * 32;
constexpr u32 STAGE_BLOCKS = TEAM_WARPS;
constexpr u32 STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr u32 SEGMENTS = KIND == 2 ? ACTIVE + SHARED : 1;  // of a row's activations
constexpr u32 CHOICES = ROWS * ACTIVE;
constexpr bool JOINED = ROWS > 1 && ACTIVE > 0;  // experts are those that any row chose: how many is known when they are
constexpr u32 INPUTS = TILE_BLOCKS * BLOCK_K;
constexpr u32 TILE_STAGES = TILE_BLOCKS / STAGE_BLOCKS;
constexpr u32 BLOCKS = SEGMENTS * TILE_BLOCKS;
constexpr u32 MOST_HELD = ROWS > 2 ? 4 : 8;
constexpr u32 FLUSH = CONSUMERS / (16 * ROWS) < MOST_HELD ? CONSUMERS / (16 * ROWS) : MOST_HELD;  // tiles whose partial sums are held before they are added up
// A stage belongs to one team for good: a team that waits for a stage's next turn must have seen its last.
static_assert(TILE_BLOCKS % STAGE_BLOCKS == 0 && STAGES % TEAMS == 0 && STAGES >= TEAMS && SEGMENTS * TILE_STAGES >= TEAMS && FLUSH > 0 && ROWS <= 4 && CHOICES <= 32);

struct Arguments {
    const u8* weights;
    const void* x;         // [ROWS]: fp32 residual where NORM, else bf16
    const float* norm;     // [INPUTS]
    const float* bias;     // [rows] or null
    const float* residual; // fp32 as `out`, or null; may be `out`
    void* out;             // fp32 where residual or out_float, else bf16
    const float* logits;     // kind 1: [ROWS, EXPERTS]
    const float* correction; // kind 1: [EXPERTS] or null
    int* chosen;           // [ROWS, ACTIVE]: written by kind 1, read by kind 2
    float* chosen_weight;  // [ROWS, ACTIVE]
    u32* counter;          // zero between launches: tiles are taken as blocks get to them, since blocks may share processors unevenly
    u32 tiles;             // row tiles of the whole launch; where rows' experts are joined, at least
    u32 fixed;             // tiles that every block has, before it takes others
    u32 out_float;
    float eps;
    float routed_scale;
    u32 x_stride;          // elements between rows
    u32 out_stride;
};

// Lanes are dealt to rows; of three rows the last has two.
DEVICE u32 row_of(u32 n) { return ROWS == 3 ? min(n & 3, 2) : n & (ROWS - 1); }

// A warp's block of 128 elements of x: lane (step, t) has inputs 2t, 2t + 8, 2t + 1, 2t + 9 of a step of 16.
DEVICE void store_fixed(const float (&v)[4], u32 block, u8* xs, int2* starts, float* steps, u32 lane) {
    constexpr u32 GROUP_LANES = GROUP / 4;
    float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
    const float inverse = most > 0.f ? 32512.f / most : 0.f;
    int w[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) w[i] = __float2int_rn(v[i] * inverse);
    // The low byte of a number is its low byte, signed; the high one is what is left.
    const u32 low = __byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
    const u32 high = __byte_perm(__byte_perm(w[0] + 128, w[1] + 128, 0x0051), __byte_perm(w[2] + 128, w[3] + 128, 0x0051), 0x5410);
    u8* to = xs + block * 256 + (lane >> 4) * 128 + (lane & 3) * 16 + (lane >> 2 & 3) * 4;
    *(u32*)to = high, *(u32*)(to + 64) = low;
    const u32 members = GROUP_LANES == 32 ? ~0u : ((1u << (GROUP_LANES & 31)) - 1) << (lane & ~(GROUP_LANES - 1));
    const int highs = __reduce_add_sync(members, __dp4a((int)high, 0x01010101, 0)), lows = __reduce_add_sync(members, __dp4a((int)low, 0x01010101, 0));
    if (lane % GROUP_LANES == 0) starts[block * GROUPS + lane / GROUP_LANES] = int2{-8 * highs, -8 * lows};
    if (lane == 0) steps[block] = most / 32512.f;
}

DEVICE void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// A block: rows g and g + 8 of this lane, high bytes of x in even columns, low ones in odd.
DEVICE void multiply_fixed(float& low, float& high, const u8* block, const u8* x, const int2* starts, float step, u32 lane) {
    constexpr u32 M = 0x0f0f0f0fu;
    const uint4 q0 = *(const uint4*)(block + lane * 16), q1 = *(const uint4*)(block + 512 + lane * 16);
    const uint4 x0 = *(const uint4*)x, x1 = *(const uint4*)(x + 128);
    const u8* scales = block + CODE_BYTES + (lane >> 2) * 4;
    auto finish = [&](const int (&c)[4], u32 group) {
        const u32 s = *(const u32*)(scales + group * 32);
        low += bf16_float(s) * step * __int2float_rn(c[0] * 256 + c[1]);
        high += __uint_as_float(s & 0xffff0000u) * step * __int2float_rn(c[2] * 256 + c[3]);
    };
    auto begin = [&](int (&c)[4], u32 group) {
        const int2 v = starts[group];
        c[0] = c[2] = v.x, c[1] = c[3] = v.y;
    };
    int c[4], d[4] = {0, 0, 0, 0};
    begin(c, 0);
    multiply_bytes(c, q0.x & M, q0.x >> 4 & M, q0.y & M, q0.y >> 4 & M, x0.x, x0.y);
    if constexpr (GROUPS == 4) finish(c, 0), begin(c, 1);
    multiply_bytes(c, q0.z & M, q0.z >> 4 & M, q0.w & M, q0.w >> 4 & M, x0.z, x0.w);
    if constexpr (GROUPS > 1) finish(c, GROUPS / 2 - 1), begin(d, GROUPS / 2);
    multiply_bytes(d, q1.x & M, q1.x >> 4 & M, q1.y & M, q1.y >> 4 & M, x1.x, x1.y);
    if constexpr (GROUPS == 4) finish(d, 2), begin(d, 3);
    multiply_bytes(d, q1.z & M, q1.z >> 4 & M, q1.w & M, q1.w >> 4 & M, x1.z, x1.w);
    if constexpr (GROUPS == 1) {
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] += d[i];
        finish(c, 0);
    } else finish(d, GROUPS - 1);
}

#if ROWS > 1 && ACTIVE
// A warp whose lane r * ACTIVE + i has the i-th choice of row r: the place of this expert among all that were chosen, each once. Returns their number.
DEVICE u32 join_choices(int id, u32 lane, u32& place) {
    const u32 same = __match_any_sync(~0u, lane < CHOICES ? id : -1 - (int)lane), first = __ffs(same) - 1;
    const u32 firsts = __ballot_sync(~0u, lane < CHOICES && first == lane);
    place = __popc(firsts & ((1u << first) - 1));
    return __popc(firsts);
}
#endif

#if KIND == 1 && ROWS > 1 && ACTIVE
// By the producer warp, as soon as logits may be read. Returns the number of tiles.
DEVICE u32 choose_experts(const Arguments& a, int* ids, int* slots, u32 lane) {
    wait_previous();
    // As `choose`, for all rows side by side; lane r * ACTIVE + i has the i-th choice of row r.
    constexpr u32 PER = EXPERTS / 32;
    float score[ROWS][PER], total[ROWS] = {}, weight = 0.f;
    u32 key[ROWS][PER];
    int mine = 0;
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) scores_of<PER>(a.logits + r * EXPERTS, a.correction, lane, score[r], key[r]);
#pragma unroll 1
    for (u32 i = 0; i < ACTIVE; i++)
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            float s;
            const u32 chosen = take_best<PER>(score[r], key[r], lane, s);
            total[r] += s;
            if (lane == r * ACTIVE + i) mine = (int)chosen, weight = s;
        }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
        if (lane / ACTIVE == r) weight = weight / total[r] * a.routed_scale;
    if (blockIdx.x == 0 && lane < CHOICES) a.chosen[lane] = mine, a.chosen_weight[lane] = weight;
    u32 place;
    const u32 number = join_choices(mine, lane, place);
    for (u32 i = lane; i < CHOICES * ROWS; i += 32) slots[i] = -1;
    __syncwarp();
    if (lane < CHOICES) ids[place] = mine, slots[place * ROWS + lane / ACTIVE] = lane % ACTIVE;
    __syncwarp();
    return (SHARED + number) * TILES;
}
#elif KIND == 1
// By the producer warp, as soon as logits may be read. Returns the number of tiles.
DEVICE u32 choose_experts(const Arguments& a, int* ids, int*, u32 lane) {
    wait_previous();
#if ACTIVE
    int id = 0;
    float weight = 0.f;
    choose<EXPERTS / 32>(a.logits, a.correction, ACTIVE, a.routed_scale, lane, id, weight);
    if (lane < ACTIVE) {
        ids[lane] = id;
        if (blockIdx.x == 0) a.chosen[lane] = id, a.chosen_weight[lane] = weight;
    }
    __syncwarp();
#endif
    return a.tiles;
}
#elif KIND == 2 && ROWS > 1 && ACTIVE
// By the producer warp: the experts of the segments after the shared one. Returns their number.
DEVICE u32 join_experts(const Arguments& a, int* ids, u32 lane) {
    wait_previous();
    const int id = lane < CHOICES ? __ldcg(a.chosen + lane) : 0;
    u32 place;
    const u32 number = join_choices(id, lane, place);
    if (lane < CHOICES) ids[place] = id;
    __syncwarp();
    return number;
}
// By a consumer warp: which of a row's activations meet each segment, and with which factor. What a row did not choose meets its first ones, times zero.
DEVICE u32 join_factors(const Arguments& a, int* slots, float* factors, u32 lane) {
    const int id = lane < CHOICES ? __ldcg(a.chosen + lane) : 0;
    const float weight = lane < CHOICES ? __ldcg(a.chosen_weight + lane) : 0.f;
    u32 place;
    const u32 number = SHARED + join_choices(id, lane, place);
    for (u32 i = lane; i < (SHARED + CHOICES) * ROWS; i += 32) slots[i] = 0, factors[i] = i < SHARED * ROWS ? 1.f : 0.f;
    __syncwarp();
    const u32 at = (SHARED + place) * ROWS + lane / (ACTIVE ? ACTIVE : 1);
    if (lane < CHOICES) slots[at] = (SHARED + lane % ACTIVE) * TILE_BLOCKS, factors[at] = weight;
    return number;
}
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u8* ring = memory;
    u8* xs = ring + STAGES * STAGE_BYTES;                          // [ROWS][BLOCKS][half][high, low][t][step][4] bytes
    float* partial = (float*)(xs + ROWS * SEGMENTS * INPUTS * 2);  // [FLUSH][WARPS][ROWS][16]
    float* sums = partial + FLUSH * WARPS * ROWS * 16;             // [ROWS][32]
    int2* starts = (int2*)(sums + ROWS * 32);                      // [ROWS][BLOCKS * GROUPS]: -8 * sums of high and low bytes
    float* steps = (float*)(starts + ROWS * BLOCKS * GROUPS);      // [ROWS][BLOCKS], even: what a unit of x stands for
    u64* barriers = (u64*)(steps + (ROWS * BLOCKS + 1) / 2 * 2);   // full [STAGES], empty [STAGES]
    int* ids = (int*)(barriers + 2 * STAGES);                      // [16], of several rows [32]
    float* factors = (float*)(ids + (ROWS > 1 ? 32 : 16));         // [16], of several rows [33 * ROWS]
    int* slots = (int*)(factors + (ROWS > 1 ? 33 * ROWS : 16));    // of several rows [33 * ROWS]: which of a row's activations or results are an expert's
    u32* taken = (u32*)(slots + (ROWS > 1 ? 33 * ROWS : 0));       // [FLUSH]: tiles whose sums are held
    u32* tile_of = taken + FLUSH;                                  // [STAGES]
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, ring_at = shared_address(ring);
    const u32 thread = thread_number(), warp = thread / 32, lane = thread & 31;

    if (thread == CONSUMERS) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, TEAM_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (thread == 0) trace(KIND * 2 + NORM, 0);
    __syncthreads();
    launch_next();

    if (warp == WARPS) {
        // Producer.
        bool waited = false;
        const u64 policy = read_once_policy();
        u32 stage = 0, phase = 1;
        u32 tile = blockIdx.x, tiles = a.tiles;
        u32 done = 0;
        u32 segments = SEGMENTS;
        while (tile < (JOINED ? tiles : a.tiles)) {
            for (u32 segment = 0; segment < segments; segment++) {
                const u8* source;
#if KIND == 0
                source = a.weights + (u64)tile * TILE_BLOCKS * BLOCK_BYTES;
#elif KIND == 1
                // The shared expert's tiles come first: they need no routing.
                u32 expert = EXPERTS;
                const u32 slot = tile / TILES;
                if (!SHARED || slot > 0) {
                    if (!waited) tiles = choose_experts(a, ids, slots, lane), waited = true;
                    expert = ids[slot - SHARED];
                }
                source = a.weights + ((u64)expert * TILES + tile % TILES) * (TILE_BLOCKS * BLOCK_BYTES);
#else
                u32 expert = EXPERTS;
                if (!SHARED || segment > 0) {
#if ROWS > 1 && ACTIVE
                    if (!waited) segments = SHARED + join_experts(a, ids, lane), waited = true;
                    expert = ids[segment - SHARED];
#else
                    if (!waited) wait_previous(), waited = true;
                    expert = __ldcg(a.chosen + segment - SHARED);
#endif
                }
                source = a.weights + ((u64)expert * TILES + tile) * (TILE_BLOCKS * BLOCK_BYTES);
#endif
                for (u32 s = 0; s < TILE_STAGES; s++) {
                    barrier_wait(empty + stage * 8, phase);
                    if (lane == 0) {
                        tile_of[stage] = tile;
                        barrier_expect(full + stage * 8, STAGE_BYTES);
                        bulk_copy(ring_at + stage * STAGE_BYTES, source + s * STAGE_BYTES, STAGE_BYTES, full + stage * 8, policy);
                    }
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
            if (++done < a.fixed) {
                tile += gridDim.x;
                continue;
            }
            // Kernels before this one have made their claims. The counter wraps to zero with this launch's last: every block makes one that fails.
            if (!waited) {
#if KIND == 1
                tiles = choose_experts(a, ids, slots, lane);
#else
                wait_previous();
#endif
                waited = true;
            }
            if (lane == 0) tile = a.fixed * gridDim.x + atomicInc(a.counter, (JOINED ? tiles : a.tiles) - a.fixed * gridDim.x + gridDim.x - 1);
            tile = __shfl_sync(~0u, tile, 0);
        }
        // The end, for each team.
        for (u32 i = 0; i < TEAMS; i++) {
            barrier_wait(empty + stage * 8, phase);
            if (lane == 0) tile_of[stage] = ~0u, barrier_arrive(full + stage * 8);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
#if KIND == 1
        if (!waited) choose_experts(a, ids, slots, lane);
#endif
        return;
    }

    // Consumers: first the activations.
    constexpr u32 TURNS = (BLOCKS + WARPS - 1) / WARPS;
    const u32 mine = (lane >> 2) * 16 + (lane & 3) * 2;  // this lane's first input of a block
    u32 segments = SEGMENTS;
#if NORM
    float2 w[TURNS][2], h[ROWS][TURNS][2];
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        const u32 block = i * WARPS + warp;
        const float2* from = (const float2*)(a.norm + block * BLOCK_K + mine);
        if (block < BLOCKS) w[i][0] = __ldg(from), w[i][1] = __ldg(from + 4);
    }
    wait_previous();
    if (thread == 0) trace(KIND * 2 + NORM, 1);
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
        for (u32 i = 0; i < TURNS; i++) {
            const u32 block = i * WARPS + warp;
            const float2* from = (const float2*)((const float*)a.x + r * a.x_stride + block * BLOCK_K + mine);
            h[r][i][0] = h[r][i][1] = float2{0.f, 0.f};
            if (block < BLOCKS) h[r][i][0] = __ldcg(from), h[r][i][1] = __ldcg(from + 4);
        }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        float sum = 0.f;
#pragma unroll
        for (u32 i = 0; i < TURNS; i++)
            sum += h[r][i][0].x * h[r][i][0].x + h[r][i][0].y * h[r][i][0].y + h[r][i][1].x * h[r][i][1].x + h[r][i][1].y * h[r][i][1].y;
        sum = warp_sum(sum);
        if (lane == 0) sums[r * 32 + warp] = sum;
    }
    named_barrier(1, CONSUMERS);
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        float sum = 0.f;
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) sum += sums[r * 32 + i];
        const float q = rsqrtf(sum / INPUTS + a.eps);
#pragma unroll
        for (u32 i = 0; i < TURNS; i++) {
            const u32 block = i * WARPS + warp;
            const float v[4] = {h[r][i][0].x * q * w[i][0].x, h[r][i][1].x * q * w[i][1].x, h[r][i][0].y * q * w[i][0].y, h[r][i][1].y * q * w[i][1].y};
            if (block < BLOCKS) store_fixed(v, r * BLOCKS + block, xs, starts, steps, lane);
        }
    }
#else
    wait_previous();
    if (thread == 0) trace(KIND * 2 + NORM, 1);
    u32 p[ROWS][TURNS][2];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
        for (u32 i = 0; i < TURNS; i++) {
            const u32 block = i * WARPS + warp;
            const u32* from = (const u32*)((const u16*)a.x + r * a.x_stride + block * BLOCK_K + mine);
            if (block < BLOCKS) p[r][i][0] = __ldcg(from), p[r][i][1] = __ldcg(from + 4);
        }
#if KIND == 2 && ROWS > 1 && ACTIVE
    if (warp == 0) segments = join_factors(a, slots, factors, lane);
#endif
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
        for (u32 i = 0; i < TURNS; i++) {
            const u32 block = i * WARPS + warp;
            const float v[4] = {bf16_float(p[r][i][0]), bf16_float(p[r][i][1]), bf16_float(p[r][i][0] >> 16), bf16_float(p[r][i][1] >> 16)};
            if (block < BLOCKS) store_fixed(v, r * BLOCKS + block, xs, starts, steps, lane);
        }
#if KIND == 2 && ROWS > 1 && ACTIVE
    if (thread == 0) sums[0] = __uint_as_float(segments);
#elif KIND == 2
    if (thread < SEGMENTS) factors[thread] = thread < SHARED ? 1.f : __ldcg(a.chosen_weight + thread - SHARED);
#endif
#endif
    named_barrier(1, CONSUMERS);
    if (KIND == 2 && JOINED) segments = __float_as_uint(sums[0]);

    if (thread == 0) trace(KIND * 2 + NORM, 2);
    // Columns 2r and 2r + 1 of a product are row r's: this lane has one of them of x, and both of the results for another row.
    const u32 x_row = row_of(lane >> 3), row = row_of(lane);
    const u8* my_x = xs + x_row * BLOCKS * 256 + (lane >> 2 & 1) * 64 + (lane & 3) * 16;
    const int2* my_starts = starts + row * BLOCKS * GROUPS;
    const float* my_steps = steps + row * BLOCKS;
#if KIND != 1
    float ahead = 0.f;
#endif
    const u32 team = warp / TEAM_WARPS, member = warp % TEAM_WARPS;
    u32 stage = team, phase = 0, turn = team;  // turn: stages of the next tile before this team's first
    for (u32 held = 0;; held++) {
        barrier_wait(full + stage * 8, phase);
        const u32 tile = tile_of[stage];
        constexpr u32 RESULTS = KIND == 1 ? 8 : 16;
        if (held == FLUSH || (tile == ~0u && held)) {
            named_barrier(1, CONSUMERS);
            if (thread < held * (RESULTS * ROWS)) {
                const u32 place = thread / (RESULTS * ROWS), r = thread / RESULTS % ROWS;
                const float* from = partial + (place * WARPS * ROWS + r) * 16 + thread % RESULTS;
                float value = 0.f;
#pragma unroll
                for (u32 j = 0; j < WARPS; j++) value += from[j * ROWS * 16];
                u32 at = taken[place] * RESULTS + thread % RESULTS;
#if KIND == 1
                float up = 0.f;
#pragma unroll
                for (u32 j = 0; j < WARPS; j++) up += from[j * ROWS * 16 + 8];
                bool is_wanted = true;
#if ROWS > 1 && ACTIVE
                const u32 unit = taken[place] / TILES;
                if (!SHARED || unit > 0) {
                    const int slot = slots[(unit - SHARED) * ROWS + r];
                    is_wanted = slot >= 0;
                    at += (SHARED + slot - unit) * (TILES * RESULTS);
                }
#endif
                if (is_wanted) ((u16*)a.out)[r * a.out_stride + at] = to_bf16(silu(value) * up);
#else
                value += ahead;
                at += r * a.out_stride;
                if (a.residual || a.out_float) ((float*)a.out)[at] = value;
                else ((u16*)a.out)[at] = to_bf16(value);
#endif
            }
            held = 0;
            if (tile != ~0u) named_barrier(1, CONSUMERS);
        }
        if (tile == ~0u) break;
#if KIND != 1
        // What will be added to the sums is on its way while they are made.
        if (thread / (16 * ROWS) == held) {
            const u32 at = tile * 16 + thread % 16;
            ahead = a.bias ? __ldg(a.bias + at) : 0.f;
            if (a.residual) ahead += __ldcg(a.residual + (thread / 16 % ROWS) * a.out_stride + at);
        }
#endif
        if (thread == 0) taken[held] = tile;
        float low = 0.f, high = 0.f;
        u32 s = turn;
#pragma unroll 1
        while (true) {
            u32 block = s * STAGE_BLOCKS + member, x_block = block;
            float factor = 1.f;
            if (KIND == 2 && JOINED) {
                const u32 segment = s / TILE_STAGES, within = block - segment * TILE_BLOCKS;
                x_block = slots[segment * ROWS + x_row] + within, block = slots[segment * ROWS + row] + within;
                factor = factors[segment * ROWS + row];
            } else if (KIND == 2 && (ROWS == 1 || ACTIVE)) factor = factors[s / TILE_STAGES];
            const float step = KIND == 2 ? my_steps[block] * factor : my_steps[block];
            multiply_fixed(low, high, ring + stage * STAGE_BYTES + member * BLOCK_BYTES, my_x + x_block * 256, my_starts + block * GROUPS, step, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage * 8);
            stage += TEAMS;
            if (stage >= STAGES) stage -= STAGES, phase ^= 1;
            s += TEAMS;
            if (s >= segments * TILE_STAGES) break;
            barrier_wait(full + stage * 8, phase);
        }
        turn = s - segments * TILE_STAGES;
        // A quarter's first lanes have rows lane/4 and lane/4 + 8 of the weights; further ones have the same once more.
        float* to = partial + ((held * WARPS + warp) * ROWS + row) * 16 + lane / 4;
        if ((lane & 3) < ROWS) to[0] = low, to[8] = high;
    }
    if (thread == 0) trace(KIND * 2 + NORM, 3);
}
