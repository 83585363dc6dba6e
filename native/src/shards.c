/*
 * A model whose experts lie in files of their own (docs/format.md, "Shards").
 *
 * Shards are placed where their blocks would lie in a file of one piece, so that nothing behind the opening knows of them. They are
 * trusted as little as the main file: each must be whole, and carry the fingerprint that is in the main file's header.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

#define fail colibri_fail

/* Where the blocks begin: behind the header, at a granule of mapping. */
#define BLOCKS_OFFSET COLIBRI_FILE_EXPERT_ALIGN

struct shard {
    uint32_t number;                  /* from 1 */
    uint32_t first_expert, n_experts; /* of every layer that has experts */
    char *path;
    struct colibri_file_header header;
};

static int check_shard(const struct colibri_model *model, const struct shard *shard, uint64_t real_bytes, struct colibri_error error) {
    const struct colibri_file_header *whole = &model->header, *own = &shard->header;
    int code;
    if ((code = colibri_check_identity(own, real_bytes, error)) || (code = colibri_check_header_checksum(own, NULL, NULL, error))) return code;
    if (memcmp(own->fingerprint, whole->fingerprint, sizeof own->fingerprint) != 0)
        return fail(error, COLIBRI_E_FORMAT, "fingerprint: the shard is of another model; convert again, or bring the right one");
    uint64_t n_blocks = whole->n_expert_blocks / whole->n_experts * shard->n_experts;
    const struct {
        const char *name;
        uint64_t value, expected;
    } fields[] = {
        {"n_tensors", own->n_tensors, 0},
        {"n_expert_blocks", own->n_expert_blocks, 0},
        {"shard_index", own->shard_index, shard->number},
        {"n_shards", own->n_shards, whole->n_shards},
        {"experts_per_shard", own->experts_per_shard, whole->experts_per_shard},
        {"expert_format", own->expert_format, whole->expert_format},
        {"expert_bytes", own->expert_bytes, whole->expert_bytes},
        {"expert_stride", own->expert_stride, whole->expert_stride},
        {"expert_offset", own->expert_offset, BLOCKS_OFFSET},
        {"file_bytes", own->file_bytes, BLOCKS_OFFSET + n_blocks * whole->expert_stride},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value != fields[i].expected)
            return fail(error, COLIBRI_E_FORMAT, "%s: expected %" PRIu64 ", got %" PRIu64, fields[i].name, fields[i].expected, fields[i].value);
    return COLIBRI_OK;
}

/* Layer by layer, over the place of the blocks. Blocks are aligned to 64 KiB in both, and so to any page. */
static int place_blocks(struct colibri_model *model, const struct shard *shard, int fd, struct colibri_error error) {
    const struct colibri_file_header *header = &model->header;
    size_t run_bytes = shard->n_experts * header->expert_stride, n_layers = header->n_expert_blocks / header->n_experts;
    for (size_t layer = 0; layer < n_layers; layer++) {
        size_t block = layer * header->n_experts + shard->first_expert;
        int code = colibri_place(model, fd, header->expert_offset + block * header->expert_stride, run_bytes, BLOCKS_OFFSET + layer * run_bytes,
                                 model->weights == COLIBRI_WEIGHTS_READ, error);
        if (code) return code;
    }
    return COLIBRI_OK;
}

static int open_shard(struct colibri_model *model, struct shard *shard, int *fd, struct colibri_error error) {
    uint64_t real_bytes = 0;
    errno = 0;
    int code = colibri_open_file(shard->path, fd, &real_bytes, error);
    if (code && errno == ENOENT) return fail(error, code, "missing; the shards of a model lie beside it, under its name");
    if (code || (code = colibri_read_header(&shard->header, *fd, real_bytes, error)) || (code = check_shard(model, shard, real_bytes, error)))
        return code;
    colibri_read_directly(*fd);
    return place_blocks(model, shard, *fd, error);
}

/* NAME.FINGERPRINT-I-of-N, with the fingerprint's first four bytes. NULL without memory. */
static char *shard_path(const struct colibri_model *model, uint32_t number) {
    const uint8_t *f = model->header.fingerprint;
    size_t n_bytes = strlen(model->path) + sizeof ".00000000-4294967295-of-4294967295";
    char *path = malloc(n_bytes);
    if (path) snprintf(path, n_bytes, "%s.%02x%02x%02x%02x-%" PRIu32 "-of-%" PRIu32, model->path, f[0], f[1], f[2], f[3], number, model->header.n_shards);
    return path;
}

/* The first expert of a shard; of the one behind the last: n_experts. Shares differ by one at most. Below 2^24: no product overflows. */
static uint32_t first_expert(const struct colibri_file_header *header, uint32_t number) { return (number - 1) * header->n_experts / header->n_shards; }

int colibri_block_file(const struct colibri_model *model, size_t block, uint64_t *offset) {
    const struct colibri_file_header *header = &model->header;
    if (header->n_shards == 1) {
        *offset = header->expert_offset + block * header->expert_stride;
        return model->files[0];
    }
    uint32_t expert = (uint32_t)(block % header->n_experts), number = 1;
    while (first_expert(header, number + 1) <= expert) number++;
    uint32_t first = first_expert(header, number), n_experts = first_expert(header, number + 1) - first;
    *offset = BLOCKS_OFFSET + (block / header->n_experts * n_experts + expert - first) * header->expert_stride;
    return model->files[number];
}

int colibri_place_shards(struct colibri_model *model, struct colibri_error error) {
    const struct colibri_file_header *header = &model->header;
    for (uint32_t number = 1; number <= header->n_shards; number++) {
        uint32_t first = first_expert(header, number), end = first_expert(header, number + 1);
        struct shard shard = {.number = number, .first_expert = first, .n_experts = end - first, .path = shard_path(model, number)};
        if (!shard.path) return fail(error, COLIBRI_E_NOMEM, "no memory");
        char text[COLIBRI_ERROR_BYTES] = "";
        int code = open_shard(model, &shard, &model->files[number], (struct colibri_error){text, sizeof text});
        if (code) fail(error, code, "shard %" PRIu32 " of %" PRIu32 ": %s: %s", number, header->n_shards, shard.path, text);
        free(shard.path);
        if (code) return code;
    }
    return COLIBRI_OK;
}
