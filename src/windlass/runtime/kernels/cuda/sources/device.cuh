// What every kernel here shares: fragments of 4-bit weights, the asynchronous copy ring, dependent launch. No headers needed.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr u32 BLOCK_ROWS = 16;
constexpr u32 BLOCK_K = 128;
constexpr u32 CODE_BYTES = BLOCK_ROWS * BLOCK_K / 2;
#ifndef GROUP
#define GROUP 128
#endif
constexpr u32 GROUPS = BLOCK_K / GROUP;
constexpr u32 BLOCK_BYTES = CODE_BYTES + GROUPS * BLOCK_ROWS * 2;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE float bf16_float(u32 bits) { return __uint_as_float(bits << 16); }
DEVICE u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u32 pack_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u16 to_bf16(float x) { return (u16)pack_bf16(x, 0.f); }
DEVICE float silu(float x) { return x / (1.f + __expf(-x)); }

DEVICE uint4 load_once(const void* p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}

// Two codes an instruction: 128 + code is 0x4300 | code in bf16, exactly.
DEVICE u32 codes_raised(u32 q) {
    u32 r;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(r) : "r"(q));
    return r;
}
// Minus 136: code - 8, exactly.
DEVICE u32 codes_bf16(u32 q) {
    u32 r;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(codes_raised(q)), "r"(0x43084308u));
    return r;
}
constexpr float RAISED = 136.f;
DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void multiply_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 16 rows x 16 inputs of weights (one word of codes per lane) against 8 columns, each weight 136 too high.
DEVICE void multiply_raised(float (&c)[4], u32 q, u32 b0, u32 b1) {
    multiply(c, codes_raised(q), codes_raised(q >> 4), codes_raised(q >> 8), codes_raised(q >> 12), b0, b1);
}

// One block (16 rows x 128 inputs) in shared memory, x as this lane's 4 x 16 bytes, two for either half:
// for each step of 16 inputs the pairs 2t and 2t + 8, column lane/4.
// start0, start1: -136 times the sums of x over the block for columns 2t and 2t+1, from which the sum starts; so weights need not be
// lowered one by one. (Sums are fp32, and 136 * sum(x) is some 30 times the result: nothing that bf16 results would notice.)
// Groups smaller than the block scale the codes before they are multiplied.
DEVICE void multiply_block(float (&acc)[4], const u8* block, const uint4 (&x)[4], float start0, float start1, u32 lane, float factor) {
    const uint4 q0 = *(const uint4*)(block + lane * 16), q1 = *(const uint4*)(block + 512 + lane * 16);
    const u8* scales = block + CODE_BYTES + (lane >> 2) * 4;
    if constexpr (GROUPS == 1) {
        float c[4] = {start0, start1, start0, start1}, d[4] = {0.f, 0.f, 0.f, 0.f};
        multiply_raised(c, q0.x, x[0].x, x[0].y);
        multiply_raised(d, q1.x, x[2].x, x[2].y);
        multiply_raised(c, q0.y, x[0].z, x[0].w);
        multiply_raised(d, q1.y, x[2].z, x[2].w);
        multiply_raised(c, q0.z, x[1].x, x[1].y);
        multiply_raised(d, q1.z, x[3].x, x[3].y);
        multiply_raised(c, q0.w, x[1].z, x[1].w);
        multiply_raised(d, q1.w, x[3].z, x[3].w);
        const u32 s = *(const u32*)scales;
        const float low = bf16_float(s) * factor, high = __uint_as_float(s & 0xffff0000u) * factor;
        acc[0] += low * (c[0] + d[0]);
        acc[1] += low * (c[1] + d[1]);
        acc[2] += high * (c[2] + d[2]);
        acc[3] += high * (c[3] + d[3]);
    } else {
        float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
        auto scaled = [](u32 q, u32 scale) {
            u32 r;
            asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(codes_bf16(q)), "r"(scale));
            return r;
        };
        auto step = [&](float (&a)[4], u32 q, u32 b0, u32 b1, u32 k) {
            const u32 s = *(const u32*)(scales + k / GROUP * 32), low = __byte_perm(s, s, 0x1010), high = __byte_perm(s, s, 0x3232);
            multiply(a, scaled(q, low), scaled(q >> 4, high), scaled(q >> 8, low), scaled(q >> 12, high), b0, b1);
        };
        step(c, q0.x, x[0].x, x[0].y, 0);
        step(d, q1.x, x[2].x, x[2].y, 64);
        step(c, q0.y, x[0].z, x[0].w, 16);
        step(d, q1.y, x[2].z, x[2].w, 80);
        step(c, q0.z, x[1].x, x[1].y, 32);
        step(d, q1.z, x[3].x, x[3].y, 96);
        step(c, q0.w, x[1].z, x[1].w, 48);
        step(d, q1.w, x[3].z, x[3].w, 112);
#pragma unroll
        for (int i = 0; i < 4; i++) acc[i] += factor * (c[i] + d[i]);
    }
}
// Where the pair of inputs k, k + 1 (k even) of a row goes so that a lane finds its 16 inputs of a half in 32 bytes.
DEVICE u32 lane_order(u32 k) { return (k & ~63u) | (k & 6) << 3 | (k & 48) >> 2 | (k & 8) >> 2 | (k & 1); }
DEVICE float pair_sum(u32 pair) { return bf16_float(pair) + __uint_as_float(pair & 0xffff0000u); }
DEVICE float eight_sum(uint4 v) { return (pair_sum(v.x) + pair_sum(v.y)) + (pair_sum(v.z) + pair_sum(v.w)); }

