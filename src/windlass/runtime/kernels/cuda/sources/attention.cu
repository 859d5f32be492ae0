// Attention of one new token per sequence over a paged cache, split over the sequence: rotary, cache write, scores, values, combination.
// Block (split, kv head, sequence) of WARPS warps; a warp takes every WARPS-th page of 16 tokens of its split, DEPTH of them ahead. The last block of a
// (sequence, kv head) to arrive adds up the splits in their order, so results do not depend on who was last.
//
// Compiled with: HEADS (query heads of a kv head, at most 16), KV_HEADS, ROTARY (rotated dims), INTERLEAVED, WARPS (4 or 8), DEPTH, TOGETHER (blocks on a multiprocessor), FP8. Head dim is 128, pages 16
// tokens: keys [page, kv head, dim, token], values [page, kv head, token, dim], in bf16 or, with FP8, e4m3 with the exponent of a power of two for each token:
// scales [page, kv head, 2, token]. CHAINED: rows may be consecutive tokens of one sequence, up to CHAINED of them. Each row then takes the keys and values of
// those before it from qkv, as they are not in the cache yet. Codes become fp16 on their way to the tensor cores; powers of keys multiply scores, those of values are added to their logarithms.

constexpr u32 DIM = 128, PAGE = 16;
#ifndef CHAINED
#define CHAINED 0
#endif
constexpr u32 FRESH = CHAINED ? CHAINED : 1;  // new tokens that a row may see
#if FP8
typedef u8 Cached;
constexpr u32 SCALE_BYTES = 2 * PAGE;
#else
typedef u16 Cached;
constexpr u32 SCALE_BYTES = 0;
#endif
constexpr u32 PAGE_BYTES = DIM * PAGE * sizeof(Cached), STAGE_BYTES = 2 * PAGE_BYTES + SCALE_BYTES;
constexpr u32 Q_STRIDE = DIM * 2 + 16;  // bytes
constexpr u32 WIDTH = (HEADS + 2) * KV_HEADS * DIM;

struct Arguments {
    const u16* qkv;        // [sequences, WIDTH]
    const float* table;    // [positions, 2, ROTARY/2]: cos, sin
    const int* positions;  // [sequences]
    const int* slots;      // [sequences]
    const int* lengths;    // [sequences], the new token counted
    const int* blocks;     // [sequences, max_blocks]
    Cached* keys;
    Cached* values;
    u8* scales;
    u16* out;              // [sequences, HEADS * KV_HEADS * DIM]
    u32* codes;            // the same rounded to 8 bits instead, if not null, and
    float* steps;          // a scale for each head
    float* workspace;      // [sequences, KV_HEADS, splits, HEADS, DIM + 2]
    int* arrived;          // [sequences, KV_HEADS], zero between launches
    u32 max_blocks;
    float scale;
};

DEVICE void floats8(const u16* p, float (&v)[8]) {
    const uint4 w = __ldcg((const uint4*)p);
    v[0] = bf16_float(w.x), v[1] = __uint_as_float(w.x & 0xffff0000u), v[2] = bf16_float(w.y), v[3] = __uint_as_float(w.y & 0xffff0000u);
    v[4] = bf16_float(w.z), v[5] = __uint_as_float(w.z & 0xffff0000u), v[6] = bf16_float(w.w), v[7] = __uint_as_float(w.w & 0xffff0000u);
}
// Elements 8c .. 8c + 7 of a head after rotation; cosines, then sines, in shared memory.
DEVICE uint4 rotated8(const u16* head, const float* cosines, u32 c) {
    float v[8];
    floats8(head + c * 8, v);
    if (c * 8 < ROTARY) {
        const float* sines = cosines + ROTARY / 2;
#if INTERLEAVED
#pragma unroll
        for (u32 i = 0; i < 8; i += 2) {
            const float p = v[i], q = v[i + 1], co = cosines[c * 4 + i / 2], si = sines[c * 4 + i / 2];
            v[i] = p * co - q * si, v[i + 1] = q * co + p * si;
        }
#else
        constexpr u32 HALF = ROTARY / 16;
        float w[8];
        floats8(head + (c < HALF ? c + HALF : c - HALF) * 8, w);
        const u32 at = c % HALF * 8;
        const float sign = c < HALF ? -1.f : 1.f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[i] = v[i] * cosines[at + i] + sign * w[i] * sines[at + i];
#endif
    }
    return uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}
