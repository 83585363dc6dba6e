/*
 * The .colibri file as it lies on disk: docs/format.md in C. Little-endian; every field is naturally aligned; convert/format.py
 * describes the same bytes for Python, and a test compares the two.
 *
 *   0        struct colibri_file_header (4096 bytes)
 *   ...      tensor table: n_tensors × struct colibri_file_tensor
 *   ...      expert table: n_expert_blocks × uint64_t checksum, in the order of the blocks
 *   ...      JSON blob
 *   ...      tensors, each at a multiple of 64
 *   ...      expert blocks, the first at a multiple of 65536, at a constant stride that is a multiple of 65536; moe layer by layer,
 *            expert by expert
 *
 * With n_shards = N > 1 the file ends where the expert blocks would begin. They lie in N files beside it (shards.c):
 *
 *   0        struct colibri_file_header of which all is zero but the fields up to expert_format; no tables
 *   65536    the blocks of its experts, layer by layer
 */
#ifndef COLIBRI_FILE_FORMAT_H
#define COLIBRI_FILE_FORMAT_H

#include <stdint.h>

#define COLIBRI_FILE_MAGIC "COLIBRI\x1a" /* 8 bytes, no terminator */
#define COLIBRI_FILE_VERSION 1
#define COLIBRI_FILE_HEADER_BYTES 4096
#define COLIBRI_FILE_TENSOR_ALIGN 64
#define COLIBRI_FILE_EXPERT_ALIGN 65536 /* a mapping granule everywhere: 4, 16 and 64 KiB pages, Windows views */
#define COLIBRI_FILE_NO_LAYER 0xffffffffu

/* Formats of a tensor. VECTOR is plain f32, row-major; the others are matrices in tiles of 16 rows (docs/numerics.md). */
enum {
    COLIBRI_FMT_VECTOR = 0,
    COLIBRI_FMT_F32 = 1,
    COLIBRI_FMT_BF16 = 2,
    COLIBRI_FMT_F16 = 3,
    COLIBRI_FMT_Q8 = 4,
    COLIBRI_FMT_Q4 = 5
};

/* What a tensor is. Shapes are [rows, cols] = [outputs, inputs]. */
enum {
    COLIBRI_T_EMBEDDING = 1,  /* [vocabulary, hidden]; also the head where flag TIED is set */
    COLIBRI_T_HEAD = 2,       /* [vocabulary, hidden] */
    COLIBRI_T_FINAL_NORM = 3, /* [1, hidden] VECTOR */
    COLIBRI_T_INV_FREQ = 4,   /* [1, rotary_dim / 2] VECTOR */

    COLIBRI_T_ATTN_NORM = 16, /* [1, hidden] VECTOR */
    COLIBRI_T_Q = 17,         /* [n_heads * head_dim, hidden] */
    COLIBRI_T_K = 18,         /* [n_kv_heads * head_dim, hidden] */
    COLIBRI_T_V = 19,
    COLIBRI_T_O = 20,         /* [hidden, n_heads * head_dim] */
    COLIBRI_T_Q_NORM = 21,    /* [1, head_dim] (or [1, n_heads * head_dim] with flag QK_NORM_WHOLE) VECTOR */
    COLIBRI_T_K_NORM = 22,
    COLIBRI_T_Q_BIAS = 23,    /* [1, n] VECTOR */
    COLIBRI_T_K_BIAS = 24,
    COLIBRI_T_V_BIAS = 25,
    COLIBRI_T_O_BIAS = 26,
    COLIBRI_T_QKV = 27,       /* with flag QKV_FUSED, instead of q, k and v: their rows one after the other */
    COLIBRI_T_QKV_BIAS = 28,  /* likewise, [1, n] VECTOR */

