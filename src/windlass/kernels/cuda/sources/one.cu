// One row of activations against 4-bit weights: linear, gate and up of the chosen experts, down with combination.
// Activations are fixed-point numbers of 16 bits with a scale per 128 of them (finer than bf16 for all but the smallest of these), high and low
// bytes as two columns of one integer product: codes become bytes in three instructions for eight, half of what bf16 takes, and a processor
// keeps up with its share of the memory with room to spare.
// A producer warp streams blocks of weights through a ring in shared memory, ahead of the kernel before this one being done;
// WARPS consumer warps share the blocks of a tile (16 rows) and sum in a fixed order.
//
// Compiled with: KIND (0 linear, 1 gate and up, 2 down), TEAMS of TEAM_WARPS warps (a stage has a block for each warp of a team; teams take stages
// in turn, so that stages can be small and warps many), STAGES, TILE_BLOCKS (of one matrix along its inputs), NORM, and for kinds 1 and 2
// TILES (of one expert), ACTIVE (routed experts of a token; 0 is a dense feed-forward, which is a shared expert alone), SHARED (0 or 1 expert after
// the routed ones), EXPERTS.

#ifndef ACTIVE
#define ACTIVE 0
#define SHARED 0
#endif

constexpr u32 WARPS = TEAMS * TEAM_WARPS;
constexpr u32 CONSUMERS = WARPS * 32;
constexpr u32 STAGE_BLOCKS = TEAM_WARPS;
constexpr u32 STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr u32 SEGMENTS = KIND == 2 ? ACTIVE + SHARED : 1;
constexpr u32 INPUTS = TILE_BLOCKS * BLOCK_K;
constexpr u32 TILE_STAGES = TILE_BLOCKS / STAGE_BLOCKS;
constexpr u32 FLUSH = CONSUMERS / 16 < 8 ? CONSUMERS / 16 : 8;  // tiles whose partial sums are held before they are added up
// A stage belongs to one team for good: a team that waits for a stage's next turn must have seen its last.
static_assert(TILE_BLOCKS % STAGE_BLOCKS == 0 && STAGES % TEAMS == 0 && STAGES >= TEAMS && SEGMENTS * TILE_STAGES >= TEAMS && CONSUMERS >= FLUSH * 16);

struct Arguments {
    const u8* weights;
    const void* x;         // fp32 residual where NORM, else bf16
    const float* norm;     // [INPUTS]
    const float* bias;     // [rows] or null
    const float* residual; // fp32 [rows] or null; may be `out`
    void* out;             // fp32 where residual or out_float, else bf16
    const float* logits;     // kind 1: [EXPERTS]
    const float* correction; // kind 1: [EXPERTS] or null
    int* chosen;           // [ACTIVE]: written by kind 1, read by kind 2
    float* chosen_weight;  // [ACTIVE]
    u32* counter;          // zero between launches: tiles are taken as blocks get to them, since blocks may share processors unevenly
    u32 tiles;             // row tiles of the whole launch
    u32 fixed;             // tiles that every block has, before it takes others
    u32 out_float;
    float eps;
    float routed_scale;
};

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

#if KIND == 1
// By the producer warp, as soon as logits may be read.
DEVICE void choose_experts(const Arguments& a, int* ids, u32 lane) {
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
}
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u8* ring = memory;
    u8* xs = ring + STAGES * STAGE_BYTES;                                   // [SEGMENTS * TILE_BLOCKS][half][high, low][t][step][4] bytes
    float* partial = (float*)(xs + SEGMENTS * INPUTS * 2);                  // [FLUSH][WARPS][16]
    float* sums = partial + FLUSH * WARPS * 16;                             // [32]
    int2* starts = (int2*)(sums + 32);                                      // [SEGMENTS * TILE_BLOCKS * GROUPS]: -8 * sums of high and low bytes
    float* steps = (float*)(starts + SEGMENTS * TILE_BLOCKS * GROUPS);      // [SEGMENTS * TILE_BLOCKS, even]: what a unit of x stands for
    u64* barriers = (u64*)(steps + (SEGMENTS * TILE_BLOCKS + 1) / 2 * 2);   // full [STAGES], empty [STAGES]
    int* ids = (int*)(barriers + 2 * STAGES);                               // [16]
    float* factors = (float*)(ids + 16);                                    // [16]
    u32* taken = (u32*)(factors + 16);                                      // [FLUSH]: tiles whose sums are held
    u32* tile_of = taken + FLUSH;                                           // [STAGES]
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
        u32 tile = blockIdx.x;
        u32 done = 0;
        while (tile < a.tiles) {
            for (u32 segment = 0; segment < SEGMENTS; segment++) {
                const u8* source;
#if KIND == 0
                source = a.weights + (u64)tile * TILE_BLOCKS * BLOCK_BYTES;
#elif KIND == 1
                // The shared expert's tiles come first: they need no routing.
                u32 expert = EXPERTS;
                const u32 slot = tile / TILES;
                if (!SHARED || slot > 0) {
                    if (!waited) choose_experts(a, ids, lane), waited = true;
                    expert = ids[slot - SHARED];
                }
                source = a.weights + ((u64)expert * TILES + tile % TILES) * (TILE_BLOCKS * BLOCK_BYTES);
#else
                u32 expert = EXPERTS;
                if (!SHARED || segment > 0) {
                    if (!waited) wait_previous(), waited = true;
                    expert = __ldcg(a.chosen + segment - SHARED);
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
                choose_experts(a, ids, lane);
#else
                wait_previous();
#endif
                waited = true;
            }
            if (lane == 0) tile = a.fixed * gridDim.x + atomicInc(a.counter, a.tiles - a.fixed * gridDim.x + gridDim.x - 1);
            tile = __shfl_sync(~0u, tile, 0);
        }
        // The end, for each team.
        for (u32 i = 0; i < TEAMS; i++) {
            barrier_wait(empty + stage * 8, phase);
            if (lane == 0) tile_of[stage] = ~0u, barrier_arrive(full + stage * 8);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
#if KIND == 1
        if (!waited) choose_experts(a, ids, lane);
#endif
        return;
    }

    // Consumers: first the activations.
    constexpr u32 BLOCKS = SEGMENTS * TILE_BLOCKS, TURNS = (BLOCKS + WARPS - 1) / WARPS;
    const u32 mine = (lane >> 2) * 16 + (lane & 3) * 2;  // this lane's first input of a block
#if NORM
    float2 w[TURNS][2], h[TURNS][2];
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        const u32 block = i * WARPS + warp;
        const float2* from = (const float2*)(a.norm + block * BLOCK_K + mine);
        if (block < BLOCKS) w[i][0] = __ldg(from), w[i][1] = __ldg(from + 4);
    }
    wait_previous();
    if (thread == 0) trace(KIND * 2 + NORM, 1);
    float sum = 0.f;
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        const u32 block = i * WARPS + warp;
        const float2* from = (const float2*)((const float*)a.x + block * BLOCK_K + mine);
        h[i][0] = h[i][1] = float2{0.f, 0.f};
        if (block < BLOCKS) h[i][0] = __ldcg(from), h[i][1] = __ldcg(from + 4);
    }
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) sum += h[i][0].x * h[i][0].x + h[i][0].y * h[i][0].y + h[i][1].x * h[i][1].x + h[i][1].y * h[i][1].y;
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    named_barrier(1, CONSUMERS);
    sum = 0.f;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) sum += sums[i];
    const float r = rsqrtf(sum / INPUTS + a.eps);
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        const u32 block = i * WARPS + warp;
        const float v[4] = {h[i][0].x * r * w[i][0].x, h[i][1].x * r * w[i][1].x, h[i][0].y * r * w[i][0].y, h[i][1].y * r * w[i][1].y};
        if (block < BLOCKS) store_fixed(v, block, xs, starts, steps, lane);
    }