DEVICE void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEVICE void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEVICE float power2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#if FP8
DEVICE u32 pack_weights(float low, float high) { return pack_f16(low, high); }
DEVICE u32 shared_word(u32 address) {
    u32 r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}
DEVICE u32 pair_f16(u32 pair) { return pack_f16(bf16_float(pair), __uint_as_float(pair & 0xffff0000u)); }
// Four codes of two rows, two columns each, as transposed loads bring them: the first column's pair, then the second's.
DEVICE void codes_f16(u32 codes, u32& first, u32& second) {
    asm("{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, %2, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
        : "=r"(first), "=r"(second)
        : "r"(codes));
}
#else
DEVICE u32 pack_weights(float low, float high) { return pack_bf16(low, high); }
#endif
// Page -> shared memory by a warp, chunks of 16 bytes where loads of matrices have no bank conflicts.
DEVICE void fetch_page(u32 to, const Cached* keys, const Cached* values, const u8* scales, u32 lane) {
#if FP8
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 c = i * 32 + lane, t = c / 8;
        copy16(to + c * 16, keys + c * 16);
        copy16(to + PAGE_BYTES + t * 128 + ((c & 7) ^ (t / 2)) * 16, values + c * 16);
    }
    if (lane < 2) copy16(to + 2 * PAGE_BYTES + lane * 16, scales + lane * 16);
#else
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const u32 c = i * 32 + lane, d = c / 2, t = c / 16;
        copy16(to + d * 32 + ((c & 1) ^ ((d >> 2) & 1)) * 16, keys + c * 8);
        copy16(to + PAGE_BYTES + t * 256 + ((c & 15) ^ (t & 7)) * 16, values + c * 8);
    }
#endif
}
// Where element d of token t is in a page in shared memory.
DEVICE u32 key_place(u32 d, u32 t) {
#if FP8
    return d * 16 + t;
#else
    return d * 32 + ((t / 8) ^ ((d >> 2) & 1)) * 16 + t % 8 * 2;
#endif
}
DEVICE u32 value_place(u32 d, u32 t) {
#if FP8
    return PAGE_BYTES + t * 128 + ((d / 16) ^ (t / 2)) * 16 + d % 16;
#else
    return PAGE_BYTES + t * 256 + ((d / 8) ^ (t & 7)) * 16 + d % 8 * 2;
#endif
}
#if CHAINED
// A new token's key and value into its page in shared memory, by a warp.
DEVICE void put_fresh(u8* page, const u16* key, const u16* value, u32 t, u32 lane) {
#if FP8
    const u32 key_scale = scale_of(key, lane), value_scale = scale_of(value, lane);
    if (lane < 2) page[2 * PAGE_BYTES + lane * PAGE + t] = (u8)(lane ? value_scale : key_scale);
#endif
#pragma unroll
    for (u32 d = lane; d < DIM; d += 32) {
#if FP8
        page[key_place(d, t)] = to_code(key[d], key_scale), page[value_place(d, t)] = to_code(value[d], value_scale);
#else
        *(u16*)(page + key_place(d, t)) = key[d], *(u16*)(page + value_place(d, t)) = value[d];
#endif
    }
}
#endif
// Scores of a page's tokens: column n of tile i is token i * 8 + n, with FP8 n * 2 + i.
DEVICE void multiply_keys(float (&s)[2][4], const u32 (&q)[8][4], u32 keys, u32 lane) {
    float odd[2][4] = {};  // two chains of sums each
#if FP8
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        u32 c[4], first[4], second[4];
        load_transposed(c, keys + (k * 32 + lane) * 16);
#pragma unroll
        for (u32 i = 0; i < 4; i++) codes_f16(c[i], first[i], second[i]);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32(&a)[4] = q[k * 2 + h];
            multiply_f16(h ? odd[0] : s[0], a[0], a[1], a[2], a[3], first[h * 2], first[h * 2 + 1]);
            multiply_f16(h ? odd[1] : s[1], a[0], a[1], a[2], a[3], second[h * 2], second[h * 2 + 1]);
        }
    }