// Rounding to 8 bits by the largest of some numbers. A scale stands for a sixteenth of a step, as int8.cu's weights are 16 times too high.
// Bits of bf16 without sign are in the order of the numbers.
DEVICE u32 largest_bits(u32 a, u32 b) { return max(max(a & 0x7fffu, b & 0x7fffu), max(a >> 16 & 0x7fffu, b >> 16 & 0x7fffu)); }
DEVICE float step_of(float largest) { return largest * (1.f / (127.f * 16.f)); }
DEVICE float inverse_of(float largest) { return largest > 1e-30f ? 127.f / largest : 0.f; }
DEVICE u32 round_bytes(u32 a, u32 b, float inverse) {
    constexpr float MAGIC = 12582912.f;  // added to this, a number's integer part lies in the low bits
    const u32 n0 = __float_as_uint(fmaf(bf16_float(a), inverse, MAGIC)), n1 = __float_as_uint(fmaf(__uint_as_float(a & 0xffff0000u), inverse, MAGIC));
    const u32 n2 = __float_as_uint(fmaf(bf16_float(b), inverse, MAGIC)), n3 = __float_as_uint(fmaf(__uint_as_float(b & 0xffff0000u), inverse, MAGIC));
    return __byte_perm(__byte_perm(n0, n1, 0x0040), __byte_perm(n2, n3, 0x0040), 0x5410);
}
// A warp has 128 numbers of a row, each lane four that follow one another as two pairs of bf16: rounded to 8 bits with one step, in the order of the weights'
// codes (layout.py). Four lanes have 16 numbers: two of each lane's are exchanged with the lane that has those eight away.
DEVICE void store_rounded(u32* codes, float* scale, u32 a, u32 b, u32 lane) {
    const float largest = bf16_float(__reduce_max_sync(~0u, largest_bits(a, b)));
    const u32 bytes = round_bytes(a, b, inverse_of(largest)), first = __byte_perm(bytes, 0, 0x4410), second = __byte_perm(bytes, 0, 0x4432);
    const bool upper = lane & 2;
    const u32 other = __shfl_xor_sync(~0u, upper ? first : second, 2);
    codes[(lane & ~3u) + (lane & 1) * 2 + upper] = __byte_perm(upper ? other : first, upper ? second : other, 0x5140);
    if (lane == 0) *scale = step_of(largest);
}
// Ring of stages in shared memory filled by bulk copies.
DEVICE void barrier_init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra D; bra W; D: }" ::"r"(barrier), "r"(phase) : "memory");
}
DEVICE void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
DEVICE u64 read_once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Programmatic dependent launch: the next kernel may start; everything before this one is done and visible.
// Devices before Hopper have none of it: there a kernel starts when the one before it has ended.
#if __CUDA_ARCH__ >= 900
DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEVICE void launch_next() {}
DEVICE void wait_previous() {}
#endif
DEVICE void named_barrier(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Floats as integers in the same order, for reductions in one instruction.
DEVICE u32 ordered(float x) {
    const u32 b = __float_as_uint(x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
// Of a warp's PER * 32 experts: scores, and keys in the order of score + correction.
// Scores are sigmoids or, with SOFTMAX, exponentials: weights are divided by the sum of those chosen, so no other sum is needed.
#ifndef SOFTMAX
#define SOFTMAX 0
#endif
template <u32 PER, u32 SUMMANDS = 1>  // logits are sums of so many
DEVICE void scores_of(const float* logits, const float* correction, u32 lane, float (&score)[PER], u32 (&key)[PER]) {
#pragma unroll
    for (u32 i = 0; i < PER; i++) {
        score[i] = __ldcg(logits + i * 32 + lane);
#pragma unroll
        for (u32 p = 1; p < SUMMANDS; p++) score[i] += __ldcg(logits + p * PER * 32 + i * 32 + lane);
    }
#if SOFTMAX
    float most = score[0];
#pragma unroll
    for (u32 i = 1; i < PER; i++) most = fmaxf(most, score[i]);
#pragma unroll
    for (int i = 16; i; i >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
#endif
#pragma unroll
    for (u32 i = 0; i < PER; i++) {
        // Softmax keeps the order of logits: keys are logits, which do not vanish as exponentials of small ones do.
        const float shift = correction ? __ldg(correction + i * 32 + lane) : 0.f;
#if SOFTMAX
        const float logit = score[i];
        score[i] = expf(logit - most);
        key[i] = ordered(correction ? score[i] + shift : logit);
#else
        score[i] = 1.f / (1.f + expf(-score[i]));
        key[i] = ordered(score[i] + shift);
#endif
    }
}
// The best expert, the lowest number first among equals, and its score; it is not chosen again.
template <u32 PER>
DEVICE u32 take_best(const float (&score)[PER], u32 (&key)[PER], u32 lane, float& s) {
    u32 best = key[0], at = lane;
    s = score[0];
#pragma unroll
    for (u32 i = 1; i < PER; i++)
        if (key[i] > best) best = key[i], at = i * 32 + lane, s = score[i];
    const u32 top = __reduce_max_sync(~0u, best);
    const u32 chosen = __reduce_min_sync(~0u, best == top ? at : ~0u);
    s = __shfl_sync(~0u, s, chosen & 31);
#pragma unroll
    for (u32 i = 0; i < PER; i++)
        if (chosen == i * 32 + lane) key[i] = 0;
    return chosen;
}
// A warp chooses `active` experts; lane r has the r-th.
template <u32 PER, u32 SUMMANDS = 1>
DEVICE void choose(const float* logits, const float* correction, u32 active, float routed_scale, u32 lane, int& id, float& weight) {
    float score[PER];
    u32 key[PER];
    scores_of<PER, SUMMANDS>(logits, correction, lane, score, key);
    float total = 0.f, mine = 0.f;
    for (u32 r = 0; r < active; r++) {
        float s;
        const u32 chosen = take_best<PER>(score, key, lane, s);
        total += s;
        if (lane == r) mine = s, id = (int)chosen;
    }
    weight = mine / total * routed_scale;
}

// Read once and kept: the compiler would read the special register again in every turn of a loop.
DEVICE u32 thread_number() {
    u32 r;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
    return r;
}

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

#if FP8
// Keys and values in e4m3 (runtime/kernels/fp8_cache.py): the exponent in fp32 of the power of two by which a head of 128 bf16 numbers fits, in all lanes.
DEVICE u32 scale_of(const u16* head, u32 lane) {
    const uint2 v = *(const uint2*)(head + lane * 4);
    // Magnitudes of bf16 are in the order of their bits.
    const u32 most = max(max(v.x & 0x7fff, v.x >> 16 & 0x7fff), max(v.y & 0x7fff, v.y >> 16 & 0x7fff));
    const int exponent = (int)(((__reduce_max_sync(~0u, most) << 16) + 0x1fffff) >> 23) - 8;
    return (u32)min(max(exponent, 87), 167);
}
DEVICE u8 to_code(u16 bf16, u32 scale) {
    const float x = bf16_float(bf16) * __uint_as_float((254 - scale) << 23);
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.f), "f"(x));
    return (u8)r;
}
#endif

// Where the time goes: with TRACE_AT, the address of [count, (time, kind << 32 | event << 16 | block) ...], a thread notes when it got here.
DEVICE void trace(u32 kind, u32 event) {
#ifdef TRACE_AT
    if (blockIdx.x % 33 || blockIdx.y || blockIdx.z) return;
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    u64* buffer = (u64*)(u64)TRACE_AT;
    const u64 at = atomicAdd((unsigned long long*)buffer, 1ull);
    if (at < 100000) buffer[1 + at * 2] = time, buffer[2 + at * 2] = (u64)kind << 32 | event << 16 | blockIdx.x;
#endif
}
