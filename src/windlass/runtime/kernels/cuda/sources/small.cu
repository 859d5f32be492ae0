// Small kernels around the matmuls: repacking of 4-bit weights, router logits, routing and dispatch of many rows,
// sums with norm, and one row against bf16 weights.

// ---- repack: int32 codes [rows, inputs/8] in order and bf16 scales [rows, inputs/GROUP] to blocks of 16 rows x 128 inputs.
// One warp a block. pair_rows: of each matrix of `rows` rows a tile takes 8 of the first half and 8 of the second (gate and up).
extern "C" __global__ void repack(const u32* codes, const u16* scales, u8* out, u32 rows, u32 inputs, u32 tile_blocks, u32 pair_rows, u64 blocks) {
    const u64 block = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (block >= blocks) return;
    const u32 lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    const u64 tile = block / tile_blocks;
    const u32 k = (u32)(block % tile_blocks) * BLOCK_K, tiles = rows / 16;
    const u64 matrix = tile / tiles;
    const u32 r = (u32)(tile % tiles);
    auto source_row = [&](u32 i) -> u64 { return matrix * rows + (pair_rows ? (i < 8 ? r * 8 + i : rows / 2 + r * 8 + i - 8) : r * 16 + i); };
    u8* to = out + block * BLOCK_BYTES;
    const u64 low = source_row(g), high = source_row(g + 8);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 at = k + half * 64;
        u32 word[4];
#pragma unroll
        for (u32 s = 0; s < 4; s++) {
            uint2 p = {0x88888888u, 0x88888888u}, q = p;
            if (at + s * 16 < inputs) {
                p = *(const uint2*)(codes + (low * inputs + at) / 8 + s * 2);
                q = *(const uint2*)(codes + (high * inputs + at) / 8 + s * 2);
            }
            const u32 v = (p.x >> t * 8 & 0xff) | (p.y >> t * 8 & 0xff) << 8, w = (q.x >> t * 8 & 0xff) | (q.y >> t * 8 & 0xff) << 8;
            word[s] = (v & 0x0f0f) | (v & 0xf0f0) << 12 | ((w & 0x0f0f) | (w & 0xf0f0) << 12) << 4;
        }
        *(uint4*)(to + half * 512 + lane * 16) = uint4{word[0], word[1], word[2], word[3]};
    }
    for (u32 i = lane; i < GROUPS * 16; i += 32) {
        const u32 group = k / GROUP + i / 16;
        const u32 j = i % 16;  // row g beside row g + 8
        ((u16*)(to + CODE_BYTES))[i] = group * GROUP < inputs ? scales[source_row(j / 2 + (j & 1) * 8) * (inputs / GROUP) + group] : (u16)0;
    }
}

// ---- router logits of ROUTED rows (1 to 4): norm and dot product in one pass. One block an expert, 256 threads; PARTS thousands (1,024) of inputs.
#ifndef PARTS
#define PARTS 4
#endif
#ifndef ROUTED
#define ROUTED 1
#endif
extern "C" __global__ void __launch_bounds__(256) router_few(const float* x, const float* norm, const float* weight, float* logits, u32 inputs, float eps) {
    __shared__ float sums[ROUTED][16];
    launch_next();
    if (threadIdx.x == 0) trace(9, 0);
    const float* row = weight + (u64)blockIdx.x * inputs;
    float4 w[PARTS];
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        const u32 k = (i * 256 + threadIdx.x) * 4;
        w[i] = float4{0.f, 0.f, 0.f, 0.f};
        if (k < inputs) {
            const float4 n = *(const float4*)(norm + k), v = *(const float4*)(row + k);
            w[i] = float4{n.x * v.x, n.y * v.y, n.z * v.z, n.w * v.w};
        }
    }
    wait_previous();
    if (threadIdx.x == 0) trace(9, 1);
    float square[ROUTED] = {}, dot[ROUTED] = {};