#else
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        u32 b[4];
        const u32 d = k * 16 + (lane & 15), half = lane / 16;
        load_transposed(b, keys + d * 32 + (half ^ ((d >> 2) & 1)) * 16);
        multiply(k & 1 ? odd[0] : s[0], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
        multiply(k & 1 ? odd[1] : s[1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
    }
#endif
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) s[i][j] += odd[i][j];
}
// Adds the weighted values: column n of o[i] is dim i * 8 + n, with FP8 i / 2 * 16 + n * 2 + i % 2.
DEVICE void add_values(float (&o)[16][4], const u32 (&p)[4], u32 values, u32 lane) {
#if FP8
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 c[4], first[4], second[4];
        const u32 token = (lane & 7) * 2 + (lane / 8 & 1), chunk = i * 2 + lane / 16;
        load_transposed(c, values + token * 128 + (chunk ^ (token / 2)) * 16);
#pragma unroll
        for (u32 j = 0; j < 4; j++) codes_f16(c[j], first[j], second[j]);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            multiply_f16(o[i * 4 + h * 2], p[0], p[1], p[2], p[3], first[h * 2], first[h * 2 + 1]);
            multiply_f16(o[i * 4 + h * 2 + 1], p[0], p[1], p[2], p[3], second[h * 2], second[h * 2 + 1]);
        }
    }
