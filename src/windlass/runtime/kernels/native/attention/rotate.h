// Rotary positions (arXiv 2104.09864). Included once per instruction set.

namespace windlass {
namespace {
namespace WINDLASS_ISA {

// `angles`: `half` cosines, then as many sines. Pairs are (i, i + half), or neighbours. `result` may be x.
INLINE void rotate(const float* x, const float* angles, int64_t half, bool neighbours, float* result) {
    const float *cosines = angles, *sines = angles + half;
    int64_t i = 0;
    if (neighbours) {
        for (; i + W <= half; i += W) {
            F first = load(x + 2 * i), second = load(x + 2 * i + W);
            part(&first, &second);
            const F cosine = load(cosines + i), sine = load(sines + i);
            F turned = first * cosine - second * sine, other = second * cosine + first * sine;
            pair(&turned, &other);
            store(result + 2 * i, turned);
            store(result + 2 * i + W, other);
        }
        for (; i < half; i++) {
            const float first = x[2 * i], second = x[2 * i + 1];
            result[2 * i] = first * cosines[i] - second * sines[i];
            result[2 * i + 1] = second * cosines[i] + first * sines[i];
        }
        return;
    }
    for (; i + W <= half; i += W) {
        const F first = load(x + i), second = load(x + half + i), cosine = load(cosines + i), sine = load(sines + i);
        store(result + i, first * cosine - second * sine);
        store(result + half + i, second * cosine + first * sine);
    }
    for (; i < half; i++) {
        const float first = x[i], second = x[half + i];
        result[i] = first * cosines[i] - second * sines[i];
        result[half + i] = second * cosines[i] + first * sines[i];
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
