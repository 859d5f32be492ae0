// What lies between QKV and attention, in place. `run`: rotation of queries and keys and the cache write, for rows of any sequences (prefill). Of ROWS rows a
// block has keys and values, and PARTS - 1 others a part of the queries each. Tokens lie side by side in the cache: keys of single ones are pieces of two bytes.
// `head_norm`: an rms norm over each head of queries and keys, before the rotation. A block a row.
// Compiled with: HEADS (all query heads), KV_HEADS, ROTARY, INTERLEAVED, FP8. Layouts as in attention.cu.

constexpr u32 DIM = 128, PAGE = 16, WIDTH = (HEADS + 2 * KV_HEADS) * DIM;
#if FP8
typedef u8 Cached;
#else
typedef u16 Cached;
#endif

constexpr u32 ROWS = 4, PARTS = 4;
extern "C" __global__ void __launch_bounds__(256) run(u16* qkv, const float* table, const int* positions, const int* slots, Cached* keys, Cached* values,
                                                     u8* scales, u32 rows) {
    __shared__ float cosines[ROWS * ROTARY];
    launch_next();
    wait_previous();
    const u32 thread = threadIdx.x, first_row = blockIdx.x * ROWS, count = min(ROWS, rows - first_row);
    u16* here = qkv + (u64)first_row * WIDTH;
    for (u32 i = thread; i < count * ROTARY; i += 256) cosines[i] = table[(u64)positions[first_row + i / ROTARY] * ROTARY + i % ROTARY];
    __syncthreads();
    constexpr u32 PAIRS = ROTARY / 2, AT_ONCE = 4;
    static_assert(PAIRS % AT_ONCE == 0);
    constexpr u32 SHARE = (HEADS + PARTS - 2) / (PARTS - 1);  // of the query heads
    const bool has_keys = blockIdx.y == 0;
    const u32 first_head = has_keys ? HEADS : (blockIdx.y - 1) * SHARE, last_head = has_keys ? HEADS + KV_HEADS : min(first_head + SHARE, HEADS);
    for (u32 i = thread * AT_ONCE; i < ROWS * (last_head - min(first_head, last_head)) * PAIRS; i += 256 * AT_ONCE) {
        const u32 p = i % PAIRS, r = i / PAIRS % ROWS, head = first_head + i / (PAIRS * ROWS);
        if (r >= count) continue;
        const float* turn = cosines + r * ROTARY + p;
        u16* at = here + r * WIDTH + head * DIM;
        u32 a[AT_ONCE], b[AT_ONCE];  // bits of bf16
#if INTERLEAVED
        uint4& both = *(uint4*)(at + p * 2);
        u32 words[AT_ONCE] = {both.x, both.y, both.z, both.w};
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) a[k] = words[k] & 0xffff, b[k] = words[k] >> 16;
#else
        uint2 &firsts = *(uint2*)(at + p), &seconds = *(uint2*)(at + p + PAIRS);
        const uint2 v = firsts, w = seconds;
        a[0] = v.x & 0xffff, a[1] = v.x >> 16, a[2] = v.y & 0xffff, a[3] = v.y >> 16;
        b[0] = w.x & 0xffff, b[1] = w.x >> 16, b[2] = w.y & 0xffff, b[3] = w.y >> 16;
#endif
        float first[AT_ONCE], second[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            const float x = bf16_float(a[k]), y = bf16_float(b[k]), c = turn[k], s = turn[PAIRS + k];
            first[k] = x * c - y * s, second[k] = y * c + x * s;
        }
#if INTERLEAVED
        both = uint4{pack_bf16(first[0], second[0]), pack_bf16(first[1], second[1]), pack_bf16(first[2], second[2]), pack_bf16(first[3], second[3])};
#else
        firsts = uint2{pack_bf16(first[0], first[1]), pack_bf16(first[2], first[3])};
        seconds = uint2{pack_bf16(second[0], second[1]), pack_bf16(second[2], second[3])};
#endif
    }
    if (!has_keys || !keys) return;
    __syncthreads();
#if FP8
    const u32 warp = thread / 32, lane = thread & 31;
    for (u32 h = warp; h < count * 2 * KV_HEADS; h += 8) {
        const u32 r = h / (2 * KV_HEADS), side = h / KV_HEADS % 2, head = h % KV_HEADS, to = (u32)slots[first_row + r], token = to % PAGE;
        const u64 block = (u64)(to / PAGE) * KV_HEADS + head, page = block * DIM * PAGE;
        const u16* from = here + r * WIDTH + (HEADS + side * KV_HEADS + head) * DIM;
        const u32 scale = scale_of(from, lane);
        u32 codes = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) codes |= (u32)to_code(from[lane * 4 + i], scale) << i * 8;
        if (side) *(u32*)(values + page + token * DIM + lane * 4) = codes;
        else
#pragma unroll
            for (u32 i = 0; i < 4; i++) keys[page + (lane * 4 + i) * PAGE + token] = (u8)(codes >> i * 8);
        if (lane == 0) scales[(block * 2 + side) * PAGE + token] = (u8)scale;
    }
#else
    const u32 slot = (u32)slots[first_row];
    // Whether the rows are four tokens of a page that lie side by side.
    bool is_run = count == ROWS && slot % ROWS == 0;
#pragma unroll
    for (u32 r = 1; r < ROWS; r++) is_run = is_run && (u32)slots[first_row + r] == slot + r;
    if (is_run) {
        const u64 page = (u64)(slot / PAGE) * KV_HEADS * DIM * PAGE;
        for (u32 i = thread; i < KV_HEADS * DIM; i += 256) {
            const u16* from = here + HEADS * DIM + i;
            *(uint2*)(keys + page + i * PAGE + slot % PAGE) =
                uint2{from[0] | (u32)from[WIDTH] << 16, from[2 * WIDTH] | (u32)from[3 * WIDTH] << 16};
        }
    } else
        for (u32 i = thread; i < count * KV_HEADS * DIM; i += 256) {
            const u32 r = i / (KV_HEADS * DIM), d = i % (KV_HEADS * DIM), to = (u32)slots[first_row + r];
            keys[(u64)(to / PAGE) * KV_HEADS * DIM * PAGE + d * PAGE + to % PAGE] = here[r * WIDTH + HEADS * DIM + d];
        }
    constexpr u32 CHUNKS = KV_HEADS * DIM / 8;  // of 16 bytes
    for (u32 i = thread; i < count * CHUNKS; i += 256) {
        const u32 r = i / CHUNKS, d = i % CHUNKS * 8, to = (u32)slots[first_row + r];
        const u64 page = (u64)(to / PAGE) * KV_HEADS * DIM * PAGE;
        *(uint4*)(values + page + (d / DIM * PAGE + to % PAGE) * DIM + d % DIM) = *(const uint4*)(here + r * WIDTH + (HEADS + KV_HEADS) * DIM + d);
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
