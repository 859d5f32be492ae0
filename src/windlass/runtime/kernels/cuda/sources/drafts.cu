// Steps that verify a draft each and are followed by the next without the host.

// Rows 2i and 2i + 1 are a sequence's newest token and the draft after it. `chosen` has the token that follows each row, `drafted` the draft after that. A draft
// that is the chosen token is kept, and the sequence goes on behind it, else behind the newest token: token, draft, positions, lengths and slots of the
// next step. counts[0]: rows that sequences have. Tokens below zero (no finite logits) go on as 0: the host ends that sequence.
extern "C" __global__ void __launch_bounds__(256)
    advance_pairs(const int* chosen, const int* drafted, const int* counts, int* tokens, int* positions, int* lengths, int* slots, const int* blocks,
                  u32 max_blocks) {
    launch_next();
    wait_previous();
    const u32 row = (blockIdx.x * 256 + threadIdx.x) * 2;
    if (row + 1 >= (u32)counts[0]) return;
    const u32 from = row + (chosen[row] == tokens[row + 1]), first = (u32)positions[row] + 1 + (from - row);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 position = first + i;
        tokens[row + i] = max(i ? drafted[from] : chosen[from], 0);
        positions[row + i] = (int)position, lengths[row + i] = (int)position + 1;
        slots[row + i] = blocks[(u64)(row + i) * max_blocks + min(position / 16, max_blocks - 1)] * 16 + (int)(position % 16);
    }
}
