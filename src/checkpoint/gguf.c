/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "checkpoint/gguf.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

static const char magic[4] = {'G', 'G', 'U', 'F'};

static const char architecture_key[] = "general.architecture";
static const char alignment_key[] = "general.alignment";

/* What an entry takes at least: bounds the counts of the header before anything is allocated. */
enum { PAIR_BYTES_MIN = 8 + 1 + 4 + 1, TENSOR_BYTES_MIN = 8 + 1 + 4 + 4 + 8 };

/* The magic number, the version, how many tensors and how many keys. */
enum { HEADER_BYTES = 4 + 4 + 8 + 8 };

/* ---- Types of tensors ---- */

/* A row is cut into blocks of `elements`, each of `bytes`. */
typedef struct tensor_type {
    mm_dtype dtype;
    uint32_t id, elements, bytes;
} tensor_type;

#define PLAIN(id, name, bytes)                                                                     \
    { {name, 8 * (bytes)}, id, 1, bytes }
#define BLOCKS(id, name, elements, bytes)                                                          \
    { {name, 0}, id, elements, bytes }

/* The numbers that are missing were withdrawn. MXFP4 and NVFP4 lead, for what points to them. */
static const tensor_type tensor_types[] = {
    BLOCKS(39, "MXFP4", 32, 17),
    BLOCKS(40, "NVFP4", 64, 36),
    PLAIN(0, "F32", 4),
    PLAIN(1, "F16", 2),
    BLOCKS(2, "Q4_0", 32, 18),
    BLOCKS(3, "Q4_1", 32, 20),
    BLOCKS(6, "Q5_0", 32, 22),
    BLOCKS(7, "Q5_1", 32, 24),
    BLOCKS(8, "Q8_0", 32, 34),
    BLOCKS(9, "Q8_1", 32, 36),
    BLOCKS(10, "Q2_K", 256, 84),
    BLOCKS(11, "Q3_K", 256, 110),
    BLOCKS(12, "Q4_K", 256, 144),
    BLOCKS(13, "Q5_K", 256, 176),
    BLOCKS(14, "Q6_K", 256, 210),
    BLOCKS(15, "Q8_K", 256, 292),
    BLOCKS(16, "IQ2_XXS", 256, 66),
    BLOCKS(17, "IQ2_XS", 256, 74),
    BLOCKS(18, "IQ3_XXS", 256, 98),
    BLOCKS(19, "IQ1_S", 256, 50),
    BLOCKS(20, "IQ4_NL", 32, 18),
    BLOCKS(21, "IQ3_S", 256, 110),
    BLOCKS(22, "IQ2_S", 256, 82),
    BLOCKS(23, "IQ4_XS", 256, 136),
    PLAIN(24, "I8", 1),
    PLAIN(25, "I16", 2),
    PLAIN(26, "I32", 4),
    PLAIN(27, "I64", 8),
    PLAIN(28, "F64", 8),
    BLOCKS(29, "IQ1_M", 256, 56),
    PLAIN(30, "BF16", 2),
    BLOCKS(34, "TQ1_0", 256, 54),
    BLOCKS(35, "TQ2_0", 256, 66),
    BLOCKS(41, "Q1_0", 128, 18),
    BLOCKS(42, "Q2_0", 64, 18),
};

const mm_dtype *const mm_gguf_mxfp4 = &tensor_types[0].dtype;
const mm_dtype *const mm_gguf_nvfp4 = &tensor_types[1].dtype;

static const tensor_type *find_tensor_type(uint32_t id) {
    for (size_t i = 0; i < sizeof tensor_types / sizeof *tensor_types; i++)
        if (tensor_types[i].id == id)
            return &tensor_types[i];
    return NULL;
}

/* ---- Types of values ---- */

enum {
    VALUE_U8,
    VALUE_I8,
    VALUE_U16,
    VALUE_I16,
    VALUE_U32,
    VALUE_I32,
    VALUE_F32,
    VALUE_BOOL,
    VALUE_STRING,
    VALUE_ARRAY,
    VALUE_U64,
    VALUE_I64,
    VALUE_F64,
    VALUE_TYPES
};

