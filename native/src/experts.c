/*
 * The second half of a layer: norm, router, experts (or one dense network), combination.
 *
 * Which experts a step needs is known before any expert weight is touched: their blocks are asked for, of the mapping or of the store that has
 * them in a fixed amount of memory (expert_store.c), then the rows are ordered by expert, so
 * that each expert's weights are read once a step. An entry is one (row, chosen expert); entries are ordered by expert, then by row. Where
 * there are more entries than slots, the experts run in waves of ascending number; a row adds up its experts in ascending order
 * either way.
 */
#include <string.h>

#include "context.h"
#include "router.h"

/* A block that was not used in so many steps is asked for without a look whether it is in memory, which the owner of the file alone is told. */
#define ASK_SURELY_AFTER 256u

/* ---- router ---- */

static void route_row(void *argument, size_t row, unsigned worker) {
    (void)worker;
    struct colibri_context *ctx = argument;
    const struct colibri_file_header *header = &ctx->model->header;
    struct router router = colibri_router(ctx->kernels, header);
    float *logits = ctx->router_logits + row * ctx->ld_experts;
    if (!ctx->kernels->all_finite(logits, header->n_experts)) {
        ctx->bad[row] = 1;
        memset(logits, 0, header->n_experts * sizeof *logits); /* any choice will do */
    }
    bool by_table = ctx->routing == COLIBRI_ROUTING_STATIC;
    const uint64_t *given = by_table ? colibri_look_up(&ctx->table, ctx->step.moe_layer, (size_t)ctx->step.batch->tokens[row]) : NULL;
    colibri_route(&router, logits, given, ctx->chosen + row * router.top_k, ctx->weights + row * router.top_k);
}

/* Orders entries by expert and counts the groups. Returns how many experts are active. */
static size_t group_rows(struct colibri_context *ctx, const struct layer *layer) {
    size_t n_experts = ctx->model->header.n_experts, k = ctx->model->header.top_k, n_entries = ctx->step.n_rows * k, n_groups = 0;
    int32_t *starts = ctx->counts, next = 0;
    memset(starts, 0, (n_experts + 1) * sizeof *starts);
    for (size_t i = 0; i < n_entries; i++) starts[ctx->chosen[i]]++;
    for (size_t expert = 0; expert < n_experts; expert++) {
        int32_t n = starts[expert];
        if (n) ctx->groups[n_groups++] = (struct group){.block = layer->first_block + expert, .first = (size_t)next, .n_rows = (size_t)n};
        starts[expert] = next;
        next += n;
    }
    for (size_t i = 0; i < n_entries; i++) {
        int32_t entry = starts[ctx->chosen[i]]++;
        ctx->entries[entry] = (int32_t)(i / k);
        ctx->entry_of[i] = entry;
    }
    return n_groups;
}

static void ask_for_experts(struct colibri_context *ctx, const struct layer *layer, size_t n_groups) {
    if (ctx->store.slots) {
        colibri_store_begin(&ctx->store, layer->first_block, ctx->groups, n_groups);
        return;
    }
    for (size_t i = 0; i < n_groups; i++) {
        uint32_t *used = &ctx->block_used[ctx->groups[i].block];
        colibri_ask_for_block(ctx->model, ctx->groups[i].block, *used == 0 || ctx->n_steps - *used > ASK_SURELY_AFTER);
        *used = ctx->n_steps;
    }
}

static void tell_routing(struct colibri_context *ctx, uint32_t number, bool dense) {
    const struct colibri_file_header *header = &ctx->model->header;
    int32_t *routing = ctx->step.batch->routing;
    if (!routing) return;
    for (size_t row = 0; row < ctx->step.n_rows; row++)
        for (size_t j = 0; j < header->top_k; j++)
            routing[(row * header->n_layers + number) * header->top_k + j] = dense ? -1 : ctx->chosen[row * header->top_k + j];
}

/* ---- what the next layer may need ---- */