    COLIBRI_T_FFN_NORM = 32,  /* [1, hidden] VECTOR */
    COLIBRI_T_ROUTER = 33,    /* [n_experts, hidden], always F32 tiles */
    COLIBRI_T_ROUTER_BIAS = 34, /* [1, n_experts] VECTOR: correction bias for the choice */
    COLIBRI_T_SHARED_GATE = 35, /* shared expert: [shared_width, hidden] */
    COLIBRI_T_SHARED_UP = 36,
    COLIBRI_T_SHARED_DOWN = 37, /* [hidden, shared_width] */
    COLIBRI_T_SHARED_EXPERT_GATE = 38, /* [1, hidden], always F32 tiles, with flag SHARED_GATED */
    COLIBRI_T_DENSE_GATE = 40,  /* layers without experts: [dense_width, hidden] */
    COLIBRI_T_DENSE_UP = 41,
    COLIBRI_T_DENSE_DOWN = 42
};

/* Architecture flags. Version 1 readers refuse a flag they do not implement. */
enum {
    COLIBRI_ARCH_TIED = 1u << 0,
    COLIBRI_ARCH_QK_NORM_HEAD = 1u << 1,
    COLIBRI_ARCH_QK_NORM_WHOLE = 1u << 2,
    COLIBRI_ARCH_QKV_BIAS = 1u << 3,
    COLIBRI_ARCH_O_BIAS = 1u << 4,
    COLIBRI_ARCH_NORM_TOPK = 1u << 5,
    COLIBRI_ARCH_SHARED_EXPERT = 1u << 6,
    COLIBRI_ARCH_SHARED_GATED = 1u << 7,
    COLIBRI_ARCH_ROUTER_SIGMOID = 1u << 8,
    COLIBRI_ARCH_ROUTER_BIAS = 1u << 9,
    COLIBRI_ARCH_QKV_CLIP = 1u << 10,
    COLIBRI_ARCH_QKV_FUSED = 1u << 11
};

struct colibri_file_tensor {
    uint32_t role;
    uint32_t layer; /* COLIBRI_FILE_NO_LAYER for the model's own */
    uint32_t format;
    uint32_t reserved0;
    uint64_t rows, cols;
    uint64_t offset, bytes;
    uint64_t checksum; /* colibri_checksum of the bytes */
    uint64_t reserved1;
};
_Static_assert(sizeof(struct colibri_file_tensor) == 64, "tensor entry is 64 bytes");

struct colibri_file_header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;    /* 4096 */
    uint64_t file_bytes;      /* exact */
    uint64_t header_checksum; /* of this header with this field zero, followed by the tensor table and the expert table */
    uint8_t fingerprint[32];  /* SHA-256 of the header from expert_format to its end, the tensor table with offsets zero, the expert table */

    uint64_t tensor_table_offset;
    uint64_t n_tensors;
    uint64_t expert_table_offset;
    uint64_t n_expert_blocks; /* moe layers × n_experts */
    uint64_t json_offset, json_bytes, json_checksum;
    uint64_t expert_offset, expert_stride, expert_bytes; /* expert_bytes: what a block uses of its stride */
    uint32_t n_shards, shard_index;                      /* 1: no shards; 0: the file itself, 1..n_shards: a shard */
    uint32_t experts_per_shard;                          /* n_experts / n_shards, rounded up: the largest share */
    uint32_t expert_format;                              /* of gate, up, down, which lie in this order in a block, each a whole matrix */

    uint32_t arch_flags;
    uint32_t n_layers;
    uint32_t n_dense_layers_mask_words; /* words used in dense_layers */
    uint32_t hidden, vocabulary;
    uint32_t n_heads, n_kv_heads, head_dim, rotary_dim;
    uint32_t n_experts, top_k, expert_width, shared_width, dense_width;
    uint32_t max_positions;
    float rms_eps;
    float attention_scale;
    float rope_attention_factor;
    float router_scale; /* multiplies the routing weights; 1 where the family has none */
    float qkv_clip;     /* with flag QKV_CLIP: q, k, v are clamped to ± this */
    uint32_t n_groups, top_k_groups; /* group-limited routing; 0 where the family has none */
    uint32_t n_end_tokens;
    int32_t end_tokens[16];
    uint32_t dense_layers[32]; /* bit l of word l / 32: layer l has no experts */
    uint8_t reserved[3652];    /* zero */
};
_Static_assert(sizeof(struct colibri_file_header) == COLIBRI_FILE_HEADER_BYTES, "header is 4096 bytes");

#endif
