/*
 * An opened model: the header as read, and where each tensor lies in the mapping.
 *
 * All of it is fixed once colibri_model_open() has returned, so any number of contexts and threads may read it.
 */
#ifndef COLIBRI_MODEL_H
#define COLIBRI_MODEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri.h"
#include "error.h"
#include "file_format.h"

/* Experts of one token and layer; far above any published model. */
#define COLIBRI_MAX_TOP_K 64u
/* Direct reads are multiples of it, in memory and on disk. */
#define COLIBRI_DIRECT_BYTES ((size_t)4096)

/* A tensor in the mapping; data is NULL where the architecture has none. VECTORs are [1][cols] f32. */
struct tensor {
    const void *data;
    uint32_t format;
    size_t rows, cols;
};

/* Tensors of one layer; the shapes stand in file_format.h. */
struct layer {
    struct tensor attn_norm, q, k, v, o, q_norm, k_norm, q_bias, k_bias, v_bias, o_bias;
    struct tensor qkv, qkv_bias; /* instead of q, k, v and their biases where these are fused */
    struct tensor ffn_norm, router;
    struct tensor shared_gate, shared_up, shared_down, shared_expert_gate;
    struct tensor dense_gate, dense_up, dense_down;
    bool dense;        /* has no experts */
    size_t first_block; /* where not dense: number of the block of its expert 0 */
};

/* The model's own tensors. */
struct trunk {
    struct tensor embedding, head, final_norm, inv_freq;
};

struct colibri_model {
    struct colibri_file_header header;
    struct colibri_file_tensor *tensors; /* [header.n_tensors] */
    uint64_t *expert_checksums;          /* [header.n_expert_blocks] */
    struct trunk trunk;
    struct layer *layers; /* [header.n_layers] */
    const uint8_t *map;   /* [map_bytes], read-only: the file, and behind it the experts of its shards */
    size_t map_bytes;
    uint32_t weights;     /* COLIBRI_WEIGHTS_* */
    int *files;           /* [n_files] open: the file, then its shards in order; read without the page cache where the system can */
    size_t n_files;
    char *path;
    atomic_bool lost; /* a page of the file could not be read */
};

/* Where the model has an expert: block number (layer's first_block + expert) → its bytes. */
const uint8_t *colibri_expert_block(const struct colibri_model *model, size_t block);
/* Asks the system to read mapped weights ahead, exactly these and not what lies around them; advice, without an error. Of a block nothing is asked
 * if it seems to be in memory, unless `surely`. layer: n_layers means the head. */
void colibri_ask_for_block(const struct colibri_model *model, size_t block, bool surely);
void colibri_ask_for_trunk(const struct colibri_model *model, uint32_t layer);
/* Reads a block's expert_bytes into `to`, which is aligned to COLIBRI_DIRECT_BYTES and has room up to their next multiple. Stops with ECANCELED between two pieces once
 * *give_up is set. Returns 0 or errno; *n_read grows by what came from the file. Any thread. */
int colibri_read_block(const struct colibri_model *model, size_t block, void *to, const atomic_bool *give_up, _Atomic uint64_t *n_read);

/* model.c, for shards.c: a file and its size; its header, zeros behind the end of a shorter one. */
int colibri_open_file(const char *path, int *fd, uint64_t *bytes, struct colibri_error error);
int colibri_read_header(struct colibri_file_header *header, int fd, uint64_t file_bytes, struct colibri_error error);

/* Puts bytes of an open file to their place in model->map, mapped or read. All of it is aligned to pages, but for the end of a file. */
int colibri_place(struct colibri_model *model, int fd, uint64_t at, uint64_t n_bytes, uint64_t file_offset, bool read, struct colibri_error error);

/* Asks for huge pages where the system has them; advice, without an error. */
void colibri_ask_for_huge_pages(void *begin, size_t n_bytes);

/* Reads of this file go past the page cache from here on, where its file system can; they must be aligned. */
void colibri_read_directly(int fd);

/* shards.c: opens and checks every shard, and puts its blocks to their place in model->map. */
int colibri_place_shards(struct colibri_model *model, struct colibri_error error);
/* In which of model->files a block lies, and where. */
int colibri_block_file(const struct colibri_model *model, size_t block, uint64_t *offset);

/* lost_pages.c. From colibri_watch_pages on, a page of the mapping that cannot be read counts as zeros, and colibri_check_pages fails. */
void colibri_watch_pages(struct colibri_model *model);
void colibri_unwatch_pages(struct colibri_model *model);
int colibri_check_pages(const struct colibri_model *model, struct colibri_error error);

/* model_file.c: the checks of docs/format.md. Each returns COLIBRI_OK or a code with a sentence that starts with the field's name. */

/* Magic, version, and file_bytes against the real size. */
int colibri_check_identity(const struct colibri_file_header *header, uint64_t real_bytes, struct colibri_error error);
/* That the tables lie inside the file, so that they can be read. */
int colibri_check_tables(const struct colibri_file_header *header, struct colibri_error error);
/* The checksum over header and tables. */
int colibri_check_header_checksum(const struct colibri_file_header *header, const struct colibri_file_tensor *tensors,
                                  const uint64_t *expert_checksums, struct colibri_error error);
/* Bytes of the mapping: of the file in one piece, whether it is in one or not. The ranges are checked. */
uint64_t colibri_image_bytes(const struct colibri_file_header *header);
/* Architecture: ranges, flags, features that this build lacks. */
int colibri_check_architecture(const struct colibri_file_header *header, struct colibri_error error);
/* Every range: inside, aligned, sized as shape and format demand, not overlapping. */
int colibri_check_ranges(const struct colibri_file_header *header, const struct colibri_file_tensor *tensors, struct colibri_error error);
/* Shapes and roles: each present where it must be, nowhere twice. Fills layers (zeroed, [n_layers]) and trunk but for the
 * addresses. */
int colibri_bind_tensors(const struct colibri_file_header *header, const struct colibri_file_tensor *tensors, struct trunk *trunk,
                         struct layer *layers, struct colibri_error error);
/* Once the file is mapped: the addresses. */
void colibri_place_tensors(struct colibri_model *model);
/* Name of a role, such as "attention.q"; "unknown" for others. */
const char *colibri_role_name(uint32_t role);
bool colibri_layer_is_dense(const struct colibri_file_header *header, uint32_t layer);

#endif
