/*
 * Opening a context: options are checked, then one function lays out all memory. It runs twice: once without an address, to learn the
 * size, once over the mapping. Nothing allocates afterwards. The mapping is anonymous, so what is never touched costs nothing.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "context.h"

/* More rows than this in one step help no matrix product, and keep all row counts within 32 bits. */
#define MAX_ROWS 65536u
/* Slots beyond max_rows, so that small batches of models with many chosen experts run in one wave. */
#define EXTRA_SLOTS 128u
#define DEFAULT_ROWS 512u
#define DEFAULT_LOGITS 8u
/* A multiple of it is aligned for huge pages wherever the smallest of them has 2 MiB. */
#define HUGE_PAGE_BYTES ((size_t)2 << 20)

struct arena {
    uint8_t *base; /* NULL while measuring */
    size_t used;
    bool too_large;
};

/* Room for n items, aligned to 64. */
static void *take(struct arena *arena, size_t n, size_t item_bytes) {
    if (n > (SIZE_MAX / 2 - arena->used) / item_bytes) {
        arena->too_large = true;
        return NULL;
    }
    uint8_t *at = arena->base ? arena->base + arena->used : NULL;
    arena->used += colibri_round_up(n * item_bytes, 64);
    return at;
}
#define TAKE(pointer, n) ((pointer) = take(arena, (n), sizeof *(pointer)))

/* ---- options ---- */

/* Budgets below what one token needs would never be kept. */
static int check_expert_ram(const struct colibri_file_header *header, uint64_t n_bytes, struct colibri_error error) {
    size_t slot_bytes = colibri_slot_bytes(header), least = slot_bytes * header->top_k;
    if (n_bytes == 0 || n_bytes >= least) return COLIBRI_OK;
    return colibri_fail(error, COLIBRI_E_INVALID, "expert_ram_bytes: %" PRIu64 " hold %" PRIu64 " experts of %zu bytes, but a token uses %" PRIu32 "; give at least %zu", n_bytes,
                        n_bytes / slot_bytes, slot_bytes, header->top_k, least);
}

static int check_options(const struct colibri_model *model, const colibri_context_options_t *options, struct colibri_error error) {
    const struct colibri_file_header *header = &model->header;
    if (options->struct_bytes != sizeof *options && options->struct_bytes != offsetof(colibri_context_options_t, expert_ram_bytes))
        return colibri_fail(error, COLIBRI_E_INVALID, "struct_bytes: expected %zu, got %zu", sizeof *options, options->struct_bytes);
    if (options->kv_format && options->kv_format != COLIBRI_KV_F32 && options->kv_format != COLIBRI_KV_F16)
        return colibri_fail(error, COLIBRI_E_INVALID, "kv_format: %" PRIu32 " is neither f32 nor f16", options->kv_format);
    if (options->n_pages == 0 || options->n_pages > INT32_MAX)
        return colibri_fail(error, COLIBRI_E_INVALID, "n_pages: %" PRIu32 " is not in 1..%d", options->n_pages, INT32_MAX);
    if (options->max_rows > MAX_ROWS)
        return colibri_fail(error, COLIBRI_E_INVALID, "max_rows: %" PRIu32 " is above %u", options->max_rows, MAX_ROWS);
    if (options->max_logits > MAX_ROWS)
        return colibri_fail(error, COLIBRI_E_INVALID, "max_logits: %" PRIu32 " is above %u", options->max_logits, MAX_ROWS);
    if (options->max_context > header->max_positions)
        return colibri_fail(error, COLIBRI_E_INVALID, "max_context: %" PRIu32 ", but the model allows %" PRIu32 " positions", options->max_context,
                            header->max_positions);
    if (options->prefill_threads > COLIBRI_MAX_THREADS || options->decode_threads > COLIBRI_MAX_THREADS)
        return colibri_fail(error, COLIBRI_E_INVALID, "threads: more than %d", COLIBRI_MAX_THREADS);
    return COLIBRI_OK;
}