#pragma unroll
    for (u32 i = 0; i < PARTS * ROUTED; i++) {
        const u32 k = (i / ROUTED * 256 + threadIdx.x) * 4, r = i % ROUTED;
        const float4 v = w[i / ROUTED];
        if (k < inputs) {
            const float4 h = __ldcg((const float4*)(x + r * inputs + k));
            square[r] += h.x * h.x + h.y * h.y + h.z * h.z + h.w * h.w;
            dot[r] += h.x * v.x + h.y * v.y + h.z * v.z + h.w * v.w;
        }
    }
#pragma unroll
    for (u32 r = 0; r < ROUTED; r++) {
        square[r] = warp_sum(square[r]), dot[r] = warp_sum(dot[r]);
        if ((threadIdx.x & 31) == 0) sums[r][threadIdx.x / 32] = square[r], sums[r][8 + threadIdx.x / 32] = dot[r];
    }
    __syncthreads();
    if (threadIdx.x < ROUTED) {
        float all = 0.f, total = 0.f;
        for (u32 i = 0; i < 8; i++) all += sums[threadIdx.x][i], total += sums[threadIdx.x][8 + i];
        logits[threadIdx.x * gridDim.x + blockIdx.x] = total * rsqrtf(all / inputs + eps);
        if (threadIdx.x == 0) trace(9, 3);
    }
}

template <u32 WIDTH>
DEVICE void exchange(float (&acc)[32], u32 lane) {
    const bool upper = lane & WIDTH;
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) {
        const float keep = upper ? acc[i + WIDTH] : acc[i], give = upper ? acc[i] : acc[i + WIDTH];
        acc[i] = keep + __shfl_xor_sync(~0u, give, WIDTH);
    }
}

// ---- router logits of many rows: x bf16 [rows, inputs], weight fp32 [experts, inputs]. A block: 8 rows x 4 experts, its threads share the
// inputs, PARTS thousands of them, held in registers. As many blocks more: logits of the next layer's router with the same rows, whose inputs are to be multiplied by `scale`.
extern "C" __global__ void __launch_bounds__(256) router_many(const u16* x, const float* weight, float* logits, const float* next_weight, const float* scale, float* next_logits,
                                                              u32 inputs, u32 rows, u32 experts) {
    __shared__ float sums[8][32];
    launch_next();
    const bool is_next = blockIdx.x >= experts / 4;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, expert = blockIdx.x * 4 - (is_next ? experts : 0), first = blockIdx.y * 8;
    if (is_next) weight = next_weight, logits = next_logits;
    float4 w[PARTS][4];
#pragma unroll
    for (u32 i = 0; i < PARTS; i++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const u32 k = (i * 256 + threadIdx.x) * 4;
            w[i][e] = k < inputs ? *(const float4*)(weight + (u64)(expert + e) * inputs + k) : float4{0.f, 0.f, 0.f, 0.f};
        }
    if (is_next) {
#pragma unroll
        for (u32 i = 0; i < PARTS; i++) {
            const u32 k = (i * 256 + threadIdx.x) * 4;
            const float4 s = k < inputs ? *(const float4*)(scale + k) : float4{0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (u32 e = 0; e < 4; e++) w[i][e] = float4{w[i][e].x * s.x, w[i][e].y * s.y, w[i][e].z * s.z, w[i][e].w * s.w};
        }
    }
    wait_previous();
    float acc[32];
#pragma unroll
    for (u32 r = 0; r < 8; r++) {
        float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (u32 i = 0; i < PARTS; i++) {
            const u32 k = (i * 256 + threadIdx.x) * 4;
            uint2 v = {0, 0};
            if (first + r < rows && k < inputs) v = __ldcg((const uint2*)(x + (u64)(first + r) * inputs + k));
            const float a = bf16_float(v.x), b = __uint_as_float(v.x & 0xffff0000u), c = bf16_float(v.y), d = __uint_as_float(v.y & 0xffff0000u);
#pragma unroll
            for (u32 e = 0; e < 4; e++) s[e] += a * w[i][e].x + b * w[i][e].y + c * w[i][e].z + d * w[i][e].w;
        }
#pragma unroll
        for (u32 e = 0; e < 4; e++) acc[r * 4 + e] = s[e];
    }
    // 32 sums over 32 lanes: each exchange halves what a lane has left; lane l ends with sum l.
    exchange<16>(acc, lane);
    exchange<8>(acc, lane);
    exchange<4>(acc, lane);
    exchange<2>(acc, lane);
    exchange<1>(acc, lane);
    sums[warp][lane] = acc[0];
    __syncthreads();
    if (warp == 0) {
        float total = 0.f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) total += sums[i][lane];
        const u32 row = first + lane / 4;
        if (row < rows) logits[(u64)row * experts + expert + lane % 4] = total;
    }
}

