#include "tiny_model.h"

#include <math.h>
#include <stdbool.h>
#include <unistd.h>

#include "check.h"

enum { HIDDEN = 48, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 10, ROTARY = 8, WIDTH = 40, SHARED = 24, DENSE = 56, DENSE_LAYER = 1 };
enum { TILE = 16, GROUP = 32 };
static const char json[] = "{\"family\": \"tiny\"}";

static size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

/* docs/numerics.md "Weights", written down a second time on purpose. */
static size_t tile_bytes(uint32_t format, size_t cols) {
    size_t padded = round_up(cols, GROUP);
    if (format == COLIBRI_FMT_Q8) return round_up(padded * TILE + padded / GROUP * TILE * 2, 64);
    if (format == COLIBRI_FMT_Q4) return round_up(padded * TILE / 2 + padded / GROUP * TILE * 2, 64);
    return cols * TILE * (format == COLIBRI_FMT_F32 ? 4 : 2);
}

static size_t tensor_bytes(uint32_t format, size_t rows, size_t cols) {
    if (format == COLIBRI_FMT_VECTOR) return rows * cols * sizeof(float);
    return (rows + TILE - 1) / TILE * tile_bytes(format, cols);
}

/* ---- contents ---- */

static void fill_f32(float *tile, size_t n_rows, size_t cols, float scale, uint64_t *random) {
    for (size_t col = 0; col < cols; col++)
        for (size_t row = 0; row < TILE; row++) tile[col * TILE + row] = row < n_rows ? scale * random_float(random) : 0;
}

static void fill_scales(uint16_t *scales, size_t n, float scale, uint64_t *random) {
    for (size_t i = 0; i < n; i++) {
        float value = scale / 127 * (1 + 0.5f * random_float(random));
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        scales[i] = (uint16_t)(bits >> 16);
    }
}

static void fill_q8(uint8_t *tile, size_t n_rows, size_t cols, float scale, uint64_t *random) {
    size_t padded = round_up(cols, GROUP);
    for (size_t col = 0; col < padded; col++)
        for (size_t row = 0; row < TILE; row++)
            tile[col / 4 * 64 + row * 4 + col % 4] = row < n_rows && col < cols ? (uint8_t)(1 + random_below(random, 255)) : 128;
    fill_scales((uint16_t *)(void *)(tile + padded * TILE), padded / GROUP * TILE, scale, random);
}

static void fill_q4(uint8_t *tile, size_t n_rows, size_t cols, float scale, uint64_t *random) {
    size_t padded = round_up(cols, GROUP);
    memset(tile, 0, padded * TILE / 2);
    for (size_t col = 0; col < padded; col++)
        for (size_t row = 0; row < TILE; row++) {
            unsigned nibble = row < n_rows && col < cols ? (unsigned)random_below(random, 16) : 8;
            size_t group = col / GROUP, within = col % GROUP;
            tile[group * GROUP * TILE / 2 + within % 16 / 4 * 64 + row * 4 + within % 4] |= (uint8_t)(within < 16 ? nibble : nibble << 4);
        }
    fill_scales((uint16_t *)(void *)(tile + padded * TILE / 2), padded / GROUP * TILE, scale, random);
}

static void fill_matrix(uint8_t *to, uint32_t format, size_t rows, size_t cols, uint64_t *random) {
    float scale = 1.7f / sqrtf((float)cols); /* keeps the size of activations, roughly */
    for (size_t row = 0; row < rows; row += TILE, to += tile_bytes(format, cols)) {
        size_t n = rows - row < TILE ? rows - row : TILE;
        if (format == COLIBRI_FMT_Q8) fill_q8(to, n, cols, scale, random);
        else if (format == COLIBRI_FMT_Q4) fill_q4(to, n, cols, scale, random);
        else fill_f32((float *)(void *)to, n, cols, scale, random);
    }
}

static void fill_tensor(const struct tiny_model *model, const struct colibri_file_tensor *tensor, uint64_t *random) {
    uint8_t *to = model->bytes + tensor->offset;
    float *vector = (float *)(void *)to;
    if (tensor->format != COLIBRI_FMT_VECTOR) {
        fill_matrix(to, tensor->format, tensor->rows, tensor->cols, random);
    } else if (tensor->role == COLIBRI_T_INV_FREQ) {
        for (size_t i = 0; i < tensor->cols; i++) vector[i] = (float)pow(10000, -(double)i / (double)tensor->cols);
    } else {
        for (size_t i = 0; i < tensor->cols; i++) vector[i] = 1 + 0.3f * random_float(random);
    }
}

/* ---- layout ---- */