#else
    wait_previous();
    if (thread == 0) trace(KIND * 2 + NORM, 1);
    u32 p[TURNS][2];
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        const u32 block = i * WARPS + warp;
        const u32* from = (const u32*)((const u16*)a.x + block * BLOCK_K + mine);
        if (block < BLOCKS) p[i][0] = __ldcg(from), p[i][1] = __ldcg(from + 4);
    }
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        const u32 block = i * WARPS + warp;
        const float v[4] = {bf16_float(p[i][0]), bf16_float(p[i][1]), bf16_float(p[i][0] >> 16), bf16_float(p[i][1] >> 16)};
        if (block < BLOCKS) store_fixed(v, block, xs, starts, steps, lane);
    }
    if (KIND == 2 && thread < SEGMENTS) factors[thread] = thread < SHARED ? 1.f : __ldcg(a.chosen_weight + thread - SHARED);
#endif
    named_barrier(1, CONSUMERS);

    if (thread == 0) trace(KIND * 2 + NORM, 2);
    const u8* my_x = xs + (lane >> 2 & 1) * 64 + (lane & 3) * 16;
#if KIND != 1
    float ahead = 0.f;
#endif
    const u32 team = warp / TEAM_WARPS, member = warp % TEAM_WARPS;
    u32 stage = team, phase = 0, turn = team;  // turn: stages of the next tile before this team's first
    for (u32 held = 0;; held++) {
        barrier_wait(full + stage * 8, phase);
        const u32 tile = tile_of[stage];
        constexpr u32 ROWS = KIND == 1 ? 8 : 16;
        if (held == FLUSH || (tile == ~0u && held)) {
            named_barrier(1, CONSUMERS);
            if (thread < held * ROWS) {
                const float* from = partial + thread / ROWS * WARPS * 16 + thread % ROWS;
                float value = 0.f;
#pragma unroll
                for (u32 j = 0; j < WARPS; j++) value += from[j * 16];
                const u32 at = taken[thread / ROWS] * ROWS + thread % ROWS;
#if KIND == 1
                float up = 0.f;
#pragma unroll
                for (u32 j = 0; j < WARPS; j++) up += from[j * 16 + 8];
                ((u16*)a.out)[at] = to_bf16(silu(value) * up);
#else
                value += ahead;
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
        if (thread / 16 == held) {
            const u32 at = tile * 16 + thread % 16;
            ahead = a.bias ? __ldg(a.bias + at) : 0.f;
            if (a.residual) ahead += __ldcg(a.residual + at);
        }
#endif
        if (thread == 0) taken[held] = tile;
        float low = 0.f, high = 0.f;
        u32 s = turn;
#pragma unroll 1
        while (true) {
            const u32 block = s * STAGE_BLOCKS + member;
            const float step = KIND == 2 ? steps[block] * factors[s / TILE_STAGES] : steps[block];
            multiply_fixed(low, high, ring + stage * STAGE_BYTES + member * BLOCK_BYTES, my_x + block * 256, starts + block * GROUPS, step, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage * 8);
            stage += TEAMS;
            if (stage >= STAGES) stage -= STAGES, phase ^= 1;
            s += TEAMS;
            if (s >= SEGMENTS * TILE_STAGES) break;
            barrier_wait(full + stage * 8, phase);
        }
        turn = s - SEGMENTS * TILE_STAGES;
        // Pairs of columns are equal; a quarter's first lane has rows lane/4 and lane/4 + 8.
        float* to = partial + (held * WARPS + warp) * 16 + lane / 4;
        if ((lane & 3) == 0) to[0] = low, to[8] = high;
    }
    if (thread == 0) trace(KIND * 2 + NORM, 3);
}