/* Of options that a shorter struct does not have. */
static int check_later_options(const struct colibri_model *model, const colibri_context_options_t *options, struct colibri_error error) {
    if (options->routing > COLIBRI_ROUTING_STATIC)
        return colibri_fail(error, COLIBRI_E_INVALID, "routing: %" PRIu32 " is none of COLIBRI_ROUTING_*", options->routing);
    if (options->routing == COLIBRI_ROUTING_STATIC && !options->static_table)
        return colibri_fail(error, COLIBRI_E_INVALID, "routing: static needs a static_table; `colibrictl calibrate` makes one");
    return check_expert_ram(&model->header, options->expert_ram_bytes, error);
}

static uint32_t or_default(uint32_t value, uint32_t otherwise) { return value ? value : otherwise; }

static void apply_options(struct colibri_context *ctx, const struct colibri_model *model, const colibri_context_options_t *options) {
    unsigned cores = colibri_usable_cores();
    *ctx = (struct colibri_context){
        .model = model,
        .kv_format = or_default(options->kv_format, COLIBRI_KV_F16),
        .n_pages = options->n_pages,
        .max_rows = or_default(options->max_rows, DEFAULT_ROWS),
        .max_logits = or_default(options->max_logits, DEFAULT_LOGITS),
        .max_context = or_default(options->max_context, model->header.max_positions),
        .prefill_threads = or_default(options->prefill_threads, cores),
        .decode_threads = or_default(options->decode_threads, cores),
        .seed = options->seed,
        .routing = options->routing,
        .store.n_slots = (uint32_t)colibri_slots_in(&model->header, options->expert_ram_bytes),
    };
}

/* ---- layout ---- */

/* What prepared activations of any matrix of all rows take at most. */
static size_t acts_bytes(const struct colibri_context *ctx) {
    const struct colibri_model *model = ctx->model;
    size_t most = 0, head_rows = colibri_larger(ctx->max_logits, COLIBRI_SCORE_ROWS);
    for (uint32_t i = 0; i < model->header.n_layers; i++) {
        const struct layer *layer = &model->layers[i];
        const struct tensor *matrices[] = {&layer->q, &layer->qkv, &layer->o, &layer->dense_gate, &layer->dense_down, &layer->shared_gate, &layer->shared_down};
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++)
            if (matrices[m]->data) most = colibri_larger(most, colibri_acts_bytes(matrices[m]->format, ctx->max_rows, matrices[m]->cols));
    }
    most = colibri_larger(most, colibri_acts_bytes(model->trunk.head.format, head_rows, model->header.hidden));
    return colibri_larger(most, colibri_acts_bytes(model->header.expert_format, ctx->max_rows, model->header.hidden));
}

static void lay_out_pages(struct colibri_context *ctx, struct arena *arena) {
    const struct colibri_file_header *header = &ctx->model->header;
    ctx->kv_value_bytes = ctx->kv_format == COLIBRI_KV_F16 ? 2 : 4;
    ctx->kv_head_bytes = (size_t)header->head_dim * COLIBRI_PAGE_TOKENS * ctx->kv_value_bytes;
    ctx->page_bytes = 2 * ctx->kv_head_bytes * header->n_kv_heads * header->n_layers;
    ctx->pages = take(arena, ctx->n_pages, ctx->page_bytes);
    TAKE(ctx->page_fill, ctx->n_pages);
    TAKE(ctx->page_writer, ctx->n_pages);
}

/* A fused matrix gives q, k and v without gaps; separate ones whole tiles each. */
static void lay_out_qkv(struct colibri_context *ctx) {
    const struct colibri_file_header *header = &ctx->model->header;
    size_t step = header->arch_flags & COLIBRI_ARCH_QKV_FUSED ? 1 : COLIBRI_TILE_ROWS;
    size_t kv_width = colibri_round_up((size_t)header->n_kv_heads * header->head_dim, step);
    ctx->k_at = colibri_round_up((size_t)header->n_heads * header->head_dim, step);
    ctx->v_at = ctx->k_at + kv_width;
    ctx->ld_qkv = colibri_round_up(ctx->v_at + kv_width, COLIBRI_TILE_ROWS);
}

