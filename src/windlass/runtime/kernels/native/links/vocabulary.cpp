// Vocabulary-parallel embeddings and logits: each rank holds an interval of the vocabulary. As in links.cpp, only the first thread
// communicates.
#include "links/links.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace windlass {
namespace {

Links& links_of(const Op& op) { return *reinterpret_cast<Links*>(op.ints[0]); }

int64_t token_at(const void* tokens, bool is_wide, int64_t row) {
    return is_wide ? static_cast<const int64_t*>(tokens)[row] : static_cast<const int32_t*>(tokens)[row];
}

int owner_of(const int32_t* starts, int size, int64_t token) {
    int owner = 0;
    while (owner < size - 1 && token >= starts[owner + 1]) owner++;
    return owner;
}

// Which logits a step needs: all of them, or the N largest of the tokens that exist.
struct Asked {
    int64_t wanted, num_tokens;
    Asked(const int32_t* candidates, int64_t width) : wanted(candidates ? candidates[0] : 0), num_tokens(width) {
        if (wanted && candidates[1] > 0) num_tokens = std::min<int64_t>(candidates[1], width);
    }
    // Of tokens first .. last; 0: all of them are sent, because that is no more.
    int64_t of(int64_t first, int64_t last) const {
        const int64_t real = std::max<int64_t>(std::min(last, num_tokens) - first, 0);
        return wanted > 0 && 2 * wanted < last - first ? std::min(wanted, real) : 0;
    }
    bool all(int64_t first, int64_t last) const { return !(wanted > 0 && 2 * wanted < last - first); }
};

// A row of logits, all minus infinity.
void forget(float* row, int64_t count) { std::fill(row, row + count, -std::numeric_limits<float>::infinity()); }

// The wire form of embedding rows that ranks exchange.
class Rows {
public:
    Rows(const Op& op, Links& links)
        : links(links), numbers(op.at<char>(0)), count(op.rows()), width(op.ints[1]), type(op.ints[2]),
          is_packed(op.ints[3] && op.ints[2] == FLOAT32), row_bytes(op.ints[1] * number_bytes(op.ints[2])), owners(op.rows()) {
        for (int64_t row = 0; row < count; row++)
            owners[row] = owner_of(op.at<int32_t>(2), links.size, token_at(op.data[1], op.ints[4], row));
        wire = links.room(SUM_ROOM, count * bytes_of(width));
    }

    void pack() {
        for (int64_t row = 0; row < count; row++) {
            if (owners[row] != links.rank) continue;
            if (is_packed) pack_numbers(reinterpret_cast<float*>(numbers + row * row_bytes), width, at(row, 0));
            else std::memcpy(at(row, 0), numbers + row * row_bytes, row_bytes);
        }
    }

    void unpack() {
        for (int64_t row = 0; row < count; row++) {
            if (is_packed) unpack_numbers(at(row, 0), width, reinterpret_cast<float*>(numbers + row * row_bytes));
            else std::memcpy(numbers + row * row_bytes, at(row, 0), row_bytes);
        }
    }

    // Each rank sends its own rows to all others.
    bool send_whole(LinkCount& counted) {
        Plan plan(links.size);
        for (int64_t row = 0; row < count; row++)
            for (int other = 0; other < links.size; other++) add(plan, owners[row], other, row, Part(width, 0, 1));
        return pass(plan, counted);
    }

    // A row is scattered in pieces to the other ranks, which forward them, so that no rank sends more than a row once: the rank that
    // holds the most frequent tokens would otherwise send far more than the others.
    bool send_pieces(LinkCount& counted) {
        Plan first(links.size), second(links.size);
        for (int64_t row = 0; row < count; row++) {
            for (int by = 0; by < links.size; by++) {
                if (by == owners[row]) continue;
                const Part piece(width, by < owners[row] ? by : by - 1, links.size - 1);
                add(first, owners[row], by, row, piece);
                for (int other = 0; other < links.size; other++)
                    if (other != owners[row]) add(second, by, other, row, piece);
            }
        }
        return pass(first, counted) && pass(second, counted);
    }

private:
    struct Piece {
        int64_t row;
        Part part;
    };
    // What this rank sends to each other, and what it is sent.
    struct Plan {
        explicit Plan(int size) : out(size), in(size) {}
        std::vector<std::vector<Piece>> out, in;
    };

