// Routed layers some of whose experts lie in host memory: which of a step's experts those are, fetching the device's part of them, asking the CPU
// for its part, and adding its answer. All of it runs inside of a CUDA graph: addresses do not change, only what tables say.
//
// A table has a number per expert: its slot in device memory, or -1 - its place in host memory. Places from DISK_PLACES on are in a file: the CPU computes
// all of such an expert, and the device fetches nothing for it: its slot is one that stays zero.
// A layer also guesses which experts the next one will choose: the CPU is told, and `ahead` fetches the device's part of these on another stream, into slots
// of their own, which layers have in turn. A guess is made and used within one step, between which experts may move.

constexpr u32 ITEM_ROWS = 8, MAX_GUESSES = 16, MAX_EXPERTS = 1024;
constexpr int DISK_PLACES = 1 << 20;
struct Item {
    int expert, count, rows[ITEM_ROWS];
    float weights[ITEM_ROWS];
};
struct Mailbox {  // runtime/kernels/native/tiles/share.cpp and runtime/kernels/cuda/tiered.py have the same
    u32 asked, rows, items, layer, unused[12];
    u32 answered, failed, unused_too[14];
    u32 told, told_layer, told_count, unused_at_last[13];
    u32 told_experts[MAX_GUESSES];
};
// state: questions asked, whether this layer has asked, whether an answer never came, experts fetched by this layer, guesses told; of even and of odd layers how
// many experts are guessed, their places in host memory, and which of them turned out wrong; places of the experts that are fetched.
constexpr u32 ASKED = 0, IS_ASKED = 1, FAILED = 2, FETCHED = 3, TOLD = 4, COUNTS = 6, GUESSES = 16, WRONG = GUESSES + 2 * MAX_GUESSES, PLACES = WRONG + 2 * MAX_GUESSES;
// totals: uses of experts found on the device, and of others; of these, such that were guessed. Experts guessed, right ones; wrong ones whose fetching began; bytes
// of these that were left out in the end.
constexpr u32 HITS = 0, MISSES = 1, FORESEEN = 2, GUESSED = 3, RIGHT = 4, BEGUN = 5, LEFT_OUT = 6;
DEVICE bool is_on_disk(int at) { return at <= -1 - DISK_PLACES; }
DEVICE bool is_in_host(int at) { return at < 0 && !is_on_disk(at); }

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

// What this layer's routing says of the next: chosen[row][rank] with the next router. The most likely experts come first, so that these are kept where there are
// more than `most`.
struct Guess {
    const int *chosen, *table;  // null: there is no next layer
    u32 most, staged;           // experts of a guess; whether the device fetches its part of them
    u32 is_made;                // for this layer, by the one before it
    u32 first_slot;             // of this layer's guesses
};

