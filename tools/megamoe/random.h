/*
 * Random numbers that are a pure function of (key, position): any subset of experts, written in any order,
 * gets the same bytes. Integer arithmetic only, so that every machine agrees.
 */
#ifndef CLI_RANDOM_H
#define CLI_RANDOM_H

#include <stdint.h>

/* The finalizer of splitmix64 (Steele, Lea, Flood 2014). */
static inline uint64_t random_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static inline uint64_t random_at(uint64_t key, uint64_t position) {
    return random_mix(key + (position + 1) * 0x9E3779B97F4A7C15u);
}

/* A key from a seed and a tensor's name (FNV-1a). */
static inline uint64_t random_key(uint64_t seed, const char *name) {
    uint64_t hash = 0xCBF29CE484222325u ^ random_mix(seed);
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 0x100000001B3u;
    return random_mix(hash);
}

/* 0 <= value < limit; the bias below 2^-32 does not matter here. */
static inline uint32_t random_below(uint64_t bits, uint32_t limit) {
    return (uint32_t)(((bits >> 32) * limit) >> 32);
}

static inline double random_unit(uint64_t bits) {
    return (double)(bits >> 11) * 0x1p-53;
}

/* Nearly Gaussian with variance 1, within 4.9: the sum of eight uniform bytes. */
static inline double random_gauss(uint64_t bits) {
    unsigned sum = 0;
    for (unsigned i = 0; i < 8; i++) sum += (unsigned)(bits >> 8 * i & 0xFF);
    return ((double)sum - 1020.0) * (1.0 / 209.018340);
}

#endif