/* 0: strings and arrays, whose sizes stand in the file. */
static const uint8_t value_bytes[VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* ---- Reading ---- */

/*
 * A file being read, from the start to the end of its header. What is taken lies in a window of the
 * file, which moves on with it, or in a file that is in memory.
 */
typedef struct cursor {
    const char *path;
    const mm_file *file; /* NULL: all of it is in `data` */
    uint8_t *window;     /* [WINDOW_BYTES] */
    const uint8_t *data; /* the bytes first..first + held - 1 */
    uint64_t first, held;
    uint64_t bytes, at;
    const char *part; /* of the header, for messages: the number'th of its kind */
    uint64_t number;
} cursor;

/* Room for the longest that is taken at once: a key, or a list that is kept. */
enum { WINDOW_BYTES = 1 << 16 };
_Static_assert((int)MM_GGUF_KEY_MAX <= (int)WINDOW_BYTES &&
                   8 * (int)MM_GGUF_LIST_KEPT <= (int)WINDOW_BYTES,
               "what is taken fits into the window");

static uint64_t left(const cursor *c) {
    return c->bytes - c->at;
}

static megamoe_status skip(cursor *c, uint64_t bytes) {
    if (bytes > left(c))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s %" PRIu64 ": needs %" PRIu64 " bytes at %" PRIu64
                       ", but the file ends at %" PRIu64 " (is the download complete?)",
                       c->path, c->part, c->number, bytes, c->at, c->bytes);
    c->at += bytes;
    return MEGAMOE_OK;
}

/* At most WINDOW_BYTES, which stay until the next are taken. */
static megamoe_status take(cursor *c, uint64_t bytes, const uint8_t **taken) {
    const uint64_t from = c->at;
    *taken = NULL;
    MM_TRY(skip(c, bytes));
    if (c->file && (from < c->first || c->at > c->first + c->held)) {
        c->first = from;
        c->held = (uint64_t)mm_min((int64_t)(c->bytes - from), WINDOW_BYTES);
        MM_TRY(mm_file_read(c->file, from, c->window, c->held));
    }
    *taken = c->data + (from - c->first);
    return MEGAMOE_OK;
}

static uint64_t little_endian(const uint8_t *data, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = bytes; i-- > 0;)
        value = value << 8 | data[i];
    return value;
}

static megamoe_status take_number(cursor *c, size_t bytes, uint64_t *value) {
    const uint8_t *taken;
    *value = 0;
    MM_TRY(take(c, bytes, &taken));
    *value = little_endian(taken, bytes);
    return MEGAMOE_OK;
}

/* A string: its length, then its bytes, which no NUL ends. */
static megamoe_status skip_string(cursor *c) {
    uint64_t bytes;
    MM_TRY(take_number(c, 8, &bytes));
    return skip(c, bytes);
}

/* A key or a name: what can stand in a message, and compares as a C string does. */
static megamoe_status take_name(cursor *c, const char **text, uint64_t *bytes) {
    const uint8_t *taken;
    *text = "";
    MM_TRY(take_number(c, 8, bytes));
    if (*bytes > MM_GGUF_KEY_MAX && *bytes <= left(c))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s %" PRIu64 ": its name has %" PRIu64 " bytes; at most %d are read",
                       c->path, c->part, c->number, *bytes, MM_GGUF_KEY_MAX);
    MM_TRY(take(c, *bytes, &taken));
    *text = (const char *)taken;
    bool plain = *bytes > 0;
    for (uint64_t i = 0; i < *bytes; i++)
        plain = plain && (*text)[i] >= 0x20 && (*text)[i] <= 0x7E;
    if (plain)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s %" PRIu64 ": its name must be printable ASCII, not %s",
                   c->path, c->part, c->number, *bytes ? "other bytes" : "empty");
}

/* ---- Metadata ---- */

/* NULL: out of memory. */
static json_t *real_of(double value) {
    return isfinite(value) ? json_real(value) : json_string(isnan(value) ? "NaN" : "infinite");
}

static json_t *signed_of(const uint8_t *data, size_t bytes) {
    const unsigned unused = 64 - 8 * (unsigned)bytes;
    return json_integer((json_int_t)(little_endian(data, bytes) << unused) >> unused);
}

/* A value of fixed size; NULL: out of memory. */
static json_t *scalar_of(uint64_t type, const uint8_t *data) {
    const uint64_t bits = little_endian(data, value_bytes[type]);
    switch (type) {
    case VALUE_BOOL:
        return json_boolean(bits != 0);
    case VALUE_F32: {
        const uint32_t word = (uint32_t)bits;
        float value;
        memcpy(&value, &word, sizeof value);
        return real_of((double)value);
    }
    case VALUE_F64: {
        double value;
        memcpy(&value, &bits, sizeof value);
        return real_of(value);
    }
    case VALUE_I8:
    case VALUE_I16:
    case VALUE_I32:
    case VALUE_I64:
        return signed_of(data, value_bytes[type]);
    default:
        return bits <= INT64_MAX ? json_integer((json_int_t)bits) : json_real((double)bits);
    }
}