    int64_t bytes_of(int64_t numbers) const { return is_packed ? packed_bytes(numbers) : numbers * number_bytes(type); }
    uint8_t* at(int64_t row, int64_t first) { return wire + row * bytes_of(width) + bytes_of(first); }

    void add(Plan& plan, int from, int to, int64_t row, const Part& part) const {
        if (from == to) return;
        if (from == links.rank) plan.out[to].push_back({row, part});
        if (to == links.rank) plan.in[from].push_back({row, part});
    }

    int64_t bytes_of(const std::vector<Piece>& pieces) const {
        int64_t bytes = 0;
        for (const Piece& piece : pieces) bytes += bytes_of(piece.part.count);
        return bytes;
    }

    bool pass(const Plan& plan, LinkCount& counted) {
        int64_t out_bytes = 0, in_bytes = 0;
        for (int other = 0; other < links.size; other++) {
            out_bytes += bytes_of(plan.out[other]);
            in_bytes += bytes_of(plan.in[other]);
        }
        uint8_t *out = links.room(OUT_ROOM, out_bytes), *in = links.room(IN_ROOM, in_bytes);
        std::vector<Transfer> transfers;
        for (int other = 0; other < links.size; other++) {
            if (other == links.rank) continue;
            transfers.push_back({other, out, bytes_of(plan.out[other]), in, bytes_of(plan.in[other])});
            for (const Piece& piece : plan.out[other]) {
                std::memcpy(out, at(piece.row, piece.part.first), bytes_of(piece.part.count));
                out += bytes_of(piece.part.count);
            }
            in += bytes_of(plan.in[other]);
        }
        if (!links.exchange(transfers.data(), int(transfers.size()), counted)) return false;
        in = links.room(IN_ROOM, in_bytes);
        for (const std::vector<Piece>& pieces : plan.in) {
            for (const Piece& piece : pieces) {
                std::memcpy(at(piece.row, piece.part.first), in, bytes_of(piece.part.count));
                in += bytes_of(piece.part.count);
            }
        }
        return true;
    }

    Links& links;
    char* numbers;
    const int64_t count, width, type;
    const bool is_packed;
    const int64_t row_bytes;
    std::vector<int> owners;
    uint8_t* wire;  // every row, one after another
};

}  // namespace

// Tokens to local rows of the table; tokens of other ranks are clamped, and their rows dropped later. data: result, tokens; ints: first, last, whether tokens are int64.
WINDLASS_OP(link_localize) {
    if (worker.index) return;
    const int64_t first = op.ints[0], last = op.ints[1];
    for (int64_t row = 0; row < op.rows(); row++) {
        const int64_t local = std::clamp<int64_t>(token_at(op.data[1], op.ints[2], row) - first, 0, last - first - 1);
        if (op.ints[2]) op.at<int64_t>(0)[row] = local;
        else op.at<int32_t>(0)[row] = int32_t(local);
    }
}

// Embedding rows, each from the rank that holds it. data: rows, tokens, starts of all ranks' tokens and the end of the last; ints: links, numbers in a row,
// their type, whether they may be rounded, whether tokens are int64.
WINDLASS_OP(link_rows) {
    if (worker.index || !op.rows()) return;
    Links& links = links_of(op);
    Counted counted(links, EMBEDDING);
    Rows rows(op, links);
    rows.pack();
    if (links.is_local ? rows.send_whole(counted.count) : rows.send_pieces(counted.count)) rows.unpack();
}

