/*
 * A file that lies: cut, flipped, overlapping, overflowing. Each is refused with the right code and a sentence that names the field.
 */
#include "check.h"
#include "sequences.h"
#include "tiny_model.h"

static struct tiny_model file;

static void expect_refusal(int expected, const char *field) {
    colibri_model_t *model = (colibri_model_t *)&file;
    char error[512] = "";
    int code = colibri_model_open(&model, file.path, error, sizeof error);
    if (code != expected) FAIL("%s: gave %d (%s), expected %d", field, code, error, expected);
    if (!strstr(error, field) || !strstr(error, file.path)) FAIL("\"%s\" does not name %s and the path", error, field);
    CHECK(model == NULL);
}

static void rebuild(void) {
    char path[sizeof file.path];
    memcpy(path, file.path, sizeof path);
    free(file.bytes);
    file = tiny_build(COLIBRI_FMT_F32, COLIBRI_ARCH_QK_NORM_HEAD, 1);
    memcpy(file.path, path, sizeof path);
    tiny_seal(&file);
}

/* Tells one lie under a right checksum, and expects the refusal to name `field`. */
#define LIE(lie, code, field)              \
    do {                                   \
        rebuild();                         \
        struct colibri_file_header *h = file.header; \
        struct colibri_file_tensor *t = file.tensors; \
        (void)h, (void)t;                  \
        lie;                               \
        tiny_seal_header(&file);           \
        tiny_write(&file, file.n_bytes);   \
        expect_refusal((code), (field));   \
    } while (0)

static void test_a_true_file_is_opened_and_verified(void) {
    rebuild();
    tiny_write(&file, file.n_bytes);
    colibri_model_t *model;
    CHECK_CODE(colibri_model_open(&model, file.path, NULL, 0), COLIBRI_OK);
    CHECK_CODE(colibri_model_verify(model, NULL, 0), COLIBRI_OK);
    colibri_model_info_t info = {.struct_bytes = sizeof info};
    CHECK_CODE(colibri_model_get_info(model, &info), COLIBRI_OK);
    CHECK(info.vocabulary == TINY_VOCABULARY && info.n_layers == TINY_LAYERS && info.end_tokens[0] == TINY_END_TOKEN);
    CHECK(memcmp(colibri_model_json(model), "{\"family\"", 9) == 0);
    info.struct_bytes++;
    CHECK_CODE(colibri_model_get_info(model, &info), COLIBRI_E_INVALID);
    colibri_model_close(model);
}

static void test_a_file_that_was_cut_is_refused_with_both_sizes(void) {
    const size_t lengths[] = {file.n_bytes - 1, file.n_bytes / 2, COLIBRI_FILE_HEADER_BYTES};
    rebuild();
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        char actual[32];
        tiny_write(&file, lengths[i]);
        snprintf(actual, sizeof actual, "%zu", lengths[i]);
        expect_refusal(COLIBRI_E_FORMAT, "file_bytes");
        expect_refusal(COLIBRI_E_FORMAT, actual);
    }
    tiny_write(&file, COLIBRI_FILE_HEADER_BYTES - 1);
    expect_refusal(COLIBRI_E_FORMAT, "file_bytes");
}

static void test_what_is_no_model_is_told_so_however_short(void) {
    const size_t lengths[] = {0, 7, 100, COLIBRI_FILE_HEADER_BYTES};
    rebuild();
    file.bytes[0] ^= 1;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        tiny_write(&file, lengths[i]);
        expect_refusal(COLIBRI_E_FORMAT, "magic: not a .colibri file");
    }
}

