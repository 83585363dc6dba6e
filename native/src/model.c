/*
 * Opening a model: the header and tables are read and checked (model_file.c), then the file is mapped read-only and private, and beside it the
 * shards, if experts lie in such (shards.c). Weights are touched when they are first used, after they were asked for whole: the system's own
 * reading around a page that is missing would wait for each piece, and bring what nobody routed to. On demand all or a part of it is read instead.
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

/* What is asked for ahead in one call: the system shortens a call to what the disk takes at once, of which this is the smallest usual. */
#define ASK_BYTES ((size_t)128 << 10)
/* What is read in one call: enough for the disk's full speed, little enough to stop soon. */
#define READ_BYTES ((size_t)2 << 20)

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
    (void)posix_fadvise(*fd, 0, 0, POSIX_FADV_RANDOM); /* of the tables only what they take */
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

/* ---- weights ---- */

static bool is_direct(int fd) { return fcntl(fd, F_GETFL) & O_DIRECT; }

void colibri_read_directly(int fd) { (void)fcntl(fd, F_SETFL, O_DIRECT); }

/* For file systems that refuse direct reads only when they are asked for one. */
static bool stop_direct(int fd) { return is_direct(fd) && fcntl(fd, F_SETFL, 0) == 0; }

/* Reads n bytes to an aligned place with room up to the next multiple of COLIBRI_DIRECT_BYTES. The page cache does not keep them beside that. */
static int read_weights(int fd, uint8_t *to, size_t n, uint64_t offset, const atomic_bool *give_up, _Atomic uint64_t *n_read) {
    for (size_t done = 0; done < n;) {
        if (give_up && atomic_load_explicit(give_up, memory_order_relaxed)) return ECANCELED;
        size_t piece = n - done < READ_BYTES ? (n - done + COLIBRI_DIRECT_BYTES - 1) / COLIBRI_DIRECT_BYTES * COLIBRI_DIRECT_BYTES : READ_BYTES;
        ssize_t got = pread(fd, to + done, piece, (off_t)(offset + done));
        if (got < 0 && (errno == EINTR || (errno == EINVAL && stop_direct(fd)))) continue;
        if (got <= 0) return got < 0 ? errno : ENODATA;
        done += (size_t)got;
        if (n_read) atomic_fetch_add_explicit(n_read, (uint64_t)got, memory_order_relaxed);
    }
    if (!is_direct(fd)) (void)posix_fadvise(fd, (off_t)offset, (off_t)n, POSIX_FADV_DONTNEED);
    return 0;
}

void colibri_ask_for_huge_pages(void *begin, size_t n_bytes) {
#ifdef MADV_HUGEPAGE
    (void)madvise(begin, n_bytes, MADV_HUGEPAGE);
#else
    (void)begin, (void)n_bytes;
#endif
}

int colibri_place(struct colibri_model *model, int fd, uint64_t at, uint64_t n_bytes, uint64_t file_offset, bool read, struct colibri_error error) {
    void *to = (void *)(uintptr_t)(model->map + at);
    if (n_bytes == 0) return COLIBRI_OK;
    void *placed = read ? mmap(to, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0)
                        : mmap(to, n_bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, (off_t)file_offset);
    if (placed == MAP_FAILED) return colibri_fail(error, COLIBRI_E_NOMEM, "mapping %" PRIu64 " bytes: %s", n_bytes, strerror(errno));
    if (!read) return COLIBRI_OK;
    colibri_ask_for_huge_pages(to, n_bytes);
    int failed = read_weights(fd, to, n_bytes, file_offset, NULL, NULL);
    return failed ? colibri_fail(error, COLIBRI_E_IO, "reading %" PRIu64 " bytes at %" PRIu64 ": %s", n_bytes, file_offset, strerror(failed)) : COLIBRI_OK;
}

/* The file as if it were in one piece: trunk, experts, and whatever is behind them. */
static int place_file(struct colibri_model *model, struct colibri_error error) {
    const struct colibri_file_header *header = &model->header;
    size_t map_bytes = colibri_image_bytes(header);
    void *map = mmap(NULL, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return colibri_fail(error, COLIBRI_E_NOMEM, "mapping %zu bytes: %s", map_bytes, strerror(errno));
    model->map = map;
    model->map_bytes = map_bytes;
    uint64_t begin = header->expert_offset, end = begin + header->n_expert_blocks * header->expert_stride;
    bool read_trunk = model->weights != COLIBRI_WEIGHTS_MAP, read_experts = model->weights == COLIBRI_WEIGHTS_READ;
    int fd = model->files[0], code;
    colibri_read_directly(fd);
    if ((code = colibri_place(model, fd, 0, begin, 0, read_trunk, error))) return code;
    if (header->n_shards > 1) code = colibri_place_shards(model, error);
    else if (!(code = colibri_place(model, fd, begin, end - begin, begin, read_experts, error)))
        code = colibri_place(model, fd, end, map_bytes - end, end, read_trunk, error);
    if (code == COLIBRI_OK) colibri_watch_pages(model);
    return code;
}

/* Of the embedding a step needs a row for each token, so what lies around one is not read with it. */
static void advise_embedding(const struct colibri_model *model) {
    const struct tensor *embedding = &model->trunk.embedding;
    if (model->weights != COLIBRI_WEIGHTS_MAP || model->header.arch_flags & COLIBRI_ARCH_TIED) return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)embedding->data, end = begin + colibri_matrix_bytes(embedding->format, embedding->rows, embedding->cols);
    begin -= begin % page;
    (void)madvise((void *)begin, end - begin, MADV_RANDOM);
}

