// Sending and receiving bytes between two ranks, and waiting for them.
#include "links/links.h"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { __asm__ __volatile__("yield"); }
#else
static inline void relax() {}
#endif

#ifndef POLLRDHUP
#define POLLRDHUP 0
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

namespace windlass {

namespace {
constexpr int64_t HEADER_BYTES = 4096, RING_BYTES = 1 << 18;  // as in runtime/parallel/shared_memory.py
constexpr int64_t YIELD_NANOSECONDS = 1000000;                // then sleep until another rank wakes this one
constexpr int SLEEP_MILLISECONDS = 100;                       // at most, before the clock is looked at again
}  // namespace

int64_t link_clock() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Counted::Counted(Links& links, Collective kind) : count(links.counts[kind]), began(link_clock()) { count.calls++; }
Counted::~Counted() { count.nanoseconds += link_clock() - began; }

Links::Links(int rank, int size, const int* sockets, const int* second, const int* memory, double timeout_seconds, double spin_seconds,
             bool is_local)
    : rank(rank), size(size), is_local(is_local), peers(size), rooms(NUM_ROOMS), timeout(int64_t(timeout_seconds * 1e9)),
      spin(int64_t(spin_seconds * 1e9)) {
    for (int other = 0; other < size; other++) {
        Peer& peer = peers[other];
        peer.sockets[0] = sockets[other];
        peer.sockets[1] = second[other] < 0 ? sockets[other] : second[other];
        if (memory[other] < 0) continue;
        void* found = mmap(nullptr, 2 * (HEADER_BYTES + RING_BYTES), PROT_READ | PROT_WRITE, MAP_SHARED, memory[other], 0);
        if (found == MAP_FAILED) {
            fail("shared memory could not be mapped");
            continue;
        }
        peer.mapped = found;
        char* half[2] = {static_cast<char*>(found), static_cast<char*>(found) + HEADER_BYTES + RING_BYTES};
        const int ours = rank < other ? 0 : 1;  // the lower rank writes the first half
        peer.out = reinterpret_cast<Ring*>(half[ours]);
        peer.in = reinterpret_cast<Ring*>(half[1 - ours]);
        peer.out_bytes = half[ours] + HEADER_BYTES;
        peer.in_bytes = half[1 - ours] + HEADER_BYTES;
    }
}

Links::~Links() {
    for (Peer& peer : peers)
        if (peer.mapped) munmap(peer.mapped, 2 * (HEADER_BYTES + RING_BYTES));
}

bool Links::fail(const std::string& words) {
    if (!lost.load()) {
        why = words;
        lost.store(true);
    }
    return false;
}

uint8_t* Links::room(Room number, int64_t bytes) {
    if (int64_t(rooms[number].size()) < bytes) rooms[number].resize(bytes);
    return rooms[number].data();
}

// Sequentially consistent, as is going to sleep: one of the two sides sees the other.
void Links::wake(Peer& peer, std::atomic<uint32_t>& sleeps) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!sleeps.load(std::memory_order_relaxed) || !sleeps.exchange(0)) return;
    const char bell = 0;
    (void)!send(peer.sockets[0], &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);  // a full buffer means that wake-ups are pending already
}

// Parts go to their owner and sums come from it; so the owner is the other rank where parts are sent, and where sums come.
int Links::out_socket(const Transfer& transfer) const {
    const bool is_ours = transfer.way == SUMS, is_higher = is_ours ? rank > transfer.peer : transfer.peer > rank;
    return peers[transfer.peer].sockets[transfer.way != EITHER_WAY && is_higher];
}
int Links::in_socket(const Transfer& transfer) const {
    const bool is_ours = transfer.way == PARTS, is_higher = is_ours ? rank > transfer.peer : transfer.peer > rank;
    return peers[transfer.peer].sockets[transfer.way != EITHER_WAY && is_higher];
}