static void add(struct tiny_model *model, uint32_t role, uint32_t layer, uint32_t format, size_t rows, size_t cols) {
    struct colibri_file_tensor *tensor = &model->tensors[model->header->n_tensors++];
    *tensor = (struct colibri_file_tensor){.role = role, .layer = layer, .format = format, .rows = rows, .cols = cols};
    tensor->bytes = tensor_bytes(format, rows, cols);
}

static void add_attention(struct tiny_model *model, uint32_t layer, uint32_t format) {
    uint32_t flags = model->header->arch_flags;
    bool whole = flags & COLIBRI_ARCH_QK_NORM_WHOLE;
    add(model, COLIBRI_T_ATTN_NORM, layer, COLIBRI_FMT_VECTOR, 1, HIDDEN);
    add(model, COLIBRI_T_Q, layer, format, HEADS * HEAD_DIM, HIDDEN);
    add(model, COLIBRI_T_K, layer, format, KV_HEADS * HEAD_DIM, HIDDEN);
    add(model, COLIBRI_T_V, layer, format, KV_HEADS * HEAD_DIM, HIDDEN);
    add(model, COLIBRI_T_O, layer, format, HIDDEN, HEADS * HEAD_DIM);
    if (flags & (COLIBRI_ARCH_QK_NORM_HEAD | COLIBRI_ARCH_QK_NORM_WHOLE)) {
        add(model, COLIBRI_T_Q_NORM, layer, COLIBRI_FMT_VECTOR, 1, whole ? HEADS * HEAD_DIM : HEAD_DIM);
        add(model, COLIBRI_T_K_NORM, layer, COLIBRI_FMT_VECTOR, 1, whole ? KV_HEADS * HEAD_DIM : HEAD_DIM);
    }
    if (flags & COLIBRI_ARCH_QKV_BIAS) {
        add(model, COLIBRI_T_Q_BIAS, layer, COLIBRI_FMT_VECTOR, 1, HEADS * HEAD_DIM);
        add(model, COLIBRI_T_K_BIAS, layer, COLIBRI_FMT_VECTOR, 1, KV_HEADS * HEAD_DIM);
        add(model, COLIBRI_T_V_BIAS, layer, COLIBRI_FMT_VECTOR, 1, KV_HEADS * HEAD_DIM);
    }
    if (flags & COLIBRI_ARCH_O_BIAS) add(model, COLIBRI_T_O_BIAS, layer, COLIBRI_FMT_VECTOR, 1, HIDDEN);
}

static void add_network(struct tiny_model *model, uint32_t layer, uint32_t format) {
    add(model, COLIBRI_T_FFN_NORM, layer, COLIBRI_FMT_VECTOR, 1, HIDDEN);
    if (layer == DENSE_LAYER) {
        add(model, COLIBRI_T_DENSE_GATE, layer, format, DENSE, HIDDEN);
        add(model, COLIBRI_T_DENSE_UP, layer, format, DENSE, HIDDEN);
        add(model, COLIBRI_T_DENSE_DOWN, layer, format, HIDDEN, DENSE);
        return;
    }
    add(model, COLIBRI_T_ROUTER, layer, COLIBRI_FMT_F32, TINY_EXPERTS, HIDDEN);
    if (!(model->header->arch_flags & COLIBRI_ARCH_SHARED_EXPERT)) return;
    add(model, COLIBRI_T_SHARED_GATE, layer, format, SHARED, HIDDEN);
    add(model, COLIBRI_T_SHARED_UP, layer, format, SHARED, HIDDEN);
    add(model, COLIBRI_T_SHARED_DOWN, layer, format, HIDDEN, SHARED);
    if (model->header->arch_flags & COLIBRI_ARCH_SHARED_GATED) add(model, COLIBRI_T_SHARED_EXPERT_GATE, layer, COLIBRI_FMT_F32, 1, HIDDEN);
}

static void add_tensors(struct tiny_model *model, uint32_t format) {
    add(model, COLIBRI_T_EMBEDDING, COLIBRI_FILE_NO_LAYER, format, TINY_VOCABULARY, HIDDEN);
    if (!(model->header->arch_flags & COLIBRI_ARCH_TIED)) add(model, COLIBRI_T_HEAD, COLIBRI_FILE_NO_LAYER, format, TINY_VOCABULARY, HIDDEN);
    add(model, COLIBRI_T_FINAL_NORM, COLIBRI_FILE_NO_LAYER, COLIBRI_FMT_VECTOR, 1, HIDDEN);
    add(model, COLIBRI_T_INV_FREQ, COLIBRI_FILE_NO_LAYER, COLIBRI_FMT_VECTOR, 1, ROTARY / 2);
    for (uint32_t layer = 0; layer < TINY_LAYERS; layer++) {
        add_attention(model, layer, format);
        add_network(model, layer, format);
    }
}