// ---- choice of experts alone, any number of rows: a warp each.
#ifndef EXPERTS
#define EXPERTS 128
#endif
#ifndef LOGIT_PARTS
#define LOGIT_PARTS 1
#endif
extern "C" __global__ void __launch_bounds__(128)
    choose_many(const float* logits, const float* correction, int* ids, float* weights, u32 rows, u32 active, float routed_scale) {
    launch_next();
    wait_previous();
    const u32 row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (row >= rows) return;
    int id = 0;
    float weight = 0.f;
    choose<EXPERTS / 32, LOGIT_PARTS>(logits + (u64)row * EXPERTS * LOGIT_PARTS, correction, active, routed_scale, lane, id, weight);
    if (lane < active) ids[row * active + lane] = id, weights[row * active + lane] = weight;
}

// ---- routing and dispatch of up to 64 rows, no host involved. Four rows a block, a warp each; the last block to arrive makes the items.
// An item is up to ITEM rows that share an expert: (expert, row numbers, places of results).
// Items come in the order of experts, rows in order within: the same input gives the same items. The shared expert's rows are items too.
// place = row * (active + shared) + slot; the shared expert has the last slot. counts: number of items, blocks arrived (zero between launches).
// As many blocks more: what the next layer would choose (next_ids), and nothing else.
#ifndef ITEM
#define ITEM 8
#endif
extern "C" __global__ void __launch_bounds__(128)
    route_many(const float* logits, const float* correction, int* ids, float* weights, int* counts, int* item_expert, int* item_rows,
               int* item_places, const float* next_logits, const float* next_correction, int* next_ids, u32 rows, u32 active, u32 shared, float routed_scale) {
    __shared__ u64 mask[EXPERTS + 1];
    __shared__ u32 offset[EXPERTS + 1];
    __shared__ u32 is_last;
    launch_next();
    const u32 blocks = (rows + 3) / 4, warp = threadIdx.x / 32, lane = threadIdx.x & 31, all = EXPERTS + shared, row = blockIdx.x % blocks * 4 + warp;
    if (blockIdx.x >= blocks) {
        wait_previous();
        int id = 0;
        float weight = 0.f;
        if (row < rows) choose<EXPERTS / 32>(next_logits + (u64)row * EXPERTS, next_correction, active, routed_scale, lane, id, weight);
        if (row < rows && lane < active) next_ids[row * active + lane] = id;
        return;
    }
    for (u32 i = threadIdx.x; i < all; i += 128) mask[i] = i < EXPERTS ? 0 : rows == 64 ? ~0ull : (1ull << rows) - 1;
    wait_previous();
    if (row < rows) {
        int id = 0;
        float weight = 0.f;
        choose<EXPERTS / 32>(logits + (u64)row * EXPERTS, correction, active, routed_scale, lane, id, weight);
        if (lane < active) {
            __stcg(ids + row * active + lane, id);
            weights[row * active + lane] = weight;
            __threadfence();
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(counts + 1, 1) == (int)blocks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) counts[1] = 0;
    for (u32 i = threadIdx.x; i < rows * active; i += 128) atomicOr((unsigned long long*)&mask[__ldcg(ids + i)], 1ull << (i / active));
    __syncthreads();
    if (warp == 0) {
        u32 total = 0;
        for (u32 base = 0; base < all; base += 32) {
            const u32 e = base + lane, items = e < all ? (__popcll(mask[e]) + ITEM - 1) / ITEM : 0;
            u32 sum = items;
#pragma unroll
            for (int o = 1; o < 32; o <<= 1) {
                const u32 other = __shfl_up_sync(~0u, sum, o);
                if (lane >= o) sum += other;
            }
            if (e < all) offset[e] = total + sum - items;
            total += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) counts[0] = (int)total;
    }
    __syncthreads();
    const u32 slots = active + shared;
    for (u32 i = threadIdx.x; i < rows * slots; i += 128) {
        const u32 r = i / slots, slot = i % slots, e = slot < active ? (u32)__ldcg(ids + r * active + slot) : EXPERTS;
        const u32 at = offset[e] * ITEM + __popcll(mask[e] & ((1ull << r) - 1));
        item_rows[at] = (int)r;
        item_places[at] = (int)i;
    }
    for (u32 e = threadIdx.x; e < all; e += 128) {
        const u32 count = __popcll(mask[e]), items = (count + ITEM - 1) / ITEM;
        for (u32 i = 0; i < items; i++) item_expert[offset[e] + i] = (int)e;
        for (u32 i = count; i < items * ITEM; i++) item_rows[offset[e] * ITEM + i] = -1, item_places[offset[e] * ITEM + i] = -1;
    }
}

// ---- rounding to 8 bits, for int8.cu: a step for each row and 128 inputs.
// Rows of bf16. Eight lanes have 128 inputs, 16 each, which lie as the codes of weights do (layout.py): 2t, 2t + 8, 2t + 1, 2t + 9 side by side.
extern "C" __global__ void __launch_bounds__(256) quantize_rows(const u16* x, uint4* out, float* scales, u32 x_stride, u32 blocks, u32 total) {
    const u32 number = blockIdx.x * 32 + threadIdx.x / 8, lane = threadIdx.x & 7;
    launch_next();
    wait_previous();
    const bool is_there = number < total;
    uint4 low = {}, high = {};
    if (is_there) {
        const uint4* from = (const uint4*)(x + (u64)(number / blocks) * x_stride + number % blocks * 128 + lane * 16);
        low = __ldcs(from), high = __ldcs(from + 1);
    }
    u32 bits = max(max(largest_bits(low.x, low.y), largest_bits(low.z, low.w)), max(largest_bits(high.x, high.y), largest_bits(high.z, high.w)));
#pragma unroll
    for (u32 k = 1; k < 8; k *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, k));
    if (!is_there) return;
    const float largest = bf16_float(bits), inverse = inverse_of(largest);
    auto word = [&](u32 a, u32 b) { return __byte_perm(round_bytes(a, b, inverse), 0, 0x3120); };
    out[(u64)number * 8 + lane] = uint4{word(low.x, high.x), word(low.y, high.y), word(low.z, high.z), word(low.w, high.w)};
    if (lane == 0) scales[number] = step_of(largest);
}

