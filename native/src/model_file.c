/*
 * What a .colibri file must fulfil before it is mapped (docs/format.md, "Checks at open").
 *
 * The file is not trusted: a header may lie in any field. Dimensions are bounded first, so that no product of two of them (times
 * the four bytes of a float) can overflow 64 bits; offsets and sizes are compared by subtraction from the file's size, never by
 * addition. One table, `roles`, says which tensors an architecture has, in which shape, and where the engine keeps them.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "model.h"

#define fail colibri_fail

/* Far above any published model, and small enough that rows × cols × 4 stays below 2^63. */
#define MAX_WIDTH (1u << 20)
#define MAX_VOCABULARY (1u << 24)
#define MAX_HEADS (1u << 12)
#define MAX_EXPERTS (1u << 12)
#define MAX_POSITIONS (1u << 30)
#define MAX_TENSORS (1u << 16)
#define MAX_LAYERS 1024u /* bits in dense_layers */

#define IMPLEMENTED_FLAGS                                                                                             \
    (COLIBRI_ARCH_TIED | COLIBRI_ARCH_QK_NORM_HEAD | COLIBRI_ARCH_QKV_BIAS | COLIBRI_ARCH_NORM_TOPK |                 \
     COLIBRI_ARCH_QK_NORM_WHOLE | COLIBRI_ARCH_O_BIAS | COLIBRI_ARCH_QKV_CLIP | COLIBRI_ARCH_SHARED_EXPERT | \
     COLIBRI_ARCH_SHARED_GATED | COLIBRI_ARCH_QKV_FUSED)

static const char *const flag_names[] = {"tied",          "qk_norm_head", "qk_norm_whole",  "qkv_bias",    "o_bias",  "norm_topk",
                                         "shared_expert", "shared_gated", "router_sigmoid", "router_bias", "qkv_clip", "qkv_fused"};

bool colibri_layer_is_dense(const struct colibri_file_header *header, uint32_t layer) {
    return header->dense_layers[layer / 32] >> (layer % 32) & 1;
}

static uint32_t count_moe_layers(const struct colibri_file_header *header) {
    uint32_t n = 0;
    for (uint32_t layer = 0; layer < header->n_layers; layer++) n += !colibri_layer_is_dense(header, layer);
    return n;
}

/* ---- identity, tables, checksum ---- */

int colibri_check_identity(const struct colibri_file_header *header, uint64_t real_bytes, struct colibri_error error) {
    if (memcmp(header->magic, COLIBRI_FILE_MAGIC, sizeof header->magic) != 0)
        return fail(error, COLIBRI_E_FORMAT, "magic: not a .colibri file; `colibrictl convert` makes one of a checkpoint");
    if (real_bytes < COLIBRI_FILE_HEADER_BYTES)
        return fail(error, COLIBRI_E_FORMAT, "file_bytes: the file has %" PRIu64 ", its header alone takes %d", real_bytes, COLIBRI_FILE_HEADER_BYTES);
    if (header->version != COLIBRI_FILE_VERSION)
        return fail(error, COLIBRI_E_UNSUPPORTED, "version: the file has %" PRIu32 ", this library reads %d", header->version,
                    COLIBRI_FILE_VERSION);
    if (header->header_bytes != COLIBRI_FILE_HEADER_BYTES)
        return fail(error, COLIBRI_E_FORMAT, "header_bytes: expected %d, got %" PRIu32, COLIBRI_FILE_HEADER_BYTES, header->header_bytes);
    if (header->file_bytes != real_bytes)
        return fail(error, COLIBRI_E_FORMAT, "file_bytes: expected %" PRIu64 ", the file has %" PRIu64, header->file_bytes, real_bytes);
    return COLIBRI_OK;
}

/* Is [offset, offset + count × item_bytes) behind the header and inside the file? item_bytes is not 0. */
static bool inside(const struct colibri_file_header *header, uint64_t offset, uint64_t count, uint64_t item_bytes) {
    return offset >= COLIBRI_FILE_HEADER_BYTES && offset <= header->file_bytes && count <= (header->file_bytes - offset) / item_bytes;
}

