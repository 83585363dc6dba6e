/*
 * Law 1: the logits at a position depend on the tokens up to it and on the numerics key, and on nothing else.
 *
 * One text is run in many ways: in chunks of several sizes, on several threads, with every instruction set of this build, alone or among random
 * neighbours, from pages that were saved and loaded. The logits at chosen positions are compared bit for bit with the plainest run.
 *
 * What the plainest run gives is pinned by its checksum, so that every compiler and architecture is held to the same bits. That says nothing
 * about whether they are right, which other tests do. Where a change of the arithmetic is meant, raise COLIBRI_NUMERICS_VERSION and put in the
 * checksum that the failing test prints.
 */
#include "check.h"
#include "sequences.h"
#include "tiny_model.h"

enum { N_TOKENS = 530, N_PAGES = 100, NEIGHBOURS = 3, NEIGHBOUR_PAGE = 40, PAGES_EACH = 17 };

static const struct weights {
    const char *name;
    uint32_t format;
    uint64_t pinned[2]; /* with KV in f32, in f16 */
} all_weights[] = {
    {"f32", COLIBRI_FMT_F32, {0xff23b55521be8391, 0xa5ea006cef4a70a8}},
    {"q8", COLIBRI_FMT_Q8, {0xf9a80c6f2c26c518, 0x35b18846a8e8a105}},
    {"q4", COLIBRI_FMT_Q4, {0xe80678eb9c59747d, 0x3caed20549ce9dc2}},
};

/* Around the ends of pages and chunks, and the last. */
static const size_t compared[] = {0, 1, 6, 30, 31, 32, 33, 63, 64, 100, 333, 334, 511, 512, 529};
enum { N_COMPARED = sizeof compared / sizeof *compared };

/* A sanitizer looks at memory, not at bits, and makes a run ten times as long: some variants will do. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FIRST = 1, EVERY = 3 };
#else
enum { FIRST = 0, EVERY = 1 };
#endif

struct variant {
    const char *isa;
    size_t chunk;
    unsigned threads;
    bool neighbours;
    size_t restored; /* so many tokens come from pages that another context saved */
    size_t slots;    /* memory for so many experts; 0: they are mapped */
};

struct text {
    int32_t tokens[N_TOKENS];
    int32_t neighbours[NEIGHBOURS][N_TOKENS];
};

static struct test_batch batch; /* too large for a stack */
static size_t slot_bytes;

static void make_text(struct text *text) {
    uint64_t random = 7;
    for (size_t i = 0; i < N_TOKENS; i++) text->tokens[i] = (int32_t)random_below(&random, TINY_VOCABULARY);
    for (size_t n = 0; n < NEIGHBOURS; n++)
        for (size_t i = 0; i < N_TOKENS; i++) text->neighbours[n][i] = (int32_t)random_below(&random, TINY_VOCABULARY);
}

static colibri_context_t *open_variant(colibri_model_t *model, uint32_t kv_format, const struct variant *variant) {
    return open_context(model, (colibri_context_options_t){.kv_format = kv_format,
                                                           .n_pages = N_PAGES,
                                                           .max_rows = 640,
                                                           .max_logits = 64,
                                                           .prefill_threads = variant->threads,
                                                           .decode_threads = variant->threads,
                                                           .isa = variant->isa,
                                                           .expert_ram_bytes = variant->slots * slot_bytes});
}

/* Adds up to n more tokens of a neighbour, which starts anew when it is through. */
static void add_neighbour(const struct text *text, size_t n, size_t *done, uint64_t *random) {
    size_t length = 1 + random_below(random, 40);
    if (done[n] + length > N_TOKENS) done[n] = 0;
    batch_add(&batch, text->neighbours[n], done[n], done[n] + length, NEIGHBOUR_PAGE + (int32_t)n * PAGES_EACH);
    done[n] += length;
}