static int make_room_for_files(struct colibri_model *model, size_t n_files, struct colibri_error error) {
    int *files = realloc(model->files, n_files * sizeof *files);
    if (!files) return colibri_fail(error, COLIBRI_E_NOMEM, "no memory");
    for (model->files = files; model->n_files < n_files; model->n_files++) files[model->n_files] = -1;
    return COLIBRI_OK;
}

static int open_model(struct colibri_model *model, const char *path, struct colibri_error error) {
    uint64_t file_bytes = 0;
    int code;
    model->path = strdup(path);
    if (!model->path) return colibri_fail(error, COLIBRI_E_NOMEM, "no memory");
    if ((code = make_room_for_files(model, 1, error)) || (code = colibri_open_file(path, &model->files[0], &file_bytes, error)) ||
        (code = check_file(model, model->files[0], file_bytes, error)))
        return code;
    if (model->header.n_shards > 1 && (code = make_room_for_files(model, 1 + (size_t)model->header.n_shards, error))) return code;
    if ((code = place_file(model, error))) return code;
    colibri_place_tensors(model);
    advise_embedding(model);
    return COLIBRI_OK;
}

int colibri_model_open(colibri_model_t **out, const char *path, char *err, size_t err_bytes) {
    return colibri_model_open_with(out, path, NULL, err, err_bytes);
}

int colibri_model_open_with(colibri_model_t **out, const char *path, const colibri_model_options_t *options, char *err, size_t err_bytes) {
    char text[COLIBRI_ERROR_BYTES] = "";
    struct colibri_error error = {text, sizeof text}, caller = {err, err_bytes};
    if (!out || !path) return colibri_fail(caller, COLIBRI_E_INVALID, "out and path must not be NULL");
    *out = NULL;
    if (options && options->struct_bytes != sizeof *options)
        return colibri_fail(caller, COLIBRI_E_INVALID, "struct_bytes: expected %zu, got %zu", sizeof *options, options->struct_bytes);
    if (options && options->weights > COLIBRI_WEIGHTS_READ_TRUNK)
        return colibri_fail(caller, COLIBRI_E_INVALID, "weights: %" PRIu32 " is none of COLIBRI_WEIGHTS_*", options->weights);
    struct colibri_model *model = calloc(1, sizeof *model);
    if (!model) return colibri_fail(caller, COLIBRI_E_NOMEM, "%s: no memory", path);
    if (options) model->weights = options->weights;
    int code = open_model(model, path, error);
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
    for (size_t i = 0; i < model->n_files; i++)
        if (model->files[i] >= 0) close(model->files[i]);
    free(model->files);
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

const uint8_t *colibri_expert_block(const struct colibri_model *model, size_t block) {
    return model->map + model->header.expert_offset + block * model->header.expert_stride;
}

int colibri_read_block(const struct colibri_model *model, size_t block, void *to, const atomic_bool *give_up, _Atomic uint64_t *n_read) {
    uint64_t offset = 0;
    int fd = colibri_block_file(model, block, &offset);
    return read_weights(fd, to, model->header.expert_bytes, offset, give_up, n_read);
}

static void ask_for(const uint8_t *begin, size_t n_bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), before = (uintptr_t)begin % page;
    const uint8_t *end = begin + n_bytes;
    for (begin -= before; begin < end; begin += ASK_BYTES)
        (void)madvise((void *)(uintptr_t)begin, end - begin < (ptrdiff_t)ASK_BYTES ? (size_t)(end - begin) : ASK_BYTES, MADV_WILLNEED);
}

/* The first page speaks for a block that has been in memory, as its pages are used, and given up, together. */
static bool is_in_memory(const uint8_t *begin) {
    unsigned char resident = 0;
    return mincore((void *)(uintptr_t)begin, 1, &resident) == 0 && resident & 1;
}

void colibri_ask_for_block(const struct colibri_model *model, size_t block, bool surely) {
    const uint8_t *begin = colibri_expert_block(model, block); /* aligned to any page */
    if (model->weights != COLIBRI_WEIGHTS_READ && (surely || !is_in_memory(begin))) ask_for(begin, model->header.expert_bytes);
}

void colibri_ask_for_trunk(const struct colibri_model *model, uint32_t layer) {
    const struct colibri_file_header *header = &model->header;
    bool tied = header->arch_flags & COLIBRI_ARCH_TIED;
    if (model->weights != COLIBRI_WEIGHTS_MAP) return;
    for (uint64_t i = 0; i < header->n_tensors; i++) {
        const struct colibri_file_tensor *tensor = &model->tensors[i];
        if (tensor->role == COLIBRI_T_EMBEDDING && !tied) continue; /* a row of it */
        /* The model's own: the head, which comes last, and vectors, of which one is needed at once. */
        uint32_t when = tensor->layer != COLIBRI_FILE_NO_LAYER ? tensor->layer : tensor->format == COLIBRI_FMT_VECTOR ? 0 : header->n_layers;
        if (when == layer) ask_for(model->map + tensor->offset, tensor->bytes);
    }
}