static void describe(struct colibri_file_header *header, uint32_t format, uint32_t flags) {
    memcpy(header->magic, COLIBRI_FILE_MAGIC, sizeof header->magic);
    header->version = COLIBRI_FILE_VERSION;
    header->header_bytes = COLIBRI_FILE_HEADER_BYTES;
    header->n_shards = 1;
    header->experts_per_shard = TINY_EXPERTS;
    header->expert_format = format;
    header->arch_flags = flags;
    header->n_layers = TINY_LAYERS;
    header->n_dense_layers_mask_words = 1;
    header->dense_layers[0] = 1u << DENSE_LAYER;
    header->hidden = HIDDEN;
    header->vocabulary = TINY_VOCABULARY;
    header->n_heads = HEADS;
    header->n_kv_heads = KV_HEADS;
    header->head_dim = HEAD_DIM;
    header->rotary_dim = ROTARY;
    header->n_experts = TINY_EXPERTS;
    header->top_k = TINY_TOP_K;
    header->expert_width = WIDTH;
    header->shared_width = flags & COLIBRI_ARCH_SHARED_EXPERT ? SHARED : 0;
    header->dense_width = DENSE;
    header->max_positions = TINY_POSITIONS;
    header->rms_eps = 1e-6f;
    header->attention_scale = 1 / sqrtf(HEAD_DIM);
    header->rope_attention_factor = 1;
    header->router_scale = 1;
    header->qkv_clip = flags & COLIBRI_ARCH_QKV_CLIP ? 1.5f : 0;
    header->n_end_tokens = 1;
    header->end_tokens[0] = TINY_END_TOKEN;
}

/* Offsets of everything, in the order of docs/format.md. */
static void place(struct colibri_file_header *header, struct colibri_file_tensor *tensors) {
    header->n_expert_blocks = (TINY_LAYERS - 1) * TINY_EXPERTS;
    header->tensor_table_offset = sizeof *header;
    header->expert_table_offset = header->tensor_table_offset + header->n_tensors * sizeof *tensors;
    header->json_offset = header->expert_table_offset + header->n_expert_blocks * sizeof(uint64_t);
    header->json_bytes = sizeof json - 1;
    size_t end = header->json_offset + header->json_bytes;
    for (size_t i = 0; i < header->n_tensors; i++) {
        tensors[i].offset = round_up(end, COLIBRI_FILE_TENSOR_ALIGN);
        end = tensors[i].offset + tensors[i].bytes;
    }
    uint32_t format = header->expert_format;
    header->expert_bytes = 2 * tensor_bytes(format, WIDTH, HIDDEN) + tensor_bytes(format, HIDDEN, WIDTH);
    header->expert_stride = round_up(header->expert_bytes, COLIBRI_FILE_EXPERT_ALIGN);
    header->expert_offset = round_up(end, COLIBRI_FILE_EXPERT_ALIGN);
    header->file_bytes = header->expert_offset + header->n_expert_blocks * header->expert_stride;
}

static void fill_experts(const struct tiny_model *model, uint64_t *random) {
    const struct colibri_file_header *header = model->header;
    for (size_t block = 0; block < header->n_expert_blocks; block++) {
        uint8_t *at = model->bytes + header->expert_offset + block * header->expert_stride;
        fill_matrix(at, header->expert_format, WIDTH, HIDDEN, random);
        at += tensor_bytes(header->expert_format, WIDTH, HIDDEN);
        fill_matrix(at, header->expert_format, WIDTH, HIDDEN, random);
        fill_matrix(at + tensor_bytes(header->expert_format, WIDTH, HIDDEN), header->expert_format, HIDDEN, WIDTH, random);
    }
}

static void point_into(struct tiny_model *model, uint8_t *bytes) {
    model->bytes = bytes;
    model->header = (struct colibri_file_header *)(void *)bytes;
    model->tensors = (struct colibri_file_tensor *)(void *)(bytes + model->header->tensor_table_offset);
    model->expert_checksums = (uint64_t *)(void *)(bytes + model->header->expert_table_offset);
}