/* Runs the text from `begin` on; logits of the compared positions go to out: [N_COMPARED][TINY_VOCABULARY]. */
static void run(colibri_context_t *ctx, const struct text *text, const struct variant *variant, size_t begin, size_t end, float *out) {
    uint64_t random = 11 + variant->chunk;
    size_t done[NEIGHBOURS] = {0}, at = 0;
    while (at < N_COMPARED && compared[at] < begin) at++;
    for (size_t from = begin; from < end; from += variant->chunk) {
        size_t to = from + variant->chunk < end ? from + variant->chunk : end, n_held = 0;
        batch_clear(&batch);
        if (variant->neighbours) add_neighbour(text, 0, done, &random);
        size_t first_row = batch.n_rows;
        batch_add(&batch, text->tokens, from, to, 0);
        if (variant->neighbours) add_neighbour(text, 1, done, &random), add_neighbour(text, 2, done, &random);
        if (variant->neighbours) batch.flags[0] = COLIBRI_ROW_SCORE;
        for (size_t i = at; i < N_COMPARED && compared[i] < to; i++) batch.flags[first_row + compared[i] - from] = COLIBRI_ROW_LOGITS;
        CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
        for (; at < N_COMPARED && compared[at] < to; at++, n_held++) {
            CHECK(batch.status[first_row + compared[at] - from] == COLIBRI_OK);
            memcpy(out + at * TINY_VOCABULARY, colibri_logits(ctx, n_held), TINY_VOCABULARY * sizeof *out);
        }
    }
}

/* Moves the pages of the first n tokens to another context. */
static void move_pages(colibri_context_t *from, colibri_context_t *to, size_t n) {
    size_t page_bytes = colibri_kv_page_bytes(from);
    void *buffer = malloc(page_bytes);
    for (uint32_t page = 0; page * COLIBRI_PAGE_TOKENS < n; page++) {
        size_t left = n - page * COLIBRI_PAGE_TOKENS;
        uint64_t checksum;
        CHECK_CODE(colibri_kv_save(from, page, buffer, page_bytes, &checksum), COLIBRI_OK);
        CHECK_CODE(colibri_kv_load(to, page, left < COLIBRI_PAGE_TOKENS ? (uint32_t)left : COLIBRI_PAGE_TOKENS, buffer, page_bytes, checksum),
                   COLIBRI_OK);
    }
    free(buffer);
}

static void run_variant(colibri_model_t *model, uint32_t kv_format, const struct text *text, const struct variant *variant, float *out) {
    colibri_context_t *ctx = open_variant(model, kv_format, variant);
    if (variant->restored) {
        colibri_context_t *other = open_variant(model, kv_format, variant);
        run(other, text, variant, 0, variant->restored, out);
        move_pages(other, ctx, variant->restored);
        colibri_context_close(other);
    }
    run(ctx, text, variant, variant->restored, N_TOKENS, out);
    CHECK(colibri_context_kv_overflows(ctx) == 0);
    colibri_context_close(ctx);
}

static void compare(const float *expected, const float *actual, const struct variant *v, uint32_t format, uint32_t kv_format) {
    for (size_t i = 0; i < N_COMPARED; i++)
        if (memcmp(expected + i * TINY_VOCABULARY, actual + i * TINY_VOCABULARY, TINY_VOCABULARY * sizeof *expected))
            FAIL("position %zu differs: weights %" PRIu32 ", KV %" PRIu32 ", %s, chunk %zu, %u threads, %s, %zu restored, %zu slots", compared[i], format, kv_format,
              v->isa, v->chunk, v->threads, v->neighbours ? "neighbours" : "alone", v->restored, v->slots);
}

static void check_pinned(const float *logits, const struct weights *weights, uint32_t kv_format) {
    uint64_t got = colibri_checksum(logits, N_COMPARED * TINY_VOCABULARY * sizeof *logits);
    uint64_t expected = weights->pinned[kv_format == COLIBRI_KV_F16];
    if (got != expected) FAIL("this build's logits have checksum 0x%016" PRIx64 ", all builds' have 0x%016" PRIx64, got, expected);
}

