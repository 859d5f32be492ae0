// Communication between ranks without Python: a byte stream to and from every other rank of a group, over shared memory or a socket, and
// the building blocks of collectives. runtime/kernels/cpu/links.py opens them; operations are in links.cpp and vocabulary.cpp.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "program/program.h"

namespace windlass {

// As runtime/kernels/cpu/links.py names them.
enum Collective { ALL_REDUCE, EMBEDDING, LOGITS, ALL_GATHER, GATHER, BROADCAST, SEND_NEXT, TAKE_PREVIOUS, NUM_COLLECTIVES };

struct LinkCount {
    int64_t calls, sent_bytes, received_bytes, nanoseconds;
};

// Two ranks may have two connections: one for sums that the lower rank owns, one for those that the higher rank owns. On each, a reply always
// follows a message, so that TCP needs no separate acknowledgements.
enum Way { EITHER_WAY, PARTS, SUMS };

// Bytes to send to one other rank, and to receive from it.
struct Transfer {
    int peer;
    const void* out;
    int64_t out_bytes;
    void* in;
    int64_t in_bytes;
    Way way = EITHER_WAY;
};

// One direction of what two ranks share, as runtime/parallel/shared_memory.py lays the file out. Positions only grow.
struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> writer_sleeps;  // the writer of this direction is asleep, whatever it waits for
};

struct Peer {
    int sockets[2] = {-1, -1};           // often one and the same
    Ring *out = nullptr, *in = nullptr;  // null: bytes go over the socket; else it only carries wake-ups and end of file
    char *out_bytes = nullptr, *in_bytes = nullptr;
    void* mapped = nullptr;
};

enum Room { OUT_ROOM, IN_ROOM, SUM_ROOM, NUM_ROOMS };

class Links {
public:
    Links(int rank, int size, const int* sockets, const int* second, const int* memory, double timeout_seconds, double spin_seconds,
          bool is_local);
    ~Links();

    // Moves all bytes of all transfers, in whatever order they can go. False: a rank is lost, and with it the group.
    bool exchange(Transfer* transfers, int count, LinkCount& counted);
    // A buffer that is valid until the next call with the same number.
    uint8_t* room(Room number, int64_t bytes);
    bool fail(const std::string& words);

    const int rank, size;
    const bool is_local;                 // all ranks are on one machine
    int64_t num_sums = 0;                // of those whose owners rotate
    LinkCount counts[NUM_COLLECTIVES] = {};
    std::atomic<bool> lost{false};
    std::string why;

private:
    friend class Waiting;
    int out_socket(const Transfer& transfer) const;
    int in_socket(const Transfer& transfer) const;
    int64_t put(Peer& peer, int socket, const char* from, int64_t bytes);
    int64_t get(Peer& peer, int socket, char* to, int64_t bytes);
    void wake(Peer& peer, std::atomic<uint32_t>& sleeps);

    std::vector<Peer> peers;
    std::vector<std::vector<uint8_t>> rooms;
    const int64_t timeout, spin;         // nanoseconds
};

// Counts the time of a collective, from construction to destruction. `exchange` counts its bytes.
class Counted {
public:
    Counted(Links& links, Collective kind);
    ~Counted();
    LinkCount& count;

private:
    int64_t began;
};

int64_t link_clock();

// Numbers on the wire. Compiled for every instruction set (numbers.cpp).
//
// int8: a byte that stands for a scale, then up to 64 codes. Scales lie six to an octave from 2^-24 to 2^18, the least that is not below
// 1/127 of the largest magnitude: a value is off by at most half a scale, 1/226 of the largest in its block. They have 17 digits, so that
// code * scale is exact, and its sum the same on every machine. A value that is not finite, or beyond 3e7, makes its block NaN.
constexpr int64_t QUANTUM = 64;
inline int64_t packed_bytes(int64_t count) { return count + (count + QUANTUM - 1) / QUANTUM; }

// Part `number` of `parts` of `count` numbers, in whole blocks.
struct Part {
    int64_t first, count;
    Part(int64_t total, int number, int parts) {
        const int64_t blocks = (total + QUANTUM - 1) / QUANTUM;
        first = std::min(blocks * number / parts * QUANTUM, total);
        count = std::min(blocks * (number + 1) / parts * QUANTUM, total) - first;
    }
};

enum NumberType { FLOAT32, BFLOAT16, FLOAT64 };  // as runtime/kernels/cpu/links.py numbers them
inline int64_t number_bytes(int64_t type) { return type == FLOAT64 ? 8 : type == BFLOAT16 ? 2 : 4; }

struct Candidate {
    float value;
    int32_t id;
};

void pack_numbers(const float* x, int64_t count, uint8_t* to);
void unpack_numbers(const uint8_t* from, int64_t count, float* x);
void add_packed(const uint8_t* from, int64_t count, float* x);
// to = parts[0] + parts[1] + ..., in that order; `to` may be one of them.
void add_parts(void* to, const void* const* parts, int num_parts, int64_t count, int64_t type);
// The `wanted` largest of x[0 .. count), unordered; of equals the first ones; NaN counts as the largest.
void pick_largest(const float* x, int64_t count, int64_t wanted, int32_t first_id, Candidate* found);

}  // namespace windlass
