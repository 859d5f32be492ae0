// Routed layers some of whose experts lie in host memory: which of a step's experts those are, fetching the device's part of them, asking the CPU
// for its part, and adding its answer. All of it runs inside of a CUDA graph: addresses do not change, only what tables say.
//
// A table has a number per expert: its slot in device memory, or -1 - its place in host memory. Places from DISK_PLACES on are in a file: the CPU computes
// all of such an expert, and the device fetches nothing for it: its slot is one that stays zero. totals: uses of experts on the device, in host memory, in the file.

constexpr u32 ITEM_ROWS = 8;
constexpr int DISK_PLACES = 1 << 20;
struct Item {
    int expert, count, rows[ITEM_ROWS];
    float weights[ITEM_ROWS];
};
struct Mailbox {  // kernels/native/tiles/share.cpp and kernels/cuda/tiered.py have the same
    u32 asked, rows, items, layer, unused[12];
    u32 answered, failed;
};
// state: questions asked, whether this layer has asked, whether an answer never came, experts fetched by this layer and their places in host memory.
constexpr u32 ASKED = 0, IS_ASKED = 1, FAILED = 2, FETCHED = 3, PLACES = 4;

DEVICE u32 load_system(const u32* p) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
DEVICE void store_system(u32* p, u32 value) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory"); }
DEVICE uint4 load_host(const void* p) {
    uint4 r;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// The sum of `value` over lower threads, of 1,024.
DEVICE u32 before_me(bool value, u32* sums, u32& total) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31, votes = __ballot_sync(~0u, value);
    __syncthreads();
    if (lane == 0) sums[warp] = __popc(votes);
    __syncthreads();
    const u32 mine = sums[lane];
    total = __reduce_add_sync(~0u, mine);
    return __reduce_add_sync(~0u, lane < warp ? mine : 0) + __popc(votes & ((1u << lane) - 1));
}

// ---- of up to 1,024 items: experts become slots. Those in host memory get the slots from `staging` on, in their order; `ask`: the CPU gets its part.
// `nothing`: the slot of experts in a file.
extern "C" __global__ void __launch_bounds__(1024)
    place(const int* num_items, int* item_expert, const int* item_rows, const int* item_places, const float* weights, const u16* x, const int* table, u32* uses, u64* totals,
          u32* state, Mailbox* box, Item* to_items, uint4* to_rows, u32 rows, u32 hidden, u32 active, u32 slots, u32 staging, u32 layer, u32 ask, u32 nothing) {
    __shared__ u32 sums[32];
    launch_next();
    wait_previous();
    const u32 i = threadIdx.x, items = (u32)__ldcg(num_items);
    const int expert = i < items ? __ldcg(item_expert + i) : -1, previous = i && i < items ? __ldcg(item_expert + i - 1) : -1;
    const int at = i < items ? __ldg(table + expert) : 0;
    const bool on_disk = at <= -1 - DISK_PLACES, missing = at < 0 && !on_disk, is_first = missing && expert != previous;
    const bool is_asked = on_disk || (missing && ask);
    u32 num_asked, num_experts;
    const u32 number = before_me(is_asked, sums, num_asked), experts_before = before_me(is_first, sums, num_experts);
    const u32 mine = experts_before - (is_first ? 0 : 1);  // of the experts that are missing, where this one is among them
    if (i < items) {
        u32 count = 0;
        bool item_is_shared = false;
        Item item;
        item.expert = -1 - at;
        for (u32 k = 0; k < ITEM_ROWS; k++) {
            const int row = __ldcg(item_rows + i * ITEM_ROWS + k);
            item.rows[k] = row;
            item.weights[k] = 0.f;
            if (row < 0) continue;
            count++;
            const u32 slot = (u32)__ldcg(item_places + i * ITEM_ROWS + k) % slots;
            item_is_shared = slot >= active;
            if (slot < active) item.weights[k] = __ldcg(weights + row * active + slot);
        }
        item.count = (int)count;
        atomicAdd(uses + expert, count);
        if (!item_is_shared) atomicAdd(totals + (on_disk ? 2 : missing), (u64)count);
        item_expert[i] = on_disk ? (int)nothing : missing ? (int)(staging + mine) : at;
        if (is_first) state[PLACES + mine] = (u32)(-1 - at);
        if (is_asked) to_items[number] = item;
    }
    const bool asks = num_asked && !__ldcg(state + FAILED);
    if (asks)
        for (u32 k = i; k < rows * hidden / 8; k += 1024) to_rows[k] = __ldcg((const uint4*)x + k);
    __threadfence_system();
    __syncthreads();
    if (i == 0) {
        state[FETCHED] = num_experts;
        state[IS_ASKED] = asks;
        if (asks) {
            box->rows = rows, box->items = num_asked, box->layer = layer;
            const u32 asked = state[ASKED] + 1;
            state[ASKED] = asked;
            __threadfence_system();
            store_system(&box->asked, asked);
        }
    }
}