/* The next layer's router on what is known now: the residual stream without this layer's experts. Returns how many experts it named, likeliest
 * first. */
static size_t ask_next_router(struct colibri_context *ctx, const struct layer *next) {
    const struct colibri_file_header *header = &ctx->model->header;
    size_t n_rows = ctx->step.n_rows, hidden = header->hidden, k = header->top_k;
    struct router router = colibri_router(ctx->kernels, header);
    int32_t best[COLIBRI_MAX_TOP_K];
    uint8_t bad[COLIBRI_ROW_BLOCK] = {0};
    for (size_t row = 0; row < n_rows; row++)
        (void)ctx->kernels->rmsnorm(ctx->x + row * hidden, next->ffn_norm.data, hidden, header->rms_eps, ctx->early_normed + row * hidden);
    ctx->kernels->prepare(COLIBRI_FMT_F32, ctx->early_normed, hidden, n_rows, hidden, ctx->early_acts, bad);
    struct product product = colibri_product(ctx, &next->router, ctx->early_acts, ctx->early_logits, ctx->ld_experts);
    colibri_multiply(ctx, &product, 1);
    for (size_t row = 0; row < n_rows; row++) {
        colibri_best_experts(&router, ctx->early_logits + row * ctx->ld_experts, best);
        for (size_t i = 0; i < k; i++) {
            ctx->early_chosen[i * n_rows + row] = best[i];
            ctx->seers[best[i]] |= FORESEEN_BY_ROUTER;
        }
    }
    return n_rows * k;
}

/* What the table knows of the step's tokens. */
static void ask_table(struct colibri_context *ctx, size_t layer) {
    int32_t experts[COLIBRI_MAX_TOP_K];
    if (!ctx->table.header) return;
    for (size_t row = 0; row < ctx->step.n_rows; row++) {
        size_t n = colibri_list_bits(colibri_look_up(&ctx->table, layer, (size_t)ctx->step.batch->tokens[row]), ctx->table.n_words, experts);
        for (size_t i = 0; i < n; i++) ctx->seers[experts[i]] |= FORESEEN_BY_TABLE;
    }
}

void colibri_foresee_first(struct colibri_context *ctx) {
    if (!ctx->store.slots || !ctx->table.header || ctx->step.n_rows > COLIBRI_ROW_BLOCK || !colibri_store_misses(&ctx->store, 0)) return;
    memset(ctx->seers, 0, ctx->model->header.n_experts);
    ask_table(ctx, 0);
    colibri_store_foresee(&ctx->store, 0, ctx->seers, NULL, 0);
}

/* Asks the store for what the next layer with experts may need; behind the last layer comes the next step's first. */
static void look_ahead(struct colibri_context *ctx, const struct layer *layer) {
    const struct colibri_file_header *header = &ctx->model->header;
    uint32_t n_experts = header->n_experts, number = (uint32_t)(layer->first_block / n_experts) + 1;
    const struct layer *next = layer + 1, *end = ctx->model->layers + header->n_layers;
    while (next < end && next->dense) next++;
    if (next == end) number = 0;
    if (!colibri_store_misses(&ctx->store, number)) return;
    bool all = next < end && ctx->step.n_rows * header->top_k >= 2 * (size_t)n_experts;
    for (uint32_t expert = 0; expert < n_experts; expert++)
        ctx->seers[expert] = (uint8_t)((all ? FORESEEN_BY_BATCH : 0) | (colibri_store_used(&ctx->store, number, expert) ? FORESEEN_BY_LAST_STEP : 0));
    bool known = next < end && ctx->step.n_rows <= COLIBRI_ROW_BLOCK;
    if (known) ask_table(ctx, number);
    size_t n = known && ctx->routing == COLIBRI_ROUTING_EXACT ? ask_next_router(ctx, next) : 0;
    colibri_store_foresee(&ctx->store, number, ctx->seers, ctx->early_chosen, n);
}