static megamoe_status out_of_memory(const cursor *c) {
    return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for its header", c->path);
}

static megamoe_status skip_strings(cursor *c, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        MM_TRY(skip_string(c));
    return MEGAMOE_OK;
}

static megamoe_status take_array(cursor *c, const char *key, json_t **value) {
    uint64_t type, n;
    MM_TRY(take_number(c, 4, &type));
    MM_TRY(take_number(c, 8, &n));
    if (type >= VALUE_TYPES || type == VALUE_ARRAY)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: an array of type %" PRIu64
                       "; its elements must be of a type from 0 to %d, and no arrays",
                       c->path, key, type, VALUE_TYPES - 1);
    if (type == VALUE_STRING)
        return skip_strings(c, n);
    uint64_t bytes;
    const uint8_t *data;
    if (__builtin_mul_overflow(n, (uint64_t)value_bytes[type], &bytes))
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: an array of %" PRIu64 " elements exceeds the file",
                       c->path, key, n);
    if (n > MM_GGUF_LIST_KEPT)
        return skip(c, bytes);
    MM_TRY(take(c, bytes, &data));
    *value = json_array();
    for (uint64_t i = 0; i < n; i++)
        if (json_array_append_new(*value, scalar_of(type, data + i * value_bytes[type])) != 0)
            return out_of_memory(c);
    return *value ? MEGAMOE_OK : out_of_memory(c);
}

/* Leaves *value NULL for what is not kept. */
static megamoe_status take_value(cursor *c, const char *key, json_t **value) {
    uint64_t type;
    MM_TRY(take_number(c, 4, &type));
    if (type >= VALUE_TYPES)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: type %" PRIu64 " is none of 0..%d", c->path, key,
                       type, VALUE_TYPES - 1);
    if (strcmp(key, alignment_key) == 0 && type != VALUE_U32)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s must be an unsigned 32-bit integer (type %d)",
                       c->path, key, VALUE_U32);
    if (type == VALUE_ARRAY)
        return take_array(c, key, value);
    if (type == VALUE_STRING) {
        if (strcmp(key, architecture_key) != 0)
            return skip_strings(c, 1);
        const char *text;
        uint64_t bytes;
        MM_TRY(take_name(c, &text, &bytes));
        *value = json_stringn(text, bytes);
    } else {
        const uint8_t *data;
        MM_TRY(take(c, value_bytes[type], &data));
        *value = scalar_of(type, data);
    }
    return *value ? MEGAMOE_OK : out_of_memory(c);
}

static megamoe_status take_pair(cursor *c, json_t *metadata) {
    const char *name;
    uint64_t bytes;
    MM_TRY(take_name(c, &name, &bytes));
    char *key = strndup(name, bytes);
    if (!key)
        return out_of_memory(c);
    megamoe_status status = MEGAMOE_OK;
    json_t *value = NULL;
    if (json_object_get(metadata, key))
        status = mm_fail(MEGAMOE_EFORMAT, "%s: %s: the key stands there twice", c->path, key);
    else
        status = take_value(c, key, &value);
    if (status != MEGAMOE_OK)
        json_decref(value);
    else if (json_object_set_new(metadata, key, value ? value : json_null()) != 0)
        status = out_of_memory(c);
    free(key);
    return status;
}

static megamoe_status read_alignment(const cursor *c, const json_t *metadata, uint64_t *alignment) {
    const json_t *stated = json_object_get(metadata, alignment_key);
    *alignment = stated ? (uint64_t)json_integer_value(stated) : MM_GGUF_ALIGNMENT;
    if (*alignment != 0 && (*alignment & (*alignment - 1)) == 0)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s is %" PRIu64 "; it must be a power of two", c->path,
                   alignment_key, *alignment);
}

/* ---- Tensors ---- */