int colibri_check_tables(const struct colibri_file_header *header, struct colibri_error error) {
    if (header->shard_index != 0)
        return fail(error, COLIBRI_E_FORMAT, "shard_index: this is shard %" PRIu32 " of %" PRIu32 "; open the model that it lies beside",
                    header->shard_index, header->n_shards);
    if (header->n_tensors == 0 || header->n_tensors > MAX_TENSORS)
        return fail(error, COLIBRI_E_FORMAT, "n_tensors: %" PRIu64 " is not in 1..%u", header->n_tensors, MAX_TENSORS);
    if (header->n_expert_blocks == 0 || header->n_expert_blocks > (uint64_t)MAX_LAYERS * MAX_EXPERTS)
        return fail(error, COLIBRI_E_FORMAT, "n_expert_blocks: %" PRIu64 " is not in 1..%u (a model without experts runs in other engines)",
                    header->n_expert_blocks, MAX_LAYERS * MAX_EXPERTS);
    if (header->tensor_table_offset % 8 || !inside(header, header->tensor_table_offset, header->n_tensors, sizeof(struct colibri_file_tensor)))
        return fail(error, COLIBRI_E_FORMAT, "tensor_table_offset: %" PRIu64 " with %" PRIu64 " tensors is not inside a file of %" PRIu64 " bytes",
                    header->tensor_table_offset, header->n_tensors, header->file_bytes);
    if (header->expert_table_offset % 8 || !inside(header, header->expert_table_offset, header->n_expert_blocks, sizeof(uint64_t)))
        return fail(error, COLIBRI_E_FORMAT, "expert_table_offset: %" PRIu64 " with %" PRIu64 " blocks is not inside a file of %" PRIu64 " bytes",
                    header->expert_table_offset, header->n_expert_blocks, header->file_bytes);
    return COLIBRI_OK;
}

int colibri_check_header_checksum(const struct colibri_file_header *header, const struct colibri_file_tensor *tensors,
                                  const uint64_t *expert_checksums, struct colibri_error error) {
    size_t tensor_bytes = tensors ? header->n_tensors * sizeof *tensors : 0;
    size_t expert_bytes = expert_checksums ? header->n_expert_blocks * sizeof *expert_checksums : 0;
    uint8_t *joined = malloc(sizeof *header + tensor_bytes + expert_bytes);
    if (!joined) return fail(error, COLIBRI_E_NOMEM, "no memory for the tensor table");
    memcpy(joined, header, sizeof *header);
    memset(joined + offsetof(struct colibri_file_header, header_checksum), 0, sizeof header->header_checksum);
    if (tensors) memcpy(joined + sizeof *header, tensors, tensor_bytes);
    if (expert_checksums) memcpy(joined + sizeof *header + tensor_bytes, expert_checksums, expert_bytes);
    uint64_t actual = colibri_checksum(joined, sizeof *header + tensor_bytes + expert_bytes);
    free(joined);
    if (actual != header->header_checksum)
        return fail(error, COLIBRI_E_FORMAT, "header_checksum: expected %016" PRIx64 ", header and tables have %016" PRIx64,
                    header->header_checksum, actual);
    return COLIBRI_OK;
}

/* ---- architecture ---- */

static int check_flags(const struct colibri_file_header *header, struct colibri_error error) {
    uint32_t missing = header->arch_flags & ~(uint32_t)IMPLEMENTED_FLAGS;
    for (uint32_t bit = 0; bit < 32; bit++) {
        if (!(missing >> bit & 1)) continue;
        if (bit < sizeof flag_names / sizeof *flag_names)
            return fail(error, COLIBRI_E_UNSUPPORTED, "arch_flags: this library does not implement %s", flag_names[bit]);
        return fail(error, COLIBRI_E_UNSUPPORTED, "arch_flags: this library does not know bit %" PRIu32, bit);
    }
    uint32_t both_norms = COLIBRI_ARCH_QK_NORM_HEAD | COLIBRI_ARCH_QK_NORM_WHOLE;
    if ((header->arch_flags & both_norms) == both_norms)
        return fail(error, COLIBRI_E_FORMAT, "arch_flags: qk_norm_head and qk_norm_whole exclude each other");
    if ((header->arch_flags & COLIBRI_ARCH_SHARED_GATED) && !(header->arch_flags & COLIBRI_ARCH_SHARED_EXPERT))
        return fail(error, COLIBRI_E_FORMAT, "arch_flags: shared_gated without shared_expert");
    return COLIBRI_OK;
}