/* ---- a wave of experts ---- */

/* Which of an expert's three matrices. */
enum expert_part { EXPERT_GATE, EXPERT_UP, EXPERT_DOWN };

/* The one way to an expert's weights. */
static const void *expert_matrix(const struct colibri_context *ctx, size_t block, enum expert_part part) {
    const struct colibri_file_header *header = &ctx->model->header;
    const uint8_t *begin = ctx->store.slots ? colibri_store_block(&ctx->store, block) : colibri_expert_block(ctx->model, block);
    return begin + (size_t)part * colibri_matrix_bytes(header->expert_format, header->expert_width, header->hidden);
}

/* Groups [begin, begin + n_groups), whose entries [first, first + n_entries) fit the slots; slot = entry − first. */
struct wave {
    struct colibri_context *ctx;
    const struct layer *layer;
    const struct group *groups;
    size_t n_groups, n_blocks, first, n_entries;
};

static struct wave next_wave(struct colibri_context *ctx, const struct layer *layer, size_t begin, size_t n_groups) {
    struct wave wave = {.ctx = ctx, .layer = layer, .groups = ctx->groups + begin, .first = ctx->groups[begin].first};
    for (size_t i = begin; i < n_groups && wave.n_entries + ctx->groups[i].n_rows <= ctx->slots; i++) {
        ctx->groups[i].first_block = wave.n_blocks;
        wave.n_blocks += (ctx->groups[i].n_rows + COLIBRI_ROW_BLOCK - 1) / COLIBRI_ROW_BLOCK;
        wave.n_entries += ctx->groups[i].n_rows;
        wave.n_groups++;
    }
    return wave;
}

static size_t block_bytes(const struct colibri_context *ctx, size_t k) {
    return colibri_acts_bytes(ctx->model->header.expert_format, COLIBRI_ROW_BLOCK, k);
}

static void gather_group(void *argument, size_t item, unsigned worker) {
    (void)worker;
    const struct wave *wave = argument;
    struct colibri_context *ctx = wave->ctx;
    const struct group *group = &wave->groups[item];
    size_t hidden = ctx->model->header.hidden;
    ctx->kernels->gather(ctx->model->header.expert_format, ctx->acts, ctx->step.n_rows, ctx->entries + group->first, group->n_rows, hidden,
                         ctx->expert_acts + group->first_block * block_bytes(ctx, hidden));
}

static void multiply_gate_up(const struct wave *wave) {
    struct colibri_context *ctx = wave->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    for (size_t i = 0; i < wave->n_groups; i++) {
        const struct group *group = &wave->groups[i];
        size_t slot = group->first - wave->first;
        struct product product = {
            .weights = expert_matrix(ctx, group->block, EXPERT_GATE),
            .acts = ctx->expert_acts + group->first_block * block_bytes(ctx, header->hidden),
            .format = header->expert_format,
            .k = header->hidden,
            .n_tiles = colibri_tiles(header->expert_width),
            .n_rows = group->n_rows,
            .y = ctx->gate + slot * ctx->ld_expert,
            .ldy = ctx->ld_expert,
        };
        ctx->products[2 * i] = product;
        product.weights = expert_matrix(ctx, group->block, EXPERT_UP);
        product.y = ctx->up + slot * ctx->ld_expert;
        ctx->products[2 * i + 1] = product;
    }
    colibri_multiply(ctx, ctx->products, 2 * wave->n_groups);
}

/* h = silu(gate) × up of one expert's rows, prepared for down. */
static void activate_group(void *argument, size_t item, unsigned worker) {
    (void)worker;
    const struct wave *wave = argument;
    struct colibri_context *ctx = wave->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    const struct group *group = &wave->groups[item];
    size_t slot = group->first - wave->first, width = header->expert_width;
    for (size_t i = slot; i < slot + group->n_rows; i++) {
        float *gate = ctx->gate + i * ctx->ld_expert;
        ctx->kernels->silu_mul(gate, ctx->up + i * ctx->ld_expert, width, gate);
        ctx->slot_bad[i] = 0;
    }
    ctx->kernels->prepare(header->expert_format, ctx->gate + slot * ctx->ld_expert, ctx->ld_expert, group->n_rows, width,
                          ctx->hidden_acts + group->first_block * block_bytes(ctx, width), ctx->slot_bad + slot);
}

