// int4 in groups: a search over scales (what and why: runtime/kernels/packing/quantize.py). Included by lanes.h.

namespace WINDLASS_ISA {

// How a group is coded: value = scale * clamp(round(x / scale), low, low + 15); low = -8 without a zero point. `low` is shifted.
struct Grid {
    F scale, inverse;
    I low;
};

INLINE Grid make_grid(F scale, I low) { return {scale, 1.0f / scale, low}; }

struct Range {
    F lowest, highest;  // lowest <= 0 <= highest: zero must stay representable
};

template <bool ZERO_POINT> INLINE Grid candidate(const Range &range, float factor) {
    if (ZERO_POINT) {
        F scale = bf16_scale(range.highest * factor - range.lowest * factor);
        F inverse = 1.0f / scale;
        F middle = (range.highest * inverse + range.lowest * inverse) * 0.5f;
        F zero = round_even(splat(-0.5f) - middle);
        zero = minimum(maximum(zero, splat(-8.0f)), splat(7.0f));
        return {scale, inverse, shifted(splat(-8.0f) - zero)};
    }
    // The end with the larger magnitude goes to code -8, the one that has no positive twin: the scale takes the other sign.
    F extreme = range.highest >= -range.lowest ? range.highest : range.lowest;
    return make_grid(bf16_scale(extreme * -factor), shifted(splat(-8.0f)));
}

template <bool ZERO_POINT> INLINE I shifted_int4(F t, I low) {
    I floor = ZERO_POINT ? low : shifted(splat(-8.0f));
    return shifted_code(t, floor, floor + 15);
}

// Squared errors of N grids, each in units of its own scale.
template <bool ZERO_POINT, int N> INLINE void squared_errors(const F *x, int length, const Grid *grids, F *errors) {
    F sums[N] = {};
    for (int i = 0; i < length; ++i) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            F t = x[i] * grids[n].inverse;
            F rest = t - unshifted(shifted_int4<ZERO_POINT>(t, grids[n].low));
            sums[n] = sums[n] + rest * rest;
        }
    }
    for (int n = 0; n < N; ++n) errors[n] = sums[n];
}

struct Best {
    Grid grid;
    F error, unit;  // error is in units of the first candidate's scale, of which `unit` is the inverse
};

INLINE void offer(Best &best, const Grid &grid, F error) {
    F ratio = grid.scale * best.unit;
    F common = error * (ratio * ratio);
    I better = common < best.error;
    best.error = better ? common : best.error;
    best.grid.scale = better ? grid.scale : best.grid.scale;
    best.grid.inverse = better ? grid.inverse : best.grid.inverse;
    best.grid.low = better ? grid.low : best.grid.low;
}

// The scale that is best for the codes at hand: least squares.
template <bool ZERO_POINT> INLINE void refit(const F *x, int length, Best &best) {
    F products = {}, squares = {};
    for (int i = 0; i < length; ++i) {
        F t = x[i] * best.grid.inverse;
        F code = unshifted(shifted_int4<ZERO_POINT>(t, best.grid.low));
        products = products + t * code;
        squares = squares + code * code;
    }
    Grid grid = make_grid(bf16_scale(best.grid.scale * (products / maximum(squares, splat(1.0f)))), best.grid.low);
    F error;
    squared_errors<ZERO_POINT, 1>(x, length, &grid, &error);
    offer(best, grid, error);
}

template <bool ZERO_POINT> INLINE Grid search(const F *x, int length, const Range &range, const Search &how) {
    Best best = {candidate<ZERO_POINT>(range, how.factors[0]), splat(INFINITY), F{}};
    best.unit = best.grid.inverse;
    if (how.num_factors == 1) return best.grid;
    for (int first = 0; first < how.num_factors; first += 4) {
        Grid grids[4];
        F errors[4];
        for (int n = 0; n < 4; ++n) grids[n] = candidate<ZERO_POINT>(range, how.factors[first + n]);
        squared_errors<ZERO_POINT, 4>(x, length, grids, errors);
        for (int n = 0; n < 4; ++n) offer(best, grids[n], errors[n]);
    }
    for (int fit = 0; fit < how.num_fits; ++fit) refit<ZERO_POINT>(x, length, best);
    return best.grid;
}

INLINE Range load_groups(const Source &source, Load load, F *x, Statistics &total) {
    Range range = {};
    I largest = {};
    for (int64_t start = 0; start < source.length; start += CHUNK) load(source, start, x + start);
    for (int i = 0; i < source.length; ++i) {
        I bits = magnitude_bits(x[i]);
        largest = bits > largest ? bits : largest;
        range.lowest = minimum(x[i], range.lowest);
        range.highest = maximum(x[i], range.highest);
    }
    I keep = usable(source, load, largest, total);
    for (int lane = 0; lane < source.lanes; ++lane) {
        if (keep[lane]) continue;
        for (int i = 0; i < source.length; ++i) x[i][lane] = 0;
        range.lowest[lane] = range.highest[lane] = 0;
    }
    return range;
}

// A code low + n is stored as n, eight to a word, lowest nibble first; and the exact error of what was stored.
template <bool ZERO_POINT> INLINE void emit(const F *x, int length, const Grid &grid, I *words, F &error, F &weight) {
    error = weight = F{};
    for (int word = 0; word < length / 8; ++word) {
        I packed = {};
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            F value = x[8 * word + i];
            F t = value * grid.inverse;
            I code = shifted_int4<ZERO_POINT>(t, grid.low);
            F rest = (value - unshifted(code) * grid.scale) * grid.inverse;
            error = error + rest * rest;
            weight = weight + t * t;
            packed |= (code - grid.low) << (4 * i);
        }
        words[word] = packed;
    }
}

template <bool ZERO_POINT> void int4_groups(const Job &job, Load load, const Search &how, int8_t *zeros) {
    F x[MAX_GROUP];
    I words[MAX_GROUP / 8];
    int length = (int)job.length, num_words = length / 8;
    for (int64_t group = 0; group < job.num_groups; group += W) {
        int lanes = job.num_groups - group < W ? (int)(job.num_groups - group) : W;
        Source source = {job.input + group * length * job.element_bytes, length, lanes};
        Range range = load_groups(source, load, x, *job.total);
        Grid grid = search<ZERO_POINT>(x, length, range, how);
        F error, weight;
        emit<ZERO_POINT>(x, length, grid, words, error, weight);
        for (int lane = 0; lane < lanes; ++lane) {
            char *out = job.codes + (group + lane) * num_words * 4;
            for (int word = 0; word < num_words; ++word) store_word(out + 4 * word, words[word][lane]);
            ((uint16_t *)job.scales)[group + lane] = (uint16_t)((uint32_t)((I)grid.scale)[lane] >> 16);
            if (ZERO_POINT) zeros[group + lane] = (int8_t)(-8.0f - unshifted(grid.low)[lane]);
            add_group(*job.total, group + lane, error[lane], weight[lane], grid.scale[lane]);
        }
    }
}

}  // namespace WINDLASS_ISA