#else
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 b[4];
        const u32 token = lane & 15, chunk = i * 2 + lane / 16;
        load_transposed(b, values + token * 256 + (chunk ^ (token & 7)) * 16);
        multiply(o[i * 2], p[0], p[1], p[2], p[3], b[0], b[1]);
        multiply(o[i * 2 + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, TOGETHER) run(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];  // pages [WARPS][DEPTH][STAGE_BYTES], queries, warps' maxima and sums
    constexpr u32 PAGES_BYTES = WARPS * DEPTH * STAGE_BYTES, GATHERED_BYTES = WARPS * 16 * DIM * 4;
    u8* queries = memory + (PAGES_BYTES > GATHERED_BYTES ? PAGES_BYTES : GATHERED_BYTES);
    float* tops = (float*)(queries + 16 * Q_STRIDE);  // [WARPS][16], then sums [WARPS][16]
    __shared__ u32 is_last;
    __shared__ float cosines[FRESH * ROTARY];
    __shared__ __align__(16) u16 fresh[FRESH * 2][DIM];  // the new token's key and value, then those of the tokens before it
    const u32 split = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z, thread = thread_number(), warp = thread / 32, lane = thread & 31;
    launch_next();
    if (thread == 0) trace(8, 0);
    // Lengths, tables and all but the newest token of the cache were written in steps before this one: only qkv is waited for.
    const u32 length = (u32)__ldg(a.lengths + sequence), pages = (length + PAGE - 1) / PAGE;
    const u32 per = (pages + gridDim.x - 1) / gridDim.x, active = (pages + per - 1) / per;
    if (split >= active) return;
    const u32 first = split * per, last = min(first + per, pages);
    const u32 mine = shared_address(memory) + warp * DEPTH * STAGE_BYTES;
    const int* table = a.blocks + (u64)sequence * a.max_blocks;
    auto fetch = [&](u32 page, u32 buffer) {
        if (page < last) {
            const u64 at = (u64)(u32)__ldg(table + page) * KV_HEADS + head;
            fetch_page(mine + buffer * STAGE_BYTES, a.keys + at * DIM * PAGE, a.values + at * DIM * PAGE, a.scales + at * SCALE_BYTES, lane);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (u32 n = 0; n < DEPTH; n++) fetch(first + warp + n * WARPS, n);
    const u32 slot = (u32)__ldg(a.slots + sequence);
#if CHAINED
    // Row j before this one is j tokens before it in its sequence if it is written where this sequence has that token.
    bool is_linked = lane + 1 < CHAINED && lane < sequence && lane + 1 < length;
    if (is_linked) {
        const u32 token = length - 2 - lane;
        is_linked = (u32)__ldg(a.slots + sequence - 1 - lane) == (u32)__ldg(table + token / PAGE) * PAGE + token % PAGE;
    }
    const u32 before = __ffs(~__ballot_sync(~0u, is_linked)) - 1;
    for (u32 i = thread; i < (before + 1) * ROTARY; i += WARPS * 32)
        cosines[i] = __ldg(a.table + (u64)((u32)__ldg(a.positions + sequence) - i / ROTARY) * ROTARY + i % ROTARY);
#else
    if (thread < ROTARY) cosines[thread] = __ldg(a.table + (u64)__ldg(a.positions + sequence) * ROTARY + thread);
#endif
    for (u32 i = thread; i < (16 - HEADS) * (Q_STRIDE / 16); i += WARPS * 32) *(uint4*)(queries + HEADS * Q_STRIDE + i * 16) = uint4{0, 0, 0, 0};
    const u16* row = a.qkv + (u64)sequence * WIDTH;
    __syncthreads();
    wait_previous();
    if (thread == 0) trace(8, 1);

    const bool newest = split == active - 1;
    constexpr u32 CHUNKS = DIM / 8;
#if CHAINED
    for (u32 i = thread; i < (HEADS + 2 * before + 2) * CHUNKS; i += WARPS * 32) {
        const u32 h = i / CHUNKS, c = i % CHUNKS, kind = (h - HEADS) & 1, back = (h - HEADS) / 2, page = (length - 1 - back) / PAGE;
        const u16* of = row - (u64)back * WIDTH + ((HEADS + kind) * KV_HEADS + head) * DIM;
        if (h < HEADS) *(uint4*)(queries + h * Q_STRIDE + c * 16) = rotated8(row + (head * HEADS + h) * DIM, cosines, c);
        else if (page >= first && page < last)
            *(uint4*)(fresh[h - HEADS] + c * 8) = kind ? __ldcg((const uint4*)of + c) : rotated8(of, cosines + back * ROTARY, c);
    }
#else
#pragma unroll
    for (u32 r = 0; r < (HEADS * CHUNKS + 2 * CHUNKS + WARPS * 32 - 1) / (WARPS * 32); r++) {
        const u32 i = r * WARPS * 32 + thread, h = i / CHUNKS, c = i % CHUNKS;
        if (h < HEADS) *(uint4*)(queries + h * Q_STRIDE + c * 16) = rotated8(row + (head * HEADS + h) * DIM, cosines, c);
        else if (h == HEADS && newest) *(uint4*)(fresh[0] + c * 8) = rotated8(row + (HEADS * KV_HEADS + head) * DIM, cosines, c);
        else if (h == HEADS + 1 && newest) *(uint4*)(fresh[1] + c * 8) = __ldcg((const uint4*)(row + ((HEADS + 1) * KV_HEADS + head) * DIM) + c);
    }
    if (newest) asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
    __syncthreads();
    if (newest) {
        // Into the cache, and into the page where it has been fetched already.
        const u32 d = thread % DIM, t = slot % PAGE, place = pages - 1 - first;
        const u64 of_head = (u64)(slot / PAGE) * KV_HEADS + head, page = of_head * DIM * PAGE;
        const bool is_here = !CHAINED && place / WARPS < DEPTH;
        u8* at = memory + (place % WARPS * DEPTH + place / WARPS) * STAGE_BYTES;
#if FP8
        const u32 key_scale = scale_of(fresh[0], lane), value_scale = scale_of(fresh[1], lane);
        const u8 key = to_code(fresh[0][d], key_scale), value = to_code(fresh[1][d], value_scale);
        if (thread < 2) {
            const u8 scale = (u8)(thread ? value_scale : key_scale);
            a.scales[of_head * SCALE_BYTES + thread * PAGE + t] = scale;
            if (is_here) at[2 * PAGE_BYTES + thread * PAGE + t] = scale;
        }
#else
        const u16 key = fresh[0][d], value = fresh[1][d];
#endif
        a.keys[page + d * PAGE + t] = key;
        a.values[page + t * DIM + d] = value;
        if (is_here) *(Cached*)(at + key_place(d, t)) = key, *(Cached*)(at + value_place(d, t)) = value;
        if (!CHAINED && !is_here) __threadfence();  // a later fetch of this block reads it
        if (!CHAINED) __syncthreads();
    }

    u32 q[8][4];
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        load_matrices(q[k], shared_address(queries) + (lane & 15) * Q_STRIDE + k * 32 + (lane / 16) * 16);
#if FP8
#pragma unroll
        for (u32 i = 0; i < 4; i++) q[k][i] = pair_f16(q[k][i]);
#endif
    }

    float o[16][4] = {};
    float top[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f};
    const float scale = a.scale * 1.4426950408889634f;
    for (u32 page = first + warp, n = 0; page < last; page += WARPS, n++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
        __syncwarp();
        const u32 stage = mine + (n % DEPTH) * STAGE_BYTES;
#if CHAINED
        if (page * PAGE + PAGE + before >= length) {
            for (u32 token = max(page * PAGE, length - 1 - before); token < min(page * PAGE + PAGE, length); token++)
                put_fresh(memory + (warp * DEPTH + n % DEPTH) * STAGE_BYTES, fresh[(length - 1 - token) * 2], fresh[(length - 1 - token) * 2 + 1], token % PAGE, lane);
            __syncwarp();
        }
#endif
        float s[2][4] = {};
        multiply_keys(s, q, stage, lane);
        float high[2] = {-1e30f, -1e30f};
#if FP8
        // A lane's tokens are four in a row. P is in fp16: weights times powers of values have one maximum, so that none is out of range.
        float inverse[4];
        const u32 key_scales = shared_word(stage + 2 * PAGE_BYTES + (lane & 3) * 4), value_scales = shared_word(stage + 2 * PAGE_BYTES + PAGE + (lane & 3) * 4);
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            const u32 value_scale = value_scales >> t * 8 & 255;
            const float factor = scale * __uint_as_float((key_scales >> t * 8 & 255) << 23), raised = (float)value_scale - 127.f;
            inverse[t] = __uint_as_float((254 - value_scale) << 23);
            const bool is_seen = page * PAGE + (lane & 3) * 4 + t < length;
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                float& x = s[t & 1][r * 2 + t / 2];
                x = is_seen ? x * factor + raised : -1e30f;
                high[r] = fmaxf(high[r], x);
            }
        }
#else
#pragma unroll
        for (u32 i = 0; i < 2; i++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 token = page * PAGE + i * 8 + (lane & 3) * 2 + (j & 1);
                s[i][j] = token < length ? s[i][j] * scale : -1e30f;
                high[j / 2] = fmaxf(high[j / 2], s[i][j]);
            }
#endif
        bool changed = false;
        float rescale[2];
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 1));
            high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], 2));
            high[r] = fmaxf(high[r], top[r]);
            changed |= high[r] != top[r];
            rescale[r] = power2(top[r] - high[r]);
            top[r] = high[r];
            sum[r] *= rescale[r];
        }
        if (__any_sync(~0u, changed)) {
#pragma unroll
            for (u32 i = 0; i < 16; i++) o[i][0] *= rescale[0], o[i][1] *= rescale[0], o[i][2] *= rescale[1], o[i][3] *= rescale[1];
        }
        u32 p[4];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float e[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                e[j] = power2(s[i][j] - top[j / 2]);
#if FP8
                sum[j / 2] += e[j] * inverse[(j & 1) * 2 + i];
#else
                sum[j / 2] += e[j];
#endif
            }
            p[i * 2] = pack_weights(e[0], e[1]), p[i * 2 + 1] = pack_weights(e[2], e[3]);
        }
        add_values(o, p, stage + PAGE_BYTES, lane);
        __syncwarp();
        fetch(page + DEPTH * WARPS, n % DEPTH);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    // The warps' results over the pages' memory.
    float* gathered = (float*)memory;  // [WARPS][16][DIM]
    const u32 g = lane / 4, t = lane & 3;
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        if (t == 0) tops[warp * 16 + g + r * 8] = top[r], tops[(WARPS + warp) * 16 + g + r * 8] = sum[r];
        float* row = gathered + (warp * 16 + g + r * 8) * DIM;
