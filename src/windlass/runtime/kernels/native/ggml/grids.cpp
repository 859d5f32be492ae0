// The grids of IQ2 and IQ3, given by runtime/kernels/program/program.py (core/ggml/grids.py has them).
#include "ggml/forms.h"

namespace windlass {
uint32_t GRIDS[4352];
}

extern "C" void windlass_ggml_grids(const void* magnitudes) { std::memcpy(windlass::GRIDS, magnitudes, sizeof windlass::GRIDS); }
