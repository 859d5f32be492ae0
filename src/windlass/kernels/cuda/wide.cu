// Many rows of activations against 4-bit weights on Hopper's warpgroup products: a unit is 128 or 256 rows of weights against up to N rows of x.
// Weights become bf16 in registers (the left operand): codes as they are with EXACT, which is for few rows, else times their scale and rounded;
// x comes from shared memory (the right one). Two warpgroups of 64 or 128 rows each
// (what is read of x per product is what limits large units: the more rows of weights see it the better); a third one
// streams weights by bulk copies and gathers rows of x, and runs ahead into the next unit while the others write results.
//
// Compiled with: EXACT (needs DEEP 1), KIND (0 bf16 with bias, 1 gate and up, 2 fp32 partial results of slices, 3 bf16), N (64, 128, 160 or 256), DEEP (1 or 2: 64 rows
// of weights of a warpgroup), STAGES, STAGE_BLOCKS (along the
// inputs), ITEMS (1: items of up to N rows that share an expert, from a list; 0: blocks of N rows, slices of the inputs).

constexpr u32 CONSUMERS = 256, LOADERS = 128, TILES = 8 * DEEP, LAG = STAGES > 3 ? 2 : 1;
constexpr u32 TILE_BYTES = STAGE_BLOCKS * BLOCK_BYTES, HALF_BYTES = N * 128, X_BYTES = STAGE_BLOCKS * 2 * HALF_BYTES;
constexpr u32 STAGE_BYTES = X_BYTES + (TILES * TILE_BYTES + 1023) / 1024 * 1024;

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

DEVICE void product(float (&c)[N / 2], const u32* f, u64 b, u32 add) {
#if N == 256
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %133, 0;"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "{%128, %129, %130, %131}, %132, p, 1, 1, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
          "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]),
          "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]),
          "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]),
          "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]),
          "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]),
          "+f"(c[96]), "+f"(c[97]), "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]),
          "+f"(c[104]), "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]), "+f"(c[110]), "+f"(c[111]),
          "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]), "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]),
          "+f"(c[120]), "+f"(c[121]), "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
        : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(b), "r"(add));
#elif N == 160
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %85, 0;"
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, "
        "{%80, %81, %82, %83}, %84, p, 1, 1, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
          "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]),
          "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]),
          "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79])
        : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(b), "r"(add));
#elif N == 64
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(b), "r"(add));
#else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
          "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(b), "r"(add));
