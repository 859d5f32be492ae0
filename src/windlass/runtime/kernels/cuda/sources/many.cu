// Up to 8 or 16 rows of activations at a time against 4-bit weights: items of (expert, rows that chose it), or one matrix.
// As one.cu, but each warp keeps its share of the activations in registers while tiles of an item stream past.
//
// Compiled with: KIND (0 linear to bf16 with bias, 1 gate and up, 2 fp32 partial results), PRODUCT (0: bf16; 1: activations as fixed-point numbers
// of 16 bits with a step per row and 128 inputs, in integer products), COLUMNS (groups of 8 rows an item may have; items with fewer take the
// short way), WARPS, TILE_BLOCKS (a multiple of WARPS), UNIT (tiles whose sums are added up at once), JOINT (stages a warp takes at once), STAGES,
// RESIDENT (blocks on a processor), ITEMS (1: items from a list, 0: item = slice of the inputs and tile of rows).

#ifndef PRODUCT
#define PRODUCT 0
#endif
#ifndef COLUMNS
#define COLUMNS 1
#endif
constexpr u32 CONSUMERS = WARPS * 32;
// Where items of 16 rows need the registers and consumers are whole warpgroups, so are the producers (three warps of them do nothing):
// then registers can move from these to those.
constexpr u32 MOVES = COLUMNS > 1 && WARPS % 4 == 0 && WARPS >= 8 && RESIDENT == 1, THREADS = CONSUMERS + (MOVES ? 128 : 32);
constexpr u32 AT_FIRST = 65536 / THREADS / 8 * 8, AT_LAST = (AT_FIRST * THREADS - 24 * 128) / CONSUMERS / 8 * 8;
constexpr u32 STAGE_BYTES = WARPS * BLOCK_BYTES;
constexpr u32 TILE_STAGES = TILE_BLOCKS / WARPS;
constexpr u32 TURN = TILE_STAGES % JOINT == 0 ? TILE_STAGES : JOINT % TILE_STAGES == 0 ? JOINT : UNIT * TILE_STAGES;  // stages: whole tiles
constexpr u32 TURN_TILES = TURN / TILE_STAGES;
constexpr u32 ITEM_ROWS = COLUMNS * 8;
constexpr u32 COLUMN = 20;  // floats from one column of partial sums to the next: no two lanes of a write share a bank
constexpr u32 PARTIAL = 8 * COLUMN;
static_assert(TILE_BLOCKS % WARPS == 0 && STAGES % JOINT == 0 && TURN % JOINT == 0 && UNIT % TURN_TILES == 0 && COLUMNS <= 2);

struct Arguments {
    const u8* weights;
    const u16* x;           // bf16 [.., inputs]
    const float* bias;      // [rows of weights] or null
    void* out;
    const int* num_items;
    const int* item_expert;
    const int* item_rows;   // [items, ITEM_ROWS] rows of x, -1 for none
    const int* item_places; // [items, ITEM_ROWS] rows of out
    u64 expert_stride;      // bytes from one expert (or slice of inputs) to the next
    u64 tile_stride;        // bytes from one tile to the next
    u64 out_stride;         // elements between rows of out
    u64 slice_stride;       // elements between slices' results
    u32 x_stride;           // elements between rows of x
    u32 units;              // UNIT row tiles each, of an item
    u32 slices;             // of the inputs, where there is no list
    u32 rows;               // of x, where there is no list
};