static int check_dimensions(const struct colibri_file_header *header, struct colibri_error error) {
    bool shared = header->arch_flags & COLIBRI_ARCH_SHARED_EXPERT;
    const struct {
        const char *name;
        uint32_t value, low, high;
    } dimensions[] = {
        {"n_layers", header->n_layers, 1, MAX_LAYERS},
        {"hidden", header->hidden, 1, MAX_WIDTH},
        {"vocabulary", header->vocabulary, 1, MAX_VOCABULARY},
        {"n_heads", header->n_heads, 1, MAX_HEADS},
        {"n_kv_heads", header->n_kv_heads, 1, header->n_heads},
        {"head_dim", header->head_dim, 1, COLIBRI_MAX_HEAD_DIM},
        {"rotary_dim", header->rotary_dim, 2, header->head_dim},
        {"n_experts", header->n_experts, 1, MAX_EXPERTS},
        {"top_k", header->top_k, 1, header->n_experts < COLIBRI_MAX_TOP_K ? header->n_experts : COLIBRI_MAX_TOP_K},
        {"expert_width", header->expert_width, 1, MAX_WIDTH},
        {"shared_width", header->shared_width, shared, shared ? MAX_WIDTH : 0},
        {"dense_width", header->dense_width, 0, MAX_WIDTH},
        {"max_positions", header->max_positions, 1, MAX_POSITIONS},
        {"n_end_tokens", header->n_end_tokens, 0, COLIBRI_MAX_END_TOKENS},
        {"n_dense_layers_mask_words", header->n_dense_layers_mask_words, 0, MAX_LAYERS / 32},
    };
    for (size_t i = 0; i < sizeof dimensions / sizeof *dimensions; i++)
        if (dimensions[i].value < dimensions[i].low || dimensions[i].value > dimensions[i].high)
            return fail(error, COLIBRI_E_FORMAT, "%s: %" PRIu32 " is not in %" PRIu32 "..%" PRIu32, dimensions[i].name, dimensions[i].value,
                        dimensions[i].low, dimensions[i].high);
    if (header->n_heads % header->n_kv_heads)
        return fail(error, COLIBRI_E_FORMAT, "n_kv_heads: %" PRIu32 " does not divide n_heads = %" PRIu32, header->n_kv_heads, header->n_heads);
    if (header->n_heads / header->n_kv_heads > COLIBRI_MAX_QUERIES)
        return fail(error, COLIBRI_E_UNSUPPORTED, "n_kv_heads: more than %d heads share one", COLIBRI_MAX_QUERIES);
    if (header->rotary_dim % 2) return fail(error, COLIBRI_E_FORMAT, "rotary_dim: %" PRIu32 " is odd", header->rotary_dim);
    return COLIBRI_OK;
}

static int check_layer_mask(const struct colibri_file_header *header, struct colibri_error error) {
    for (uint32_t layer = 0; layer < MAX_LAYERS; layer++) {
        bool allowed = layer < header->n_layers && layer / 32 < header->n_dense_layers_mask_words;
        if (colibri_layer_is_dense(header, layer) && !allowed)
            return fail(error, COLIBRI_E_FORMAT, "dense_layers: bit %" PRIu32 " is set, but there are %" PRIu32 " layers in %" PRIu32 " words", layer,
                        header->n_layers, header->n_dense_layers_mask_words);
    }
    uint32_t n_moe = count_moe_layers(header);
    if (n_moe < header->n_layers && header->dense_width == 0)
        return fail(error, COLIBRI_E_FORMAT, "dense_width: 0, but %" PRIu32 " layers are dense", header->n_layers - n_moe);
    if (header->n_expert_blocks != (uint64_t)n_moe * header->n_experts)
        return fail(error, COLIBRI_E_FORMAT, "n_expert_blocks: expected %" PRIu64 " (%" PRIu32 " layers of %" PRIu32 " experts), got %" PRIu64,
                    (uint64_t)n_moe * header->n_experts, n_moe, header->n_experts, header->n_expert_blocks);
    return COLIBRI_OK;
}

