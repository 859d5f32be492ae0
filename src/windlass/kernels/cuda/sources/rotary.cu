// What lies between QKV and attention, in place. `run`: rotation of queries and keys and the cache write, for rows of any sequences (prefill).
// `head_norm`: an rms norm over each head of queries and keys, before the rotation. A block a row.
// Compiled with: HEADS (all query heads), KV_HEADS, ROTARY, INTERLEAVED, FP8. Layouts as in attention.cu.

constexpr u32 DIM = 128, PAGE = 16, WIDTH = (HEADS + 2 * KV_HEADS) * DIM;
#if FP8
typedef u8 Cached;
#else
typedef u16 Cached;
#endif

extern "C" __global__ void __launch_bounds__(256) run(u16* qkv, const float* table, const int* positions, const int* slots, Cached* keys, Cached* values,
                                                     u8* scales) {
    __shared__ float cosines[ROTARY];
    launch_next();
    wait_previous();
    const u32 thread = threadIdx.x;
    u16* row = qkv + (u64)blockIdx.x * WIDTH;
    if (thread < ROTARY) cosines[thread] = table[(u64)positions[blockIdx.x] * ROTARY + thread];
    const u32 slot = (u32)slots[blockIdx.x];
    __syncthreads();
    constexpr u32 PAIRS = ROTARY / 2;
    for (u32 i = thread; i < (HEADS + KV_HEADS) * PAIRS; i += 256) {
        const u32 head = i / PAIRS, p = i % PAIRS;
#if INTERLEAVED
        const u32 first = p * 2, second = first + 1;
#else
        const u32 first = p, second = p + PAIRS;
#endif
        u16* at = row + head * DIM;
        const float a = bf16_float(at[first]), b = bf16_float(at[second]), c = cosines[p], s = cosines[PAIRS + p];
        at[first] = to_bf16(a * c - b * s), at[second] = to_bf16(b * c + a * s);
    }
    if (!keys) return;
    __syncthreads();
    const u64 block = (u64)(slot / PAGE) * KV_HEADS, page = block * DIM * PAGE;
#if FP8
    const u32 warp = thread / 32, lane = thread & 31, token = slot % PAGE;
    for (u32 h = warp; h < 2 * KV_HEADS; h += 8) {
        const u32 head = h % KV_HEADS, side = h / KV_HEADS;
        const u16* from = row + (HEADS + h) * DIM;
        const u32 scale = scale_of(from, lane);
        u32 codes = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) codes |= (u32)to_code(from[lane * 4 + i], scale) << i * 8;
        if (side) *(u32*)(values + page + ((u64)head * PAGE + token) * DIM + lane * 4) = codes;
        else
#pragma unroll
            for (u32 i = 0; i < 4; i++) keys[page + ((u64)head * DIM + lane * 4 + i) * PAGE + token] = (u8)(codes >> i * 8);
        if (lane == 0) scales[((block + head) * 2 + side) * PAGE + token] = (u8)scale;
    }
#else
    for (u32 i = thread; i < KV_HEADS * DIM; i += 256) {
        keys[page + (u64)i * PAGE + slot % PAGE] = row[HEADS * DIM + i];
        values[page + (u64)(i / DIM * PAGE + slot % PAGE) * DIM + i % DIM] = row[(HEADS + KV_HEADS) * DIM + i];
    }
#endif
}

extern "C" __global__ void __launch_bounds__(256) head_norm(u16* qkv, const float* q_norm, const float* k_norm, float eps) {
    launch_next();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const float4 q = *(const float4*)(q_norm + lane * 4), k = *(const float4*)(k_norm + lane * 4);
    wait_previous();
    u16* row = qkv + (u64)blockIdx.x * WIDTH;
    for (u32 head = warp + blockIdx.y * 8; head < HEADS + KV_HEADS; head += 8 * gridDim.y) {
        uint2* at = (uint2*)(row + head * DIM) + lane;
        const uint2 v = __ldcg(at);
        const float a = bf16_float(v.x), b = __uint_as_float(v.x & 0xffff0000u), c = bf16_float(v.y), d = __uint_as_float(v.y & 0xffff0000u);
        const float r = rsqrtf(warp_sum(a * a + b * b + c * c + d * d) / DIM + eps);
        const float4 w = head < HEADS ? q : k;
        *at = uint2{pack_bf16(a * r * w.x, b * r * w.y), pack_bf16(c * r * w.z, d * r * w.w)};
    }
}