// ---- h += sum over parts of weight * part; x = norm(h). One block a row; width a multiple of 4, at most NORM_STEPS * NORM_THREADS * 4.
// Few rows are over soonest with many threads each; of many rows several blocks should be on a processor, so that one loads while another sums.
#ifndef NORM_THREADS
#define NORM_THREADS 1024
#define NORM_STEPS 2
#define NORM_BLOCKS 1
#endif
extern "C" __global__ void __launch_bounds__(NORM_THREADS, NORM_BLOCKS)
    add_norm(float* h, const void* parts, u32 parts_bf16, const float* part_weights, u32 num_parts, u32 num_weights, u64 part_stride, u64 row_stride,
             const float* norm, u16* x, u32* codes, float* scales, u32 width, float eps) {
    __shared__ float sums[NORM_THREADS / 32];
    launch_next();
    const u32 row = blockIdx.x;
    float4 v[NORM_STEPS], n[NORM_STEPS];
#pragma unroll
    for (u32 i = 0; i < NORM_STEPS; i++) {
        const u32 k = (i * NORM_THREADS + threadIdx.x) * 4;
        if (k < width) n[i] = *(const float4*)(norm + k);
    }
    wait_previous();
    float square = 0.f;
#pragma unroll
    for (u32 i = 0; i < NORM_STEPS; i++) {
        const u32 k = (i * NORM_THREADS + threadIdx.x) * 4;
        if (k < width) {
            float4 s = __ldcg((const float4*)(h + (u64)row * width + k));
            const u64 from = row * row_stride + k;
            auto load = [&](u32 p) {
                if (!parts_bf16) return __ldcg((const float4*)((const float*)parts + from + p * part_stride));
                const uint2 v = __ldcg((const uint2*)((const u16*)parts + from + p * part_stride));
                return float4{bf16_float(v.x), __uint_as_float(v.x & 0xffff0000u), bf16_float(v.y), __uint_as_float(v.y & 0xffff0000u)};
            };
            auto add = [&](const float4& y, u32 p) {
                const float w = p < num_weights ? __ldcg(part_weights + row * num_weights + p) : 1.f;
                s.x += w * y.x, s.y += w * y.y, s.z += w * y.z, s.w += w * y.w;
            };
            u32 p = 0;
            // Slices of a product: four loads are under way at a time, where registers suffice. Results of experts: nine.
            if (NORM_BLOCKS == 1 && !num_weights)
                for (; p < num_parts; p += 4) {
                    float4 y[4];
#pragma unroll
                    for (u32 j = 0; j < 4; j++)
                        if (p + j < num_parts) y[j] = load(p + j);
#pragma unroll
                    for (u32 j = 0; j < 4; j++)
                        if (p + j < num_parts) add(y[j], p + j);
                }
#pragma unroll 9
            for (; p < num_parts; p++) add(load(p), p);
            if (num_parts) *(float4*)(h + (u64)row * width + k) = s;
            v[i] = s;
            square += s.x * s.x + s.y * s.y + s.z * s.z + s.w * s.w;
        }
    }
    square = warp_sum(square);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = square;
    __syncthreads();
    square = warp_sum((threadIdx.x & 31) < NORM_THREADS / 32 ? sums[threadIdx.x & 31] : 0.f);
    const float r = rsqrtf(square / width + eps);
#pragma unroll
    for (u32 i = 0; i < NORM_STEPS; i++) {
        const u32 k = (i * NORM_THREADS + threadIdx.x) * 4;
        if (k >= width) continue;
        const u32 a = pack_bf16(v[i].x * r * n[i].x, v[i].y * r * n[i].y), b = pack_bf16(v[i].z * r * n[i].z, v[i].w * r * n[i].w);
        if (x) *(uint2*)(x + (u64)row * width + k) = uint2{a, b};
        if (!codes) continue;
        const u64 block = ((u64)row * width + k) / 128;
        store_rounded(codes + block * 32, scales + block, a, b, threadIdx.x & 31);
    }
}

