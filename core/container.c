/* container.c: maps a `.colibri` file and checks header and directory. Owns the mapping; knows no tensor names. */
#include "container.h"

#include <string.h>

static const uint8_t ZEROS[64] = {0}; /* what reserved bytes are */

/* CRC-32 (polynomial 0xEDB88320 reflected, as in zlib). */
static uint32_t crc32_update(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    crc = ~crc;
    for (uint64_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
    }
    return ~crc;
}

struct header { /* docs/FORMAT.md §1, as it lies in the file */
    char magic[8];
    uint32_t endian, version;
    uint64_t file_bytes, config_bytes, directory;
    uint32_t n_entries, crc;
    uint8_t zeros[16];
};

static int32_t check_identity(const char *path, const struct os_file *file, colibri_error *error) {
    const struct header *const head = (const void *)file->data;
    FAIL_IF(file->bytes < sizeof *head || memcmp(head->magic, "COLIBRI\0", 8) != 0, error, FORMAT,
            "'%s' is not a .colibri file (magic not found); make one with: colibri convert SOURCE OUT.colibri", path);
    FAIL_IF(head->endian != 0x01020304, error, UNSUPPORTED, "'%s' was written for the other byte order", path);
    FAIL_IF(head->version != CONTAINER_VERSION, error, UNSUPPORTED,
            "'%s' has layout version %u, this library reads %d; convert the model again", path, head->version, CONTAINER_VERSION);
    FAIL_IF(head->file_bytes != file->bytes, error, FORMAT,
            "'%s' looks incomplete: its header says %llu bytes, the file has %llu; copy or convert it again", path,
            (unsigned long long)head->file_bytes, (unsigned long long)file->bytes);
    return COLIBRI_OK;
}

static int32_t check_metadata(const char *path, struct container *container, colibri_error *error) {
    const uint8_t *const data = container->file.data;
    const struct header *const head = (const void *)data;
    const uint64_t bytes = container->file.bytes, config_bytes = head->config_bytes, directory = head->directory;
    FAIL_IF(config_bytes > bytes - sizeof *head || directory != sizeof *head + ((config_bytes + 63) & ~(uint64_t)63) ||
            directory > bytes || head->n_entries > (bytes - directory) / CONTAINER_ENTRY_BYTES ||
            memcmp(head->zeros, ZEROS, sizeof head->zeros) != 0 || memcmp(data + sizeof *head + config_bytes, ZEROS, -config_bytes & 63) != 0, error,
            FORMAT, "'%s': config or directory lie outside the file or reserved bytes are not 0; it is damaged, convert it again", path);
    const uint64_t end = directory + (uint64_t)head->n_entries * CONTAINER_ENTRY_BYTES;
    uint32_t crc = crc32_update(0, data, offsetof(struct header, crc));
    crc = crc32_update(crc, ZEROS, sizeof head->crc);
    crc = crc32_update(crc, head->zeros, end - offsetof(struct header, zeros));
    FAIL_IF(crc != head->crc, error, FORMAT,
            "'%s': checksum of header and directory is %08x, expected %08x; the file is damaged, convert it again", path,
            crc, head->crc);
    container->config = data + sizeof *head;
    container->config_bytes = config_bytes;
    container->directory = data + directory;
    container->n_entries = head->n_entries;
    return COLIBRI_OK;
}

int32_t container_open(const char *path, struct container *container, colibri_error *error) {
    TRY(os_map_file(path, &container->file, error));
    int32_t status = check_identity(path, &container->file, error);
    if (status == COLIBRI_OK) status = check_metadata(path, container, error);
    if (status != COLIBRI_OK) os_unmap_file(&container->file);
    return status;
}

int32_t container_entry(const struct container *container, uint32_t index, uint64_t previous_end,
                        struct container_entry *entry, colibri_error *error) {
    const uint8_t *const at = container->directory + (uint64_t)index * CONTAINER_ENTRY_BYTES;
    memcpy(entry, at, offsetof(struct container_entry, data));
    const size_t length = strlen(at[63] == 0 ? entry->name : ""), types = entry->kind == KIND_EXPERT ? 3 : entry->kind != KIND_BLOB;
    FAIL_IF(at[63] != 0 || memcmp(at + length, ZEROS, 64 - length) != 0 || memcmp(at + 89 + types, ZEROS, 3 - types) != 0 ||
            memcmp(at + 96, ZEROS, 32) != 0, error, FORMAT,
            "directory entry %u: its name does not end or reserved bytes are not 0; the file is damaged, convert it again", index);
    const uint64_t alignment = entry->kind == KIND_EXPERT ? OS_PAGE : 64, bytes = container->file.bytes;
    FAIL_IF(entry->offset < previous_end || entry->offset % alignment != 0 || entry->offset > bytes ||
            entry->bytes > bytes - entry->offset, error, FORMAT,
            "'%s': bytes %llu + %llu overlap another entry, are not aligned to %llu or leave the file (%llu bytes); the "
            "file is damaged, convert it again", entry->name, (unsigned long long)entry->offset,
            (unsigned long long)entry->bytes, (unsigned long long)alignment, (unsigned long long)bytes);
    entry->data = container->file.data + entry->offset;
    return COLIBRI_OK;
}
