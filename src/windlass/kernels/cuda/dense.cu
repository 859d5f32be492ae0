// 9 to 64 rows of activations against one 4-bit matrix: a block takes 8 tiles (128 rows of weights), every row of x and a slice of the inputs.
// 8 consumer warps as 4 x 2: each 2 tiles of weights against half of the rows of x, so that both are read from shared memory twice or less.
//
// Compiled with: KIND (0 to bf16 with bias, 2 fp32 partial results of slices), COLUMNS (tiles of 8 rows of x: 2, 4 or 8), STAGES,
// STAGE_BLOCKS (along the inputs, of each tile).

constexpr u32 CONSUMERS = 256, LOADERS = 128, TILES = 8, HALF = COLUMNS / 2;
constexpr u32 X_STRIDE = STAGE_BLOCKS * BLOCK_K * 2 + 16;  // bytes: no two lanes of a quarter share a bank
constexpr u32 TILE_BYTES = STAGE_BLOCKS * BLOCK_BYTES, WEIGHT_BYTES = TILES * TILE_BYTES, X_BYTES = COLUMNS * 8 * X_STRIDE, STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr u32 OUT_STRIDE = TILES * 16 + 4;  // floats

struct Arguments {
    const u8* weights;
    const u16* x;
    const float* bias;
    void* out;
    u64 tile_stride;   // bytes
    u64 out_stride;    // elements between rows of out
    u64 slice_stride;  // elements between slices' results
    u32 x_stride;      // elements
    u32 tiles;         // of the matrix
    u32 slices;
    u32 slice_blocks;
    u32 rows;          // of x
};

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32 + LOADERS) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u64* barriers = (u64*)(memory + STAGES * STAGE_BYTES);
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, ring_at = shared_address(memory);
    const u32 thread = thread_number(), warp = thread / 32, lane = thread & 31;
    const u32 slice = blockIdx.x % a.slices, first = blockIdx.x / a.slices * TILES;
    const u32 present = min(TILES, a.tiles - first);
    if (thread == CONSUMERS) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1 + LOADERS), barrier_init(empty + i * 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Rows of x that are not there are zero in every stage; copies leave them alone.
    const u32 absent = (COLUMNS * 8 - a.rows) * (X_STRIDE / 16), stages = a.slice_blocks / STAGE_BLOCKS;
    for (u32 i = thread; i < STAGES * absent; i += blockDim.x)
        *(uint4*)(memory + i / absent * STAGE_BYTES + WEIGHT_BYTES + a.rows * X_STRIDE + i % absent * 16) = uint4{0, 0, 0, 0};
    __syncthreads();
    launch_next();

    if (warp == 8) {
        const u64 policy = read_once_policy();
        const u8* source = a.weights + (u64)(first + lane) * a.tile_stride + (u64)slice * a.slice_blocks * BLOCK_BYTES;
        for (u32 s = 0, stage = 0, phase = 1; s < stages; s++) {
            barrier_wait(empty + stage * 8, phase);
            if (lane == 0) barrier_expect(full + stage * 8, present * TILE_BYTES);
            __syncwarp();
            if (lane < present) bulk_copy(ring_at + stage * STAGE_BYTES + lane * TILE_BYTES, source + (u64)s * TILE_BYTES, TILE_BYTES, full + stage * 8, policy);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        return;
    }
    if (warp > 8) {
        wait_previous();
        const u32 number = thread - CONSUMERS - 32;
        constexpr u32 CHUNKS = STAGE_BLOCKS * BLOCK_K / 8;
        const u16* source = a.x + (u64)(number / CHUNKS) * a.x_stride + slice * a.slice_blocks * BLOCK_K + number % CHUNKS * 8;
        const u32 to = WEIGHT_BYTES + number / CHUNKS * X_STRIDE + number % CHUNKS * 16;
        for (u32 s = 0, stage = 0, phase = 1; s < stages; s++) {
            barrier_wait(empty + stage * 8, phase);
            const u32 at = ring_at + stage * STAGE_BYTES + to;
#pragma unroll 8
            for (u32 r = 0; r < COLUMNS * 8 * CHUNKS / LOADERS; r++)
                if (number / CHUNKS + r * (LOADERS / CHUNKS) < a.rows)
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + r * (LOADERS / CHUNKS) * X_STRIDE),
                                 "l"(source + (u64)r * (LOADERS / CHUNKS) * a.x_stride + s * STAGE_BLOCKS * BLOCK_K)
                                 : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + stage * 8) : "memory");
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        return;
    }

    wait_previous();
    const u32 wm = warp / 2, wn = warp & 1;
    float acc[2][HALF][4] = {};
    u32 stage = 0, phase = 0;
    for (u32 s = 0; s < stages; s++) {
        barrier_wait(full + stage * 8, phase);
#pragma unroll 1
        for (u32 b = 0; b < STAGE_BLOCKS; b++) {
            const u8* weights = memory + stage * STAGE_BYTES + wm * 2 * TILE_BYTES + b * BLOCK_BYTES;
            const u8* x_at = memory + stage * STAGE_BYTES + WEIGHT_BYTES + (wn * HALF * 8 + lane / 4) * X_STRIDE + b * BLOCK_K * 2 + (lane & 3) * 32;
            float c[2][HALF][4] = {};
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint4 q[2] = {*(const uint4*)(weights + half * 512 + lane * 16), *(const uint4*)(weights + TILE_BYTES + half * 512 + lane * 16)};
#pragma unroll
                for (u32 part = 0; part < 2; part++) {
                    uint4 x[HALF];
#pragma unroll
                    for (u32 n = 0; n < HALF; n++) x[n] = *(const uint4*)(x_at + n * 8 * X_STRIDE + half * 128 + part * 16);
#pragma unroll
                    for (u32 m = 0; m < 2; m++) {
                        const u32 v = part ? q[m].z : q[m].x, w = part ? q[m].w : q[m].y;
                        u32 f[8];
#pragma unroll
                        for (u32 i = 0; i < 4; i++) f[i] = codes_bf16(v >> (4 * i)), f[4 + i] = codes_bf16(w >> (4 * i));
#if GROUP != 128
                        // Groups smaller than a block: codes take their scale here.
                        const u32 scale = *(const u32*)(weights + m * TILE_BYTES + CODE_BYTES + (half * 64 + (lane & 3) * 16) / GROUP * 32 + lane / 4 * 4);
                        const u32 low = __byte_perm(scale, scale, 0x1010), high = __byte_perm(scale, scale, 0x3232);
#pragma unroll
                        for (u32 i = 0; i < 8; i++) asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(f[i]) : "r"(i & 1 ? high : low));
#endif
#pragma unroll
                        for (u32 n = 0; n < HALF; n++) multiply(c[m][n], f[0], f[1], f[2], f[3], x[n].x, x[n].y);
#pragma unroll
                        for (u32 n = 0; n < HALF; n++) multiply(c[m][n], f[4], f[5], f[6], f[7], x[n].z, x[n].w);
                    }
                }
            }
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                float low = 1.f, high = 1.f;
#if GROUP == 128
                const u32 scale = *(const u32*)(weights + m * TILE_BYTES + CODE_BYTES + lane / 4 * 4);
                low = bf16_float(scale), high = __uint_as_float(scale & 0xffff0000u);