static int check_numbers(const struct colibri_file_header *header, struct colibri_error error) {
    const struct {
        const char *name;
        float value;
        bool positive;
    } numbers[] = {
        {"rms_eps", header->rms_eps, true},
        {"attention_scale", header->attention_scale, true},
        {"rope_attention_factor", header->rope_attention_factor, true},
        {"router_scale", header->router_scale, true},
        {"qkv_clip", header->qkv_clip, header->arch_flags & COLIBRI_ARCH_QKV_CLIP},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!isfinite(numbers[i].value) || (numbers[i].positive && numbers[i].value <= 0))
            return fail(error, COLIBRI_E_FORMAT, "%s: %g is not a finite number above 0", numbers[i].name, (double)numbers[i].value);
    if (header->router_scale != 1)
        return fail(error, COLIBRI_E_UNSUPPORTED, "router_scale: this library does not scale routing weights (%g)", (double)header->router_scale);
    if (header->n_groups || header->top_k_groups)
        return fail(error, COLIBRI_E_UNSUPPORTED, "n_groups: this library does not implement group-limited routing");
    if (header->n_shards == 0 || header->n_shards > header->n_experts)
        return fail(error, COLIBRI_E_FORMAT, "n_shards: %" PRIu32 " is not in 1..%" PRIu32, header->n_shards, header->n_experts);
    uint32_t largest_share = (header->n_experts + header->n_shards - 1) / header->n_shards;
    if (header->experts_per_shard != largest_share)
        return fail(error, COLIBRI_E_FORMAT, "experts_per_shard: expected %" PRIu32 ", got %" PRIu32, largest_share, header->experts_per_shard);
    return COLIBRI_OK;
}

int colibri_check_architecture(const struct colibri_file_header *header, struct colibri_error error) {
    int code;
    if ((code = check_flags(header, error)) || (code = check_dimensions(header, error)) || (code = check_layer_mask(header, error)) ||
        (code = check_numbers(header, error)))
        return code;
    for (uint32_t i = 0; i < header->n_end_tokens; i++)
        if (header->end_tokens[i] < 0 || (uint32_t)header->end_tokens[i] >= header->vocabulary)
            return fail(error, COLIBRI_E_FORMAT, "end_tokens: %" PRId32 " is not in a vocabulary of %" PRIu32, header->end_tokens[i],
                        header->vocabulary);
    for (size_t i = 0; i < sizeof header->reserved; i++)
        if (header->reserved[i]) return fail(error, COLIBRI_E_FORMAT, "reserved: byte %zu is not 0", i);
    return COLIBRI_OK;
}

/* ---- ranges ---- */

struct range {
    uint64_t begin, end;
    const char *name;
};