// ---- one row against bf16 weights [rows, inputs]: norm first, fp32 out. A warp takes a row at a time; inputs a multiple of 256, at most 8192.
extern "C" __global__ void __launch_bounds__(512) head_one(const float* x, const float* norm, const u16* weight, float* out, u32 inputs, u32 rows, float eps) {
    __shared__ __align__(16) float xs[8192];
    __shared__ float sums[16];
    launch_next();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, steps = inputs / 256;
    const u32 stride = gridDim.x * 16;
    u32 row = blockIdx.x * 16 + warp;
    wait_previous();
    float square = 0.f;
    for (u32 k = threadIdx.x; k < inputs; k += 512) {
        const float h = __ldcg(x + k);
        square += h * h;
    }
    square = warp_sum(square);
    if (lane == 0) sums[warp] = square;
    __syncthreads();
    square = 0.f;
    for (u32 i = 0; i < 16; i++) square += sums[i];
    const float r = rsqrtf(square / inputs + eps);
    // x of a lane's 8 inputs as two vectors of 4, apart, so that a warp reads 16 bytes a lane without conflicts.
    for (u32 k = threadIdx.x; k < inputs; k += 512) {
        const u32 step = k / 256, l = (k / 8) & 31, j = k & 7;
        xs[step * 256 + (j / 4) * 128 + l * 4 + (j & 3)] = __ldcg(x + k) * r * norm[k];
    }
    __syncthreads();
    for (; row < rows; row += stride) {
        const u16* from = weight + (u64)row * inputs + lane * 8;
        float acc = 0.f;
        for (u32 base = 0; base < steps; base += 16) {
            uint4 w[16];
#pragma unroll
            for (u32 i = 0; i < 16; i++)
                if (base + i < steps) w[i] = load_once(from + (base + i) * 256);
#pragma unroll
            for (u32 i = 0; i < 16; i++)
                if (base + i < steps) {
                    const float4 p = *(const float4*)(xs + (base + i) * 256 + lane * 4), q = *(const float4*)(xs + (base + i) * 256 + 128 + lane * 4);
                    acc += p.x * bf16_float(w[i].x & 0xffff) + p.y * __uint_as_float(w[i].x & 0xffff0000u);
                    acc += p.z * bf16_float(w[i].y & 0xffff) + p.w * __uint_as_float(w[i].y & 0xffff0000u);
                    acc += q.x * bf16_float(w[i].z & 0xffff) + q.y * __uint_as_float(w[i].z & 0xffff0000u);
                    acc += q.z * bf16_float(w[i].w & 0xffff) + q.w * __uint_as_float(w[i].w & 0xffff0000u);
                }
        }
        acc = warp_sum(acc);
        if (lane == 0) out[row] = acc;
    }
}

