/* Vector clocks: who knows what. They make the model's checks independent of the schedule.
 *
 * Everything that can act on memory is an agent with its own count of time: a warp's ordinary accesses, a phase of an
 * mbarrier (which stands for the copies it reports), the tensor-core queue of a CTA, the bulk groups of a thread. An
 * access is stamped with an epoch (agent, time). Synchronization passes clocks along; an access is properly ordered
 * after another exactly if its warp's clock covers the other's epoch. */
#ifndef SM100_MODEL_CLOCK_H
#define SM100_MODEL_CLOCK_H

#include <stdint.h>
#include <vector>

struct Epoch {
    uint32_t agent = 0, time = 0; // agent 0 is nobody: memory as the launch found it
};

struct Clock {
    std::vector<uint32_t> times; // indexed by agent; missing entries are zero

    uint32_t get(uint32_t agent) const { return agent < times.size() ? times[agent] : 0; }
    bool covers(Epoch e) const { return e.agent == 0 || get(e.agent) >= e.time; }
    void raise(uint32_t agent, uint32_t time) {
        if (agent >= times.size()) times.resize(agent + 1, 0);
        if (times[agent] < time) times[agent] = time;
    }
    void join(const Clock &other) {
        if (times.size() < other.times.size()) times.resize(other.times.size(), 0);
        const uint32_t *from = other.times.data();
        uint32_t *to = times.data();
        for (size_t i = 0, n = other.times.size(); i < n; i++) to[i] = to[i] < from[i] ? from[i] : to[i];
    }
    void clear() { times.clear(); }
};

#endif