static void lay_out_rows(struct colibri_context *ctx, struct arena *arena) {
    const struct colibri_file_header *header = &ctx->model->header;
    size_t rows = ctx->max_rows, n_pairs = header->rotary_dim / 2, q_width = (size_t)header->n_heads * header->head_dim;
    ctx->ld_hidden = colibri_round_up(header->hidden, COLIBRI_TILE_ROWS);
    lay_out_qkv(ctx);
    TAKE(ctx->x, rows * header->hidden);
    TAKE(ctx->normed, colibri_larger(rows, colibri_larger(ctx->max_logits, COLIBRI_SCORE_ROWS)) * header->hidden);
    TAKE(ctx->y, rows * ctx->ld_hidden);
    TAKE(ctx->qkv, rows * ctx->ld_qkv);
    TAKE(ctx->attended, rows * q_width);
    TAKE(ctx->cosines, rows * n_pairs);
    TAKE(ctx->sines, rows * n_pairs);
    TAKE(ctx->acts, acts_bytes(ctx));
    TAKE(ctx->bad, rows);
    TAKE(ctx->spans, rows);
    TAKE(ctx->products, colibri_larger(2 * (size_t)header->n_experts, 3));
}

static void lay_out_experts(struct colibri_context *ctx, struct arena *arena) {
    const struct colibri_file_header *header = &ctx->model->header;
    size_t rows = ctx->max_rows, entries = rows * header->top_k;
    size_t wide = colibri_larger(header->dense_width, header->shared_width);
    ctx->slots = colibri_smaller(entries, rows + EXTRA_SLOTS);
    /* Each expert of a wave may end in a row block that is not full. */
    size_t blocks = ctx->slots / COLIBRI_ROW_BLOCK + colibri_smaller(header->n_experts, ctx->slots);
    ctx->ld_experts = colibri_round_up(header->n_experts, COLIBRI_TILE_ROWS);
    ctx->ld_expert = colibri_round_up(header->expert_width, COLIBRI_TILE_ROWS);
    ctx->ld_wide = colibri_round_up(wide, COLIBRI_TILE_ROWS);
    TAKE(ctx->router_acts, colibri_acts_bytes(COLIBRI_FMT_F32, rows, header->hidden));
    TAKE(ctx->router_logits, rows * ctx->ld_experts);
    TAKE(ctx->chosen, entries);
    TAKE(ctx->weights, entries);
    TAKE(ctx->shared_logits, rows * COLIBRI_TILE_ROWS);
    TAKE(ctx->entries, entries);
    TAKE(ctx->entry_of, entries);
    TAKE(ctx->counts, (size_t)header->n_experts + 1);
    TAKE(ctx->groups, header->n_experts);
    ctx->expert_acts = take(arena, blocks, colibri_acts_bytes(header->expert_format, COLIBRI_ROW_BLOCK, header->hidden));
    ctx->hidden_acts = take(arena, blocks, colibri_acts_bytes(header->expert_format, COLIBRI_ROW_BLOCK, header->expert_width));
    TAKE(ctx->gate, colibri_larger(ctx->slots * ctx->ld_expert, rows * ctx->ld_wide));
    TAKE(ctx->up, colibri_larger(ctx->slots * ctx->ld_expert, rows * ctx->ld_wide));
    TAKE(ctx->down, colibri_larger(ctx->slots, rows) * ctx->ld_hidden);
    TAKE(ctx->slot_bad, ctx->slots);
    TAKE(ctx->block_used, header->n_expert_blocks);
}

/* The slots themselves are mapped apart. */
static void lay_out_store(struct colibri_context *ctx, struct arena *arena) {
    const struct colibri_file_header *header = &ctx->model->header;
    struct expert_store *store = &ctx->store;
    if (store->n_slots == 0) return;
    store->slot_bytes = colibri_slot_bytes(header);
    store->n_experts = header->n_experts;
    store->n_layers = (uint32_t)(header->n_expert_blocks / header->n_experts);
    TAKE(store->blocks, header->n_expert_blocks);
    TAKE(store->slot_blocks, store->n_slots);
    TAKE(store->missing, store->n_layers);
    TAKE(store->needed.blocks, header->n_experts);
    TAKE(store->ahead.blocks, header->n_experts);
    TAKE(ctx->early_normed, COLIBRI_ROW_BLOCK * (size_t)header->hidden);
    TAKE(ctx->early_acts, colibri_acts_bytes(COLIBRI_FMT_F32, COLIBRI_ROW_BLOCK, header->hidden));
    TAKE(ctx->early_logits, COLIBRI_ROW_BLOCK * ctx->ld_experts);
    TAKE(ctx->early_chosen, COLIBRI_ROW_BLOCK * (size_t)header->top_k);
    TAKE(ctx->seers, header->n_experts);
}