// ---- dispatch of any number of rows: items of up to `size` rows. First the rows of each expert are counted, a block
// an expert; then each block finds its place among the items and writes its rows in order.
extern "C" __global__ void __launch_bounds__(1024) dispatch_count(const int* ids, int* counts, u32 total) {
    __shared__ int sums[32];
    launch_next();
    wait_previous();
    int count = 0;
    for (u32 i = threadIdx.x; i < total; i += 1024) count += __ldcg(ids + i) == (int)blockIdx.x;
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x < 32) {
        count = __reduce_add_sync(~0u, sums[threadIdx.x]);
        if (threadIdx.x == 0) counts[blockIdx.x] = count;
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    dispatch_fill(const int* ids, const int* counts, int* num_items, int* item_expert, int* item_rows, int* item_places, u32 rows, u32 active, u32 shared,
                  u32 size) {
    __shared__ u32 before, all, found[32];
    launch_next();
    wait_previous();
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread & 31, expert = blockIdx.x, slots = active + shared;
    if (warp == 0) {
        u32 mine = 0, sum = 0;
        for (u32 e = lane; e < EXPERTS + shared; e += 32) {
            const u32 items = ((e < EXPERTS ? (u32)__ldcg(counts + e) : rows) + size - 1) / size;
            sum += items;
            if (e < expert) mine += items;
        }
        mine = __reduce_add_sync(~0u, mine), sum = __reduce_add_sync(~0u, sum);
        if (lane == 0) before = mine, all = sum;
    }
    __syncthreads();
    const u32 first = before, count = expert < EXPERTS ? (u32)__ldcg(counts + expert) : rows, items = (count + size - 1) / size;
    if (expert == 0 && thread == 0) *num_items = (int)all;
    for (u32 i = thread; i < items; i += 1024) item_expert[first + i] = (int)expert;
    // Shared out evenly, in sixteens: kernels compute as many columns as an item has.
    const u32 each = items ? min(size, ((count + items - 1) / items + 15) / 16 * 16) : size;
    auto place = [&](u32 i) { return (first + i / each) * size + i % each; };
    for (u32 i = thread; i < items * size; i += 1024)
        if (i % size >= each || i / size * each + i % size >= count) item_rows[first * size + i] = -1, item_places[first * size + i] = -1;
    if (expert == EXPERTS) {
        for (u32 i = thread; i < rows; i += 1024) item_rows[place(i)] = (int)i, item_places[place(i)] = (int)(i * slots + active);
        return;
    }
    // A warp takes numbers that follow one another: it counts those of its expert, learns how many there are before, and looks again.
    const u32 total = rows * active, each_warp = (total + 1023) / 1024 * 32, begin = warp * each_warp;
    auto votes_at = [&](u32 i) { return __ballot_sync(~0u, i < total && __ldcg(ids + i) == (int)expert); };
    u32 mine = 0;
#pragma unroll 8
    for (u32 k = 0; k < each_warp; k += 32) mine += __popc(votes_at(begin + k + lane));
    if (lane == 0) found[warp] = mine;
    __syncthreads();
    u32 base = __reduce_add_sync(~0u, lane < warp ? found[lane] : 0);
#pragma unroll 8
    for (u32 k = 0; k < each_warp; k += 32) {
        const u32 i = begin + k + lane, votes = votes_at(i);
        if (votes >> lane & 1) {
            const u32 at = place(base + __popc(votes & ((1u << lane) - 1))), row = i / active;
            item_rows[at] = (int)row, item_places[at] = (int)(row * slots + i % active);
        }
        base += __popc(votes);
    }
}

// ---- the most likely token of each row, the lowest of equals, -1 where the largest logit is no finite number; and with it the next step's input:
// token, position, length and slot of every row that a sequence has (`counts[0]` of them) move on by one.
// Blocks (x) share a row (y); the last one to arrive decides. `arrived` is zero between launches.
DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }
extern "C" __global__ void __launch_bounds__(512)
    greedy(const float* logits, u64 stride, u32 count, u64* partial, int* arrived, int* chosen, const int* counts, int* tokens, int* positions,
           int* lengths, int* slots, const int* blocks, u32 max_blocks) {
    __shared__ u64 best[16];
    __shared__ u32 is_last;
    launch_next();
    wait_previous();
    const u32 row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const float* from = logits + row * stride;
    u64 most = 0;
    for (u32 i = blockIdx.x * 512 + threadIdx.x; i < count; i += gridDim.x * 512) {
        const float v = __ldcg(from + i);
        most = larger(most, (u64)(v == v ? ordered(v) : ~0u) << 32 | ~i);
    }
    auto reduced = [&](u64 v) {
#pragma unroll
        for (int o = 16; o; o >>= 1) v = larger(v, __shfl_xor_sync(~0u, v, o));
        return v;
    };
    most = reduced(most);
    if (lane == 0) best[warp] = most;
    __syncthreads();
    if (warp == 0) {
        most = reduced(lane < 16 ? best[lane] : 0);
        if (lane == 0) {
            __stcg(partial + row * gridDim.x + blockIdx.x, most);
            __threadfence();
            is_last = atomicAdd(arrived + row, 1) == (int)gridDim.x - 1;
        }
    }
    __syncthreads();
    if (!is_last || warp) return;
    __threadfence();
    most = reduced(lane < gridDim.x ? __ldcg(partial + row * gridDim.x + lane) : 0);
    if (lane) return;
    arrived[row] = 0;
    const u32 key = (u32)(most >> 32);
    const bool finite = key < 0xff800000u && key > 0x007fffffu;
    const int token = finite ? (int)~(u32)most : -1;
    chosen[row] = token;
    if ((int)row >= counts[0]) return;
    const int position = positions[row] + 1;
    tokens[row] = finite ? token : 0, positions[row] = position, lengths[row] = position + 1;
    slots[row] = blocks[(u64)row * max_blocks + min((u32)position / 16, max_blocks - 1)] * 16 + position % 16;
}
