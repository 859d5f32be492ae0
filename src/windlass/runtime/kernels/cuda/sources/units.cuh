// What the kernels of many rows share (wide.cu, int8.cu): units of work, rows of x by a list, and how results are written.
// A unit is TILES tiles of weights against up to N rows of x. Compiled with KIND, N, ITEMS and CLUSTER as they say.

struct alignas(64) TensorMap {
    u64 words[16];
};
struct Arguments {
#ifdef X_MAP
    TensorMap x_map;         // where there is no list of rows
    float* sums;             // of thread blocks whose units others finish
    u32* flags;              // [thread blocks, warps]: whether these are there
#endif
    const u8* weights;       // a tensor map of them
    const void* x;
    const float* x_scales;   // of int8.cu: [rows of x, blocks of inputs]
    const float* bias;
    void* out;
    const int* num_items;
    const int* item_expert;
    const int* item_rows;    // [items, N], -1 for none
    const int* item_places;  // [items, N]
    u64 out_stride;          // elements between rows of out
    u64 slice_stride;        // elements between slices' results
    u32 x_stride;            // elements
    u32 tiles;               // of one matrix
    u32 slices;
    u32 slice_blocks;
    u32 rows;                // of x, where there is no list
};

// Names of eight sums each, and the sums.
#define L0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define L2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define L3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define L4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define L5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define L6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define L7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define L8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define L9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define L10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define L11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define L12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define L13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define L14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define L15 "%120,%121,%122,%123,%124,%125,%126,%127"
template <u32 VALUE>
struct Number {
    static constexpr u32 value = VALUE;
};
// All products but the last `ALLOWED` groups are done.
template <u32 ALLOWED>
DEVICE void products_done() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(ALLOWED) : "memory"); }
DEVICE float fast_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
// Rows of 128 bytes, eight to a swizzled kilobyte.
DEVICE u64 descriptor(u32 address) { return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE u32 transposed(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// A block of each of TILES tiles, in one request: one for each tile takes 100 ns, however small. Coordinates in eight bytes and tiles.
// `map` describes all tiles of all matrices as one array (driver.rows_map).
DEVICE void copy_tiles(u32 destination, const u8* map, u32 at, u32 tile, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
                 "l"(map), "r"(at), "r"(tile), "r"(barrier), "l"(policy)
                 : "memory");
}

// A block of N rows of x, swizzled.
DEVICE void copy_rows(u32 destination, const TensorMap* map, u32 at, u32 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(destination), "l"(map), "r"(at),
                 "r"(row), "r"(barrier)
                 : "memory");
}

struct Unit {
    u32 item, first, slice, out_slice;  // item or block of rows, first tile, slices of inputs and of results
    u32 first_row;                      // the first tile among those of all matrices
};
DEVICE Unit unit_of(const Arguments& a, u32 unit, u32 groups) {
    Unit r;
#if ITEMS
    r.item = unit / groups, r.first = unit % groups * TILES, r.slice = r.out_slice = 0;
    r.first_row = (u32)__ldcg(a.item_expert + r.item) * a.tiles + r.first;
#else
    // Units side by side take all of the weights against few rows: x, which may be larger than the cache, is read once.
    const u32 place = unit / CLUSTER, outs = a.slices / CLUSTER;
    r.first = place % groups * TILES, r.out_slice = place / groups % outs, r.item = place / groups / outs;
    r.slice = r.out_slice * CLUSTER + unit % CLUSTER;
    r.first_row = r.first;
#endif
    return r;
}
// Row of x (or place of the result) of column n of a unit, -1 for none.
DEVICE int column(const Arguments& a, const int* list, u32 item, u32 n) {
#if ITEMS
    return __ldcg(list + item * N + n);
#else
    return item * N + n < a.rows ? (int)(item * N + n) : -1;
#endif
}

// How many columns there are, at least: they come one after another.
DEVICE u32 width_of(const int* rows) {
    u32 width = 16;
#pragma unroll
    for (u32 n = 16; n < N; n += 16)
        if (rows[n] >= 0) width = n + 16;
    return width;
}

