// One row of activations against 4-bit weights: linear, gate and up of the chosen experts, down with combination.
// A producer warp streams blocks of weights through a ring in shared memory, ahead of the kernel before this one being done;
// WARPS consumer warps share the blocks of a tile (16 rows) and sum in a fixed order.
//
// Compiled with: KIND (0 linear, 1 gate and up, 2 down), TEAMS of TEAM_WARPS warps (a stage has a block for each warp of a team; teams take stages
// in turn, so that stages can be small and warps many), STAGES, TILE_BLOCKS (of one matrix along its inputs), NORM, and for kinds 1 and 2
// TILES (of one expert), ACTIVE (routed experts of a token), SHARED (0 or 1 expert after the routed ones), EXPERTS.

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
constexpr u32 FLUSH = 8;  // tiles whose partial sums are held before they are added up
static_assert(TILE_BLOCKS % STAGE_BLOCKS == 0 && STAGES >= TEAMS);

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
    const u8* later;       // what a later kernel reads and may be fetched into cache while this one waits, or null
    u64 later_bytes;
    const u8* next;        // kind 1: the weights of down, of which the chosen experts' are fetched into cache, or null
    u32 next_tiles;        // of one expert
    u32 next_tile_bytes;
    u32 tiles;             // row tiles of the whole launch
    u32 prefetch;          // whether this kernel's own weights are fetched into cache before the one ahead is done
    u32 out_float;
    float eps;
    float routed_scale;
};

