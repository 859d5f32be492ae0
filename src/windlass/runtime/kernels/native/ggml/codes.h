// Codes of a block of 32 inputs out of a panel's words: chunk C is the inputs 4 C .. 4 C + 3 of 16 rows, a byte each. Included once per
// instruction set, inside its namespace, which has V (64 bytes) and its operations.

template <int N> INLINE V moved(V x) {  // by N bits up, or down where N is negative; what crosses into other bytes is masked by the caller
    if constexpr (N > 0) return shifted_up<N>(x);
    else if constexpr (N < 0) return shifted_down<-N>(x);
    else return x;
}

template <int C> INLINE V low_bits(const uint8_t* words) { return moved<C % 2 ? -4 : 0>(load_bytes(words + 64 * (C / 2))) & every(15); }
// Two bits of chunk C, at bit TO; one bit.
template <int C, int TO> INLINE V pair_bits(const uint8_t* words) {
    return moved<TO - 2 * (C % 4)>(load_bytes(words + 64 * (C / 4))) & every(3 << TO);
}
template <int C, int TO> INLINE V one_bit(const uint8_t* word) { return moved<TO - C>(load_bytes(word)) & every(1 << TO); }

// Indices of a grid for 16 rows, as 32-bit numbers; `chunk` counts fours, `eight` eights of inputs.
template <Kind K, int C> INLINE V grid_words(const uint8_t* words, const uint8_t* high) {
    constexpr int EIGHT = C / 2;
    V index;
    if constexpr (K == Kind::IQ2_XS) index = down_words<16 * (EIGHT % 2)>(load_bytes(words + 64 * (EIGHT / 2))) & every_word(511);
    else if constexpr (K >= Kind::IQ3_XXS) index = down_words<8 * (C % 4)>(load_bytes(words + 64 * (C / 4))) & every_word(255);
    else index = down_words<8 * EIGHT>(load_bytes(words)) & every_word(255);
    if constexpr (K == Kind::IQ2_S) index = index | up_words<8>(down_words<2 * EIGHT>(wide_bytes(high)) & every_word(3));
    if constexpr (K == Kind::IQ3_S) index = index | up_words<8>(down_words<C>(wide_bytes(high)) & every_word(1));
    constexpr bool IS_THREE = K >= Kind::IQ3_XXS;
    const uint32_t* grid = GRIDS + GRID_STARTS[int(K) - int(Kind::IQ2_XXS)] + (IS_THREE ? 0 : C % 2);
    return IS_THREE ? gathered<4>(grid, index) : gathered<8>(grid, index);
}

// Signs of chunk C in the lowest four bits of each row's word.
template <Kind K, int C> INLINE V sign_bits(const uint8_t* words) {
    constexpr int EIGHT = C / 2;
    if constexpr (K == Kind::IQ2_S) return down_words<4 * C>(load_bytes(words + 64));
    if constexpr (K == Kind::IQ3_S) return down_words<4 * C>(load_bytes(words + 128));
    V seven;
    if constexpr (K == Kind::IQ2_XS) seven = down_words<16 * (EIGHT % 2) + 9>(load_bytes(words + 64 * (EIGHT / 2)));
    else seven = down_words<7 * EIGHT>(load_bytes(words + (K == Kind::IQ3_XXS ? 128 : 64)));
    seven = seven & every_word(127);
    if constexpr (C % 2 == 0) return seven;
    V parity = seven ^ down_words<4>(seven);
    parity = parity ^ down_words<2>(parity);
    parity = (parity ^ down_words<1>(parity)) & every_word(1);
    return down_words<4>(seven) | up_words<3>(parity);
}

// `high`: the block's 16 single bytes of high bits, where the type has them. Signed types are signed here, or plus 128 (BIASED).
template <Kind K, int C> INLINE V chunk_codes(const uint8_t* words, const uint8_t* high) {
    if constexpr (K == Kind::Q2_K) return pair_bits<C, 0>(words);
    else if constexpr (K == Kind::Q3_K) return pair_bits<C, 0>(words) | one_bit<C, 2>(words + 128);
    else if constexpr (K == Kind::Q4_K) return low_bits<C>(words);
    else if constexpr (K == Kind::Q6_K) return low_bits<C>(words) | pair_bits<C, 4>(words + 256);
    else if constexpr (K == Kind::Q5_K || K == Kind::Q5_0 || K == Kind::Q5_1) return low_bits<C>(words) | one_bit<C, 4>(words + 256);
    else if constexpr (K == Kind::IQ4_NL || K == Kind::IQ4_XS) return looked_up(IQ4_VALUES, low_bits<C>(words));
    else if constexpr (K == Kind::MXFP4) return looked_up(FP4_DOUBLED, low_bits<C>(words));
    else return with_signs(grid_words<K, C>(words, high), sign_bits<K, C>(words));
}

// Where the parts of a group are.
template <Kind K> struct Group {
    static constexpr Form FORM = form_of(K);
    const uint8_t *halves, *singles, *words;
    INLINE explicit Group(const uint8_t* at) : halves(at), singles(at + 32 * FORM.halves), words(singles + 16 * FORM.singles) {}
    INLINE const uint8_t* block(int64_t index) const { return words + 64 * FORM.block_words() * index; }
    INLINE const uint8_t* high(int64_t index) const { return singles + 16 * ((K == Kind::IQ3_S ? 4 : 8) + index); }
};

// The integer scale of half a block (of either, where 32 inputs share it), for 16 rows.
template <Kind K, int HALF> INLINE W16 block_scale(const Group<K>& group, int64_t block) {
    if constexpr (K == Kind::Q2_K) return wide_low(group.singles + 16 * (2 * block + HALF));
    else if constexpr (K == Kind::Q3_K || K == Kind::Q6_K) return wide_signed(group.singles + 16 * (2 * block + HALF));
    else if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) return wide_unsigned(group.singles + 16 * block);
    else if constexpr (K == Kind::IQ4_XS) return wide_signed(group.singles + 16 * block);
    else if constexpr (K == Kind::IQ2_XS || K == Kind::IQ2_S)
        return twice_plus_one(HALF ? wide_high(group.singles + 16 * block) : wide_low(group.singles + 16 * block));
    else if constexpr (K == Kind::IQ3_S)
        return twice_plus_one(block % 2 ? wide_high(group.singles + 16 * (block / 2)) : wide_low(group.singles + 16 * (block / 2)));
    else return twice_plus_one(top_four(group.block(block) + (K == Kind::IQ3_XXS ? 128 : 64)));
}
// Whether a block has a scale of its own beside the group's.
template <Kind K> constexpr bool is_scaled() { return !(K == Kind::Q5_0 || K == Kind::Q5_1 || K == Kind::IQ4_NL || K == Kind::MXFP4); }
// What integer scales are to be multiplied with, beside the group's scale.
template <Kind K> constexpr float unit() {
    return K == Kind::IQ3_XXS ? 0.25f : K == Kind::IQ2_XXS || K == Kind::IQ2_XS || K == Kind::IQ2_S ? 0.125f : 1.0f;
}