// Where results of a unit's columns go, -1 for none. Of a list: lane l has those of columns l, l + 32 ..., read before they are needed.
struct Places {
#if ITEMS
    int of[(N + 31) / 32];
    DEVICE int at(u32 i, u32 column) const { return __shfl_sync(~0u, of[i / 4], i % 4 * 8 + column); }  // of column i * 8 + column
#else
    u32 first, rows;
    DEVICE int at(u32 i, u32 column) const { return first + i * 8 + column < rows ? (int)(first + i * 8 + column) : -1; }
#endif
};
DEVICE Places places_of(const Arguments& a, const Unit& unit, u32 lane) {
#if ITEMS
    Places r;
#pragma unroll
    for (u32 i = 0; i < (N + 31) / 32; i++) r.of[i] = i * 32 + lane < N ? column(a, a.item_places, unit.item, i * 32 + lane) : -1;
    return r;
#else
    return {unit.item * N, a.rows};
#endif
}

// bf16 results of 8 columns: lane (g, t) has `first` and `second` of column g, two of eight values each. Sixteen values of a column lie together: with
// eight bytes a lane, four lanes write a whole sector.
DEVICE void store_sectors(u16* column, u32 first, u32 second, u32 t) {
    const bool odd = t & 1;
    const u32 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
    if (column) *(uint2*)(column + (odd ? 8 : 0) + (t & 2) * 2) = odd ? uint2{other, second} : uint2{first, other};
}

// A warp's sums of DEPTH tiles that follow one another, and the first WIDTH columns: lane (g, t) has rows g and g + 8, columns 2t and 2t + 1 of every eight.
template <u32 WIDTH, u32 DEPTH>
DEVICE void write(const Arguments& a, const float (&acc)[DEPTH][WIDTH / 2], const Unit& unit, u32 first_tile, const Places& places, u32 g, u32 t) {
#if KIND == 1
    static_assert(DEPTH <= 2);
    // Gate and up of eight rows: a tile has 16 bytes of a column's results.
#pragma unroll
    for (u32 i = 0; i < WIDTH / 8; i++) {
        const int place = places.at(i, g);
        u32 r[DEPTH];
#pragma unroll
        for (u32 m = 0; m < DEPTH; m++) {
            const float* v = acc[m] + i * 4;
            r[m] = transposed(pack_bf16(fast_silu(v[0]) * v[2], fast_silu(v[1]) * v[3]));
        }
        u16* to = place >= 0 ? (u16*)a.out + place * a.out_stride + first_tile * 8 : nullptr;
        if constexpr (DEPTH == 2) store_sectors(first_tile + 1 < a.tiles ? to : nullptr, r[0], r[1], t);
        if ((DEPTH == 1 || first_tile + 1 == a.tiles) && first_tile < a.tiles && to) *(u32*)(to + t * 2) = r[0];
    }
#else
#pragma unroll
    for (u32 m = 0; m < DEPTH; m++) {
        const u32 tile = first_tile + m;
        if (tile >= a.tiles) return;
#if KIND == 2
#pragma unroll
        for (u32 i = 0; i < WIDTH / 8; i++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                const int place = places.at(i, t * 2 + j);
                if (place < 0) continue;
                float* to = (float*)a.out + unit.out_slice * a.slice_stride + place * a.out_stride + tile * 16 + g;
                to[0] = acc[m][i * 4 + j], to[8] = acc[m][i * 4 + 2 + j];
            }
#else
        // Transposed in registers: lane (g, t) then has rows 2t and 2t + 1 of column g.
        float low = 0.f, high = 0.f;
        if (KIND == 0 && a.bias) low = a.bias[tile * 16 + g], high = a.bias[tile * 16 + 8 + g];
#pragma unroll
        for (u32 i = 0; i < WIDTH / 8; i++) {
            const float* v = acc[m] + i * 4;
            const int place = places.at(i, g);
            const u32 r = transposed(pack_bf16(v[0] + low, v[1] + low)), q = transposed(pack_bf16(v[2] + high, v[3] + high));
            store_sectors(place >= 0 ? (u16*)a.out + place * a.out_stride + tile * 16 : nullptr, r, q, t);
        }
#endif
    }
#endif
}
