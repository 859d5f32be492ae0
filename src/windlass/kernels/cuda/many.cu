// Up to 8 rows of activations at a time against 4-bit weights: items of (expert, up to 8 rows), or one matrix.
// As one.cu, but each warp keeps its share of the activations in registers while tiles of an item stream past.
//
// Compiled with: KIND (0 linear to bf16 with bias, 1 gate and up, 2 fp32 partial results), WARPS, TILE_BLOCKS (a multiple of WARPS), UNIT (tiles
// whose sums are added up at once), JOINT (stages a warp takes at once), STAGES, RESIDENT (blocks on a processor), ITEMS (1: items from a list, 0: item = slice of the inputs and
// tile of 8 rows).

constexpr u32 CONSUMERS = WARPS * 32;
constexpr u32 STAGE_BYTES = WARPS * BLOCK_BYTES;
constexpr u32 TILE_STAGES = TILE_BLOCKS / WARPS;
constexpr u32 COLUMN = 20;  // floats from one column of partial sums to the next: no two lanes of a write share a bank
constexpr u32 PARTIAL = 8 * COLUMN;
static_assert(TILE_BLOCKS % WARPS == 0 && STAGES % JOINT == 0 && UNIT * TILE_STAGES % JOINT == 0);

struct Arguments {
    const u8* weights;
    const u16* x;           // bf16 [.., inputs]
    const float* bias;      // [rows of weights] or null
    void* out;
    const int* num_items;
    const int* item_expert;
    const int* item_rows;   // [items, 8] rows of x, -1 for none
    const int* item_places; // [items, 8] rows of out
    u64 expert_stride;      // bytes from one expert (or slice of inputs) to the next
    u64 tile_stride;        // bytes from one tile to the next
    u64 out_stride;         // elements between rows of out
    u64 slice_stride;       // elements between slices' results
    u32 x_stride;           // elements between rows of x
    u32 units;              // UNIT row tiles each, of an item
    u32 slices;             // of the inputs, where there is no list
    u32 rows;               // of x, where there is no list
};

// Word i of lane j of four to word j of lane i.
DEVICE void exchange4(uint4& v, u32 lane) {
    const bool odd = lane & 1, high = lane & 2;
    u32 p = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1), q = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
    if (odd) v.x = p, v.z = q;
    else v.y = p, v.w = q;
    p = __shfl_xor_sync(~0u, high ? v.x : v.z, 2), q = __shfl_xor_sync(~0u, high ? v.y : v.w, 2);
    if (high) v.x = p, v.y = q;
    else v.z = p, v.w = q;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, RESIDENT) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    float* partial = (float*)(memory + STAGES * STAGE_BYTES);  // [2][UNIT][WARPS][PARTIAL]
    u64* barriers = (u64*)(partial + 2 * UNIT * WARPS * PARTIAL);
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, ring_at = shared_address(memory);
    const u32 thread = thread_number(), warp = thread / 32, lane = thread & 31;
    if (thread == CONSUMERS) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();
    u32 items;
#if ITEMS
    wait_previous();
    items = (u32)__ldcg(a.num_items);
#else
    items = a.slices * ((a.rows + 7) / 8);
