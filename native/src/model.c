/*
 * Opening a model: the header and tables are read and checked (model_file.c), then the file is mapped read-only and private, and over it the
 * shards, if experts lie in such (shards.c). Weights are touched when they are first used.
 *
 * The mapping relies on the file staying as it is: replace a model by renaming, never in place. One that is cut while it is mapped ends
 * in COLIBRI_E_IO (lost_pages.c).
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "model.h"

/* Reads exactly n bytes at offset; 0, or errno (ENODATA at the end of the file). */
static int read_at(int fd, void *to, size_t n, uint64_t offset) {
    for (uint8_t *p = to; n > 0;) {
        ssize_t got = pread(fd, p, n, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : ENODATA;
        p += got;
        n -= (size_t)got;
        offset += (size_t)got;
    }
    return 0;
}

int colibri_open_file(const char *path, int *fd, uint64_t *bytes, struct colibri_error error) {
    struct stat status;
    *fd = open(path, O_RDONLY | O_CLOEXEC);
    if (*fd < 0 || fstat(*fd, &status) != 0) return colibri_fail(error, COLIBRI_E_IO, "%s", strerror(errno));
    if (!S_ISREG(status.st_mode)) return colibri_fail(error, COLIBRI_E_IO, "not a regular file");
    *bytes = (uint64_t)status.st_size;
    return COLIBRI_OK;
}

static int read_tables(struct colibri_model *model, int fd, struct colibri_error error) {
    const struct colibri_file_header *header = &model->header;
    size_t tensor_bytes = header->n_tensors * sizeof *model->tensors, expert_bytes = header->n_expert_blocks * sizeof(uint64_t);
    model->tensors = malloc(tensor_bytes);
    model->expert_checksums = malloc(expert_bytes);
    if (!model->tensors || !model->expert_checksums) return colibri_fail(error, COLIBRI_E_NOMEM, "no memory for the tables");
    int failed = read_at(fd, model->tensors, tensor_bytes, header->tensor_table_offset);
    if (!failed) failed = read_at(fd, model->expert_checksums, expert_bytes, header->expert_table_offset);
    return failed ? colibri_fail(error, COLIBRI_E_IO, "reading the tables: %s", strerror(failed)) : COLIBRI_OK;
}

int colibri_read_header(struct colibri_file_header *header, int fd, uint64_t file_bytes, struct colibri_error error) {
    memset(header, 0, sizeof *header);
    int failed = read_at(fd, header, file_bytes < sizeof *header ? (size_t)file_bytes : sizeof *header, 0);
    return failed ? colibri_fail(error, COLIBRI_E_IO, "reading the header: %s", strerror(failed)) : COLIBRI_OK;
}

/* All of docs/format.md "Checks at open", before anything is mapped. */
static int check_file(struct colibri_model *model, int fd, uint64_t file_bytes, struct colibri_error error) {
    const struct colibri_file_header *header = &model->header;
    int code;
    if ((code = colibri_read_header(&model->header, fd, file_bytes, error)) || (code = colibri_check_identity(header, file_bytes, error)) ||
        (code = colibri_check_tables(header, error)) || (code = read_tables(model, fd, error)) ||
        (code = colibri_check_header_checksum(header, model->tensors, model->expert_checksums, error)) ||
        (code = colibri_check_architecture(header, error)) || (code = colibri_check_ranges(header, model->tensors, error)))
        return code;
    model->layers = calloc(header->n_layers, sizeof *model->layers);
    if (!model->layers) return colibri_fail(error, COLIBRI_E_NOMEM, "no memory for %" PRIu32 " layers", header->n_layers);
    return colibri_bind_tensors(header, model->tensors, &model->trunk, model->layers, error);
}

/* The file, and behind it the place that the shards' blocks take. */
static int map_file(struct colibri_model *model, int fd, struct colibri_error error) {
    const struct colibri_file_header *header = &model->header;
    size_t map_bytes = colibri_image_bytes(header);
    bool sharded = header->n_shards > 1;
    void *map = sharded ? mmap(NULL, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                        : mmap(NULL, map_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) return colibri_fail(error, COLIBRI_E_NOMEM, "mapping %zu bytes: %s", map_bytes, strerror(errno));
    model->map = map;
    model->map_bytes = map_bytes;
    if (sharded && mmap(map, header->file_bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == MAP_FAILED)
        return colibri_fail(error, COLIBRI_E_NOMEM, "mapping %" PRIu64 " bytes: %s", header->file_bytes, strerror(errno));
    int code = sharded ? colibri_map_shards(model, error) : COLIBRI_OK;
    if (code == COLIBRI_OK) colibri_watch_pages(model);
    return code;
}

static int open_model(struct colibri_model *model, const char *path, int *fd, struct colibri_error error) {
    uint64_t file_bytes = 0;
    int code;
    model->path = strdup(path);
    if (!model->path) return colibri_fail(error, COLIBRI_E_NOMEM, "no memory");
    if ((code = colibri_open_file(path, fd, &file_bytes, error)) || (code = check_file(model, *fd, file_bytes, error)) ||
        (code = map_file(model, *fd, error)))
        return code;
    colibri_place_tensors(model);
    return COLIBRI_OK;
}

int colibri_model_open(colibri_model_t **out, const char *path, char *err, size_t err_bytes) {
    char text[COLIBRI_ERROR_BYTES] = "";
    struct colibri_error error = {text, sizeof text}, caller = {err, err_bytes};
    if (!out || !path) return colibri_fail(caller, COLIBRI_E_INVALID, "out and path must not be NULL");
    *out = NULL;
    struct colibri_model *model = calloc(1, sizeof *model);
    if (!model) return colibri_fail(caller, COLIBRI_E_NOMEM, "%s: no memory", path);
    int fd = -1;
    int code = open_model(model, path, &fd, error);
    if (fd >= 0) close(fd);
    if (code) {
        colibri_model_close(model);
        return colibri_fail(caller, code, "%s: %s", path, text);
    }
    *out = model;
    return COLIBRI_OK;
}

void colibri_model_close(colibri_model_t *model) {
    if (!model) return;
    colibri_unwatch_pages(model);
    if (model->map) munmap((void *)(uintptr_t)model->map, model->map_bytes);
    free(model->layers);
    free(model->expert_checksums);
    free(model->tensors);
    free(model->path);
    free(model);
}

int colibri_model_get_info(const colibri_model_t *model, colibri_model_info_t *info) {
    if (!model || !info || info->struct_bytes != sizeof *info) return COLIBRI_E_INVALID;
    const struct colibri_file_header *header = &model->header;
    *info = (colibri_model_info_t){
        .struct_bytes = sizeof *info,
        .file_bytes = header->file_bytes,
        .expert_bytes_total = header->n_expert_blocks * header->expert_stride,
        .json_offset = header->json_offset,
        .json_bytes = header->json_bytes,
        .format_version = header->version,
        .n_layers = header->n_layers,
        .hidden = header->hidden,
        .vocabulary = header->vocabulary,
        .n_heads = header->n_heads,
        .n_kv_heads = header->n_kv_heads,
        .head_dim = header->head_dim,
        .n_experts = header->n_experts,
        .top_k = header->top_k,
        .expert_width = header->expert_width,
        .shared_width = header->shared_width,
        .max_positions = header->max_positions,
        .n_end_tokens = header->n_end_tokens,
        .n_shards = header->n_shards,
    };
    memcpy(info->fingerprint, header->fingerprint, sizeof info->fingerprint);
    memcpy(info->end_tokens, header->end_tokens, sizeof info->end_tokens);
    return COLIBRI_OK;
}

const char *colibri_model_json(const colibri_model_t *model) { return (const char *)model->map + model->header.json_offset; }

int colibri_model_verify(const colibri_model_t *model, char *err, size_t err_bytes) {
    struct colibri_error error = {err, err_bytes};
    const struct colibri_file_header *header = &model->header;
    for (uint64_t i = 0; i < header->n_tensors; i++) {
        const struct colibri_file_tensor *tensor = &model->tensors[i];
        if (colibri_checksum(model->map + tensor->offset, tensor->bytes) != tensor->checksum)
            return colibri_fail(error, COLIBRI_E_CHECKSUM, "%s: checksum: %s of layer %" PRId32 " is damaged", model->path,
                                colibri_role_name(tensor->role), (int32_t)tensor->layer);
    }
    for (uint64_t block = 0; block < header->n_expert_blocks; block++)
        if (colibri_checksum(model->map + header->expert_offset + block * header->expert_stride, header->expert_bytes) !=
            model->expert_checksums[block])
            return colibri_fail(error, COLIBRI_E_CHECKSUM, "%s: checksum: expert block %" PRIu64 " is damaged", model->path, block);
    if (colibri_checksum(model->map + header->json_offset, header->json_bytes) != header->json_checksum)
        return colibri_fail(error, COLIBRI_E_CHECKSUM, "%s: json_checksum: the JSON is damaged", model->path);
    return colibri_check_pages(model, error);
}

const void *colibri_expert_matrix(const struct colibri_model *model, size_t block, enum expert_part part) {
    const struct colibri_file_header *header = &model->header;
    size_t gate_bytes = colibri_matrix_bytes(header->expert_format, header->expert_width, header->hidden);
    return model->map + header->expert_offset + block * header->expert_stride + (size_t)part * gate_bytes;
}

void colibri_expert_prefetch(const struct colibri_model *model, size_t block) {
    const uint8_t *begin = colibri_expert_matrix(model, block, EXPERT_GATE);
    /* Blocks lie at multiples of 64 KiB in the file, and so of the page size in the mapping. */
    (void)madvise((void *)(uintptr_t)begin, model->header.expert_bytes, MADV_WILLNEED);
}