/* Has this machine the instruction set? */
static bool is_here(colibri_model_t *model, const char *isa) {
    colibri_context_t *ctx = NULL;
    colibri_context_options_t options = {.struct_bytes = sizeof options, .n_pages = 1, .isa = isa};
    int code = colibri_context_open(&ctx, model, &options, NULL, 0);
    colibri_context_close(ctx);
    return code == COLIBRI_OK;
}

static void test_every_way_gives_the_same_bits(const struct weights *weights, uint32_t flags, uint32_t kv_format) {
    static float expected[N_COMPARED * TINY_VOCABULARY], actual[N_COMPARED * TINY_VOCABULARY];
    static struct text text;
    const struct variant variants[] = {
        {NULL, 1, 1, false, 0, 0}, {NULL, 7, 2, false, 0, 0},   {NULL, 32, 3, false, 0, 0},   {NULL, 512, 1, false, 0, 0},  {NULL, 512, 2, false, 0, 0},
        {NULL, 1, 2, true, 0, 0},  {NULL, 7, 3, true, 0, 0},    {NULL, 32, 1, true, 0, 0},    {NULL, 512, 2, true, 0, 0},   {NULL, 32, 2, false, 320, 0},
        {NULL, 7, 1, true, 333, 0}, {NULL, 512, 3, false, 1, 0},
        {NULL, 1, 2, false, 0, TINY_TOP_K}, {NULL, 7, 1, true, 0, 3}, {NULL, 32, 2, true, 333, 5}, {NULL, 512, 2, false, 0, 8}, {NULL, 32, 2, false, 0, 12},
    };
    struct tiny_model file;
    colibri_model_t *model = tiny_open(&file, weights->format, flags, 3);
    make_text(&text);
    slot_bytes = (file.header->expert_bytes + 4095) / 4096 * 4096;
    run_variant(model, kv_format, &text, &(struct variant){"scalar", 32, 1, false, 0, 0}, expected);
    check_pinned(expected, weights, kv_format);
    CHECK(memcmp(expected, expected + TINY_VOCABULARY, TINY_VOCABULARY * sizeof *expected) != 0);
    for (size_t isa = 0; colibri_isa_name(isa); isa++) {
        bool scalar = strcmp(colibri_isa_name(isa), "scalar") == 0;
        if (!is_here(model, colibri_isa_name(isa))) continue;
        /* The scalar build is slow, and is compared to others by each of them: every eighth variant will do. */
        for (size_t i = scalar ? 1 : FIRST; i < sizeof variants / sizeof *variants; i += scalar ? 8 * EVERY : EVERY) {
            struct variant variant = variants[i];
            variant.isa = colibri_isa_name(isa);
            memset(actual, 0, sizeof actual);
            run_variant(model, kv_format, &text, &variant, actual);
            compare(expected, actual, &variant, weights->format, kv_format);
        }
    }
    colibri_model_close(model);
    tiny_discard(&file);
}

int main(int argc, char **argv) {
    const struct weights *weights = all_weights;
    while (argc > 1 && strcmp(argv[1], weights->name) != 0) weights++;
    uint32_t kv_format = argc > 2 && strcmp(argv[2], "f16") == 0 ? COLIBRI_KV_F16 : COLIBRI_KV_F32;
    /* Between them, the runs have every feature of attention and experts. */
    uint32_t flags = weights->format != COLIBRI_FMT_F32 ? COLIBRI_ARCH_QK_NORM_HEAD | COLIBRI_ARCH_NORM_TOPK | COLIBRI_ARCH_TIED : COLIBRI_ARCH_QKV_BIAS;
    if (kv_format == COLIBRI_KV_F16)
        flags = COLIBRI_ARCH_QK_NORM_WHOLE | COLIBRI_ARCH_O_BIAS | COLIBRI_ARCH_QKV_CLIP | COLIBRI_ARCH_SHARED_EXPERT | COLIBRI_ARCH_NORM_TOPK;
    if (kv_format == COLIBRI_KV_F16 && weights->format != COLIBRI_FMT_F32) flags |= COLIBRI_ARCH_SHARED_GATED;
    test_every_way_gives_the_same_bits(weights, flags, kv_format);
    return 0;
}