#if FP8
#pragma unroll
        for (u32 i = 0; i < 16; i += 2) *(float4*)(row + i * 8 + t * 4) = float4{o[i][r * 2], o[i + 1][r * 2], o[i][r * 2 + 1], o[i + 1][r * 2 + 1]};
#else
#pragma unroll
        for (u32 i = 0; i < 16; i++) *(float2*)(row + i * 8 + t * 2) = float2{o[i][r * 2], o[i][r * 2 + 1]};
#endif
    }
    __syncthreads();
    const u64 group = (u64)sequence * KV_HEADS + head;
    constexpr u32 RECORD = HEADS * (DIM + 2), THREADS = WARPS * 32;
    float* to = a.workspace + (group * gridDim.x + split) * RECORD;
    // Results i .. i + 3 of the heads of this group, a head by each warp.
    auto store = [&](u32 i, const float4& v) {
        const u32 low = pack_bf16(v.x, v.y), high = pack_bf16(v.z, v.w);
        const u64 at = group * HEADS + i / DIM;
        if (a.codes) store_rounded(a.codes + at * (DIM / 4), a.steps + at, low, high, lane);
        else *(uint2*)(a.out + group * HEADS * DIM + i) = uint2{low, high};
    };
    float* factors = tops + 2 * WARPS * 16;  // [16][max(WARPS, 64)]
    // Each warp's share of the result, per head; or, with several splits, relative to the block's maximum.
    if (thread < HEADS) {
        const u32 h = thread;
        float best = tops[h], total = 0.f;
#pragma unroll
        for (u32 w = 1; w < WARPS; w++) best = fmaxf(best, tops[w * 16 + h]);
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) total += power2(tops[w * 16 + h] - best) * tops[(WARPS + w) * 16 + h];
        const float unit = active == 1 ? 1.f / total : 1.f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) factors[h * 64 + w] = power2(tops[w * 16 + h] - best) * unit;
        if (active > 1) to[HEADS * DIM + h * 2] = best, to[HEADS * DIM + h * 2 + 1] = total;
    }
    __syncthreads();