static void test_a_lying_header_is_refused_by_field(void) {
    LIE(h->magic[0] ^= 1, COLIBRI_E_FORMAT, "magic");
    LIE(h->version = 2, COLIBRI_E_UNSUPPORTED, "version");
    LIE(h->header_bytes = 0xffffffff, COLIBRI_E_FORMAT, "header_bytes");
    LIE(h->file_bytes++, COLIBRI_E_FORMAT, "file_bytes");
    LIE(h->n_layers = 0, COLIBRI_E_FORMAT, "n_layers");
    LIE(h->n_layers = 1025, COLIBRI_E_FORMAT, "n_layers");
    LIE(h->n_layers = 2, COLIBRI_E_FORMAT, "n_expert_blocks");
    LIE(h->hidden = 0, COLIBRI_E_FORMAT, "hidden");
    LIE(h->hidden = 0xffffffff, COLIBRI_E_FORMAT, "hidden");
    LIE(h->hidden = 49, COLIBRI_E_FORMAT, "expert_bytes");
    LIE(h->vocabulary = 0, COLIBRI_E_FORMAT, "vocabulary");
    LIE(h->vocabulary = 0x7fffffff, COLIBRI_E_FORMAT, "vocabulary");
    LIE(h->n_heads = 0, COLIBRI_E_FORMAT, "n_heads");
    LIE(h->n_kv_heads = 0, COLIBRI_E_FORMAT, "n_kv_heads");
    LIE(h->n_kv_heads = 3, COLIBRI_E_FORMAT, "n_kv_heads");
    LIE(h->head_dim = 0, COLIBRI_E_FORMAT, "head_dim");
    LIE(h->head_dim = 100000, COLIBRI_E_FORMAT, "head_dim");
    LIE(h->rotary_dim = 7, COLIBRI_E_FORMAT, "rotary_dim");
    LIE(h->rotary_dim = 64, COLIBRI_E_FORMAT, "rotary_dim");
    LIE(h->n_experts = 0, COLIBRI_E_FORMAT, "n_experts");
    LIE(h->top_k = 0, COLIBRI_E_FORMAT, "top_k");
    LIE(h->top_k = TINY_EXPERTS + 1, COLIBRI_E_FORMAT, "top_k");
    LIE(h->expert_width = 0xfffffff0, COLIBRI_E_FORMAT, "expert_width");
    LIE(h->shared_width = 8, COLIBRI_E_FORMAT, "shared_width");
    LIE(h->dense_width = 0, COLIBRI_E_FORMAT, "dense_width");
    LIE(h->max_positions = 0, COLIBRI_E_FORMAT, "max_positions");
    LIE(h->n_end_tokens = 17, COLIBRI_E_FORMAT, "n_end_tokens");
    LIE(h->end_tokens[0] = TINY_VOCABULARY, COLIBRI_E_FORMAT, "end_tokens");
    LIE(h->dense_layers[0] = 0xff, COLIBRI_E_FORMAT, "dense_layers");
    LIE(h->dense_layers[31] = 1, COLIBRI_E_FORMAT, "dense_layers");
    LIE(h->n_dense_layers_mask_words = 33, COLIBRI_E_FORMAT, "n_dense_layers_mask_words");
    LIE(h->n_shards = 0, COLIBRI_E_FORMAT, "n_shards");
    LIE(h->n_shards = TINY_EXPERTS + 1, COLIBRI_E_FORMAT, "n_shards");
    LIE(h->n_shards = 2, COLIBRI_E_FORMAT, "experts_per_shard");
    LIE(h->experts_per_shard--, COLIBRI_E_FORMAT, "experts_per_shard");
    LIE((h->n_shards = 2, h->experts_per_shard = TINY_EXPERTS / 2), COLIBRI_E_FORMAT, "expert_offset"); /* they are inside */
    LIE(h->shard_index = 1, COLIBRI_E_FORMAT, "shard_index");
    LIE(h->rms_eps = -1, COLIBRI_E_FORMAT, "rms_eps");
    LIE(memset(&h->attention_scale, 0xff, 4), COLIBRI_E_FORMAT, "attention_scale"); /* not a number */
    LIE(h->rope_attention_factor = 0, COLIBRI_E_FORMAT, "rope_attention_factor");
    LIE(h->reserved[3651] = 1, COLIBRI_E_FORMAT, "reserved");
}

static void test_what_is_not_implemented_is_refused_by_name(void) {
    LIE(h->arch_flags |= COLIBRI_ARCH_ROUTER_SIGMOID, COLIBRI_E_UNSUPPORTED, "router_sigmoid");
    LIE(h->arch_flags |= COLIBRI_ARCH_ROUTER_BIAS, COLIBRI_E_UNSUPPORTED, "router_bias");
    LIE(h->arch_flags |= COLIBRI_ARCH_SHARED_GATED, COLIBRI_E_FORMAT, "shared_gated");
    LIE(h->arch_flags |= 1u << 31, COLIBRI_E_UNSUPPORTED, "bit 31");
    LIE(h->arch_flags |= COLIBRI_ARCH_QK_NORM_WHOLE, COLIBRI_E_FORMAT, "qk_norm_whole");
    LIE(h->router_scale = 2.5f, COLIBRI_E_UNSUPPORTED, "router_scale");
    LIE(h->n_groups = 8, COLIBRI_E_UNSUPPORTED, "n_groups");
    LIE(h->expert_format = 77, COLIBRI_E_UNSUPPORTED, "expert_format");
    LIE(h->arch_flags |= COLIBRI_ARCH_QKV_FUSED, COLIBRI_E_FORMAT, "role"); /* but q, k and v are there apart */
    LIE(t[0].role = 999, COLIBRI_E_UNSUPPORTED, "role");
}