// Logits are gathered on rank 0. data: part, whole, starts as above, candidates or null; ints: links, bytes of a number.
WINDLASS_OP(link_logits) {
    const int64_t rows = op.rows(), each = op.ints[1];
    if (worker.index || !rows) return;
    Links& links = links_of(op);
    Counted counted(links, LOGITS);
    const int32_t* starts = op.at<int32_t>(2);
    const int64_t width = starts[links.size];
    const Asked asked(each == 4 ? op.at<int32_t>(3) : nullptr, width);
    const auto bytes_of = [&](int rank) {
        const int64_t first = starts[rank], last = starts[rank + 1];
        return rows * (asked.all(first, last) ? (last - first) * each : asked.of(first, last) * int64_t(sizeof(Candidate)));
    };
    const int64_t first = starts[links.rank], count = starts[links.rank + 1] - first;
    if (links.rank) {
        const void* from = op.data[0];
        if (!asked.all(first, first + count)) {
            auto* picked = reinterpret_cast<Candidate*>(links.room(OUT_ROOM, bytes_of(links.rank)));
            const int64_t wanted = asked.of(first, first + count), real = std::min(count, std::max<int64_t>(asked.num_tokens - first, 0));
            for (int64_t row = 0; row < rows; row++)
                pick_largest(op.at<float>(0) + row * count, real, wanted, int32_t(first), picked + row * wanted);
            from = picked;
        }
        Transfer transfer{0, from, bytes_of(links.rank), nullptr, 0};
        links.exchange(&transfer, 1, counted.count);
        return;
    }
    int64_t total = 0;
    for (int other = 1; other < links.size; other++) total += bytes_of(other);
    uint8_t* in = links.room(IN_ROOM, total);
    std::vector<Transfer> transfers;
    for (int other = 1; other < links.size; in += bytes_of(other++)) transfers.push_back({other, nullptr, 0, in, bytes_of(other)});
    in = links.room(IN_ROOM, total);
    for (int64_t row = 0; row < rows; row++)
        std::memcpy(op.at<char>(1) + row * width * each, op.at<char>(0) + row * count * each, count * each);
    if (!links.exchange(transfers.data(), int(transfers.size()), counted.count)) return;
    for (int other = 1; other < links.size; in += bytes_of(other++)) {
        const int64_t start = starts[other], length = starts[other + 1] - start, wanted = asked.of(start, start + length);
        for (int64_t row = 0; row < rows; row++) {
            char* to = op.at<char>(1) + (row * width + start) * each;
            if (asked.all(start, start + length)) {
                std::memcpy(to, in + row * length * each, length * each);
                continue;
            }
            forget(reinterpret_cast<float*>(to), length);
            const auto* picked = reinterpret_cast<const Candidate*>(in) + row * wanted;
            for (int64_t i = 0; i < wanted; i++)
                if (picked[i].id >= start && picked[i].id < start + length) op.at<float>(1)[row * width + picked[i].id] = picked[i].value;
        }
    }
}

// Complete logits, sent to or received from another rank. data: logits, candidates or null; ints: links, bytes of a number, numbers in a row, the
// other rank, which collective it is, whether to receive rather than send.
WINDLASS_OP(link_pass_logits) {
    const int64_t rows = op.rows(), each = op.ints[1], width = op.ints[2];
    if (worker.index || !rows) return;
    Links& links = links_of(op);
    Counted counted(links, Collective(op.ints[4]));
    const bool is_taken = op.ints[5];
    const Asked asked(each == 4 ? op.at<int32_t>(1) : nullptr, width);
    const int64_t wanted = asked.of(0, width);
    const bool all = asked.all(0, width);
    const int64_t bytes = rows * (all ? width * each : wanted * int64_t(sizeof(Candidate)));
    auto* picked = reinterpret_cast<Candidate*>(links.room(OUT_ROOM, bytes));
    for (int64_t row = 0; row < rows && !all && !is_taken; row++)
        pick_largest(op.at<float>(0) + row * width, std::min(width, asked.num_tokens), wanted, 0, picked + row * wanted);
    void* at = all ? op.data[0] : picked;
    Transfer transfer{int(op.ints[3]), at, is_taken ? 0 : bytes, at, is_taken ? bytes : 0};
    if (!links.exchange(&transfer, 1, counted.count) || all || !is_taken) return;
    for (int64_t row = 0; row < rows; row++) {
        float* to = op.at<float>(0) + row * width;
        forget(to, width);
        for (int64_t i = 0; i < wanted; i++)
            if (const int32_t id = picked[row * wanted + i].id; id >= 0 && id < width) to[id] = picked[row * wanted + i].value;
    }
}

}  // namespace windlass
