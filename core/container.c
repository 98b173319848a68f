/* container.c: maps a `.colibri` file and checks header and directory. Owns the mapping; knows no tensor names. */
#include "container.h"

#include <string.h>

static const uint8_t ZEROS[64] = {0}; /* what reserved bytes are */
static uint32_t load_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t load_u64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* CRC-32 (polynomial 0xEDB88320 reflected, as in zlib). */
static uint32_t crc32_update(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    crc = ~crc;
    for (uint64_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
    }
    return ~crc;
}

enum { /* byte offsets of docs/FORMAT.md §1 */
    HEADER_BYTES = 64,
    AT_ENDIAN = 8,
    AT_VERSION = 12,
    AT_FILE_BYTES = 16,
    AT_CONFIG_BYTES = 24,
    AT_DIRECTORY = 32,
    AT_ENTRIES = 40,
    AT_CRC = 44
};

static int32_t check_identity(const char *path, const struct os_file *file, colibri_error *error) {
    const uint8_t *const head = file->data;
    FAIL_IF(file->bytes < HEADER_BYTES || memcmp(head, "COLIBRI\0", 8) != 0, error, FORMAT,
            "'%s' is not a .colibri file (magic not found); make one with: colibri convert SOURCE OUT.colibri", path);
    FAIL_IF(load_u32(head + AT_ENDIAN) != 0x01020304, error, UNSUPPORTED, "'%s' was written for the other byte order", path);
    FAIL_IF(load_u32(head + AT_VERSION) != CONTAINER_VERSION, error, UNSUPPORTED,
            "'%s' has layout version %u, this library reads %d; convert the model again", path, load_u32(head + AT_VERSION),
            CONTAINER_VERSION);
    FAIL_IF(load_u64(head + AT_FILE_BYTES) != file->bytes, error, FORMAT,
            "'%s' looks incomplete: its header says %llu bytes, the file has %llu; copy or convert it again", path,
            (unsigned long long)load_u64(head + AT_FILE_BYTES), (unsigned long long)file->bytes);
    return COLIBRI_OK;
}

static int32_t check_metadata(const char *path, struct container *container, colibri_error *error) {
    const uint8_t *const head = container->file.data;
    const uint64_t bytes = container->file.bytes, config_bytes = load_u64(head + AT_CONFIG_BYTES);
    const uint64_t directory = load_u64(head + AT_DIRECTORY);
    const uint32_t n_entries = load_u32(head + AT_ENTRIES);
    FAIL_IF(config_bytes > bytes - HEADER_BYTES || directory != HEADER_BYTES + ((config_bytes + 63) & ~(uint64_t)63) ||
            directory > bytes || n_entries > (bytes - directory) / CONTAINER_ENTRY_BYTES ||
            memcmp(head + AT_CRC + 4, ZEROS, 16) != 0 || memcmp(head + HEADER_BYTES + config_bytes, ZEROS, -config_bytes & 63) != 0, error,
            FORMAT, "'%s': config or directory lie outside the file or reserved bytes are not 0; it is damaged, convert it again", path);
    const uint64_t end = directory + (uint64_t)n_entries * CONTAINER_ENTRY_BYTES;
    uint32_t crc = crc32_update(0, head, AT_CRC);
    crc = crc32_update(crc, ZEROS, 4);
    crc = crc32_update(crc, head + AT_CRC + 4, end - AT_CRC - 4);
    FAIL_IF(crc != load_u32(head + AT_CRC), error, FORMAT,
            "'%s': checksum of header and directory is %08x, expected %08x; the file is damaged, convert it again", path,
            crc, load_u32(head + AT_CRC));
    container->config = head + HEADER_BYTES;
    container->config_bytes = config_bytes;
    container->directory = head + directory;
    container->n_entries = n_entries;
    return COLIBRI_OK;
}

int32_t container_open(const char *path, struct container *container, colibri_error *error) {
    TRY(os_map_file(path, &container->file, error));
    int32_t status = check_identity(path, &container->file, error);
    if (status == COLIBRI_OK) status = check_metadata(path, container, error);
    if (status != COLIBRI_OK) container_close(container);
    return status;
}

void container_close(struct container *container) {
    os_unmap_file(&container->file);
}

int32_t container_entry(const struct container *container, uint32_t index, uint64_t previous_end,
                        struct container_entry *entry, colibri_error *error) {
    const uint8_t *const at = container->directory + (uint64_t)index * CONTAINER_ENTRY_BYTES;
    memcpy(entry->name, at, CONTAINER_NAME_BYTES);
    entry->offset = load_u64(at + 64);
    entry->bytes = load_u64(at + 72);
    entry->rows = load_u32(at + 80);
    entry->cols = load_u32(at + 84);
    entry->kind = at[88];
    memcpy(entry->types, at + 89, 3);
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