static void multiply_down(const struct wave *wave) {
    struct colibri_context *ctx = wave->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    for (size_t i = 0; i < wave->n_groups; i++) {
        const struct group *group = &wave->groups[i];
        ctx->products[i] = (struct product){
            .weights = expert_matrix(ctx, group->block, EXPERT_DOWN),
            .acts = ctx->hidden_acts + group->first_block * block_bytes(ctx, header->expert_width),
            .format = header->expert_format,
            .k = header->expert_width,
            .n_tiles = colibri_tiles(header->hidden),
            .n_rows = group->n_rows,
            .y = ctx->down + (group->first - wave->first) * ctx->ld_hidden,
            .ldy = ctx->ld_hidden,
        };
    }
    colibri_multiply(ctx, ctx->products, wave->n_groups);
}

/* Adds the wave's experts to the row's sum in y, ascending. */
static void combine_row(void *argument, size_t row, unsigned worker) {
    (void)worker;
    const struct wave *wave = argument;
    struct colibri_context *ctx = wave->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    float *sum = ctx->y + row * ctx->ld_hidden;
    if (wave->first == 0) memset(sum, 0, header->hidden * sizeof *sum);
    for (size_t j = row * header->top_k; j < (row + 1) * header->top_k; j++) {
        size_t entry = (size_t)ctx->entry_of[j];
        if (entry < wave->first || entry >= wave->first + wave->n_entries) continue;
        size_t slot = entry - wave->first;
        ctx->kernels->add_scaled(sum, ctx->weights[j], ctx->down + slot * ctx->ld_hidden, header->hidden);
        if (ctx->slot_bad[slot]) ctx->bad[row] = 1;
    }
}

static void run_experts(struct colibri_context *ctx, const struct layer *layer, size_t n_groups) {
    unsigned n_threads = ctx->step.n_threads;
    for (size_t begin = 0, end; begin < n_groups; begin = end) {
        struct wave wave = next_wave(ctx, layer, begin, n_groups);
        end = begin + wave.n_groups;
        for (size_t at = begin; at < end; at += wave.n_groups) {
            /* Of a store, those that are there while others are read; they are added up in order all the same. */
            wave.groups = ctx->groups + at;
            wave.n_groups = ctx->store.slots ? colibri_store_wait(&ctx->store, ctx->groups, at, end) : end - at;
            colibri_pool_run(&ctx->pool, n_threads, wave.n_groups, gather_group, &wave);
            multiply_gate_up(&wave);
            colibri_pool_run(&ctx->pool, n_threads, wave.n_groups, activate_group, &wave);
            multiply_down(&wave);
            if (ctx->store.slots) colibri_store_release(&ctx->store, ctx->groups, at, at + wave.n_groups, n_groups);
        }
        colibri_pool_run(&ctx->pool, n_threads, ctx->step.n_rows, combine_row, &wave);
    }
}

/* ---- one network for all rows: a dense layer, or the shared expert ---- */

struct network {
    struct colibri_context *ctx;
    const struct tensor *gate, *up, *down;
};

static void activate_row(void *argument, size_t row, unsigned worker) {
    (void)worker;
    const struct network *network = argument;
    struct colibri_context *ctx = network->ctx;
    float *gate = ctx->gate + row * ctx->ld_wide;
    ctx->kernels->silu_mul(gate, ctx->up + row * ctx->ld_wide, network->gate->rows, gate);
}

