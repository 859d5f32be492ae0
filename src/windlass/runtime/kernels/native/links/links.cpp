// Collectives between ranks as operations of a program. The first thread communicates; the others wait for it.
//
// Sums are added in rank order, so that every rank ends with the same bits. A small sum, or one between two ranks, is an all-to-all
// exchange of whole tensors. Otherwise it is a reduce-scatter and an all-gather: each part has an owner that receives it from all ranks,
// adds it up and sends the sum to all, so that a rank sends 2 (n - 1) / n of the tensor. Where sums travel as int8, less than a packet is
// not worth its header: there are only as many owners as packets, and ranks take turns.
#include "links/links.h"

#include <algorithm>
#include <cstring>

namespace windlass {
namespace {

constexpr int64_t AT_ONCE_BYTES = 16 << 10;  // exact sums up to this size are exchanged whole, for any number of ranks
constexpr int64_t PIECE_BYTES = 1 << 20;     // of a large sum between two
constexpr int64_t PACKET_BYTES = 1448;       // of Ethernet's 1500, less the headers of IP and TCP

Links& links_of(const Op& op) { return *reinterpret_cast<Links*>(op.ints[0]); }

std::vector<const void*> by_rank(const Links& links, const void* ours, const uint8_t* theirs, int64_t bytes_each) {
    std::vector<const void*> parts(links.size);
    for (int rank = 0, next = 0; rank < links.size; rank++) parts[rank] = rank == links.rank ? ours : theirs + bytes_each * next++;
    return parts;
}

// All-to-all exchange of the whole tensor.
void sum_at_once(Links& links, char* x, int64_t count, int64_t type, LinkCount& counted) {
    const int64_t bytes = count * number_bytes(type);
    uint8_t* theirs = links.room(IN_ROOM, bytes * (links.size - 1));
    std::vector<Transfer> transfers;
    for (int other = 0; other < links.size; other++)
        if (other != links.rank) transfers.push_back({other, x, bytes, theirs + bytes * int64_t(transfers.size()), bytes});
    if (!links.exchange(transfers.data(), int(transfers.size()), counted)) return;
    add_parts(x, by_rank(links, x, theirs, bytes).data(), links.size, count, type);
}

// Parts and their owners; this rank may or may not be one.
struct Owners {
    int parts, first, size;
    int of(int part) const { return (first + part) % size; }
    int part_of(int rank) const {
        const int part = (rank - first + size) % size;
        return part < parts ? part : -1;
    }
};

void sum_by_owners(Links& links, char* x, int64_t count, int64_t type, LinkCount& counted) {
    const int64_t each = number_bytes(type);
    const Part own(count, links.rank, links.size);
    uint8_t* theirs = links.room(IN_ROOM, own.count * each * (links.size - 1));
    std::vector<Transfer> parts, sums;
    for (int other = 0; other < links.size; other++) {
        if (other == links.rank) continue;
        const Part part(count, other, links.size);
        char* there = x + part.first * each;
        parts.push_back({other, there, part.count * each, theirs + own.count * each * int64_t(parts.size()), own.count * each});
        sums.push_back({other, x + own.first * each, own.count * each, there, part.count * each});
    }
    if (!links.exchange(parts.data(), int(parts.size()), counted)) return;
    char* here = x + own.first * each;
    add_parts(here, by_rank(links, here, theirs, own.count * each).data(), links.size, own.count, type);
    links.exchange(sums.data(), int(sums.size()), counted);
}

void sum_exact(Links& links, char* x, int64_t count, int64_t type, LinkCount& counted) {
    const int64_t each = number_bytes(type);
    if (links.size > 2 && count * each > AT_ONCE_BYTES) return sum_by_owners(links, x, count, type, counted);
    const int64_t piece = PIECE_BYTES / each;
    for (int64_t first = 0; first < count; first += piece)
        sum_at_once(links, x + first * each, std::min(piece, count - first), type, counted);
}

// Between two ranks: both send their whole tensor packed, and both add the packed values, so that they get the same bits.
void sum_of_two_packed(Links& links, float* x, int64_t count, LinkCount& counted) {
    const int64_t bytes = packed_bytes(count);
    uint8_t *ours = links.room(OUT_ROOM, bytes), *theirs = links.room(IN_ROOM, bytes);
    pack_numbers(x, count, ours);
    Transfer transfer{1 - links.rank, ours, bytes, theirs, bytes};
    if (!links.exchange(&transfer, 1, counted)) return;
    unpack_numbers(links.rank == 0 ? ours : theirs, count, x);
    add_packed(links.rank == 0 ? theirs : ours, count, x);
}

// An owner adds what others send to its own part, which is not rounded; all ranks use the packed sum, the owner too.
void sum_packed(Links& links, float* x, int64_t count, LinkCount& counted) {
    const int64_t packets = (packed_bytes(count) + PACKET_BYTES - 1) / PACKET_BYTES;
    const int num_parts = links.is_local ? links.size : int(std::min<int64_t>(links.size, packets));
    const Owners owners{num_parts, int(links.num_sums * num_parts % links.size), links.size};
    links.num_sums++;
    const int own = owners.part_of(links.rank);
    const Part mine(count, std::max(own, 0), num_parts);
    const int64_t mine_bytes = own < 0 ? 0 : packed_bytes(mine.count);
    uint8_t *out = links.room(OUT_ROOM, packed_bytes(count) + num_parts), *in = links.room(IN_ROOM, mine_bytes * (links.size - 1));
    uint8_t* sum = links.room(SUM_ROOM, packed_bytes(count) + num_parts);
    std::vector<Transfer> parts, sums;
    std::vector<uint8_t*> heard(links.size, nullptr);
    for (int other = 0, next = 0; other < links.size; other++) {
        if (other == links.rank) continue;
        const int number = owners.part_of(other);
        const Part part(count, std::max(number, 0), num_parts);
        const int64_t bytes = number < 0 ? 0 : packed_bytes(part.count);
        if (number >= 0) pack_numbers(x + part.first, part.count, out + packed_bytes(part.first));
        heard[other] = in + mine_bytes * next++;
        parts.push_back({other, out + packed_bytes(part.first), bytes, heard[other], mine_bytes, PARTS});
        sums.push_back({other, sum + packed_bytes(mine.first), mine_bytes, sum + packed_bytes(part.first), bytes, SUMS});
    }
    if (!links.exchange(parts.data(), int(parts.size()), counted)) return;
    if (own >= 0) {
        for (int other = 0; other < links.size; other++)
            if (heard[other]) add_packed(heard[other], mine.count, x + mine.first);
        pack_numbers(x + mine.first, mine.count, sum + packed_bytes(mine.first));
    }
    if (!links.exchange(sums.data(), int(sums.size()), counted)) return;
    unpack_numbers(sum, count, x);  // parts are whole blocks, one after another
}

}  // namespace

// data: x; ints: links, numbers in a row, their type, whether they may travel as int8.
WINDLASS_OP(link_sum) {
    const int64_t count = op.rows() * op.ints[1], type = op.ints[2];
    if (worker.index || !count) return;
    Links& links = links_of(op);
    Counted counted(links, ALL_REDUCE);
    if (!op.ints[3] || type != FLOAT32) sum_exact(links, op.at<char>(0), count, type, counted.count);
    else if (links.size == 2) sum_of_two_packed(links, op.at<float>(0), count, counted.count);
    else sum_packed(links, op.at<float>(0), count, counted.count);
}

// data: x, room for all; ints: links, bytes.
WINDLASS_OP(link_all_gather) {
    const int64_t bytes = op.ints[1];
    if (worker.index || !bytes) return;
    Links& links = links_of(op);
    Counted counted(links, ALL_GATHER);
    std::memcpy(op.at<char>(1) + bytes * links.rank, op.data[0], bytes);
    std::vector<Transfer> transfers;
    for (int other = 0; other < links.size; other++)
        if (other != links.rank) transfers.push_back({other, op.data[0], bytes, op.at<char>(1) + bytes * other, bytes});
    links.exchange(transfers.data(), int(transfers.size()), counted.count);
}

// data: x; ints: links, bytes.
WINDLASS_OP(link_broadcast) {
    const int64_t bytes = op.ints[1];
    if (worker.index || !bytes) return;
    Links& links = links_of(op);
    Counted counted(links, BROADCAST);
    std::vector<Transfer> transfers;
    for (int other = 1; other < links.size && !links.rank; other++) transfers.push_back({other, op.data[0], bytes, nullptr, 0});
    if (links.rank) transfers.push_back({0, nullptr, 0, op.data[0], bytes});
    links.exchange(transfers.data(), int(transfers.size()), counted.count);
}

// data: x; ints: links, bytes of a row, the other rank, which collective it is, whether to receive rather than send.
WINDLASS_OP(link_pass) {
    const int64_t bytes = op.rows() * op.ints[1];
    if (worker.index || !bytes) return;
    Links& links = links_of(op);
    Counted counted(links, Collective(op.ints[3]));
    Transfer transfer{int(op.ints[2]), op.data[0], op.ints[4] ? 0 : bytes, op.data[0], op.ints[4] ? bytes : 0};
    links.exchange(&transfer, 1, counted.count);
}

}  // namespace windlass