#pragma unroll
    for (u32 r = 0; r < (HEADS * DIM / 4 + THREADS - 1) / THREADS; r++) {
        const u32 i = (r * THREADS + thread) * 4, h = i / DIM;
        if (i >= HEADS * DIM) break;
        float4 v = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            const float f = factors[h * 64 + w];
            const float4 y = *(const float4*)(gathered + w * 16 * DIM + i);
            v.x += f * y.x, v.y += f * y.y, v.z += f * y.z, v.w += f * y.w;
        }
        if (active == 1) store(i, v);
        else *(float4*)(to + i) = v;
    }
    if (thread == 0) trace(8, 3);
    if (active == 1) return;
    __threadfence();
    __syncthreads();
    if (thread == 0) is_last = atomicAdd(a.arrived + group, 1) == (int)active - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (thread == 0) a.arrived[group] = 0;
    const float* from = a.workspace + group * gridDim.x * RECORD;
    for (u32 h = warp; h < HEADS; h += WARPS) {
        float top[2], sum[2], best = -1e30f;
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            const u32 s = j * 32 + lane;
            const float2 v = s < active ? __ldcg((const float2*)(from + s * RECORD + HEADS * DIM + h * 2)) : float2{-1e30f, 0.f};
            top[j] = v.x, sum[j] = v.y;
        }
        best = fmaxf(top[0], top[1]);
#pragma unroll
        for (int o = 16; o; o >>= 1) best = fmaxf(best, __shfl_xor_sync(~0u, best, o));
        top[0] = power2(top[0] - best), top[1] = power2(top[1] - best);
        const float unit = 1.f / warp_sum(top[0] * sum[0] + top[1] * sum[1]);
        factors[h * 64 + lane] = top[0] * unit, factors[h * 64 + 32 + lane] = top[1] * unit;
    }
    __syncthreads();
#pragma unroll
    for (u32 r = 0; r < (HEADS * DIM / 4 + THREADS - 1) / THREADS; r++) {
        const u32 i = (r * THREADS + thread) * 4, h = i / DIM;
        if (i >= HEADS * DIM) break;
        float4 v = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
        for (u32 s = 0; s < active; s++) {
            const float f = factors[h * 64 + s];
            const float4 y = __ldcg((const float4*)(from + s * RECORD + i));
            v.x += f * y.x, v.y += f * y.y, v.z += f * y.z, v.w += f * y.w;
        }
        store(i, v);
    }
}