/* y[row] = network(row); ctx->acts hold the activations for gate and up, and are overwritten. */
static void run_network(struct network *network, float *y) {
    struct colibri_context *ctx = network->ctx;
    struct product products[] = {
        colibri_product(ctx, network->gate, ctx->acts, ctx->gate, ctx->ld_wide),
        colibri_product(ctx, network->up, ctx->acts, ctx->up, ctx->ld_wide),
    };
    colibri_multiply(ctx, products, 2);
    colibri_pool_run(&ctx->pool, ctx->step.n_threads, ctx->step.n_rows, activate_row, network);
    colibri_prepare_rows(ctx, ctx->gate, ctx->ld_wide, network->down->format, network->down->cols);
    struct product down = colibri_product(ctx, network->down, ctx->acts, y, ctx->ld_hidden);
    colibri_multiply(ctx, &down, 1);
}

/* sigmoid(gate · x), or 1 where the family has no gate. */
static float weigh_shared(const struct colibri_context *ctx, size_t row) {
    if (!(ctx->model->header.arch_flags & COLIBRI_ARCH_SHARED_GATED)) return 1;
    float exponential = -ctx->shared_logits[row * COLIBRI_TILE_ROWS];
    ctx->kernels->exp(&exponential, 1, &exponential);
    return 1 / (1 + exponential);
}

/* The shared expert comes last. */
static void add_shared_row(void *argument, size_t row, unsigned worker) {
    (void)worker;
    struct colibri_context *ctx = argument;
    ctx->kernels->add_scaled(ctx->y + row * ctx->ld_hidden, weigh_shared(ctx, row), ctx->down + row * ctx->ld_hidden,
                             ctx->model->header.hidden);
}

static void run_shared(struct colibri_context *ctx, const struct layer *layer) {
    struct network network = {ctx, &layer->shared_gate, &layer->shared_up, &layer->shared_down};
    if (layer->shared_gate.format != ctx->model->header.expert_format)
        colibri_prepare_rows(ctx, ctx->normed, ctx->model->header.hidden, layer->shared_gate.format, ctx->model->header.hidden);
    run_network(&network, ctx->down);
    colibri_pool_run(&ctx->pool, ctx->step.n_threads, ctx->step.n_rows, add_shared_row, ctx);
}

/* ---- the half layer ---- */

static void dense_half(struct colibri_context *ctx, const struct layer *layer) {
    struct network network = {ctx, &layer->dense_gate, &layer->dense_up, &layer->dense_down};
    colibri_norm_rows(ctx, &layer->ffn_norm, layer->dense_gate.format, false);
    run_network(&network, ctx->y);
}

static void experts_half(struct colibri_context *ctx, const struct layer *layer) {
    colibri_norm_rows(ctx, &layer->ffn_norm, ctx->model->header.expert_format, true);
    struct product gates[] = {
        colibri_product(ctx, &layer->router, ctx->router_acts, ctx->router_logits, ctx->ld_experts),
        colibri_product(ctx, &layer->shared_expert_gate, ctx->router_acts, ctx->shared_logits, COLIBRI_TILE_ROWS),
    };
    ctx->step.moe_layer = layer->first_block / ctx->model->header.n_experts;
    colibri_multiply(ctx, gates, layer->shared_expert_gate.data ? 2 : 1);
    colibri_pool_run(&ctx->pool, ctx->step.n_threads, ctx->step.n_rows, route_row, ctx);
    size_t n_groups = group_rows(ctx, layer);
    ask_for_experts(ctx, layer, n_groups);
    if (ctx->store.slots) look_ahead(ctx, layer);
    run_experts(ctx, layer, n_groups);
    if (layer->shared_gate.data) run_shared(ctx, layer);
}

void colibri_ffn_half(struct colibri_context *ctx, uint32_t number) {
    const struct layer *layer = &ctx->model->layers[number];
    if (layer->dense) dense_half(ctx, layer);
    else experts_half(ctx, layer);
    tell_routing(ctx, number, layer->dense);
    ctx->step.pending = true;
}
