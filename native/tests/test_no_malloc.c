/*
 * Law 4: after a context is open, nothing allocates. malloc and its kin, and mmap, are replaced by counting ones in this program, and so for
 * the library.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "sequences.h"
#include "tiny_model.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__) || !defined(__x86_64__)
int main(void) {
    puts("skipped: the allocator cannot be replaced here");
    return SKIPPED;
}
#else

static atomic_size_t n_allocations;

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t alignment, size_t n);

void *malloc(size_t n) {
    n_allocations++;
    return __libc_malloc(n);
}

void *calloc(size_t n, size_t size) {
    n_allocations++;
    return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n) {
    n_allocations++;
    return __libc_realloc(p, n);
}

void *aligned_alloc(size_t alignment, size_t n) {
    n_allocations++;
    return __libc_memalign(alignment, n);
}

int posix_memalign(void **p, size_t alignment, size_t n) {
    n_allocations++;
    *p = __libc_memalign(alignment, n);
    return *p ? 0 : ENOMEM;
}

void *mmap(void *address, size_t n, int protection, int flags, int fd, off_t offset) {
    n_allocations++;
    return (void *)syscall(SYS_mmap, address, n, protection, flags, fd, offset);
}

static struct test_batch batch;
static int32_t routing[BATCH_ROWS * TINY_LAYERS * TINY_TOP_K];

static void use_everything(colibri_context_t *ctx, const int32_t *tokens, uint8_t *page) {
    batch_clear(&batch);
    batch_add(&batch, tokens, 0, 60, 0);
    batch_add(&batch, tokens, 0, 1, 4);
    batch.flags[59] = COLIBRI_ROW_LOGITS | COLIBRI_ROW_SCORE;
    batch.flags[20] = COLIBRI_ROW_SCORE;
    colibri_batch_t view = batch_view(&batch);
    view.routing = routing;
    CHECK_CODE(colibri_forward(ctx, &view), COLIBRI_OK);
    CHECK(colibri_logits(ctx, 0) != NULL);
    const float bias = 1;
    const uint32_t allowed[(TINY_VOCABULARY + 31) / 32] = {0xfffffff0, 0xffff};
    colibri_sampling_t sampling = {.struct_bytes = sizeof sampling,
                                   .temperature = 1,
                                   .top_p = 0.9f,
                                   .top_k = 50,
                                   .min_p = 0.01f,
                                   .repetition_penalty = 1.1f,
                                   .presence_penalty = 0.1f,
                                   .frequency_penalty = 0.1f,
                                   .allowed = allowed,
                                   .history = tokens,
                                   .n_history = 60,
                                   .bias_ids = tokens,
                                   .bias_values = &bias,
                                   .n_bias = 1,
                                   .n_top_logprobs = 20};
    colibri_sampled_t sampled;
    CHECK_CODE(colibri_sample(ctx, 0, &sampling, &sampled), COLIBRI_OK);
    uint64_t checksum;
    size_t page_bytes = colibri_kv_page_bytes(ctx);
    CHECK_CODE(colibri_kv_save(ctx, 0, page, page_bytes, &checksum), COLIBRI_OK);
    CHECK_CODE(colibri_kv_load(ctx, 0, 32, page, page_bytes, checksum), COLIBRI_OK);
    CHECK_CODE(colibri_kv_load(ctx, 0, 32, page, page_bytes, checksum + 1), COLIBRI_E_CHECKSUM); /* a refusal allocates nothing either */
    CHECK_CODE(colibri_kv_copy(ctx, 5, 1, 7), COLIBRI_OK);
    int32_t output[20];
    size_t n_output;
    CHECK_CODE(colibri_truncate(ctx, 0), COLIBRI_OK);
    CHECK_CODE(colibri_infer(ctx, tokens, 50, output, &n_output, 20, 1), COLIBRI_OK);
    CHECK_CODE(colibri_infer(ctx, tokens, 0, output, &n_output, 20, 1), COLIBRI_E_INVALID);
    colibri_cancel(ctx);
}

static void test_nothing_allocates_after_open(uint32_t format, size_t slots) {
    struct tiny_model file;
    colibri_model_t *model = tiny_open(&file, format, COLIBRI_ARCH_SHARED_EXPERT | COLIBRI_ARCH_SHARED_GATED, 6);
    int32_t tokens[60];
    uint64_t random = 8;
    for (size_t i = 0; i < 60; i++) tokens[i] = (int32_t)random_below(&random, TINY_VOCABULARY - 1);
    size_t before_open = n_allocations;
    uint64_t slot_bytes = (file.header->expert_bytes + 4095) / 4096 * 4096;
    colibri_context_t *ctx = open_context(model, (colibri_context_options_t){
        .n_pages = 8, .max_rows = 64, .prefill_threads = 3, .decode_threads = 2, .expert_ram_bytes = slots * slot_bytes});
    CHECK(n_allocations > before_open); /* or the counting does not count */
    uint8_t *page = malloc(colibri_kv_page_bytes(ctx));
    size_t before = n_allocations;
    for (int i = 0; i < 3; i++) use_everything(ctx, tokens, page);
    if (n_allocations != before) FAIL("%zu allocations after open", n_allocations - before);
    free(page);
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
}

int main(void) {
    test_nothing_allocates_after_open(COLIBRI_FMT_F32, 0);
    test_nothing_allocates_after_open(COLIBRI_FMT_Q8, 0);
    test_nothing_allocates_after_open(COLIBRI_FMT_Q4, 0);
    test_nothing_allocates_after_open(COLIBRI_FMT_Q8, TINY_TOP_K);
    test_nothing_allocates_after_open(COLIBRI_FMT_Q8, 7);
    return 0;
}
#endif
