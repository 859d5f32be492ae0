// Hardware limits: memory read bandwidth, and peak throughput of products whose operands stay in L1.
#include <cstring>

#include "panel/panel.h"
#include "program/program.h"

namespace windlass {

namespace {

typedef uint64_t Eight __attribute__((vector_size(64)));

uint64_t read_all(const uint8_t* from, int64_t bytes) {
    Eight sums[4] = {};
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
        for (int part = 0; part < 4; part++) {
            Eight loaded;
            std::memcpy(&loaded, from + i + 64 * part, 64);
            sums[part] ^= loaded;
        }
    }
    const Eight all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    uint64_t total = 0;
    for (int i = 0; i < 8; i++) total ^= all[i];
    return total;
}

}  // namespace

// data: a word per thread that keeps the loads from being left out, memory; ints: bytes, chunk in bytes.
WINDLASS_OP(memory_read) {
    const int64_t bytes = op.ints[0], chunk = op.ints[1];
    uint64_t total = 0;
    for (int64_t first = worker.take() * chunk; first < bytes; first = worker.take() * chunk)
        total ^= read_all(op.at<uint8_t>(1) + first, first + chunk < bytes ? chunk : bytes - first);
    op.at<uint64_t>(0)[worker.index % 64] = total;
}

// One panel times one tile over and over; data: panel, tile; ints: the matrix, height, times.
WINDLASS_OP(packed_peak) {
    const Matrix matrix = matrix_of(op.ints, op.data[0]);
    const MultiplyPacked multiply = packed_kernels().multiply;
    alignas(64) float sums[TILE_ROWS * PANEL_ROWS];
    for (int64_t i = 0; i < op.ints[MATRIX_INTS + 1]; i++)
        multiply(matrix, matrix.data, op.at<uint8_t>(1), int(op.ints[MATRIX_INTS]), sums);
}

}  // namespace windlass
