/* Opening a static table. It is trusted as little as a model file: every bit is looked at before any is used. */
#include "static_table.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "colibri.h"
#include "kernels/kernels.h"

#define fail colibri_fail

/* Of the bits of one entry. */
static size_t n_words(uint32_t n_experts) { return (n_experts + 63) / 64; }

/* Behind the frequencies, aligned to a line of the cache. */
static uint64_t chosen_offset(const struct table_header *header) {
    return sizeof *header + ((uint64_t)header->n_layers * header->n_experts * sizeof(float) + 63) / 64 * 64;
}

static int check_header(const struct table_header *header, const struct colibri_model *model, uint64_t real_bytes, struct colibri_error error) {
    const struct colibri_file_header *own = &model->header;
    if (real_bytes < sizeof *header || memcmp(header->magic, COLIBRI_TABLE_MAGIC, sizeof header->magic) != 0)
        return fail(error, COLIBRI_E_FORMAT, "magic: not a static table; `colibrictl calibrate` makes one");
    if (header->version != COLIBRI_TABLE_VERSION || header->header_bytes != sizeof *header)
        return fail(error, COLIBRI_E_UNSUPPORTED, "version: the table has %" PRIu32 ", this library reads %d", header->version, COLIBRI_TABLE_VERSION);
    if (memcmp(header->fingerprint, own->fingerprint, sizeof own->fingerprint) != 0)
        return fail(error, COLIBRI_E_INVALID, "fingerprint: the table is of another model; calibrate this one");
    uint32_t n_layers = (uint32_t)(own->n_expert_blocks / own->n_experts);
    const struct {
        const char *name;
        uint64_t value, expected;
    } fields[] = {
        {"n_layers", header->n_layers, n_layers},
        {"n_experts", header->n_experts, own->n_experts},
        {"top_k", header->top_k, own->top_k},
        {"vocabulary", header->vocabulary, own->vocabulary},
        {"file_bytes", header->file_bytes, real_bytes},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value != fields[i].expected)
            return fail(error, COLIBRI_E_FORMAT, "%s: expected %" PRIu64 ", got %" PRIu64, fields[i].name, fields[i].expected, fields[i].value);
    uint64_t expected = chosen_offset(header) + (uint64_t)n_layers * own->vocabulary * n_words(own->n_experts) * sizeof(uint64_t);
    if (real_bytes != expected) return fail(error, COLIBRI_E_FORMAT, "file_bytes: expected %" PRIu64 ", got %" PRIu64, expected, real_bytes);
    return COLIBRI_OK;
}

static int check_content(const struct static_table *table, struct colibri_error error) {
    const struct table_header *header = table->header;
    size_t checked = offsetof(struct table_header, fingerprint), rest = header->n_experts % 64;
    if (colibri_checksum((const uint8_t *)header + checked, header->file_bytes - checked) != header->checksum)
        return fail(error, COLIBRI_E_CHECKSUM, "checksum: the table is damaged; calibrate again");
    for (size_t i = 0; i < (size_t)header->n_layers * header->n_experts; i++)
        if (!(table->frequencies[i] >= 0 && table->frequencies[i] <= 1)) return fail(error, COLIBRI_E_FORMAT, "frequencies: number %zu is not in 0..1", i);
    for (size_t i = 0; i < (size_t)header->n_layers * header->vocabulary; i++) {
        const uint64_t *words = table->chosen + i * table->n_words;
        unsigned n = 0;
        for (size_t word = 0; word < table->n_words; word++) n += (unsigned)__builtin_popcountll(words[word]);
        if (n != header->top_k || (rest && words[table->n_words - 1] >> rest))
            return fail(error, COLIBRI_E_FORMAT, "chosen: entry %zu does not name %" PRIu32 " of %" PRIu32 " experts", i, header->top_k, header->n_experts);
    }
    return COLIBRI_OK;
}

static int map_table(struct static_table *table, const struct colibri_model *model, const char *path, int *fd, struct colibri_error error) {
    uint64_t real_bytes = 0;
    int code = colibri_open_file(path, fd, &real_bytes, error);
    if (code) return code;
    struct table_header header = {0};
    if (pread(*fd, &header, sizeof header, 0) < 0) return fail(error, COLIBRI_E_IO, "%s", strerror(errno));
    if ((code = check_header(&header, model, real_bytes, error))) return code;
    void *map = mmap(NULL, real_bytes, PROT_READ, MAP_PRIVATE, *fd, 0);
    if (map == MAP_FAILED) return fail(error, COLIBRI_E_NOMEM, "mapping %" PRIu64 " bytes: %s", real_bytes, strerror(errno));
    table->header = map;
    table->frequencies = (const float *)(const void *)((const uint8_t *)map + sizeof header);
    table->chosen = (const uint64_t *)(const void *)((const uint8_t *)map + chosen_offset(&header));
    table->n_words = n_words(header.n_experts);
    return check_content(table, error);
}

int colibri_table_open(struct static_table *table, const struct colibri_model *model, const char *path, struct colibri_error error) {
    char text[COLIBRI_ERROR_BYTES] = "";
    int fd = -1, code = map_table(table, model, path, &fd, (struct colibri_error){text, sizeof text});
    if (fd >= 0) close(fd);
    if (code == COLIBRI_OK) return code;
    colibri_table_close(table);
    return fail(error, code, "%s: %s", path, text);
}

void colibri_table_close(struct static_table *table) {
    if (table->header) munmap((void *)(uintptr_t)table->header, table->header->file_bytes);
    *table = (struct static_table){0};
}
