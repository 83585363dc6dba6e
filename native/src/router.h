/*
 * The router: from a row's logits to its experts and their weights (docs/numerics.md, "Router").
 */
#ifndef COLIBRI_ROUTER_H
#define COLIBRI_ROUTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "model.h"

/* What of a model the router goes by. */
struct router {
    const struct colibri_kernels *kernels;
    size_t n_experts, top_k;
    bool among_chosen; /* weights are shares among the chosen experts, not among all */
};

static inline struct router colibri_router(const struct colibri_kernels *kernels, const struct colibri_file_header *header) {
    return (struct router){kernels, header->n_experts, header->top_k, header->arch_flags & COLIBRI_ARCH_NORM_TOPK};
}

/* The experts of the largest logits, best first, of equal ones the lower number: best[top_k]. */
void colibri_best_experts(const struct router *router, const float *logits, int32_t *best);
/* chosen[top_k], ascending, and weights[top_k] from the finite logits[n_experts]. given: bits of the top_k experts to take whatever the logits say
 * (static_table.h), or NULL. */
void colibri_route(const struct router *router, const float *logits, const uint64_t *given, int32_t *chosen, float *weights);

#endif