// Bytes sent now; -1: the other rank closed the connection.
int64_t Links::put(Peer& peer, int socket, const char* from, int64_t bytes) {
    if (!peer.out) {
        const ssize_t sent = send(socket, from, size_t(bytes), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) return sent;
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    }
    const uint64_t written = peer.out->written.load(std::memory_order_relaxed);
    const int64_t filled = int64_t(written - peer.out->read.load(std::memory_order_acquire));
    if (filled < 0 || filled > RING_BYTES) return -1;
    bytes = std::min(bytes, RING_BYTES - filled);
    if (bytes == 0) return 0;
    const int64_t at = int64_t(written % RING_BYTES), until_end = std::min(bytes, RING_BYTES - at);
    std::memcpy(peer.out_bytes + at, from, size_t(until_end));
    std::memcpy(peer.out_bytes, from + until_end, size_t(bytes - until_end));
    peer.out->written.store(written + bytes, std::memory_order_release);
    wake(peer, peer.in->writer_sleeps);
    return bytes;
}

int64_t Links::get(Peer& peer, int socket, char* to, int64_t bytes) {
    if (!peer.in) {
        const ssize_t came = recv(socket, to, size_t(bytes), MSG_DONTWAIT);
        if (came > 0) return came;
        return came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? 0 : -1;
    }
    const uint64_t read = peer.in->read.load(std::memory_order_relaxed);
    const int64_t filled = int64_t(peer.in->written.load(std::memory_order_acquire) - read);
    if (filled < 0 || filled > RING_BYTES) return -1;
    bytes = std::min(bytes, filled);
    if (bytes == 0) return 0;
    const int64_t at = int64_t(read % RING_BYTES), until_end = std::min(bytes, RING_BYTES - at);
    std::memcpy(to, peer.in_bytes + at, size_t(until_end));
    std::memcpy(to + until_end, peer.in_bytes, size_t(bytes - until_end));
    peer.in->read.store(read + bytes, std::memory_order_release);
    wake(peer, peer.in->writer_sleeps);
    return bytes;
}

// One wait for other ranks: spin, then yield, then sleep. Another rank is usually microseconds behind, and waking a sleeping core takes
// longer than that. But it may share this core, or be across a network.
class Waiting {
public:
    Waiting(Links& links, Transfer* transfers, int count) : links(links), transfers(transfers), count(count) {}
    ~Waiting() { arm(0); }

    void progress() {
        since = 0;
        has_hung_up = false;
        if (is_armed) arm(0);
    }

    // Called when no byte could be moved. False: the group is lost.
    bool once() {
        const int64_t now = link_clock();
        if (!since) since = now;
        const int64_t waited = now - since;
        if (waited < links.spin) {
            for (int i = 0; i < 8; i++) relax();
            return true;
        }
        if (waited > links.timeout) return links.fail("timed out after " + std::to_string(links.timeout / 1000000000) + " s waiting for rank " +
                                                      std::to_string(late()));
        if (waited < YIELD_NANOSECONDS && links.is_local) {
            sched_yield();
            return true;
        }
        if (!is_armed) {
            arm(1);
            return true;  // try once more before sleeping: another rank may not have seen that we are about to
        }
        return sleep();
    }

private:
    int late() const {
        for (int i = 0; i < count; i++)
            if (transfers[i].out_bytes || transfers[i].in_bytes) return transfers[i].peer;
        return -1;
    }

    void arm(uint32_t sleeps) {
        if (is_armed == (sleeps != 0)) return;
        is_armed = sleeps != 0;
        for (int i = 0; i < count; i++) {
            Peer& peer = links.peers[transfers[i].peer];
            if (peer.out) peer.out->writer_sleeps.store(sleeps, std::memory_order_relaxed);
        }
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }

    bool sleep() {
        std::vector<pollfd> watched;
        std::vector<int> who;
        const auto watch = [&](int peer, int socket, short events) {
            watched.push_back({socket, short(events | POLLRDHUP), 0});
            who.push_back(peer);
        };
        for (int i = 0; i < count; i++) {
            const Transfer& transfer = transfers[i];
            if (!transfer.out_bytes && !transfer.in_bytes) continue;
            if (links.peers[transfer.peer].out) {
                watch(transfer.peer, links.peers[transfer.peer].sockets[0], POLLIN);  // bells
                continue;
            }
            if (transfer.out_bytes) watch(transfer.peer, links.out_socket(transfer), POLLOUT);
            if (transfer.in_bytes) watch(transfer.peer, links.in_socket(transfer), POLLIN);
        }
        if (poll(watched.data(), watched.size(), SLEEP_MILLISECONDS) <= 0) return true;
        bool hung_up = false;
        for (size_t i = 0; i < watched.size(); i++) {
            char bells[64];
            if (links.peers[who[i]].out && watched[i].revents & POLLIN)
                while (recv(watched[i].fd, bells, sizeof bells, MSG_DONTWAIT) > 0) {}
            if (watched[i].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) hung_up = true;
            if (hung_up && has_hung_up) return links.fail("rank " + std::to_string(who[i]) + " closed the connection");
        }
        has_hung_up = hung_up;  // what it sent before closing can still be read
        arm(0);
        arm(1);
        return true;
    }

    Links& links;
    Transfer* transfers;
    const int count;
    int64_t since = 0;
    bool is_armed = false, has_hung_up = false;
};

bool Links::exchange(Transfer* transfers, int count, LinkCount& counted) {
    if (lost.load()) return false;
    for (int i = 0; i < count; i++) {
        counted.sent_bytes += transfers[i].out_bytes;
        counted.received_bytes += transfers[i].in_bytes;
    }
    Waiting waiting(*this, transfers, count);
    for (;;) {
        bool has_moved = false, is_left = false;
        for (int i = 0; i < count; i++) {
            Transfer& transfer = transfers[i];
            Peer& peer = peers[transfer.peer];
            if (transfer.out_bytes) {
                const int64_t sent = put(peer, out_socket(transfer), static_cast<const char*>(transfer.out), transfer.out_bytes);
                if (sent < 0) return fail("rank " + std::to_string(transfer.peer) + " closed the connection");
                transfer.out = static_cast<const char*>(transfer.out) + sent;
                transfer.out_bytes -= sent;
                has_moved |= sent > 0;
            }
            if (transfer.in_bytes) {
                const int64_t came = get(peer, in_socket(transfer), static_cast<char*>(transfer.in), transfer.in_bytes);
                if (came < 0) return fail("rank " + std::to_string(transfer.peer) + " closed the connection");
                transfer.in = static_cast<char*>(transfer.in) + came;
                transfer.in_bytes -= came;
                has_moved |= came > 0;
            }
            is_left |= transfer.out_bytes || transfer.in_bytes;
        }
        if (!is_left) return true;
        if (has_moved) waiting.progress();
        else if (!waiting.once()) return false;
    }
}

}  // namespace windlass

extern "C" {

void* windlass_links_open(int rank, int size, const int* sockets, const int* second, const int* memory, double timeout_seconds,
                          double spin_seconds, int is_local) {
    return new windlass::Links(rank, size, sockets, second, memory, timeout_seconds, spin_seconds, is_local != 0);
}

void windlass_links_close(void* links) { delete static_cast<windlass::Links*>(links); }

// Ends all transfers. Call this before closing the sockets.
void windlass_links_end(void* links) { static_cast<windlass::Links*>(links)->fail("this rank has left the group"); }

// The error message, or null.
const char* windlass_links_lost(void* links) {
    auto* found = static_cast<windlass::Links*>(links);
    return found->lost.load() ? found->why.c_str() : nullptr;
}

// Four numbers for each collective.
void windlass_links_counts(void* links, int64_t* to) {
    std::memcpy(to, static_cast<windlass::Links*>(links)->counts, sizeof(windlass::LinkCount) * windlass::NUM_COLLECTIVES);
}
}