static void lay_out_output(struct colibri_context *ctx, struct arena *arena) {
    const struct colibri_file_header *header = &ctx->model->header;
    ctx->ld_vocabulary = colibri_round_up(header->vocabulary, COLIBRI_TILE_ROWS);
    TAKE(ctx->logits, ctx->max_logits * ctx->ld_vocabulary);
    TAKE(ctx->score_logits, COLIBRI_SCORE_ROWS * ctx->ld_vocabulary);
    TAKE(ctx->held_bad, ctx->max_logits);
    TAKE(ctx->head_rows, ctx->max_rows);
    TAKE(ctx->candidates, header->vocabulary);
    TAKE(ctx->probabilities, header->vocabulary);
    TAKE(ctx->seen, header->vocabulary);
    TAKE(ctx->generated, header->vocabulary);
}

static void lay_out_own(struct colibri_context *ctx, struct arena *arena) {
    TAKE(ctx->own_pages, ctx->n_pages);
    TAKE(ctx->own_positions, ctx->max_rows);
    TAKE(ctx->own_sequences, ctx->max_rows);
    TAKE(ctx->own_status, ctx->max_rows);
    TAKE(ctx->own_flags, ctx->max_rows);
}

static size_t longest_in_pages(const struct colibri_context *ctx) {
    return ((size_t)ctx->max_context + COLIBRI_PAGE_TOKENS - 1) / COLIBRI_PAGE_TOKENS;
}

static void lay_out_threads(struct colibri_context *ctx, struct arena *arena) {
    size_t n_threads = colibri_larger(ctx->prefill_threads, ctx->decode_threads);
    TAKE(ctx->workers, n_threads);
    TAKE(ctx->scratch, n_threads);
    for (size_t i = 0; i < n_threads; i++) {
        const uint8_t **pages = take(arena, longest_in_pages(ctx), sizeof *pages);
        float *attention = take(arena, colibri_attention_scratch(COLIBRI_MAX_QUERIES, ctx->model->header.head_dim), sizeof *attention);
        if (arena->base) ctx->scratch[i] = (struct scratch){pages, attention};
    }
}

static void lay_out(struct colibri_context *ctx, struct arena *arena) {
    lay_out_pages(ctx, arena);
    lay_out_rows(ctx, arena);
    lay_out_experts(ctx, arena);
    lay_out_store(ctx, arena);
    lay_out_output(ctx, arena);
    lay_out_own(ctx, arena);
    lay_out_threads(ctx, arena);
}

/*
 * Address space that begins where a huge page may, and asks for such pages: a head's K and V of neighbouring pages lie megabytes apart, so with
 * small ones nearly every line that attention reads would cost a walk through the page tables as well. Refused or not, it is memory.
 */
