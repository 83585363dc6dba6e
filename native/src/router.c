#include "router.h"

#include <string.h>

#include "static_table.h"

/* Orders experts as their logits, which are finite; of equal ones the lower number is the greater key. No key is 0, and no two are equal. */
static uint64_t key_of(float logit, size_t expert) {
    uint32_t bits;
    logit += 0.f; /* −0 equals 0 */
    memcpy(&bits, &logit, sizeof bits);
    bits ^= bits >> 31 ? UINT32_MAX : (uint32_t)1 << 31;
    return (uint64_t)bits << 32 | (uint32_t)~expert;
}

void colibri_best_experts(const struct router *router, const float *logits, int32_t *best) {
    uint64_t keys[COLIBRI_MAX_TOP_K] = {0}; /* the best so far, descending */
    size_t k = router->top_k;
    for (size_t expert = 0; expert < router->n_experts; expert++) {
        uint64_t key = key_of(logits[expert], expert);
        if (key < keys[k - 1]) continue;
        for (size_t j = 0; j < k; j++) { /* without a branch, which could not be foreseen */
            uint64_t greater = keys[j] > key ? keys[j] : key;
            key = keys[j] > key ? key : keys[j];
            keys[j] = greater;
        }
    }
    for (size_t j = 0; j < k; j++) best[j] = (int32_t)~(uint32_t)keys[j];
}

static void sort_ascending(int32_t *experts, size_t n) {
    for (size_t i = 1; i < n; i++) {
        int32_t expert = experts[i];
        size_t at = i;
        for (; at > 0 && experts[at - 1] > expert; at--) experts[at] = experts[at - 1];
        experts[at] = expert;
    }
}

/* The logit that weights are taken relative to: the largest of those they are shares among. */
static float largest(const struct router *router, const float *logits, const int32_t *chosen) {
    if (!router->among_chosen) return router->kernels->max(logits, router->n_experts);
    float max = logits[chosen[0]];
    for (size_t j = 1; j < router->top_k; j++) max = logits[chosen[j]] > max ? logits[chosen[j]] : max;
    return max;
}

static void weigh(const struct router *router, const float *logits, const int32_t *chosen, float *weights) {
    size_t k = router->top_k;
    float max = largest(router, logits, chosen), sum = 0;
    for (size_t j = 0; j < k; j++) weights[j] = logits[chosen[j]] - max;
    router->kernels->exp(weights, k, weights);
    if (router->among_chosen)
        for (size_t j = 0; j < k; j++) sum += weights[j];
    else sum = router->kernels->sum_exp(logits, router->n_experts, max);
    for (size_t j = 0; j < k; j++) weights[j] /= sum;
}

void colibri_route(const struct router *router, const float *logits, const uint64_t *given, int32_t *chosen, float *weights) {
    if (given) {
        colibri_list_bits(given, (router->n_experts + 63) / 64, chosen);
    } else {
        colibri_best_experts(router, logits, chosen);
        sort_ascending(chosen, router->top_k);
    }
    weigh(router, logits, chosen, weights);
}