template <u32 VALUE>
struct Number {
    static constexpr u32 value = VALUE;
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

// Activations of one column (row of x) and a block of 128 inputs: bf16 pairs 2t, 2t + 1 (a[i]) and 2t + 8, 2t + 9 (b[i]) of step i of 16 inputs
// become bytes, high ones and low ones, in the order in which a word's nibbles hold these inputs: 2t, 2t + 8, 2t + 1, 2t + 9.
// Returns what a unit of the results stands for: weights are 16 times too high (below).
DEVICE float to_fixed(const u32 (&a)[8], const u32 (&b)[8], uint4 (&x)[4]) {
    u32 most = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        asm("max.u16x2 %0, %0, %1;" : "+r"(most) : "r"(a[i] & 0x7fff7fffu));
        asm("max.u16x2 %0, %0, %1;" : "+r"(most) : "r"(b[i] & 0x7fff7fffu));
    }
    most = max(most & 0xffffu, most >> 16);  // bits of bf16 without sign: in the order of the numbers, NaN highest
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const float largest = bf16_float(most), inverse = largest > 1e-30f ? 32512.f / largest : 0.f;
    // Added to this, a number's integer part lies in the low bits; 128 more rounds for the high byte, as the low one has a sign.
    constexpr float MAGIC = 12582912.f;
    u32 high[8], low[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const float v[4] = {bf16_float(a[i]), bf16_float(b[i]), __uint_as_float(a[i] & 0xffff0000u), __uint_as_float(b[i] & 0xffff0000u)};
        u32 n[4], m[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            n[j] = __float_as_uint(fmaf(v[j], inverse, MAGIC));
            m[j] = n[j] + 128;
        }
        low[i] = __byte_perm(__byte_perm(n[0], n[1], 0x0040), __byte_perm(n[2], n[3], 0x0040), 0x5410);
        high[i] = __byte_perm(__byte_perm(m[0], m[1], 0x0051), __byte_perm(m[2], m[3], 0x0051), 0x5410);
    }
    x[0] = uint4{high[0], high[1], high[2], high[3]}, x[1] = uint4{high[4], high[5], high[6], high[7]};
    x[2] = uint4{low[0], low[1], low[2], low[3]}, x[3] = uint4{low[4], low[5], low[6], low[7]};
    return largest * (1.f / (32512.f * 16.f));
}