/* Reads dimensions, of which the first varies fastest, into a shape, of which the last does. */
static megamoe_status take_shape(cursor *c, mm_tensor *tensor) {
    uint64_t rank;
    MM_TRY(take_number(c, 4, &rank));
    if (rank > MM_GGUF_RANK_MAX)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: it has %" PRIu64 " dimensions; at most %d are read", c->path,
                       tensor->name, rank, MM_GGUF_RANK_MAX);
    tensor->rank = (int32_t)rank;
    for (uint64_t i = 0; i < rank; i++) {
        uint64_t size;
        MM_TRY(take_number(c, 8, &size));
        if (size > INT64_MAX)
            return mm_fail(MEGAMOE_EFORMAT, "%s: %s: dimension %" PRIu64 " is negative", c->path,
                           tensor->name, i);
        tensor->shape[rank - 1 - i] = (int64_t)size;
    }
    return MEGAMOE_OK;
}

static megamoe_status take_type(cursor *c, mm_tensor *tensor) {
    uint64_t id;
    MM_TRY(take_number(c, 4, &id));
    const tensor_type *type = find_tensor_type((uint32_t)id);
    if (!type)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: its type is %" PRIu64
                       ", which is none that is known; without its size nothing behind it is found",
                       c->path, tensor->name, id);
    tensor->dtype = &type->dtype;
    const int64_t row = tensor->rank ? tensor->shape[tensor->rank - 1] : 1;
    char shape[MM_SHAPE_TEXT];
    mm_shape_text(tensor->shape, tensor->rank, shape);
    if (row % type->elements != 0)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: a row of its shape %s has %" PRId64
                       " elements; %s comes in blocks of %" PRIu32,
                       c->path, tensor->name, shape, row, type->dtype.name, type->elements);
    uint64_t elements = 1, bytes;
    bool overflow = false;
    for (int32_t i = 0; i < tensor->rank; i++)
        overflow |= __builtin_mul_overflow(elements, (uint64_t)tensor->shape[i], &elements);
    overflow |= __builtin_mul_overflow(elements / type->elements, (uint64_t)type->bytes, &bytes);
    if (overflow || elements > INT64_MAX)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: shape %s in %s overflows 2^63 elements", c->path,
                       tensor->name, shape, type->dtype.name);
    tensor->bytes = bytes;
    return MEGAMOE_OK;
}

/* Fills all but the data. *name_room moves behind the copy of its name. */
static megamoe_status take_tensor(cursor *c, mm_tensor *tensor, char **name_room,
                                  uint64_t *offset) {
    const char *name;
    uint64_t bytes;
    MM_TRY(take_name(c, &name, &bytes));
    if (bytes > MM_GGUF_NAME_MAX)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s %" PRIu64 ": its name has %" PRIu64 " bytes; at most %d are read",
                       c->path, c->part, c->number, bytes, MM_GGUF_NAME_MAX);
    tensor->name = *name_room;
    *name_room = (char *)mempcpy(*name_room, name, bytes) + 1;
    MM_TRY(take_shape(c, tensor));
    MM_TRY(take_type(c, tensor));
    return take_number(c, 8, offset);
}

static uint64_t padding(uint64_t at, uint64_t alignment) {
    return (alignment - at % alignment) % alignment;
}

/*
 * Tensors lie in the order of their entries, each at the next multiple of the alignment: the offset
 * of each follows from the sizes of those before it.
 */
static megamoe_status place(const cursor *c, uint64_t alignment, const uint64_t *offsets,
                            mm_tensor_file *file) {
    const uint64_t start = c->at + padding(c->at, alignment);
    if (file->n && start > c->bytes)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: its header ends at %" PRIu64 " and its data begin at %" PRIu64
                       ", but the file ends at %" PRIu64 " (is the download complete?)",
                       c->path, c->at, start, c->bytes);
    uint64_t end = 0;
    for (size_t i = 0; i < file->n; i++) {
        mm_tensor *tensor = &file->tensors[i];
        const uint64_t room = c->bytes - start;
        const uint64_t begin = end + padding(end, alignment);
        if (offsets[i] != begin)
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: its offset is %" PRIu64 "; behind the tensor before it, in "
                           "steps of %" PRIu64 ", it must be %" PRIu64,
                           c->path, tensor->name, offsets[i], alignment, begin);
        if (begin > room || tensor->bytes > room - begin)
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: its %" PRIu64 " bytes at offset %" PRIu64
                           " reach past the end of the file, which holds %" PRIu64
                           " bytes of data (is the download complete?)",
                           c->path, tensor->name, tensor->bytes, begin, room);
        tensor->offset = start + begin;
        end = begin + tensor->bytes;
    }
    const uint64_t used = file->n ? start + end : c->at;
    if (c->bytes - used > padding(used, alignment))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %" PRIu64 " bytes follow the last tensor, which ends at %" PRIu64
                       "; the file was appended to: write it again without them",
                       c->path, c->bytes - used, used);
    return MEGAMOE_OK;
}

