// Activation functions of a vector, for kernels that fuse them. Included once per instruction set.

namespace windlass {
namespace {
namespace WINDLASS_ISA {

INLINE F silu(F x) { return x / (1.0f + exponential(-x)); }

// x * sigmoid(1.702 x), as gpt-oss has it.
INLINE F swish(F x) { return x / (1.0f + exponential(-1.702f * x)); }

// x * P(normal < x), by the complementary error function on the side where it is small.
INLINE F gelu(F x) {
    F z = (F)((I)x & 0x7fffffff) * 0.70710678118654752f;
    F tail = 0.5f * erfc_positive(z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// (1 + tanh u) / 2 is the sigmoid of 2 u.
INLINE F gelu_tanh(F x) {
    F twice = 1.59576912160573f * (x + 0.044715f * (x * x * x));
    return x / (1.0f + exponential(-twice));
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
