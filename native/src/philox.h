/*
 * Philox4x32-10, a counter-based random number generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
 */
#ifndef COLIBRI_PHILOX_H
#define COLIBRI_PHILOX_H

#include <stdint.h>

struct philox {
    uint32_t words[4];
};

/* The block that belongs to a counter under a key. */
static inline struct philox colibri_philox(uint64_t key, struct philox x) {
    const uint64_t multiplier_0 = 0xD2511F53, multiplier_2 = 0xCD9E8D57;
    uint32_t key_0 = (uint32_t)key, key_1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = multiplier_0 * x.words[0], b = multiplier_2 * x.words[2];
        x = (struct philox){{(uint32_t)(b >> 32) ^ x.words[1] ^ key_0, (uint32_t)b, (uint32_t)(a >> 32) ^ x.words[3] ^ key_1, (uint32_t)a}};
        key_0 += 0x9E3779B9; /* the golden ratio */
        key_1 += 0xBB67AE85; /* sqrt(3) − 1 */
    }
    return x;
}

#endif
