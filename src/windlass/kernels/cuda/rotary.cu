// Rotation of queries and keys in place, and the cache write, for rows of any sequences: what prefill does between QKV and attention.
// A block a row. Compiled with: HEADS (all query heads), KV_HEADS, ROTARY, INTERLEAVED. Layouts as in attention.cu.

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