struct tiny_model tiny_build(uint32_t format, uint32_t flags, uint64_t seed) {
    struct colibri_file_header header = {0};
    struct colibri_file_tensor tensors[128];
    struct tiny_model model = {.header = &header, .tensors = tensors};
    describe(&header, format, flags);
    add_tensors(&model, format);
    place(&header, tensors);
    model.n_bytes = header.file_bytes;
    uint8_t *bytes = aligned_alloc(4096, model.n_bytes);
    CHECK(bytes != NULL);
    memset(bytes, 0, model.n_bytes);
    memcpy(bytes, &header, sizeof header);
    memcpy(bytes + header.tensor_table_offset, tensors, header.n_tensors * sizeof *tensors);
    memcpy(bytes + header.json_offset, json, header.json_bytes);
    point_into(&model, bytes);
    for (size_t i = 0; i < header.n_tensors; i++) fill_tensor(&model, &model.tensors[i], &seed);
    fill_experts(&model, &seed);
    return model;
}

/* ---- changing, sealing, writing ---- */

struct colibri_file_tensor *tiny_tensor(const struct tiny_model *model, uint32_t role, uint32_t layer) {
    for (size_t i = 0; i < model->header->n_tensors; i++)
        if (model->tensors[i].role == role && model->tensors[i].layer == layer) return &model->tensors[i];
    FAIL("no tensor of role %" PRIu32 " in layer %" PRIu32, role, layer);
    return NULL;
}

float *tiny_weight(const struct tiny_model *model, uint32_t role, uint32_t layer, size_t row, size_t col) {
    const struct colibri_file_tensor *tensor = tiny_tensor(model, role, layer);
    float *weights = (float *)(void *)(model->bytes + tensor->offset);
    if (tensor->format == COLIBRI_FMT_VECTOR) return &weights[col];
    CHECK(tensor->format == COLIBRI_FMT_F32);
    return &weights[row / TILE * tensor->cols * TILE + col * TILE + row % TILE];
}

void tiny_scale(const struct tiny_model *model, uint32_t role, uint32_t layer, float by) {
    const struct colibri_file_tensor *tensor = tiny_tensor(model, role, layer);
    float *weights = (float *)(void *)(model->bytes + tensor->offset);
    for (size_t i = 0; i < tensor->bytes / sizeof *weights; i++) weights[i] *= by;
}

void tiny_seal_header(const struct tiny_model *model) {
    struct colibri_file_header *header = model->header;
    size_t tensor_table = header->n_tensors * sizeof *model->tensors, expert_table = header->n_expert_blocks * sizeof(uint64_t);
    uint8_t *joined = malloc(sizeof *header + tensor_table + expert_table);
    CHECK(joined != NULL);
    header->header_checksum = 0;
    memcpy(joined, header, sizeof *header);
    memcpy(joined + sizeof *header, model->tensors, tensor_table);
    memcpy(joined + sizeof *header + tensor_table, model->expert_checksums, expert_table);
    header->header_checksum = colibri_checksum(joined, sizeof *header + tensor_table + expert_table);
    free(joined);
}

void tiny_seal(const struct tiny_model *model) {
    struct colibri_file_header *header = model->header;
    for (size_t i = 0; i < header->n_tensors; i++)
        model->tensors[i].checksum = colibri_checksum(model->bytes + model->tensors[i].offset, model->tensors[i].bytes);
    for (size_t i = 0; i < header->n_expert_blocks; i++)
        model->expert_checksums[i] = colibri_checksum(model->bytes + header->expert_offset + i * header->expert_stride, header->expert_bytes);
    header->json_checksum = colibri_checksum(model->bytes + header->json_offset, header->json_bytes);
    tiny_seal_header(model);
}

void tiny_write(struct tiny_model *model, size_t n_bytes) {
    if (!model->path[0]) {
        const char *folder = getenv("TMPDIR");
        snprintf(model->path, sizeof model->path, "%s/colibri-XXXXXX", folder ? folder : "/tmp");
        int fd = mkstemp(model->path);
        CHECK(fd >= 0);
        close(fd);
    }
    FILE *file = fopen(model->path, "wb");
    CHECK(file && fwrite(model->bytes, 1, n_bytes, file) == n_bytes && fclose(file) == 0);
}

void tiny_discard(struct tiny_model *model) {
    if (model->path[0]) unlink(model->path);
    free(model->bytes);
    *model = (struct tiny_model){0};
}

struct colibri_model *tiny_open(struct tiny_model *file, uint32_t format, uint32_t flags, uint64_t seed) {
    struct colibri_model *model = NULL;
    char error[512] = "";
    *file = tiny_build(format, flags, seed);
    tiny_seal(file);
    tiny_write(file, file->n_bytes);
    int code = colibri_model_open(&model, file->path, error, sizeof error);
    if (code != COLIBRI_OK) FAIL("%s", error);
    return model;
}
