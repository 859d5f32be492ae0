// The RMS norm of one row, for kernels that fuse it. Included once per instruction set.

namespace windlass {
namespace {
namespace WINDLASS_ISA {

// The sum of f (of a vector, or of a float) over a row, in 4 W partial sums: short chains, so that it is fast, and short sums, so that little is rounded away.
template <class Function> INLINE float row_sum(const float* x, int64_t width, Function f) {
    F parts[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= width; i += 4 * W)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) parts[part] += f(load(x + i + part * W));
    for (; i + W <= width; i += W) parts[0] += f(load(x + i));
    float rest = 0;
    for (; i < width; i++) rest += f(x[i]);
    return sum((parts[0] + parts[1]) + (parts[2] + parts[3])) + rest;
}

// `result` may be x.
INLINE void rms_row(const float* x, const float* weight, float eps, int64_t width, float* result) {
    const float squares = row_sum(x, width, [](auto value) { return value * value; });
    const float scale = 1.0f / std::sqrt(squares / width + eps);
    int64_t i = 0;
    for (; i + W <= width; i += W) store(result + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) result[i] = x[i] * scale * weight[i];
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