DEVICE u32 tile_count(u32 tiles) { return tiles > blockIdx.x ? (tiles - blockIdx.x - 1) / gridDim.x + 1 : 0; }

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u8* ring = memory;
    u8* xs = ring + STAGES * STAGE_BYTES;                                  // bf16 [SEGMENTS * INPUTS]
    float* partial = (float*)(xs + SEGMENTS * INPUTS * 2);                 // [FLUSH][WARPS][16]
    float* sums = partial + FLUSH * WARPS * 16;                            // [32]
    float* starts = sums + 32;                                             // [SEGMENTS * TILE_BLOCKS, even]: -136 * sum of a block's x
    u64* barriers = (u64*)(starts + (SEGMENTS * TILE_BLOCKS + 1) / 2 * 2);                                     // full [STAGES], empty [STAGES]
    int* ids = (int*)(barriers + 2 * STAGES);                              // [16]
    float* factors = (float*)(ids + 16);                                   // [16]
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, ring_at = shared_address(ring);
    const u32 thread = thread_number(), warp = thread / 32, lane = thread & 31;
    const u32 mine = tile_count(a.tiles);

    if (thread == CONSUMERS) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, TEAM_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();

    if (warp == WARPS) {
        // Producer.
        bool waited = false;
        const u64 policy = read_once_policy();
        u32 stage = 0, phase = 1;
        bool shared_later = a.later != nullptr;
        for (u32 i = 0; i < mine; i++) {
            const u32 tile = blockIdx.x + i * gridDim.x;
            for (u32 segment = 0; segment < SEGMENTS; segment++) {
                const u8* source;
#if KIND == 0
                source = a.weights + (u64)tile * TILE_BLOCKS * BLOCK_BYTES;
#elif KIND == 1
                // The shared expert's tiles come first: they need no routing.
                u32 expert = EXPERTS;
                const u32 slot = tile / TILES;
                if (!SHARED || slot > 0) {
                    if (!waited) {
                        if (shared_later) prefetch_share(a.later, a.later_bytes, lane);
                        named_barrier(2, 64), waited = true;
                    }
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
                        barrier_expect(full + stage * 8, STAGE_BYTES);
                        bulk_copy(ring_at + stage * STAGE_BYTES, source + s * STAGE_BYTES, STAGE_BYTES, full + stage * 8, policy);
                    }
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
#if KIND == 1
        if (!waited) named_barrier(2, 64);
        // Down's blocks take tiles as this kernel's do: block, block + grid, ...
        if (a.next)
            for (u32 slot = 0; slot < ACTIVE + SHARED; slot++) {
                const u32 expert = slot < ACTIVE ? (u32)ids[slot] : EXPERTS;
                for (u32 tile = blockIdx.x; tile < a.next_tiles; tile += gridDim.x)
                    for (u32 at = lane * LINE; at < a.next_tile_bytes; at += 32 * LINE)
                        prefetch(a.next + ((u64)expert * a.next_tiles + tile) * a.next_tile_bytes + at);
            }
#endif
        return;
    }

    // Consumers. While the kernel ahead still runs, what the ring does not hold of this block's weights comes into the cache.
    constexpr u32 TILE_BYTES = TILE_BLOCKS * BLOCK_BYTES;
    if (KIND == 0 && a.prefetch)
        for (u32 at = STAGES * STAGE_BYTES + thread * LINE; at < mine * TILE_BYTES; at += CONSUMERS * LINE)
            prefetch(a.weights + (u64)(blockIdx.x + at / TILE_BYTES * gridDim.x) * TILE_BYTES + at % TILE_BYTES);
    // Then the activations.
#if NORM
    constexpr u32 VECTORS = (INPUTS + CONSUMERS * 4 - 1) / (CONSUMERS * 4);
    float4 w[VECTORS], h[VECTORS];
#pragma unroll
    for (u32 i = 0; i < VECTORS; i++) {
        const u32 k = (i * CONSUMERS + thread) * 4;
        w[i] = k < INPUTS ? *(const float4*)(a.norm + k) : float4{0.f, 0.f, 0.f, 0.f};
    }
    wait_previous();
#if KIND == 1
    if (warp == 0) {
        int id = 0;
        float weight = 0.f;
        choose<EXPERTS / 32>(a.logits, a.correction, EXPERTS / 32, ACTIVE, a.routed_scale, lane, id, weight);
        if (lane < ACTIVE) {
            ids[lane] = id;
            if (blockIdx.x == 0) a.chosen[lane] = id, a.chosen_weight[lane] = weight;
        }
        __syncwarp();
        named_barrier(2, 64);
    }
#endif
    float sum = 0.f;
#pragma unroll
    for (u32 i = 0; i < VECTORS; i++) {
        const u32 k = (i * CONSUMERS + thread) * 4;
        h[i] = k < INPUTS ? __ldcg((const float4*)((const float*)a.x + k)) : float4{0.f, 0.f, 0.f, 0.f};
        sum += h[i].x * h[i].x + h[i].y * h[i].y + h[i].z * h[i].z + h[i].w * h[i].w;
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    named_barrier(1, CONSUMERS);
    sum = 0.f;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) sum += sums[i];
    const float r = rsqrtf(sum / INPUTS + a.eps);
#pragma unroll
    for (u32 i = 0; i < VECTORS; i++) {
        const u32 k = (i * CONSUMERS + thread) * 4;
        if (k < INPUTS) {
            const uint2 v = {pack_bf16(h[i].x * r * w[i].x, h[i].y * r * w[i].y), pack_bf16(h[i].z * r * w[i].z, h[i].w * r * w[i].w)};
            *(uint2*)(xs + k * 2) = v;
            const float total = warp_sum(pair_sum(v.x) + pair_sum(v.y));
            if (lane == 0) starts[k / BLOCK_K] = -RAISED * total;
        }
    }
#else
    wait_previous();
#pragma unroll 4
    for (u32 i = thread; i < SEGMENTS * INPUTS / 8; i += CONSUMERS) {
        const uint4 v = __ldcg((const uint4*)a.x + i);
        ((uint4*)xs)[i] = v;
        float total = eight_sum(v);
#pragma unroll
        for (u32 o = 8; o; o >>= 1) total += __shfl_xor_sync(lane & 16 ? 0xffff0000u : 0xffffu, total, o);
        if ((lane & 15) == 0) starts[i / 16] = -RAISED * total;
    }
    if (KIND == 2 && thread < SEGMENTS) factors[thread] = thread < SHARED ? 1.f : __ldcg(a.chosen_weight + thread - SHARED);
#endif
    named_barrier(1, CONSUMERS);

    const u8* my_x = xs + (lane & 3) * 32;
    const u32 team = warp / TEAM_WARPS, member = warp % TEAM_WARPS;
    u32 stage = team, phase = 0, turn = team;  // turn: stages of the present tile until this team's next
    for (u32 i = 0; i < mine; i++) {
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        u32 s = turn;
#pragma unroll 1
        for (; s < SEGMENTS * TILE_STAGES; s += TEAMS) {
            const u32 group = s * STAGE_BLOCKS + member;
            barrier_wait(full + stage * 8, phase);
            const uint4* from = (const uint4*)(my_x + group * BLOCK_K * 2);
            const uint4 x[4] = {from[0], from[1], from[8], from[9]};
            const float start = starts[group], factor = KIND == 2 ? factors[s / TILE_STAGES] : 1.f;
            multiply_block(acc, ring + stage * STAGE_BYTES + member * BLOCK_BYTES, x, start, start, lane, factor);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage * 8);
            stage += TEAMS;
            if (stage >= STAGES) stage -= STAGES, phase ^= 1;
        }
        turn = s - SEGMENTS * TILE_STAGES;
        // All columns are equal; a quarter's first lane has rows lane/4 and lane/4 + 8.
        float* to = partial + ((i % FLUSH) * WARPS + warp) * 16 + lane / 4;
        if ((lane & 3) == 0) to[0] = acc[0], to[8] = acc[2];
        if (i % FLUSH == FLUSH - 1 || i == mine - 1) {
            named_barrier(1, CONSUMERS);
            const u32 count = i % FLUSH + 1, first = i - (i % FLUSH);
            constexpr u32 ROWS = KIND == 1 ? 8 : 16;
            for (u32 n = thread; n < count * ROWS; n += CONSUMERS) {
                const u32 tile = blockIdx.x + (first + n / ROWS) * gridDim.x, row = n % ROWS;
                const float* from = partial + (n / ROWS) * WARPS * 16 + row;
                float value = 0.f;
#pragma unroll
                for (u32 j = 0; j < WARPS; j++) value += from[j * 16];
#if KIND == 1
                float up = 0.f;
#pragma unroll
                for (u32 j = 0; j < WARPS; j++) up += from[j * 16 + 8];
                ((u16*)a.out)[tile * 8 + row] = to_bf16(silu(value) * up);
#else
                const u32 at = tile * 16 + row;
                if (a.bias) value += a.bias[at];
                if (a.residual) ((float*)a.out)[at] = value + __ldcg(a.residual + at);
                else if (a.out_float) ((float*)a.out)[at] = value;
                else ((u16*)a.out)[at] = to_bf16(value);
#endif
            }
            if (i != mine - 1) named_barrier(1, CONSUMERS);
        }
    }
}