static int by_begin(const void *a, const void *b) {
    const struct range *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Bytes that a matrix or vector of these bounded dimensions takes; 0 for an unknown format. */
static uint64_t tensor_bytes(uint32_t format, uint64_t rows, uint64_t cols) {
    return format == COLIBRI_FMT_VECTOR ? rows * cols * sizeof(float) : colibri_matrix_bytes(format, rows, cols);
}

static int check_tensor_range(const struct colibri_file_header *header, const struct colibri_file_tensor *tensor, struct colibri_error error) {
    const char *name = colibri_role_name(tensor->role);
    if (tensor->rows == 0 || tensor->rows > MAX_VOCABULARY || tensor->cols == 0 || tensor->cols > MAX_VOCABULARY)
        return fail(error, COLIBRI_E_FORMAT, "rows, cols: %s has %" PRIu64 " x %" PRIu64, name, tensor->rows, tensor->cols);
    uint64_t expected = tensor_bytes(tensor->format, tensor->rows, tensor->cols);
    if (expected == 0) return fail(error, COLIBRI_E_UNSUPPORTED, "format: this library does not read format %" PRIu32 " (%s)", tensor->format, name);
    if (tensor->bytes != expected)
        return fail(error, COLIBRI_E_FORMAT, "bytes: %s of %" PRIu64 " x %" PRIu64 " takes %" PRIu64 ", got %" PRIu64, name, tensor->rows,
                    tensor->cols, expected, tensor->bytes);
    if (tensor->offset % COLIBRI_FILE_TENSOR_ALIGN || !inside(header, tensor->offset, tensor->bytes, 1))
        return fail(error, COLIBRI_E_FORMAT, "offset: %s at %" PRIu64 " is not aligned to %d inside a file of %" PRIu64 " bytes", name,
                    tensor->offset, COLIBRI_FILE_TENSOR_ALIGN, header->file_bytes);
    return COLIBRI_OK;
}

/* Where experts lie in shards, their place is behind the file: its size says where. */
static int check_shard_range(const struct colibri_file_header *header, struct colibri_error error) {
    if (header->expert_offset % COLIBRI_FILE_EXPERT_ALIGN || header->expert_offset != header->file_bytes ||
        header->n_expert_blocks > ((uint64_t)INT64_MAX - header->expert_offset) / header->expert_stride)
        return fail(error, COLIBRI_E_FORMAT, "expert_offset: %" PRIu64 " blocks of %" PRIu64 " bytes at %" PRIu64 " are not aligned behind a file of %" PRIu64,
                    header->n_expert_blocks, header->expert_stride, header->expert_offset, header->file_bytes);
    return COLIBRI_OK;
}

uint64_t colibri_image_bytes(const struct colibri_file_header *header) {
    return header->n_shards == 1 ? header->file_bytes : header->expert_offset + header->n_expert_blocks * header->expert_stride;
}

static int check_expert_range(const struct colibri_file_header *header, struct colibri_error error) {
    uint64_t matrix = tensor_bytes(header->expert_format, header->expert_width, header->hidden);
    if (header->expert_format == COLIBRI_FMT_VECTOR || matrix == 0)
        return fail(error, COLIBRI_E_UNSUPPORTED, "expert_format: this library does not read experts of format %" PRIu32, header->expert_format);
    uint64_t expected = 2 * matrix + tensor_bytes(header->expert_format, header->hidden, header->expert_width);
    if (header->expert_bytes != expected)
        return fail(error, COLIBRI_E_FORMAT, "expert_bytes: expected %" PRIu64 ", got %" PRIu64, expected, header->expert_bytes);
    if (header->expert_stride % COLIBRI_FILE_EXPERT_ALIGN || header->expert_stride < header->expert_bytes)
        return fail(error, COLIBRI_E_FORMAT, "expert_stride: %" PRIu64 " is not a multiple of %d that holds %" PRIu64 " bytes", header->expert_stride,
                    COLIBRI_FILE_EXPERT_ALIGN, header->expert_bytes);
    if (header->n_shards > 1) return check_shard_range(header, error);
    if (header->expert_offset % COLIBRI_FILE_EXPERT_ALIGN ||
        !inside(header, header->expert_offset, header->n_expert_blocks, header->expert_stride))
        return fail(error, COLIBRI_E_FORMAT, "expert_offset: %" PRIu64 " blocks of %" PRIu64 " bytes at %" PRIu64 " are not aligned inside a file of %" PRIu64,
                    header->n_expert_blocks, header->expert_stride, header->expert_offset, header->file_bytes);
    return COLIBRI_OK;
}

static int check_overlaps(struct range *ranges, size_t n, struct colibri_error error) {
    qsort(ranges, n, sizeof *ranges, by_begin);
    for (size_t i = 1; i < n; i++)
        if (ranges[i].begin < ranges[i - 1].end)
            return fail(error, COLIBRI_E_FORMAT, "offset: %s at %" PRIu64 " overlaps %s, which ends at %" PRIu64, ranges[i].name, ranges[i].begin,
                        ranges[i - 1].name, ranges[i - 1].end);
    return COLIBRI_OK;
}

int colibri_check_ranges(const struct colibri_file_header *header, const struct colibri_file_tensor *tensors, struct colibri_error error) {
    int code;
    if (!inside(header, header->json_offset, header->json_bytes, 1))
        return fail(error, COLIBRI_E_FORMAT, "json_offset: %" PRIu64 " bytes at %" PRIu64 " are not inside a file of %" PRIu64, header->json_bytes,
                    header->json_offset, header->file_bytes);
    if ((code = check_expert_range(header, error))) return code;
    for (uint64_t i = 0; i < header->n_tensors; i++)
        if ((code = check_tensor_range(header, &tensors[i], error))) return code;

    struct range *ranges = malloc((header->n_tensors + 4) * sizeof *ranges);
    if (!ranges) return fail(error, COLIBRI_E_NOMEM, "no memory for the tensor table");
    size_t n = 0;
#define ADD(name_, offset_, bytes_) ranges[n++] = (struct range){(offset_), (offset_) + (bytes_), (name_)}
    ADD("the tensor table", header->tensor_table_offset, header->n_tensors * sizeof *tensors);
    ADD("the expert table", header->expert_table_offset, header->n_expert_blocks * sizeof(uint64_t));
    ADD("the JSON", header->json_offset, header->json_bytes);
    ADD("the experts", header->expert_offset, header->n_expert_blocks * header->expert_stride);
    for (uint64_t i = 0; i < header->n_tensors; i++) ADD(colibri_role_name(tensors[i].role), tensors[i].offset, tensors[i].bytes);
#undef ADD
    code = check_overlaps(ranges, n, error);
    free(ranges);
    return code;
}

/* ---- roles ---- */

enum dimension { ONE, HIDDEN, VOCABULARY, PAIRS, Q_WIDTH, KV_WIDTH, QKV_WIDTH, Q_NORM, K_NORM, EXPERTS, SHARED, DENSE };

static uint64_t dimension_of(const struct colibri_file_header *header, enum dimension dimension) {
    uint64_t q_width = (uint64_t)header->n_heads * header->head_dim, kv_width = (uint64_t)header->n_kv_heads * header->head_dim;
    bool whole = header->arch_flags & COLIBRI_ARCH_QK_NORM_WHOLE;
    switch (dimension) {
    case ONE: return 1;
    case HIDDEN: return header->hidden;
    case VOCABULARY: return header->vocabulary;
    case PAIRS: return header->rotary_dim / 2;
    case Q_WIDTH: return q_width;
    case KV_WIDTH: return kv_width;
    case QKV_WIDTH: return q_width + 2 * kv_width;
    case Q_NORM: return whole ? q_width : header->head_dim;
    case K_NORM: return whole ? kv_width : header->head_dim;
    case EXPERTS: return header->n_experts;
    case SHARED: return header->shared_width;
    case DENSE: return header->dense_width;
    }
    return 0;
}

/* Where a role occurs. */
enum place { TRUNK, EVERY_LAYER, MOE_LAYERS, DENSE_LAYERS };
enum kind { VECTOR, MATRIX, F32_MATRIX };

static const struct role {
    uint32_t role;
    const char *name;
    enum place place;
    enum kind kind;
    enum dimension rows, cols;
    uint32_t flags; /* it is there if any of these is set; 0: always */
    size_t member;  /* offset in struct trunk or struct layer */
} roles[] = {
#define IN_TRUNK(m) offsetof(struct trunk, m)
#define IN_LAYER(m) offsetof(struct layer, m)
#define QK_NORM (COLIBRI_ARCH_QK_NORM_HEAD | COLIBRI_ARCH_QK_NORM_WHOLE)
    {COLIBRI_T_EMBEDDING, "embedding", TRUNK, MATRIX, VOCABULARY, HIDDEN, 0, IN_TRUNK(embedding)},
    {COLIBRI_T_HEAD, "head", TRUNK, MATRIX, VOCABULARY, HIDDEN, 0, IN_TRUNK(head)}, /* unless TIED: see is_present */
    {COLIBRI_T_FINAL_NORM, "final_norm", TRUNK, VECTOR, ONE, HIDDEN, 0, IN_TRUNK(final_norm)},
    {COLIBRI_T_INV_FREQ, "inv_freq", TRUNK, VECTOR, ONE, PAIRS, 0, IN_TRUNK(inv_freq)},
    {COLIBRI_T_ATTN_NORM, "attn_norm", EVERY_LAYER, VECTOR, ONE, HIDDEN, 0, IN_LAYER(attn_norm)},
    {COLIBRI_T_Q, "q", EVERY_LAYER, MATRIX, Q_WIDTH, HIDDEN, 0, IN_LAYER(q)},
    {COLIBRI_T_K, "k", EVERY_LAYER, MATRIX, KV_WIDTH, HIDDEN, 0, IN_LAYER(k)},
    {COLIBRI_T_V, "v", EVERY_LAYER, MATRIX, KV_WIDTH, HIDDEN, 0, IN_LAYER(v)},
    {COLIBRI_T_O, "o", EVERY_LAYER, MATRIX, HIDDEN, Q_WIDTH, 0, IN_LAYER(o)},
    {COLIBRI_T_Q_NORM, "q_norm", EVERY_LAYER, VECTOR, ONE, Q_NORM, QK_NORM, IN_LAYER(q_norm)},
    {COLIBRI_T_K_NORM, "k_norm", EVERY_LAYER, VECTOR, ONE, K_NORM, QK_NORM, IN_LAYER(k_norm)},
    {COLIBRI_T_Q_BIAS, "q_bias", EVERY_LAYER, VECTOR, ONE, Q_WIDTH, COLIBRI_ARCH_QKV_BIAS, IN_LAYER(q_bias)},
    {COLIBRI_T_K_BIAS, "k_bias", EVERY_LAYER, VECTOR, ONE, KV_WIDTH, COLIBRI_ARCH_QKV_BIAS, IN_LAYER(k_bias)},
    {COLIBRI_T_V_BIAS, "v_bias", EVERY_LAYER, VECTOR, ONE, KV_WIDTH, COLIBRI_ARCH_QKV_BIAS, IN_LAYER(v_bias)},
    {COLIBRI_T_QKV, "qkv", EVERY_LAYER, MATRIX, QKV_WIDTH, HIDDEN, COLIBRI_ARCH_QKV_FUSED, IN_LAYER(qkv)},
    {COLIBRI_T_QKV_BIAS, "qkv_bias", EVERY_LAYER, VECTOR, ONE, QKV_WIDTH, COLIBRI_ARCH_QKV_BIAS, IN_LAYER(qkv_bias)},
    {COLIBRI_T_O_BIAS, "o_bias", EVERY_LAYER, VECTOR, ONE, HIDDEN, COLIBRI_ARCH_O_BIAS, IN_LAYER(o_bias)},
    {COLIBRI_T_FFN_NORM, "ffn_norm", EVERY_LAYER, VECTOR, ONE, HIDDEN, 0, IN_LAYER(ffn_norm)},
    {COLIBRI_T_ROUTER, "router", MOE_LAYERS, F32_MATRIX, EXPERTS, HIDDEN, 0, IN_LAYER(router)},
    {COLIBRI_T_SHARED_GATE, "shared_gate", MOE_LAYERS, MATRIX, SHARED, HIDDEN, COLIBRI_ARCH_SHARED_EXPERT, IN_LAYER(shared_gate)},
    {COLIBRI_T_SHARED_UP, "shared_up", MOE_LAYERS, MATRIX, SHARED, HIDDEN, COLIBRI_ARCH_SHARED_EXPERT, IN_LAYER(shared_up)},
    {COLIBRI_T_SHARED_DOWN, "shared_down", MOE_LAYERS, MATRIX, HIDDEN, SHARED, COLIBRI_ARCH_SHARED_EXPERT, IN_LAYER(shared_down)},
    {COLIBRI_T_SHARED_EXPERT_GATE, "shared_expert_gate", MOE_LAYERS, F32_MATRIX, ONE, HIDDEN, COLIBRI_ARCH_SHARED_GATED,
     IN_LAYER(shared_expert_gate)},
    {COLIBRI_T_DENSE_GATE, "dense_gate", DENSE_LAYERS, MATRIX, DENSE, HIDDEN, 0, IN_LAYER(dense_gate)},
    {COLIBRI_T_DENSE_UP, "dense_up", DENSE_LAYERS, MATRIX, DENSE, HIDDEN, 0, IN_LAYER(dense_up)},
    {COLIBRI_T_DENSE_DOWN, "dense_down", DENSE_LAYERS, MATRIX, HIDDEN, DENSE, 0, IN_LAYER(dense_down)},
};
#define N_ROLES (sizeof roles / sizeof *roles)

static const struct role *find_role(uint32_t role) {
    for (size_t i = 0; i < N_ROLES; i++)
        if (roles[i].role == role) return &roles[i];
    return NULL;
}

const char *colibri_role_name(uint32_t role) {
    const struct role *found = find_role(role);
    return found ? found->name : "unknown";
}

/* Is it one of two ways to store q, k and v, and the other one is used? */
static bool is_stored_otherwise(const struct colibri_file_header *header, uint32_t role) {
    bool fused = header->arch_flags & COLIBRI_ARCH_QKV_FUSED;
    switch (role) {
    case COLIBRI_T_Q: case COLIBRI_T_K: case COLIBRI_T_V:
    case COLIBRI_T_Q_BIAS: case COLIBRI_T_K_BIAS: case COLIBRI_T_V_BIAS: return fused;
    case COLIBRI_T_QKV: case COLIBRI_T_QKV_BIAS: return !fused;
    default: return false;
    }
}

/* Has this architecture this role in this layer (COLIBRI_FILE_NO_LAYER for the trunk)? */
static bool is_present(const struct colibri_file_header *header, const struct role *role, uint32_t layer) {
    if ((role->place == TRUNK) != (layer == COLIBRI_FILE_NO_LAYER)) return false;
    if (role->flags && !(header->arch_flags & role->flags)) return false;
    if (is_stored_otherwise(header, role->role)) return false;
    if (role->role == COLIBRI_T_HEAD) return !(header->arch_flags & COLIBRI_ARCH_TIED);
    if (role->place == MOE_LAYERS) return !colibri_layer_is_dense(header, layer);
    if (role->place == DENSE_LAYERS) return colibri_layer_is_dense(header, layer);
    return true;
}

static struct tensor *slot_of(const struct role *role, uint32_t layer, struct trunk *trunk, struct layer *layers) {
    uint8_t *owner = role->place == TRUNK ? (uint8_t *)trunk : (uint8_t *)&layers[layer];
    return (struct tensor *)(void *)(owner + role->member);
}

static int bind_one(const struct colibri_file_header *header, const struct colibri_file_tensor *tensor, struct trunk *trunk,
                    struct layer *layers, struct colibri_error error) {
    const struct role *role = find_role(tensor->role);
    if (!role) return fail(error, COLIBRI_E_UNSUPPORTED, "role: this library does not know tensor role %" PRIu32, tensor->role);
    if (tensor->layer != COLIBRI_FILE_NO_LAYER && tensor->layer >= header->n_layers)
        return fail(error, COLIBRI_E_FORMAT, "layer: %s of layer %" PRIu32 ", but there are %" PRIu32, role->name, tensor->layer, header->n_layers);
    if (!is_present(header, role, tensor->layer))
        return fail(error, COLIBRI_E_FORMAT, "role: this architecture has no %s in layer %" PRId32, role->name, (int32_t)tensor->layer);
    uint64_t rows = dimension_of(header, role->rows), cols = dimension_of(header, role->cols);
    if (tensor->rows != rows || tensor->cols != cols)
        return fail(error, COLIBRI_E_FORMAT, "rows, cols: %s of layer %" PRId32 " must be %" PRIu64 " x %" PRIu64 ", got %" PRIu64 " x %" PRIu64,
                    role->name, (int32_t)tensor->layer, rows, cols, tensor->rows, tensor->cols);
    bool is_vector = tensor->format == COLIBRI_FMT_VECTOR;
    if (is_vector != (role->kind == VECTOR) || (role->kind == F32_MATRIX && tensor->format != COLIBRI_FMT_F32))
        return fail(error, COLIBRI_E_FORMAT, "format: %s cannot be of format %" PRIu32, role->name, tensor->format);
    struct tensor *slot = slot_of(role, tensor->layer, trunk, layers);
    if (slot->rows) return fail(error, COLIBRI_E_FORMAT, "role: %s of layer %" PRId32 " is there twice", role->name, (int32_t)tensor->layer);
    *slot = (struct tensor){NULL, tensor->format, tensor->rows, tensor->cols};
    return COLIBRI_OK;
}

static int check_present(const struct colibri_file_header *header, uint32_t layer, struct trunk *trunk, struct layer *layers,
                         struct colibri_error error) {
    for (size_t i = 0; i < N_ROLES; i++)
        if (is_present(header, &roles[i], layer) && !slot_of(&roles[i], layer, trunk, layers)->rows)
            return fail(error, COLIBRI_E_FORMAT, "role: %s of layer %" PRId32 " is missing", roles[i].name, (int32_t)layer);
    return COLIBRI_OK;
}

/* Matrices that multiply the same activations share their prepared form, so they must share a format. */
static int check_shared_formats(const struct layer *layer, uint32_t number, struct colibri_error error) {
    if (layer->q.format != layer->k.format || layer->q.format != layer->v.format)
        return fail(error, COLIBRI_E_UNSUPPORTED, "format: q, k and v of layer %" PRIu32 " have different formats", number);
    if (layer->dense_gate.format != layer->dense_up.format || layer->shared_gate.format != layer->shared_up.format)
        return fail(error, COLIBRI_E_UNSUPPORTED, "format: gate and up of layer %" PRIu32 " have different formats", number);
    return COLIBRI_OK;
}

int colibri_bind_tensors(const struct colibri_file_header *header, const struct colibri_file_tensor *tensors, struct trunk *trunk,
                         struct layer *layers, struct colibri_error error) {
    int code;
    for (uint64_t i = 0; i < header->n_tensors; i++)
        if ((code = bind_one(header, &tensors[i], trunk, layers, error))) return code;
    if ((code = check_present(header, COLIBRI_FILE_NO_LAYER, trunk, layers, error))) return code;
    size_t next_block = 0;
    for (uint32_t i = 0; i < header->n_layers; i++) {
        if ((code = check_present(header, i, trunk, layers, error))) return code;
        if ((code = check_shared_formats(&layers[i], i, error))) return code;
        layers[i].dense = colibri_layer_is_dense(header, i);
        layers[i].first_block = next_block;
        if (!layers[i].dense) next_block += header->n_experts;
    }
    return COLIBRI_OK;
}

void colibri_place_tensors(struct colibri_model *model) {
    for (uint64_t i = 0; i < model->header.n_tensors; i++) {
        const struct colibri_file_tensor *tensor = &model->tensors[i];
        slot_of(find_role(tensor->role), tensor->layer, &model->trunk, model->layers)->data = model->map + tensor->offset;
    }
    if (model->header.arch_flags & COLIBRI_ARCH_TIED) model->trunk.head = model->trunk.embedding;
}