static void *map_memory(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), used = colibri_round_up(bytes, page), reserved = used + HUGE_PAGE_BYTES;
    uint8_t *base = mmap(NULL, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    size_t before = (HUGE_PAGE_BYTES - (uintptr_t)base % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES, after = reserved - before - used;
    if (before) munmap(base, before);
    if (after) munmap(base + before + used, after);
    colibri_ask_for_huge_pages(base + before, used);
    return base + before;
}

/* Maps what `plan` needs and builds the context at its beginning. */
static int map_context(const struct colibri_context *plan, struct colibri_context **out, struct colibri_error error) {
    struct colibri_context measured = *plan;
    struct arena arena = {0};
    take(&arena, 1, sizeof measured);
    lay_out(&measured, &arena);
    if (arena.too_large) return colibri_fail(error, COLIBRI_E_NOMEM, "the context is larger than the address space");
    size_t bytes = arena.used;
    void *memory = map_memory(bytes);
    if (!memory) return colibri_fail(error, COLIBRI_E_NOMEM, "mapping %zu bytes for the context: %s", bytes, strerror(errno));

    struct colibri_context *ctx = memory;
    *ctx = *plan;
    arena = (struct arena){.base = memory};
    take(&arena, 1, sizeof *ctx);
    lay_out(ctx, &arena);
    ctx->memory = memory;
    ctx->memory_bytes = bytes;
    for (uint32_t page = 0; page < ctx->n_pages; page++) {
        ctx->own_pages[page] = (int32_t)page;
        ctx->page_writer[page] = -1;
    }
    *out = ctx;
    return COLIBRI_OK;
}

static size_t store_bytes(const struct colibri_context *ctx) { return ctx->store.n_slots * ctx->store.slot_bytes; }

static int open_store(struct colibri_context *ctx, struct colibri_model *model, struct colibri_error error) {
    if (ctx->store.n_slots == 0) return COLIBRI_OK;
    ctx->store.slots = map_memory(store_bytes(ctx));
    if (!ctx->store.slots) return colibri_fail(error, COLIBRI_E_NOMEM, "mapping %zu bytes for experts: %s", store_bytes(ctx), strerror(errno));
    return colibri_store_open(&ctx->store, model, ctx->table.frequencies, error);
}

/* ---- public ---- */

int colibri_context_open(colibri_context_t **out, colibri_model_t *model, const colibri_context_options_t *options, char *err,
                         size_t err_bytes) {
    struct colibri_error error = {err, err_bytes};
    if (!out || !model || !options) return colibri_fail(error, COLIBRI_E_INVALID, "out, model and options must not be NULL");
    *out = NULL;
    int code = check_options(model, options, error);
    if (code) return code;
    colibri_context_options_t known = {0};
    memcpy(&known, options, options->struct_bytes);
    options = &known;
    if ((code = check_later_options(model, options, error))) return code;
    const struct colibri_kernels *kernels = colibri_kernels_open(options->isa, error);
    if (!kernels) return COLIBRI_E_UNSUPPORTED;

    struct colibri_context plan, *ctx = NULL;
    apply_options(&plan, model, options);
    plan.kernels = kernels;
    if (options->static_table && (code = colibri_table_open(&plan.table, model, options->static_table, error))) return code;
    if ((code = map_context(&plan, &ctx, error))) {
        colibri_table_close(&plan.table);
        return code;
    }
    unsigned n_threads = (unsigned)colibri_larger(ctx->prefill_threads, ctx->decode_threads);
    if ((code = colibri_pool_open(&ctx->pool, ctx->workers, n_threads, error)) || (code = open_store(ctx, model, error))) {
        colibri_context_close(ctx);
        return code;
    }
    *out = ctx;
    return COLIBRI_OK;
}

void colibri_context_close(colibri_context_t *ctx) {
    if (!ctx) return;
    colibri_pool_close(&ctx->pool);
    colibri_store_close(&ctx->store);
    colibri_table_close(&ctx->table);
    if (ctx->store.slots) munmap(ctx->store.slots, store_bytes(ctx));
    munmap(ctx->memory, ctx->memory_bytes);
}

const char *colibri_context_isa(const colibri_context_t *ctx) { return ctx->kernels->name; }
size_t colibri_context_bytes(const colibri_context_t *ctx) { return ctx->memory_bytes + store_bytes(ctx); }
uint64_t colibri_context_kv_overflows(const colibri_context_t *ctx) { return atomic_load(&ctx->kv_overflows); }
uint64_t colibri_context_table_checksum(const colibri_context_t *ctx) { return ctx->table.header ? ctx->table.header->checksum : 0; }
int colibri_context_expert_stats(colibri_context_t *ctx, colibri_expert_stats_t *stats) {
    if (stats->struct_bytes != sizeof *stats) return COLIBRI_E_INVALID;
    colibri_store_stats(&ctx->store, stats);
    return COLIBRI_OK;
}
const char *colibri_last_error(const colibri_context_t *ctx) { return ctx->error; }