static megamoe_status read_tensors(cursor *c, uint64_t n, uint64_t alignment,
                                   mm_tensor_file *file) {
    uint64_t *offsets = calloc(n ? n : 1, sizeof *offsets);
    file->tensors = calloc(n ? n : 1, sizeof *file->tensors);
    file->names = calloc(n ? n : 1, MM_GGUF_NAME_MAX + 1);
    megamoe_status status = MEGAMOE_OK;
    if (!offsets || !file->tensors || !file->names) {
        status = out_of_memory(c);
        goto end;
    }
    char *name_room = file->names;
    c->part = "tensor";
    for (c->number = 0; c->number < n; c->number++) {
        mm_tensor *tensor = &file->tensors[c->number];
        tensor->file = file;
        MM_TRY_GOTO(take_tensor(c, tensor, &name_room, &offsets[c->number]), end);
    }
    file->n = n;
    status = place(c, alignment, offsets, file);
end:
    free(offsets);
    return status;
}

/* ---- Files ---- */

bool mm_gguf_is(const uint8_t *data, size_t bytes) {
    return bytes >= sizeof magic && memcmp(data, magic, sizeof magic) == 0;
}

static megamoe_status take_header(cursor *c, uint64_t *tensors, uint64_t *pairs) {
    const uint8_t *start = NULL;
    if (c->bytes >= HEADER_BYTES)
        MM_TRY(take(c, sizeof magic, &start));
    if (!start || !mm_gguf_is(start, sizeof magic))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: a GGUF file starts with \"GGUF\" and a header of %d bytes", c->path,
                       HEADER_BYTES);
    uint64_t version;
    MM_TRY(take_number(c, 4, &version));
    if (version != MM_GGUF_VERSION)
        return mm_fail(
            MEGAMOE_EUNSUPPORTED, "%s: GGUF version %" PRIu64 "%s; %d is read", c->path, version,
            (version & 0xFFFF) == 0 ? ", written with the high bytes first" : "", MM_GGUF_VERSION);
    MM_TRY(take_number(c, 8, tensors));
    MM_TRY(take_number(c, 8, pairs));
    if (*pairs > left(c) / PAIR_BYTES_MIN || *tensors > left(c) / TENSOR_BYTES_MIN)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: announces %" PRIu64 " tensors and %" PRIu64
                       " keys, more than its %" PRIu64 " bytes hold",
                       c->path, *tensors, *pairs, c->bytes);
    return MEGAMOE_OK;
}

static megamoe_status read_file(cursor *c, mm_tensor_file *file, json_t *metadata) {
    uint64_t tensors = 0, pairs = 0, alignment = 0;
    MM_TRY(take_header(c, &tensors, &pairs));
    c->part = "key";
    for (c->number = 0; c->number < pairs; c->number++)
        MM_TRY(take_pair(c, metadata));
    MM_TRY(read_alignment(c, metadata, &alignment));
    return read_tensors(c, tensors, alignment, file);
}

/* Of a cursor at the start; fills all of `file` but its source, which is open already. */
static megamoe_status read_all(cursor *c, mm_tensor_file *file, json_t **metadata) {
    file->path = strdup(c->path);
    *metadata = json_object();
    const megamoe_status status =
        file->path && *metadata ? read_file(c, file, *metadata) : out_of_memory(c);
    if (status != MEGAMOE_OK) {
        json_decref(*metadata);
        *metadata = NULL;
    }
    return status;
}

megamoe_status mm_gguf_parse(const char *path, const uint8_t *data, size_t bytes,
                             mm_tensor_file *file, json_t **metadata) {
    *file = (mm_tensor_file){0};
    return read_all(&(cursor){.path = path, .data = data, .held = bytes, .bytes = bytes}, file,
                    metadata);
}

megamoe_status mm_gguf_open(const char *path, mm_tensor_file *file, json_t **metadata) {
    *file = (mm_tensor_file){0};
    *metadata = NULL;
    MM_TRY(mm_file_open(path, &file->source));
    cursor c = {.path = path, .file = &file->source, .bytes = file->source.bytes};
    c.window = malloc(WINDOW_BYTES);
    if (!c.window)
        return out_of_memory(&c);
    c.data = c.window;
    const megamoe_status status = read_all(&c, file, metadata);
    free(c.window);
    return status;
}