// ---- of up to 1,024 items: experts become slots. Those in host memory get the slots from `staging` on, in their order, or those that `ahead` fills; `ask`: the CPU gets its part.
// `nothing`: the slot of experts in a file.
extern "C" __global__ void __launch_bounds__(1024)
    place(const int* num_items, int* item_expert, const int* item_rows, const int* item_places, const float* weights, const u16* x, const int* table, u32* uses, u64* totals,
          u32* state, Mailbox* box, Item* to_items, uint4* to_rows, const int* guess_chosen, const int* guess_table, u32 rows, u32 hidden, u32 active, u32 slots, u32 staging,
          u32 layer, u32 ask, u32 guess_most, u32 guess_staged, u32 guess_is_made, u32 guess_first_slot, u32 nothing) {
    __shared__ u32 sums[32], is_right[MAX_GUESSES];
    __shared__ u16 guessed_at[MAX_EXPERTS];  // of a place in host memory: 1 + where it is among the guesses for this layer
    __shared__ u32 first_choice[MAX_EXPERTS];
    const Guess guess = {guess_chosen, guess_table, guess_most, guess_staged, guess_is_made, guess_first_slot};
    launch_next();
    const u32 i = threadIdx.x, here = layer & 1, next = here ^ 1;
    guessed_at[i] = 0, first_choice[i] = ~0u;
    if (i < MAX_GUESSES) is_right[i] = 0;
    wait_previous();
    __syncthreads();
    const u32 num_guessed = guess.is_made ? __ldcg(state + COUNTS + here) : 0;
    if (i < num_guessed) guessed_at[__ldcg(state + GUESSES + here * MAX_GUESSES + i)] = (u16)(i + 1);
    int next_at = 0, next_expert = 0;
    if (guess.chosen && i < rows * active) {
        next_expert = __ldcg(guess.chosen + i % rows * active + i / rows);
        next_at = __ldg(guess.table + next_expert);
        if (is_in_host(next_at)) atomicMin(first_choice + next_expert, i);
    }
    __syncthreads();
    const u32 items = (u32)__ldcg(num_items);
    const int expert = i < items ? __ldcg(item_expert + i) : -1, previous = i && i < items ? __ldcg(item_expert + i - 1) : -1;
    const int at = i < items ? __ldg(table + expert) : 0;
    const bool on_disk = is_on_disk(at), missing = is_in_host(at), is_asked = on_disk || (missing && ask);
    const u32 guessed = missing ? guessed_at[-1 - at] : 0;
    const bool is_staged = guessed && guess.staged, is_first = missing && !is_staged && expert != previous;
    u32 num_asked, num_fetched, num_guesses;
    const u32 number = before_me(is_asked, sums, num_asked), fetched_before = before_me(is_first, sums, num_fetched);
    const bool is_guess = is_in_host(next_at) && first_choice[next_expert] == i;
    const u32 guess_number = before_me(is_guess, sums, num_guesses);
    const u32 mine = fetched_before - (is_first ? 0 : 1);  // of the experts that are fetched now, where this one is among them
    if (guessed) is_right[guessed - 1] = 1;
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
        if (!item_is_shared) atomicAdd(totals + (at < 0 ? MISSES : HITS), (u64)count);
        if (guessed) atomicAdd(totals + FORESEEN, (u64)count);
        item_expert[i] = on_disk ? (int)nothing : is_staged ? (int)(guess.first_slot + guessed - 1) : missing ? (int)(staging + mine) : at;
        if (is_first) state[PLACES + mine] = (u32)(-1 - at);
        if (is_asked) to_items[number] = item;
    }
    if (is_guess && guess_number < guess.most) {
        state[GUESSES + next * MAX_GUESSES + guess_number] = (u32)(-1 - next_at);
        if (ask) box->told_experts[guess_number] = (u32)(-1 - next_at);
    }
    if (i < MAX_GUESSES) state[WRONG + next * MAX_GUESSES + i] = 0;
    const bool asks = num_asked && !__ldcg(state + FAILED);
    if (asks)
        for (u32 k = i; k < rows * hidden / 8; k += 1024) to_rows[k] = __ldcg((const uint4*)x + k);
    __threadfence_system();
    __syncthreads();
    // `ahead` may still be at it: what is wrong need not be fetched to its end.
    if (i < num_guessed && !is_right[i]) __stcg(state + WRONG + here * MAX_GUESSES + i, 1u);
    if (i == 0) {
        u32 num_right = 0;
        for (u32 k = 0; k < num_guessed; k++) num_right += is_right[k];
        if (num_guessed) {
            totals[GUESSED] += num_guessed, totals[RIGHT] += num_right;
            if (guess.staged) totals[BEGUN] += num_guessed - num_right;
        }
        state[FETCHED] = num_fetched;
        state[IS_ASKED] = asks;
        state[COUNTS + next] = min(num_guesses, guess.most);
        const bool tells = ask && guess.chosen;
        if (asks) box->rows = rows, box->items = num_asked, box->layer = layer;
        if (tells) box->told_layer = layer + 1, box->told_count = min(num_guesses, guess.most);
        const u32 asked = state[ASKED] + asks, told = state[TOLD] + tells;
        state[ASKED] = asked, state[TOLD] = told;
        if (asks || tells) __threadfence_system();
        if (asks) store_system(&box->asked, asked);
        if (tells) store_system(&box->told, told);
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

// ---- the device's part of the experts that the layer before guessed, into the slots from `first_slot` on: as `fetch`, but beside other kernels, and only as long as an
// expert seems to be needed. Blocks are four warps of 32 registers each, so that those of every kernel of a step of few rows fit next to them. Warps take runs of bytes
// that lie together here and there: `up_run` bytes of gate and up, the device's part of a tile of down. Returns whether the expert is wrong, as far as that is known.
DEVICE bool fetch_run(const u8* from, u8* to, u32 pieces, const u32* wrong) {
    u32 is_wrong = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x & 31; i < pieces; i += 128) {
        uint4 v[4] = {};  // else the compiler keeps registers for what was in them
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            if (i + k * 32 < pieces) v[k] = load_host(from + i * 16 + k * 512);
        is_wrong = *(const volatile u32*)wrong;  // under way with the others
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            if (i + k * 32 < pieces) *(uint4*)(to + i * 16 + k * 512) = v[k];
    }
    return __any_sync(~0u, is_wrong);
}
extern "C" __global__ void __launch_bounds__(128, 16)
    ahead(const u32* state, u64* totals, const u8* host_gate_up, const u8* host_down, u8* gate_up, u8* down, u64 gate_up_bytes, u64 gate_up_from, u64 down_bytes, u32 up_run,
          u32 down_tile, u32 down_part, u32 first_slot, u32 parity) {
    const u32 experts = __ldcg(state + COUNTS + parity), warps = gridDim.x * 4;
    u32 left_out = 0, run = blockIdx.x * 4 + threadIdx.x / 32;
#pragma unroll 1
    for (u32 k = 0; k < 2 * experts; k++) {
        const u32 expert = k / 2, bytes = k & 1 ? down_part : up_run, stride = k & 1 ? down_tile : up_run;
        const u32 runs = k & 1 ? (u32)(down_bytes / down_tile) : (u32)(gate_up_bytes - gate_up_from) / up_run;
        const u64 place = __ldcg(state + GUESSES + parity * MAX_GUESSES + expert), slot = first_slot + expert;
        const u8* from = k & 1 ? host_down + place * runs * bytes : host_gate_up + place * gate_up_bytes + gate_up_from;
        u8* to = k & 1 ? down + slot * down_bytes + (down_tile - down_part) : gate_up + slot * gate_up_bytes + gate_up_from;
        const u32* wrong = state + WRONG + parity * MAX_GUESSES + expert;
        bool is_wrong = *(const volatile u32*)wrong;
#pragma unroll 1
        for (; run < runs; run += warps)
            if (is_wrong) left_out += bytes;
            else is_wrong = fetch_run(from + (u64)run * bytes, to + (u64)run * stride, bytes / 16, wrong);
        run -= runs;
    }
    if (left_out && (threadIdx.x & 31) == 0) atomicAdd(totals + LEFT_OUT, (u64)left_out);
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