static void test_lying_offsets_are_refused_by_field(void) {
    LIE(h->expert_offset += 4096, COLIBRI_E_FORMAT, "expert_offset");
    LIE(h->expert_offset = UINT64_MAX - 65535, COLIBRI_E_FORMAT, "expert_offset");
    LIE(h->expert_offset = 65536 * 1000, COLIBRI_E_FORMAT, "expert_offset");
    LIE(h->expert_stride = 0, COLIBRI_E_FORMAT, "expert_stride");
    LIE(h->expert_stride = 1ull << 63, COLIBRI_E_FORMAT, "expert_offset");
    LIE(h->expert_bytes--, COLIBRI_E_FORMAT, "expert_bytes");
    LIE(h->json_offset = UINT64_MAX, COLIBRI_E_FORMAT, "json_offset");
    LIE(h->json_bytes = UINT64_MAX, COLIBRI_E_FORMAT, "json_offset");
    LIE(h->json_offset = h->tensor_table_offset, COLIBRI_E_FORMAT, "overlaps");
    LIE(t[0].offset += 32, COLIBRI_E_FORMAT, "offset");
    LIE(t[0].offset = UINT64_MAX - 63, COLIBRI_E_FORMAT, "offset");
    LIE(t[0].offset = 0, COLIBRI_E_FORMAT, "offset");
    LIE(t[1].offset = t[0].offset, COLIBRI_E_FORMAT, "overlaps");
    LIE(t[0].offset = h->expert_offset, COLIBRI_E_FORMAT, "overlaps");
    LIE(t[0].bytes -= 64, COLIBRI_E_FORMAT, "bytes");
    LIE(t[0].rows = UINT64_MAX, COLIBRI_E_FORMAT, "rows");
    LIE(t[0].cols = 0, COLIBRI_E_FORMAT, "cols");
    LIE(t[0].rows--, COLIBRI_E_FORMAT, "rows"); /* the padded size is the same */
    LIE(t[0].format = 1000, COLIBRI_E_UNSUPPORTED, "format");
    LIE(t[4].layer = TINY_LAYERS, COLIBRI_E_FORMAT, "layer");
    LIE(t[4].layer = COLIBRI_FILE_NO_LAYER, COLIBRI_E_FORMAT, "role");
    LIE(t[6].role = COLIBRI_T_V, COLIBRI_E_FORMAT, "twice"); /* k says that it is v */
    LIE(tiny_tensor(&file, COLIBRI_T_ROUTER, 0)->layer = 1, COLIBRI_E_FORMAT, "router"); /* in the dense layer */
}

/* Lies that tiny_seal_header cannot follow: the tables themselves are elsewhere. */
static void test_lying_tables_are_refused_before_they_are_read(void) {
    const struct {
        size_t field;
        uint64_t value;
        const char *name;
    } lies[] = {
        {offsetof(struct colibri_file_header, n_tensors), 0, "n_tensors"},
        {offsetof(struct colibri_file_header, n_tensors), UINT64_MAX / 64 + 2, "n_tensors"},
        {offsetof(struct colibri_file_header, n_tensors), 60000, "tensor_table_offset"},
        {offsetof(struct colibri_file_header, tensor_table_offset), UINT64_MAX - 7, "tensor_table_offset"},
        {offsetof(struct colibri_file_header, tensor_table_offset), 0, "tensor_table_offset"},
        {offsetof(struct colibri_file_header, n_expert_blocks), 0, "n_expert_blocks"},
        {offsetof(struct colibri_file_header, n_expert_blocks), UINT64_MAX, "n_expert_blocks"},
        {offsetof(struct colibri_file_header, n_expert_blocks), 4000000, "expert_table_offset"},
        {offsetof(struct colibri_file_header, expert_table_offset), UINT64_MAX - 7, "expert_table_offset"},
        {offsetof(struct colibri_file_header, header_checksum), 1, "header_checksum"},
    };
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        rebuild();
        memcpy(file.bytes + lies[i].field, &lies[i].value, sizeof lies[i].value);
        tiny_write(&file, file.n_bytes);
        expect_refusal(COLIBRI_E_FORMAT, lies[i].name);
    }
}

static void test_any_flipped_byte_of_header_and_tables_is_noticed(void) {
    rebuild();
    size_t end = file.header->json_offset;
    uint64_t random = 5;
    for (int i = 0; i < 200; i++) {
        size_t at = random_below(&random, (uint32_t)end);
        file.bytes[at] ^= 0x40;
        tiny_write(&file, 0); /* keeps the path */
        tiny_write(&file, file.n_bytes);
        colibri_model_t *model;
        CHECK(colibri_model_open(&model, file.path, NULL, 0) < 0);
        file.bytes[at] ^= 0x40;
    }
}