#endif
}
// Rows of 128 bytes, eight to a swizzled kilobyte.
DEVICE u64 descriptor(u32 address) { return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE u32 transposed(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

struct Unit {
    u32 item, first, slice;  // item or block of rows, first tile
    const u8* weights;
};
DEVICE Unit unit_of(const Arguments& a, u32 unit, u32 groups) {
    Unit r;
#if ITEMS
    r.item = unit / groups, r.first = unit % groups * TILES, r.slice = 0;
    r.weights = a.weights + (u64)__ldcg(a.item_expert + r.item) * a.expert_stride + r.first * a.tile_stride;
#else
    // Units side by side take all of the weights against few rows: x, which may be larger than the cache, is read once.
    r.first = unit % groups * TILES, r.slice = unit / groups % a.slices, r.item = unit / groups / a.slices;
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

extern "C" __global__ void __launch_bounds__(CONSUMERS + LOADERS, 1) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    u64* barriers = (u64*)(memory + STAGES * STAGE_BYTES);
    int* rows = (int*)(barriers + 2 * STAGES);  // [N]: of x, of the unit that is being loaded
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
        for (u32 u = blockIdx.x; u < units; u += gridDim.x) {
            const Unit unit = unit_of(a, u, groups);
            const u32 present = min(TILES, a.tiles - unit.first);
            named_barrier(2, LOADERS);
            for (u32 n = number; n < N; n += LOADERS) rows[n] = column(a, a.item_rows, unit.item, n);
            named_barrier(2, LOADERS);
            for (u32 s = 0; s < stages; s++) {
                barrier_wait(empty + stage * 8, phase);
                const u32 at = ring_at + stage * STAGE_BYTES;
                if (warp == 8) {
                    if (lane == 0) barrier_expect(full + stage * 8, present * TILE_BYTES);
                    __syncwarp();
                    if (lane < present)
                        bulk_copy(at + X_BYTES + lane * TILE_BYTES, unit.weights + lane * a.tile_stride + (u64)s * TILE_BYTES, TILE_BYTES, full + stage * 8, policy);
                }
                if (!waited) wait_previous(), waited = true;
                const u16* source = a.x + (unit.slice * a.slice_blocks + s * STAGE_BLOCKS) * BLOCK_K + chunk * 8;
#pragma unroll
                for (u32 i = 0; i < N / 16; i++) {
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
#if EXACT
        // Scales multiply the sums of a group, in fp32.
        float acc[1][N / 2] = {};
        for (u32 s = 0; s < stages; s++) {
            barrier_wait(full + stage * 8, phase);
#pragma unroll 1
            for (u32 b = 0; b < STAGE_BLOCKS; b++) {
                const u8* weights = memory + stage * STAGE_BYTES + X_BYTES + warp * TILE_BYTES + b * BLOCK_BYTES;
                const u64 x = descriptor(ring_at + stage * STAGE_BYTES + b * 2 * HALF_BYTES);
                const uint4 q0 = *(const uint4*)(weights + lane * 16), q1 = *(const uint4*)(weights + 512 + lane * 16);
                const u32 words[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
                float c[N / 2];
                u32 f[8][4];
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
#pragma unroll
                        for (u32 j = 0; j < 4; j++) f[half * 4 + i][j] = codes_bf16(words[half * 4 + i] >> (4 * j));
#if GROUP != 128
                        const u32 scale = *(const u32*)(weights + CODE_BYTES + (half * 64 + i * 16) / GROUP * 32 + g * 4);
#pragma unroll
                        for (u32 j = 0; j < 4; j++)
                            asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(f[half * 4 + i][j]) : "r"(__byte_perm(scale, scale, j & 1 ? 0x3232 : 0x1010)));
#endif
                    }
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (u32 i = 0; i < 4; i++) product(c, f[half * 4 + i], x + half * (HALF_BYTES >> 4) + i * 2, half + i > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                }
                float low = 1.f, high = 1.f;
#if GROUP == 128
                const u32 scale = *(const u32*)(weights + CODE_BYTES + g * 4);
                low = bf16_float(scale), high = __uint_as_float(scale & 0xffff0000u);
#endif
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (u32 i = 0; i < N / 2; i++) acc[0][i] += (i & 2 ? high : low) * c[i];
            }
            if (lane == 0) barrier_arrive(empty + stage * 8);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
#else
        float acc[DEEP][N / 2];
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
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (b == 0 && turn == 1 && s > 0 && lane == 0) barrier_arrive(empty + last * 8);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 scale = *(const u32*)(weights + CODE_BYTES + (half * 64 + i * 16) / GROUP * 32 + g * 4);
                        const u32 low = __byte_perm(scale, scale, 0x1010), high = __byte_perm(scale, scale, 0x3232);
#pragma unroll
                        for (u32 j = 0; j < 4; j++)
                            asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(f[turn & 1][i][j]) : "r"(codes_bf16(words[i] >> (4 * j))), "r"(j & 1 ? high : low));
                    }
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (u32 i = 0; i < 4; i++) product(acc[m], f[turn & 1][i], x + half * (HALF_BYTES >> 4) + i * 2, s + b + half + i > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                }
            }
            last = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) barrier_arrive(empty + last * 8);
#endif
#pragma unroll
        for (u32 m = 0; m < DEEP; m++) {
        const u32 tile = unit.first + warp / 4 * DEEP * 4 + m * 4 + warp % 4;
        if (tile >= a.tiles) continue;
#if KIND == 2
#pragma unroll
        for (u32 i = 0; i < N / 8; i++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                const int place = column(a, a.item_places, unit.item, i * 8 + t * 2 + j);
                if (place < 0) continue;
                float* to = (float*)a.out + unit.slice * a.slice_stride + place * a.out_stride + tile * 16 + g;
                to[0] = acc[m][i * 4 + j], to[8] = acc[m][i * 4 + 2 + j];
            }
#else
        // Transposed in registers: lane (g, t) then has rows 2t and 2t + 1 of column g.
        float low = 0.f, high = 0.f;
        if (KIND == 0 && a.bias) low = a.bias[tile * 16 + g], high = a.bias[tile * 16 + 8 + g];
#pragma unroll
        for (u32 i = 0; i < N / 8; i++) {
            const float* v = acc[m] + i * 4;
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
    }
}