// ---- the CPU is asked for slices 0 .. slices - 1 of a layer, each for all rows.
extern "C" __global__ void __launch_bounds__(1024)
    ask_slices(const u16* x, u32* state, Mailbox* box, Item* to_items, uint4* to_rows, u32 rows, u32 hidden, u32 slices, u32 layer) {
    launch_next();
    wait_previous();
    if (__ldcg(state + FAILED)) return;  // the CPU may still be at an old question; the step is worth nothing
    const u32 groups = (rows + ITEM_ROWS - 1) / ITEM_ROWS;
    for (u32 i = threadIdx.x; i < slices * groups; i += 1024) {
        const u32 first = i % groups * ITEM_ROWS;
        Item item;
        item.expert = (int)(i / groups);
        item.count = (int)min(ITEM_ROWS, rows - first);
        for (u32 k = 0; k < ITEM_ROWS; k++) item.rows[k] = (int)(first + k), item.weights[k] = 1.f;
        to_items[i] = item;
    }
    for (u32 k = threadIdx.x; k < rows * hidden / 8; k += 1024) to_rows[k] = __ldcg((const uint4*)x + k);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        box->rows = rows, box->items = slices * groups, box->layer = layer;
        const u32 asked = state[ASKED] + 1;
        state[ASKED] = asked, state[IS_ASKED] = 1;
        __threadfence_system();
        store_system(&box->asked, asked);
    }
}

// ---- the device's part of the experts that `place` found missing, read from host memory through the link. Of gate and up the bytes from `gate_up_from` on;
// of each tile of down the last `down_part` bytes, which lie together in host memory.
extern "C" __global__ void __launch_bounds__(256)
    fetch(const u32* state, const u8* host_gate_up, const u8* host_down, u8* gate_up, u8* down, u64 gate_up_bytes, u64 gate_up_from, u64 down_bytes,
          u32 down_tile, u32 down_part, u32 staging) {
    launch_next();
    wait_previous();
    const u32 part = down_part / 16, first = (u32)((gate_up_bytes - gate_up_from) / 16), each = first + (u32)(down_bytes / down_tile) * part;
    const u32 total = __ldcg(state + FETCHED) * each, threads = gridDim.x * 256;
    for (u32 base = blockIdx.x * 256 + threadIdx.x; base < total; base += threads * 8) {
        uint4 v[8];
        u8* to[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            const u32 j = base + k * threads;
            if (j >= total) break;
            const u32 expert = j / each, i = j - expert * each;
            const u64 place = __ldcg(state + PLACES + expert), slot = staging + expert;
            if (i < first) {
                v[k] = load_host(host_gate_up + place * gate_up_bytes + gate_up_from + (u64)i * 16);
                to[k] = gate_up + slot * gate_up_bytes + gate_up_from + (u64)i * 16;
            } else {
                const u32 b = i - first, tile = b / part;
                v[k] = load_host(host_down + (place * (each - first) + b) * 16);
                to[k] = down + slot * down_bytes + (u64)tile * down_tile + (down_tile - down_part) + (b - tile * part) * 16;
            }
        }
#pragma unroll
        for (u32 k = 0; k < 8; k++)
            if (base + k * threads < total) *(uint4*)to[k] = v[k];
    }
}

// ---- the CPU's answer, added to the residual stream. An answer that does not come within `patience` nanoseconds is noted, not waited for.
extern "C" __global__ void __launch_bounds__(256) collect(u32* state, Mailbox* box, const float* sums, float* h, u32 rows, u32 hidden, u64 patience) {
    launch_next();
    wait_previous();
    if (!__ldcg(state + IS_ASKED)) return;
    if (threadIdx.x == 0) {
        const u32 asked = __ldcg(state + ASKED);
        const u64 began = nanoseconds();
        while (load_system(&box->answered) != asked)
            if (nanoseconds() - began > patience || __ldcg(state + FAILED)) {
                atomicExch(state + FAILED, 1);
                store_system(&box->failed, 1);
                break;
            }
    }
    __syncthreads();
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x)
        for (u32 k = threadIdx.x * 4; k < hidden; k += 1024) {
            const uint4 bits = load_host(sums + (u64)row * hidden + k);
            float4* to = (float4*)(h + (u64)row * hidden + k);
            const float4 v = *to;
            *to = float4{v.x + __uint_as_float(bits.x), v.y + __uint_as_float(bits.y), v.z + __uint_as_float(bits.z), v.w + __uint_as_float(bits.w)};
        }
}

// ---- experts of items to slots, where all of them are on the device.
extern "C" __global__ void __launch_bounds__(256) remap(const int* num_items, int* item_expert, const int* table) {
    launch_next();
    wait_previous();
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < (u32)__ldcg(num_items); i += gridDim.x * 256) item_expert[i] = __ldg(table + __ldcg(item_expert + i));
}