#endif
    const u32 total = items * a.units;
    const u32 first = (u32)((u64)total * blockIdx.x / gridDim.x), last = (u32)((u64)total * (blockIdx.x + 1) / gridDim.x);

    if (warp == WARPS) {
        const u64 policy = read_once_policy();
        u32 stage = 0, phase = 1;
        for (u32 unit = first; unit < last; unit++) {
            const u32 item = unit / a.units;
#if ITEMS
            const u32 expert = (u32)__ldcg(a.item_expert + item);
#else
            const u32 expert = item % a.slices;
#endif
            const u8* source = a.weights + expert * a.expert_stride + (unit % a.units) * UNIT * a.tile_stride;
            for (u32 s = 0; s < UNIT * TILE_STAGES; s++) {
                barrier_wait(empty + stage * 8, phase);
                if (lane == 0) {
                    barrier_expect(full + stage * 8, STAGE_BYTES);
                    bulk_copy(ring_at + stage * STAGE_BYTES, source + (s / TILE_STAGES) * a.tile_stride + (s % TILE_STAGES) * STAGE_BYTES, STAGE_BYTES, full + stage * 8, policy);
                }
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }

#if !ITEMS
    wait_previous();
#endif
    uint4 x[TILE_STAGES][4];
    float start[TILE_STAGES][2];
    u32 held = ~0u, stage = 0, phase = 0;
    int place = -1;
    for (u32 unit = first; unit < last; unit++) {
        const u32 item = unit / a.units;
        if (item != held) {
            held = item;
            const u32 column = lane / 4;
#if ITEMS
            const int row = __ldcg(a.item_rows + item * 8 + column);
            const u16* from = a.x + (u64)(u32)row * a.x_stride;
            place = __ldcg(a.item_places + item * 8 + column);
#else
            const u32 slice = item % a.slices, at = item / a.slices * 8 + column;
            const int row = at < a.rows ? (int)at : -1;
            const u16* from = a.x + (u64)(u32)row * a.x_stride + slice * (TILE_BLOCKS * BLOCK_K);
            place = row;
#endif
#pragma unroll
            for (u32 s = 0; s < TILE_STAGES; s++) {
                // Four lanes read 64 inputs in one piece, 16 each, and exchange them for the pairs that the products want.
                const u16* p = from + (s * WARPS + warp) * BLOCK_K + (lane & 3) * 16;
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    uint4 v = {0, 0, 0, 0}, w = v;
                    if (row >= 0) v = __ldcg((const uint4*)(p + half * 64)), w = __ldcg((const uint4*)(p + half * 64 + 8));
                    exchange4(v, lane), exchange4(w, lane);
                    x[s][half * 2] = uint4{v.x, w.x, v.y, w.y};
                    x[s][half * 2 + 1] = uint4{v.z, w.z, v.w, w.w};
                }
            }
#pragma unroll
            for (u32 s = 0; s < TILE_STAGES; s++) {
                float total = (eight_sum(x[s][0]) + eight_sum(x[s][1])) + (eight_sum(x[s][2]) + eight_sum(x[s][3]));
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                // This lane's columns of results are 2t and 2t + 1.
                start[s][0] = -RAISED * __shfl_sync(~0u, total, (lane & 3) * 8);
                start[s][1] = -RAISED * __shfl_sync(~0u, total, (lane & 3) * 8 + 4);
            }
        }
        float acc[UNIT][4] = {};
#pragma unroll
        for (u32 s = 0; s < UNIT * TILE_STAGES; s += JOINT) {
#pragma unroll
            for (u32 j = 0; j < JOINT; j++) barrier_wait(full + (stage + j) * 8, phase);
#pragma unroll
            for (u32 j = 0; j < JOINT; j++) {
                const u32 part = (s + j) % TILE_STAGES;
                multiply_block(acc[(s + j) / TILE_STAGES], memory + (stage + j) * STAGE_BYTES + warp * BLOCK_BYTES, x[part], start[part][0],
                               start[part][1], lane, 1.f);
            }
            __syncwarp();
            if (lane < JOINT) barrier_arrive(empty + (stage + lane) * 8);
            stage += JOINT;
            if (stage == STAGES) stage = 0, phase ^= 1;
        }
        // The warps' sums, two units in turn; one warp adds up a tile while the others go on.
        const u32 number = unit - first;
        float* base = partial + (number & 1) * UNIT * WARPS * PARTIAL;
#pragma unroll
        for (u32 i = 0; i < UNIT; i++) {
            float* to = base + (i * WARPS + warp) * PARTIAL + (lane & 3) * 2 * COLUMN + lane / 4;
            to[0] = acc[i][0], to[COLUMN] = acc[i][1], to[8] = acc[i][2], to[COLUMN + 8] = acc[i][3];
        }
        named_barrier(1, CONSUMERS);
        const u32 which = (warp + WARPS - number * UNIT % WARPS) % WARPS;
        if (which < UNIT) {
            const u32 tile = (unit % a.units) * UNIT + which;
            const float* sums = base + which * WARPS * PARTIAL + lane / 4 * COLUMN + (lane & 3) * 4;
            float4 v = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (u32 j = 0; j < WARPS; j++) {
                const float4 p = *(const float4*)(sums + j * PARTIAL);
                v.x += p.x, v.y += p.y, v.z += p.z, v.w += p.w;
            }
            const u32 q = lane & 3;
#if KIND == 1
            const float4 up = {__shfl_xor_sync(~0u, v.x, 2), __shfl_xor_sync(~0u, v.y, 2), __shfl_xor_sync(~0u, v.z, 2), __shfl_xor_sync(~0u, v.w, 2)};
            if (q < 2 && place >= 0)
                *(uint2*)((u16*)a.out + place * a.out_stride + tile * 8 + q * 4) =
                    uint2{pack_bf16(silu(v.x) * up.x, silu(v.y) * up.y), pack_bf16(silu(v.z) * up.z, silu(v.w) * up.w)};
#elif KIND == 0
            if (place >= 0) {
                const u32 at = tile * 16 + q * 4;
                float4 b = {0.f, 0.f, 0.f, 0.f};
                if (a.bias) b = *(const float4*)(a.bias + at);
                *(uint2*)((u16*)a.out + place * a.out_stride + at) = uint2{pack_bf16(v.x + b.x, v.y + b.y), pack_bf16(v.z + b.z, v.w + b.w)};
            }
#else
            u64 at = place * a.out_stride + tile * 16 + q * 4;
#if !ITEMS
            at += (u64)(item % a.slices) * a.slice_stride;
#endif
            if (place >= 0) *(float4*)((float*)a.out + at) = v;
#endif
        }
    }
}