#endif
#pragma unroll
                for (u32 n = 0; n < HALF; n++) {
                    acc[m][n][0] += low * c[m][n][0], acc[m][n][1] += low * c[m][n][1];
                    acc[m][n][2] += high * c[m][n][2], acc[m][n][3] += high * c[m][n][3];
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage * 8);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    // Through shared memory, so that rows of out are written in one piece.
    named_barrier(1, CONSUMERS);
    float* result = (float*)memory;  // [COLUMNS * 8][OUT_STRIDE]
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 n = 0; n < HALF; n++) {
            float* to = result + ((wn * HALF + n) * 8 + (lane & 3) * 2) * OUT_STRIDE + (wm * 2 + m) * 16 + lane / 4;
            to[0] = acc[m][n][0], to[OUT_STRIDE] = acc[m][n][1], to[8] = acc[m][n][2], to[OUT_STRIDE + 8] = acc[m][n][3];
        }
    named_barrier(1, CONSUMERS);
    for (u32 i = thread; i < a.rows * TILES * 4; i += CONSUMERS) {
        const u32 row = i / (TILES * 4), at = i % (TILES * 4) * 4, out_row = first * 16 + at;
        if (at >= present * 16) continue;
        const float4 v = *(const float4*)(result + row * OUT_STRIDE + at);
#if KIND == 0
        float4 b = {0.f, 0.f, 0.f, 0.f};
        if (a.bias) b = *(const float4*)(a.bias + out_row);
        *(uint2*)((u16*)a.out + row * a.out_stride + out_row) = uint2{pack_bf16(v.x + b.x, v.y + b.y), pack_bf16(v.z + b.z, v.w + b.w)};
#else
        *(float4*)((float*)a.out + slice * a.slice_stride + row * a.out_stride + out_row) = v;
#endif
    }
}