DEVICE void multiply_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four codes an instruction: 16 * (code - 8) of the upper nibbles, signed bytes. No row of x need be summed to take the 8 away.
DEVICE u32 codes_bytes(u32 q) {
    u32 r;
    asm("lop3.b32 %0, %1, 0xf0f0f0f0, 0x80808080, 0x6a;" : "=r"(r) : "r"(q));
    return r;
}
// A block against COLS groups of 8 columns. Sums of a group of weights are below 2^30.
template <u32 COLS>
DEVICE void multiply_fixed(float (&acc)[COLUMNS][4], const u8* block, const uint4 (&x)[COLUMNS][4], const float (&step)[COLUMNS][2], u32 lane) {
    const uint4 q0 = *(const uint4*)(block + lane * 16), q1 = *(const uint4*)(block + 512 + lane * 16);
    const u8* scales = block + CODE_BYTES + (lane >> 2) * 4;
    const u32 q[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
    int high[COLS][4], low[COLS][4];
#pragma unroll
    for (u32 p = 0; p < 4; p++) {
        constexpr u32 GROUP_STEPS = GROUP / 32;
        if (p % GROUP_STEPS == 0)
#pragma unroll
            for (u32 i = 0; i < COLS * 4; i++) high[i / 4][i % 4] = low[i / 4][i % 4] = 0;
        const u32 a[4] = {codes_bytes(q[2 * p] << 4), codes_bytes(q[2 * p]), codes_bytes(q[2 * p + 1] << 4), codes_bytes(q[2 * p + 1])};
#pragma unroll
        for (u32 c = 0; c < COLS; c++) {
            const uint4 h = x[c][p / 2], l = x[c][2 + p / 2];
            multiply_bytes(high[c], a, p % 2 ? h.z : h.x, p % 2 ? h.w : h.y);
            multiply_bytes(low[c], a, p % 2 ? l.z : l.x, p % 2 ? l.w : l.y);
        }
        if (p % GROUP_STEPS == GROUP_STEPS - 1) {
            const u32 s = *(const u32*)(scales + p / GROUP_STEPS * 32);
            const float upper = bf16_float(s), lower = __uint_as_float(s & 0xffff0000u);
#pragma unroll
            for (u32 c = 0; c < COLS; c++)
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    acc[c][i] += (i < 2 ? upper : lower) * (step[c][i & 1] * __int2float_rn(high[c][i] * 256 + low[c][i]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    float* partial = (float*)(memory + STAGES * STAGE_BYTES);  // [2][UNIT][COLUMNS][WARPS][PARTIAL]
    u64* barriers = (u64*)(partial + 2 * UNIT * COLUMNS * WARPS * PARTIAL);
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
    items = a.slices * ((a.rows + ITEM_ROWS - 1) / ITEM_ROWS);
#endif
    const u32 total = items * a.units;
    const u32 first = total * blockIdx.x / gridDim.x, last = total * (blockIdx.x + 1) / gridDim.x;

    if (warp >= WARPS) {
        if constexpr (MOVES) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp > WARPS) return;
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

    if constexpr (MOVES) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(AT_LAST < 240 ? AT_LAST : 240));
#if !ITEMS
    wait_previous();
#endif
    uint4 x[TILE_STAGES][COLUMNS][4];
    float each[TILE_STAGES][COLUMNS][2];  // of this lane's columns of results, 2t and 2t + 1: where sums start, or what a unit of x stands for
    u32 held = ~0u, stage = 0, phase = 0;
    int place[COLUMNS];
    bool wide = false;
    for (u32 unit = first; unit < last; unit++) {
        const u32 item = unit / a.units;
        if (item != held) {
            held = item;
#if ITEMS
            wide = COLUMNS > 1 && __ldcg(a.item_rows + item * ITEM_ROWS + ITEM_ROWS - 8) >= 0;
#else
            wide = COLUMNS > 1 && item / a.slices * ITEM_ROWS + 8 < a.rows;
#endif
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) {
                if (c > 0 && !wide) break;
#if ITEMS
                const int row = __ldcg(a.item_rows + item * ITEM_ROWS + c * 8 + lane / 4);
                const u16* from = a.x + (u64)(u32)row * a.x_stride;
                place[c] = __ldcg(a.item_places + item * ITEM_ROWS + c * 8 + lane / 4);
#else
                const u32 at = item / a.slices * ITEM_ROWS + c * 8 + lane / 4;
                const int row = at < a.rows ? (int)at : -1;
                const u16* from = a.x + (u64)(u32)row * a.x_stride + item % a.slices * (TILE_BLOCKS * BLOCK_K);
                place[c] = row;
#endif
#pragma unroll
                for (u32 s = 0; s < TILE_STAGES; s++) {
                    // Four lanes read 64 inputs in one piece, 16 each, and exchange them for the pairs that the products want.
                    const u16* p = from + (s * WARPS + warp) * BLOCK_K + (lane & 3) * 16;
                    uint4 v[2] = {}, w[2] = {};
#pragma unroll
                    for (u32 half = 0; half < 2; half++)
                        if (row >= 0) v[half] = __ldcg((const uint4*)(p + half * 64)), w[half] = __ldcg((const uint4*)(p + half * 64 + 8));
#pragma unroll
                    for (u32 half = 0; half < 2; half++) exchange4(v[half], lane), exchange4(w[half], lane);
                    float mine;  // of this lane's column of x
#if PRODUCT
                    mine = to_fixed({v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w},
                                    {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w}, x[s][c]);
#else
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
                        x[s][c][half * 2] = uint4{v[half].x, w[half].x, v[half].y, w[half].y};
                        x[s][c][half * 2 + 1] = uint4{v[half].z, w[half].z, v[half].w, w[half].w};
                    }
                    mine = (eight_sum(x[s][c][0]) + eight_sum(x[s][c][1])) + (eight_sum(x[s][c][2]) + eight_sum(x[s][c][3]));
                    mine += __shfl_xor_sync(~0u, mine, 1);
                    mine = -RAISED * (mine + __shfl_xor_sync(~0u, mine, 2));
#endif
                    each[s][c][0] = __shfl_sync(~0u, mine, (lane & 3) * 8);
                    each[s][c][1] = __shfl_sync(~0u, mine, (lane & 3) * 8 + 4);
                }
            }
        }
        // The warps' sums, two units in turn; one warp adds up a tile while the others go on.
        const u32 number = unit - first;
        float* base = partial + (number & 1) * UNIT * COLUMNS * WARPS * PARTIAL;
        auto multiply_unit = [&](auto columns) {
            constexpr u32 COLS = decltype(columns)::value;
#pragma unroll 1
            for (u32 turn = 0; turn < UNIT / TURN_TILES; turn++) {
                float acc[TURN_TILES][COLUMNS][4] = {};
#pragma unroll
                for (u32 s = 0; s < TURN; s += JOINT) {
#pragma unroll
                    for (u32 j = 0; j < JOINT; j++) barrier_wait(full + (stage + j) * 8, phase);
#pragma unroll
                    for (u32 j = 0; j < JOINT; j++) {
                        const u32 part = (s + j) % TILE_STAGES, tile = (s + j) / TILE_STAGES;
                        const u8* block = memory + (stage + j) * STAGE_BYTES + warp * BLOCK_BYTES;
#if PRODUCT
                        multiply_fixed<COLS>(acc[tile], block, x[part], each[part], lane);
#else
#pragma unroll
                        for (u32 c = 0; c < COLS; c++) multiply_block(acc[tile][c], block, x[part][c], each[part][c][0], each[part][c][1], lane, 1.f);
#endif
                    }
                    __syncwarp();
                    if (lane < JOINT) barrier_arrive(empty + (stage + lane) * 8);
                    stage += JOINT;
                    if (stage == STAGES) stage = 0, phase ^= 1;
                }
#pragma unroll
                for (u32 i = 0; i < TURN_TILES * COLS; i++) {
                    const float* v = acc[i / COLS][i % COLS];
                    float* to = base + (((turn * TURN_TILES + i / COLS) * COLUMNS + i % COLS) * WARPS + warp) * PARTIAL + (lane & 3) * 2 * COLUMN + lane / 4;
                    to[0] = v[0], to[COLUMN] = v[1], to[8] = v[2], to[COLUMN + 8] = v[3];
                }
            }
        };
        if (wide) multiply_unit(Number<COLUMNS>());
        else multiply_unit(Number<1>());
        named_barrier(1, CONSUMERS);
        for (u32 task = (warp + WARPS - number * UNIT % WARPS) % WARPS; task < UNIT * (wide ? COLUMNS : 1); task += WARPS) {
            const u32 which = task % UNIT, group = task / UNIT, tile = (unit % a.units) * UNIT + which, q = lane & 3;
            const int to = COLUMNS > 1 && group ? place[COLUMNS - 1] : place[0];
            const float* sums = base + (which * COLUMNS + group) * WARPS * PARTIAL + lane / 4 * COLUMN + q * 4;
            float4 v = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (u32 j = 0; j < WARPS; j++) {
                const float4 p = *(const float4*)(sums + j * PARTIAL);
                v.x += p.x, v.y += p.y, v.z += p.z, v.w += p.w;
            }
#if KIND == 1
            const float4 up = {__shfl_xor_sync(~0u, v.x, 2), __shfl_xor_sync(~0u, v.y, 2), __shfl_xor_sync(~0u, v.z, 2), __shfl_xor_sync(~0u, v.w, 2)};
            if (q < 2 && to >= 0)
                *(uint2*)((u16*)a.out + to * a.out_stride + tile * 8 + q * 4) =
                    uint2{pack_bf16(silu(v.x) * up.x, silu(v.y) * up.y), pack_bf16(silu(v.z) * up.z, silu(v.w) * up.w)};
#elif KIND == 0
            if (to >= 0) {
                const u32 at = tile * 16 + q * 4;
                float4 b = {0.f, 0.f, 0.f, 0.f};
                if (a.bias) b = *(const float4*)(a.bias + at);
                *(uint2*)((u16*)a.out + to * a.out_stride + at) = uint2{pack_bf16(v.x + b.x, v.y + b.y), pack_bf16(v.z + b.z, v.w + b.w)};
            }
#else
            u64 at = to * a.out_stride + tile * 16 + q * 4;
#if !ITEMS
            at += (u64)(item % a.slices) * a.slice_stride;
#endif
            if (to >= 0) *(float4*)((float*)a.out + at) = v;
#endif
        }
    }
}
