// What lies between QKV and attention, in place. `run`: rotation of queries and keys and the cache write, for rows of any sequences (prefill).
// `head_norm`: an rms norm over each head of queries and keys, before the rotation. A block a row.
// Compiled with: HEADS (all query heads), KV_HEADS, ROTARY, INTERLEAVED. Layouts as in attention.cu.

constexpr u32 DIM = 128, PAGE = 16, WIDTH = (HEADS + 2 * KV_HEADS) * DIM;

extern "C" __global__ void __launch_bounds__(256) run(u16* qkv, const float* table, const int* positions, const int* slots, u16* keys, u16* values) {
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
    const u64 page = (u64)(slot / PAGE) * KV_HEADS * DIM * PAGE;
    for (u32 i = thread; i < KV_HEADS * DIM; i += 256) {
        keys[page + (u64)i * PAGE + slot % PAGE] = row[HEADS * DIM + i];
        values[page + (u64)(i / DIM * PAGE + slot % PAGE) * DIM + i % DIM] = row[(HEADS + KV_HEADS) * DIM + i];
    }
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
