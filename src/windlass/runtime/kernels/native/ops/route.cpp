// Top-k routing: expert ids and weights of each row. One thread handles a row.
#ifndef WINDLASS_ISA
#define WINDLASS_EACH "ops/route.cpp"
#include "simd/lanes.h"

namespace windlass {

WINDLASS_OP(route) { WINDLASS_PICK(route)(op, worker); }

}  // namespace windlass

#else

namespace windlass {
namespace {
namespace WINDLASS_ISA {

enum Scoring { SIGMOID, SOFTMAX, SOFTMAX_OF_TOP };  // as runtime/kernels/cpu/route.py numbers them
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr float TINY = 1e-20f;  // ROUTER_EPSILON in runtime/kernels/constants.py

template <class Function> INLINE void each(const float* x, int64_t count, float* result, Function function) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(result + i, function(load(x + i)));
    if (i < count) store_part(result + i, function(load_part(x + i, count - i)), count - i);
}

float largest_of(const float* x, int64_t count) {
    F most = splat(NEVER);
    int64_t i = 0;
    for (; i + W <= count; i += W) most = maximum(most, load(x + i));
    float found = largest(most);
    for (; i < count; i++) found = std::max(found, x[i]);
    return found;
}

void softmax(const float* x, int64_t count, float* result) {
    const float most = largest_of(x, count);
    each(x, count, result, [&](F value) { return exponential(value - most); });
    float total = 0;
    for (int64_t i = 0; i < count; i++) total += result[i];
    each(result, count, result, [&](F value) { return value / total; });
}

// The first of the largest, which is then excluded. Where nothing is left (or only NaN), the first that is not in `taken`.
int64_t take_largest(float* x, int64_t count, const int32_t* taken, int64_t num_taken) {
    const float most = largest_of(x, count);
    int64_t found = 0;
    if (most > NEVER) {
        while (x[found] != most) found++;
        x[found] = NEVER;
        return found;
    }
    while (std::find(taken, taken + num_taken, found) != taken + num_taken) found++;
    return found;
}

// Only the groups with the largest sum of their two best scores stay (arXiv 2412.19437, section 2.1.2).
void keep_best_groups(float* preference, int64_t experts, int64_t groups, int64_t num_chosen, float* totals, int32_t* chosen) {
    const int64_t size = experts / groups;
    for (int64_t group = 0; group < groups; group++) {
        float best = NEVER, second = NEVER;
        for (int64_t i = group * size; i < (group + 1) * size; i++) {
            second = std::max(second, std::min(best, preference[i]));
            best = std::max(best, preference[i]);
        }
        totals[group] = size > 1 ? best + second : best;
    }
    for (int64_t i = 0; i < num_chosen; i++) chosen[i] = int32_t(take_largest(totals, groups, chosen, i));
    for (int64_t group = 0; group < groups; group++)
        if (std::find(chosen, chosen + num_chosen, group) == chosen + num_chosen)
            std::fill(preference + group * size, preference + (group + 1) * size, NEVER);
}

void weigh(const Op& op, const float* scores, const int32_t* ids, float* weights) {
    const int64_t active = op.ints[2];
    for (int64_t i = 0; i < active; i++) weights[i] = scores[ids[i]];
    if (op.ints[3] == SOFTMAX_OF_TOP) softmax(weights, active, weights);
    else if (op.ints[4]) {
        float total = TINY;
        for (int64_t i = 0; i < active; i++) total += weights[i];
        for (int64_t i = 0; i < active; i++) weights[i] /= total;
    }
    for (int64_t i = 0; i < active; i++) weights[i] *= op.floats[0];
}

// data: ids (int32), weights, logits, correction or null; ints: experts, logits' row stride, chosen experts, scoring, whether weights
// are made to sum to one, groups, chosen groups, which expert is number 0 here; floats: scale.
void route(const Op& op, Worker& worker) {
    const int64_t experts = op.ints[0], active = op.ints[2], groups = op.ints[5], scoring = op.ints[3];
    float* scores = static_cast<float*>(worker.scratch((2 * experts + 2 * groups) * sizeof(float)));
    float *preference = scores + experts, *totals = preference + experts;
    int32_t* chosen = reinterpret_cast<int32_t*>(totals + groups);
    int64_t first, last;
    share_rows(worker, op.rows(), 4 * experts, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const float* logits = op.at<float>(2) + row * op.ints[1];
        int32_t* ids = op.at<int32_t>(0) + row * active;
        if (scoring == SIGMOID) each(logits, experts, scores, [](F value) { return sigmoid(value); });
        else if (scoring == SOFTMAX) softmax(logits, experts, scores);
        else std::memcpy(scores, logits, experts * sizeof(float));
        std::memcpy(preference, scores, experts * sizeof(float));
        if (const float* correction = op.at<float>(3))
            for (int64_t i = 0; i < experts; i++) preference[i] += correction[i];
        if (groups > 1) keep_best_groups(preference, experts, groups, op.ints[6], totals, chosen);
        for (int64_t i = 0; i < active; i++) ids[i] = int32_t(take_largest(preference, experts, ids, i));
        weigh(op, scores, ids, op.at<float>(1) + row * active);
        for (int64_t i = 0; i < active; i++) ids[i] -= int32_t(op.ints[7]);
    }
}

}  // namespace WINDLASS_ISA
}  // namespace
}  // namespace windlass
#endif