static void expect_damage(size_t at, const char *name) {
    rebuild();
    file.bytes[at] ^= 1;
    tiny_write(&file, file.n_bytes);
    colibri_model_t *model;
    char error[512] = "";
    CHECK_CODE(colibri_model_open(&model, file.path, error, sizeof error), COLIBRI_OK);
    CHECK_CODE(colibri_model_verify(model, error, sizeof error), COLIBRI_E_CHECKSUM);
    if (!strstr(error, name)) FAIL("\"%s\" does not name %s", error, name);
    colibri_model_close(model);
}

static void test_verify_names_what_is_damaged(void) {
    expect_damage(tiny_tensor(&file, COLIBRI_T_O, 2)->offset + 100, "o of layer 2");
    expect_damage(file.header->expert_offset + 3 * file.header->expert_stride, "expert block 3");
    expect_damage(file.header->json_offset, "json");
}

static void test_what_is_no_file_is_refused(void) {
    colibri_model_t *model;
    char error[512];
    CHECK_CODE(colibri_model_open(&model, "/nonexistent/x.colibri", error, sizeof error), COLIBRI_E_IO);
    CHECK(strstr(error, "/nonexistent/x.colibri"));
    CHECK_CODE(colibri_model_open(&model, "/", error, sizeof error), COLIBRI_E_IO);
    CHECK_CODE(colibri_model_open(NULL, "/", error, sizeof error), COLIBRI_E_INVALID);
    char two[2];
    CHECK_CODE(colibri_model_open(&model, "/", two, sizeof two), COLIBRI_E_IO); /* a short buffer gets a short sentence */
    CHECK(two[1] == 0);
}

static void test_wrong_options_are_refused_by_name(void) {
    colibri_model_t *model = tiny_open(&file, COLIBRI_FMT_F32, 0, 1);
    const struct {
        colibri_context_options_t options;
        int code;
        const char *name;
    } wrong[] = {
        {{.struct_bytes = 1, .n_pages = 1}, COLIBRI_E_INVALID, "struct_bytes"},
        {{.n_pages = 0}, COLIBRI_E_INVALID, "n_pages"},
        {{.n_pages = 1, .kv_format = 9}, COLIBRI_E_INVALID, "kv_format"},
        {{.n_pages = 1, .max_rows = 1u << 20}, COLIBRI_E_INVALID, "max_rows"},
        {{.n_pages = 1, .max_context = TINY_POSITIONS + 1}, COLIBRI_E_INVALID, "max_context"},
        {{.n_pages = 1, .decode_threads = 100000}, COLIBRI_E_INVALID, "threads"},
        {{.n_pages = 1, .expert_ram_bytes = 4096}, COLIBRI_E_INVALID, "expert_ram_bytes"},
        {{.n_pages = 1, .isa = "quantum"}, COLIBRI_E_UNSUPPORTED, "quantum"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        colibri_context_options_t options = wrong[i].options;
        colibri_context_t *ctx = (colibri_context_t *)&options;
        char error[512] = "";
        if (!options.struct_bytes) options.struct_bytes = sizeof options;
        CHECK_CODE(colibri_context_open(&ctx, model, &options, error, sizeof error), wrong[i].code);
        if (!strstr(error, wrong[i].name)) FAIL("\"%s\" does not name %s", error, wrong[i].name);
        CHECK(ctx == NULL);
    }
    colibri_context_options_t shorter = {.struct_bytes = offsetof(colibri_context_options_t, expert_ram_bytes), .n_pages = 1};
    colibri_context_t *opened = NULL;
    CHECK_CODE(colibri_context_open(&opened, model, &shorter, NULL, 0), COLIBRI_OK); /* of a program built with an older header */
    colibri_context_close(opened);
    colibri_model_close(model);
    tiny_discard(&file);
}

int main(void) {
    test_a_true_file_is_opened_and_verified();
    test_a_file_that_was_cut_is_refused_with_both_sizes();
    test_what_is_no_model_is_told_so_however_short();
    test_a_lying_header_is_refused_by_field();
    test_what_is_not_implemented_is_refused_by_name();
    test_lying_offsets_are_refused_by_field();
    test_lying_tables_are_refused_before_they_are_read();
    test_any_flipped_byte_of_header_and_tables_is_noticed();
    test_verify_names_what_is_damaged();
    test_what_is_no_file_is_refused();
    tiny_discard(&file);
    test_wrong_options_are_refused_by_name();
    return 0;
}
